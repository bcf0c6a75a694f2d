"""`flatout estimate` against the run it estimates: time and peak memory, over presets, micro-batches, checkpointing.

    python lab/estimate_truth.py [CASE ...] [--steps N] [--seconds N] >> lab/estimate_truth.jsonl

CASES are names PRESET-MICRO_BATCH-CHECKPOINTING, or patterns of them: gpt2-124m-8-none, 'gpt2-350m-*-full'; none means
all that are for a GPU, and 'shakespeare-char-*' those for a CPU. `--list` prints the names. `--steps 40 --seconds 3` is
short. One JSON line per case comes as soon as it is done: what was estimated, what a run of the same config then took,
and the one as a share of the other. A case that fails, or does not fit here, is a line with `error`, and the next one
follows. On the error output are the shares for people, and last how many cases are within a tenth.

Both are of one process with the same data, random tokens, and the kernels of a case are warmed up by a few steps, an
evaluation and a sample before, so that neither pays for compiling what the other finds in a cache.

Cases that begin with `lora-` train adapters on examples/instructions.jsonl; their number is the samples of a step.
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

# (preset, sequences at once, checkpointing)
CASES = [
    *(("gpt2-124m", size, how) for how in ("none", "selective", "full") for size in (8, 16, 32)),
    *(("gpt2-350m", size, how) for how in ("none", "selective", "full") for size in (4, 8, 16)),
]
CASES += [(f"lora-{shape}", size, "none") for shape in ("160m", "1.1b") for size in (8, 32)]
CPU_CASES = [("shakespeare-char", size, how) for how in ("none", "full") for size in (4, 8, 16)]
CPU_CASES += [("lora-tiny", 8, "none")]
INSTRUCTIONS = Path(__file__).parents[1] / "examples" / "instructions.jsonl"
BASES: dict[str, dict[str, Any]] = {
    "1.1b": {"layers": 22, "width": 2048, "heads": 32, "kv_heads": 4, "mlp_width": 5632},
    "160m": {"layers": 12, "width": 768, "heads": 12, "kv_heads": 4, "mlp_width": 2048},
    "tiny": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "mlp_width": 128},
}
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def name_of(case: tuple[str, int, str]) -> str:
    return "-".join(str(part) for part in case)


def case_row(preset: str, micro_batch: int, checkpointing: str, steps: int, seconds: float, scratch: Path) -> dict:
    import torch

    from flatout import api
    from flatout.config.load import LoadedConfig, load_config
    from flatout.records import CheckpointRecord, EvalRecord, SampleRecord, StepRecord
    from flatout.tuning.estimate import estimate
    from flatout.tuning.measure import free_memory
    from flatout.tuning.practice_data import practice_data

    def config(count: int, folder: str) -> LoadedConfig:
        words = [
            f"train.steps={count}", f"speed.checkpointing={checkpointing}", f"eval.every={steps // 2}",
            f"checkpoint.every={steps}", f"output.folder={scratch / folder}",
        ]  # fmt: skip
        if preset.startswith("lora-"):
            return load_config("tinyllama-lora", [*words, *_job(preset.removeprefix("lora-"), micro_batch, scratch)])
        words += [f"speed.micro_batch={micro_batch}"]
        if preset != "shakespeare-char":
            words += ["train.batch_tokens=131072", "eval.tokens=262144", "eval.sample_tokens=100"]
        loaded = load_config(preset, words)
        kept = scratch / f"{loaded.config.data.tokenizer}.json"
        if not kept.exists():
            data, _ = practice_data(loaded, scratch)
            kept.write_text(data.model_dump_json(), encoding="utf-8")
        data = loaded.config.data.model_validate_json(kept.read_text(encoding="utf-8"))
        return dataclasses.replace(loaded, config=loaded.config.model_copy(update={"data": data}))

    name = name_of((preset, micro_batch, checkpointing))
    with contextlib.closing(api.train(config(3, f"{name}-warm"))) as warming:
        for record in warming:
            if isinstance(record, SampleRecord):  # all that is left is a checkpoint, which has no kernels
                break
    found = estimate(config(steps, name), seconds=seconds)
    free_memory()  # of the estimate, which is not the run's time
    began, built, records = time.perf_counter(), 0.0, []
    for record in api.train(config(steps, name)):
        built = built or time.perf_counter() - began
        records.append(record)
    truth = time.perf_counter() - began
    trained = [record for record in records if isinstance(record, StepRecord)]
    peak = max(record.memory_bytes or 0 for record in trained)
    row = {
        "preset": preset,
        "micro_batch": micro_batch,
        "checkpointing": checkpointing,
        "steps": steps,
        "seconds": found.seconds.value,
        "seconds_truth": truth,
        "parts": {part.name: part.seconds.value for part in found.parts},
        "parts_truth": {
            "data and model": built,
            "training": sum(record.seconds for record in trained),
            "evaluations": sum(record.seconds for record in records if isinstance(record, EvalRecord)),
            "checkpoints": sum(record.seconds for record in records if isinstance(record, CheckpointRecord)),
        },
        "peak_formula": found.peak_estimate.value,
        "peak_probe": found.peak_measured.value,
        "peak_truth": peak,
        "watts": found.watts.value,
        "time_share": (found.seconds.value or 0.0) / truth,
        "formula_share": (found.peak_estimate.value or 0.0) / peak,
        "probe_share": (found.peak_measured.value or 0.0) / peak,
        "device": found.device,
        "torch": torch.__version__,
    }
    for folder in (name, f"{name}-warm"):  # disks are small, and checkpoints are not
        shutil.rmtree(scratch / folder, ignore_errors=True)
    return row


def _job(shape: str, samples: int, scratch: Path) -> list[str]:
    """Settings for the job of guide 004 on a base of this shape, which is made once."""
    base = scratch / f"base-{shape}"
    if not base.exists():
        write_base(base, shape)
    words = [f"model.init_from={base}", f"chat.source={INSTRUCTIONS}", f"data.folder={scratch / shape}-samples"]
    # No samples: drawn weights do not know how to end an answer, and learn it in the first steps.
    words += [f"chat.batch_samples={samples}", "speed.accumulation=1", "lora.dropout=0.0"]
    return [*words, "eval.sample_tokens=0"]


def write_base(folder: Path, shape: str) -> None:
    """A model of that shape with random weights, and a tokenizer trained on Shakespeare and the instructions."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from flatout.config.schema import ModelConfig
    from flatout.corpus.document import shakespeare
    from flatout.model.gpt import build_model
    from flatout.model.hub_folder import export_huggingface

    config = ModelConfig(**BASES[shape], context=2048, qk_norm=False, tied=False)
    export_huggingface(build_model(config, 32000, seed=0), folder, dtype=torch.bfloat16)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(shakespeare()), str(INSTRUCTIONS)], trainer)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def within_a_tenth(row: dict) -> bool:
    # On a CPU the formula knows the tensors only, and the process is most of the peak.
    memory = row["probe_share"] if row["preset"] in ("shakespeare-char", "lora-tiny") else row["formula_share"]
    return abs(row["time_share"] - 1) <= 0.1 and abs(memory - 1) <= 0.1


