"""The model, in both forms of its operations, against a naive one that shares no code with it: logits, loss and every
gradient, of every kind of model; packed documents and decoding too."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch import Tensor

from flatout.config.schema import ModelConfig
from flatout.model.execution import Execution
from flatout.model.gpt import GPT, build_model
from flatout.ops.documents import lay_out
from flatout.ops.reference import IGNORED
from tests.parity.checking import DEVICES, assert_near
from tests.parity.naive_model import naive_logits, naive_loss

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

VOCAB, CONTEXT = 23, 5
SHAPE = {"layers": 2, "width": 24, "heads": 4, "context": CONTEXT, "window": 3, "states": 8}
RECORD = {"norm": "plain-rmsnorm", "embedding_norm": True, "qk_norm": 1.2, "mlp": "relu2", "tied": False, "kv_heads": 2}
KINDS = {
    "gpt2": {"family": "gpt2"},
    "gpt": {"family": "gpt", "kv_heads": 2},
    "untied, biases": {"family": "gpt", "tied": False, "bias": True, "mlp": "relu2"},
    "layernorm without biases": {"family": "gpt", "norm": "layernorm", "mlp": "gelu", "qk_norm": False},
    "odd heads": {"family": "gpt", "head_size": 10, "kv_heads": 1, "qkv_bias": True, "norm_eps": 1e-2, "qk_norm": 0.7},
    "llama3": {"rope_scaling": "llama3", "rope_factor": 4.0, "rope_original_context": 8, "qk_norm": False},
    "linear": {"rope_scaling": "linear", "rope_factor": 3.0},
    "residual scales": {"family": "gpt", "residual_scale": 0.7, "bias": True, "norm": "layernorm"},
    "capped": {"family": "gpt", "logit_cap": 1.5, "tied": False},
    "no norm weights": {"norm": "plain-rmsnorm", "embedding_norm": True, "qk_norm": 1.3, "tied": False, "kv_heads": 2,
                        "head_size": 10, "logit_cap": 4.0},
    "learned positions": {"norm": "layernorm", "bias": True, "positions": "learned", "embedding_norm": True,
                          "mlp": "gelu"},
    "windows": {"pattern": "WA", "layers": 3, "kv_heads": 2},
    "eigenstates": {"pattern": "E", "bias": True},
    "first mix": {"first_mix": True, "bias": True, "norm": "layernorm", "pattern": "AE", "residual_scale": 0.7},
    "record": {"layers": 3, "value_tables": 1, "head_gate": True, "first_mix": True, "bigram_rows": 19, **RECORD},
    "no positions": {"pattern": "NA", "kv_heads": 2, "qk_norm": False},
    "norms after": {"norm_place": "after", "qk_norm_whole": True, "qk_norm": 1.2, "kv_heads": 2, "bias": True,
                    "residual_scale": 0.7},
    "fused": {"fused_projections": True, "rope_scaling": "longrope", "rope_factors": [1.0, 2.0, 3.5], "rope_gain": 1.2},
    "part of a head": {"rope_share": 0.75, "qk_norm": 0.7, "head_size": 8, "kv_heads": 2},
    "gemma": {"norm": "offset-rmsnorm", "norm_place": "both", "mlp": "geglu", "embedding_scale": 3.0, "kv_heads": 2,
              "score_divisor": 3, "attention_cap": 0.7, "pattern": "WA"},
    "local base": {"pattern": "WA", "rope_local_base": 50.0, "rope_scaling": "linear", "rope_factor": 3.0},
    "scaled embedding": {"embedding_scale": 3.0, "embedding_norm": True},
    "mixed": {"pattern": "EWA", "layers": 3, "positions": "learned"},
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS)
TORCH = Execution()
REFERENCE = Execution(attention="reference", document_attention="reference", scan="reference", fused_qkv=False)
KERNELS = Execution(kernels="triton", scan="triton", loss="fused", loss_chunk=4, pad_vocab=8)
FORMS = {
    "torch": TORCH,
    "reference": REFERENCE,
    "chunked": Execution(loss="chunked", loss_chunk=4, checkpointing="full"),
    "kernels": KERNELS,
    "kernels, again": dataclasses.replace(KERNELS, checkpointing="full"),
}


def built(kind: str, how: Execution, **more) -> GPT:
    config = ModelConfig(**{**SHAPE, **KINDS[kind], **more})
    model = build_model(config, VOCAB, seed=5, execution=how)
    with torch.no_grad():  # biases, norms, scales and tables that start as zeros and ones would hide mistakes
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or not parameter.any():
                generator = torch.Generator().manual_seed(len(name))
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def draw(batch: int = 2, length: int = CONTEXT) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(VOCAB, (batch, length), generator=generator) for _ in range(2))
    targets[0, 2:4] = IGNORED
    return tokens, targets


def weights_of(model: GPT) -> dict[str, Tensor]:
    return {name: x.detach().double().cpu().requires_grad_() for name, x in model.named_parameters()}


def interpreted(how: Execution, device: str) -> None:
    if how.kernels == "triton":
        pytest.importorskip("triton")
    elif device == "cuda":
        pytest.skip("torch's form is checked on the CPU")


@functools.cache
def expected_of(kind: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(loss, gradients) by the naive model, the same for all forms."""
    model, (tokens, targets) = built(kind, TORCH), draw()
    weights, rows = weights_of(model), zip(tokens.tolist(), targets.tolist(), strict=True)
    loss = torch.stack([naive_loss(model.config, weights, row, wanted) for row, wanted in rows]).sum()
    return loss.detach(), torch.autograd.grad(loss, list(weights.values()))


