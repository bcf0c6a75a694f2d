"""The report page in a real browser: what it shows, what it lets be done, and what it never does."""

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flatout.observe.report import FollowedRuns, open_server, write_report
from flatout.records import SampleRecord, record_to_json
from tests.end_to_end import chromium
from tests.made_runs import (
    CONFIG,
    eigenstate_run,
    eigenstates_of,
    end_of,
    finished_run,
    info_of,
    machine_of,
    notice_of,
    step_of,
    training,
    write_run,
)

WIDTHS = [pytest.param(1280, id="desktop"), pytest.param(390, id="phone")]
HOSTILE = "</script><img src=x onerror=alert(2)><svg onload=alert(3)><a href='javascript:alert(4)'>\u202e"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    program = chromium.find()
    if program is None:
        pytest.skip("no Chromium on this machine: install the package chromium, or set FLATOUT_CHROMIUM to a browser")
    opened = chromium.Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def page_of_run(tmp_path: Path, *folders: Path) -> str:
    target = tmp_path / "page.html"
    write_report(folders, target)
    return target.as_uri()


def ticks(browser: chromium.Browser, chart: str = "loss", axis: str = "x") -> list[str]:
    return browser.run(f"[...document.querySelectorAll('#chart-{chart} .tick-{axis}')].map((tick) => tick.textContent)")


def text_of(browser: chromium.Browser, selector: str) -> str:
    return browser.run(f"document.querySelector({json.dumps(selector)}).innerText")


def hover(browser: chromium.Browser, chart: str, share: float) -> dict[str, float]:
    box = browser.box(f"#chart-{chart} .plot")
    browser.mouse("mouseMoved", box["x"] + share * box["width"], box["y"] + box["height"] / 2)
    browser.settle()
    return box


def is_quiet(browser: chromium.Browser, url: str) -> bool:
    """Nothing was said, nothing failed, and nothing was asked for but the page."""
    assert browser.complaints() == []
    assert [request for request in browser.requests() if not request.startswith("data:")] == [url]
    return True


@pytest.mark.parametrize("width", WIDTHS)
def test_everything_is_there(browser: chromium.Browser, tmp_path: Path, width: int):
    url = page_of_run(tmp_path, finished_run(tmp_path / "a run"))
    browser.open(url, width=width)
    assert text_of(browser, "h1") == "a run"
    assert text_of(browser, ".chip") == "finished"
    assert text_of(browser, "#figure-steps .value") == "200 of 200"
    titles = "[...document.querySelectorAll('{}')].map((title) => title.textContent)"
    sections = browser.run(titles.format("section:not([hidden]) h2"))
    assert sections == [
        *("Figures", "Curves", "Speed and memory", "Where the time went", "Machine", "Samples", "What was trained"),
        *("Switches", "Notices", "Checkpoints", "Environment", "Config to train it again"),
    ]
    charts = browser.run(titles.format(".chart:not([hidden]) h3"))
    assert {"Loss", "Learning rate", "Tokens per second", "Memory", "Gradient norm", "Step time", "MFU"} <= set(charts)
    assert {"GPU utilisation", "Power", "Temperature", "Clock"} <= set(charts)
    assert "flash-attn-4 is not installed" in text_of(browser, "#switch-table")
    assert "learning_rate: 0.0006" in text_of(browser, "#reproduce")
    assert "backward" in text_of(browser, "#time")
    assert browser.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert is_quiet(browser, url)


