"""Models whose products are in 8 bits with delayed scales: training, resuming, copies of weights, recorded passes.

Without a GPU the kernels run in Triton's interpreter, which is slow: the models are as small as they can be.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")

from flatout.config.schema import ModelConfig, OptimConfig
from flatout.device import Scope, detect_device
from flatout.engine.graphs import MicroBatchGraph, Recorder
from flatout.engine.monitor import Notices
from flatout.engine.run import Run
from flatout.engine.state import Progress, capture, restore
from flatout.engine.step import TrainStep
from flatout.model.execution import Execution
from flatout.model.gpt import GPT, build_model
from flatout.ops.scales import ACTIVATION, GRADIENT, Scales, Slot
from tests.made_optimizers import made_optimizers
from tests.parity.checking import DEVICES
from tests.references import fp8_linear_reference
from tests.set_up import set_up
from tests.unit.test_graphs import FakeRecorder

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.parametrize("device", DEVICES)]

BF16 = torch.bfloat16
BLOCKS = ("qkv", "out", "up", "down")
EVERYTHING = (*BLOCKS, "head")
VOCAB = 61
MODEL = ModelConfig(family="gpt", layers=2, width=64, heads=4, context=16, dropout=0.0)
# As small as can be for the interpreter, which pays for every row: 16 is the least size of an 8-bit product.
PLAIN = {"mlp": "gelu", "positions": "learned", "qk_norm": False, "width": 16, "heads": 1, "context": 4}
SMALL = ModelConfig(family="gpt", layers=2, dropout=0.0, **PLAIN)


def execution(**how) -> Execution:
    return Execution(**{"kernels": "triton", "attention": "reference", **how})


def batch(seed: int, device: str, rows: int = 1, context: int = 4) -> tuple[Tensor, Tensor]:
    """A text with some structure."""
    start = torch.randint(0, VOCAB, (rows, 1), generator=torch.Generator().manual_seed(seed))
    tokens = ((start + 7 * torch.arange(context + 1)) % VOCAB).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def make_step(model: GPT, device: str, *, bf16: bool = True, micro_batch: int = 1, **more) -> TrainStep:
    optim = OptimConfig(learning_rate=2e-3)
    return TrainStep(
        model,
        made_optimizers(model, optim),
        clip=1.0,
        micro_batch=micro_batch,
        scope=Scope(detect_device(device), "bf16" if bf16 else "fp32", True, torch.get_num_threads()),
        **more,
    )


def train(config: ModelConfig, how: Execution, device: str, steps: int, rows: int, *, bf16: bool) -> list[float]:
    model = build_model(config, VOCAB, seed=1, execution=how).to(device)
    step = make_step(model, device, micro_batch=rows, bf16=bf16)
    return [step(*batch(seed, device, rows, config.context))[0].item() for seed in range(steps)]


def apart(mine: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(mine, theirs, strict=True))


def used(model: GPT) -> list[Slot]:
    assert model.narrow.scales is not None
    return [slot for slot in model.narrow.scales.slots if slot is not None]


class Emulation:
    """Delayed scales in plain torch: takes the place of `nn.Linear.forward` in the blocks of a model."""

    def __init__(self, model: GPT, device: str) -> None:
        layers = [layer for block in model.blocks for layer in block.linears().values()]
        self.scales = Scales([ACTIVATION, GRADIENT] * len(layers), torch.device(device))
        self.first = {layer: 2 * index for index, layer in enumerate(layers)}

    def see(self, index: int, x: Tensor) -> None:
        highest = torch.maximum(self.scales.seen_S[index].view(torch.float32), x.detach().float().abs().max())
        self.scales.seen_S[index] = highest.view(torch.int32)

    def __call__(self, layer: nn.Linear, x: Tensor) -> Tensor:
        index = self.first[layer]
        self.see(index, x)
        if self.scales.rounding:
            y = fp8_linear_reference(x, layer.weight, *self.scales.scale_S[index : index + 2].tolist())
        else:
            y = F.linear(x, layer.weight)
        y.register_hook(lambda dy: self.see(index + 1, dy))
        return y


def emulated(
    config: ModelConfig, device: str, steps: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[float], Tensor]:
    """(losses, scales in the end) in plain torch and fp32 but for the 8-bit operands."""
    model = build_model(config, VOCAB, seed=1).to(device)
    emulation = Emulation(model, device)
    step = make_step(model, device, micro_batch=rows, bf16=False)
    losses = []
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda layer, x: emulation(layer, x))
        for seed in range(steps):
            losses.append(step(*batch(seed, device, rows, config.context))[0].item())
            emulation.scales.update()
    return losses, emulation.scales.scale_S


def test_thirty_steps_with_delayed_scales_stay_with_fp32(device, monkeypatch):
    exact = train(MODEL, Execution(), device, 30, 16, bf16=False)
    narrow, _ = emulated(MODEL, device, 30, 16, monkeypatch)
    assert narrow != exact
    assert exact[-1] < exact[0] - 0.5  # it learns something
    assert apart(narrow, exact) < 0.05


def test_kernels_do_what_the_plain_form_does(device, monkeypatch):
    """Every slot of a model at its right place: losses and scales of the emulation, step by step."""
    config, steps, rows = (SMALL, 3, 1) if device == "cpu" else (MODEL, 10, 16)
    expected, scales_S = emulated(config, device, steps, rows, monkeypatch)
    model = build_model(config, VOCAB, seed=1, execution=execution(fp8=BLOCKS)).to(device)
    step = make_step(model, device, micro_batch=rows, bf16=False)
    mine = [step(*batch(seed, device, rows, config.context))[0].item() for seed in range(steps)]
    assert apart(mine[:1], expected[:1]) < 1e-4  # measured, not rounded
    assert apart(mine, expected) < (2e-3 if device == "cpu" else 2e-2)
    assert model.narrow.scales is not None
    ratio_S = model.narrow.scales.scale_S / scales_S
    assert ((ratio_S >= 0.5) & (ratio_S <= 2.0)).all()  # a maximum may fall on the other side of a power of two
    assert (ratio_S == 1.0).float().mean() > 0.8


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gpt", "gpt2"])
def test_thirty_steps_in_8_bits_stay_with_fp32(family, device):
    config = MODEL.model_copy(update={"family": family})
    exact = train(config, Execution(), device, 30, 16, bf16=False)
    how = execution(fp8=EVERYTHING, loss="fused", pad_vocab=64, residual="bf16", attention="sdpa")
    narrow = train(config, how, device, 30, 16, bf16=True)
    assert narrow != exact
    assert apart(narrow, exact) < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("where", [("qkv",), ("out",), ("up",), ("down",), ("head",), EVERYTHING], ids=str)
def test_training_in_8_bits_layer_by_layer(where, checkpointing, device):
    how = {"checkpointing": checkpointing, "loss": "fused", "pad_vocab": 64}
    half = train(MODEL, execution(**how), device, 30, 16, bf16=True)
    narrow = train(MODEL, execution(fp8=where, **how), device, 30, 16, bf16=True)
    assert narrow != half
    assert apart(narrow, half) < 0.05


@pytest.mark.parametrize("where", [BLOCKS, ("up", "out")], ids=str)
def test_kernels_hand_over_what_products_want(where, device, monkeypatch):
    """Only attention's output takes a pass of its own: every other 8-bit tensor was there when it was asked for."""
    model = build_model(SMALL, VOCAB, seed=1, execution=execution(fp8=where)).to(device)
    step = make_step(model, device)
    step(*batch(0, device))
    missed, plain_take = [], Slot.take

    def take(slot, wide):
        found = plain_take(slot, wide)
        if not found[0]:
            missed.append(slot)
        return found

    monkeypatch.setattr(Slot, "take", take)
    step(*batch(1, device))
    expected = [layer.x for layer in (block.out for block in model.narrow.ready) if layer is not None]
    assert missed == [slot for slot in expected if slot is not None]
    assert all(slot.wide is None for slot in used(model)), "nothing is left behind"


