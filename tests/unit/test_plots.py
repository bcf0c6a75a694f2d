"""Pictures and tables of runs: everything visible, nothing overlapping, nothing lost, whatever a run holds."""

import csv
import dataclasses
import itertools
import json
import math
import os
import random
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from flatout.cli import dispatch
from flatout.errors import DataError, ResourceError, UsageError, UserError
from flatout.files import write_whole
from flatout.observe import picture, plots
from flatout.observe.picture import is_picture, short_number, time_unit
from flatout.observe.plots import (
    comparison_figure,
    metrics_figure,
    results_figure,
    write_comparison,
    write_run_plots,
)
from flatout.observe.series import RunNumbers, Series, smooth, thin_marks, usual_range, window_of
from flatout.observe.sinks import RunHistory, distinct_names, read_history
from flatout.records import StepRecord

Row = dict[str, Any]
REPORT_STYLE = Path(picture.__file__).parent / "page" / "report.css"
LAB = Path(__file__).parents[2] / "lab"
NASTY = "$x_1^2$ \\frac{1}{0} <script>"


def info(**named: Any) -> Row:
    return {
        "type": "run", "device": "NVIDIA H200", "family": "gpt", "parameters": 124_000_000, "steps": 100,
        "batch_tokens": 4096, "context": 1024, "vocab": 50257, "dataset": "d", "tokenizer": "gpt2", "start_step": 0,
        **named,
    }  # fmt: skip


def step(number: int, **named: Any) -> Row:
    wave = math.sin(number)
    return {
        "type": "step", "step": number, "epoch": number / 100, "loss": 3 + 7 / number + 0.1 * wave,
        "learning_rate": 6e-4 * min(1, number / 10), "grad_norm": 0.4 + 4 / number + 0.1 * wave, "applied": True,
        "tokens": 4096 * number, "seconds": 0.4 + 0.01 * wave if number > 1 else 60.0,
        "tokens_per_second": 10_000 + 200 * wave if number > 1 else 68.0, "mfu": 0.4, "memory_bytes": 60 * 2**30,
        "loss_scale": None, "micro_batch": 4, "parameter_norm": 300 + number, "data_seconds": 1e-3,
        "reserved_bytes": 66 * 2**30, **named,
    }  # fmt: skip


def evaluation(number: int, loss: float, **named: Any) -> Row:
    return {
        "type": "eval", "step": number, "loss": loss, "perplexity": 9.0, "bits_per_byte": None, "tokens": 99,
        "seconds": 1.5, "best": True, "reason": "step", **named,
    }  # fmt: skip


def notice(number: int, message: str) -> Row:
    return {"type": "notice", "step": number, "message": message}


def end(number: int, reason: str = "finished") -> Row:
    return {"type": "end", "step": number, "reason": reason}


def steps(count: int, **named: Any) -> list[Row]:
    return [step(number, **named) for number in range(1, count + 1)]


def troubled() -> list[Row]:
    """All that can happen to a run: skipped steps, NaN, running out of memory, resumes."""
    rows = [info(), *steps(100), info(start_step=30), info(start_step=70), evaluation(50, math.nan), end(100)]
    for number in (40, 41, 42):
        rows[number] |= {"loss": math.nan, "grad_norm": math.inf, "applied": False}
        rows.append(notice(number, "loss nan and gradient norm inf: batch 39 did not change the weights"))
    rows.append(notice(20, "CUDA out of memory, tried to allocate 2 GiB: continuing with micro-batches of 2"))
    rows.append(notice(0, "a fallback"))
    rows += [evaluation(number, 9 - 5 * math.sin(number / 40)) for number in (25, 60, 75, 100)]
    return rows


def enormous() -> list[Row]:
    rows = [info(parameters=10**15, batch_tokens=10**12, context=10**9, device="W" * 500, family="W" * 90)]
    rows += steps(60, memory_bytes=10**17, learning_rate=1e-30, loss=1e300, parameter_norm=1e12, seconds=1e7)
    return [*rows, *(info(start_step=start) for start in range(5, 55)), *(evaluation(at, 1e299) for at in (10, 60))]


