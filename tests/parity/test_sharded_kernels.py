"""Our kernels over slices of weights that are gathered in bf16: loss and every gradient of the whole model's.

All weights are numbers of bf16, so gathering them rounds nothing, and what is left is the order of sums.
"""

import contextlib
import functools
import warnings

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from flatout.config.schema import ModelConfig
from flatout.launch import launch
from flatout.model.execution import Execution
from flatout.model.gpt import GPT, build_model
from flatout.ops.reference import IGNORED
from flatout.parallel.ranks import Ranks, joined
from tests.bf16_products import summed_in_fp32
from tests.interpreter import replace_once
from tests.ranks import WORKERS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
VOCAB, CONTEXT = 29, 4
STREAMS = {"first_mix": True, "value_tables": 1, "head_gate": True, "bigram_rows": 19}


def built(model: dict, how: dict) -> GPT:
    config = ModelConfig(**{"layers": 1, "width": 24, "heads": 4, "context": CONTEXT, "dropout": 0.0, **model})
    made = build_model(config, VOCAB, seed=3, execution=Execution(kernels="triton", residual="bf16", **how))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim == 1:
                generator = torch.Generator().manual_seed(len(name))
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter.bfloat16())
    return made


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Two micro-batches of one process."""
    found = []
    for number in range(2):
        generator = torch.Generator().manual_seed(10 * rank + number)
        tokens, targets = torch.randint(0, VOCAB, (2, 1, CONTEXT), generator=generator)
        targets[0, 1:3] = IGNORED
        found.append((tokens, targets))
    return found


def backward(model: GPT, tokens: Tensor, targets: Tensor) -> float:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(tokens, targets)
    loss.backward()
    return float(loss.detach())


_FOR_GOOD = contextlib.ExitStack()


@functools.cache
def as_in_tests() -> None:
    """What conftest.py does for the process of the tests, once in one of the workers."""
    _FOR_GOOD.enter_context(summed_in_fp32())
    replace_once()
    warnings.simplefilter("ignore")


def sharded(model: dict, how: dict) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of two micro-batches, and slices of their gradients, in one of several processes."""
    from flatout.parallel.sharding import Sharding

    as_in_tests()
    with joined(launch(), "cpu", timeout=60) as world:
        assert isinstance(world, Ranks)
        made = built(model, {**how, "sharded": True})
        groups = [[*made.blocks], *([] if made.config.tied else [[made.embedding], [made.head]])]
        given = {"hybrid": False, "device": torch.device("cpu"), "gathered": torch.bfloat16, "entries": ("logits",)}
        sharding = Sharding(made, groups, world, **given)
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):  # sampling first spoils nothing
            made.logits(torch.zeros(1, 2, dtype=torch.int64), made.empty_cache())
        first, second = batches(world.rank)
        losses = [backward(made, *first)]
        sharding.last_micro_batch()
        losses.append(backward(made, *second))
        sharding.finish()
        return losses, {name: one.grad.clone() for name, one in sharding.parameters.items() if one.grad is not None}


@pytest.mark.parametrize(
    ("model", "how"),
    [
        pytest.param({"family": "gpt2"}, {"loss": "fused", "loss_chunk": 7, "pad_vocab": 8}, marks=pytest.mark.slow),
        pytest.param(
            {"norm": "plain-rmsnorm", "embedding_norm": True, "qk_norm": 1.2, "zero_init": True},
            {"loss": "fused"},
            marks=pytest.mark.slow,
        ),
        (
            {
                "family": "gpt",
                "tied": False,
                "bias": True,
                "kv_heads": 2,
                "residual_scale": 0.7,
                "layers": 2,
                **STREAMS,
            },
            {"checkpointing": "full", "loss": "fused"},
        ),
    ],
    ids=str,
)
def test_gathered_weights_change_nothing(model: dict, how: dict):
    whole = built(model, how)
    expected = [[backward(whole, *batch) for batch in batches(rank)] for rank in range(2)]
    found = WORKERS.run(2, sharded, model, how)
    for (losses, _), theirs in zip(found, expected, strict=True):
        assert losses == pytest.approx(theirs, rel=1e-5)
    for name, parameter in whole.named_parameters():
        own = [slices[name] for _, slices in found]
        if parameter.ndim == 1:  # every process has all of it
            assert torch.equal(own[0], own[1]), name
        gradient = own[0] if parameter.ndim == 1 else torch.cat(own)
        assert gradient.dtype == torch.float32, name
        assert parameter.grad is not None
        rounded = name == "positions.weight"  # its gradient leaves in bf16
        near = {"rtol": 2e-2 if rounded else 1e-3, "atol": 1e-2 if rounded else 1e-4}
        torch.testing.assert_close(gradient, parameter.grad, **near, msg=lambda said, name=name: f"{name}: {said}")