def test_computing_again_changes_no_bit(device):
    """What backward computes again it rounds and records again, with the same result."""
    results = []
    for what in ("none", "full"):
        model = build_model(SMALL, VOCAB, seed=1, execution=execution(fp8=BLOCKS, checkpointing=what)).to(device)
        step = make_step(model, device)
        reports = [step(*batch(seed, device)).tolist() for seed in range(2)]
        assert model.narrow.scales is not None
        assert model.narrow.scales.rounding
        results.append((reports, model.narrow.scales.scale_S.tolist()))
    assert results[0] == results[1]


def test_the_first_step_measures_and_later_ones_round(device):
    how = execution(fp8=BLOCKS)
    model = build_model(SMALL, VOCAB, seed=1, execution=how).to(device)
    half = build_model(SMALL, VOCAB, seed=1, execution=execution()).to(device)
    mine, theirs = make_step(model, device), make_step(half, device)
    assert mine(*batch(0, device))[0] == theirs(*batch(0, device))[0], "the first step is in bf16"
    scales = model.narrow.scales
    assert scales is not None
    assert scales.rounding
    first = scales.scale_S.clone()
    assert (first > 0).all()
    assert torch.equal(first, torch.exp2(torch.log2(first).round())), "powers of two"
    assert mine(*batch(1, device))[0] != theirs(*batch(1, device))[0]
    model.eval()
    before = scales.scale_S.clone()
    with torch.no_grad(), torch.autocast(device, dtype=BF16):
        model(*batch(2, device))
    assert not scales.seen_S.any(), "evaluation leaves no trace"
    assert torch.equal(scales.scale_S, before)