@pytest.mark.parametrize("width", WIDTHS)
def test_hovering_shows_the_value_under_the_pointer(browser: chromium.Browser, tmp_path: Path, width: int):
    steps = [step_of(step, loss=5.0 - step / 100) for step in range(1, 101)]
    folder = write_run(tmp_path / "run", [info_of(tmp_path, steps=100), *steps, end_of(tmp_path, 100)])
    browser.open(page_of_run(tmp_path, folder), width=width)
    assert browser.run("document.querySelector('#chart-loss .readout').hidden")
    hover(browser, "loss", 0.6)
    shown = text_of(browser, "#chart-loss .readout")
    step = int(shown.split("step ")[1].split(" ")[0])
    assert 40 < step < 80
    assert f"{5.0 - step / 100:.4f}" in shown
    assert "tokens" in shown
    inside = browser.run(
        "(() => { const [a, b] = ['.readout', '.plot'].map((name) => document.querySelector('#chart-loss ' + name)"
        ".getBoundingClientRect()); return a.left >= b.left - 1 && a.right <= b.right + 1; })()"
    )
    assert inside
    # The same place is marked on the other curves, and leaving takes it all away.
    assert browser.run("document.querySelectorAll('#chart-rate .spot').length") == 1
    browser.mouse("mouseMoved", 2, 2)
    browser.settle()
    assert browser.run("document.querySelectorAll('.spot, .readout:not([hidden])').length") == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_dragging_zooms_all_curves_and_a_double_click_resets(browser: chromium.Browser, tmp_path: Path, width: int):
    browser.open(page_of_run(tmp_path, finished_run(tmp_path / "run")), width=width)
    before, values = ticks(browser), ticks(browser, axis="y")
    assert browser.run("document.querySelector('.reset').disabled")
    box = browser.box("#chart-loss .plot")
    y = box["y"] + box["height"] / 2
    browser.drag((box["x"] + 0.5 * box["width"], y), (box["x"] + 0.7 * box["width"], y))
    after = ticks(browser)
    assert after != before
    assert all(60 < float(tick) < 160 for tick in after)
    assert ticks(browser, axis="y") != values  # the y axis fits what is seen
    assert all(60 < float(tick) < 160 for tick in ticks(browser, "rate"))
    assert not browser.run("document.querySelector('.reset').disabled")
    browser.double_click(box["x"] + box["width"] / 2, y)
    assert ticks(browser) == before
    assert browser.complaints() == []


def test_wheel_buttons_and_keys_zoom_as_well(browser: chromium.Browser, tmp_path: Path):
    browser.open(page_of_run(tmp_path, finished_run(tmp_path / "run")))
    whole = ticks(browser)
    box = hover(browser, "loss", 0.5)
    at = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    browser.mouse("mouseWheel", *at, deltaX=0, deltaY=-240, modifiers=2)
    browser.settle()
    assert ticks(browser) != whole
    browser.run("document.querySelector('.reset').click()")
    browser.settle()
    assert ticks(browser) == whole
    browser.run("document.querySelector('[aria-label=\"Zoom in\"]').click()")
    browser.settle()
    assert ticks(browser) != whole
    browser.run("document.querySelector('#chart-loss .plot').focus()")
    browser.key("Escape")
    assert ticks(browser) == whole
    browser.key("ArrowRight")
    first = text_of(browser, "#chart-loss .readout")
    browser.key("ArrowRight")
    assert text_of(browser, "#chart-loss .readout") != first
    browser.key("+")
    assert ticks(browser) != whole
    # A plain wheel belongs to the page.
    zoomed = ticks(browser)
    browser.mouse("mouseWheel", *at, deltaX=0, deltaY=120)
    browser.settle()
    assert ticks(browser) == zoomed


def test_a_finger_shows_values_and_scrolls_the_page(browser: chromium.Browser, tmp_path: Path):
    browser.open(page_of_run(tmp_path, finished_run(tmp_path / "run")), width=390, height=844, touch=True)
    whole = ticks(browser)
    box = browser.box("#chart-loss .plot")
    point = {"x": box["x"] + 0.6 * box["width"], "y": box["y"] + 100}
    browser.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[point])
    browser.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    browser.settle()
    assert "training" in text_of(browser, "#chart-loss .readout")
    assert ticks(browser) == whole
    assert browser.run("getComputedStyle(document.querySelector('.plot')).touchAction") == "pan-y"


def test_axes_can_be_chosen_and_keep_the_stretch(browser: chromium.Browser, tmp_path: Path):
    browser.open(page_of_run(tmp_path, finished_run(tmp_path / "run")))
    linear = ticks(browser, axis="y")
    browser.run("document.querySelector('#log').click()")
    browser.settle()
    assert ticks(browser, axis="y") != linear
    browser.run("document.querySelector('[data-value=t]').click()")
    browser.settle()
    assert all(tick.endswith("M") for tick in ticks(browser) if tick != "0")
    assert browser.run("document.querySelector('#chart-loss .axis-name').textContent") == "tokens"
    box = browser.box("#chart-loss .plot")
    y = box["y"] + box["height"] / 2
    browser.drag((box["x"] + 0.5 * box["width"], y), (box["x"] + 0.75 * box["width"], y))
    browser.run("document.querySelector('[data-value=s]').click()")
    browser.settle()
    assert all(80 < float(tick) < 170 for tick in ticks(browser))


