"""Fine-tuning in our kernels against torch's operations: losses, and the gradients of every A and B."""

import collections
import copy
import dataclasses
import statistics
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from flatout.config.schema import ModelConfig, OptimConfig
from flatout.engine.setup import only_adapters
from flatout.engine.step import TrainStep
from flatout.model.adapter_targets import AdapterPlan
from flatout.model.adapters import Adapters, attach
from flatout.model.count import FrozenModel, estimate_memory
from flatout.model.execution import Execution
from flatout.model.gpt import GPT, build_model
from flatout.ops.documents import DocumentLayout, lay_out
from flatout.ops.reference import IGNORED
from tests.made_optimizers import made_optimizers
from tests.parity.checking import DEVICES, assert_near

pytestmark = [
    pytest.mark.usefixtures("guarded_memory"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.parametrize("device", DEVICES),
]

VOCAB, CONTEXT = 29, 8
LLAMA = {"family": "gpt", "kv_heads": 2, "tied": False, "qk_norm": False, "mlp_width": 40}
QWEN2 = LLAMA | {"qkv_bias": True, "tied": True, "head_size": 10}
QWEN3 = LLAMA | {"qk_norm": True, "kv_heads": 1}
BARE = {"norm": "plain-rmsnorm", "qk_norm": 1.3, "embedding_norm": True, "logit_cap": 5.0}
GPT2 = {"family": "gpt2"}
FUSED = Execution(kernels="triton", loss="fused", loss_chunk=7)


def adapted(
    device: str, execution: Execution, plan: dict[str, Any], dtype=torch.float32, **model
) -> tuple[GPT, Adapters]:
    """A model with random adapters, biases and norms: zeros and ones would hide mistakes."""
    config = ModelConfig(**{"layers": 2, "width": 24, "heads": 4, "context": CONTEXT, "dropout": 0.0, **model})
    built = build_model(config, VOCAB, seed=3, execution=execution)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    built = built.to(device, dtype) if dtype != torch.float32 else built.to(device)
    adapters = attach(built, AdapterPlan(**{"rank": 3, "alpha": 5.0, **plan}), seed=1)
    with torch.no_grad():
        for part in adapters.tensors():
            part.b.copy_(0.2 * torch.randn(part.b.shape, generator=generator))
    return built, adapters


def batch(device: str, packed: bool) -> tuple[torch.Tensor, torch.Tensor, DocumentLayout | None]:
    tokens = torch.randint(0, VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
    targets = torch.randint(0, VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(2))
    targets[1, 2:5] = IGNORED
    layout = None
    if packed:
        documents = np.array([[0, 0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 1, -1, -1]], dtype=np.int32)
        targets[1, 6:] = IGNORED
        layout = lay_out(documents, targets.numpy(), torch.device(device))
    return tokens.to(device), targets.to(device), layout


def run(device, execution, plan=None, *, packed=False, passes=1, bf16=False, **model):
    """(loss, gradients by name) of one batch, with gradients of `passes` passes added up."""
    built, adapters = adapted(device, execution, plan or {}, **model)
    tokens, targets, layout = batch(device, packed)
    built.train()
    loss = torch.zeros(())
    for _ in range(passes):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=bf16):
            loss = built(tokens, targets, 0.0, layout)
        loss.backward()
    assert all(parameter.grad is None for parameter in built.parameters() if not parameter.requires_grad)
    return loss.detach(), {name: parameter.grad for name, parameter in adapters.named_parameters()}


def same(mine, theirs, dtype=torch.float32, slack=10.0):
    assert mine[0].item() == pytest.approx(theirs[0].item(), rel=2e-6 if dtype == torch.float32 else 1e-2)
    assert mine[1].keys() == theirs[1].keys()
    for name, gradient in mine[1].items():
        assert gradient.dtype == torch.float32
        assert_near(gradient, theirs[1][name], dtype, name, slack)


RANKS = {"ranks": (("k_proj", 5), ("up_proj", 2)), "alphas": (("v_proj", 9.0),)}


@pytest.mark.grid
@pytest.mark.parametrize(
    ("model", "plan", "how", "packed"),
    [
        (LLAMA, {}, {}, False),
        (LLAMA, {"rank": 8}, {}, True),
        (LLAMA, {"rank_stabilised": True}, {"checkpointing": "full"}, False),
        (LLAMA | {"layers": 1}, {}, {"checkpointing": "full"}, True),
        (LLAMA | {"layers": 1}, RANKS, {"checkpointing": "selective"}, False),
        (QWEN2, {}, {"checkpointing": "selective", "pad_vocab": 8}, True),
        (QWEN2 | {"layers": 1}, {"targets": ("q_proj", "v_proj")}, {}, False),
        (QWEN3 | {"layers": 1}, {}, {"checkpointing": "full"}, False),
        (QWEN3, {}, {}, True),
        (QWEN3 | BARE, {}, {"checkpointing": "full"}, True),
        (LLAMA | {"fused_projections": True, "pattern": "AN"}, {}, {}, True),
        (GPT2, {}, {}, False),
        (GPT2 | {"layers": 1}, {}, {"checkpointing": "full"}, True),
        (LLAMA | {"mlp": "relu2", "mlp_width": None, "layers": 1}, {}, {"loss": "chunked"}, False),
    ],
    ids=str,
)
def test_kernels_change_nothing(model, plan, how, packed, device):
    mine = run(device, dataclasses.replace(FUSED, **how), plan, packed=packed, **model)
    plain = Execution(attention="reference", document_attention="reference")
    same(mine, run(device, plain, plan, packed=packed, **model))


@pytest.mark.grid
@pytest.mark.parametrize(
    ("targets", "checkpointing"),
    [
        ("down_proj", "none"),
        ("down_proj", "full"),
        ("up_proj", "selective"),
        ("up_proj", "none"),
        ("o_proj", "full"),
        ("k_proj", "selective"),
        ("k_proj", "none"),
    ],
)
def test_gradients_go_no_further_than_somebody_wants_them(targets, checkpointing, device):
    plan = {"targets": (targets,)}
    mine = run(device, dataclasses.replace(FUSED, checkpointing=checkpointing), plan, layers=1, **LLAMA)
    same(mine, run(device, Execution(), plan, layers=1, **LLAMA))


def test_micro_batches_add_up_and_missing_gradients_are_made(device):
    expected = run(device, Execution(), passes=2, layers=1, **LLAMA)
    same(run(device, FUSED, passes=2, layers=1, **LLAMA), expected)
    built, adapters = adapted(device, FUSED, RANKS, layers=1, **LLAMA)
    for parameter in adapters.parameters():
        parameter.grad = None
    tokens, targets, _ = batch(device, packed=False)
    loss = built(tokens, targets)
    loss.backward()
    mine = (loss.detach(), {name: parameter.grad for name, parameter in adapters.named_parameters()})
    same(mine, run(device, Execution(), RANKS, layers=1, **LLAMA))


def test_rows_with_padding_are_those_of_torch(device):
    documents = np.full((3, 64), -1, dtype=np.int32)
    documents[0, :40], documents[0, 40:60], documents[1, :30], documents[2, :9] = 0, 1, 0, 0
    model = LLAMA | {"context": 64, "layers": 1, "width": 16, "heads": 2, "kv_heads": 1}
    generator = torch.Generator().manual_seed(8)
    tokens = torch.randint(0, VOCAB, (3, 64), generator=generator)
    targets = torch.where(torch.from_numpy(documents) < 0, IGNORED, tokens.flip(1))
    layout = lay_out(documents, targets.numpy(), torch.device(device))
    results = []
    for how in (FUSED, Execution()):
        built, adapters = adapted(device, how, {}, **model)
        loss = built(tokens.to(device), targets.to(device), 0.0, layout)
        loss.backward()
        results.append((loss.detach(), {name: parameter.grad for name, parameter in adapters.named_parameters()}))
    same(*results)


@pytest.mark.parametrize("residual", ["fp32", "bf16"])
def test_bf16_stays_as_near_to_fp32_as_torch(residual, device):
    """As in test_kernels_model: the interpreter does not round but cuts off, which doubles every error."""
    exact = run(device, Execution(), **LLAMA)
    torch_path = run(device, Execution(), bf16=True, **LLAMA)
    ours = run(device, dataclasses.replace(FUSED, residual=residual), bf16=True, **LLAMA)

    def error(result):
        return sum((result[1][name] - exact[1][name]).square().sum().item() for name in exact[1]) ** 0.5

    assert ours[0].item() == pytest.approx(exact[0].item(), rel=5e-3)
    allowed = (1.2 if residual == "fp32" else 1.8) * (1.0 if device == "cuda" else 2.0)
    assert error(ours) <= allowed * error(torch_path)


def step_of(device, execution, count: int, *, dtype=torch.float32, plan=None, micro_batch=1, **model):
    """The engine's own step, and the adapters that it trains."""
    built, adapters = adapted(device, execution, plan or {}, dtype=dtype, **model)
    trained = only_adapters(adapters)
    fused = device == "cuda"
    options = OptimConfig(learning_rate=0.02, weight_decay=0.1)
    rates = [0.02 if dtype == torch.float32 else 1e-3] * count
    step = TrainStep(
        built,
        made_optimizers(trained, options, rates=rates, fused=fused),
        clip=1.0,
        micro_batch=micro_batch,
        adapters=adapters,
    )
    return step, adapters


def steps(device, execution, count: int, **how):
    """Losses and gradient norms of some updates."""
    step, adapters = step_of(device, execution, count, **how)
    tokens, targets, _ = batch(device, packed=False)
    return [step(tokens, targets)[:2].tolist() for _ in range(count)], adapters


def test_updates_reach_the_joined_weights(device):
    mine, adapters = steps(device, FUSED, 4, layers=1, **LLAMA)
    theirs, _ = steps(device, Execution(), 4, layers=1, **LLAMA)
    assert mine[-1][0] < mine[0][0]
    for ours, expected in zip(mine, theirs, strict=True):
        assert ours == pytest.approx(expected, rel=2e-4)
    gradient = adapters.flat.grad
    adapters.zero_gradients()
    assert adapters.flat.grad is gradient


def test_evaluation(device):
    built, adapters = adapted(device, FUSED, {}, layers=1, **LLAMA)
    plain, _ = adapted(device, Execution(), {}, layers=1, **LLAMA)
    tokens, targets, _ = batch(device, packed=False)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            built.eval()
            assert built(tokens, targets).item() == pytest.approx(plain.eval()(tokens, targets).item(), rel=2e-6)
    built.train()
    built(tokens, targets).backward()  # what evaluation has folded serves training too
    assert all(layer.joined is not None for layer in adapters.layers.values())
    with torch.autocast(device, dtype=torch.bfloat16):
        built(tokens, targets)  # folds anew, for another type
    with torch.no_grad():  # and torch's operations, which decode, do without
        cache = built.eval().empty_cache(2)
        torch.testing.assert_close(built.logits(tokens, cache), plain.eval().logits(tokens), rtol=1e-4, atol=1e-5)


def test_a_copy_of_a_model_goes_its_own_way(device):
    built, adapters = adapted(device, FUSED, {}, layers=1, **LLAMA)
    tokens, targets, _ = batch(device, packed=False)
    with torch.no_grad():
        before = built(tokens, targets).item()
        copied = copy.deepcopy(built)
        assert copied(tokens, targets).item() == before
        for name, parameter in copied.named_parameters():
            if "lora_b" in name:
                parameter.zero_()
        assert built(tokens, targets).item() == before
        changed = copied(tokens, targets).item()
        adapters.detach()
        assert changed == pytest.approx(built(tokens, targets).item(), rel=2e-6), "the base alone"


def test_misuse_is_noticed(device):
    built, adapters = adapted(device, Execution(kernels="triton"), {}, layers=1, **LLAMA)
    tokens, targets, _ = batch(device, packed=False)
    loss = built(tokens, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has run already"):
        loss.backward()
    loss = built(tokens, targets)
    with torch.no_grad():
        adapters.flat.add_(0.1)
        built(tokens, targets)  # makes the joined weights fresh
    with pytest.raises(RuntimeError, match="updated between"):
        loss.backward()


class Counting(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_frozen_weights_get_no_product_and_nothing_goes_below_the_first_block(device):
    if device != "cpu":
        pytest.skip("on a GPU gradients of adapters may be one kernel")
    seen = []
    for layers in (1, 2):
        built, _ = adapted(device, dataclasses.replace(FUSED, loss="plain"), {}, layers=layers, **LLAMA)
        tokens, targets, _ = batch(device, packed=False)
        built.train()
        with Counting() as counting:
            built(tokens, targets).backward()
        seen.append(counting.seen)
    # A layer has a product and a thin one before it for each of four matrices, forward and back. The head has two.
    assert seen[1]["mm"] - seen[0]["mm"] == 16
    assert seen[0]["mm"] == 15 + 2, "the first block's input wants no gradient"
    # Added: four gradients of A, seven of B, and the thin product after attention.
    assert seen[1]["addmm_"] - seen[0]["addmm_"] == 12


@pytest.mark.grid
@pytest.mark.parametrize(
    ("checkpointing", "expected"),
    [
        ("full", 24 + 1 + 3),  # a residual stream, its norm's statistics, u of the last product
        # two streams with statistics, u of four products, the MLP before its activation; attention keeps its own:
        ("selective", 2 * (24 + 1) + 9 + 3 + 6 + 3 + 80),
        ("none", 2 * (24 + 1) + 9 + 3 + 6 + 3 + 80 + 24 + 24),  # and both norms
    ],
)
def test_what_is_kept_for_backward(checkpointing, expected, device):
    if device != "cpu":
        pytest.skip("what attention keeps differs from device to device")
    execution = dataclasses.replace(FUSED, checkpointing=checkpointing, loss="plain")
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    totals = []
    for layers in (1, 2):
        built, _ = adapted(device, execution, {}, layers=layers, **LLAMA)
        tokens, targets, _ = batch(device, packed=False)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = built(tokens, targets)
        totals.append(sum(kept))
        loss.backward()
    attention = 24 + 2 * 12 + 24 + 4  # queries, keys and values, result, and a number for each head
    count = (totals[1] - totals[0]) / tokens.numel()
    assert count == expected + (0 if checkpointing == "full" else attention)
    estimates = [
        estimate_memory(
            ModelConfig(**LLAMA, layers=layers, width=24, heads=4, context=CONTEXT),
            VOCAB,
            micro_batch=1,
            half=False,
            compiled=False,
            execution=execution,
            frozen=FrozenModel(rank=3),
        ).activations
        for layers in (1, 2)
    ]
    # which leaves statistics of norms and attention out
    assert estimates[1] - estimates[0] == pytest.approx(4 * CONTEXT * count, rel=0.04)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("products", ["torch", "tuned"])
def test_fifty_steps_in_bf16_have_the_losses_of_torch(checkpointing, products, device):
    """A model of some size, with frozen weights in bf16: losses within bf16's noise all the way.

    Two runs in bf16 part for good after a few updates, whoever runs them: Adam divides by gradients that are noise at
    first. So torch's operations start every step from the adapters that ours have come to.
    """
    if device != "cuda":
        pytest.skip("of a size for GPUs")
    model = {"layers": 4, "width": 1024, "heads": 16, "kv_heads": 4, "context": 512, "mlp_width": 2816}
    model = LLAMA | model
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (4, 512), generator=generator).to(device)
    how = {"dtype": torch.bfloat16, "plan": {"rank": 16, "alpha": 32.0}, "micro_batch": 4}
    fused = dataclasses.replace(FUSED, checkpointing=checkpointing, products=products, residual="bf16", loss_chunk=8192)
    (mine, adapters), (theirs, others) = (step_of(device, one, 50, **how, **model) for one in (fused, Execution()))
    losses, norms = [], []
    for index in range(50):
        with torch.no_grad():
            others.flat.copy_(adapters.flat)
        with torch.autocast(device, dtype=torch.bfloat16):
            (loss, norm), (loss_there, norm_there) = (
                step(tokens, tokens.roll(-1, 1))[:2].tolist() for step in (mine, theirs)
            )
        assert loss == pytest.approx(loss_there, rel=5e-3), index
        assert norm == pytest.approx(norm_there, rel=0.25), index
        losses.append(loss)
        norms.append(norm / norm_there)
    assert losses[-1] < losses[0] - 0.05
    assert statistics.median(norms) == pytest.approx(1.0, abs=0.03)  # a single step may be at a steep place