# Recomputed blocks of the other kinds are parts of these.
RECOMPUTED = {"gpt2", "record", "mixed"}


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        pytest.param(
            form, kind, marks=[pytest.mark.slow] if form == "kernels, again" and kind not in RECOMPUTED else []
        )
        for form in FORMS
        for kind in KINDS
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_loss_and_gradients(kind, form, device):
    how = FORMS[form]
    interpreted(how, device)
    model, (tokens, targets) = built(kind, how), draw()
    expected, gradients = expected_of(kind)
    exact = how.kernels == "torch"
    model = (model.double() if exact else model).to(device)
    loss = model(tokens.to(device), targets.to(device))
    loss.backward()
    torch.testing.assert_close(loss.detach().double().cpu(), expected, rtol=1e-9 if exact else 2e-6, atol=0)
    for (name, mine), theirs in zip(model.named_parameters(), gradients, strict=True):
        assert mine.grad is not None, name
        if exact:
            # positions come from a table in fp32
            torch.testing.assert_close(
                mine.grad, theirs, rtol=1e-5, atol=1e-6, msg=lambda text, of=name: f"{of}: {text}"
            )
        else:
            assert_near(mine.grad.cpu(), theirs, torch.float32, name, slack=10.0)


@every_kind
def test_logits_whole_and_token_by_token(kind):
    model, (tokens, _) = built(kind, TORCH).double().eval(), draw()
    weights = weights_of(model)
    with torch.no_grad():
        expected = torch.stack([naive_logits(model.config, weights, row.tolist()) for row in tokens])
        cache = model.empty_cache(2)
        pieces = [model.logits(tokens[:, :3], cache)]
        pieces += [model.logits(tokens[:, place : place + 1], cache) for place in range(3, CONTEXT)]
        for found in (model.logits(tokens), torch.cat(pieces, dim=1)):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


PACKED = [[2, 3], [1, 4]]  # lengths of the documents in each row


@functools.cache
def packed_logits_of(kind: str) -> Tensor:
    """By the naive model, the same for all forms."""
    model, (tokens, _) = built(kind, TORCH), draw()
    weights = weights_of(model)
    with torch.no_grad():
        texts = [text.tolist() for row, counts in zip(tokens, PACKED, strict=True) for text in row.split(counts)]
        return torch.cat([naive_logits(model.config, weights, text) for text in texts]).view(2, CONTEXT, VOCAB)


@pytest.mark.grid
@every_kind
@pytest.mark.parametrize("form", ["torch", "kernels"])
@pytest.mark.parametrize("device", DEVICES)
def test_packed_documents_are_texts_of_their_own(kind, form, device):
    how = FORMS[form]
    interpreted(how, device)
    numbers = np.array([np.repeat(np.arange(len(row)), row) for row in PACKED], dtype=np.int32)
    model, (tokens, _) = built(kind, how).eval().to(device), draw()
    with torch.no_grad():
        found = model.logits(tokens.to(device), layout=lay_out(numbers, None, torch.device(device)))
    torch.testing.assert_close(found.double().cpu(), packed_logits_of(kind), rtol=1e-4, atol=1e-4)
