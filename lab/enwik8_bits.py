"""Bits per byte of enwik8 by `flatout train --minutes`, beside published figures.

    python lab/enwik8_bits.py data enwik8.gz FOLDER
    python lab/enwik8_bits.py run FOLDER COMMIT [WORDS ...] [--minutes 10] [--seeds 1,2] [--test]
    python lab/enwik8_bits.py bits FOLDER RUN [--test]

`data` writes the pages of bytes 0 to 90M, 90M to 95M and 95M to 100M as documents of JSON lines: training text,
validation and test. It needs enwik8, gzip-compressed (`ENWIK8` is the SHA-256 of the text). `run` trains by the
command line, with WORDS for other settings, and measures; `bits` measures a run that is there.

Protocol: the negative log-likelihood of all tokens of a part, ends of text too, in bits, by the bytes of the part, page
marks included. `windows`: separate rows of the trained context. `sliding`: rows of 32,768 tokens in which every block
looks back as many tokens as the trained context has, at most 1,792. In both, a page sees nothing of the pages before.
The test part is for finished recipes, once each (`--test`).
"""

import argparse
import gzip
import hashlib
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from time_to_loss import ENWIK8, FARTHEST, ROW, with_rows

from flatout.front.models import LoadedModel, load_model
from flatout.ops.documents import lay_out
from flatout.ops.reference import IGNORED

PARTS = {"train": (0, 90_000_000), "val": (90_000_000, 95_000_000), "test": (95_000_000, 100_000_000)}
# Test part, bytes as tokens, trained on enwik8 alone.
PUBLISHED = {"Transformer-XL, 12 layers": 1.06, "Transformer-XL, 24 layers": 0.99, "SHA-RNN": 1.07}
DIFFERENT = (
    "tokens of a vocabulary instead of bytes (GPT-2's was learned from other text), pages apart, and the best "
    "checkpoint on validation"
)


def write_parts(source: Path, folder: Path) -> None:
    raw = gzip.decompress(source.read_bytes())
    if hashlib.sha256(raw).hexdigest() != ENWIK8:
        sys.exit(f"error: {source} is not enwik8")
    folder.mkdir(parents=True)
    for name, (begin, end) in PARTS.items():
        text = raw[begin:end].decode("utf-8", errors="replace")
        pages = [page for page in re.split(r"(?m)^(?=[ \t]*<page>)", text) if page]
        lines = (json.dumps({"text": page}) + "\n" for page in pages)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


@torch.no_grad()
def bits_per_byte(loaded: LoadedModel, file: Path, row: int) -> float:
    """Of the pages of a file, in rows of that many tokens."""
    tokenizer, config, device = loaded.tokenizer, loaded.model.config, loaded.device.torch_device
    end = tokenizer.end_of_text
    assert end is not None
    with file.open(encoding="utf-8") as lines:
        pages = tokenizer.encode_batch([json.loads(line)["text"] for line in lines])
    ids = torch.cat([part for page in pages for part in (torch.tensor([end]), torch.as_tensor(page).long())])
    count = -(-(len(ids) - 1) // row) * row
    tokens, targets = torch.full((count,), end), torch.full((count,), IGNORED)
    tokens[: len(ids) - 1], targets[: len(ids) - 1] = ids[:-1], ids[1:]
    model = with_rows(loaded.model, row, None if row == config.context else min(config.context, FARTHEST), device)
    nats = torch.zeros((), dtype=torch.float64, device=device)
    together = max(1, ROW // row)
    for some, wanted in zip(tokens.view(-1, row).split(together), targets.view(-1, row).split(together), strict=True):
        layout = lay_out((some == end).cumsum(1).int().numpy(), None, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            nats += model(some.to(device), wanted.to(device), 0.0, layout)
    begin, stop = PARTS[file.stem]
    return float(nats) / math.log(2) / (stop - begin)


def measured(folder: Path, run: Path, test: bool) -> dict[str, Any]:
    loaded = load_model(run)
    rows = {"windows": loaded.model.config.context, "sliding": ROW}
    parts = ("val", "test") if test else ("val",)
    return {
        part: {name: round(bits_per_byte(loaded, folder / f"{part}.jsonl", row), 4) for name, row in rows.items()}
        for part in parts
    }


def trained(folder: Path, minutes: float, seed: int, words: list[str], run: Path) -> dict[str, Any]:
    source = [f"data.source={folder}/train.jsonl", f"data.validation={folder}/val.jsonl"]
    place = [f"data.folder={folder}/shards", f"output.folder={run}", f"train.seed={seed}"]
    began = time.perf_counter()
    command = [sys.executable, "-m", "flatout", "train", "--minutes", str(minutes), *source, *place, *words]
    subprocess.run(command, check=True, stdout=sys.stderr)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    info = next(record for record in records if record["type"] == "run")
    chosen = [
        record["message"] for record in records if record["type"] == "notice" and " minutes on " in record["message"]
    ]
    shape = [info["config"]["model"]["layers"], info["config"]["model"]["width"]]
    facts = {"parameters": info["parameters"], "shape": shape, "batch_tokens": info["batch_tokens"], "chosen": chosen}
    return facts | {"loss": records[-1].get("best_loss"), "command_seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("data", help="write the parts")
    making.add_argument("source", type=Path, help="enwik8.gz")
    making.add_argument("folder", type=Path)
    running = commands.add_parser("run", help="train and measure")
    running.add_argument("folder", type=Path)
    running.add_argument("commit")
    running.add_argument("words", nargs="*", help="settings")
    running.add_argument("--minutes", type=float, default=10.0)
    running.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[1])
    measuring = commands.add_parser("bits", help="measure a run")
    measuring.add_argument("folder", type=Path)
    measuring.add_argument("run", type=Path)
    for one in (running, measuring):
        one.add_argument("--test", action="store_true", help="also the test part")
    asked = parser.parse_args()
    if asked.command == "data":
        return write_parts(asked.source, asked.folder)
    if asked.command == "bits":
        print(json.dumps(measured(asked.folder, asked.run, asked.test)))
    for seed in asked.seeds if asked.command == "run" else ():
        with tempfile.TemporaryDirectory() as place:
            row = {"minutes": asked.minutes, "words": asked.words, "seed": seed, "commit": asked.commit}
            row |= {
                "torch": torch.__version__,
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            }
            row |= trained(asked.folder, asked.minutes, seed, asked.words, Path(place) / "run")
            print(json.dumps(row | measured(asked.folder, Path(place) / "run", asked.test)), flush=True)
    print(f"published, on test: {PUBLISHED}; here differ: {DIFFERENT}", file=sys.stderr)
    return None


if __name__ == "__main__":
    main()