CASES: dict[str, list[Row]] = {
    "one step": [info(), step(1)],
    "two steps": [info(), *steps(2), evaluation(2, 4.0)],
    "no step": [info()],
    "plain": [info(), *steps(100), evaluation(50, 4.0), evaluation(100, 3.0), end(100)],
    "troubled": troubled(),
    "all nan": [info(), *steps(60, loss=math.nan, grad_norm=-math.inf, applied=False), evaluation(60, math.inf)],
    "old": [{"type": "run"}, *({"type": "step", "step": n, "loss": 5.0} for n in range(1, 30))],
    "enormous": enormous(),
    "evaluations only": [info(), evaluation(0, 9.0), evaluation(5, 8.0)],
    "wrong types": [
        {**info(), "parameters": "many", "steps": None, "device": ["cpu"], "start_step": {}},
        *steps(5, loss="low", tokens=[1], seconds="nan", applied="no", memory_bytes=True, grad_norm=10**400),
        {"type": "step"}, {"type": "step", "step": "7"}, {"type": "step", "step": -1}, {"type": "eval", "step": None},
        {"type": "notice", "step": 1.5}, {"type": "end"},
    ],
}  # fmt: skip


def save(folder: Path, rows: list[Row]) -> Path:
    """A run folder, with NaN and infinity as the words that a run writes for them."""
    words = {"NaN": '"nan"', "-Infinity": '"-inf"', "Infinity": '"inf"'}
    lines = [json.dumps(row) for row in rows]
    for number, word in words.items():
        lines = [line.replace(f": {number}", f": {word}") for line in lines]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def run_of(tmp_path: Path) -> Callable[..., Any]:
    def make(rows: list[Row], name: str = "run") -> Any:
        return RunNumbers(read_history(save(tmp_path / name, rows)), name)

    return make


