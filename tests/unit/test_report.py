"""The report's data and page: what it tells of runs, and that nothing a run holds can act in it."""

import base64
import dataclasses
import hashlib
import itertools
import json
import math
import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from flatout.cli import dispatch
from flatout.errors import DataError, ResourceError, UsageError, UserError
from flatout.observe.report import MARK, MOST_RUNS, json_for_page, page_of, read_runs, write_report
from flatout.observe.report_data import figures_of, report_data
from flatout.observe.runs import RunState
from flatout.observe.series import MOST_POINTS, RunNumbers, Series, curves_of, medians, thin
from flatout.observe.sinks import RunHistory, distinct_names, read_history
from flatout.records import Record, SampleRecord, StepRecord
from tests.made_runs import (
    CONFIG,
    end_of,
    eval_of,
    finished_run,
    info_of,
    machine_of,
    notice_of,
    sign_lock,
    step_of,
    training,
    write_run,
)

HOSTILE = "</script><img src=x onerror=alert(1)><!--\u2028\u2029 & \"'"


def data_of(*folders: Path) -> dict[str, Any]:
    return report_data(read_runs(folders))


def run_of(folder: Path) -> dict[str, Any]:
    return data_of(folder)["runs"][0]


def figure(run: dict[str, Any], key: str) -> str:
    return next(figure["text"] for figure in run["figures"] if figure["key"] == key)


def speed(run: dict[str, Any]) -> dict[str, str]:
    return {label: text for group in run["speed"] for label, text, _ in group["rows"]}


def page_parts(page: bytes) -> dict[str, str]:
    text = page.decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    style, script = re.search(r"<style>(.*?)</style>", text, re.S), re.search(r"<script>(.*?)</script>", text, re.S)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    found = {"policy": policy, "style": style, "script": script, "data": data}
    return {name: match[1] for name, match in found.items() if match is not None}


# --- curves -----------------------------------------------------------------------------------------------------------


def test_thinning_keeps_ends_and_every_spike():
    values = [random.Random(7).random() for _ in range(50_000)]
    spikes = {123: 9.0, 25_000: -4.0, 49_998: 7.5}
    for place, value in spikes.items():
        values[place] = value
    kept = thin(range(50_000), values, 1000).tolist()
    assert len(kept) <= 1002
    assert kept == sorted(set(kept))
    assert {0, 49_999, *spikes} <= set(kept)


def test_thinning_keeps_values_that_are_not_finite():
    values = [1.0] * 10_000
    values[5000:9000] = [math.nan] * 4000
    values[17] = math.inf
    kept = thin(range(10_000), values, 200).tolist()
    assert 17 in kept
    assert 5000 in kept
    assert len(kept) < 500
    assert thin(range(5000), [math.nan] * 5000, 100)[0] == 0


def test_a_short_series_stays_as_it_is():
    assert thin([1, 2, 3], [3.0, 1.0, 2.0], 2400).tolist() == [0, 1, 2]
    assert thin([], [], 10).tolist() == []


def test_smoothing_ignores_spikes_and_what_is_not_finite():
    values = [2.0] * 1000
    values[500], values[200] = 1e9, math.nan
    smooth = medians(Series(numpy.arange(1000), numpy.array(values)), 1000)
    assert (smooth.x.tolist(), smooth.y.tolist()) == (list(range(1000)), [2.0] * 1000)
    assert len(medians(Series(numpy.arange(100), numpy.full(100, math.nan)), 50).x) == 0


def test_curves_hold_steps_tokens_and_seconds(tmp_path: Path):
    history = read_history(finished_run(tmp_path / "run", steps=100, every=25))
    loss, val = (curves_of(RunNumbers(history), 2400)[name] for name in ("loss", "val_loss"))
    assert loss["s"] == list(range(1, 101))
    assert loss["t"] == 65536  # per step
    assert loss["e"] == pytest.approx(list(itertools.accumulate(history.column("seconds"))), rel=1e-6)
    assert val["s"] == [25, 50, 75, 100]
    assert val["e"] == [loss["e"][step - 1] for step in val["s"]]


