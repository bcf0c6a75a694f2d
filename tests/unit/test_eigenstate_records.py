"""A look inside eigenstate blocks: what is recorded, read back, said, drawn and put on the page."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.config.schema import ModelConfig
from flatout.engine.monitor import look_at_eigenstates
from flatout.model.gpt import GPT, build_model
from flatout.observe.plots import (
    eigenstates_figure,
    write_run_plots,
)
from flatout.observe.report import page_of
from flatout.observe.report_data import report_data
from flatout.observe.runs import record_of_line
from flatout.observe.series import RunNumbers, eigenstate_history, memory_sentence, record_sentence
from flatout.observe.sinks import read_history
from flatout.observe.terminal import TerminalReader
from flatout.observe.trackers import values_of
from flatout.observe.view import ViewState
from flatout.records import EigenstateRecord, record_to_json
from tests.made_runs import eigenstate_run, eigenstates_of, end_of, finished_run, info_of, step_of, write_run
from tests.unit import seen
from tests.unit.test_plots import check_layout, drawn
from tests.unit.test_plots import panel as panel_of
from tests.unit.test_report import ODD
from tests.unit.test_view import lines_of

MANY = tuple(number for number in range(1, 41) if number % 4)


def small_model(pattern: str, **named: Any) -> GPT:
    sizes: dict[str, Any] = {
        "layers": len(pattern),
        "width": 16,
        "heads": 2,
        "context": 64,
        "states": 5,
    }
    return build_model(ModelConfig(pattern=pattern, **{**sizes, **named}), 11)


def set_states(model: GPT, place: int, horizons: list[float], angles: list[float]) -> None:
    with torch.no_grad():
        mixer = model.eigenstates[place]
        mixer.decay_K.copy_(-torch.tensor(horizons).log())
        mixer.detuning_K.copy_((torch.tensor(angles) - mixer.angle_K) * torch.tensor(horizons))


# --- the record -------------------------------------------------------------------------------------------------------


def test_horizons_are_where_a_state_has_fallen_to_1_over_e():
    model = small_model("AEWE", window=8)
    set_states(model, 0, [100.0, 2.0, 64.5, 8.0, 1.0], [math.pi, 0.1, 1.0, 0.01, 2.0])
    (record,) = look_at_eigenstates(model, 7)
    assert (record.step, record.context) == (7, 64)
    assert [layer.layer for layer in record.layers] == [2, 4]  # blocks of attention count too
    first = record.layers[0]
    assert first.states == 5
    assert first.horizon == pytest.approx({"min": 1.0, "10%": 1.0, "50%": 8.0, "90%": 100.0, "max": 100.0}, rel=1e-5)
    for name in first.horizon:
        assert first.magnitude[name] ** first.horizon[name] == pytest.approx(1 / math.e, rel=1e-4)
    assert first.beyond == pytest.approx(2 / 5)
    turns = {"min": 2.0, "50%": 2 * math.pi, "max": 2 * math.pi / 0.01}
    assert {name: first.period[name] for name in turns} == pytest.approx(turns, rel=1e-4)


def test_a_state_that_turns_further_than_half_way_turns_the_other_way():
    model = small_model("E")
    angles = [2 * math.pi - 0.1, math.pi + 1.0, 4 * math.pi + 0.1, math.pi, 3.0]
    set_states(model, 0, [5.0] * 5, angles)
    (record,) = look_at_eigenstates(model, 0)
    seen_as = sorted(2 * math.pi / math.acos(math.cos(angle)) for angle in angles)
    assert record.layers[0].period["min"] == pytest.approx(2.0, rel=1e-4)
    assert record.layers[0].period["max"] == pytest.approx(seen_as[-1], rel=1e-3)


def test_at_first_horizons_span_the_context():
    (record,) = look_at_eigenstates(small_model("EA", states=256, context=4096), 0)
    (layer,) = record.layers
    assert 4.0 <= layer.horizon["min"] < 5.0
    assert 3500 < layer.horizon["max"] <= 4096
    assert layer.horizon["50%"] == pytest.approx(math.sqrt(4 * 4096), rel=0.1)
    assert layer.beyond == 0.0


def test_a_model_of_attention_has_nothing_to_tell():
    assert list(look_at_eigenstates(small_model("AW", window=8), 3)) == []


def test_bad_states_are_seen_and_leave_the_others():
    model = small_model("E")
    set_states(model, 0, [3.0, 4.0, 5.0, 6.0, 7.0], [1.0] * 5)
    with torch.no_grad():
        model.eigenstates[0].decay_K[:2] = torch.tensor([-1000.0, math.nan])
    (record,) = look_at_eigenstates(model, 0)
    layer = record.layers[0]
    assert layer.horizon["min"] == pytest.approx(5.0, rel=1e-5)
    assert math.isnan(layer.horizon["max"])
    assert json.loads(record_to_json(record))["layers"][0]["horizon"]["max"] == "nan"


def test_the_record_comes_back_from_a_folder_and_from_a_running_run(tmp_path: Path):
    record = eigenstates_of(5, layers=(2, 6))
    record.layers[0].period["max"] = math.inf
    folder = write_run(tmp_path / "run", [info_of(tmp_path), record])
    (row,) = read_history(folder).eigenstates
    assert row["layers"][0]["period"]["max"] == math.inf
    assert row["layers"][1]["horizon"] == record.layers[1].horizon
    line = (folder / "metrics.jsonl").read_bytes().splitlines()[1]
    assert record_of_line(line) == record


def test_a_very_deep_line_is_no_trouble(tmp_path: Path):
    folder = finished_run(tmp_path / "run", steps=5)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"type": "eigenstates", "step": 1, "layers": ' + "[" * 400 + "]" * 400 + "}\n")
    assert report_data([read_history(folder)])["runs"][0]["eigenstates"] is None


# --- in words ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("medians", "words"),
    [
        ([(1, 180.4), (8, 2051.0)], "median horizon 180 tokens (layer 1) to 2.05k (layer 8), context 8,192"),
        ([(1, 900.0), (4, 20.0)], "median horizon 20 tokens (layer 4) to 900 (layer 1), context 8,192"),
        ([(3, 3.21)], "median horizon 3.2 tokens (layer 3), context 8,192"),
        ([(1, 64.01), (2, 64.02), (3, 64.0)], "median horizon 64 tokens in all 3 layers, context 8,192"),
        (
            [(1, 64.0), (2, math.inf), (3, math.nan)],
            "median horizon 64 tokens (layer 1) to infinite (layer 2), context 8,192",
        ),
    ],
)
def test_memory_in_a_sentence(medians: list[tuple[int, float]], words: str):
    assert memory_sentence(medians, 8192) == f"eigenstate memory: {words}"


def test_nothing_known_is_not_told():
    assert memory_sentence([], 8192) == ""
    assert memory_sentence([(1, None), (2, math.nan)], None) == ""


def test_the_end_of_a_run_tells_its_memory(capsys: pytest.CaptureFixture[str]):
    first, last = eigenstates_of(0), eigenstates_of(200)
    assert record_sentence(first) != record_sentence(last)
    reader = TerminalReader(10)
    for record in (seen.info(), first, seen.step(1), last, seen.end(1)):
        reader.show(record)
    reader.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == record_sentence(last)
    assert sum("eigenstate memory" in line for line in lines) == 1


def test_the_panel_has_a_line_for_it_where_there_is_room():
    state = ViewState()
    for record in (seen.info(), eigenstates_of(0), seen.step(1), eigenstates_of(200)):
        state.add(record)
    assert record_sentence(eigenstates_of(200)) in "\n".join(lines_of(state, 100, 30))
    for width, height in ((24, 6), (40, 12), (200, 60), (10, 2)):
        lines = lines_of(state, width, height)
        assert len(lines) <= height
        assert all(len(line) <= width for line in lines)


def test_trackers_get_the_medians():
    values = values_of(eigenstates_of(50, layers=(1, 12)))
    assert values.step == 50
    assert {"eigenstates/horizon_tokens_layer_12", "eigenstates/magnitude_layer_01"} <= values.scalars.keys()
    assert len(values.scalars) == 6


# --- read back --------------------------------------------------------------------------------------------------------


def rows_of(*records: EigenstateRecord) -> list[dict[str, Any]]:
    return [json.loads(record_to_json(record)) for record in records]


def test_a_step_comes_once_and_layers_in_their_order():
    rows = rows_of(eigenstates_of(0, layers=(9, 2)), eigenstates_of(50, layers=(2, 9)), eigenstates_of(50, layers=(2,)))
    found = eigenstate_history(rows)
    assert [(layer.layer, layer.steps) for layer in found.layers] == [(2, (0, 50)), (9, (0,))]
    assert found.context == 1024
    assert [step for step, _ in found.middle("horizon")] == [0, 50]


def test_no_damage_of_the_records_is_in_the_way(tmp_path: Path):
    chance = random.Random(0)
    info, end = info_of(tmp_path, steps=60), end_of(tmp_path, 60)
    steps = [step_of(step, steps=60) for step in range(1, 61)]
    for number in range(8):
        rows = rows_of(*(eigenstates_of(step, layers=(1, 2, 3)) for step in (0, 20, 40, 60)))
        for _ in range(8):
            row = chance.choice(rows)
            where = chance.choice([row, *(layer for layer in listed(row) if isinstance(layer, dict))])
            where = chance.choice([where, *(part for part in where.values() if isinstance(part, dict))])
            if where:
                where[chance.choice([*where.keys(), "new"])] = chance.choice(ODD)
        folder = write_run(tmp_path / str(number), [info, *steps, end])
        with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({**row, "type": "eigenstates"}) + "\n" for row in rows)
        history = read_history(folder)
        assert b'"runs":[{' in page_of(report_data([history]))
        run = RunNumbers(history)
        if run.eigenstates.layers and number < 2:
            drawn(lambda run=run: eigenstates_figure(run))
        for line in (folder / "metrics.jsonl").read_bytes().splitlines():
            record = record_of_line(line)
            assert not isinstance(record, EigenstateRecord) or isinstance(record_sentence(record), str)


def listed(row: dict[str, Any]) -> list[Any]:
    return row["layers"] if isinstance(row.get("layers"), list) else []


# --- pictures and tables ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [(1, 3), MANY], ids=["two", "thirty"])
def test_the_picture_can_be_read(tmp_path: Path, layers: tuple[int, ...]):
    folder = eigenstate_run(tmp_path / ("$x_1$" * 20), layers=layers, context=32768)
    run = RunNumbers(read_history(folder))
    figure = drawn(lambda: eigenstates_figure(run))
    check_layout(figure)
    horizon = panel_of(figure, "Memory horizon")
    assert horizon.get_yscale() == "log"
    level = [line for line in horizon.lines if line.get_label() == "context 32,768"]
    assert [value for line in level for value in line.get_ydata()] == [32768, 32768]
    low, high = horizon.get_ylim()
    assert low < 32768 < high
    medians = [layer.last("horizon") for layer in run.eigenstates.layers]
    ends = [line.get_ydata()[-1] for line in horizon.lines if line not in level]
    assert ends == pytest.approx(medians)


def test_magnitudes_near_1_are_told_apart(tmp_path: Path):
    run = RunNumbers(read_history(eigenstate_run(tmp_path / "run", layers=(1, 2, 3), context=32768)))
    axes = panel_of(drawn(lambda: eigenstates_figure(run)), "|λ|")
    low, high = axes.get_ylim()
    assert low > high  # nearer to 1 is higher
    assert axes.yaxis.get_major_formatter()(0.001) == "0.999"
    heights = [axes.transData.transform((0, line.get_ydata()[-1]))[1] for line in axes.lines]
    assert heights == sorted(heights)  # deeper layers remember longer in this run
    assert heights[-1] - heights[0] > 100


def test_what_is_not_finite_is_marked(tmp_path: Path):
    record = eigenstates_of(50, layers=(1, 2))
    record.layers[0].horizon.update({"50%": math.nan, "max": math.nan})
    record.layers[1].horizon.update({"90%": math.inf, "max": math.inf})
    folder = write_run(tmp_path / "run", [info_of(tmp_path), eigenstates_of(0, layers=(1, 2)), step_of(1), record])
    figure = drawn(lambda: eigenstates_figure(RunNumbers(read_history(folder))))
    check_layout(figure)
    assert [list(line.get_xdata()) for line in panel_of(figure, "Memory horizon").lines if line.get_marker() == "X"]


def test_only_a_run_with_eigenstates_has_their_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flatout.observe.plots.write_picture", lambda path, _make, **_: None)
    files = ["steps.csv", "evals.csv", "metrics.png", "results.png"]
    written = write_run_plots(eigenstate_run(tmp_path / "run"))
    assert [path.name for path in written] == [*files, "eigenstates.png"]
    assert [path.name for path in write_run_plots(finished_run(tmp_path / "plain"))] == files


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_report_tells_layers_and_curves(tmp_path: Path):
    (run,) = report_data([read_history(eigenstate_run(tmp_path / "run", layers=(1, 3)))])["runs"]
    part = run["eigenstates"]
    assert [row["layer"] for row in part["layers"]] == [1, 3]
    assert part["sentence"].startswith("Eigenstate memory: median horizon ")
    assert part["context"] == 1024
    curve = run["curves"]["horizon_3"]
    assert curve["s"] == [0, 50, 100, 150, 200]
    assert curve["t"] == 65536
    assert curve["v"][-1] == pytest.approx(eigenstates_of(200).layers[1].horizon["50%"], rel=1e-6)
    lacking = 1 - eigenstates_of(200).layers[1].magnitude["50%"]
    assert run["curves"]["magnitude_3"]["v"][-1] == pytest.approx(lacking, rel=1e-5)
    assert run["curves"]["period_middle"]["v"]


def test_text_in_the_place_of_numbers_does_not_reach_the_page(tmp_path: Path):
    row = rows_of(eigenstates_of(0))[0]
    row["layers"][0] |= {"layer": "<img src=x>", "states": "<svg>"}
    row["layers"][1] |= {"states": "<svg>", "horizon": {"50%": "<b>", "<i>": 4.0}}
    row["context"] = "<p>"
    folder = write_run(tmp_path / "run", [info_of(tmp_path), step_of(1)])
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    (run,) = report_data([read_history(folder)])["runs"]
    told = json.dumps([run["eigenstates"], run["curves"]])
    assert "<" not in told
    assert [layer["layer"] for layer in run["eigenstates"]["layers"]] == [3]
    assert run["eigenstates"]["layers"][0]["median"] == "–"