def drawn(make: Callable[[], Any]) -> Any:
    """The figure, laid out as `write_picture` would."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):
        figure = make()
        figure.draw_without_rendering()
    return figure


def check_layout(figure: Any) -> None:
    """No text leaves the picture or lies on another one."""
    from matplotlib.text import Text

    hidden = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        ticks = [*axis.majorTicks, *axis.minorTicks]  # labels of ticks outside the limits exist, and are not drawn
        shown = {tick.label1 for tick in axis._update_ticks()} if axis.axes.axison else set()
        hidden |= {label for tick in ticks for label in (tick.label1, tick.label2)} - shown
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text not in hidden]
    assert len(boxes) > 5
    for words, box in boxes:
        assert -1 <= box.x0 <= box.x1 <= figure.bbox.x1 + 1, words
        assert -1 <= box.y0 <= box.y1 <= figure.bbox.y1 + 1, words
    for (first, one), (second, other) in itertools.combinations(boxes, 2):
        apart = one.x1 <= other.x0 or other.x1 <= one.x0 or one.y1 <= other.y0 or other.y1 <= one.y0
        assert apart, (first, second)


def panel(figure: Any, title: str) -> Any:
    return next(axes for axes in figure.axes if axes.get_title(loc="left") == title)


def marks(axes: Any, marker: str) -> list[float]:
    return sorted(x for line in axes.lines if line.get_marker() == marker for x in line.get_xdata())


def words_of(axes: Any) -> list[str]:
    return [] if axes.get_legend() is None else [text.get_text() for text in axes.get_legend().get_texts()]


# --- pictures ---------------------------------------------------------------------------------------------------------


@pytest.mark.grid
@pytest.mark.parametrize(
    ("case", "make"),
    [(case, results_figure) for case in CASES]
    + [(case, metrics_figure) for case in ("one step", "troubled", "all nan", "old", "enormous", "wrong types")],
)
def test_every_run_can_be_drawn_and_read(case: str, make: Callable[[Any], Any], run_of: Any) -> None:
    run = run_of(CASES[case], NASTY * 9)
    figure = drawn(lambda: make(run))
    check_layout(figure)
    assert figure.texts[0].get_text().startswith("$x_1^2$ \\frac")
    assert not any(text.get_parse_math() for text in figure.texts)


def test_what_happened_is_marked_where_it_happened(run_of: Any) -> None:
    axes = panel(drawn(lambda: results_figure(run_of(CASES["troubled"]))), "Loss")
    # Three neighbours are one mark in a picture this wide, or two; the legend has the count.
    assert set(marks(axes, "X")) <= {40, 41, 42, 50}
    assert {40, 50} <= set(marks(axes, "X"))
    assert set(marks(axes, "v")) <= {40, 41, 42}
    assert marks(axes, "s") == [0, 20]  # and none for the notices of skipped updates
    assert {"training: NaN or infinite (3)", "update skipped (3)"} <= set(words_of(axes))
    dashed = [segment[0][0] for lines in axes.collections for segment in lines.get_segments()]
    assert dashed == [30, 70]
    training = next(line for line in axes.lines if line.get_alpha() is not None)
    y = dict(zip(training.get_xdata(), training.get_ydata(), strict=True))
    assert [number for number in range(1, 101) if math.isnan(y[number])] == [40, 41, 42]
    gradient = panel(drawn(lambda: metrics_figure(run_of(CASES["troubled"]))), "Gradient norm")
    assert 40 in marks(gradient, "X")


def test_the_best_validation_loss_has_a_star(run_of: Any) -> None:
    losses = {20: 4.0, 40: 3.0, 60: 3.0, 80: math.nan}
    run = run_of([info(), *steps(100), *(evaluation(at, loss) for at, loss in losses.items())])
    best = run.best()
    assert best is not None
    assert (best["step"], best["loss"]) == (40, 3.0)
    figure = drawn(lambda: results_figure(run))
    assert marks(panel(figure, "Loss"), "*") == [40]
    assert marks(panel(figure, "Loss over tokens"), "*") == [40 * 4096]
    assert panel(figure, "Loss").get_title(loc="right") == "best validation loss 3.0000 at step 40"
    assert run_of([info(), evaluation(1, math.nan)]).best() is None
    assert run_of([info(), evaluation(1, 0.0), evaluation(2, 1.0)]).best()["step"] == 1


def test_one_slow_step_does_not_press_the_others_flat(run_of: Any) -> None:
    axes = panel(drawn(lambda: metrics_figure(run_of(CASES["plain"]))), "Step time")
    assert axes.get_ylabel() == "milliseconds"
    assert axes.get_title(loc="right") == "median 400 ms"
    assert axes.get_ylim()[1] < 600
    assert marks(axes, "^") == [1]
    assert "step off the scale, up to 60 s" in words_of(axes)


def test_a_point_between_two_nans_is_a_dot(run_of: Any) -> None:
    rows = [info(), *steps(100)]
    for number in range(1, 101, 2):
        rows[number]["grad_norm"] = math.nan
    rows[50]["parameter_norm"] = rows[52]["parameter_norm"] = math.nan
    axes = panel(drawn(lambda: metrics_figure(run_of(rows))), "Parameter norm")
    assert marks(axes, "o") == [51]
    few = panel(drawn(lambda: metrics_figure(run_of([info(), *steps(2)]))), "Gradient norm")
    assert marks(few, "o") == [1, 2]


def test_a_flat_line_looks_flat_and_missing_values_say_so(run_of: Any) -> None:
    figure = drawn(lambda: metrics_figure(run_of([info(), *steps(50, parameter_norm=300.0, memory_bytes=None)])))
    low, high = panel(figure, "Parameter norm").get_ylim()
    assert high - low > 2
    assert len(panel(figure, "Memory").lines) == 1
    empty = drawn(lambda: metrics_figure(run_of(CASES["old"])))
    assert all([text.get_text() for text in axes.texts] == ["not recorded"] for axes in empty.axes)


def test_how_a_run_ended_is_shown(run_of: Any) -> None:
    def told(*rows: Row) -> str:
        return plots._state(run_of([info(), *rows]))

    assert told(*steps(100), end(100)).startswith("finished at step 100   ·   1m40s of training")
    assert told(*steps(9), end(9, "interrupted")).startswith("interrupted at step 9 of 100")
    assert told(*steps(9), end(9, "early_stop")).startswith("stopped early at step 9 of 100")
    assert told(*steps(5), end(4, "interrupted")).startswith("step 5 of 100, no end yet: still running, or killed")
    assert told() == "no step was taken"
    assert "resumed once" in told(*steps(9), info(start_step=5), end(9))
    assert "resumed" not in told(*steps(9), info(start_step=9), end(9))  # resumed when there was nothing left to do
    assert "2 updates skipped" in told(*steps(2, applied=False))


def test_a_long_run_is_drawn_from_few_points_and_its_spikes_are_there(tmp_path: Path) -> None:
    count = 100_000
    rows = steps(count, loss=2.0)
    rows[70_001]["loss"] = 9.0
    rows[5_000] |= {"loss": math.nan, "applied": False}
    history = RunHistory(tmp_path, (info(),), tuple(rows), *(((),) * 8))
    figure = drawn(lambda: results_figure(RunNumbers(history)))
    for axes in figure.axes:
        for line in axes.lines:
            assert len(line.get_xdata()) <= 4 * 900 + 4
    axes = panel(figure, "Loss")
    assert marks(axes, "^") == [70_002]
    assert marks(axes, "X") == marks(axes, "v") == [5_001]
    raw = next(line for line in axes.lines if line.get_alpha() is not None)
    assert 70_002 in raw.get_xdata()


# --- what a picture can show ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logarithmic", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_thinning_keeps_the_extremes_of_every_column(seed: int, logarithmic: bool) -> None:
    rng = numpy.random.default_rng(seed)
    x = numpy.sort(rng.uniform(1, 1e6, 30_000))
    y = rng.normal(size=30_000)
    y[rng.integers(0, 30_000, 50)] *= 1e9
    y[rng.integers(0, 30_000, 2000)] = math.nan
    thinned = Series(x, y).thinned(200, logarithmic=logarithmic)
    assert len(thinned.x) <= 402
    assert (numpy.diff(thinned.x) >= 0).all()
    kept = {(a, b) for a, b in zip(thinned.x.tolist(), thinned.y.tolist(), strict=True) if not math.isnan(b)}
    finite = numpy.isfinite(y)
    assert kept <= set(zip(x[finite].tolist(), y[finite].tolist(), strict=True))
    places = numpy.log10(x) if logarithmic else x
    columns = numpy.minimum((places - places[0]) / (places[-1] - places[0]) * 100, 99).astype(int)
    for column in range(100):
        inside = finite & (columns == column)
        for value in (y[inside].min(), y[inside].max()) if inside.any() else ():
            assert value in thinned.y
        bad = x[~finite & (columns == column)]
        assert set(bad[[0, -1]] if len(bad) else ()) <= set(thinned.x)


def test_thinning_leaves_gaps_and_short_curves() -> None:
    x = numpy.arange(10_000.0)
    y = numpy.where((x > 4000) & (x < 6000), math.nan, 1.0)
    thinned = Series(x, y).thinned(200)
    assert numpy.isnan(thinned.y[(thinned.x > 4100) & (thinned.x < 5900)]).all()
    assert numpy.isnan(thinned.y).any()
    short = Series(x[:200], y[:200])
    assert short.thinned(200).x.tolist() == short.x.tolist()
    nothing = Series(x, numpy.full(10_000, math.nan)).thinned(200)
    assert len(nothing.x) <= 200
    assert {0.0, 9999.0} <= set(nothing.x)
    assert len(thin_marks(x, 0, 1e4, 50)) == 50
    assert thin_marks(numpy.array([3.0]), 3.0, 3.0, 50).tolist() == [3.0]


def test_smooth_lines_are_not_late() -> None:
    ramp = numpy.arange(1000.0)
    assert numpy.allclose(smooth(ramp, 51)[:975], ramp[:975])
    assert numpy.allclose(smooth(numpy.full(90, 7.0), 9), 7.0)
    noise = numpy.random.default_rng(0).normal(size=5000)
    assert smooth(noise, 101)[300:-300].std() < 0.15
    holes = numpy.where(ramp % 3 == 0, math.nan, 5.0)
    assert numpy.allclose(smooth(holes, 9)[20:], 5.0)
    assert numpy.isnan(smooth(numpy.full(50, math.nan), 5)).all()
    assert [window_of(count) for count in (0, 39, 40, 1000, 100_000)] == [1, 1, 5, 21, 2001]


def test_limits_leave_out_what_is_rare_and_far_away() -> None:
    values = numpy.concatenate([numpy.linspace(1, 2, 1000), [500.0]])
    low, high = usual_range(values, 1.5) or (0, 0)
    assert low == 1
    assert 2 < high < 4
    assert usual_range(values, math.inf) == (1, 500)
    assert usual_range(numpy.array([1.0, 1.0, 1.2]), 1) == (1.0, 1.2)  # only a little further
    assert usual_range(numpy.array([math.nan]), 1) is None
    assert usual_range(numpy.array([1e308, -1e308]), 1.5) == (-1e100, 1e100)


def test_numbers_on_axes_are_short() -> None:
    given = (0, 0.0006, 6e-5, 2.5, 1000, 9999, 10_000, 250_000, 1.25e6, 5e10, -20_000, 1e16)
    words = ["0", "0.0006", "6e-05", "2.5", "1,000", "9,999", "10k", "250k", "1.25M", "50B", "-20k", "1e+16"]
    assert [short_number(value) for value in given] == words
    assert [time_unit(value)[1] for value in (5, 179, 180, 10_799, 10_800, 400_000)] == [
        "seconds", "seconds", "minutes", "minutes", "hours", "days",
    ]  # fmt: skip


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "write_picture", lambda _path, _make, **_: None)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_files_of_a_run(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", CASES["troubled"])
    written = write_run_plots(folder)
    names = ["steps.csv", "evals.csv", "metrics.png", "results.png"]
    assert written == [folder / "plots" / name for name in names]
    assert sorted(path.name for path in (folder / "plots").iterdir()) == sorted(names)
    assert all(path.read_bytes().startswith(b"\x89PNG") and is_picture(path) for path in written[2:])
    before = [path.read_bytes() for path in written]
    assert write_run_plots(folder) == written
    assert [path.read_bytes() for path in written] == before  # the same run gives the same bytes


@pytest.mark.usefixtures("no_pictures")
def test_tables_hold_every_number(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", CASES["troubled"])
    write_run_plots(folder)
    history = read_history(folder)
    table = read_csv(folder / "plots" / "steps.csv")
    fields = [field.name for field in dataclasses.fields(StepRecord) if field.name != "update_ratio"]
    assert list(table[0]) == [*fields, "training_seconds", "val_loss"]
    assert len(table) == 100
    for row, cells in zip(history.steps, table, strict=True):
        for field in fields:
            value = row[field]
            assert cells[field] == ("" if value is None else str(int(value)) if field == "applied" else repr(value))
    assert table[39]["loss"] == "nan"
    assert table[39]["grad_norm"] == "inf"
    assert {row["step"]: row["val_loss"] for row in table if row["val_loss"]}.keys() == {"25", "50", "60", "75", "100"}
    assert table[49]["val_loss"] == "nan"
    assert float(table[-1]["training_seconds"]) == pytest.approx(sum(row["seconds"] for row in history.steps))
    evals = read_csv(folder / "plots" / "evals.csv")
    assert [row["step"] for row in evals] == ["25", "50", "60", "75", "100"]
    assert evals[0]["tokens_seen"] == str(25 * 4096)
    assert evals[0]["training_seconds"] == table[24]["training_seconds"]
    assert evals[0]["tokens"] == "99"
    assert evals[0]["reason"] == "step"


@pytest.mark.usefixtures("no_pictures")
def test_tables_of_older_and_of_broken_runs_have_empty_cells(tmp_path: Path) -> None:
    write_run_plots(save(tmp_path / "old", CASES["old"]))
    row = read_csv(tmp_path / "old" / "plots" / "steps.csv")[0]
    assert {name: cell for name, cell in row.items() if cell} == {"step": "1", "loss": "5.0"}
    write_run_plots(save(tmp_path / "wrong", CASES["wrong types"]))
    table = read_csv(tmp_path / "wrong" / "plots" / "steps.csv")
    assert len(table) == 5
    assert table[0]["tokens"] == ""
    assert table[0]["grad_norm"] == str(10**400)


@pytest.mark.usefixtures("no_pictures")
def test_names_in_tables_are_one_line_and_no_formula(tmp_path: Path) -> None:
    names = ["=1+1", "@x", "a\nb\x1b[31m", 'quo"te, comma', "plain"]
    folders = [save(tmp_path / name, [info(), *steps(2)]) for name in names]
    written = write_comparison(folders, tmp_path / "o" / "c.svg", tmp_path / "o" / "s.csv", tmp_path / "o" / "e.csv")
    assert [path.name for path in written] == ["s.csv", "e.csv", "c.svg"]
    rows = read_csv(written[0])
    assert list(dict.fromkeys(row["run"] for row in rows)) == [
        "'=1+1", "'@x", "a b\ufffd[31m", 'quo"te, comma', "plain",
    ]  # fmt: skip
    assert len(rows) == 10
    assert list(read_csv(written[1])) == []


def test_needs_no_torch_and_opens_no_window(tmp_path: Path) -> None:
    save(tmp_path / "run", CASES["two steps"])
    code = (
        "import sys; from pathlib import Path; from flatout.observe.plots import write_run_plots;"
        "print(len(write_run_plots(Path(sys.argv[1]), form='svg')));"
        "assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules)"
    )
    environment = {**os.environ, "MPLBACKEND": "TkAgg", "DISPLAY": ""}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert (done.stdout, done.stderr) == ("4\n", "")


def test_a_picture_that_cannot_be_made_leaves_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "run", CASES["plain"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DataError, match="needs the package matplotlib"):
        write_run_plots(folder)
    assert sorted(path.name for path in (folder / "plots").iterdir()) == ["evals.csv", "steps.csv"]


def test_a_full_disk_is_an_error_and_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "run", CASES["plain"])
    table, picture = b"step,training_seconds\n", b"\x89PNG\r\n\x1a\ntEXtSoftware\0flatout"
    before = {"steps.csv": table, "evals.csv": table, "metrics.png": picture, "results.png": picture}
    (folder / "plots").mkdir()
    for name, content in before.items():
        (folder / "plots" / name).write_bytes(content)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ResourceError, match="could not write the table"):
        write_run_plots(folder)
    with pytest.raises(ResourceError, match="could not write the picture"):
        write_run_plots(folder, tables=False)
    assert {path.name: path.read_bytes() for path in (folder / "plots").iterdir()} == before


# --- comparisons ------------------------------------------------------------------------------------------------------


def test_several_runs_share_a_picture_that_can_be_read(run_of: Any) -> None:
    runs = [run_of(rows, f"{NASTY} {name}") for name, rows in CASES.items()]
    figure = drawn(lambda: comparison_figure(runs))
    check_layout(figure)
    shown = [text.get_text() for text in figure.axes[-1].texts]
    assert sum(words.startswith("$x_1^2$") for words in shown) == len(CASES)
    assert "different tokenizers" in figure.texts[2].get_text()


def test_runs_with_other_tokenizers_are_compared_by_bits_per_byte(run_of: Any) -> None:
    losses = {"bytes": 1.5, "gpt2": 3.0}
    runs = [
        run_of([info(tokenizer=name), *steps(9), evaluation(9, loss, bits_per_byte=loss / 2)], name)
        for name, loss in losses.items()
    ]
    figure = drawn(lambda: comparison_figure(runs))
    check_layout(figure)
    assert figure.texts[2].get_text().startswith("losses do not compare: these runs have different tokenizers")
    top = [axes.get_title(loc="left") for axes in figure.axes if axes.get_subplotspec().rowspan.start == 0]
    assert "Bits per byte over steps" in top
    assert not any("Validation loss" in axes.get_title(loc="left") for axes in figure.axes)
    names = [text.get_text() for text in figure.axes[-1].texts]
    assert {"bits/byte", "0.7500", "1.5000"} <= set(names)


def test_a_fine_tuned_models_own_tokenizer_is_not_said_to_be_another(run_of: Any) -> None:
    runs = [
        run_of([info(tokenizer=kind, dataset=data), *steps(3)], kind) for kind, data in (("bytes", "a"), ("model", "b"))
    ]
    assert "these runs have different data" in comparison_figure(runs).texts[2].get_text()


def test_very_many_runs(run_of: Any) -> None:
    runs = [run_of([info(), *steps(3)], f"a-very-long-name-that-all-of-them-share-{n}") for n in range(40)]
    figure = drawn(lambda: comparison_figure(runs))
    check_layout(figure)
    shown = [text.get_text() for text in figure.axes[-1].texts]
    assert "and 19 more" in shown
    names = [words for words in shown if words.startswith("a-very")]
    assert len(set(names)) == len(names) == 21  # cut in the middle, so that their ends tell them apart
    assert figure.texts[2].get_text() == ""


def test_runs_of_very_different_lengths_can_both_be_seen(run_of: Any) -> None:
    short, long = run_of([info(), *steps(5)], "short"), run_of([info(), *steps(500)], "long")
    figure = drawn(lambda: comparison_figure([short, long]))
    assert panel(figure, "Training loss over steps").get_xscale() == "log"
    figure = drawn(lambda: comparison_figure([long, long]))
    assert panel(figure, "Training loss over steps").get_xscale() == "linear"
    low, high = panel(figure, "Validation loss over steps").get_xlim()
    assert (low, high) == panel(figure, "Training loss over steps").get_xlim()  # side by side, the same axis


def test_names_that_tell_runs_apart(tmp_path: Path) -> None:
    assert distinct_names([Path("a/x"), Path("b/y")]) == ["x", "y"]
    assert distinct_names([Path("a/x"), Path("b/x"), Path("b/z")]) == ["a/x", "b/x", "z"]
    assert distinct_names([Path("a/r/x"), Path("b/r/x")]) == ["a/r/x", "b/r/x"]
    with pytest.raises(UsageError, match="named twice"):
        write_comparison([Path("a/x"), Path("a/../a/x")], tmp_path / "c.png")


# --- the verb ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with two runs, and no time spent on drawing."""
    save(tmp_path / "runs" / "a", CASES["plain"])
    save(tmp_path / "runs" / "b", CASES["plain"])
    (tmp_path / "runs" / "a" / "checkpoints" / "step-00000010").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)

    def fake(path: Path, _make: object, *, overwrite: bool) -> None:
        marked = {".png": b"\x89PNG\r\n\x1a\ntEXtSoftware\0flatout", ".svg": b"<?xml <dc:title>flatout</dc:title>"}
        write_whole(path, marked[path.suffix])

    monkeypatch.setattr(plots, "write_picture", fake)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_where_files_go(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["plot", "runs/a"]) == 0
    assert printed(capsys) == [
        f"wrote runs/a/plots/{name}" for name in ("steps.csv", "evals.csv", "metrics.png", "results.png")
    ]
    assert dispatch(["plot", "runs/a", "--json", "--svg", "--out", "x/y", "--no-csv"]) == 0
    assert json.loads(capsys.readouterr().out) == {"files": ["x/y/metrics.svg", "x/y/results.svg"]}
    assert dispatch(["plot", "runs/a", "--svg", "runs/b"]) == 0
    assert printed(capsys) == ["wrote plots/steps.csv", "wrote plots/evals.csv", "wrote plots/comparison.svg"]
    assert dispatch(["plot", "runs/a", "runs/b", "--out", "c.svg"]) == 0
    assert printed(capsys) == ["wrote c-steps.csv", "wrote c-evals.csv", "wrote c.svg"]
    assert (
        dispatch(["plot", "runs/a", "runs/b"]) == dispatch(["plot", "runs/a", "--out", "x/y"]) == 0
    )  # ours are written over
    assert read_csv(place / "plots" / "steps.csv")[0]["run"] == "a"


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ([], "required: RUN", "--help"),
        (["runs/c"], "is not a folder", "run folder"),
        ([""], "'' is not a folder", "run folder"),
        (["x" * 5000], "is not a folder", "run folder"),
        (["empty"], "has no metrics.jsonl", "run folder"),
        (["runs/a", "runs/../runs/a"], "named twice", "once"),
        (["runs/a", "--out", ""], "--out needs a folder", "--out plots"),
        (["runs/a", "--out", "x.png"], "has several pictures", "name a folder"),
        (["runs/a", "runs/b", "--out", "runs/a/plots"], "is the plots folder of a run", "another folder"),
        (["runs/a", "--out", "runs/a/metrics.jsonl"], "a file in the way", "--out"),
        (["runs/a", "--out", "runs/a/metrics.jsonl/x"], "a file in the way", "--out"),
        (["runs/a", "--out", "a\0b"], "is no name for a folder", "--out"),
        (["runs/a", "--outt", "x"], "unknown option '--outt'", "did you mean --out?"),
        (["runs/a", "train.steps=5"], "'train.steps=5' is not a folder", "run folder"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(place: Path, words: list[str], message: str, hint: str) -> None:
    before = sorted(place.rglob("*"))
    with pytest.raises(UserError) as caught:
        dispatch(["plot", *words])
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("name", ["metrics.png", "steps.csv", "evals.csv"])
def test_files_that_are_not_ours_are_left_alone(place: Path, name: str) -> None:
    (place / "mine").mkdir()
    (place / "mine" / name).write_bytes(b"step,loss\n1,2\n")
    with pytest.raises(UsageError, match="does not look like a file that flatout wrote"):
        dispatch(["plot", "runs/a", "--out", "mine"])
    assert [path.name for path in (place / "mine").iterdir()] == [name]
    assert (place / "mine" / name).read_bytes() == b"step,loss\n1,2\n"


def test_a_folder_in_the_place_of_a_picture(place: Path) -> None:
    (place / "plots" / "comparison.png").mkdir(parents=True)
    with pytest.raises(UsageError, match="is not a file"):
        dispatch(["plot", "runs/a", "runs/b"])


def test_tables_of_one_run_do_not_replace_those_of_a_comparison(place: Path) -> None:
    dispatch(["plot", "runs/a", "runs/b"])
    with pytest.raises(UsageError, match=r"steps\.csv is there"):
        dispatch(["plot", "runs/a", "--out", "plots"])


def test_our_real_pictures_are_known_as_ours(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", CASES["two steps"])
    other = save(tmp_path / "b", CASES["two steps"])
    pictures = [
        *write_run_plots(folder, form="svg", tables=False, out=tmp_path / "svg"),
        *write_comparison([folder, other], tmp_path / "c.png"),
    ]
    assert [path.suffix for path in pictures] == [".svg", ".svg", ".png"]
    assert all(is_picture(path) for path in pictures)
    from matplotlib.figure import Figure

    Figure().savefig(tmp_path / "other.png")
    Figure().savefig(tmp_path / "other.svg")
    assert not is_picture(tmp_path / "other.png")
    assert not is_picture(tmp_path / "other.svg")


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def test_nothing_of_a_users_is_replaced_unless_he_says_so(place: Path) -> None:
    kept = place / "kept.png"
    kept.write_bytes(b"mine")
    spreadsheet = b"step,loss,training_seconds,my_notes\n1,2,3,good\n"
    for name, content in (("metrics.png", b"mine"), ("steps.csv", spreadsheet), ("results.png", None)):
        target = place / "runs" / "a" / "plots" / name
        target.parent.mkdir(exist_ok=True)
        if content is None:
            target.unlink()
            target.symlink_to(kept)
        else:
            target.write_bytes(content)
        before = tree(place)
        with pytest.raises(UsageError) as caught:
            dispatch(["plot", "runs/a"])  # also in the run's own folder
        assert name in caught.value.message
        assert "--overwrite" in caught.value.hint
        assert tree(place) == before
        assert dispatch(["plot", "runs/a", "--overwrite"]) == 0
        assert target.read_bytes() not in (content, b"mine")
    assert kept.read_bytes() == b"mine", "a link is replaced, not what it leads to"
    assert not target.is_symlink()


@pytest.mark.parametrize("word", ["x" * 300, f"{'x' * 300}/y", "runs/a/metrics.jsonl/x", "/dev/null"])
def test_places_that_cannot_be(place: Path, word: str) -> None:
    before = tree(place)
    with pytest.raises(UserError):
        dispatch(["plot", "runs/a", "--out", word])
    assert tree(place) == before


def test_a_run_that_cannot_be_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "runs" / "a" / "metrics.jsonl").write_bytes(b"\xff\n{]\n")
    with pytest.raises(DataError, match="holds no run"):
        dispatch(["plot", "runs/b", "runs/a"])
    assert not (place / "plots").exists()

    def refused(_self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        dispatch(["plot", "runs/b"])


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "term")]
)
def test_signals_end_it_cleanly(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, code: int, word: str
) -> None:
    def interrupted(_path: Path, _make: object, *, overwrite: bool) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr(plots, "write_picture", interrupted)
    assert dispatch(["plot", "runs/a"]) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(word)
    assert sorted(path.name for path in (place / "runs" / "a" / "plots").iterdir()) == ["evals.csv", "steps.csv"]


