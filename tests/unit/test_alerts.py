"""Alerts: silent on clean runs, at once on planted faults, never a flood, and each with a way out."""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence

import pytest

from flatout.config.facts import field_facts
from flatout.observe.alerts import BLOCK_STEPS, QUIET_STEPS, Alert, Alerts
from flatout.records import Feature, Record, StepRecord
from tests.unit.seen import info, machine, step

LENGTH = 5000


def clean_loss(number: int) -> float:
    """As losses fall: fast, then slowly."""
    return 2.5 + 8 * math.exp(-number / 60) + 2 * math.exp(-number / 800)


def clean_norm(number: int, dice: random.Random) -> float:
    return (0.3 + 3 * math.exp(-number / 30)) * math.exp(dice.gauss(0, 0.35))


def heavy(dice: random.Random) -> float:
    """Student's t with 3 degrees of freedom: far-out values are hundreds of times as likely as in normal noise."""
    return dice.gauss(0, 1) / math.sqrt(sum(dice.gauss(0, 1) ** 2 for _ in range(3)) / 3)


NOISE: dict[str, Callable[[random.Random], float]] = {
    "none": lambda dice: 0.0,
    "normal": lambda dice: dice.gauss(0, 0.05),
    "strong": lambda dice: dice.gauss(0, 0.5),
    "skewed": lambda dice: dice.gammavariate(2, 0.1),
    "heavy": lambda dice: 0.05 * heavy(dice),
}


def alerts_of(records: Iterable[Record]) -> list[Alert]:
    alerts = Alerts()
    return [alert for record in records for alert in alerts.see(record)]


def clean_run(noise: str, seed: int) -> list[Record]:
    dice = random.Random(seed)
    steps = [
        step(
            number,
            loss=clean_loss(number) + NOISE[noise](dice),
            grad_norm=clean_norm(number, dice),
            seconds=0.5 * math.exp(dice.gauss(0, 0.1)),
            tokens_per_second=2000 * math.exp(dice.gauss(0, 0.1)),
            data_seconds=0.01 if dice.random() < 0.99 else 0.4,  # one batch in a hundred comes late
        )
        for number in range(1, LENGTH + 1)
    ]
    return [info(steps=LENGTH), *steps]


@pytest.mark.parametrize("noise", NOISE)
def test_a_clean_run_raises_fewer_than_one_alert_in_a_thousand_steps(noise: str):
    found = [alert for seed in range(2) for alert in alerts_of(clean_run(noise, seed))]
    assert len(found) < LENGTH * 2 / 1000, found
    if noise in ("none", "normal", "strong"):
        assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISE)
def test_the_share_of_false_alarms_over_many_runs(noise: str):
    found = [alert for seed in range(100, 120) for alert in alerts_of(clean_run(noise, seed))]
    assert len(found) < LENGTH * 20 / 1000


def test_changes_that_are_no_spikes():
    """A new level, a slow rise and a sawtooth between epochs alert at most once, when they begin."""
    level = [step(number, loss=3.0 if number < 500 else 3.1) for number in range(1, 1500)]
    rise = [step(number, loss=3.0 + number / 1000) for number in range(1, 1500)]
    sawtooth = [step(number, loss=3.0 - number % 300 / 1000) for number in range(1, 1500)]
    for series in (level, rise, sawtooth):
        assert len(alerts_of([info(), *series])) <= 1


def kinds(records: Iterable[Record]) -> list[tuple[int, str]]:
    return [(alert.step, alert.kind) for alert in alerts_of(records)]


def steps_with(changes: dict[int, dict[str, object]], length: int = 400, seed: int = 1) -> list[Record]:
    dice = random.Random(seed)
    found: list[Record] = [info()]
    for number in range(1, length + 1):
        values = {"loss": 3.0 + dice.gauss(0, 0.03), "grad_norm": 0.5 * math.exp(dice.gauss(0, 0.2))}
        found.append(step(number, **{**values, **changes.get(number, {})}))
    return found


