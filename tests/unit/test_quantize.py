"""Weights in 4 bits: the model computes what it would with the widened weights, and nothing else is kept of them."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("bitsandbytes")

from flatout.config.schema import ModelConfig
from flatout.errors import ConfigError
from flatout.model import quantize as quantized_module
from flatout.model.adapter_targets import ALL_LINEAR, AdapterPlan
from flatout.model.adapters import Adapters, attach
from flatout.model.count import linear_count
from flatout.model.execution import Execution
from flatout.model.gpt import GPT, build_model
from flatout.model.merge import merge
from flatout.model.quantize import (
    BYTES,
    QuantizedWeight,
    check_quantizing,
    quantize_linears,
    quantized,
    round_linears,
)

CPU = torch.device("cpu")
SHAPE = ModelConfig(layers=2, width=64, heads=4, kv_heads=2, context=32, qk_norm=False, tied=False)


def adapted(way: str, device: torch.device = CPU, **how) -> tuple[GPT, Adapters]:
    """A model with drawn adapters on weights that are plain, in 4 bits, or rounded to what they are in 4 bits."""
    plan = {"rank": 4, "alpha": 8.0, "targets": how.pop("targets", (ALL_LINEAR,)), "dora": how.pop("dora", False)}
    dtype = how.pop("dtype", torch.float32)
    model = build_model(SHAPE, 101, seed=3, execution=Execution(**how)).to(dtype)
    if model.rotary is not None:
        model.rotary.to(torch.float32).fill()
    if way == "4 bits":
        quantize_linears(model, device)
    elif way == "rounded":
        round_linears(model.to(device))
    else:
        model.to(device)
    adapters = attach(model, AdapterPlan(**plan), seed=0)
    with torch.no_grad():
        values = torch.randn(adapters.flat.shape, generator=torch.Generator().manual_seed(7))
        matrices = adapters.optimizer_parameters[0]
        matrices.copy_(0.05 * values[: matrices.numel()].to(device))
    return model.train(), adapters


def passed(model: GPT, adapters: Adapters) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, gradients of the adapters)."""
    device = adapters.flat.device
    tokens = torch.randint(0, 101, (2, 33), generator=torch.Generator().manual_seed(1)).to(device)
    adapters.zero_gradients()
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    assert adapters.flat.grad is not None
    return loss.detach(), adapters.flat.grad.clone()


def bytes_of(weight: QuantizedWeight) -> int:
    return sum(
        tensor.nbytes
        for packed, state in weight.parts
        for tensor in (packed, state.absmax, state.offset, state.state2.absmax)
    )


def test_a_weight_looks_wide_and_is_small():
    wide = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    weight = quantized(wide.split([64, 32]))
    assert (weight.shape, weight.dtype, weight.device) == (wide.shape, wide.dtype, wide.device)
    assert bytes_of(weight) == pytest.approx(BYTES * wide.numel(), rel=0.03)
    error = float((weight.widened() - wide).norm() / wide.norm())
    assert 0.05 < error < 0.12
    assert torch.equal(weight.widened(), weight.widened())
    x = torch.randn(5, 128)
    assert torch.equal(F.linear(x, weight), F.linear(x, weight.widened()))
    assert torch.equal(weight[3:7] + 1, weight.widened()[3:7] + 1)
    assert type(weight.detach()) is QuantizedWeight
    assert type(weight.to(torch.float64)) is torch.Tensor
    with pytest.raises(RuntimeError, match="frozen"):
        weight.zero_()
    parameter = torch.nn.Parameter(weight, requires_grad=False)
    assert isinstance(parameter, torch.nn.Parameter)
    assert isinstance(parameter, QuantizedWeight)