def test_a_bad_step_keeps_the_scales_and_measuring_goes_on_until_numbers_are_finite(device, monkeypatch):
    model = build_model(SMALL, VOCAB, seed=1, execution=execution(fp8=("up", "down"))).to(device)
    step = make_step(model, device)
    plain = step.forward_backward

    def infinite(tokens, targets, labelled, *more):
        return plain(tokens, targets, labelled / float("inf"), *more)

    monkeypatch.setattr(step, "forward_backward", infinite)
    assert step(*batch(0, device))[2] == 0
    scales = model.narrow.scales
    assert scales is not None
    assert not scales.rounding
    monkeypatch.undo()
    assert step(*batch(1, device))[2] == 1
    assert scales.rounding
    before = scales.scale_S.clone()
    monkeypatch.setattr(step, "forward_backward", infinite)
    gradients = torch.arange(len(before), device=device) % 2 == 1
    assert step(*batch(1, device))[2] == 0
    assert torch.equal(scales.scale_S[gradients], before[gradients])
    assert not scales.seen_S.any()


# --- resuming ---------------------------------------------------------------------------------------------------------


def narrow_run(tiny, device: str, *words: str, fp8: tuple[str, ...] = BLOCKS) -> Run:
    """A run with 8-bit products. No config may ask a CPU for them, so they are put in behind its back."""
    size = [f"model.{name}={str(value).lower()}" for name, value in {**PLAIN, "layers": 1, "dropout": 0.0}.items()]
    words = ("train.batch_tokens=4", "speed.kernels=torch", "speed.compile=off", "speed.cuda_graphs=off", *words)
    run = set_up(tiny(f"speed.device={device}", "train.deterministic=true", *size, *words))
    run.model.use(execution(fp8=fp8))
    return run


def go_on(run: Run, first: int, last: int) -> list[list[float]]:
    with run.batches(first) as loader:
        reports = []
        for made in loader:
            with run.random.active():
                reports.append(run.step(made.tokens, made.targets).tolist())
            if made.step + 1 == last:
                return reports
    raise AssertionError("the run is too short")


