"""Seconds per generated token by the length of what was there before, for each kind of model, as JSON lines.

    python lab/long_generation.py COMMIT [PRESET ...] [--lengths N ...] >> lab/long_generation.jsonl

The prompt is random tokens, and so are the weights, which changes no time. A row has the seconds of reading the prompt,
the median milliseconds of a token after it, what the cache holds, and, in fp32, whether the likeliest tokens equal
those of a model that reads everything again for each of them.
Traps: a first token pays for kernels that are made then, so each length is warmed up; the clock waits for the device.
"""

import argparse
import itertools
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from flatout.config.load import load_config
from flatout.device import arithmetic, detect_device
from flatout.generation import generate_tokens
from flatout.model.execution import Execution
from flatout.model.gpt import GPT, build_model
from flatout.resolve.switches import scan_for

PRESETS = ("small-32k", "small-32k-hybrid", "small-32k-eigenstate")
LENGTHS = (1024, 4096, 16384, 32_000)
VOCAB = 50_257
TIMED, COMPARED = 48, 12


def finish(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(model: GPT, prompt: list[int], device: torch.device) -> dict[str, Any]:
    """Of the second of two times: kernels and memory are there then."""
    found: dict[str, Any] = {}
    for _ in range(2):
        marks = [finish(device)]
        marks += [finish(device) for _ in generate_tokens(model, prompt, count=TIMED + 1, temperature=0.0)]
        steps = [1000 * (after - before) for before, after in itertools.pairwise(marks[1:])]
        found = {"prompt_seconds": round(marks[1] - marks[0], 4), "token_ms": round(statistics.median(steps), 3)}
    return found


def cache_bytes(model: GPT, prompt: list[int], device: torch.device) -> int:
    """Of all tensors that are held for the next token, at their full size."""
    with torch.inference_mode():
        cache = model.empty_cache(positions=len(prompt))
        model.logits(torch.tensor([prompt], device=device), cache, last=True)
    held = [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, Tensor)]
    return sum(value.untyped_storage().nbytes() for value in held)


def rows_of(preset: str, asked: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    config = load_config(preset, asked.words).config
    execution = Execution(scan=scan_for(detect_device()))  # as a model that was loaded has it
    model = build_model(config.model, VOCAB, seed=0, execution=execution).to(device)
    precision = "bf16" if device.type == "cuda" else "fp32"
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in asked.lengths:
        prompt = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        row: dict[str, Any] = {"length": length, "precision": precision}
        with arithmetic(precision, False, device):
            row |= timed(model, prompt, device)
            row["cache_kib"] = round(cache_bytes(model, prompt, device) / 2**10)
        with arithmetic("fp32", False, device):
            how = {"count": COMPARED, "temperature": 0.0}
            texts = [list(generate_tokens(model, prompt, cached=cached, **how)) for cached in (True, False)]
        rows.append({**row, "equal": texts[0] == texts[1], "compared": COMPARED})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("commit")
    parser.add_argument("presets", nargs="*", metavar="PRESET")
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--words", nargs="*", default=[], help="settings, as model.layers=2")
    asked = parser.parse_intermixed_args()
    device = detect_device().torch_device
    for preset in asked.presets or PRESETS:
        for row in rows_of(preset, asked, device):
            facts = {"preset": preset, "commit": asked.commit, "torch": torch.__version__}
            print(json.dumps({**facts, "device": detect_device().name, **row}), flush=True)


if __name__ == "__main__":
    main()