def test_a_spike_alerts_at_its_step():
    assert kinds(steps_with({200: {"loss": 4.0}})) == [(200, "loss spike")]
    assert kinds(steps_with({number: {"loss": 10.8} for number in range(200, 205)})) == [(200, "loss spike")]


def test_one_spike_does_not_hide_the_next():
    assert kinds(steps_with({150: {"loss": 30.0}, 300: {"loss": 3.9}})) == [(150, "loss spike"), (300, "loss spike")]


def test_a_jump_of_the_gradient_norm_alerts():
    records = steps_with({200: {"grad_norm": 6.0}, 201: {"grad_norm": 0.0}})
    assert kinds(records) == [(200, "gradient jump")]
    assert "lower optim.learning_rate" in alerts_of(records)[0].message
    records[0] = info(config={"optim": {"clip": 0.0}})
    assert "optim.clip, which is off" in alerts_of(records)[0].message


def test_steps_that_wait_for_data_in_a_row_alert():
    late = {"data_seconds": 0.3}
    assert kinds(steps_with(dict.fromkeys(range(1, 4), late))) == []  # readers that were just started
    assert kinds(steps_with(dict.fromkeys(range(100, 104), late))) == []
    assert kinds(steps_with(dict.fromkeys(range(100, 106), late))) == [(104, "data stall")]
    stalled = steps_with(dict.fromkeys(range(100, 106), late))
    assert "speed.workers (now 1)" in alerts_of(stalled)[0].message


def test_heat_and_power():
    hot = [info(), *(machine(number, throttled="heat") for number in range(1, 5))]
    assert kinds(hot) == [(2, "throttling")]
    assert "66 °C" in alerts_of(hot)[0].message
    now_and_then = [machine(number, throttled="heat" if number % 2 else "") for number in range(1, 50)]
    assert kinds(now_and_then) == []
    capped = [machine(number, throttled="power") for number in range(1, 20)]
    assert kinds(capped) == [(10, "throttling")]
    assert "700 W" in alerts_of(capped)[0].message
    both = alerts_of([machine(number, throttled="power and heat") for number in range(1, 20)])
    assert [alert.message.startswith("heat") for alert in both] == [True]
    own = {"throttled": "power", "power_default_watts": 700.0}
    assert kinds([machine(number, **own) for number in range(1, 40)]) == [], "the card's own limit is its full speed"
    lowered = [machine(number, **own, power_limit_watts=350.0) for number in range(1, 20)]
    assert "350 W; `nvidia-smi -pl 700` gives it its own limit back" in alerts_of(lowered)[0].message


GIB = 2**30


def reading(number: int, **changes) -> Record:
    """A reading of a machine with two cores and no card."""
    card = {"utilisation": None, "memory_bytes": None, "memory_total_bytes": None, "clock_mhz": None}
    host = {"cores": 2.0, "cores_busy": 2.0, "cores_others": 0.0, "threads_waiting": 0.0, "load": 2.0}
    sizes = {"process_bytes": GIB, "host_bytes": 4 * GIB, "host_total_bytes": 24 * GIB, "swap_bytes": 0}
    return machine(number, **{"elapsed": 10.0 * number, **card, **host, **sizes, **changes})


def on_cpu(threads: int, **changes) -> Record:
    return info(device="cpu", features=(Feature(name="threads", asked="auto", used=str(threads)),), **changes)


