"""Validation loss over seconds of training on enwik8, ours and nanoGPT's in one run, as JSON lines.

    python lab/time_to_loss.py data enwik8.gz TOKENIZER FOLDER
    python lab/time_to_loss.py run FOLDER COMMIT [--nanogpt REPOSITORY] [--seeds 1,2] [CASE | NAME=WORDS ...]

`data` makes shards. It needs enwik8, gzip-compressed (`ENWIK8` is the SHA-256 of the text), and GPT-2's
`r50k_base.tiktoken` or its folder. A case is a name of CASES, or NAME=WORDS with the words of `flatout train`, with
spaces between them. Rows are appended to time_to_loss.jsonl here, and in $OUT where that is set.

Protocol: GPT-2's tokens of bytes 0 to 90M of enwik8, at most two epochs; validation is the first 1,048,576 tokens of
bytes 90M to 95M; each `<page>` is a document. Every trained model is evaluated twice:
- `loss`: in separate windows of 1,024 tokens;
- `loss_32k`: in rows of 32,768 tokens of whole documents, where every block attends to the last `window` tokens of the
  document only: as many as the model was trained on, and at most 1,792. nanoGPT's learned positions end at 1,024.
Seconds are those of the training steps; `elapsed` is all from the first step to the end of the run. Start-up,
compilation and evaluation are not timed: the first three steps count as the median of all steps. nanoGPT is its own
model and optimizer, compiled, in a loop of ours.
"""

import argparse
import functools
import gc
import gzip
import hashlib
import importlib.util
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import flatout
from flatout.config.load import load_config
from flatout.front.models import load_model
from flatout.model.execution import Execution
from flatout.model.gpt import empty_model
from flatout.model.protocol import LanguageModel
from flatout.ops.documents import lay_out
from flatout.records import EvalRecord, NoticeRecord, RunInfo, StepRecord

ROWS = Path(__file__).with_name("time_to_loss.jsonl")
CONTEXT, ROW, FARTHEST, END_OF_TEXT, EVALUATED = 1024, 32_768, 1_792, 50_256, 1_048_576
TOKENS = 52_166_656  # two epochs, in whole steps of 131,072
ENWIK8 = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
PARTS = {"train": (0, 90_000_000, 26_102_763), "val": (90_000_000, 95_000_000, 1_442_253)}
CASES = {
    "old": "gpt-124m train.batch_tokens=131072 optim.learning_rate=1.2e-3 optim.warmup=100",
    "modern": "modern --size=124m",
    "record": "record --size=60m",
}
SETTLED = 3  # steps that compile, record and tune


def tokens_of(folder: Path, split: str) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(folder / f"{split}-00000.bin", dtype=np.uint16).astype(np.int64))


# Evaluation


@torch.no_grad()
def in_windows(model: LanguageModel, val: torch.Tensor, device: torch.device) -> float:
    """Mean loss in separate windows of 1,024 tokens."""
    counted = min(EVALUATED, len(val) - 1) // CONTEXT * CONTEXT
    tokens, targets = (val[i : i + counted].view(-1, CONTEXT) for i in (0, 1))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for some, wanted in zip(tokens.split(32), targets.split(32), strict=True):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            total += model(some.to(device), wanted.to(device))
    return float(total) / tokens.numel()


def with_rows(model: LanguageModel, row: int, window: int | None, device: torch.device) -> LanguageModel:
    """The model for packed rows of that many tokens; with a `window` every block looks back so far."""
    looks = {} if window is None else {"pattern": "W", "window": window}
    config = model.config.model_copy(update={"context": row, "dropout": 0.0, **looks})
    kernel = "flash" if device.type == "cuda" else "sdpa"
    how = Execution(document_attention=kernel, loss="chunked" if device.type == "cuda" else "plain")
    longer = empty_model(config, model.vocab, execution=how, device=device).eval()
    weights = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("rotary.")}
    missing = longer.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys, missing
    assert all(name.startswith("rotary.") for name in missing.missing_keys), missing
    return longer


