"""The panel: whole at every size, honest in its figures, inert against hostile text, and the terminal as it was."""

import io
import math
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest
from rich.cells import cell_len
from rich.console import Console

from flatout.observe.series import GrowingSeries, Series
from flatout.observe.terminal import TerminalReader
from flatout.observe.view import ViewReader, ViewState, chart, panel
from flatout.records import (
    CheckpointRecord,
    EpochRecord,
    EvalRecord,
    Feature,
    NoticeRecord,
    Record,
    SampleRecord,
    SpanRecord,
    StepRecord,
)
from tests.unit.seen import end, info, machine, step

HOSTILE = "\x1b[2J\x1b]0;owned\x07 \u202egnp.exe \u2028 [bold red]no markup[/] 你好世界 \t tab"


def evaluation(number: int, loss: float = 2.5, seconds: float = 1.0) -> EvalRecord:
    return EvalRecord(
        step=number, loss=loss, perplexity=1.0, bits_per_byte=None, tokens=1, seconds=seconds, best=True, reason="step"
    )


def a_run(length: int = 300) -> list[Record]:
    dice = random.Random(3)
    records: list[Record] = [info(folder=f"runs/{HOSTILE}", device=HOSTILE)]
    for number in range(1, length + 1):
        loss = 3.0 + 5 * math.exp(-number / 40) + dice.gauss(0, 0.02) + (4.0 if number == 200 else 0.0)
        records.append(
            step(number, loss=loss, mfu=0.456, memory_bytes=2**35, reserved_bytes=2**36, data_seconds=0.05, epoch=0.5)
        )
        if number % 50 == 0:
            records += [
                machine(number, throttled="power"),
                evaluation(number, loss=loss),
                SampleRecord(step=number, prompt="", text=f"{HOSTILE}\n" * 30),
                CheckpointRecord(step=number, path="p", bytes=2**30, seconds=1.0, best=True),
            ]
    return records


def state_of(records: list[Record]) -> ViewState:
    state = ViewState()
    for record in records:
        state.add(record)
    return state


def lines_of(state: ViewState, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    with console.capture() as captured:
        console.print(panel(state, width, height))
    return captured.get().splitlines()


def text_of(state: ViewState, width: int = 100, height: int = 40) -> str:
    return "\n".join(lines_of(state, width, height))


STATES = {
    "nothing": [],
    "begun": [info()],
    "first step": [info(), step(1)],
    "going on": a_run(),
    "ended": [*a_run(), end(300)],
    "without a start": [step(7), machine(7)],
    "not finite": [info(), *(step(n, loss=math.nan, grad_norm=math.inf, seconds=math.nan) for n in range(1, 60))],
    "no length": [
        info(steps=0, batch_tokens=0),
        *(step(n, tokens_per_second=None, seconds=0.0) for n in range(1, 10)),
    ],
    "huge": [info(steps=10**12), step(10**11, loss=1e30, tokens=10**18, tokens_per_second=1e15, memory_bytes=2**60)],
}


@pytest.mark.parametrize("name", STATES)
def test_the_panel_fits_every_screen(name: str):
    state = state_of(STATES[name])
    heights = (1, 2, 5, 6, 7, 8, 10, 15, 24, 30, 50, 100)
    for number, width in enumerate((1, 10, 23, 24, 40, 60, 61, 79, 80, 99, 100, 120, 160, 200, 300)):
        for height in heights[number % 4 :: 4]:
            lines = lines_of(state, width, height)
            assert 1 <= len(lines) <= height
            assert max(cell_len(line) for line in lines) <= width
            assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u202e]", "".join(lines))


def test_the_frame_is_straight():
    for width in (60, 80, 133, 200):
        assert {cell_len(line) for line in lines_of(state_of(a_run()), width, 40)} == {width}


