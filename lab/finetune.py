"""Fine-tuning steps of a 1.1B Llama shape with LoRA, ours and PEFT's, as JSON lines.

    python lab/finetune.py COMMIT [CASE ...] >> lab/finetune.jsonl

The model has 22 layers of width 2048, 32 heads with 4 of keys, an MLP of 5,632 and 32,000 tokens; random weights, made
here. Rank 16 on every projection of the blocks. Full rows: 8 samples that fill 2,048 tokens each. Mixed: 32 samples a
step, lengths lognormal with a mean of about 258 and at most 2,048; packed for ours, padded to the longest for PEFT.
Everybody sees the same tokens in the same order, and every token but the first of a sample is learned. Each step is
forward, backward, clipping to 1.0 and torch's fused AdamW. Ours is the path of `flatout finetune`: its loader, its
switches as they are resolved for this machine, its step. PEFT's is a plain loop under autocast, adapters in fp32. A
case that cannot run gives a row with `error`, and the next one follows.

Seconds are the device's own, from the end of one step to the end of the next; tokens are those that are no padding.
`host_ms` is how long the host takes to hand a step over without waiting for the device: where it comes near the
step's own time, the host is what is slow. Where CUDA graphs are used, all steps were taken twice before, so that every
shape is recorded, as it is from the third epoch on; `peak_gib` counts what recordings hold. `--small` is a toy shape,
to try this file out on a CPU. Words like `speed.products=tuned` change our settings.
"""

import argparse
import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from flatout.checkpoints.base_and_adapter import adapter_plan
from flatout.config.load import load_config
from flatout.config.schema import ModelConfig, RunConfig
from flatout.config.source import IN_PYTHON
from flatout.data.batch import Batch, Schedule, Span
from flatout.data.sample_data import SampleLoader, SampleOrder, SampleRows
from flatout.data.samples import Samples
from flatout.device import Scope, detect_device, use_expandable_segments
from flatout.engine.graphs import MicroBatchGraph, Recorder
from flatout.engine.monitor import Notices
from flatout.engine.setup import only_adapters
from flatout.engine.step import TrainStep
from flatout.errors import UserError
from flatout.model.adapters import attach
from flatout.model.gpt import empty_model
from flatout.ops.reference import IGNORED
from flatout.optim.optimizers import Optimizers
from flatout.optim.rules import rules_of
from flatout.resolve.switches import Speed, resolve_speed

SHAPE = {"layers": 22, "width": 2048, "heads": 32, "kv_heads": 4, "mlp_width": 5632, "context": 2048}
TOY = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "mlp_width": 96, "context": 128}
VOCAB, TOY_VOCAB = 32_000, 500
FULL, MIXED = 8, 32  # samples a step
MEAN, SPREAD = 258, 1.0  # of the lengths, and of their logarithms
WARM_UP, TIMED = 6, 14

OURS: dict[str, list[str]] = {
    "ours": [],
    "ours-tuned": ["speed.products=tuned"],
    "ours-full": ["speed.checkpointing=full"],
    "mixed": [],
}
PEERS = ("peft", "peft-checkpoint", "peft-mixed")


def samples_of(*, mixed: bool, small: bool) -> Samples:
    """Enough samples for every step; the same ones whoever asks."""
    generator = np.random.default_rng(0)
    context, vocab = (TOY["context"], TOY_VOCAB) if small else (SHAPE["context"], VOCAB)
    count = (MIXED if mixed else FULL) * (WARM_UP + TIMED + 8)
    if mixed:
        mean = MEAN * context / SHAPE["context"]
        drawn = generator.lognormal(math.log(mean) - SPREAD**2 / 2, SPREAD, count)
        lengths = np.clip(drawn.astype(np.int64), 2, context)
    else:
        lengths = np.full(count, context)
    lengths = lengths + 1  # the last token of a sample is a target only
    tokens = generator.integers(0, vocab, int(lengths.sum()), dtype=np.int64).astype(np.uint16)
    offsets = np.append(0, np.cumsum(lengths))
    return Samples(tokens, np.ones(len(tokens), dtype=bool), offsets)


def our_config(words: list[str], *, mixed: bool, small: bool) -> RunConfig:
    plan = [f"chat.batch_samples={MIXED if mixed else FULL}", "train.epochs=null", f"train.steps={WARM_UP + TIMED}"]
    config = load_config("lora", [*plan, *words]).config
    shape = {**(TOY if small else SHAPE), "family": "gpt", "tied": False, "qk_norm": False, "dropout": 0.0}
    return config.model_copy(update={"model": ModelConfig(**{**shape, "vocab": TOY_VOCAB if small else VOCAB})})