@torch.no_grad()
def in_long_rows(model: LanguageModel, val: torch.Tensor, window: int, device: torch.device, row: int = ROW) -> float:
    """Mean loss in long rows of whole documents, where no block looks further back than `window` tokens."""
    longer = with_rows(model, row, window, device)
    counted = len(val) - 1 - (len(val) - 1) % row
    tokens, targets = (val[i : i + counted].view(-1, row) for i in (0, 1))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for some, wanted in zip(tokens, targets, strict=True):
        documents = np.cumsum(some.numpy() == END_OF_TEXT).astype(np.int32)[None]
        layout = lay_out(documents, None, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            total += longer(some[None].to(device), wanted[None].to(device), 0.0, layout)
    return float(total) / tokens.numel()


# Ours


def ours(words: str, data: Path, seed: int) -> dict[str, Any]:
    preset, *rest = words.split()
    size = next((word.partition("=")[2] for word in rest if word.startswith("--size=")), None)
    rest = [word for word in rest if not word.startswith("--")]
    timed = any(word.startswith("train.minutes=") for word in rest)
    if not timed and not any(word.startswith(("train.tokens=", "train.steps=", "train.epochs=")) for word in rest):
        rest.append(f"train.tokens={TOKENS}")
    with tempfile.TemporaryDirectory() as folder:
        plan = [f"data.folder={data}", "data.source=null", "data.tokenizer=gpt2", f"train.seed={seed}",
                "eval.sample_tokens=0", "checkpoint.every=0",
                f"output.folder={folder}/run"]  # fmt: skip
        named = {} if size is None else {"size": size}
        loaded = load_config(preset, [*plan, *rest], **named)
        if not timed:  # a run with a length in minutes plans its evaluations
            batch, tokens = loaded.config.train.batch_tokens, loaded.config.train.tokens or TOKENS
            often = [f"eval.tokens={EVALUATED}", f"eval.every={max(1, tokens // batch // 8)}"]
            loaded = load_config(preset, [*plan, *often, *rest], **named)
        records, notes, began = [], [], math.inf
        for record in flatout.train(loaded):
            if timed and isinstance(record, NoticeRecord):  # what was chosen, and why
                notes.append(record.message)
            if isinstance(record, RunInfo | StepRecord | EvalRecord):
                records.append(record)
            if isinstance(record, StepRecord):
                began = min(began, time.perf_counter() - record.seconds)
        elapsed = {"elapsed": round(time.perf_counter() - began, 2), **({"notes": notes} if timed else {})}
        return measured(records) | elapsed | losses_of(Path(folder) / "run", data)


def measured(records: list[Any]) -> dict[str, Any]:
    info = next(record for record in records if isinstance(record, RunInfo))
    steps = [record for record in records if isinstance(record, StepRecord)]
    middle = statistics.median(step.seconds for step in steps)
    seconds, curve, tokens = 0.0, [], 0
    for record in records:
        if isinstance(record, StepRecord):
            seconds += middle if record.step <= SETTLED else record.seconds
            tokens = record.tokens
        elif isinstance(record, EvalRecord):
            curve.append([round(seconds, 2), round(record.loss, 4)])
    return {
        "seconds": round(seconds, 2),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds),
        "median_tokens_per_second": round(statistics.median(step.tokens_per_second or 0 for step in steps)),
        "slowest_step": round(max(step.seconds for step in steps[SETTLED:]) / middle, 2),
        "curve": curve,
        "features": {feature.name: feature.used for feature in info.features},
        "shape": [info.config["model"]["layers"], info.config["model"]["width"]],
        "parameters": info.parameters,
        "batch_tokens": info.batch_tokens,
        "peak_gib": round(max(step.memory_bytes or 0 for step in steps) / 2**30, 2),
    }


def losses_of(folder: Path, data: Path) -> dict[str, Any]:
    loaded = load_model(folder)
    model, device, val = loaded.model, loaded.device.torch_device, tokens_of(data, "val")
    window = min(model.config.context, FARTHEST)
    return {
        "loss": round(in_windows(model, val, device), 4),
        "loss_32k": round(in_long_rows(model, val, window, device), 4),
        "window": window,
    }


# nanoGPT


