"""What an estimate counts, adds up and says, apart from the probe."""

import dataclasses
import io

import pytest

from flatout.config.load import load_config
from flatout.config.schema import RunConfig
from flatout.engine.saving import is_due
from flatout.observe.sheets import print_sheet
from flatout.tuning import estimate as estimate_module
from flatout.tuning.estimate import EstimateResult, Figure, Timed, TimePart, Visits, estimate, visits_of

NOWHERE = ("data.source=null", "data.folder=nowhere", "data.tokenizer=bytes")


def walked(config: RunConfig, steps: int, windows: int | None) -> Visits:
    """The loop's conditions, step by step, where every evaluation is the best so far."""
    sequences = config.train.batch_tokens // config.model.context
    best = config.checkpoint.every != 0 or config.eval.patience > 0
    evaluations = samples = saves = 0
    for step in range(1, steps + 1):
        ending = step == steps
        epoch = windows is not None and step * sequences // windows > (step - 1) * sequences // windows
        evaluating = ending or is_due(step, config.eval.steps) or bool(config.eval.epochs and epoch)
        sampling = ending or is_due(step, config.eval.sample_every)
        every = config.checkpoint.epochs
        span = (windows or 1) * every
        whole = bool(epoch and every) and step * sequences // span > (step - 1) * sequences // span
        saving = ending or whole or is_due(step, config.checkpoint.steps) or (evaluating and best)
        evaluations += evaluating
        samples += sampling and config.eval.sample_tokens > 0
        saves += saving
    return Visits(evaluations, samples, saves)


@pytest.mark.grid
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["eval.every=7", "checkpoint.every=5"],
        ["eval.every=0", "checkpoint.every=0"],
        ["eval.every=6", "checkpoint.every=4", "eval.sample_every=9"],
        ["eval.every=10", "checkpoint.every=0", "eval.sample_tokens=0"],
        ["eval.every=1 epoch", "checkpoint.every=9", "eval.sample_every=3"],
        ["eval.every=1 epoch", "checkpoint.every=0"],
        ["eval.every=3", "eval.patience=500", "checkpoint.every=0"],
        ["eval.every=1", "checkpoint.every=1"],
        ["eval.every=0", "checkpoint.every=2 epochs"],
        ["eval.every=9", "checkpoint.every=1 epoch"],
    ],
)
@pytest.mark.parametrize(("steps", "windows"), [(100, 131), (99, 40), (1, 7), (0, 7), (57, None)])
def test_the_counts_are_those_of_the_loop(words: list[str], steps: int, windows: int | None):
    config = load_config("shakespeare-char", words).config
    sequences = config.train.batch_tokens // config.model.context
    found = visits_of(config.eval, config.checkpoint, steps, windows, sequences)
    expected = walked(config, steps, windows)
    assert (found.evaluations, found.samples) == (expected.evaluations, expected.samples)
    assert found.checkpoints <= expected.checkpoints <= found.checkpoints + found.evaluations


TIMED = Timed(
    steps=40,
    setup=2.0,
    first=3.0,
    step=0.5,
    note="10 steps",
    tokens_per_second=128.0,
    spread=0.01,
    mfu=None,
    evaluation=Figure(4.0, "measured"),
    evaluation_once=1.0,
    sample=Figure(None, "unknown", "it broke"),
    checkpoint=Figure(0.25, "measured"),
    checkpoint_bytes=1000,
    peak_bytes=2**40,
)


def test_an_estimate_adds_up_what_was_timed(tiny, monkeypatch: pytest.MonkeyPatch):
    loaded = tiny(
        "eval.every=10", "eval.sample_every=20", "checkpoint.every=20", "checkpoint.keep=2", "eval.patience=3"
    )
    monkeypatch.setattr(estimate_module, "time_run", lambda *_, **__: TIMED)
    found = estimate(loaded, price=3.6, imported=5.0)
    parts = {part.name: (part.times, part.seconds.value) for part in found.parts}
    assert parts == {
        "start-up": (1, 10.0),
        "training": (40, 20.0),
        "evaluations": (4, 17.0),
        "samples": (2, None),
        "checkpoints": (4, 1.0),
    }
    assert found.parts[0].each.note.startswith("imports, ")
    assert (found.seconds.value, found.seconds.note) == (48.0, "without samples, which is unknown")
    assert found.cost.value == pytest.approx(3.6 * 48 / 3600)
    assert (found.tokens_per_second.value, found.step_seconds.value, found.mfu.value) == (128.0, 0.5, None)
    assert (found.steps.value, found.tokens.value, found.peak_measured.value) == (40, 40 * 64, 2**40)
    assert found.tokens_per_parameter.value == pytest.approx(2560 / (found.parameters.value or 0))
    assert (found.checkpoint_bytes.value, found.disk_bytes.value) == (1000, 4000), "two, the best, one in the making"
    told = "\n".join(found.notes)
    assert ("eval.patience" in told, "the best checkpoint is kept" in told, "streamed" in told) == (True, True, False)