def test_a_busy_host():
    short = {"cores_others": 1.5, "threads_waiting": 1.6, "load": 6.3}
    busy = [on_cpu(2), reading(1), *(reading(number, **short) for number in range(2, 6))]
    assert kinds(busy) == [(3, "busy host")]
    message = alerts_of(busy)[0].message
    assert "threads of the run wait for cores: others use 1.5 of 2 cores (load 6.3)" in message
    assert "speed.threads=1" in message
    assert "speed.threads" not in alerts_of([on_cpu(1), *busy[1:]])[0].message, "one thread cannot become fewer"
    moment = [on_cpu(2), *(reading(number, **(short if number % 3 == 0 else {})) for number in range(1, 40))]
    assert kinds(moment) == []
    untold = [{**short, "threads_waiting": None}, {**short, "threads_waiting": None, "cores_others": 0.1}]
    assert [kinds([on_cpu(2), reading(1, **one), reading(2, **one)]) for one in untold] == [[(2, "busy host")], []]
    ranks = {**short, "threads_waiting": None}
    assert kinds([on_cpu(1, ranks=2), reading(1, **ranks), reading(2, **ranks)]) == [], "ranks are no others"
    beside_a_card = [info(), *(reading(number, cores_others=1.5, threads_waiting=3.0) for number in (1, 2))]
    assert kinds(beside_a_card) == [(2, "busy host")]
    assert kinds([info(), *(reading(number, cores_others=0.8, threads_waiting=3.0) for number in (1, 2))]) == []
    for threads, fewer in ((8, 2), (2, 1)):
        itself = [on_cpu(threads), *(reading(number, cores_others=0.1, threads_waiting=0.5) for number in (1, 2))]
        assert alerts_of(itself)[0].message.endswith(
            f"; end this run with Ctrl-C and resume it with speed.threads={fewer}"
        )
    only = [info(), *(reading(number, cores=1.0, cores_others=0.1) for number in (1, 2))]
    assert kinds(only) == [], "a host with one core"
    ranks = [on_cpu(1, ranks=2), *(reading(number, **short) for number in (1, 2))]
    assert "others, the other ranks among them, use 1.5 of 2 cores" in alerts_of(ranks)[0].message


def test_alerts_of_the_machine_are_seldom_however_short_the_steps_are():
    short = {"cores_others": 1.5, "threads_waiting": 1.6}
    fast = [on_cpu(2), *(reading(number, **short, step=2000 * number) for number in range(1, 361))]  # an hour
    assert [alert.step / 2000 for alert in alerts_of(fast)] == [2, 14, 38, 86, 182]


def growing(sizes: Iterable[float], name: str = "process_bytes") -> list[Record]:
    return [on_cpu(1), *(reading(number, **{name: int(size)}) for number, size in enumerate(sizes, 1))]


def test_memory_that_grows():
    leak = growing(GIB + number * 30e6 for number in range(40))
    assert kinds(leak) == [(36, "memory growth")], "within six minutes"
    assert "on the host grows steadily, by 171.7 MiB a minute" in alerts_of(leak)[0].message
    on_card = growing((GIB + number * 3e6 for number in range(60)), "allocated_bytes")
    assert "on the card" in alerts_of(on_card)[0].message