def test_parts_are_quantized_as_matrices_of_their_own():
    """So do bitsandbytes' own layers, which have a matrix for each projection."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    model = build_model(SHAPE, 101, seed=3)
    expected = []
    for block in model.blocks:
        for part in (*block.attention.qkv.weight.split([64, 32, 32]), *block.mlp.up.weight.chunk(2)):
            packed = quantize_4bit(part.detach(), blocksize=64, quant_type="nf4", compress_statistics=True)
            expected.append(dequantize_4bit(*packed))
    quantize_linears(model, CPU)
    found = []
    for block in model.blocks:
        found += [*block.attention.qkv.weight.widened().split([64, 32, 32]), *block.mlp.up.weight.widened().chunk(2)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.usefixtures("bf16_products")
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"dora": True},
        {"targets": ("q_proj", "down_proj")},
        {"checkpointing": "full"},
        {"checkpointing": "selective"},
        {"fused_qkv": False},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_training_beside_4_bits_is_training_beside_the_widened_weights(how):
    mine, theirs = (passed(*adapted(way, **how)) for way in ("4 bits", "rounded"))
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1])
    assert float(mine[1].norm()) > 0
    plain = passed(*adapted("plain", **how))
    assert not torch.equal(mine[0], plain[0]), "4 bits are not the weights as they were"
    assert float(mine[0]) == pytest.approx(float(plain[0]), rel=0.05)


def test_the_base_alone_and_evaluation():
    (mine, ours), (theirs, others) = adapted("4 bits"), adapted("rounded")
    tokens = torch.arange(20)[None]
    for model in (mine, theirs):
        model.eval()
    with torch.no_grad():
        assert torch.equal(mine.logits(tokens), theirs.logits(tokens))
        ours.detach()
        others.detach()
        assert torch.equal(mine.logits(tokens), theirs.logits(tokens))


@pytest.mark.parametrize("targets", [(ALL_LINEAR,), ("q_proj",)], ids=str)
def test_backward_keeps_no_wide_weight(targets):
    model, _ = adapted("4 bits", targets=targets)
    shapes = {tuple(weight.shape) for weight in model.parameters() if isinstance(weight, QuantizedWeight)}
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    tokens = torch.arange(20)[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens, tokens)
    loss.backward()
    weights = [tensor for tensor in kept if {tuple(tensor.shape), tuple(tensor.shape)[::-1]} & shapes]
    assert len(weights) >= 4
    assert all(isinstance(tensor, QuantizedWeight) for tensor in weights)


def test_what_it_takes_is_counted():
    model, _ = adapted("4 bits")
    quantized_weights = [weight for weight in model.parameters() if isinstance(weight, QuantizedWeight)]
    count = sum(weight.numel() for weight in quantized_weights)
    assert count == linear_count(SHAPE)
    assert 0.5 * count < sum(map(bytes_of, quantized_weights)) < 0.53 * count
    assert isinstance(model.embedding.weight, torch.nn.Parameter)
    assert not isinstance(model.embedding.weight, QuantizedWeight)
    assert not isinstance(model.embedding.weight, QuantizedWeight)


def test_a_merge_of_the_rounded_base_is_the_model_that_was_trained():
    trained, _ = adapted("4 bits")
    loaded, adapters = adapted("rounded")
    tokens = torch.arange(20)[None]
    trained.eval()
    expected = trained.logits(tokens).detach()
    merge(adapters, torch.float32)
    torch.testing.assert_close(loaded.eval().logits(tokens).detach(), expected, rtol=1e-4, atol=1e-5)


def test_without_bitsandbytes_it_is_refused(monkeypatch):
    check_quantizing(CPU)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    with pytest.raises(ConfigError, match="bitsandbytes is not installed") as caught:
        check_quantizing(CPU)
    assert "flatout[qlora]" in caught.value.hint


def test_a_device_that_cannot_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="no kernels for mps"):
        check_quantizing(torch.device("mps"))

    def broken(*_, **__):
        raise RuntimeError("no kernel image is available\nmore")

    monkeypatch.setattr(quantized_module, "quantized", broken)
    with pytest.raises(ConfigError, match="does not work on cpu: RuntimeError: no kernel image is available"):
        check_quantizing(CPU)


def test_peft_beside_bitsandbytes_own_layers_gives_the_same():
    """Their 4-bit Llama with PEFT's adapters against ours: logits, and gradients of A and B."""
    pytest.importorskip("peft")
    from bitsandbytes.nn.modules import Linear4bit, Params4bit
    from peft import LoraConfig, get_peft_model

    from tests.llama_twin import build_llama, our_twin, tokens
    from tests.parity.test_lora import our_tensors, quietly, their_tensors

    base = build_llama(mlp_width=64)
    ours = our_twin(base)
    quantize_linears(ours, CPU)
    adapters = attach(ours, AdapterPlan(rank=4, alpha=8.0), seed=0)
    how = {"quant_type": "nf4", "compress_statistics": True}
    for name, module in list(base.named_modules()):
        if type(module) is torch.nn.Linear and name != "lm_head":
            layer = Linear4bit(module.in_features, module.out_features, bias=False, compute_dtype=torch.float32, **how)
            layer.weight = Params4bit(module.weight.detach(), requires_grad=False, **how)
            owner, _, attribute = name.rpartition(".")
            setattr(base.get_submodule(owner), attribute, layer.to("cpu"))
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    theirs = quietly(get_peft_model, base, LoraConfig(r=4, lora_alpha=8, target_modules=names))
    trained = their_tensors(theirs)
    with torch.no_grad():
        for name, tensor in our_tensors(adapters).items():
            trained[name].normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
            tensor.copy_(trained[name])
    adapters.forget()
    batch = tokens()
    expected = quietly(theirs, batch).logits
    found = ours.logits(batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    for name, gradient in our_tensors(adapters, gradients=True).items():
        torch.testing.assert_close(gradient, trained[name].grad, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_4_bits_train_as_the_widened_weights_do(dtype):
    device = torch.device("cuda")
    check_quantizing(device)
    mine, theirs = (passed(*adapted(way, device, dtype=dtype)) for way in ("4 bits", "rounded"))
    torch.testing.assert_close(mine[0], theirs[0], rtol=2e-3, atol=0.0)
    assert float((mine[1] - theirs[1]).norm() / theirs[1].norm()) < 2e-2
