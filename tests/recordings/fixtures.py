"""Folders that commit f6fcf4d wrote, and what it computed from them: losses, texts, exports, resumed runs.

`make_fixtures.sh` has the commands. On the machine of the recording, today's code must repeat them bit for bit:

    python -m tests.recordings.fixtures --exact
    python -m tests.recordings.fixtures --pack FOLDER    # where make_fixtures.sh ran
"""

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.called import Outcome, call
from tests.ranks import WORKERS

FOLDER = Path(__file__).parent / "fixtures"
RUNS = ("muon", "adamw", "sharded", "lora")
# What each archive holds, relative to the folder that commands run in.
CONTENTS = {
    "data": ("text.txt", "data/char", "data/bpe"),
    "muon": ("runs/muon", "muon-bundle.zip"),
    "adamw": ("runs/adamw",),
    "sharded": ("runs/sharded",),
    "lora": ("rows.jsonl", "base", "data/rows-samples", "runs/lora"),
}
GREEDY = ("--device", "cpu", "--temperature", "0", "--tokens", "12", "--prompt", "First ")
MIDDLE, LAST = "checkpoints/step-00000004", "checkpoints/step-00000008"


def unpack(folder: Path, *names: str) -> None:
    for name in names:
        with zipfile.ZipFile(FOLDER / f"{name}.zip") as archive:
            archive.extractall(folder)


def expected() -> dict[str, Any]:
    return json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))


def machine() -> dict[str, str]:
    """What arithmetic depends on, apart from the code."""
    cores = Path("/proc/cpuinfo")
    named = re.search(r"(?:model name|CPU part)\s*:\s*(.+)", cores.read_text() if cores.exists() else "")
    return {
        "torch": torch.__version__,
        "architecture": platform.machine(),
        "processor": named[1] if named else platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def flatout(*words: str) -> Outcome:
    """A command line that must succeed, in this process."""
    outcome = call(words)
    assert outcome.code == 0, f"flatout {' '.join(words)}: {outcome.errors[-2000:]}{outcome.trouble}"
    return outcome


def evaluated(run: str) -> float:
    return json.loads(flatout("eval", run, "--device", "cpu", "--json").output)["loss"]


def generated(run: str) -> str:
    return flatout("generate", run, *GREEDY).output


def exported(verb: str, run: str, folder: str, *words: str) -> dict[str, str]:
    flatout(verb, run, folder, *words)
    return tensors(Path(folder))


def resumed(run: str, *, ranks: int = 1) -> dict[str, Any]:
    """Resumes a run from the middle, in this process or on several ranks, and returns what it computed."""
    words = ("train", "--resume", f"{run}/{MIDDLE}")
    if ranks == 1:
        flatout(*words)
    else:
        WORKERS.run(ranks, _on_rank, os.getcwd(), words)
    return outcome_of(Path(run))


def _on_rank(folder: str, words: Sequence[str]) -> None:
    with contextlib.chdir(folder):
        flatout(*words)


def outcome_of(run: Path) -> dict[str, Any]:
    """Losses of the steps after the middle, and hashes of all tensors at the end of a run."""
    losses = losses_of(run)
    return {"losses": [losses[step] for step in range(5, 9)], "tensors": tensors(run / LAST)}


def losses_of(run: Path) -> dict[int, float]:
    """The loss of each step, as it was computed last."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["loss"] for record in records if record["type"] == "step"}


def tensors(folder: Path) -> dict[str, str]:
    """Type, shape and a hash of the bytes of every tensor in a folder's safetensors files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                value = file.get_tensor(name).contiguous()
                digest = hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
                found[f"{path.name} {name}"] = f"{value.dtype} {list(value.shape)} {digest}"
    return found


def computed(run: str, *, ranks: int = 1) -> dict[str, Any]:
    """What today's code computes from a fixture that was unpacked here, in the form of `expected.json`."""
    folder, base = f"runs/{run}", ("--base", "base") if run == "lora" else ()
    values: dict[str, Any] = {
        "loss": evaluated(folder),
        "text": generated(folder),
        "export": exported("export", folder, f"{run}-export", *base),
    }
    if run == "lora":
        values["adapter"] = exported("export", folder, "lora-adapter", "--adapter", *base)
        values["merged"] = exported("export", folder, "lora-merged", "--dtype", "fp32", *base)
    return {**values, f"resumed on {ranks}": resumed(folder, ranks=ranks)}


def differences(found: Any, wanted: Any, where: str = "") -> list[str]:
    """One line for every value that is not the same."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        keys = sorted(found.keys() | wanted.keys())
        return [line for key in keys for line in differences(found.get(key), wanted.get(key), f"{where}/{key}")]
    return [] if found == wanted else [f"{where}: {found!r} instead of {wanted!r}"]


def exact_differences(folder: Path) -> list[str]:
    """Computes everything anew in an empty folder, and returns what is not bit for bit as f6fcf4d had it."""
    wanted, lines = expected(), []
    for run, ranks in (("muon", 1), ("adamw", 1), ("lora", 1), ("sharded", 1), ("sharded", 2)):
        place = folder / f"{run}-{ranks}"
        place.mkdir()
        unpack(place, "data", run)
        with contextlib.chdir(place):
            found = computed(run, ranks=ranks)
        lines += differences(found, {key: wanted[run][key] for key in found}, f"{run} on {ranks}")
    return lines


def pack(made: Path) -> None:
    """Archives and `expected.json` from the folder that `make_fixtures.sh` ran in."""
    FOLDER.mkdir(exist_ok=True)
    for name, contents in CONTENTS.items():
        paths = [path for one in contents for path in sorted([made / one, *(made / one).rglob("*")]) if path.is_file()]
        with zipfile.ZipFile(FOLDER / f"{name}.zip", "w", zipfile.ZIP_LZMA) as archive:
            for path in paths:  # without times and modes, so that equal files give equal archives
                archive.writestr(
                    zipfile.ZipInfo(path.relative_to(made).as_posix()), path.read_bytes(), zipfile.ZIP_LZMA
                )
    values: dict[str, Any] = {"machine": machine()}
    for run in RUNS:
        values[run] = {
            "loss": json.loads((made / f"expected/{run}-eval.json").read_text())["loss"],
            "text": (made / f"expected/{run}-text.txt").read_text(encoding="utf-8"),
            "export": tensors(made / f"expected/{run}-export"),
        }
        for ranks in (1, 2) if run == "sharded" else (1,):
            place = made / "resumed" / (f"{run}-{ranks}" if run == "sharded" else run)
            values[run][f"resumed on {ranks}"] = outcome_of(place / "runs" / run)
    for name in ("adapter", "merged"):
        values["lora"][name] = tensors(made / f"expected/lora-{name}")
    (FOLDER / "expected.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--exact", action="store_true", help="compare bit for bit with what f6fcf4d computed")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="write the fixtures from this folder")
    options = parser.parse_args()
    if options.pack:
        pack(options.pack)
    if not options.exact:
        return 0
    torch.set_num_threads(1)
    if expected()["machine"] != machine():
        print(f"recorded on another machine: {expected()['machine']}, this one is {machine()}")
    with tempfile.TemporaryDirectory() as folder:
        lines = exact_differences(Path(folder))
    print("\n".join(lines) or "all equal, bit for bit")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