def test_resuming_is_bit_identical(tiny, device):
    whole = narrow_run(tiny, device)
    expected = go_on(whole, 0, 3)
    first = narrow_run(tiny, device)
    assert go_on(first, 0, 2) == expected[:2]
    saved = capture(first, Progress(step=2))
    assert "fp8.scales" in saved.run
    second = narrow_run(tiny, device)
    restore(second, saved)
    assert second.new_notices.take() == []
    assert go_on(second, 2, 3) == expected[2:]
    for (name, mine), theirs in zip(second.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    assert second.model.narrow.scales is not None
    assert torch.equal(second.model.narrow.tensors()["fp8.scales"], whole.model.narrow.tensors()["fp8.scales"])


def test_resuming_without_scales_or_with_those_of_other_layers_says_so(tiny, device):
    plain = narrow_run(tiny, device, fp8=())
    saved = capture(plain, Progress(step=0))
    assert not any(name.startswith("fp8") for name in saved.run)
    run = narrow_run(tiny, device)
    restore(run, saved)
    told = "the checkpoint has no 8-bit scales of these layers: they are measured anew in the first step"
    assert run.new_notices.take() == [told]
    some = narrow_run(tiny, device, fp8=("up",))
    go_on(some, 0, 1)
    saved = capture(some, Progress(step=1))
    restore(run, saved)
    assert run.new_notices.take() == [told]
    assert run.model.narrow.scales is not None
    assert not run.model.narrow.scales.rounding
    go_on(run, 1, 2)
    fewer = narrow_run(tiny, device, fp8=("up",))
    restore(fewer, capture(run, Progress(step=2)))
    assert fewer.new_notices.take() == []
    restore(plain, capture(run, Progress(step=2)))  # a run without 8-bit products does not care
    assert plain.new_notices.take() == []


# --- recorded passes --------------------------------------------------------------------------------------------------


def test_recorded_passes_find_fresh_weights_and_follow_the_change_to_rounding(device):
    """Four micro-batches in a step: the measured step is not recorded, as it never comes again."""
    steps = []
    recorder = FakeRecorder() if device == "cpu" else Recorder(torch.device(device))
    news = Notices()
    for recorded in (True, False):
        config = SMALL.model_copy(update={"layers": 1})
        model = build_model(config, VOCAB, seed=1, execution=execution(fp8=("up", "out"))).to(device)
        graph = MicroBatchGraph(model, news, recorder) if recorded else None
        steps.append(make_step(model, device, micro_batch=1, keep_gradients=True, graph=graph))
    for seed in range(2 if device == "cpu" else 5):  # only a real replay could find yesterday's weights
        mine, theirs = (step(*batch(seed, device, rows=4)) for step in steps)
        assert torch.equal(mine, theirs)
    for a, b in zip(*(step.model.parameters() for step in steps), strict=True):
        assert torch.equal(a, b)
    assert news.take() == []
    if isinstance(recorder, FakeRecorder):
        assert recorder.recordings == 1
        assert recorder.replays == 2  # of the four of the second step, two of which warm up


def test_inference_mode_before_and_after_training(device):
    """Whatever mode a model is first used in, the other still works, and gives the same numbers as plain evaluation."""
    results = []
    for guard in (torch.inference_mode, torch.no_grad):
        model = build_model(SMALL, VOCAB, seed=1, execution=execution(fp8=("up", "down"))).to(device)
        step = make_step(model, device)
        with guard(), torch.autocast(device, dtype=BF16):
            first = float(model(*batch(0, device)))
        step(*batch(0, device))
        step(*batch(1, device))
        with guard(), torch.autocast(device, dtype=BF16):
            results.append((first, float(model(*batch(2, device)))))
        step(*batch(3, device))
    assert results[0] == results[1]


def test_the_first_step_keeps_no_more_than_later_ones(device):
    """It multiplies by weights in bf16, of which no copy may wait for backward."""
    model = build_model(SMALL, VOCAB, seed=1, execution=execution(fp8=BLOCKS)).to(device)
    step = make_step(model, device)
    kept = []
    for index in range(2):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: (sizes.append(x.nbytes), x)[1], lambda x: x
        ):
            step(*batch(index, device))
        kept.append(sum(sizes))
    assert kept[0] == kept[1]


def test_weights_that_change_between_the_passes_are_noticed(device):
    for fp8 in ((), BLOCKS):
        model = build_model(SMALL, VOCAB, seed=1, execution=execution(fp8=fp8, checkpointing="none")).to(device)
        loss = model(*batch(0, device))
        with torch.no_grad():
            model.blocks[0].mlp.up.weight.add_(1.0)
        with pytest.raises(RuntimeError, match="updated between"):
            loss.backward()