# --- whatever a file holds --------------------------------------------------------------------------------------------


def mangled(seed: int) -> list[Row]:
    rng = random.Random(seed)
    odd = [
        None,
        True,
        "nan",
        "inf",
        "-inf",
        "",
        "x",
        [],
        {},
        -1,
        0,
        0.0,
        1e308,
        -1e308,
        5e-324,
        10**400,
        -(10**400),
        2**53,
    ]
    rows = [info(), *steps(rng.choice([1, 3, 60, 130])), evaluation(1, 3.0), evaluation(40, 2.0), end(3)]
    rows += [info(start_step=2), notice(2, "out of memory"), notice(3, "hm")]
    share = rng.choice([0.01, 0.1, 0.5])
    for row in rows:
        for field in list(row):
            if field != "type" and rng.random() < share:
                row[field] = rng.choice(odd)
            elif field != "type" and rng.random() < share / 4:
                del row[field]
    rng.shuffle(rows)
    return rows


def check_mangled(folder: Path, seed: int) -> None:
    run = RunNumbers(read_history(save(folder, mangled(seed))))
    for make in (metrics_figure, results_figure, lambda run: comparison_figure([run, run])):
        drawn(lambda make=make: make(run))
    plots.write_tables([run], folder / "s.csv", folder / "e.csv", names=True)
    for table in ("s.csv", "e.csv"):
        header, *lines = csv.reader((folder / table).read_text(encoding="utf-8").splitlines())
        assert header[0] == "run"
        assert all(len(line) == len(header) for line in lines)


