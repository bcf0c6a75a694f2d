"""Runs in a notebook: one picture redrawn in its place, tables that hold no markup of a run, silence elsewhere."""

import dataclasses
import logging
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import flatout
from flatout.observe import notebook
from flatout.observe.notebook import Chart, RunResult
from flatout.records import NoticeRecord, PrepareProgress, Record, StepRecord
from flatout.shown import ShortlyShown, Shown
from tests.made_runs import end_of, eval_of, info_of, step_of


class Handle:
    def __init__(self) -> None:
        self.pictures: list[bytes | None] = []
        self.words: list[str] = []

    def update(self, chart: Chart) -> None:
        made = chart._repr_png_()
        self.pictures.append(made and made[0])
        self.words.append(repr(chart))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Handle:
    """A stand-in for IPython in a notebook; its `display` makes the one output that is updated."""
    handle = Handle()

    def display(chart: Chart, *, display_id: bool) -> Handle:
        assert display_id
        assert not handle.pictures, "one output"
        handle.update(chart)
        return handle

    fake = types.SimpleNamespace(
        version_info=(9, 0),  # matplotlib looks at it
        get_ipython=lambda: types.SimpleNamespace(kernel=object()),
        display=types.SimpleNamespace(display=display),
    )
    monkeypatch.setitem(sys.modules, "IPython", fake)  # pyright: ignore[reportArgumentType]
    return handle


END = end_of(Path("runs/x"), 4)


def step(number: int, loss: float = 2.0) -> StepRecord:
    return step_of(number, loss=loss)


def test_a_chart_is_one_picture_that_is_redrawn_and_ends_up_to_date(shown: Handle, capsys: pytest.CaptureFixture[str]):
    chart = Chart(seconds=0.0)
    before = PrepareProgress("reading", 0, 1, 30, 40, 0, 0, 0)
    for record in (before, info_of(Path("runs/x")), step(1, 3.0), NoticeRecord(step=2, message="x"), END):
        chart._due = 0.0  # drawing may rest
        chart(record)
    assert capsys.readouterr() == ("note: x\n", ""), "the others draw"
    assert [picture is None for picture in shown.pictures] == [True, True, False, False]
    assert shown.words[:2] == ["preparing: reading 75%", "runs/x: waiting for the first step"]
    assert shown.pictures[-1] != shown.pictures[-2]
    assert chart._line().endswith(" · finished")


def test_the_picture_has_ticks_and_both_curves():
    chart = Chart(shown=False)
    for record in (step(1, 3.0), step(2, 2.0), eval_of(2, 2.5)):
        chart(record)
    axes = chart._figure().axes[0]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "training",
        "validation",
        "lowest validation",
    ]
    assert len(axes.get_xticks()) > 1
    assert len(axes.get_yticks()) > 1


def trained(name: str, on_record: Callable[[Record], object]) -> RunResult:
    words = ["data.tokenizer=bytes", "model.layers=1", "model.width=32", "model.heads=2", "train.batch_tokens=256"]
    words += ["train.steps=3", "eval.tokens=256", "eval.sample_tokens=0", f"output.name={name}"]
    return flatout.train(flatout.load_config("shakespeare", words), on_record=on_record)


def test_a_result_keeps_its_run_and_shows_its_curve_once(
    shown: Handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    watched, hidden = Chart(seconds=0.0), Chart(shown=False)
    both = [trained("one", watched), trained("other", lambda record: hidden(record))]
    assert ["<img" in result._repr_html_() for result in both] == [False, True]
    both += [trained("third", hidden)]
    assert [result.chart.info and result.chart.info.folder for result in both] == [
        "runs/one",
        "runs/other",
        "runs/third",
    ]
    assert all(len(result.chart.losses) == 3 for result in both)


def test_a_warning_in_a_notebook_is_a_plain_line(
    shown: Handle, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", [])  # pytest's
        notebook.warn("a disk is slow")
        assert capsys.readouterr() == ("note: a disk is slow\n", "")
        with caplog.at_level(logging.ERROR, "flatout"):
            notebook.warn("a disk is slow")
    assert caplog.messages == []
    notebook.warn("a disk is slow")  # as after logging.basicConfig
    assert capsys.readouterr() == ("", "")
    assert caplog.messages == ["a disk is slow"]


def test_a_chart_of_another_run_begins_anew_and_one_of_a_resumed_run_goes_on():
    chart = Chart(shown=False)
    for record in (info_of(Path("one")), step(1), step(2), step(3), eval_of(3, 2.0)):
        chart(record)
    chart(dataclasses.replace(info_of(Path("one")), start_step=2))
    assert ([step for step, _ in chart.losses], chart.evals) == ([1, 2], [])
    chart(info_of(Path("two")))
    assert (chart.losses, chart.evals, chart.last) == ([], [], None)


def test_a_fast_run_is_not_drawn_at_every_step(shown: Handle):
    chart = Chart(seconds=1000.0)
    for number in range(1, 50):
        chart(step(number))
    assert len(shown.pictures) == 1
    chart(END)
    assert len(shown.pictures) == 2


def test_a_config_and_a_plan_show_what_differs_and_not_pages():
    loaded = flatout.load_config("shakespeare-char", ["data.tokenizer=char"], train={"steps": 30})
    assert repr(loaded) == "LoadedConfig(preset shakespeare-char, data.tokenizer=char, train.steps=30)"
    shown = loaded._repr_html_()
    assert '<th style="text-align: left">train.steps</th><td>30 (' in shown
    assert "optim.eps" not in shown, "a default"


def test_a_list_of_rows_is_a_table_of_its_own():
    @dataclasses.dataclass(frozen=True)
    class Row(Shown):
        field: str
        loss: float | None

    @dataclasses.dataclass(frozen=True, repr=False)
    class Result(ShortlyShown):
        rows: tuple[Row, ...]
        device: str

    result = Result(tuple(Row(f"<{number}>", 1 / 3) for number in range(40)), "cpu")
    shown = result._repr_html_()
    assert "<td>40 rows</td>" in shown
    assert "<td>&lt;0&gt;</td><td>0.33333</td>" in shown
    assert "and 10 more" in shown
    assert repr(result).startswith("Result(rows=")
    assert len(repr(result)) < 520


def test_a_long_run_keeps_few_points(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(notebook, "MOST_POINTS", 100)
    chart = Chart()
    for number in range(1, 5000):
        chart(step(number, float("nan") if number == 7 else 1 / number))
    assert 40 < len(chart.losses) <= 102
    assert chart.losses[-1][0] > 4800
    assert chart._repr_png_() is not None


@pytest.mark.parametrize("ipython", [None, types.SimpleNamespace(get_ipython=lambda: None),
                                     types.SimpleNamespace(get_ipython=lambda: object())],
                         ids=["absent", "imported", "terminal"])  # fmt: skip
def test_elsewhere_nothing_is_shown(ipython, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    chart = Chart(seconds=0.0)
    chart(step(1))
    chart(END)
    assert capsys.readouterr() == ("", "")
    assert repr(chart) == "Chart(step 1, 0 evaluations)"


def test_records_and_results_show_themselves_without_markup_of_the_run():
    notice = NoticeRecord(step=3, message="<script>alert(1)</script>" + "x" * 500)
    shown = notice._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    assert len(shown) < 600
    chart = Chart()
    chart(step(1))
    result = RunResult(Path("runs/<b>"), info_of(Path("runs/<b>")), END, chart)
    assert "<b>" not in result._repr_html_()
    assert "<img" in result._repr_html_()
    assert result.loss == END.val_loss
    assert repr(result) == "RunResult('runs/<b>', finished)"