def test_text_of_a_run_is_no_markup():
    assert "[bold red]no markup[/]" in text_of(state_of(a_run()), 160, 50)


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (160, 50), (200, 15)])
def test_what_matters_is_shown(size: tuple[int, int]):
    shown = text_of(state_of(a_run()), *size)
    for words in ("step 300/1,000", "30.0%", "ETA", "loss", "val loss", "2k tokens/s", "45.6%", "loss spike"):
        assert words in shown
    if size[1] >= 24:
        for words in ("650 of 700 W", "1755 MHz (power)", "66 °C", "97%", "10.0%", "32.0 GiB", "1.00e-03", "sample at"):
            assert words in shown


def test_minutes_are_shown_by_the_clock_and_not_by_planned_steps():
    config = {**info().config, "train": {"minutes": 20.0, "steps": 1000}}
    records = [info(config=config), *(step(number, seconds=0.5) for number in range(1, 1201))]
    shown = text_of(state_of(records))
    assert "step 1,200 " in shown
    assert "50.0%  ETA 10m00s" in shown
    again = text_of(state_of([info(config=config, start_step=1100, resumed_from="x"), *records[1101:]]))
    assert "step 1,200 " in again
    assert "ETA" not in again


def test_one_of_a_thing_is_singular(capsys: pytest.CaptureFixture[str]):
    config = {**info().config, "train": {"minutes": 1.0, "steps": 1}}
    TerminalReader(10).show(info(config=config, steps=1, batch_samples=1))
    assert "run: 1 minute, about 1 step of 1 sample (about" in capsys.readouterr().out


def test_a_run_on_a_cpu_shows_no_empty_fields():
    shown = text_of(state_of([info(), *(step(number) for number in range(1, 20))]))
    for words in ("MFU", "GPU", "power", "clock", "data wait", "reserved", "None"):
        assert words not in shown


def test_several_ranks_are_shown_and_one_is_not():
    def shown(*seconds: float) -> str:
        spans = SpanRecord(step=19, steps=10, seconds={"reduction": 1.0}, calls={}, rank_seconds=seconds)
        return text_of(state_of([info(), *(step(number) for number in range(1, 20)), spans]))

    assert "4, 2 is +30.0%" in shown(3.0, 3.0, 3.9, 3.0)
    assert "25.0%" in shown(3.0, 3.0, 3.9, 3.0)
    assert "2, even" in shown(3.0, 3.0)
    assert "ranks" not in shown()
    assert "grad wait" not in shown()


def test_speed_forgets_the_first_steps_and_time_left_counts_evaluation():
    state = state_of(
        [info(), step(1, seconds=60.0, tokens_per_second=16.7), step(2), *(step(n) for n in range(3, 101))]
    )
    assert state.pace.tokens_per_second == pytest.approx(2000.0)
    assert state.pace.seconds_left == pytest.approx(900 * 0.5)
    trained = 60 + 99 * 0.5
    state.add(evaluation(100, seconds=trained))  # as long as all training until now: so it will be
    assert state.pace.seconds_left == pytest.approx(900 * 0.5 * 2)
    state.add(step(1000))
    assert state.pace.seconds_left == 0
    assert state.skipped == 0
    state.add(step(1001, applied=False))
    assert state.skipped == 1


def test_the_best_and_the_last_validation_loss():
    state = state_of(
        [info(), evaluation(10, 2.5), evaluation(20, 2.25), evaluation(30, math.nan), evaluation(40, 2.75)]
    )
    state.add(step(41))
    shown = text_of(state)
    assert "2.7500 at 40" in shown
    assert "2.2500 at 20" in shown


def test_a_resumed_run_is_one_curve():
    state = state_of([info(), *(step(number, loss=float(number)) for number in range(1, 31))])
    state.add(evaluation(30, 0.5))
    state.add(info(start_step=20, resumed_from="x"))
    for number in range(21, 26):
        state.add(step(number, loss=float(number)))
    assert [loss for _, loss in state.losses.series.points] == [float(number) for number in range(1, 26)]
    assert state.best is None