def test_an_estimate_without_a_probe_tells_no_time(tiny):
    found = estimate(tiny("checkpoint.every=0", "checkpoint.keep=3"), probe=False, price=1.0)
    assert (found.parts, found.seconds.value, found.cost.value, found.spread) == ((), None, None, None)
    for figure in (found.seconds, found.cost, found.tokens_per_second, found.mfu):
        assert (figure.how, figure.value) == ("unknown", None)
        assert figure.note
    assert found.disk_bytes.value == found.checkpoint_bytes.value, "one checkpoint, at the end"
    assert found.checkpoint_bytes.how == "estimated"
    assert found.problem == ""
    assert found.notes == ()
    free = estimate(tiny(), probe=False)
    assert "--price" in free.cost.note
    assert "timed on" not in " ".join(estimate(tiny(*NOWHERE), probe=False).notes), "nothing was timed"
    lines = shown(free)
    assert "counted: exact; projected: estimated, times how often; estimated: by formula" in lines


def test_parts_of_the_memory_add_up_to_the_estimate(tiny):
    found = estimate(tiny(), probe=False)
    parts = dict(found.memory_parts)
    assert sum(parts.values()) - 2 * parts["later"] == found.peak_estimate.value
    assert sum(row.times * row.parameters for row in found.layers) == found.parameters.value
    lines = shown(found)
    assert any("weights" in line and "estimated" in line for line in lines)
    assert any(line.startswith("block A") for line in lines)


def made(**changes) -> EstimateResult:
    part = TimePart(
        name="training", times=700, each=Figure(0.1, "measured"), once=0.0, seconds=Figure(70.0, "projected")
    )
    evaluations = dataclasses.replace(part, name="evaluations", times=4, once=2.0, seconds=Figure(6.0, "projected"))
    none = Figure(None, "unknown", "no disk")
    unknown = dataclasses.replace(part, name="checkpoints", each=none, times=2, seconds=none)
    values = {
        "config": "tiny", "device": "cpu", "flatout": "0", "torch": "2.13", "data": "shakespeare", "problem": "",
        "way_out": "", "micro_batch": 16, "context": 128, "accumulation": 1, "batch_tokens": 2048,
        "steps": Figure(700, "counted"), "parameters": Figure(796160, "counted"), "tokens": Figure(1433600, "counted"),
        "epochs": Figure(1.43, "counted"), "tokens_per_parameter": Figure(1.8, "counted"),
        "tokens_per_second": Figure(20480.0, "measured", "mean of 59 steps"), "step_seconds": Figure(0.1, "measured"),
        "spread": 0.05, "mfu": Figure(None, "unknown"), "seconds": Figure(80.0, "projected"),
        "parts": (part, evaluations, unknown), "price": 2.5,
        "cost": Figure(0.06, "projected"), "peak_estimate": Figure(3e8, "estimated"),
        "peak_measured": Figure(5e8, "measured"), "device_bytes": 2**34, "checkpoint_bytes": Figure(9e6, "measured"),
        "disk_bytes": Figure(3.6e7, "projected", "4 at once"), "memory_parts": {}, "layers": (),
        "notes": ("the data is not prepared",), "probe_seconds": 1.0,
    }  # fmt: skip
    return EstimateResult(**(values | changes))


def shown(result: EstimateResult) -> list[str]:
    stream = io.StringIO()
    print_sheet(result.sheet(), stream)
    return stream.getvalue().splitlines()


def test_every_figure_of_the_sheet_says_how_it_came_about():
    lines = shown(made())
    figures = lines[3 : lines.index("", 3)]
    assert len(figures) == 13
    for line in figures:
        assert any(word in line for word in ("counted", "measured", "projected", "estimated", "unknown")), line
    assert any("evaluations" in line and "4 x 100 ms" in line and "2.0s more the first time" in line for line in lines)
    assert any("checkpoints" in line and "no disk" in line and " - " in line for line in lines)
    assert "note: the data is not prepared" in lines


def test_a_hostile_name_cannot_move_the_cursor():
    lines = shown(made(config="\x1b[2Jboo", data="\x1b]0;title\x07 of \u202ewords", notes=["\x9b1m"]))
    assert not any(character in "".join(lines) for character in "\x1b\x07\u202e\x9b")
    assert "boo" in lines[0]