def test_tokens_of_a_run_whose_batch_changed_are_told_step_by_step(tmp_path: Path):
    tokens = [10, 20, 50, 80]  # the last is a whole multiple of its step
    body = [step_of(step, tokens=count) for step, count in enumerate(tokens, start=1)]
    history = read_history(write_run(tmp_path / "run", [info_of(tmp_path), *body]))
    assert curves_of(RunNumbers(history), 2400)["loss"]["t"] == tokens


def test_a_number_that_was_never_told_has_no_curve(tmp_path: Path):
    body = [step_of(step, mfu=None, memory_bytes=None, data_seconds=None) for step in range(1, 60)]
    folder = write_run(tmp_path / "run", [info_of(tmp_path), *body])
    curves = run_of(folder)["curves"]
    assert not {"mfu", "memory", "data_seconds", "utilisation", "loss_scale"} & set(curves)
    assert curves["parameter_norm"]["s"] == [1, 10, 20, 30, 40, 50]


def long_history(folder: Path, steps: int) -> RunHistory:
    rows = [
        {
            **row,
            "step": step,
            "tokens": step * 65536,
            "loss": 3 + math.sin(step) / 7,
            "seconds": 0.1 + (step % 97) / 999,
        }
        for row in [dataclasses.asdict(step_of(20, steps=steps))]
        for step in range(1, steps + 1)
    ]
    info = json.loads(json.dumps(dataclasses.asdict(info_of(folder, steps=steps))))
    return RunHistory(folder, (info,), tuple(rows), (), (), (), (), (), (), (), ())


def test_a_long_run_makes_a_page_of_bounded_size(tmp_path: Path):
    data = report_data([long_history(tmp_path / "long", 100_000)])
    assert all(len(curve["v"]) <= MOST_POINTS + 2 for curve in data["runs"][0]["curves"].values())
    assert len(page_of(data)) < 2_000_000


def test_many_runs_share_the_page(tmp_path: Path):
    one = long_history(tmp_path / "0", 5000)
    histories = [dataclasses.replace(one, folder=tmp_path / str(number)) for number in range(12)]
    assert len(page_of(report_data(histories))) < 2_000_000


# --- what is told -----------------------------------------------------------------------------------------------------


def test_figures_of_a_finished_run(tmp_path: Path):
    run = run_of(finished_run(tmp_path / "run", steps=200))
    assert run["state"]["kind"] == "finished"
    assert figure(run, "steps") == "200 of 200"
    assert figure(run, "tokens") == "13.1M"
    assert figure(run, "tokens_per_parameter") == "0.106"
    assert figure(run, "memory") == "20.9 GiB"
    assert float(figure(run, "val_loss")) == pytest.approx(run["curves"]["val_loss"]["v"][-1], abs=1e-4)
    table = speed(run)
    assert table["MFU"].endswith("%")
    assert table["GPU utilisation"] == "97%"
    assert table["Within 1% of the peak"] == "from step 3 on"
    assert table["Estimated before the run"] == "21.0 GiB"
    assert table["Slowest step"] == "38.1 s"
    aims = {label: aim for group in run["speed"] for label, _, aim in group["rows"]}
    assert aims["GPU utilisation"] == "median; aim: 90% or more"
    assert aims["Within 1% of the peak"] == "aim: steady after the first steps"


CHAT = {"chat": {"source": "rows.jsonl"}, "model": {"init_from": "smol"}}


