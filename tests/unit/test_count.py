"""Counts from the config against the truth: numel, torch's FLOP counter, the bytes autograd keeps."""

import dataclasses
import importlib.util
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flatout.config.load import load_config
from flatout.config.schema import ModelConfig, OptimConfig
from flatout.model.adapter_targets import AdapterPlan
from flatout.model.adapters import attach
from flatout.model.count import (
    FrozenModel,
    adapter_count,
    estimate_memory,
    flops_per_token,
    layer_rows,
    parameter_count,
    table_count,
)
from flatout.model.execution import Execution, Form
from flatout.model.gpt import GPT, build_model, empty_model
from flatout.observe.human import human_parameters
from flatout.optim.adamw import EightBitAdamW
from flatout.optim.rules import state_bytes

VOCAB = 97
GPT2 = ModelConfig(family="gpt2", layers=12, width=768, heads=12, context=1024)
SHAPE = {"layers": 3, "width": 48, "heads": 6, "context": 32}
VARIANTS = [
    {"family": "gpt2"},
    {},
    {"kv_heads": 2, "mlp": "relu2", "tied": False},
    {"norm": "layernorm", "bias": True, "positions": "learned", "mlp": "gelu", "qk_norm": False},
    {"residual_scale": 0.1, "mlp_width": 100},
    {"head_size": 20, "kv_heads": 2, "qkv_bias": True, "tied": False},
    {"bias": True, "qkv_bias": False, "qk_norm": False, "head_size": 6, "mlp": "gelu"},
    {"value_tables": 1, "head_gate": True, "kv_heads": 2, "bigram_rows": 50, "first_mix": True},
    {"pattern": "E", "states": 24, "bias": True},
    {"pattern": "EEA", "states": 40},
    {"norm": "plain-rmsnorm", "qk_norm": 1.2, "embedding_norm": True, "tied": False, "mlp": "relu2"},
    {"norm": "plain-rmsnorm", "bias": True, "qk_norm": False, "mlp": "gelu"},
    {"norm_place": "after", "qk_norm_whole": True, "kv_heads": 2, "pattern": "AN"},
    {"norm": "offset-rmsnorm", "norm_place": "both", "mlp": "geglu", "embedding_scale": 7.0, "score_divisor": 4},
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameter_count_is_numel(variant):
    config = ModelConfig(**SHAPE, **variant)
    model = empty_model(config, VOCAB, device="meta")
    assert parameter_count(config, VOCAB) == sum(p.numel() for p in model.parameters())


def test_parameters_in_tables_are_told_apart():
    config = ModelConfig(**SHAPE, value_tables=1, kv_heads=2, bigram_rows=50)
    model = build_model(config, VOCAB)
    tables = [table.numel() for name, table in model.named_parameters() if name.startswith(("value_tables", "bigram"))]
    assert table_count(config, VOCAB) == sum(tables) == VOCAB * 16 + 50 * 48
    assert table_count(ModelConfig(**SHAPE), VOCAB) == 0
    assert human_parameters(163e6, None, 38.6e6) == "163M parameters (124M dense, 38.6M in tables)"


@pytest.mark.parametrize("variant", [*VARIANTS, {"pattern": "WWA", "window": 8}])
def test_layers_add_up_to_the_model(variant):
    config = ModelConfig(**SHAPE, **variant)
    form = Form(half=False, compiled=False, execution=Execution(), frozen=False)
    rows = layer_rows(config, VOCAB, 64, form)
    assert sum(row.times * row.parameters for row in rows) == parameter_count(config, VOCAB)
    assert sum(row.times * row.flops for row in rows) == pytest.approx(flops_per_token(config, VOCAB))
    how = {"micro_batch": 2, "half": False, "compiled": False, "execution": Execution()}
    assert sum(row.times * row.kept_bytes for row in rows) == estimate_memory(config, VOCAB, **how).activations


def test_swiglu_holds_as_much_as_two_matrices_would():
    gelu = parameter_count(ModelConfig(layers=1, width=768, heads=12, mlp="gelu"), VOCAB)
    swiglu = parameter_count(ModelConfig(layers=1, width=768, heads=12, mlp="swiglu"), VOCAB)
    assert swiglu == gelu


def test_gpt2_sizes_are_the_published_ones():
    small = ModelConfig(family="gpt2", layers=12, width=768, heads=12, context=1024)
    medium = ModelConfig(family="gpt2", layers=24, width=1024, heads=16, context=1024)
    assert parameter_count(small, 50257) == 124_439_808
    assert parameter_count(medium, 50257) == 354_823_168
    assert flops_per_token(small, 50257) == pytest.approx(798e6, rel=0.001)


def masked(config: ModelConfig) -> float:
    """FLOPs of a token for products whose result a causal mask throws away, which the plain reference computes."""
    return 12.0 * len(config.windows) * config.queries * (config.context - 1) / 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_flops_equal_what_torch_counts(variant):
    config = ModelConfig(**SHAPE, **variant)
    # The products that the scan in chunks makes of what goes element by element are no work that is asked for.
    model = build_model(config, VOCAB, execution=Execution(attention="reference", scan="reference"))
    tokens = torch.randint(VOCAB, (2, config.context))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    counted = counter.get_total_flops() / tokens.numel() - masked(config)
    assert flops_per_token(config, VOCAB) == pytest.approx(counted, rel=1e-6)


def kept_bytes(model: GPT, tokens: torch.Tensor, half: bool) -> int:
    """Bytes of distinct memory that autograd holds after forward, weights and their casts left out.

    A cast is known by its shape: there must be another number of tokens than a weight has rows.
    """
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    weights |= {b.untyped_storage().data_ptr() for b in model.buffers()}
    shapes = {tuple(p.shape) for p in model.parameters()} | {tuple(p.shape)[::-1] for p in model.parameters()}
    storages: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        cast_weight = half and tuple(tensor.shape) in shapes
        if storage.data_ptr() not in weights and not cast_weight and tensor.dtype != torch.int64:
            storages[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)  # keeps the address from being used twice
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=half),
    ):
        loss = model(tokens, tokens)
    for tensor in held_by_steps(loss):
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            storages[place] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def held_by_steps(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Weights that steps of our own keep in an attribute, where no hook sees them."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        step = waiting.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        kept = getattr(getattr(step, "weight", None), "weight", None)
        if isinstance(kept, torch.Tensor):
            yield kept
        waiting += [before for before, _ in step.next_functions]


@pytest.mark.grid
@pytest.mark.usefixtures("bf16_products")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("variant", [*VARIANTS, {"attention_cap": 5.0, "kv_heads": 2}])
def test_activation_estimate_matches_what_autograd_keeps(variant, half):
    shape = {"layers": 6, "width": 96, "heads": 4, "context": 66}
    config = ModelConfig(**shape, **{name: value for name, value in variant.items() if name != "mlp_width"})
    model = build_model(config, VOCAB)
    tokens = torch.randint(VOCAB, (4, config.context))
    estimate = estimate_memory(config, VOCAB, micro_batch=4, half=half, compiled=False, execution=Execution())
    truth = kept_bytes(model, tokens, half) - tokens.numel() * 4 * VOCAB  # the loss is a part of its own
    assert estimate.activations == pytest.approx(truth, rel=0.06)


def test_scaled_weights_of_eigenstates_are_counted():
    """With so few tokens they are most of what autograd keeps."""
    config = ModelConfig(layers=2, width=384, heads=4, context=8, pattern="E", states=32)
    truth = kept_bytes(build_model(config, VOCAB), torch.randint(VOCAB, (1, 8)), half=False) - 8 * 4 * VOCAB
    how = {"micro_batch": 1, "half": False, "compiled": False}
    kept = estimate_memory(config, VOCAB, execution=Execution(), **how).activations
    assert kept == pytest.approx(truth, rel=0.10)
    again = estimate_memory(config, VOCAB, execution=Execution(checkpointing="full"), **how)
    scaled = 16 * config.states * config.width
    assert again.activations < scaled < again.working, "one block's, and only in backward"


@pytest.mark.usefixtures("bf16_products")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the peak is measured instead")
@pytest.mark.parametrize(
    ("number", "half", "checkpointing"),
    [
        *((number, True, "none") for number in (0, 5, 7, 9, 10, 11)),
        *(pytest.param(number, True, "none", marks=pytest.mark.slow) for number in (2, 4, 8)),
        (0, False, "selective"),
        (5, True, "selective"),
    ],
)
def test_activation_estimate_of_our_kernels_matches_what_autograd_keeps(number, half, checkpointing):
    config = ModelConfig(**{"layers": 3, "width": 96, "heads": 4, "context": 34, **VARIANTS[number]})
    how = Execution(
        kernels="triton",
        scan="triton",
        loss="fused",
        checkpointing=checkpointing,
        residual="bf16" if half else "fp32",
        loss_chunk=16,
    )
    model = build_model(config, VOCAB, execution=how)
    tokens = torch.randint(VOCAB, (2, config.context))
    estimate = estimate_memory(config, VOCAB, micro_batch=2, half=half, compiled=False, execution=how)
    truth = kept_bytes(model, tokens, half)
    truth -= tokens.numel() * (2 if half else 4) * config.width  # the loss's gradients are counted with the loss
    truth -= 0 if half else 4 * VOCAB * config.width  # with casts, `kept_bytes` takes this one for a weight
    assert estimate.activations == pytest.approx(truth, rel=0.07)


def total_of(**changes) -> int:
    """The estimate for GPT-2 124M at micro-batch 16 in bf16; switches of `Execution` may be among the changes."""
    names = {field.name for field in dataclasses.fields(Execution)}
    how = Execution(**{name: changes.pop(name) for name in list(changes) if name in names})
    settings = {"micro_batch": 16, "half": True, "compiled": False, **changes}
    return estimate_memory(GPT2, 50257, execution=how, **settings).total


def test_every_switch_that_saves_memory_saves_it_in_the_estimate():
    ours = {"kernels": "triton", "residual": "bf16"}
    assert max(total_of(loss="fused"), total_of(loss="chunked")) < total_of(loss="plain")
    assert total_of(**ours, loss="fused") < 0.5 * total_of()
    assert total_of(**ours, loss="fused") < total_of(kernels="triton", loss="fused"), "a stream in bf16"
    kept = [total_of(**ours, loss="fused", checkpointing=how) for how in ("none", "selective", "full")]
    assert kept == sorted(kept, reverse=True)
    kept = [total_of(loss="fused", checkpointing=how) for how in ("none", "selective", "full")]
    assert kept == sorted(kept, reverse=True)
    assert total_of(loss="fused", loss_chunk=2048) < total_of(loss="fused")
    assert total_of(loss="fused", compiled=True) < min(total_of(loss="fused"), total_of(compiled=True))
    parameters = parameter_count(GPT2, 50257)
    assert total_of() - total_of(state_bytes=0) == 8 * parameters
    assert total_of() - total_of(state_bytes=EightBitAdamW.BYTES.device) == pytest.approx(5.97 * parameters, rel=0.01)


def test_checkpointing_and_smaller_micro_batches_need_less():
    def total(**changes) -> int:
        settings = {"micro_batch": 16, "half": True, "compiled": True, "execution": Execution(), **changes}
        return estimate_memory(GPT2, 50257, **settings).total

    assert total(execution=Execution(checkpointing="full")) < 0.65 * total()
    assert all(a < b for a, b in itertools.pairwise(total(micro_batch=n) for n in (1, 2, 4, 8)))


def _switches(row: dict) -> dict:
    """The first rows were measured before there were other kernels and losses, and say nothing of them."""
    known = {field.name for field in dataclasses.fields(Execution)}
    switches = {name: value for name, value in row.get("execution", {}).items() if name in known}
    return switches | {"fp8": tuple(switches.get("fp8", ()))}


MEASURED = Path(__file__).parents[2] / "lab" / "memory_estimate.jsonl"
GONE = '"activation_offload": true'  # a switch that rows were measured with and that is gone


@pytest.mark.parametrize("line", [line for line in MEASURED.read_text().splitlines() if GONE not in line])
def test_memory_estimate_is_within_a_tenth_of_what_a_gpu_measured(line):
    row = json.loads(line)
    model = load_config(row["preset"]).config.model
    estimate = estimate_memory(
        model,
        50257,
        micro_batch=row["micro_batch"],
        half=row["precision"] == "bf16",
        compiled=row["compile"] in ("on", "default"),
        execution=Execution(**{"pad_vocab": 64, "checkpointing": row["checkpointing"], **_switches(row)}),
        state_bytes=state_bytes(
            OptimConfig(), state=row.get("optimizer_state", "fp32"), offload=row.get("optimizer_offload", False)
        ).device,
        accumulated=row.get("accumulation", 2) > 1,
        graphs=row.get("cuda_graphs", False),
    )
    assert estimate.total == pytest.approx(row["measured"], rel=0.10)


def test_gradients_of_an_only_micro_batch_take_the_place_of_activations():
    parameters = parameter_count(GPT2, 50257)
    assert total_of() - total_of(accumulated=False) == 4 * parameters
    assert total_of(accumulated=False, graphs=True) > total_of(), "a recording keeps its gradients"
    tiny = {"micro_batch": 1, "kernels": "triton", "residual": "bf16", "loss": "fused", "checkpointing": "full"}
    alone = total_of(**tiny, accumulated=False)
    assert 16 * parameters <= alone <= total_of(**tiny), "all of them are there when weights are updated"


def test_the_gradient_of_a_tied_head_waits_while_blocks_go_backward():
    """Where the blocks' backward is the peak, not the loss."""
    how = {"micro_batch": 64, "half": False, "compiled": False, "execution": Execution(loss="fused", loss_chunk=16)}
    tied, apart = (estimate_memory(ModelConfig(**SHAPE, tied=tied), VOCAB, **how) for tied in (True, False))
    assert tied.working - apart.working == 4 * VOCAB * SHAPE["width"]
    assert tied.activations == apart.activations


def test_adapters_of_a_tinyllama_are_counted():
    config = ModelConfig(
        layers=22, width=2048, heads=32, kv_heads=4, mlp_width=5632, qk_norm=False, tied=False, context=2048
    )
    assert parameter_count(config, 32000) == 1_100_048_384
    assert adapter_count(config, 16) == 12_615_680


@pytest.mark.parametrize("family", ["gpt", "gpt2"])
def test_the_count_of_adapters_is_what_is_attached(family: str):
    model = build_model(ModelConfig(family=family, layers=2, width=32, heads=4), 50)
    assert attach(model, AdapterPlan(rank=3), seed=0).count == adapter_count(model.config, 3)


@pytest.mark.parametrize("rank", [1, 12])
def test_flops_beside_frozen_weights_are_what_torch_counts(rank):
    config = ModelConfig(layers=8, width=48, heads=4, kv_heads=2, context=32, qk_norm=False, tied=False)
    model = build_model(config, VOCAB, execution=Execution(attention="reference"))
    # Torch does not count products that are added in place, of which there are none with dropout. In fused matrices
    # the code multiplies zeros between the parts, which are no work that is asked for.
    adapters = attach(model, AdapterPlan(rank=rank, targets=("o_proj", "down_proj"), dropout=0.1), seed=0)
    for layer in adapters.layers.values():
        layer.in_place = False
    tokens = torch.randint(VOCAB, (2, config.context))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    counted = counter.get_total_flops() / tokens.numel()
    stated = flops_per_token(config, VOCAB, adapters=adapters.count)
    # No gradient goes further down than the first adapter: not through the first block's attention and projections.
    width = config.width
    first = 2.0 * width * (width + 2 * 2 * config.size) + 2.0 * width * (width + rank) + 8.0 * width * config.context
    assert stated - first == pytest.approx(counted - masked(config), rel=1e-6)
    assert stated < flops_per_token(config, VOCAB)


def test_flops_of_packed_samples_go_by_their_own_length():
    config = ModelConfig(layers=2, width=64, heads=4, context=4096)
    assert flops_per_token(config, VOCAB, 100.0) == flops_per_token(config, VOCAB) - 12 * 2 * 64 * 3996 / 2


@pytest.mark.grid
@pytest.mark.usefixtures("bf16_products")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("plan", [{}, {"dropout": 0.1}, {"dora": True}], ids=str)
@pytest.mark.parametrize("rank", [2, 16])
def test_activation_estimate_of_adapters_matches_what_autograd_keeps(plan, rank, half):
    config = ModelConfig(layers=6, width=96, heads=4, kv_heads=2, context=66, qk_norm=False, tied=False)
    model = build_model(config, VOCAB)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16 if half else torch.float32)
    attach(model, AdapterPlan(rank=rank, **plan), seed=0)
    tokens = torch.randint(VOCAB, (4, config.context))
    frozen = FrozenModel(rank=rank, dora="dora" in plan, dropout="dropout" in plan)
    settings = {"micro_batch": 4, "half": half, "compiled": False, "execution": Execution()}
    estimate = estimate_memory(config, VOCAB, **settings, frozen=frozen)
    truth = kept_bytes(model.train(), tokens, half) - tokens.numel() * 4 * VOCAB
    assert estimate.activations == pytest.approx(truth, rel=0.08)