def shown(row: dict) -> str:
    """A row for people."""
    if "error" in row:
        return f"{row['case']}: {row['error']}"
    told = f"time {row['time_share']:.3f} of {row['seconds_truth']:.1f} s, memory by formula {row['formula_share']:.3f}"
    told += f", by the probe {row['probe_share']:.3f} of {row['peak_truth'] / 2**30:.2f} GiB"
    return f"{row['case']}: {told}{'' if within_a_tenth(row) else '   NOT WITHIN A TENTH'}"


def main() -> int:
    everything = {name_of(case): case for case in CASES + CPU_CASES}
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=5.0)
    words = parser.parse_intermixed_args()
    if words.list:
        print("\n".join(everything))
        return 0
    for pattern in words.cases:
        if not fnmatch.filter(everything, pattern):
            parser.error(f"no case {pattern!r}; --list prints their names")
    asked = words.cases or [name_of(case) for case in CASES]
    names = [name for name in everything if any(fnmatch.fnmatch(name, pattern) for pattern in asked)]

    from flatout.errors import UserError
    from flatout.front.output import held_signal

    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    rows: list[dict] = []
    with held_signal() as stop, tempfile.TemporaryDirectory() as folder:
        for name in names:
            began = time.perf_counter()
            try:
                row = {"case": name, **case_row(*everything[name], words.steps, words.seconds, Path(folder))}
            except Exception as error:  # noqa: BLE001 - whatever it is, the other cases still have something to say
                if not isinstance(error, UserError):
                    traceback.print_exc()
                row = {"case": name, "error": f"{type(error).__name__}: {error}"}
            row |= {"wall_seconds": round(time.perf_counter() - began, 1), "commit": commit}
            print(json.dumps(row, ensure_ascii=False), flush=True)
            print(shown(row), file=sys.stderr, flush=True)
            rows.append(row)
    if stop.number is not None:
        return stop.reported("the cases above are done, the others are not")
    measured = [row for row in rows if "error" not in row]
    within = sum(within_a_tenth(row) for row in measured)
    print(f"{within} of {len(measured)} within a tenth in time and memory", file=sys.stderr)
    return 0 if len(measured) == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