@pytest.mark.parametrize(
    ("info", "epoch"),
    [
        ({"windows": 128_000}, "16m40s"),  # 2,000 steps of 64 windows
        ({"windows": 1600, "batch_samples": 4, "config": CHAT}, "3m20s"),  # 400 steps of 4 samples
    ],
    ids=["pretraining", "fine-tuning"],
)
def test_pace_utilisation_and_steady_memory_are_shown_of_every_kind_of_run(
    tmp_path: Path, info: dict[str, Any], epoch: str
):
    steps = [step_of(step, seconds=0.5, data_seconds=0.1) for step in range(1, 21)]
    host = {"cores": 8.0, "cores_busy": 2.0, "cores_others": 0.5, "load": 3.0, "process_bytes": 2**31}
    host |= {"host_bytes": 2**33, "host_total_bytes": 2**34}
    reading = dataclasses.replace(machine_of(20, 10.0), utilisation=0.95, power_watts=600.0, **host)
    readings = [*[reading] * 3, dataclasses.replace(reading, throttled="heat")]
    table = speed(run_of(write_run(tmp_path / "run", [info_of(tmp_path, **info), *steps, *readings])))
    assert (table["Step time"], table["Steps per second"], table["Time per epoch"]) == ("500 ms", "2", epoch)
    assert (table["GPU utilisation"], table["Within 1% of the peak"]) == ("95%", "from step 3 on")
    assert (table["Power"], table["Power limit"], table["Clock"]) == ("600 W", "700 W", "1,980 MHz")
    assert (table["Clock held down"], table["Waiting for data"]) == (
        "in 25% of the readings",
        "20.0% of the step time",
    )
    assert (table["Host cores in use"], table["Host cores in use by others"]) == ("2.0", "0.5")
    assert (table["Host memory of the run"], table["Host memory in use"]) == ("2.0 GiB", "8.0 GiB")


def test_the_time_to_go_is_that_of_the_steps_that_are_left(tmp_path: Path):
    steps = [step_of(step, seconds=9.0 if step < 30 else 0.5) for step in range(1, 81)]
    history = read_history(write_run(tmp_path / "run", [info_of(tmp_path, steps=500), *steps]))
    state = RunState(kind="running", word="running", text="", step=80, steps=500)
    (found,) = [one for one in figures_of(history, state) if one["key"] == "seconds"]
    assert found["note"] == "about 3m30s to go", "420 steps at the pace of the last fifty"


def test_energy_and_cost_of_a_run(tmp_path: Path):
    power = [600.0, 500.0, 400.0, 300.0]
    readings = [
        dataclasses.replace(machine_of(step, elapsed), power_watts=watts)
        for step, elapsed, watts in zip((1, 2, 3, 4), (10.0, 3610.0, 5.0, 1805.0), power, strict=True)
    ]  # the third is the first of another start
    records = [info_of(tmp_path / "run"), *(step_of(step, seconds=1800.0) for step in (1, 2, 3, 4)), *readings]
    history = read_history(write_run(tmp_path / "run", records))
    (run,) = report_data([history], price=2.5)["runs"]
    assert figure(run, "energy") == "0.725 kWh", "an hour at 550 W and half an hour at 350 W"
    assert figure(run, "cost") == "5.00", "two hours"
    (free,) = report_data([history])["runs"]
    assert not any(found["key"] == "cost" for found in free["figures"])


def test_where_losses_do_not_compare_bits_per_byte_lead(tmp_path: Path):
    def history(tokenizer: str) -> RunHistory:
        judged = dataclasses.replace(eval_of(10, 3.0), bits_per_byte=1.25)
        return read_history(
            write_run(tmp_path / tokenizer, [info_of(tmp_path, tokenizer=tokenizer), step_of(10), judged])
        )

    data = report_data([history("bytes"), history("gpt2")])
    assert data["apart"].startswith("losses do not compare: these runs have different tokenizers")
    assert [run["figures"][0]["key"] for run in data["runs"]] == ["bits_per_byte"] * 2
    assert figure(data["runs"][0], "bits_per_byte") == "1.2500"
    alike = report_data([history("bytes")] * 2)
    assert (alike["apart"], alike["runs"][0]["figures"][0]["key"]) == ("", "val_loss")