def test_marks_of_an_axis_are_equal_steps_and_steps_are_whole(browser: chromium.Browser, tmp_path: Path):
    records = [step_of(step, steps=16, data_seconds=0.0095) for step in range(1, 17)]
    browser.open(page_of_run(tmp_path, write_run(tmp_path / "run", [info_of(tmp_path / "run", steps=16), *records])))
    for chart, axis in (("loss", "x"), ("wait", "x"), ("wait", "y")):
        marks = [float(tick.removesuffix(" ms")) for tick in ticks(browser, chart, axis)]
        assert len(marks) >= 3
        apart = [after - before for before, after in itertools.pairwise(marks)]
        assert apart == pytest.approx([apart[0]] * len(apart)), (chart, axis, marks)
        assert axis == "y" or all(mark.is_integer() for mark in marks)
    shown = "{}.map(([, text]) => text).join(' ')"
    assert browser.run(shown.format("linearTicks('whole', 0, 15, 6)")) == "0 5 10 15"
    assert browser.run(shown.format("linearTicks('whole', 20000, 20010, 4)")) == "20.000k 20.005k 20.010k"
    assert browser.run(shown.format("linearTicks('loss', 2.7, 2.70009, 5)")).startswith("2.70000 2.70002 2.70004")
    assert browser.run(shown.format("logTicks('seconds', 0.2, 3, 6)")) == "0.2 s 0.5 s 1 s 2 s"
    assert " 300 1k 3k 10k " in browser.run(shown.format("logTicks('plain', 1, 1e6, 6)"))
    assert browser.run(shown.format("clockTicks(100, 101, 5)")) == "100.0s 100.2s 100.4s 100.6s 100.8s 101.0s"


@pytest.mark.parametrize("width", WIDTHS)
def test_text_of_a_run_never_acts(browser: chromium.Browser, tmp_path: Path, width: int):
    folder = tmp_path / "<script>alert(1)<" / "script><img src=x onerror=alert(5)>"
    config = {**CONFIG, "data": {"source": HOSTILE}, HOSTILE: {"'\"": HOSTILE}}
    info = info_of(folder, config=config, device=HOSTILE, tokenizer=HOSTILE)
    sample = SampleRecord(step=2, prompt=HOSTILE, text=HOSTILE)
    write_run(folder, [info, step_of(1), step_of(2), sample, notice_of(2, HOSTILE)])
    url = page_of_run(tmp_path, folder)
    browser.open(url, width=width)
    hover(browser, "loss", 0.5)
    assert text_of(browser, "h1") == "script><img src=x onerror=alert(5)>"
    assert "<script>alert(1)</script>" in text_of(browser, "#environment")
    assert "</script><img src=x onerror=alert(2)>" in text_of(browser, "#samples")
    assert (
        browser.run("document.querySelectorAll('img, iframe, object, a[href^=javascript], [onerror], [onload]').length")
        == 0
    )
    assert browser.run("document.scripts.length") == 2
    assert is_quiet(browser, url)


def test_the_policy_stops_a_script_that_got_in_all_the_same(browser: chromium.Browser, tmp_path: Path):
    browser.open(page_of_run(tmp_path, finished_run(tmp_path / "run")))
    browser.run(
        "(() => { const bad = document.createElement('script'); bad.textContent = 'window.broken = 1'; "
        "document.body.append(bad); const image = new Image(); image.src = 'http://127.0.0.1:9/x.png'; "
        "image.setAttribute('onerror', 'window.broken = 2'); document.body.append(image); })()"
    )
    browser.settle()
    assert browser.run("window.broken") is None
    assert any("Content Security Policy" in complaint for complaint in browser.complaints())


def test_a_resumed_run_is_one_line_with_a_mark(browser: chromium.Browser, tmp_path: Path):
    folder = tmp_path / "run"
    first = [info_of(folder), *training(folder, 1, 80, steps=200, every=20), end_of(folder, 80, "interrupted")]
    second = [info_of(folder, start_step=80), *training(folder, 81, 200, steps=200, every=20), end_of(folder, 200)]
    write_run(folder, [*first, *second])
    browser.open(page_of_run(tmp_path, folder))
    path = browser.run("document.querySelector('#chart-loss .curve').getAttribute('d')")
    assert path.count("M") == 1
    assert browser.run("document.querySelectorAll('#chart-loss .resume').length") == 1
    assert browser.run("document.querySelector('#chart-loss .event').textContent") == "resumed"


