"""What the trials on the device showed, and what it means for a run. Judges `Trials` and touches nothing."""

import functools
from collections.abc import Iterator

from flatout.config.schema import SpeedConfig
from flatout.diagnose.check_machine import usable
from flatout.diagnose.doctor import Machine, Trial, Trials
from flatout.finding import Check, Finding, Status
from flatout.host import THREAD_VARIABLES

_check = functools.partial(Check, "kernels")

_SLOWER = 1.2  # times as long as with the best number of threads is worth a word
# Below this share of the data sheet's rate a large product is slower than the card should be.
_SLOW_SHARE = 0.4


def check_kernels(
    machine: Machine, trials: Trials, speed: SpeedConfig | None, kind: str, peak_flops: float | None
) -> Iterator[Finding | None]:
    """`peak_flops` is the data sheet's rate of the card, None where it is not known."""
    if not usable(machine.torch):
        yield _check("kernels").note("not tried, as torch cannot be used", "They are tried once torch works.")
        return
    yield _products(trials, kind, peak_flops)
    yield _threads(machine, trials, "auto" if speed is None else speed.threads) if kind == "cpu" else _load(machine)
    yield _attention(trials, kind)
    yield _scan(trials, speed)
    for trial in trials.trials:
        if trial.name in ("triton kernels", "cuBLASLt", "fp8 products", "torch.compile"):
            yield _other(trial, speed)


def _products(trials: Trials, kind: str, peak_flops: float | None) -> Finding | None:
    reason = trials.failure("matrix product")
    if reason is not None:
        return _check("products").bad(
            f"a plain matrix product fails on {kind}: {reason}",
            "Nothing can be trained on this device as it is. If memory is full, see who uses it; if the error speaks "
            "of a kernel image or a driver, torch and driver do not go together; else restart the machine.",
        )
    if trials.product_flops is None:
        return None
    rate = trials.product_flops
    shown = f"{rate / 1e12:.0f} TFLOP/s" if rate >= 1e13 else f"{rate / 1e9:.0f} GFLOP/s"
    found = f"a {trials.product_type} matrix product runs at {shown}"
    if peak_flops is None or trials.product_type == "fp32":
        return _check("products").ok(found)
    share = rate / peak_flops
    found += f", {share:.0%} of the data sheet"
    if share < _SLOW_SHARE:
        return _check("products").warn(
            found,
            "A healthy card reaches 60% or more. Look for others who use it, a lowered power cap, heat, or a card that "
            "sits in a slow slot; `nvidia-smi -q -d PERFORMANCE` says what holds its clock down.",
        )
    return _check("products").ok(found)


def _threads(machine: Machine, trials: Trials, asked: int | str) -> Finding | None:
    """How many threads a run takes on this CPU, and whether another number would be faster."""
    trial = trials.threads
    if trial is None:
        return None
    set_by = [f"{name}={machine.environment[name]}" for name in THREAD_VARIABLES if machine.environment.get(name)]
    if isinstance(asked, int):
        used, words = asked, f"speed.threads={asked}"
    elif set_by:
        used, words = machine.torch.threads or 1, set_by[0]
    else:
        used, words = trial.chosen, "speed.threads=auto"
    best, load = trial.chosen, "" if machine.load is None else f" (load {machine.load:.1f})"
    others = f"others use {trial.others or 0.0:.1f} of {trial.cores} cores{load}"
    many = f"{used} thread{'' if used == 1 else 's'}"
    if used > trial.most or trial.seconds.get(used, 0.0) > _SLOWER * trial.seconds[best]:
        slower = trial.seconds.get(used, 0.0) / trial.seconds[best]
        measured = f", {slower:.1f} times slower than {best}" if slower > _SLOWER else ""
        stop = " Or stop the other programs, and ask again." if trial.busy else ""
        return _check("threads").warn(
            f"{words} gives {many}{measured}; {others}",
            f"Threads that share a product wait for the last of them, which waits for a core. Set speed.threads={best}."
            f"{stop}",
        )
    if trial.busy:
        return _check("threads").warn(
            f"{others}; {words} gives {many}",
            "Training and every figure measured now are slower than this machine can be. Stop the other programs, or "
            "train when they are done.",
        )
    faster = ""
    if used > 1 and used in trial.seconds:
        faster = f", {trial.seconds[1] / trial.seconds[used]:.1f} times as fast as one"
    return _check("threads").ok(f"{words} gives {many}{faster}")