def test_the_headline_counts_what_was_trained_on(tmp_path: Path):
    begun = run_of(finished_run(tmp_path / "begun"))["summary"]
    assert "trained on 13.1M tokens of shakespeare (9.04B tokens), on" in begun  # 200 steps of 65,536
    often = run_of(finished_run(tmp_path / "often", train_tokens=1_000_000))["summary"]
    assert "trained on 13.1M tokens of shakespeare (1M tokens, 13.1 times all of it), on" in often
    stream = run_of(finished_run(tmp_path / "stream", train_tokens=None))["summary"]
    assert "trained on 13.1M tokens of shakespeare, on" in stream


def test_samples_and_rows_of_fine_tuning_are_counted(tmp_path: Path):
    samples = {"train": 10, "val": 2, "files": 2, "rows": 15, "rows_not_used": 3, "labelled": 30}
    info = {"config": CHAT, "batch_samples": 4, "windows": 10, "samples": samples, "train_tokens": 120, "steps": 7}
    steps = [info_of(tmp_path, **info), step_of(1, epoch=0.4), step_of(7, epoch=2.4)]
    run = run_of(write_run(tmp_path / "run", steps))
    assert "fine-tuned from smol on 24 samples of rows.jsonl (10 samples, 2.4 times all of it), on" in run["summary"]
    facts = dict(row for group in run["facts"] for row in group["rows"])
    assert (facts["Rows used"], facts["Rows not used"].partition(";")[0]) == ("12 of 15", "3")
    assert (facts["Samples"], facts["Learned"]) == ("10 to train on, 2 to validate", "25.0% of 120 tokens")
    assert facts["Epochs"] == "2.80"


def test_the_table_of_switches_is_what_the_run_said(tmp_path: Path):
    run = run_of(finished_run(tmp_path / "run"))
    assert ["attention", "fa4", "cudnn", "flash-attn-4 is not installed"] in run["switches"]
    assert ["precision", "auto", "bf16", ""] in run["switches"]


def test_time_is_the_sum_of_all_spans(tmp_path: Path):
    parts = {part["name"]: part for part in run_of(finished_run(tmp_path / "run"))["time"]["parts"]}
    assert list(parts) == ["wait", "forward", "backward", "optimizer", "evaluation", "checkpoint", "data"]
    assert parts["forward"]["calls"] == 200
    assert parts["forward"]["text"] == "7 s"  # 4 records of 50 steps at 35 ms
    # The host's waiting for data goes on beside the device's work, and is not part of the sum.
    assert [name for name, part in parts.items() if part["beside"]] == ["data"]
    assert sum(part["share"] for part in parts.values() if not part["beside"]) == pytest.approx(1.0, abs=1e-3)


def test_an_older_run_without_spans_tells_what_it_can(tmp_path: Path):
    folder = write_run(tmp_path / "run", [info_of(tmp_path), step_of(2), eval_of(2, 3.0), end_of(tmp_path, 2)])
    names = [part["name"] for part in run_of(folder)["time"]["parts"]]
    assert names == ["steps", "evaluation"]


def test_not_finite_numbers_are_visible_and_never_the_best(tmp_path: Path):
    body: list[Record] = [step_of(step) for step in range(1, 50)]
    body[9] = step_of(10, loss=math.nan, grad_norm=math.inf, applied=False)
    body += [eval_of(20, 3.5), eval_of(40, math.nan, best=False)]
    run = run_of(write_run(tmp_path / "run", [info_of(tmp_path), *body]))
    assert run["curves"]["loss"]["v"][9] == "nan"
    assert run["curves"]["grad_norm"]["v"][9] == "inf"
    assert figure(run, "val_loss") == "3.5000"
    assert figure(run, "last_val_loss") == "nan"
    assert any("not a finite number in 1 step, first in step 10" in warning for warning in run["warnings"])
    assert any("1 update skipped, first in step 10" in warning for warning in run["warnings"])


def test_throttling_and_a_smaller_micro_batch_are_warnings(tmp_path: Path):
    body: list[Record] = [step_of(1), machine_of(1, 1.0), machine_of(1, 2.0, throttled="power")]
    run = run_of(write_run(tmp_path / "run", [info_of(tmp_path), *body, step_of(2, micro_batch=16)]))
    assert any("held down (power) in 50% of the readings" in warning for warning in run["warnings"])
    assert any("micro-batch went from 32 to 16" in warning for warning in run["warnings"])