def test_memory_that_only_moves_is_no_leak():
    dice = random.Random(1)
    assert kinds(growing(GIB + 200e6 * dice.random() for _ in range(5000))) == []
    assert kinds(growing(GIB + 300e6 * (1 - math.exp(-number / 1.5)) for number in range(500))) == [], "warming up"
    assert kinds(growing(GIB + 100e6 * (number % 3) for number in range(500))) == []
    assert kinds(growing(GIB + 500e6 * (number // 30) for number in range(60))) == [], "one jump"


def test_skipped_updates():
    bad = {"applied": False, "loss": math.nan, "grad_norm": math.nan}
    assert kinds(steps_with({200: bad})) == [(200, "skipped update")]
    [first] = alerts_of(steps_with({200: bad}))
    assert "more like it" not in first.message
    scaled = {"applied": False, "grad_norm": math.inf}
    assert kinds(steps_with({200: {**scaled, "loss_scale": 1.0}})) == [(200, "skipped update")], (
        "no scale left to lower"
    )
    assert kinds(steps_with({200: {**scaled, "loss_scale": 2.0}})) == []
    overflow = {"applied": False, "loss_scale": 1024.0, "grad_norm": math.inf}
    assert kinds(steps_with(dict.fromkeys(range(1, 9), overflow))) == []  # fp16 looks for its scale
    assert kinds(steps_with(dict.fromkeys(range(1, 400, 50), overflow))) == []
    assert kinds(steps_with(dict.fromkeys(range(10, 60, 5), overflow))) == [(55, "skipped update")]


def test_speed_that_fell_for_long_alerts_once():
    def run(rates: Sequence[float]) -> list[Record]:
        numbered = enumerate(rates, 1)
        return [info(), *(step(number, tokens_per_second=rate, seconds=1000 / rate) for number, rate in numbered)]

    found = alerts_of(run([2000.0] * 200 + [1500.0] * 1000))
    assert [alert.kind for alert in found] == ["slow"]
    assert "1,500 tokens/s, 25% below the 2,000" in found[0].message
    assert alerts_of(run([2000.0] * 200 + [1500.0] * 40 + [2000.0] * 500)) == []  # another process, for a moment
    assert alerts_of(run([2000.0] * 4 * BLOCK_STEPS + [1500.0] * BLOCK_STEPS + [2000.0] * 500)) == []  # one block
    assert alerts_of(run([100.0] * 3 + [2000.0] * 500)) == []  # a slow start
    assert alerts_of(run([2000.0 if number % 20 else 50.0 for number in range(1000)])) == []  # single slow steps
    fast = [step(number, tokens_per_second=2e6 * (1 if number < 2000 else 0.5), seconds=5e-4) for number in range(4000)]
    assert alerts_of([info(), *fast]) == []  # two seconds in all are not long


def test_a_bad_run_does_not_flood():
    bad = {"applied": False, "loss": math.inf, "grad_norm": math.nan, "data_seconds": 0.5}
    records: list[Record] = []
    for number in range(1, 20_001):
        records.append(step(number, **bad))
        records.append(machine(number, throttled="heat", elapsed=2.0 * number))
    found = alerts_of(records)
    assert len(found) < 60
    for kind in {alert.kind for alert in found}:
        told = [alert for alert in found if alert.kind == kind]
        gaps = [later.step - earlier.step for earlier, later in itertools.pairwise(told)]
        assert gaps == sorted(gaps)
        assert gaps[0] >= QUIET_STEPS
        assert f"(and {gaps[0] - 1} more like it" in told[1].message


def test_a_resumed_run_starts_afresh():
    alerts = Alerts()
    records = steps_with({200: {"loss": 9.0}}, length=250)
    assert [alert.step for record in records for alert in alerts.see(record)] == [200]
    resumed = [info(start_step=150), *(step(number) for number in range(151, 200)), step(200, loss=9.0)]
    assert [alert.step for record in resumed for alert in alerts.see(record)] == [200]


def every_alert() -> list[Alert]:
    late, bad = {"data_seconds": 0.3}, {"applied": False, "loss": math.nan}
    records = steps_with({**dict.fromkeys(range(100, 110), late), 150: bad, 200: {"loss": 9.0, "grad_norm": 50.0}})
    records += [machine(number, throttled="heat") for number in range(401, 404)]
    short = {"cores_others": 1.5, "threads_waiting": 1.6}
    records += [reading(number, **short, process_bytes=number * GIB, throttled="") for number in range(410, 450)]
    records += [step(number, tokens_per_second=700.0, seconds=2.0) for number in range(501, 700)]
    return alerts_of(records)


def test_every_alert_says_what_to_do():
    found = every_alert()
    assert len({alert.kind for alert in found}) == 8
    settings = set(field_facts())
    for alert in found:
        what, semicolon, advice = alert.message.rpartition("; ")
        assert semicolon
        assert what
        assert len(advice.split()) >= 3
        named = [word.strip(",.()").partition("=")[0] for word in advice.split() if "." in word.strip(",.()")]
        assert set(named) <= settings, "names a setting that exists"


def test_odd_values_are_no_trouble():
    odd = [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e308]
    for value in odd:
        records = steps_with({}, length=50)
        records += [
            step(60, loss=value, grad_norm=value, seconds=value, tokens_per_second=value, data_seconds=value),
            machine(61, throttled="heat", temperature=None, clock_mhz=None),
            machine(62, throttled="heat", temperature=None, clock_mhz=None),
        ]
        for alert in alerts_of(records):
            assert isinstance(alert.message, str)
    assert isinstance(steps_with({})[1], StepRecord)