def test_a_resumed_run_has_the_best_of_before_the_step_it_goes_on_from():
    state = state_of([info(), evaluation(10, 1.0), evaluation(20, 0.75), evaluation(30, 0.5), step(30)])
    for start, best in ((30, (0.5, 30)), (20, (0.75, 20)), (19, (1.0, 10)), (5, None)):
        state.add(info(start_step=start, resumed_from="x"))
        assert state.best == best


def test_a_growing_series_is_drawn_from_few_points_with_every_spike():
    growing = GrowingSeries()
    for number in range(1, 100_001):
        growing.add(number, 1e6 if number == 777 else float(number))
    means, extremes = growing.series.means(512).points, growing.series.thinned(512).points
    for points in (means, extremes):
        assert 256 <= len(points) <= 514
        assert points == sorted(points)
    assert means[-1][1] > 99_500
    assert {(1, 1.0), (777, 1e6), (100_000, 100_000.0)} <= set(extremes)
    growing.cut_back(50_000)
    assert growing.series.points[-2:] == [(49_999, 49_999.0), (50_000, 50_000.0)]


def drawn(
    training: list[tuple[int, float]], validation: Sequence[tuple[int, float]] = (), width: int = 48
) -> list[str]:
    series = Series(numpy.array([step for step, _ in training]), numpy.array([loss for _, loss in training]))
    lines = [line.plain for line in chart(series, validation, 48, 12)]
    assert len(lines) == 12
    assert max(map(cell_len, lines)) <= 48
    return lines


def test_the_axis_of_the_chart_is_where_it_says():
    title, *rows, steps = drawn(
        [(number, float(number)) for number in range(1, 41)], [(1, 40.0), (20, 20.5), (40, 1.0)]
    )
    assert title == "loss: ⠒⠒ training  ● validation"
    assert [row[:10].strip() for row in rows] == ["40.0000", *[""] * 8, "1.0000"]
    assert steps.split() == ["1", "step", "40"]
    assert rows[0][10] == "●", "the first step is at the left, the largest value at the top"
    assert rows[-1][-1] == "●"
    middle = next(number for number, row in enumerate(rows) if "●" in row[12:-1])
    assert 4 <= middle <= 5
    assert 26 <= rows[middle].index("●") <= 30


def test_first_losses_do_not_flatten_the_chart():
    points = [(number, 90.0 if number < 4 else 3.0 + 0.01 * (number % 7)) for number in range(1, 201)]
    _, first, *_ = drawn(points)
    assert float(first.split()[0]) < 4.0


def test_the_chart_shows_losses_that_are_not_finite():
    rows = drawn([(number, math.nan if number > 50 else 3.0) for number in range(1, 101)], [(100, math.inf)])
    assert rows[-2].count("×") >= 18
    assert drawn([(1, math.nan)])[-2].count("×") == 1
    assert drawn([]) == [""] * 12


def test_where_there_is_no_terminal_the_lines_are_the_plain_readers():
    records = [info(), *a_run()[1:], NoticeRecord(step=300, message="hello"), end(300)]
    view, plain = io.StringIO(), io.StringIO()
    for reader in (ViewReader(10, view), TerminalReader(10, plain)):
        for record in records:
            reader.show(record)
        reader.close()
    lines = view.getvalue().splitlines()
    assert lines == plain.getvalue().splitlines()
    assert any(line.startswith("warning: step 200 loss spike: ") for line in lines)


@pytest.mark.parametrize("before", [0, 266])
def test_the_line_forgets_the_first_steps_of_a_resumed_run_too(before: int):
    """They are slow: kernels are compiled anew in every process."""
    stream = io.StringIO()
    reader = TerminalReader(10, stream)
    reader.show(info(steps=1000, batch_tokens=1000))
    for number in range(before + 1, before + 15):
        reader.show(step(number, tokens_per_second=10.0 if number < before + 4 else 1000.0))
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("step") and "step    1/" not in line]
    assert lines
    assert all("1k tok/s" in line for line in lines), lines


