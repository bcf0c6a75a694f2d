"""The server under load, beside its own engine without a server, as JSON lines.

    python lab/serve.py COMMIT [--seconds 150] [--clients 200] [--processes 8] [--rows 64] [--device cuda] [--tiny]

Protocol: a checkpoint of GPT-2 124M's shape (`--tiny`: of two narrow layers) with drawn weights and GPT-2's tokenizer,
weights as `flatout serve` takes them: bf16 on a GPU. Request number N always has the same 32 to 1,024 characters of
Shakespeare as its prompt and asks for the same 32 to 512 tokens, drawn at temperature 1; ends of text are ignored.
Clients of the official `openai` package, spread over processes, ask again as soon as they have an answer.

`engine`: the engine alone, in a process, with tokens for prompts; as many requests wait or live as there are clients.
`whole`, `stream`: `flatout serve`, without and with streaming, `--seconds` each. Rates count the requests that end
after the first tenth of the time, and `share` is the rate by that of the engine. `first` are seconds to the first
token, the middle and the 99th of 100, of requests that began in that time; `events` are those between the first and
the last of a stream, by its seconds, the middle and the most. `memory` is that of the server and of the process that
decodes, in MiB, at both ends. `killed`: the clients' processes are killed in mid-stream, and `freed` is the time until
no text is open.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).parents[1] / "src"
TEXT = (SOURCE / "flatout/data/bundled/tiny_shakespeare.txt").read_text()
MODEL = "step-00000000"


class Answer(NamedTuple):
    began: float
    first: float  # event
    ended: float
    tokens: int  # 0: an error
    events: int


def request(number: int, longest: int) -> tuple[str, int]:
    """Prompt and number of tokens."""
    chance = random.Random(number)
    place = chance.randrange(len(TEXT) - 2 * longest)
    return TEXT[place : place + chance.randint(32, 2 * longest)], chance.randint(longest // 16, longest)


def write_model(folder: Path, tiny: bool) -> None:
    from flatout.checkpoints.checkpoint import Checkpoint, write_checkpoint
    from flatout.config.load import load_config
    from flatout.data.tokenizer import ByteTokenizer, Gpt2Tokenizer
    from flatout.model.gpt import build_model

    config = load_config("gpt2-124m", ["model.layers=2", "model.width=64", "model.heads=2"] if tiny else []).config
    tokenizer = ByteTokenizer() if tiny else Gpt2Tokenizer()
    model = build_model(config.model, tokenizer.vocab)
    state = {"step": 0, "dataset": "", "vocab": tokenizer.vocab}
    kept = {"model": dict(model.named_parameters()), "optimizer": {}, "run": {}, "state": state}
    write_checkpoint(folder, Checkpoint(**kept, config=config.model_dump(), tokenizer=tokenizer.to_json()))


def rate(answers: list[Answer], begin: float, end: float) -> dict[str, Any]:
    ended = [answer.tokens for answer in answers if begin <= answer.ended < end]
    return {"tokens_per_second": round(sum(ended) / (end - begin)), "requests": len(ended)}


def engine_alone(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    import torch

    import flatout
    from flatout.generation.engine import TextRequest
    from flatout.generation.sampling import Sampling
    from flatout.serving.worker import Decoder

    loaded, seconds = flatout.load_model(folder, device=asked.device, weights="auto"), min(30.0, asked.seconds)
    engine = Decoder(loaded, asked.rows, False, lambda message: None).engine
    made = (request(number, asked.longest) for number in range(2000))
    work = [(loaded.tokenizer.encode(prompt).tolist(), tokens) for prompt, tokens in made]
    numbers, answers = itertools.count(), list[Answer]()

    def add() -> tuple[float, TextRequest]:
        number = next(numbers)
        ids, tokens = work[number % len(work)]
        sampling = Sampling(temperature=1.0, seed=number)
        return time.monotonic(), engine.add(TextRequest(ids=ids, count=tokens, sampling=sampling, slides=False))

    begin = time.monotonic()
    open_ = [add() for _ in range(asked.clients)]
    while (now := time.monotonic()) < begin + seconds:
        engine.step()
        if done := [pair for pair in open_ if pair[1].ended]:
            answers += [Answer(began, now, now, len(request.made), 1) for began, request in done]
            open_ = [pair for pair in open_ if not pair[1].ended] + [add() for _ in done]
    name = torch.cuda.get_device_name() if loaded.device.kind == "cuda" else "cpu"
    about = {"torch": torch.__version__, "device": name, "weights": loaded.weights}
    return {"phase": "engine", **rate(answers, begin + seconds / 10, begin + seconds), **about}


def drive(url: str, numbers: range, longest: int, until: float, stream: bool) -> list[Answer]:
    """A process of clients, one for each number; their requests go on from there in the same steps."""
    import openai

    async def ask(client: openai.AsyncOpenAI, number: int) -> Answer:
        prompt, count = request(number, longest)
        how: dict[str, Any] = {"max_tokens": count, "seed": number, "extra_body": {"ignore_eos": True}}
        began, events, first, made = time.monotonic(), 0, 0.0, 0
        try:
            if stream:
                how |= {"stream": True, "stream_options": {"include_usage": True}}
                async for chunk in await client.completions.create(model=MODEL, prompt=prompt, **how):
                    events += bool(chunk.choices)
                    first = first or time.monotonic()
                    made = made if chunk.usage is None else chunk.usage.completion_tokens
            else:
                answer = await client.completions.create(model=MODEL, prompt=prompt, **how)
                made = 0 if answer.usage is None else answer.usage.completion_tokens
            if made != count:
                raise ValueError(f"{made} tokens instead of {count}")
        except Exception as error:  # noqa: BLE001  # any of the package and of its transport
            print(f"request {number}: {error!r:.200}", file=sys.stderr)
            made = 0
        return Answer(began, first, time.monotonic(), made, events)

    async def again(client: openai.AsyncOpenAI, own: Iterator[int], answers: list[Answer]) -> None:
        while time.monotonic() < until:
            answers.append(await ask(client, next(own)))

    async def everybody() -> list[Answer]:
        answers, own = list[Answer](), itertools.count(numbers.start, numbers.step)
        async with openai.AsyncOpenAI(base_url=f"{url}v1", api_key="none", max_retries=0, timeout=300) as client:
            await asyncio.gather(*(again(client, own, answers) for _ in numbers))
        return answers

    return asyncio.run(everybody())


class Server:
    def __init__(self, folder: Path, device: str, rows: int, queue: int) -> None:
        words = [sys.executable, "-m", "flatout", "serve", str(folder), "--port", "0", "--device", device]
        path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [*words, "--rows", str(rows), "--queue", str(queue)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().partition("serving at ")[2].split()[0]

    def memory(self) -> list[int]:
        pid = self.process.pid
        pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
        states = (Path(f"/proc/{pid}/status").read_text().splitlines() for pid in pids)
        return [int(line.split()[1]) // 1024 for state in states for line in state if line.startswith("RssAnon")]

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}metrics") as answer:
            lines = answer.read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def load(server: Server, asked: argparse.Namespace, alone: float, stream: bool) -> dict[str, Any]:
    begin, ramp = time.monotonic() + 3, asked.seconds / 10  # by then the processes have started
    with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
        found = pool.starmap_async(drive, shares(server, asked, begin + asked.seconds, stream))
        time.sleep(begin + ramp - time.monotonic())
        before = server.memory()
        time.sleep(begin + asked.seconds - time.monotonic())
        after = server.memory()
        answers = [answer for part in found.get() for answer in part]
    row = {"phase": "stream" if stream else "whole", **rate(answers, begin + ramp, begin + asked.seconds)}
    row |= {"share": round(row["tokens_per_second"] / alone, 3), "errors": sum(not one.tokens for one in answers)}
    if stream:
        seen = [one for one in answers if one.began >= begin + ramp and one.tokens]
        firsts = [one.first - one.began for one in seen]
        late = statistics.quantiles(firsts, n=100)[98]
        events = [(one.events - 2) / (one.ended - one.first) for one in seen if one.ended - one.first > 0.2]
        row |= {"first": [round(statistics.median(firsts), 3), round(late, 3)]}
        row |= {"events": [round(statistics.median(events), 1), round(max(events), 1)]}
    return {**row, "memory": [before, after]}


def shares(server: Server, asked: argparse.Namespace, until: float, stream: bool) -> list[tuple[Any, ...]]:
    step = asked.processes
    return [(server.url, range(place, asked.clients, step), asked.longest, until, stream) for place in range(step)]


def kill(server: Server, asked: argparse.Namespace) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
        pool.starmap_async(drive, shares(server, asked, time.monotonic() + 600, True))
        while server.metric("flatout_texts_open") < asked.clients or not server.metric("flatout_texts_running"):
            time.sleep(0.05)
        running, gone = server.metric("flatout_texts_running"), server.metric("flatout_cancelled_total")
        pool.terminate()
    began = time.monotonic()
    while server.metric("flatout_texts_open") or server.metric("flatout_texts_running"):
        assert time.monotonic() < began + 60, "texts of killed clients are still open"
        time.sleep(0.01)
    freed = round(time.monotonic() - began, 2)
    gone = server.metric("flatout_cancelled_total") - gone
    return {"phase": "killed", "running": int(running), "cancelled": int(gone), "freed": freed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--seconds", type=float, default=150.0)
    for name, usual in (("clients", 200), ("processes", 8), ("rows", 64)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    asked.longest = 64 if asked.tiny else 512
    with tempfile.TemporaryDirectory() as place:
        write_model(Path(place), asked.tiny)
        folder = Path(place) / MODEL
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(engine_alone, (folder, asked))
        about = {name: row.pop(name) for name in ("torch", "device", "weights")}
        about |= {"commit": asked.commit, "model": "tiny" if asked.tiny else "124m"}
        about |= {name: getattr(asked, name) for name in ("clients", "rows", "seconds")}
        print(json.dumps({**row, **about}), flush=True)
        server, speed = Server(folder, asked.device, asked.rows, 2 * asked.clients), row["tokens_per_second"]
        try:
            for stream in (False, True):
                print(json.dumps({**load(server, asked, speed, stream), **about}), flush=True)
            print(json.dumps({**kill(server, asked), **about}), flush=True)
        finally:
            server.process.terminate()
            server.process.wait(60)


if __name__ == "__main__":
    main()