def test_the_newest_samples_come_first(tmp_path: Path):
    body = [SampleRecord(step=step, prompt="a", text=f"text {step}") for step in range(1, 501)]
    run = run_of(write_run(tmp_path / "run", [info_of(tmp_path), *body]))
    assert run["samples"][0] == [500, "a", "text 500"]
    assert (len(run["samples"]), run["samples_left_out"]) == (60, 440)


def test_a_very_long_sample_is_cut_and_says_so(tmp_path: Path):
    run = run_of(write_run(tmp_path / "run", [info_of(tmp_path), SampleRecord(step=1, prompt="", text="x" * 10_000)]))
    assert run["samples"][0][2].endswith("(4,000 characters more)")


def test_repeated_notices_are_shown_once_with_their_number(tmp_path: Path):
    body = [notice_of(step, "the same") for step in range(1, 30)]
    run = run_of(write_run(tmp_path / "run", [info_of(tmp_path), *body, notice_of(31, "another")]))
    assert run["notices"] == [[1, "the same", 29], [31, "another", 1]]


def test_the_config_is_yaml_that_flatout_reads_back(tmp_path: Path, tiny: Any):
    from flatout.config.load import load_config

    loaded = tiny()
    folder = write_run(tmp_path / "run", [info_of(tmp_path, config=loaded.config.model_dump())])
    (tmp_path / "again.yaml").write_text(run_of(folder)["config"], encoding="utf-8")
    assert load_config(tmp_path / "again.yaml").config == loaded.config


# --- how a run stands -------------------------------------------------------------------------------------------------


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_run_that_goes_on_says_so(tmp_path: Path):
    folder = write_run(tmp_path / "run", [info_of(tmp_path), step_of(1), step_of(2)])
    sign_lock(folder, os.getpid(), socket.gethostname())
    run = run_of(folder)
    assert run["state"]["goes_on"] is True
    assert "step 2 of 200" in run["state"]["text"]
    assert any("to go" in figure["note"] for figure in run["figures"])


def test_a_killed_run_is_not_taken_for_a_running_one(tmp_path: Path):
    folder = write_run(tmp_path / "run", [info_of(tmp_path), step_of(1), step_of(2)])
    sign_lock(folder, ended_process(), socket.gethostname())
    run = run_of(folder)
    assert run["state"]["kind"] == "stopped"
    assert run["warnings"] == [run["state"]["text"]]


def test_without_a_known_process_the_age_of_the_file_decides(tmp_path: Path):
    folder = write_run(tmp_path / "run", [info_of(tmp_path), step_of(1)])
    assert run_of(folder)["state"]["goes_on"] is True  # its lock names another machine, and it was written just now
    os.utime(folder / "metrics.jsonl", (1e9, 1e9))
    assert run_of(folder)["state"]["kind"] == "stopped"


def test_an_interrupted_run_that_was_started_again_goes_on(tmp_path: Path):
    records = [info_of(tmp_path), step_of(1), end_of(tmp_path, 1, "interrupted")]
    folder = write_run(tmp_path / "run", records)
    sign_lock(folder, os.getpid(), socket.gethostname())
    assert run_of(folder)["state"]["kind"] == "interrupted"
    write_run(folder, [*records, info_of(tmp_path, start_step=1)])
    sign_lock(folder, os.getpid(), socket.gethostname())
    assert run_of(folder)["state"]["kind"] == "running"


def test_three_skipped_updates_at_the_end_are_a_divergence(tmp_path: Path):
    body = [step_of(step, loss=math.nan, applied=False) for step in (1, 2, 3)]
    folder = write_run(tmp_path / "run", [info_of(tmp_path), *body])
    sign_lock(folder, ended_process(), socket.gethostname())
    assert run_of(folder)["state"]["word"] == "diverged"