@pytest.mark.parametrize(
    ("width", "kept", "gone"),
    [
        (120, ("val 2.5000", "lr 1.00e-03", "MFU 41%", "4.0 GiB", "ETA 14m20s"), ()),
        (80, ("loss 3.0000", "val 2.5000", "1k tok/s", "MFU 41%", "ETA 14m20s"), ("GiB", "lr ")),
        (50, ("loss 3.0000", "1k tok/s", "ETA 14m20s"), ("val", "MFU")),
        (20, ("loss 3.0000", "ETA 14m20s"), ("tok/s",)),
    ],
)
def test_the_line_keeps_what_matters_most(width: int, kept: tuple[str, ...], gone: tuple[str, ...]):
    reader = TerminalReader(10, io.StringIO())
    reader.show(info(steps=1000, batch_tokens=1000))
    reader.show(evaluation(100, seconds=0.0))
    last = step(140, tokens_per_second=1000.0, mfu=0.41, memory_bytes=2**32)
    reader.show(last)
    line = reader._line(last, width)
    assert len(line) <= max(width, 40)
    assert [words for words in kept if words not in line] == []
    assert [words for words in gone if words in line] == []


def test_the_line_forgets_them_where_another_process_goes_on_with_a_run_that_is_watched():
    stream = io.StringIO()
    reader = TerminalReader(1, stream)
    for first, rate in ((1, 500.0), (9, 1000.0)):
        reader.show(info(steps=100, batch_tokens=1000))
        for number in range(first, first + 8):
            reader.show(step(number, tokens_per_second=10.0 if number == first else rate))
    assert "1k tok/s" in stream.getvalue().splitlines()[-1]


@pytest.mark.parametrize("name", STATES)
def test_every_run_can_be_shown_in_lines(name: str):
    stream = io.StringIO()
    reader = ViewReader(1, stream)
    for record in STATES[name]:
        reader.show(record)
    reader.close()
    steps = [record.step for record in STATES[name] if isinstance(record, StepRecord)]
    assert not steps or f"{steps[-1]}/" in stream.getvalue()


def test_an_early_stop_says_what_did_not_happen():
    stream = io.StringIO()
    reader = TerminalReader(10, stream)
    for record in (info(), evaluation(10, 2.4), end(10, "early_stop")):
        reader.show(record)
    assert "of training: no lower validation loss; best" in stream.getvalue()


def test_a_run_that_has_all_its_steps_says_what_makes_it_longer():
    stream = io.StringIO()
    reader = TerminalReader(10, stream)
    reader.show(info(steps=40, start_step=40, resumed_from="x"))
    reader.show(end(40))
    assert "runs/imagined is finished already, at step 40; to make it longer, " in stream.getvalue()
    assert stream.getvalue().endswith("train.epochs, or resume it with --minutes N\n")


def test_lines_of_hostile_records_are_harmless():
    stream = io.StringIO()
    reader = ViewReader(10, stream)
    odd = info(
        resumed_from=HOSTILE, family=HOSTILE, features=(Feature(name=HOSTILE, asked="x", used="y", why=HOSTILE),)
    )
    saved = CheckpointRecord(step=9, path=HOSTILE, bytes=1, seconds=1.0, best=False)
    for record in [*a_run(60), odd, saved, end(9, HOSTILE), NoticeRecord(step=9, message=HOSTILE)]:
        reader.show(record)
    reader.close()
    assert not re.search(r"[\x1b\x07\u202e]", stream.getvalue())
    assert "ended at step 9" in stream.getvalue()


# --- on a real terminal -----------------------------------------------------------------------------------------------

