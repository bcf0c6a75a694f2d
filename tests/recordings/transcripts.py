"""The command lines of commands.txt, run one after another, and what they print, as text to compare.

Each group of commands has a folder of its own with the same files in it. The machine that commands see is made up: its
memory, disk, cores and clock are numbers of this file, and it has no GPU. What is measured is masked.

    python -m tests.recordings.transcripts --write [GROUP ...]
"""

import argparse
import contextlib
import dataclasses
import difflib
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.called import Outcome, call
from tests.chat_models import write_chat_model

HERE = Path(__file__).parent
LONGEST = 220  # lines of an output; of a longer one the first and last are kept
KEPT_VARIABLES = ("PATH", "PYTHONPATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "TRITON_INTERPRET", "MPLCONFIGDIR")
VARIABLES = {"COLUMNS": "100", "LINES": "40", "TERM": "dumb", "TZ": "UTC", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
GIB = 2**30
PROC = {
    "meminfo": f"MemTotal: {16 * 2**20} kB\nMemAvailable: {12 * 2**20} kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n",
    "self/status": f"RssAnon: {2**18} kB\n",
    "self/statm": f"{GIB // os.sysconf('SC_PAGE_SIZE')} {GIB // 2 // os.sysconf('SC_PAGE_SIZE')} 0 0 0 0 0\n",
    "cpuinfo": "processor: 0\n",  # without the name of a model, so that the architecture stands for it
    "self/mountinfo": "1 0 0:1 / / rw - ext4 /dev/root rw\n",
    "stat": "".join(f"cpu{number} 0 0 0 0 0 0 0 0\n" for number in range(4)),
}

# What differs between machines, versions of libraries, and moments. Each says where its number stands.
MASKS = [
    (re.compile(pattern, re.MULTILINE), mask)
    for pattern, mask in [
        (r"\btorch \d+\.\d+\.\d+(\+\w+)?", "torch VERSION"),
        (r'("torch": )"[^"]*"', r'\1"VERSION"'),
        (r"\btransformers \d+\.\d+\.\d+", "transformers VERSION"),
        (r"\bby at most [\d.e-]+", "by at most D"),
        (r"\b(x86_64|aarch64|arm64)\b", "ARCH"),
        (r"\b[0-9a-f]{12,64}\b", "HASH"),  # of data: the tokenizers' library has a say in its bytes
        (r"/\S*/flatout-(\w+)-\w{8}/", r"TEMPORARY-\1/"),
        (r"\b\d+(\.\d+)?k? +(tok/s)", r"N \2"),
        (r"\babout [\d.]+ s each\b", "about T each"),
        (r"\bETA \w+", "ETA T"),
        (r"\bin [\d.hm]+ ?s\b", "in T"),
        (r"\bafter \w+ of training\b", "after T of training"),
        (r"(, )[\dhm]+s$", r"\1T"),  # of a trial or an ablated run
        (r"\bafter [\dhm]+s\b", "after T"),
        (r"[\d.]+ s of training\b", "T of training"),
        (r"\([\d.]+ [KM]iB in T", "(SIZE in T"),  # a checkpoint holds times, and so do metrics
        (r" +[\d.]+ [KM]iB +[\dhm]+s$", " SIZE AGE"),
        (r"\(\d+ kB\)", "(SIZE)"),
        (r"(  )[\dhm]+s *$", r"\1T"),
        (r'("\w*seconds"|"elapsed"|"tokens_per_second"|"load"|"cores_\w+"|"bytes"|"fingerprint"): [^,{}]+', r"\1: N"),
        (r'("(?:wait|data|forward|backward|optimizer|evaluation|sample|checkpoint)"): \d\.\d+', r"\1: N"),
        (r"^\d+ checks: (.*?)\d+ warnings?", r"N checks: \1N warnings"),
        (r'("checks"|"ok"|"note"|"warn"): \d+', r"\1: N"),
        (r"[\d.]+% (of it survived|of those weights|apart from|of its places)", r"N% \1"),
        (r"the largest by [\d.]+", "the largest by N"),
        # Losses to two decimals, cut and not rounded: other processors round otherwise.
        (r"(\d\.\d\d)\d\d(?=\s|;|$)", r"\1"),
        (r"(loss |  )(\d\d)\d\d\.\d\d+\b", r"\1\2--"),  # of a run that diverges
        (r"(perplexity \d+\.\d|loss \d+\.\d\d|loss \d+\.\d\d to \d+\.\d\d)\d+", r"\1"),
        (r"(\d\.\d\d)\d( bits/byte)|(bits/byte \d\.\d\d)\d+", r"\1\2\3"),
        (r"\b\d+(\.\d+)? samples/s", "N samples/s"),
        (r"\b\d+\.\d\dx(?= )", "0.00x"),  # of a step's time
        (r"(mean loss [\d.]+ +)\w+", r"\1T"),
        (r"\(choose from ([^)]*)\)", "(choose from CHOICES)"),  # Python's versions quote them differently
    ]
]
LONG_FLOAT = re.compile(r"\d+\.\d{6,}(e-?\d+)?")
# Sections of the doctor's page about the machine, some of whose findings are measured.
OF_THE_MACHINE = {
    "Machine": "machine",
    "GPU": "gpu",
    "Functional checks": "kernels",
    "Environment variables": "environment",
    "Disk": "disk",
}
OF_THE_MOMENT = "least time|saving|port"  # findings that go by measured speed, or by what others do on this machine


def groups() -> dict[str, list[str]]:
    """The command lines of each group; a heading is a line in brackets."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in (HERE / "commands.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            found[line.strip("[]")] = lines = []
        elif line.strip() and not line.startswith("#"):
            lines.append(line)
    return found


def recorded(group: str) -> Path:
    return HERE / "transcripts" / f"{group}.txt"


def transcripts(group: str, folder: Path) -> dict[str, str]:
    """What each command of a group says and leaves behind, by its line. A line that is not ours goes to the shell."""
    found: dict[str, str] = {}
    (work := folder / "work").mkdir()
    with _made_up_machine(), contextlib.chdir(work):
        furnish(work)
        for line in groups()[group]:
            variables, words, typed = _parts(line.removeprefix("~"))
            if words[0] != "flatout":
                subprocess.run(line, shell=True, check=True)
                continue
            before = _files(work)
            with pytest.MonkeyPatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                outcome = call(words[1:], typed=typed)
            line = f"{line}  # again" if line in found else line
            found[line] = _written(outcome, sorted(_files(work) - before), work, measured=line[0] == "~")
    return found


def as_text(found: dict[str, str]) -> str:
    return "\n".join(f"$ {line}\n{text}" for line, text in found.items())


def difference(group: str, found: dict[str, str]) -> str:
    """A unified diff for each command whose transcript is not the one recorded."""
    before = read(recorded(group))
    parts: list[str] = []
    for line in [*found, *(line for line in before if line not in found)]:
        old, new = before.get(line, ""), found.get(line, "")
        if old != new:
            rows = difflib.unified_diff(old.splitlines(), new.splitlines(), "recorded", "now", n=1, lineterm="")
            parts.append("\n".join([f"$ {line}", *rows, ""]))
    return "\n".join(parts)


def read(path: Path) -> dict[str, str]:
    """What was recorded, by command."""
    pieces = re.split(r"^\$ (.*)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE) if path.exists() else [""]
    texts = [*(text.removesuffix("\n") for text in pieces[2:-1:2]), *pieces[-1:]]
    return dict(zip(pieces[1::2], texts, strict=False))


# --- one command ------------------------------------------------------------------------------------------------------


def _parts(line: str) -> tuple[dict[str, str], list[str], str]:
    """Variables, words and standard input of a line as a shell would have it: `NAME=x flatout chat <<< hello`."""
    line, _, typed = line.partition(" <<< ")
    words = shlex.split(line)
    variables: dict[str, str] = {}
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    return variables, words, "".join(f"{text}\n" for text in shlex.split(typed))


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) + "/" * path.is_dir() for path in folder.rglob("*")}


def _written(outcome: Outcome, new: list[str], folder: Path, *, measured: bool) -> str:
    parts = [f"exit {outcome.code}"]
    output = _about_the_run(outcome.output) if outcome.words[:1] == ("doctor",) else outcome.output
    said = {} if measured else {"stdout": output, "stderr": outcome.errors}
    said["trouble"] = outcome.trouble
    for name, text in {**said, "new files": "".join(f"{path}\n" for path in new)}.items():
        if text:
            lines = _masked(text, folder).splitlines()
            if len(lines) > LONGEST:
                lines[10:-10] = [f"... {len(lines) - 20} more lines"]
            parts += [f"--- {name}", *(f"  {line}".rstrip() for line in lines)]
    return "\n".join(parts) + "\n"


def _masked(text: str, folder: Path) -> str:
    for path, name in ((folder, "WORK"), (folder.resolve(), "WORK")):
        text = text.replace(str(path), name)
    for pattern, mask in MASKS:
        text = pattern.sub(mask, text)
    return LONG_FLOAT.sub(lambda found: f"{float(found[0]):.3g}", text)


def _about_the_run(page: str) -> str:
    """The doctor's page, or its JSON lines, without what it says of the machine and the moment."""
    kept: list[str] = []
    about, machine, areas = True, "|".join(OF_THE_MACHINE), "|".join(OF_THE_MACHINE.values())
    for line in page.splitlines(keepends=True):
        if re.match(r"\S|  \S+ +[A-Z][\w ]+, ", line):
            paragraph = rf"({machine})$|  \S+ +({machine}), |  \S+ +[A-Z][\w ]+, ({OF_THE_MOMENT}): "
            about = not re.match(rf'{paragraph}|.*"area": "({areas})"|.*"name": "({OF_THE_MOMENT})"', line)
        kept += [line] if about and not re.match(rf"  \S+ +({OF_THE_MOMENT}) ", line) else []
    return re.sub(r"^(Worth knowing|Warnings: .*)\n(?=\S|\n|\Z)", "", "".join(kept), flags=re.MULTILINE)  # empty


# --- where they run ---------------------------------------------------------------------------------------------------


def furnish(folder: Path) -> None:
    """The files that commands name."""
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    write_chat_model(folder / "base")


@contextlib.contextmanager
def _made_up_machine() -> Iterator[None]:
    """Four cores, 16 GiB of memory of which 12 are free, 100 GiB of disk, no GPU, one thread; no variables of ours.

    The doctor's product takes 5 ms, and its disk writes 500 MB/s.
    """
    import flatout.diagnose.check_kernels
    import flatout.diagnose.examine
    import flatout.host

    sysconf, read_text = os.sysconf, Path.read_text
    proc = {f"/proc/{name}": text for name, text in PROC.items()}
    held = SimpleNamespace(ru_maxrss=GIB // 2 // (1 if sys.platform == "darwin" else 1024))
    usage = namedtuple("usage", "total used free")(200 * GIB, 100 * GIB, 100 * GIB)
    threads, kept = torch.get_num_threads(), {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - kept.keys():
            patch.delenv(name)
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        patch.setattr(torch.backends.mps, "is_available", lambda: False)
        patch.setattr(os, "cpu_count", lambda: 4)
        patch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3}, raising=False)
        patch.setattr(
            os,
            "sysconf",
            lambda name: 16 * GIB // sysconf("SC_PAGE_SIZE") if name == "SC_PHYS_PAGES" else sysconf(name),
        )
        patch.setattr(shutil, "disk_usage", lambda _path: usage)
        patch.setattr(Path, "read_text", lambda path, *a, **k: proc.get(str(path)) or read_text(path, *a, **k))
        patch.setattr(resource, "getrusage", lambda _who: held)
        patch.setattr(flatout.diagnose.check_kernels, "product_seconds", lambda *_: [0.005])
        measure = flatout.diagnose.examine.measure_disk
        patch.setattr(
            flatout.diagnose.examine,
            "measure_disk",
            lambda *a, **k: dataclasses.replace(measure(*a, **k), write_rate=5e8),
        )
        patch.setattr(flatout.host, "first_line_of", lambda _path: "")
        patch.setattr(flatout.host, "first_line_of", lambda _path: "")
        torch.set_num_threads(1)
        time.tzset()
        try:
            yield
        finally:
            torch.set_num_threads(threads)
    time.tzset()


LINES = [f"the {a} {b} over the {c}.\n" for a in ("old", "red", "sly") for b in ("fox", "cow") for c in ("dog", "moon")]
TINY = """\
preset: shakespeare-char
model: {layers: 2, width: 32, heads: 2, context: 16}
data: {source: words.txt, tokenizer: char, unknown_characters: error}
optim: {optimizer: adamw, learning_rate: 4e-3, embedding_rate: null, head_rate: null, schedule: cosine,
        decay_fraction: 0.2, min_ratio: 0.02, weight_decay: 0.1, betas: [0.9, 0.95], clip: 1.0, warmup: 1}
train: {steps: 2, batch_tokens: 64}
eval: {every: 0, tokens: 512, sample_tokens: 8}
checkpoint: {every: 0}
speed: {device: cpu}
"""
TUNING = """\
preset: lora
model: {init_from: base, context: 64}
chat: {source: rows.jsonl}
lora: {rank: 2}
train: {steps: 1, epochs: null}
eval: {sample_tokens: 4}
speed: {device: cpu}
"""
ROWS = [f'{{"instruction": "What is {n} and one?", "output": "It is {n + 1}."}}\n' for n in range(20)]
FILES = {
    "words.txt": "".join(LINES * 40),
    "few.txt": "the old fox.\n",
    "empty.txt": "",
    "rows.jsonl": "".join(ROWS),
    "odd-rows.jsonl": '{"question": "a", "reply": "b"}\n' * 3,
    "documents.jsonl": "".join(f'{{"text": {line.strip()!r}, "n": 1}}\n'.replace("'", '"') for line in LINES * 8),
    "tiny.yaml": TINY,
    "tuning.yaml": TUNING,
    "typo.yaml": "model:\n  layer: 2\ntrian:\n  steps: 3\n",
    "broken.yaml": "model: {layers: 2\n",
    "list.yaml": "- model\n- train\n",
    "twice.yaml": "train:\n  steps: 2\n  steps: 3\n",
    "space.yaml": "optim.learning_rate: {log: [1e-3, 1e-2]}\n",
    "bad-space.yaml": "optim.learnign_rate: {log: [1e-3, 1e-2]}\n",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the recorded transcripts with what commands say now.")
    parser.add_argument("--write", action="store_true", help="record what they say now")
    parser.add_argument("groups", nargs="*", help="default: all")
    asked = parser.parse_args()
    for group in asked.groups or groups():
        with tempfile.TemporaryDirectory() as place:
            found = transcripts(group, Path(place))
        print(difference(group, found), end="")
        if asked.write:
            recorded(group).parent.mkdir(exist_ok=True)
            recorded(group).write_text(as_text(found), encoding="utf-8")


if __name__ == "__main__":
    main()