def test_a_resumed_run_is_one_curve_with_a_mark(tmp_path: Path):
    folder = tmp_path / "run"
    first = [info_of(folder), *training(folder, 1, 80, steps=200, every=20), end_of(folder, 80, "interrupted")]
    second = [info_of(folder, start_step=80), *training(folder, 81, 200, steps=200, every=20), end_of(folder, 200)]
    run = run_of(write_run(folder, [*first, *second]))
    loss = run["curves"]["loss"]
    assert loss["s"] == list(range(1, 201))
    assert all(later > earlier for earlier, later in zip(loss["e"], loss["e"][1:], strict=False))
    assert run["resumes"] == [[80, 80 * 65536, pytest.approx(loss["e"][79], rel=1e-6)]]
    assert run["state"]["kind"] == "finished"


def test_a_torn_last_line_is_left_out(tmp_path: Path):
    folder = finished_run(tmp_path / "run")
    whole = run_of(folder)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"type": "step", "step": 201, "lo')
    assert run_of(folder) == whole


# --- several runs -----------------------------------------------------------------------------------------------------


def test_differences_of_configs_are_named(tmp_path: Path):
    other = {**CONFIG, "optim": {**CONFIG["optim"], "learning_rate": 0.003}}
    data = data_of(finished_run(tmp_path / "a"), finished_run(tmp_path / "b", config=other))
    assert data["differences"] == [{"path": "optim.learning_rate", "values": ["0.0006", "0.003"]}]
    assert data["title"] == "2 runs: a, b"


def test_names_are_as_long_as_it_takes(tmp_path: Path):
    folders = [tmp_path / "one" / "run", tmp_path / "two" / "run", tmp_path / "three"]
    assert distinct_names(folders) == ["one/run", "two/run", "three"]


def test_a_run_named_twice_is_shown_once(tmp_path: Path):
    folder = finished_run(tmp_path / "run")
    assert len(data_of(folder, folder / ".." / "run")["runs"]) == 1


def test_too_many_runs_are_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="too many"):
        read_runs([tmp_path / str(number) for number in range(MOST_RUNS + 1)])


# --- inert ------------------------------------------------------------------------------------------------------------


def hostile_run(tmp_path: Path) -> Path:
    """A run whose folder, config, data, model and notices all try to become part of the page."""
    folder = tmp_path / "<script>alert(1)<" / "script>{{data}}\u202e"
    config = {
        **CONFIG,
        "data": {"source": HOSTILE, "<b>key</b>": "\"'><i>"},
        "<svg onload=alert(1)>": {HOSTILE: HOSTILE},
    }
    feature = dataclasses.replace(info_of(folder).features[0], name=HOSTILE, asked=HOSTILE, used="x", why=HOSTILE)
    info = info_of(folder, config=config, tokenizer=HOSTILE, device=HOSTILE, family=HOSTILE, features=(feature,))
    sample = SampleRecord(step=3, prompt=HOSTILE, text=f"{HOSTILE}\x1b[31m\x00{{{{script}}}}")
    return write_run(folder, [info, step_of(1), step_of(2), sample, notice_of(3, HOSTILE), eval_of(3, 2.0)])


def test_nothing_of_a_run_is_markup_in_the_page(tmp_path: Path):
    folder = hostile_run(tmp_path)
    page = page_of(data_of(folder))
    text = page.decode()
    assert text.count("<script") == 2
    assert text.count("</script>") == 2
    assert "alert(1)>" not in text
    assert "<img" not in text
    assert "onerror=alert(1)\\u003e" in text
    data = json.loads(page_parts(page)["data"])
    assert data["runs"][0]["name"] == "script>{{data}}\ufffd"
    assert data["runs"][0]["folder"].endswith("<script>alert(1)</script>{{data}}\ufffd")
    assert data["runs"][0]["samples"][0][2].startswith("</script><img src=x onerror=alert(1)>")
    assert "{{script}}" in data["runs"][0]["samples"][0][2]