SHOWS = """
import sys, time
from flatout.observe.view import ViewReader
from tests.unit.test_view import a_run
reader = ViewReader(10)
try:
    for record in a_run():
        reader.show(record)
    print("a warning of torch", file=sys.stderr)
    {middle}
finally:
    reader.close()
    reader.close()
print("the end")
"""


def on_a_terminal(middle: str, *, term: str = "xterm-256color", signal_number: int | None = None) -> tuple[str, int]:
    """What a process writes to a terminal of 80 by 24, and its exit code."""
    ours, theirs = pty.openpty()
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", SHOWS.format(middle=middle)],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}", "TERM": term, "COLUMNS": "80", "LINES": "24"},
    )  # fmt: skip
    os.close(theirs)
    written, sent = b"", False
    until = time.monotonic() + 600
    while time.monotonic() < until:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                piece = os.read(ours, 65536)
            except OSError:
                break
            if not piece:
                break
            written += piece
        if signal_number is not None and not sent and b"step 300" in written:
            process.send_signal(signal_number)
            sent = True
    os.close(ours)
    return written.decode("utf-8", "replace"), process.wait(timeout=600)


ENTER, LEAVE, HIDE, SHOW = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25l", "\x1b[?25h"


def test_the_terminal_is_given_back():
    written, code = on_a_terminal("time.sleep(1)")
    assert code == 0
    assert (written.count(ENTER), written.count(LEAVE)) == (1, 1)
    assert written.rindex(SHOW) > written.rindex(HIDE)
    after = written[written.index(LEAVE) :]
    assert "step 300/1,000" in after  # the last panel stays
    assert after.index("step 300/1,000") < after.index("a warning of torch") < after.index("the end")
    assert "a warning of torch" not in written[: written.index(LEAVE)]
    assert not any(piece in written for piece in ("\x1b]0;owned", "\u202e"))
    frames = written[: written.index(LEAVE)].count("╭")
    assert 2 <= frames < 100  # one at the start, one at the end, and four a second between, for 300 steps


def test_it_is_given_back_after_a_signal_as_well():
    written, code = on_a_terminal("time.sleep(600)", signal_number=signal.SIGINT)
    assert code != 0
    assert written.rindex(LEAVE) > written.rindex(ENTER)
    assert written.rindex(SHOW) > written.rindex(HIDE)
    assert "KeyboardInterrupt" in written[written.rindex(LEAVE) :]


def test_leaving_at_once():
    written, code = on_a_terminal("reader.leave_at_once(); import os; os._exit(7)")
    assert code == 7
    assert written.endswith(LEAVE + SHOW)


def test_a_terminal_that_cannot_move_its_cursor_gets_lines():
    written, _ = on_a_terminal("pass", term="dumb")
    assert ENTER not in written
    assert "\x1b" not in written
    assert "warning: step 200 loss spike" in written


@pytest.mark.parametrize(
    ("log_every", "length", "count", "printed"),
    [
        (100, 13, 4, [1, 2, 3, 4]),
        (100, 13, 20, [*range(1, 11), 18]),
        (10, 3, 4, [1, 2, 3, 4]),  # a short fine-tuning
        (10, 2, 21, [*range(1, 11), 15, 20]),  # a tiny file: no more often than steps
    ],
)
def test_epochs_are_printed_unless_they_are_many_and_short(log_every: int, length: int, count: int, printed: list[int]):
    stream = io.StringIO()
    reader = TerminalReader(log_every, stream)
    reader.show(info())
    for number in range(1, length * count + 1):
        reader.show(step(number))
        if number % length == 0:
            reader.show(
                EpochRecord(
                    step=number, epoch=number // length, mean_loss=3.0, seconds=1.0, windows_per_second=1.0,
                    tokens_per_second=1.0,
                )
            )  # fmt: skip
    found = re.findall(r"^epoch (\d+) done", stream.getvalue(), flags=re.MULTILINE)
    assert [int(number) for number in found] == printed