def test_what_is_not_finite_is_seen(browser: chromium.Browser, tmp_path: Path):
    steps = [step_of(step, loss=float("nan") if step == 30 else 4.0 - step / 50) for step in range(1, 61)]
    folder = write_run(tmp_path / "run", [info_of(tmp_path, steps=60), *steps])
    browser.open(page_of_run(tmp_path, folder))
    assert browser.run("document.querySelectorAll('#chart-loss .bad').length") == 1
    assert browser.run("document.querySelector('#chart-loss .raw').getAttribute('d')").count("M") == 2
    box = browser.box("#chart-loss .plot")
    left = browser.run("document.querySelector('#chart-loss svg svg').getBoundingClientRect().left")
    wide = browser.run("document.querySelector('#chart-loss svg svg').getBoundingClientRect().width")
    browser.mouse("mouseMoved", left + wide * 29 / 59, box["y"] + 100)
    browser.settle()
    assert "NaN" in text_of(browser, "#chart-loss .readout")


@pytest.mark.parametrize("width", WIDTHS)
def test_runs_side_by_side(browser: chromium.Browser, tmp_path: Path, width: int):
    other = {**CONFIG, "optim": {**CONFIG["optim"], "learning_rate": 0.003}}
    folders = finished_run(tmp_path / "one"), finished_run(tmp_path / "two", steps=100, config=other)
    url = page_of_run(tmp_path, *folders)
    browser.open(url, width=width)
    assert text_of(browser, "h1") == "2 runs side by side"
    curves = "document.querySelectorAll('#chart-loss .curve').length"
    both = browser.run(curves)
    assert "0.003" in text_of(browser, "#differences .differs")
    assert "optim.learning_rate" in text_of(browser, "#differences")
    hover(browser, "loss", 0.4)
    assert {"one", "two"} <= set(text_of(browser, "#chart-loss .readout").replace("\t", "\n").split("\n"))
    browser.run("document.querySelectorAll('.legend button')[1].click()")
    browser.settle()
    assert browser.run(curves) == both / 2
    assert browser.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert is_quiet(browser, url)