def test_json_of_the_page_has_no_character_with_a_meaning_in_html():
    value = {"<&>": ["\u2028\u2029", "\ud800", "</script>", "é"]}
    text = json_for_page(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert text.isascii()
    assert json.loads(text) == value


def test_control_characters_are_replaced(tmp_path: Path):
    run = run_of(hostile_run(tmp_path))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", json.dumps(run, ensure_ascii=False))


@pytest.mark.parametrize("live", [False, True])
def test_the_policy_allows_our_script_and_style_and_nothing_else(tmp_path: Path, live: bool):
    parts = page_parts(page_of(data_of(finished_run(tmp_path / "run")), live=live))
    rules = dict(rule.split(" ", 1) for rule in parts["policy"].split("; "))
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(parts[kind].encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == "'none'"
    assert rules.get("connect-src") == ("'self'" if live else None)
    assert "unsafe" not in parts["policy"]


def test_the_page_names_no_other_place(tmp_path: Path):
    text = page_of(data_of(finished_run(tmp_path / "run"))).decode()
    assert set(re.findall(r"https?://[^\s'\"]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(src|srcset)=|@import|url\(", text)


def test_our_script_never_makes_markup_of_text(tmp_path: Path):
    script = page_parts(page_of(data_of(finished_run(tmp_path / "run"))))["script"]
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|setTimeout\(\s*[\"']", script
    )


def test_the_same_run_gives_the_same_page(tmp_path: Path):
    folder = finished_run(tmp_path / "run")
    assert page_of(data_of(folder)) == page_of(data_of(folder))


# --- damaged ----------------------------------------------------------------------------------------------------------

ODD = [None, "x", "nan", "inf", [], {}, [[]], True, -1, 0, 10**400, 1e308, "9" * 5000, {"a": [1]}]


@pytest.mark.parametrize("kind", ["run", "step", "eval", "sample", "checkpoint", "notice", "spans", "machine", "end"])
def test_no_odd_value_in_a_record_breaks_the_report(tmp_path: Path, kind: str):
    folder = finished_run(tmp_path / "run", steps=60, every=20)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"type": "notice", "step": 60, "message": "told"}) + "\n")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    chance = random.Random(kind)
    for _ in range(8):
        changed = [dict(row) for row in rows]
        for row in changed:
            if row["type"] == kind:
                name = chance.choice([name for name in row if name != "type"])
                if chance.random() < 0.3:
                    del row[name]
                else:
                    row[name] = chance.choice(ODD)
        lines = "".join(json.dumps(row) + "\n" for row in changed)
        (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
        page = page_of(data_of(folder))
        assert b'"runs":[{' in page


def test_bytes_that_are_no_records_are_left_out(tmp_path: Path):
    folder = finished_run(tmp_path / "run")
    whole = run_of(folder)
    garbage = b'\xff\xfe\x00\n[1, 2]\n"text"\n{"type": 7}\n{"no": "type"}\n\n{\n'
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(garbage)
    assert run_of(folder) == whole


# --- files and the verb -----------------------------------------------------------------------------------------------


def test_a_report_is_written_and_written_again(tmp_path: Path):
    folder, target = finished_run(tmp_path / "run"), tmp_path / "page.html"
    assert write_report([folder], target) == target.stat().st_size
    write_report([folder], target)
    assert target.read_bytes() == page_of(data_of(folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


def test_a_file_that_is_no_report_is_not_written_over(tmp_path: Path):
    target = tmp_path / "mine.html"
    target.write_text("<html>mine</html>", encoding="utf-8")
    with pytest.raises(UsageError, match="does not look like a file that flatout wrote"):
        write_report([finished_run(tmp_path / "run")], target)
    assert target.read_text(encoding="utf-8") == "<html>mine</html>"
    link = tmp_path / "link.html"
    link.symlink_to(target)
    with pytest.raises(UsageError, match="is a link"):
        write_report([tmp_path / "run"], link)
    write_report([tmp_path / "run"], link, overwrite=True)
    assert target.read_text(encoding="utf-8") == "<html>mine</html>", "never through a link"
    assert dispatch(["report", str(tmp_path / "run"), "--out", str(target), "--overwrite"]) == 0
    assert target.read_bytes().startswith(MARK.encode())


@pytest.mark.parametrize(
    ("name", "error"), [("page.txt", UsageError), ("no/page.html", ResourceError), ("", UsageError)]
)
def test_places_where_no_report_can_be(tmp_path: Path, name: str, error: type[UserError]):
    with pytest.raises(error):
        write_report([finished_run(tmp_path / "run")], tmp_path / name)


def test_the_verb_writes_beside_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = finished_run(tmp_path / "run")
    assert dispatch(["report", str(folder)]) == 0
    assert (folder / "report.html").is_file()
    assert f"wrote {folder / 'report.html'}" in capsys.readouterr().out


def test_the_verb_writes_several_runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert dispatch(["report", str(finished_run(tmp_path / "a")), str(finished_run(tmp_path / "b"))]) == 0
    assert json.loads(page_parts(Path("report.html").read_bytes())["data"])["title"] == "2 runs: a, b"


def test_the_verb_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = finished_run(tmp_path / "run")
    assert dispatch(["report", str(folder), "--json", "--price", "3600"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["name"] == "run"
    assert figure(run, "cost") == "34.20", "four times 50 steps of 117 ms, an evaluation and a checkpoint"
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], DataError),  # there is no run under runs/
        (["no-such-folder"], UsageError),
        (["run", "--out", "x.png"], UsageError),
        (["run", "--ot", "x.html"], UsageError),
        (["a\0b"], UsageError),
        (["run/metrics.jsonl"], UsageError),
    ],
)
def test_mistakes_are_answered_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], error: type[UserError]
):
    monkeypatch.chdir(tmp_path)
    finished_run(tmp_path / "run")
    with pytest.raises(error) as caught:
        dispatch(["report", *words])
    assert caught.value.message
    assert caught.value.hint


