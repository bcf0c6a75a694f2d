"""Tokens per second of generated text: the engine, and Hugging Face's generate in the same process, as JSON lines.

    python lab/decode.py COMMIT [--peers] [--profile] [CASE ...] >> lab/decode.jsonl

Protocol: random weights in bf16, greedy, a prompt of 64 random tokens (or `--prompt N`, in a cache for the whole
context), 512 tokens after it (256 for several rows). The first text is a warm-up and compiles; then the median of
three. `seconds` are those of the whole text, with the prompt; `token_us` are microseconds of a step after it.
`--invariant N` decodes in N rows whatever is live.
Hugging Face's rows are `generate` with its dynamic cache (`eager`), and with the static cache and its forward compiled
(`static`). `bandwidth` is the share of the data sheet's 4.8 TB/s that goes into reading the weights once a step.
`--profile` prints the kernels of one recorded step instead, with their microseconds.
"""

import argparse
import functools
import gc
import json
import statistics
import time
from typing import Any

import torch

from flatout.config.load import load_config
from flatout.config.schema import ModelConfig
from flatout.device import arithmetic
from flatout.generation.engine import Engine, TextRequest
from flatout.generation.sampling import Sampling
from flatout.model.execution import Execution
from flatout.model.gpt import empty_model
from flatout.model.quantize import narrow_linears

H200 = 4.8e12  # bytes per second
bf16 = functools.partial(arithmetic, "bf16", False, torch.device("cuda"))
PROMPT, TOKENS, TURNS = 64, 512, 3
LLAMA = {"family": "gpt", "mlp": "swiglu", "tied": False, "context": 1024}
SHAPES: dict[str, tuple[str | None, dict[str, Any]]] = {  # preset, and settings of its model
    "124m": ("gpt2-124m", {}),
    "350m": ("gpt2-350m", {}),
    "record-60m": ("record", {"layers": 8, "width": 512, "heads": 4}),
    "eigenstate": ("small-32k-hybrid", {"pattern": "E"}),  # 12 x 768
    "hybrid": ("small-32k-hybrid", {}),
    "full-32k": ("small-32k", {}),
    "1.1b": (None, {**LLAMA, "layers": 22, "width": 2048, "heads": 32, "kv_heads": 4, "mlp_width": 5632}),
    "3b": (None, {**LLAMA, "layers": 28, "width": 3072, "heads": 24, "kv_heads": 8, "mlp_width": 8192}),
}
LLAMA_VOCAB = 32_000


def shape(case: str) -> tuple[ModelConfig, int]:
    preset, settings = SHAPES[case]
    if preset is None:
        return ModelConfig(**settings), LLAMA_VOCAB
    return load_config(preset).config.model.model_copy(update=settings), 50_257


def timed(work: Any, count: int) -> tuple[float, float]:
    """Tokens per second and seconds, the median of some turns."""
    work()
    taken = []
    for _ in range(TURNS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    middle = statistics.median(taken)
    return round(count / middle, 1), round(middle, 4)


def ours(case: str, rows: int, asked: argparse.Namespace) -> dict[str, Any]:
    config, vocab = shape(case)
    model = empty_model(config, vocab, execution=Execution(), device=torch.device("cuda")).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    narrow_linears(model, "int8" if asked.int8 else "bf16")
    read = sum(
        x.nbytes
        for x in [*model.blocks.parameters(), (model.head.weight if not config.tied else model.embedding.weight)]
    )
    length = asked.prompt or PROMPT
    prompts = torch.randint(0, vocab, (rows, length)).tolist()
    tokens = TOKENS if rows == 1 else TOKENS // 2
    slots, room = max(rows, asked.invariant), None if asked.prompt else PROMPT + tokens
    with torch.inference_mode():
        engine = Engine(model, rows=slots, room=room, kernels=True, invariant=asked.invariant > 0, scope=bf16)

        def text(count: int) -> None:
            for prompt in prompts:
                engine.add(TextRequest(ids=prompt, count=count, sampling=Sampling(temperature=0.0)))
            engine.kept = [[] for _ in range(slots)]  # no prompt is known
            while engine.busy:
                engine.step()

        rate, seconds = timed(lambda: text(tokens), tokens * rows)
        _, before = timed(lambda: text(1), rows)
        if asked.profile:
            profile(engine, rows)
        engine.close()
    steps = rate / rows
    found = {"rows": rows, "prompt": length, "tokens_per_second": rate, "seconds": seconds, "prompt_seconds": before}
    found |= {"token_us": round(1e6 * (seconds - before) / (tokens - 1), 1), "bandwidth": round(read * steps / H200, 3)}
    return found | ({"invariant": slots} if asked.invariant else {})


def profile(engine: Engine, rows: int) -> None:
    replay = engine.graphs[rows][0]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(10):
            replay()
        torch.cuda.synchronize()
    for event in sorted(seen.key_averages(), key=lambda event: -event.device_time_total)[:14]:
        print(f"{event.device_time_total / 10:9.1f} us {event.count / 10:6.1f} x  {event.key[:90]}")


def peers(case: str, rows: int) -> list[dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    config, vocab = shape(case)
    if case == "record-60m":
        return []  # no other program loads it
    model: Any
    with torch.device("cuda"):
        if config.family == "gpt2":
            size: dict[str, Any] = {"n_layer": config.layers, "n_embd": config.width, "n_head": config.heads}
            model = GPT2LMHeadModel(GPT2Config(**size, vocab_size=vocab))
        else:
            size = {"hidden_size": config.width, "intermediate_size": config.mlp_width}
            size |= {"num_hidden_layers": config.layers, "num_attention_heads": config.heads}
            theirs = LlamaConfig(**size, num_key_value_heads=config.kv_heads, vocab_size=vocab)
            model = LlamaForCausalLM(theirs)
    model.to(torch.bfloat16).eval()
    prompt = torch.randint(0, vocab, (rows, PROMPT), device="cuda")
    tokens = TOKENS if rows == 1 else TOKENS // 2
    found = []
    for name, how in (("eager", {}), ("static", {"cache_implementation": "static"})):

        def text(how: dict[str, Any] = how) -> None:
            count = {"max_new_tokens": tokens, "min_new_tokens": tokens}
            model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0, **count, **how
            )

        with torch.inference_mode():
            rate, seconds = timed(text, tokens * rows)
        found.append({"peer": f"transformers {name}", "rows": rows, "tokens_per_second": rate, "seconds": seconds})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("cases", nargs="*", help=f"CASE or CASE@ROWS; cases are {', '.join(SHAPES)}")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--invariant", type=int, default=0, metavar="ROWS")
    asked = parser.parse_intermixed_args()
    about = {"commit": asked.commit, "torch": torch.__version__, "device": torch.cuda.get_device_name()}
    for word in asked.cases or ["124m", "124m@64", "350m", "record-60m", "1.1b"]:
        case, _, rows = word.partition("@")
        for row in [ours(case, int(rows or 1), asked), *(peers(case, int(rows or 1)) if asked.peers else [])]:
            print(json.dumps({"case": case, "int8": asked.int8, **row, **about}), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
