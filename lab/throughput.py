"""Full training steps of the GPT-2 presets on this machine, and of peers beside them, as JSON lines.

    python lab/throughput.py DATA_FOLDER COMMIT [CASE ...] [A.B=C ...] >> lab/throughput.jsonl

Protocol: for our rows the real loop (loader, forward, backward, clip, AdamW), for peers a loop of our own around their
model (same tokens, same batch, forward, backward, clip, torch's fused AdamW). The first steps hold compilation and
warm-up and are left out. Seconds per step are the device's own, from the end of one step to the end of the next; the
row is the median. FLOPs by the convention of `flatout.model.count`. `state` is clock, power and temperature right after
the case. The card is power-limited at this load: what saves energy saves time, and two H200s differ by a few percent.
Settings on the command line change all of our cases, and stand in the row.
"""

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time

import torch

import flatout
from flatout.config.load import load_config
from flatout.errors import UserError
from flatout.model.count import flops_per_token
from flatout.records import RunInfo, StepRecord

ONE = ["train.batch_tokens=65536"]  # one micro-batch of 64 x 1024 tokens, as in the figures of others
# 1.3 billion parameters: 24 layers of width 2048
LARGE = ["model.width=2048", "model.heads=16", "speed.micro_batch=16", "train.batch_tokens=131072"]
LONG = ["train.batch_tokens=131072", "speed.micro_batch=2"]  # two micro-batches of 2 x 32,768 tokens
OURS: dict[str, tuple[str, list[str], int]] = {
    "124m": ("gpt2-124m", [], 16),
    "124m-one": ("gpt2-124m", ONE, 40),
    "350m": ("gpt2-350m", ["speed.micro_batch=64"], 9),
    "350m-fp8-all": ("gpt2-350m", ["speed.micro_batch=64", "speed.fp8=[qkv, out, up, down, head]"], 8),
    "124m-fp8-all": ("gpt2-124m", ["speed.fp8=[qkv, out, up, down, head]"], 12),
    "1300m": ("gpt2-350m", LARGE, 8),
    "gpt-124m": ("gpt-124m", [], 12),
    "small-32k": ("small-32k", LONG, 8),
    "small-32k-windows": ("small-32k", [*LONG, "model.pattern=WWWWWA"], 8),
    "small-32k-hybrid": ("small-32k-hybrid", LONG, 8),
    "small-32k-eigenstate": ("small-32k-eigenstate", LONG, 8),
}
# Sequences in a micro-batch, micro-batches in an update; the first is the same update as our row of 124m has.
PEERS = {"hf-124m": (64, 8), "hf-124m-one": (64, 1), "hf-124m-32": (32, 1)}
WARM_UP = 4


def ours(case: str, data: str, settings: list[str]) -> dict:
    preset, words, steps = OURS[case]
    with tempfile.TemporaryDirectory() as folder:
        plan = [f"data.folder={data}", f"train.steps={steps}", "optim.warmup=10", "eval.tokens=65536",
                "eval.sample_tokens=0", "checkpoint.every=0", f"output.folder={folder}/run"]  # fmt: skip
        began = time.perf_counter()
        first = None
        records = []
        for record in flatout.train(load_config(preset, [*plan, *words, *settings])):
            if isinstance(record, StepRecord) and first is None:
                first = time.perf_counter() - began
            records.append(record)
    info = next(record for record in records if isinstance(record, RunInfo))
    taken = [record for record in records if isinstance(record, StepRecord)]
    return {
        "features": {feature.name: feature.used for feature in info.features},
        "batch_tokens": info.batch_tokens,
        "micro_batch": info.micro_batch,
        "first_step_seconds": round(first or 0.0, 1),
        "losses": [round(taken[i].loss, 4) for i in (0, len(taken) // 2, -1)],
        **timing([r.seconds for r in taken[WARM_UP:]], info.batch_tokens, info.flops_per_token),
        "peak_gib": round(max(r.memory_bytes or 0 for r in taken) / 2**30, 2),
    }


def timing(seconds: list[float], tokens: int, flops: float) -> dict:
    middle = statistics.median(seconds)
    return {
        "steps_timed": len(seconds),
        "tokens_per_second": round(tokens / middle),
        "fastest": round(tokens / min(seconds)),
        "slowest": round(tokens / max(seconds)),
        "tflops": round(tokens / middle * flops / 1e12, 1),
    }


def hugging_face(batch: int, count: int) -> dict:
    """Hugging Face's GPT-2 with sdpa attention, compiled, bf16 autocast over fp32 weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False, attn_implementation="sdpa")  # pyright: ignore
    model = GPT2LMHeadModel(config).cuda().train()  # pyright: ignore
    compiled = torch.compile(model, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(0, 50257, (batch, 1024), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    marks = []
    for _ in range(WARM_UP + 1 + (12 if count > 1 else 16)):
        for _ in range(count):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = compiled(tokens, labels=tokens).loss
            (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        marks.append(mark)
    torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) / 1000 for a, b in zip(marks[WARM_UP:], marks[WARM_UP + 1 :], strict=False)]
    flops = flops_per_token(load_config("gpt2-124m").config.model, 50257)
    peak = torch.cuda.max_memory_allocated() / 2**30
    total = batch * count * 1024
    return {"batch_tokens": total, "micro_batch": batch, **timing(seconds, total, flops), "peak_gib": round(peak, 2)}


def main() -> None:
    data, commit, *words = sys.argv[1:]
    settings = [word for word in words if "=" in word]
    cases = [word for word in words if "=" not in word]
    for case in cases or [*OURS, *PEERS]:
        try:
            row = ours(case, data, settings) if case in OURS else hugging_face(*PEERS[case])
        except (UserError, RuntimeError) as error:
            row = {"failed": str(error)[:200]}
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"]
        state = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        where = {"case": case, "commit": commit, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
        print(json.dumps({**where, **({"settings": settings} if settings else {}), "state": state, **row}), flush=True)
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