def our_step(config: RunConfig, *, mixed: bool, small: bool) -> tuple[TrainStep, Speed]:
    """The step of a fine-tuning run on random weights."""
    lengths = np.diff(samples_of(mixed=mixed, small=small).offsets) - 1
    step_tokens = float(lengths.mean()) * config.chat.batch_samples
    device = detect_device(config.speed.device)
    speed = resolve_speed(config, device, None, lambda _: IN_PYTHON, vocab=config.model.vocab, step_tokens=step_tokens)
    use_expandable_segments(device.torch_device, on=speed.expandable_segments)
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(speed.precision, torch.float32)
    vocab = config.model.vocab
    assert vocab is not None
    how = {"execution": speed.execution, "dtype": narrow, "device": device.torch_device}
    model = empty_model(config.model, vocab, **how)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    adapters = attach(model, adapter_plan(config.lora), seed=0)
    trained = only_adapters(adapters)
    constant = config.optim.model_copy(update={"schedule": "constant", "warmup": 0})
    graph = MicroBatchGraph(model, Notices(), Recorder(device.torch_device), adapters) if speed.cuda_graphs else None
    step = TrainStep(
        model,
        Optimizers(rules_of(constant, 1, fused=speed.fused_optimizer), trained.updated),
        clip=config.optim.clip,
        micro_batch=speed.micro_batch,
        graph=graph,
        adapters=adapters,
        scope=Scope(device, speed.precision, config.train.deterministic, speed.threads),
    )
    return step, speed


def batches_of(config: RunConfig, speed: Speed, *, mixed: bool, small: bool) -> SampleLoader:
    samples = samples_of(mixed=mixed, small=small)
    order = SampleOrder(len(samples), config.chat.batch_samples, 0)
    delivery = speed.delivery()
    how = {"row_tokens": config.model.context, "packing": mixed, "joined": delivery.joined}
    rows = SampleRows(samples, batch_samples=order.batch_samples, **how)
    schedule = Schedule.constant(order.batch_samples, config.model.context)
    return SampleLoader(rows, order, delivery, Span(schedule=schedule, first_step=0, last_step=order.steps_per_epoch))


def recorded(
    graph: MicroBatchGraph, take: Callable[[Batch], float], config: RunConfig, speed: Speed, *, mixed: bool, small: bool
) -> int:
    """Takes all steps twice, after which every shape that comes is recorded; returns how many shapes that are."""
    for _ in range(2):
        with batches_of(config, speed, mixed=mixed, small=small) as loader:
            for batch in loader:
                take(batch)
    return len(graph.recordings)


def ours(words: list[str], *, mixed: bool, small: bool) -> dict[str, Any]:
    config = our_config(words, mixed=mixed, small=small)
    step, speed = our_step(config, mixed=mixed, small=small)
    with batches_of(config, speed, mixed=mixed, small=small) as loader:
        feed = iter(loader)

        def take(batch: Batch) -> float:
            step(batch.tokens, batch.targets, batch.packed)
            assert batch.packed is not None
            return batch.packed.tokens

        row = {"features": {f.name: f.used for f in speed.features}, "padding": None}
        first = next(feed)
        loss = float(step(first.tokens, first.targets, first.packed)[0])
        if step.graph is not None:  # as in a long run: every shape has come, and twice
            row |= {"recordings": recorded(step.graph, take, config, speed, mixed=mixed, small=small)}
        row |= timed(lambda: take(next(feed)))
        batch = next(feed)
        row["losses"] = [round(loss, 4), round(float(step(batch.tokens, batch.targets, batch.packed)[0]), 4)]
    if (graph := step.graph) is not None:
        row |= {"recordings": len(graph.recordings), "news": graph.notices.take()}
        # In no peak of torch's, and there all the time.
        row["peak_gib"] = round(max(row["peak_gib"], (torch.cuda.memory_allocated() + graph.held_bytes) / 2**30), 2)
    if batch.packed is not None:
        row["padding"] = round(1 - batch.packed.tokens / batch.packed.places(step.micro_batch), 3)
    return row