@pytest.mark.parametrize("dark", [False, True])
def test_colours_can_be_read(browser: chromium.Browser, tmp_path: Path, dark: bool):
    """Text and lines stand out from their card: 4.5 to 1 for text, 3 to 1 for lines, as WCAG asks."""
    browser.open(page_of_run(tmp_path, finished_run(tmp_path / "run")), dark=dark)
    names = ["ink", "soft", "accent", "bad", *(f"run-{number}" for number in range(8))]
    colours: dict[str, Any] = browser.run(
        "Object.fromEntries(" + json.dumps(["card", "paper", *names]) + ".map((name) => [name, "
        "getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim()]))"
    )

    def light(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for name in names:
        for back in ("card", "paper"):
            low, high = sorted((light(colours[name]), light(colours[back])))
            contrast = (high + 0.05) / (low + 0.05)
            assert contrast >= (3.0 if name.startswith("run-") else 4.5), f"{name} on {back}: {contrast:.2f}"


def test_keyboard_reaches_every_control(browser: chromium.Browser, tmp_path: Path):
    browser.open(page_of_run(tmp_path, finished_run(tmp_path / "run")))
    reached = set()
    for _ in range(60):
        browser.key("Tab", windowsVirtualKeyCode=9)
        reached.add(browser.run("document.activeElement.closest('.plot') ? 'plot' : document.activeElement.tagName"))
    assert {"A", "BUTTON", "INPUT", "plot"} <= reached


def test_a_live_page_follows_the_run_and_keeps_the_zoom(browser: chromium.Browser, tmp_path: Path):
    folder = tmp_path / "run"
    write_run(folder, [info_of(folder), *(step_of(step) for step in range(1, 101))])
    with open_server(FollowedRuns([folder])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            browser.open(server.url)
            assert text_of(browser, ".chip") == "running"
            box = browser.box("#chart-loss .plot")
            y = box["y"] + box["height"] / 2
            browser.drag((box["x"] + 0.3 * box["width"], y), (box["x"] + 0.6 * box["width"], y))
            zoomed = ticks(browser)
            browser.run("document.querySelector('#switch-table').dataset.kept = 'yes'")
            with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                for step in range(101, 151):
                    file.write(record_to_json(step_of(step)) + "\n")
                file.write(record_to_json(machine_of(150, 9.0)) + "\n")
                file.write('{"type": "step", "st')  # a line that is being written
            browser.wait("document.querySelector('#figure-steps .value').textContent === '150 of 200'")
            browser.settle()
            assert ticks(browser) == zoomed
            assert browser.run("document.querySelector('#switch-table').dataset.kept") == "yes"  # not made anew
            assert not browser.run("document.querySelector('#machine').hidden")
            browser.double_click(box["x"] + box["width"] / 2, y)
            assert max(float(tick) for tick in ticks(browser)) > 130
            assert "follows the run" in text_of(browser, "#live")
            assert browser.complaints() == []
        finally:
            server.shutdown()
            thread.join()
    browser.wait("document.querySelector('#live').classList.contains('lost')")


# --- eigenstates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_horizons_of_eigenstates_can_be_hovered(browser: chromium.Browser, tmp_path: Path, width: int):
    url = page_of_run(tmp_path, eigenstate_run(tmp_path / "run", layers=(1, 2, 5), context=8192))
    browser.open(url, width=width)
    titles = browser.run(
        "[...document.querySelectorAll('#eigenstates .chart:not([hidden]) h3')].map((title) => title.textContent)"
    )
    assert titles == ["Memory horizon, tokens", "|λ|", "Period, tokens per turn"]
    assert "context 8,192" in browser.run("document.querySelector('#chart-horizon .plot svg').textContent")
    assert browser.run("document.querySelectorAll('#chart-horizon .level').length") == 1
    places = [float(tick.replace("k", "e3")) for tick in ticks(browser, "horizon", "y")]
    assert places[-1] / places[0] >= 30  # logarithmic, though nobody asked for it
    hover(browser, "horizon", 0.97)
    shown = text_of(browser, "#chart-horizon .readout")
    last = eigenstates_of(200, layers=(1, 2, 5), context=8192)
    assert "step 200" in shown
    for layer in last.layers:
        value = layer.horizon["50%"]
        text = f"{value / 1e3:.4g}k" if value >= 1e4 else f"{value:.4g}"
        assert f"layer {layer.layer}" in shown
        assert text in shown
    assert browser.run("document.querySelectorAll('#chart-magnitude .spot').length") == 3
    magnitudes = [float(tick) for tick in ticks(browser, "magnitude", "y")]
    assert all(0.9 < value < 1 for value in magnitudes)
    assert magnitudes == sorted(magnitudes, reverse=True)  # ticks come by what is lacking to 1
    rows = browser.run("[...document.querySelectorAll('#eigenstates tbody th')].map((cell) => cell.textContent)")
    assert rows == ["1", "2", "5"]
    assert text_of(browser, "#eigenstates .body p").startswith("Eigenstate memory: median horizon ")
    bar = browser.run("document.querySelector('#eigenstates .bars td svg').getBoundingClientRect().width")
    assert bar >= 80
    assert browser.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert is_quiet(browser, url)


def test_runs_with_and_without_eigenstates_side_by_side(browser: chromium.Browser, tmp_path: Path):
    with_states = [eigenstate_run(tmp_path / "a", context=1024), eigenstate_run(tmp_path / "b", context=4096)]
    browser.open(page_of_run(tmp_path, *with_states, finished_run(tmp_path / "c")))
    assert browser.run("document.querySelectorAll('#chart-horizon .curve').length") == 2
    assert browser.run("document.querySelectorAll('#chart-horizon .level').length") == 2
    assert "No eigenstate blocks." in text_of(browser, "#eigenstates")
    hover(browser, "horizon", 0.5)
    shown = text_of(browser, "#chart-horizon .readout")
    assert "a" in shown
    assert "b" in shown
    browser.open(page_of_run(tmp_path, finished_run(tmp_path / "c")))
    assert browser.run(
        "document.querySelector('#eigenstates').hidden && document.querySelector('#to-eigenstates').hidden"
    )
    assert browser.complaints() == []


def test_odd_numbers_of_eigenstates_leave_the_page_whole(browser: chromium.Browser, tmp_path: Path):
    first, second = eigenstates_of(0, layers=(1, 2)), eigenstates_of(50, layers=(1, 2))
    second.layers[0].horizon.update({"50%": float("nan"), "max": float("inf")})
    second.layers[1].magnitude["50%"] = 1.0
    row = json.loads(record_to_json(eigenstates_of(60, layers=(1, 2))))
    row["layers"][1] |= {"layer": HOSTILE, "horizon": {"50%": HOSTILE}, "states": HOSTILE}
    folder = write_run(tmp_path / "run", [info_of(tmp_path), first, step_of(1), step_of(50), second])
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    url = page_of_run(tmp_path, folder)
    browser.open(url)
    hover(browser, "horizon", 0.5)
    assert browser.run("document.querySelectorAll('#chart-horizon .bad').length") == 1
    assert browser.run("document.querySelectorAll('#eigenstates .median').length") == 2
    assert "onerror" not in text_of(browser, "#eigenstates")
    assert browser.run("document.querySelectorAll('img, [onerror], [onload]').length") == 0
    assert is_quiet(browser, url)