def test_a_folder_without_a_run_is_named(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no metrics\.jsonl"):
        dispatch(["report", str(tmp_path / "empty")])


def test_a_report_needs_no_torch(tmp_path: Path):
    folder = finished_run(tmp_path / "run")
    code = (
        "import sys\n"
        "sys.modules['torch'] = None  # an import of it fails\n"
        "from flatout.cli import main\n"
        "import flatout.observe.report\n"
        f"sys.exit(main(['report', {str(folder)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_every_record_of_a_step_can_be_hovered(tmp_path: Path):
    """Fields of StepRecord that are one number over time are all curves, so that a new one is not forgotten."""
    fields = {field.name for field in dataclasses.fields(StepRecord)}
    from flatout.observe import series

    drawn = set(series._CURVES["step"].values())
    assert fields - drawn == {"step", "epoch", "applied", "tokens", "micro_batch", "update_ratio"}


def test_facts_tell_the_pattern_states_and_documents_of_models_that_have_them(tmp_path: Path):
    def facts(**model: Any) -> dict[str, str]:
        config = {**CONFIG, "model": {**CONFIG["model"], **model}, "data": {**CONFIG["data"], "documents": "apart"}}
        folder = write_run(tmp_path / f"run-{len(list(tmp_path.iterdir()))}", [info_of(tmp_path, config=config)])
        return {label: text for group in run_of(folder)["facts"] for label, text in group["rows"]}

    mixed = facts(pattern="EEWA", layers=6, states=512, window=1024, init_from="runs/short")
    assert mixed["Started from"] == "runs/short"
    assert mixed["Pattern of blocks"] == "EEWA"
    assert (mixed["States"], mixed["Window"]) == ("512 in each E block", "1,024 tokens in each W block")
    assert mixed["Documents"].startswith("apart")
    for others in ({"pattern": "A"}, {}):
        assert not {"Pattern of blocks", "States", "Window", "Started from"} & facts(**others).keys()