def timed(step: Callable[[], float]) -> dict[str, Any]:
    """`step` takes one and returns its tokens. Warm-up first, then medians over the rest."""
    cuda = torch.cuda.is_available()
    for _ in range(WARM_UP):
        step()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    marks, tokens = [mark()], []
    for _ in range(TIMED):
        tokens.append(step())
        marks.append(mark())
    if cuda:
        torch.cuda.synchronize()
    seconds = [between(a, b) for a, b in itertools.pairwise(marks)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    host = []
    for _ in range(3):  # an idle device, so that nothing in a queue holds the host up
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        host.append(time.perf_counter() - began)
    if cuda:
        torch.cuda.synchronize()
    rates = [count / taken for count, taken in zip(tokens, seconds, strict=True)]
    return {
        "steps_timed": TIMED,
        "tokens_a_step": round(statistics.mean(tokens)),
        "tokens_per_second": round(sum(tokens) / sum(seconds)),
        "median": round(statistics.median(rates)),
        "fastest": round(max(rates)),
        "slowest": round(min(rates)),
        "step_ms": round(1e3 * statistics.median(seconds), 2),
        "steps_ms": [round(1e3 * taken, 1) for taken in seconds],
        "host_ms": round(1e3 * min(host), 2),
        "peak_gib": None if peak is None else round(peak, 2),
    }


def mark() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first: Any, second: Any) -> float:
    return second - first if isinstance(first, float) else first.elapsed_time(second) / 1000


def llama(*, small: bool, device: torch.device) -> Any:
    """Hugging Face's Llama of the shape, random weights in bf16, attention by sdpa."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape, vocab = (TOY, TOY_VOCAB) if small else (SHAPE, VOCAB)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=shape["width"], intermediate_size=shape["mlp_width"],
        num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"], max_position_embeddings=shape["context"], use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16)  # pyright: ignore


def peft(case: str, *, small: bool) -> dict[str, Any]:
    """Hugging Face's Llama with PEFT's LoRA: a plain loop."""
    from peft import LoraConfig, get_peft_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base = llama(small=small, device=device)
    if case.endswith("-checkpoint"):
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4, fused=True)
    mixed = case.endswith("-mixed")
    feed = padded(samples_of(mixed=mixed, small=small), MIXED if mixed else FULL, device)
    last: list[torch.Tensor] = []

    def step() -> float:
        tokens, targets, mask, real = next(feed)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            # Labels are targets already: moved by one place, since the model moves them back.
            labels = torch.nn.functional.pad(targets, (1, 0), value=IGNORED)[:, :-1]
            last[:] = [model(input_ids=tokens, attention_mask=mask, labels=labels).loss]
        last[0].backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return real

    step()
    loss = float(last[0].detach())
    row = timed(step)
    return row | {"losses": [round(loss, 4), round(float(last[0].detach()), 4)]}


def padded(
    samples: Samples, count: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, float]]:
    """Batches in rows as long as their longest sample, in the order in which ours come."""
    order = SampleOrder(len(samples), count, 0)
    for step in range(order.steps_per_epoch):
        chosen = [samples.sample(int(number))[0].astype(np.int64) for number in order.indices(step)]
        longest = max(len(one) for one in chosen) - 1
        tokens, targets = np.zeros((count, longest), np.int64), np.full((count, longest), IGNORED, np.int64)
        for row, one in enumerate(chosen):
            tokens[row, : len(one) - 1], targets[row, : len(one) - 1] = one[:-1], one[1:]
        mask = torch.from_numpy((targets != IGNORED).astype(np.int64)) if (targets == IGNORED).any() else None
        parts = (torch.from_numpy(tokens).to(device), torch.from_numpy(targets).to(device))
        yield *parts, None if mask is None else mask.to(device), float((targets != IGNORED).sum())


def measure(case: str, words: list[str], *, small: bool) -> dict[str, Any]:
    if case in PEERS:
        return peft(case, small=small)
    return ours([*OURS[case], *words], mixed="mixed" in case, small=small)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    known = [*OURS, *PEERS]
    parser.add_argument("words", nargs="*", metavar="CASE", help=f"of {', '.join(known)}; or a setting a.b=c")
    parser.add_argument("--small", action="store_true", help="a toy shape")
    asked = parser.parse_intermixed_args()
    settings = [word for word in asked.words if "=" in word]
    cases = [word for word in asked.words if "=" not in word] or ["ours", "ours-full", "mixed", *PEERS]
    unknown = [case for case in cases if case not in known]
    if unknown:
        parser.error(f"there is no case {unknown[0]!r}; there are {', '.join(known)}")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    for case in cases:
        try:
            row = measure(case, settings, small=asked.small)
        except (UserError, RuntimeError, ImportError) as error:
            row = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        where = {"case": case, "commit": asked.commit, "device": name, "torch": torch.__version__}
        print(json.dumps({**where, **({"settings": settings} if settings else {}), **row}), flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