def test_frozen_weights_are_narrow_and_only_labels_reach_the_head():
    config = ModelConfig(
        layers=22, width=2048, heads=32, kv_heads=4, mlp_width=5632, qk_norm=False, tied=False, context=2048
    )
    how = {"micro_batch": 8, "half": True, "compiled": False, "execution": Execution(document_attention="flash")}
    lora = estimate_memory(config, 32000, **how, frozen=FrozenModel(rank=16))
    assert lora.weights == 2 * 1_100_048_384 + 6 * 12_615_680
    assert (lora.gradients, lora.optimizer) == (4 * 12_615_680, 8 * 12_615_680)
    few = estimate_memory(config, 32000, **how, frozen=FrozenModel(rank=16), row_tokens=2048, labels=1024)
    assert few.working < lora.working
    assert few.activations == lora.activations
    short = estimate_memory(config, 32000, **how, frozen=FrozenModel(rank=16), row_tokens=512, labels=1024)
    assert short.activations * 4 == lora.activations
    whole = estimate_memory(config, 32000, **how, row_tokens=2048, labels=1024)
    assert whole.total > 1.5 * few.total
    masked = dataclasses.replace(how["execution"], document_attention="sdpa")
    with_mask = estimate_memory(config, 32000, **{**how, "execution": masked}, row_tokens=2048, labels=1024)
    assert with_mask.activations - whole.activations == 3 * 8 * 2048 * 2048  # a byte, and what is added to scores
    ours = dataclasses.replace(masked, kernels="triton")  # all rows in one
    joined = estimate_memory(config, 32000, **{**how, "execution": ours}, row_tokens=2048, labels=1024)
    flash = dataclasses.replace(ours, document_attention="flash")
    without = estimate_memory(config, 32000, **{**how, "execution": flash}, row_tokens=2048, labels=1024)
    assert joined.activations - without.activations == 3 * (8 * 2048) ** 2
    streams = [
        estimate_memory(config, 32000, **{**how, "execution": one}, frozen=FrozenModel(rank=16)).activations
        for one in (dataclasses.replace(flash, residual=kind) for kind in ("bf16", "fp32"))
    ]
    assert streams[1] > streams[0]