@pytest.mark.parametrize("seed", range(2))
def test_a_mangled_file_can_be_drawn(tmp_path: Path, seed: int) -> None:
    check_mangled(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 150))
def test_many_mangled_files_can_be_drawn(tmp_path: Path, seed: int) -> None:
    check_mangled(tmp_path, seed)


def test_pictures_and_the_report_share_their_colours():
    style = REPORT_STYLE.read_text(encoding="utf-8")
    light = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", style[: style.index("@media")]))
    assert tuple(light[f"run-{number}"] for number in range(8)) == picture.COLOURS[:8]
    named = {"ink": picture.INK, "soft": picture.FAINT, "grid": picture.GRID, "bad": picture.RED}
    assert {name: light[name] for name in named} == named


def test_the_pictures_of_the_lab_are_drawn_from_their_rows():
    lab = runpy.run_path(str(LAB / "pictures.py"))
    drawn, hash_of = lab["DRAWN"], lab["hash_of"]
    assert drawn.keys() == {path.name for path in LAB.glob("*.png")}
    assert all(is_picture(LAB / name) for name in drawn)
    heads = {name: (LAB / name).read_bytes().partition(b"IDAT")[0] for name in drawn}
    old = [name for name, (_, rows) in drawn.items() if f"rows\0{hash_of(rows)}".encode() not in heads[name]]
    assert not old, "drawn from other rows: run lab/pictures.py"
    figures = {name: draw(rows) for name, (draw, rows) in drawn.items()}
    words = " ".join(text.get_text() for text in figures["time-to-loss-h200.png"].texts)
    for row in ("nanoGPT, 124M AdamW 1.2e-3, cosine, 131,072\ntokens a step", "3.779 after 102 s", "2.776 after 44 s"):
        assert row in words