def nanogpt(repository: Path, data: Path, seed: int, tokens: int = TOKENS) -> dict[str, Any]:
    """Its model and its optimizer's groups; batch 131,072, rate 1.2e-3 with a cosine, bf16, compiled."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", repository / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    device, rows, count = torch.device("cuda"), 64, 2
    model = module.GPT(module.GPTConfig()).to(device)
    optimizer = model.configure_optimizers(0.1, 1.2e-3, (0.9, 0.95), "cuda")
    compiled = torch.compile(model)
    train, val = tokens_of(data, "train").to(device), tokens_of(data, "val").to(device)
    windows = (len(train) - 1) // CONTEXT
    steps = tokens // (rows * count * CONTEXT)
    passes = math.ceil(steps * rows * count / windows)
    order = torch.cat([torch.randperm(windows, device=device) for _ in range(passes)]) * CONTEXT
    inside = torch.arange(CONTEXT + 1, device=device)
    batch = functools.partial(torch.autocast, "cuda", torch.bfloat16)

    def loss_of(begins: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        some = text[begins[:, None] + inside]
        with batch():
            return compiled(some[:, :-1].contiguous(), some[:, 1:].contiguous())[1]

    def evaluated() -> float:
        model.eval()
        with torch.no_grad():
            begins = torch.arange(0, EVALUATED, CONTEXT, device=device)
            found = [float(loss_of(part, val)) for part in begins.split(rows)]
        model.train()
        return sum(found) / len(found)

    evaluated()
    for _ in range(SETTLED):  # compiles; its gradients are dropped
        loss_of(order[:rows], train).backward()
        model.zero_grad(set_to_none=True)
    curve, seconds, began = [], 0.0, _now()
    for step in range(steps):
        rising, share = (step + 1) / 100, (step - 100) / (steps - 100)
        rate = 1.2e-3 * (rising if step < 100 else 0.1 + 0.45 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        for part in order[step * rows * count : (step + 1) * rows * count].split(rows):
            (loss_of(part, train) / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % (steps // 8) == 0 or step + 1 == steps:
            seconds += _now() - began
            curve.append([round(seconds, 2), round(evaluated(), 4)])
            began = _now()
    done = steps * rows * count * CONTEXT
    facts = {"seconds": round(seconds, 2), "tokens": done, "tokens_per_second": round(done / seconds), "curve": curve}
    return facts | {"loss": curve[-1][1], "loss_32k": None, "batch_tokens": rows * count * CONTEXT}


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


# Rows


def written(row: dict[str, Any]) -> None:
    places = [ROWS, *([Path(os.environ["OUT"]) / ROWS.name] if os.environ.get("OUT") else [])]
    for place in places:
        with place.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def run(asked: argparse.Namespace) -> None:
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"]
    for seed in asked.seeds:
        for word in asked.cases or (*CASES, *(["nanogpt"] if asked.nanogpt else [])):
            name, equals, words = word.partition("=") if " " in word or word not in CASES else (word, "", "")
            words = words if equals else CASES.get(name, "")
            row = {"case": name, "words": words, "seed": seed, "commit": asked.commit, "torch": torch.__version__}
            row["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
            began = time.perf_counter()
            try:
                row |= (
                    nanogpt(asked.nanogpt, asked.folder, seed) if name == "nanogpt" else ours(words, asked.folder, seed)
                )
            except (flatout.UserError, RuntimeError) as error:  # the other cases still run
                row["failed"] = str(error)[:300]
            row["state"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
            row["wall_seconds"] = round(time.perf_counter() - began, 1)
            written(row)
            print(json.dumps({k: v for k, v in row.items() if k not in ("features", "parameters")}), flush=True)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def data(asked: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(asked.source, asked.tokenizer, Path(folder))
        words = [f"data.source={folder}/train.bin", f"data.validation={folder}/val.bin", "data.format=tokens"]
        flatout.prepare(load_config(None, [*words, "data.tokenizer=gpt2", f"data.folder={asked.folder}"]))


def write_tokens(source: Path, tokenizer: Path, folder: Path) -> None:
    """train.bin and val.bin: tokens as uint16, of the validation text only those that are evaluated."""
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    raw = gzip.decompress(source.read_bytes())
    if hashlib.sha256(raw).hexdigest() != ENWIK8:
        sys.exit(f"error: {source} is not enwik8")
    ranks = tokenizer / "r50k_base.tiktoken" if tokenizer.is_dir() else tokenizer
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
        mergeable_ranks=load_tiktoken_bpe(str(ranks)),
        special_tokens={"<|endoftext|>": END_OF_TEXT},
    )
    for name, (begin, end, expected) in PARTS.items():
        text = raw[begin:end].decode("utf-8", errors="replace")
        pages = [page for page in re.split(r"(?m)^(?=[ \t]*<page>)", text) if page]
        encoded = encoding.encode_ordinary_batch(pages, num_threads=os.cpu_count() or 1)
        tokens = np.concatenate([np.array([END_OF_TEXT, *page], dtype=np.uint16) for page in encoded])
        if len(tokens) != expected:
            sys.exit(f"error: {name} has {len(tokens):,} tokens instead of {expected:,}")
        (tokens[: EVALUATED + 1] if name == "val" else tokens).tofile(folder / f"{name}.bin")


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("data", help="make shards")
    making.add_argument("source", type=Path, help="enwik8.gz")
    making.add_argument("tokenizer", type=Path, help="r50k_base.tiktoken, or its folder")
    making.add_argument("folder", type=Path)
    running = commands.add_parser("run", help="train and measure")
    running.add_argument("folder", type=Path)
    running.add_argument("commit")
    running.add_argument("cases", nargs="*")
    running.add_argument("--nanogpt", type=Path)
    running.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[1])
    asked = parser.parse_args()
    {"data": data, "run": run}[asked.command](asked)


if __name__ == "__main__":
    main()