def _load(machine: Machine) -> Finding | None:
    # The load is that of the whole host, whatever share of its cores a container has.
    if machine.load is None or machine.load <= machine.cores:
        return None
    return _check("host load").warn(
        f"load {machine.load:.1f} on {machine.cores} cores: processes wait for one",
        "A run needs a core to feed the GPU, and more to read data. Stop the other programs.",
    )


def _attention(trials: Trials, kind: str) -> Finding | None:
    tried, works, fails = _tried(trials, "attention ")
    if not tried:
        return None
    picks = f"; torch itself picks {trials.picked}" if trials.picked else ""
    found = f"run and right: {', '.join(works) or 'none'}{picks}"
    if kind == "cuda" and not works:
        return _check("attention").warn(
            f"no fast kernel runs here: {'; '.join(fails)}",
            "Attention is then written out, which is slow and needs much memory. A head size (model.head_size, or "
            "model.width over model.heads) of 64 or 128 in half precision suits every kernel; older cards have fewer.",
        )
    if "sdpa" in tried and tried["sdpa"].outcome == "fails":
        detail = tried["sdpa"].detail
        return _check("attention").bad(f"torch's attention fails here: {detail}", "Install torch again.")
    if fails:
        return _check("attention").note(found, f"Not usable with these shapes: {'; '.join(fails)}.")
    return _check("attention").ok(found)


def _tried(trials: Trials, what: str) -> tuple[dict[str, Trial], list[str], list[str]]:
    """Trials of one thing by what was tried of it; what works, and what fails, with the reason."""
    tried = {one.name.removeprefix(what): one for one in trials.trials if one.name.startswith(what)}
    works = [name for name, one in tried.items() if one.outcome == "works"]
    return tried, works, [f"{name} ({one.detail})" for name, one in tried.items() if one.outcome == "fails"]


def _scan(trials: Trials, speed: SpeedConfig | None) -> Finding | None:
    """Who computes the states of eigenstate blocks. Our kernels are tried only where a run would take them."""
    tried, works, fails = _tried(trials, "scan ")
    if not tried or speed is None:
        return None
    asked = speed.scan
    used = asked if asked in ("reference", "chunked") else "triton" if "triton" in tried else "chunked"
    found = f"run and right, forward and backward: {', '.join(works) or 'none'}; a run takes {used}"
    if used in tried and tried[used].outcome == "fails":
        others = [name for name in works if name != used] or ["reference"]
        slow = ", which goes token by token and is slow" if others[0] == "reference" else ""
        return _check("scan").bad(f"a run takes {used}, but {tried[used].detail}", f"Set speed.scan={others[0]}{slow}.")
    if used == "reference":
        return _check("scan").warn(found, "It goes token by token and is slow: set speed.scan=auto.")
    if fails:
        return _check("scan").note(found, f"Not usable here: {'; '.join(fails)}.")
    return _check("scan").ok(found)


_MEANS: dict[str, tuple[Status, str]] = {
    "triton kernels": (
        "warn",
        "Our fused kernels cannot run here, and training falls back to torch's operations, which is slower. A C "
        "compiler must be installed (`apt install gcc`), and triton must be the version that torch wants; "
        "speed.kernels=torch silences this.",
    ),
    "cuBLASLt": (
        "note",
        "Matrix products then take torch's own choice of kernel, which costs some percent of speed. It comes with a "
        "CUDA build of torch; nothing has to be done.",
    ),
    "fp8 products": ("note", "Leave speed.fp8 empty, as it is by default."),
    "torch.compile": (
        "warn",
        "Runs with speed.compile=auto go without it. It needs a C++ compiler (`apt install g++`), the headers of this "
        "Python (`apt install python3-dev`) and a folder for temporary files; speed.compile=off silences this.",
    ),
}


def _other(trial: Trial, speed: SpeedConfig | None) -> Finding:
    status, advice = _MEANS[trial.name]
    if trial.outcome == "works":
        return _check(trial.name).ok(f"works ({trial.detail})")
    if trial.outcome == "skipped":
        return _check(trial.name).ok(f"not tried: {trial.detail}")
    asked_off = speed is not None and (
        (trial.name == "torch.compile" and speed.compile == "off")
        or (trial.name == "triton kernels" and speed.kernels == "torch")
    )
    return _check(trial.name).told("note" if asked_off else status, f"does not work: {trial.detail}", advice)
