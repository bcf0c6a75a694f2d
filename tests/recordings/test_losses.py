"""Losses of every preset, shrunk so that a CPU trains it in two seconds, compared with recorded ones.

A preset keeps its own switches: optimizer, schedule, rates, fields of the network, micro-batch. What is shrunk is its
size: two layers of width 64, context 256, four sequences in a step, 20 steps, a small vocabulary, few states.

    python -m tests.recordings.test_losses --exact    runs all presets and prints every difference, to the last bit
    python -m tests.recordings.test_losses --write    records anew

Bits are those of one machine and one version of torch, which the recording names; the tests allow for rounding. An
intended difference is listed in `tests/recordings/differences.md`.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flatout
from flatout.config.catalogue import preset_names
from flatout.config.sizes import LONG
from tests.chat_models import write_chat_model

RECORDING = Path(__file__).with_name("losses.json")
STEPS = 20
FIRST = 5  # steps that are always compared; a multiple of the steps between evaluations
# Relative. Other kernels, chunks and micro-batches for the same arithmetic move losses of 20 steps by 3e-7 at most. A
# rate that is 2% off moves them by 1e-4 within 5 steps, no clipping by 4e-5, no cautious decay by 2e-5.
TOLERANCE = 1e-5

EVERY = [
    "model.context=256",
    f"train.steps={STEPS}",
    f"eval.every={FIRST}",
    "eval.tokens=2048",
    "eval.sample_tokens=0",
    "checkpoint.every=0",
    "speed.device=cpu",
    "speed.threads=1",
]
PRETRAINING = ["train.batch_tokens=1024", "data.source=null"]
FINE_TUNING = ["model.init_from=model", "chat.source=rows.jsonl", "chat.batch_samples=4"]
SHAPE = ["model.layers=2", "model.width=64", "model.heads=4"]
SIZED = ("modern", "record")  # their shape and rates follow from a size
BYTE_PAIRS = ("shakespeare", "shakespeare-bpe")

Losses = dict[str, list[float]]


def all_presets() -> list[str]:
    """Every preset, and those of 32,768 tokens in each size."""
    return [name for name in preset_names() if name not in LONG]


def write_inputs(folder: Path) -> None:
    """Two prepared datasets of made-up words, conversations of such words, and a small Llama to fine-tune."""
    chance = random.Random(7)
    syllables = [first + second for first in "bdfklmnprst" for second in "aeiou"]
    words = ["".join(chance.choice(syllables) for _ in range(chance.choice((1, 2, 2, 3)))) for _ in range(400)]

    def sentence(length: int) -> str:
        return " ".join(words[int(400 * chance.random() ** 2)] for _ in range(length)) + "."

    (folder / "text.txt").write_text("\n".join(sentence(9) for _ in range(3000)), encoding="utf-8")
    for tokenizer in ("char", "bpe-1024"):
        asked = [f"data.source={folder}/text.txt", f"data.folder={folder}/{tokenizer}", f"data.tokenizer={tokenizer}"]
        flatout.prepare(flatout.load_config("gpt-124m", asked))
    roles = ("user", "assistant")
    rows = [{"messages": [{"role": role, "content": sentence(15)} for role in roles]} for _ in range(100)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write_chat_model(folder / "model", "zephyr", width=64)


def losses_of(preset: str, steps: int) -> Losses:
    """Losses and rates of the first steps of a run of 20, in the folder of `write_inputs`."""
    fine_tunes = "lora" in preset
    words = [*EVERY, *(FINE_TUNING if fine_tunes else PRETRAINING)]
    if not fine_tunes:
        words.append(f"data.folder={'bpe-1024' if preset in BYTE_PAIRS else 'char'}")
        words += [] if preset in SIZED else SHAPE
    if preset.endswith(("eigenstate", "hybrid")):
        words.append("model.states=64")
    if preset.endswith("hybrid"):
        words.append("model.pattern=EA")  # both kinds of blocks
    loaded = flatout.load_config(preset, words, size="2x64" if preset in SIZED else None)
    found: Losses = {"loss": [], "rate": [], "validation": []}
    with contextlib.closing((flatout.finetune if fine_tunes else flatout.train)(loaded, alerts=False)) as records:
        for record in records:
            if isinstance(record, flatout.StepRecord):
                found["loss"].append(record.loss)
                found["rate"].append(record.learning_rate)
            elif isinstance(record, flatout.EvalRecord):
                found["validation"].append(record.loss)
                if record.step == steps:
                    break
    return found


def differences(preset: str, was: Losses, found: Losses, tolerance: float) -> list[str]:
    lines: list[str] = []
    for name, values in found.items():
        for number, (before, after) in enumerate(zip(was[name], values, strict=False), start=1):
            if abs(after - before) > tolerance * abs(before):
                ratio = (after - before) / before
                lines.append(f"{preset}: {name} {number}: was {before!r}, is {after!r} ({ratio:+.1e})")
    return lines


def recorded() -> dict[str, Any]:
    return json.loads(RECORDING.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("losses")
    write_inputs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


def test_every_preset_is_recorded() -> None:
    assert set(all_presets()) <= recorded()["presets"].keys(), f"record it: {__doc__}"


# What is shrunk to the shape of another preset, and differs in its rates, which `test_explain` compares.
ALIKE = {"gpt2-350m", "large-32k", "medium-32k", "large-32k-eigenstate", "small-32k-eigenstate", "medium-32k-hybrid",
         "small-32k-hybrid"}  # fmt: skip


@pytest.mark.parametrize("preset", [name for name in recorded()["presets"] if name not in ALIKE])
def test_the_first_steps_have_the_recorded_losses(preset: str, inputs: None) -> None:
    check(preset, FIRST)


@pytest.mark.slow
@pytest.mark.parametrize("preset", recorded()["presets"])
def test_all_steps_have_the_recorded_losses(preset: str, inputs: None) -> None:
    check(preset, STEPS)


def check(preset: str, steps: int) -> None:
    found = losses_of(preset, steps)
    assert [len(values) for values in found.values()] == [steps, steps, steps // FIRST]
    lines = differences(preset, recorded()["presets"][preset], found, TOLERANCE)
    assert not lines, "\n".join(["losses differ from the recording:", *lines, str(__doc__)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--exact", action="store_true", help="print every difference from the recording")
    action.add_argument("--write", action="store_true", help="record anew")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    machine = {"machine": platform.machine(), "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_inputs(Path(folder))
        names = all_presets() if parsed.write else recorded()["presets"]
        found = {preset: losses_of(preset, STEPS) for preset in names}
        os.chdir(RECORDING.parent)
    if parsed.write:
        rows = ",\n".join(f'"{preset}": {json.dumps(losses)}' for preset, losses in found.items())
        RECORDING.write_text(f'{{"on": {json.dumps(machine)},\n"presets": {{\n{rows}\n}}}}\n', encoding="utf-8")
        return
    was = recorded()
    lines = [line for preset in found for line in differences(preset, was["presets"][preset], found[preset], 0.0)]
    print(*lines, f"{len(lines)} differences; recorded on {was['on']}, run on {machine}", sep="\n")


if __name__ == "__main__":
    main()
