"""Whole models in our kernels against the same models in torch's operations: loss and every gradient."""

import functools

import pytest
import torch

pytest.importorskip("triton")

from flatout.config.schema import ModelConfig
from flatout.model.execution import Execution
from flatout.model.gpt import build_model
from flatout.ops.reference import IGNORED
from tests.parity.checking import DEVICES, assert_near

pytestmark = [
    pytest.mark.usefixtures("guarded_memory"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.parametrize("device", DEVICES),
]

VOCAB, CONTEXT = 29, 6


def run(device: str, execution: Execution, *, bf16: bool = False, length: int = CONTEXT, **model):
    """(loss, gradients by name) of one batch with fixed weights, tokens and targets."""
    config = ModelConfig(**{"layers": 2, "width": 24, "heads": 4, "context": CONTEXT, "dropout": 0.0, **model})
    built = build_model(config, VOCAB, seed=3, execution=execution).to(device)
    with torch.no_grad():  # biases and norms that start as zeros and ones would hide mistakes
        for name, parameter in built.named_parameters():
            if parameter.ndim == 1:
                generator = torch.Generator().manual_seed(len(name))
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(device)
    tokens = torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(1)).to(device)
    targets = torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(2)).to(device)
    targets[1, 2:5] = IGNORED
    with torch.autocast(device, dtype=torch.bfloat16, enabled=bf16):
        loss = built(tokens, targets)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in built.named_parameters()}


def same(mine, theirs, dtype, slack=1.0):
    assert mine[0].item() == pytest.approx(theirs[0].item(), rel=2e-6 if dtype == torch.float32 else 1e-2)
    assert mine[1].keys() == theirs[1].keys()
    for name, gradient in mine[1].items():
        assert gradient is not None, name
        assert gradient.dtype == torch.float32
        assert_near(gradient, theirs[1][name], dtype, name, slack)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("model", "how"),
    [
        ({"family": "gpt2"}, {"loss": "fused", "loss_chunk": 7, "pad_vocab": 8}),
        ({"family": "gpt2", "layers": 1}, {"checkpointing": "selective", "loss": "plain"}),
        ({"family": "gpt2"}, {"checkpointing": "full", "loss": "chunked", "loss_chunk": 7}),
        ({"family": "gpt", "kv_heads": 2}, {"loss": "fused", "pad_vocab": 64}),
        ({"family": "gpt", "tied": False, "bias": True, "layers": 1}, {"checkpointing": "full", "loss": "fused"}),
        (
            {"family": "gpt", "kv_heads": 1, "mlp": "relu2", "layers": 1},
            {"checkpointing": "selective", "loss": "fused"},
        ),
        ({"family": "gpt", "mlp": "gelu", "qk_norm": False, "layers": 1}, {"attention": "reference"}),
        (
            {"family": "gpt", "head_size": 10, "kv_heads": 2, "qkv_bias": True, "norm_eps": 1e-2, "layers": 1},
            {"checkpointing": "full", "loss": "fused"},
        ),
        (
            {"family": "gpt", "head_size": 4, "bias": True, "qkv_bias": False, "qk_norm": False, "norm_eps": 0.1}
            | {"rope_scaling": "llama3", "rope_original_context": 8, "layers": 1},
            {"loss": "fused"},
        ),
    ],
    ids=str,
)
def test_kernels_change_nothing(model, how, device):
    mine = run(device, Execution(kernels="triton", **how), **model)
    theirs = run(device, Execution(attention="reference"), **model)
    same(mine, theirs, torch.float32, slack=10.0)


def test_kernels_on_a_short_sequence(device):
    how = Execution(kernels="triton", loss="fused")
    same(
        run(device, how, length=3, family="gpt", layers=1),
        run(device, Execution(), length=3, family="gpt", layers=1),
        torch.float32,
        10.0,
    )


@pytest.mark.parametrize(("family", "residual"), [("gpt2", "fp32"), ("gpt", "bf16")])
def test_kernels_in_bf16_stay_as_near_to_fp32_as_torch(family, residual, device):
    """bf16 is wrong by its rounding. Ours may be wrong by little more than torch's; the interpreter does not round
    but cuts off, which doubles every error."""
    exact = run(device, Execution(), family=family)
    torch_path = run(device, Execution(), bf16=True, family=family)
    ours = run(device, Execution(kernels="triton", loss="fused", residual=residual), bf16=True, family=family)

    def error(result):
        return sum((result[1][name] - exact[1][name]).square().sum().item() for name in exact[1]) ** 0.5

    assert ours[0].item() == pytest.approx(exact[0].item(), rel=5e-3)
    allowed = (1.2 if residual == "fp32" else 1.8) * (1.0 if device == "cuda" else 2.0)
    assert error(ours) <= allowed * error(torch_path)


def test_evaluation_needs_no_gradient(device):
    config = ModelConfig(family="gpt", layers=1, width=24, heads=4, context=CONTEXT, dropout=0.0)
    tokens = torch.arange(CONTEXT, device=device)[None]
    losses = []
    for how in (Execution(), Execution(kernels="triton", loss="fused")):
        built = build_model(config, VOCAB, seed=3, execution=how).to(device).eval()
        with torch.no_grad():
            losses.append(built(tokens, tokens).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def run_with_dropout(device: str, seed: int, checkpointing: str = "none"):
    torch.manual_seed(seed)
    model = {"family": "gpt", "dropout": 0.4, "residual_scale": 0.5}
    return run(device, Execution(kernels="triton", checkpointing=checkpointing), **model)


@functools.cache
def kept_run_with_dropout(device: str, seed: int):
    return run_with_dropout(device, seed)


@pytest.mark.grid
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_dropout_comes_again_with_the_random_stream(checkpointing, device):
    """Backward and blocks that are computed again find the same masks; the next pass draws others."""
    first, other = kept_run_with_dropout(device, 5), kept_run_with_dropout(device, 6)
    same(run_with_dropout(device, 5, checkpointing), first, torch.float32)
    assert abs(other[0].item() - first[0].item()) > 1e-3


def test_dropout_is_that_of_training_alone_and_right_on_average(device):
    config = ModelConfig(family="gpt2", layers=1, width=24, heads=4, context=CONTEXT, dropout=0.2)
    tokens = torch.arange(CONTEXT, device=device).repeat(10, 1)
    built = build_model(config, VOCAB, seed=3, execution=Execution(kernels="triton")).to(device)
    plain = build_model(config, VOCAB, seed=3).to(device)
    with torch.no_grad():
        assert torch.allclose(built.eval().hidden(tokens), plain.eval().hidden(tokens), atol=1e-5)
        mine, theirs = (
            torch.stack([model.train().hidden(tokens) for _ in range(15)]).mean((0, 1)) for model in (built, plain)
        )
    assert (mine - theirs).abs().mean() < 0.1 * theirs.abs().mean()
