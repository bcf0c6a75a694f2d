"""Text on a CPU by trees of this project in turns, as JSON lines: tokens per second and seconds to the first token.

    python lab/cpu_text.py RUN TREE=COMMIT ... [CASE ...] >> lab/cpu_text.jsonl

RUN is a run of the default model (`make train`), and a TREE a folder with `src`, such as a git worktree. Each tree has
a process of its own; they take turns, so that only one of them works. A row has the median and the least of all turns:
of the time on the clock and of the processor time of all threads.

- `generate`, `chat`: 200 tokens after six characters, by the functions of these names on a loaded model; `threads`
  are those that torch has before: one, or its own choice.
- `first`: to the first piece of text. `function` is `flatout.generate` on a loaded model, with an engine that is new;
  `server` is an engine of 8 rows as `flatout serve` keeps it, in trees that have one. Prompts are repeated characters.
- `rows`: 200 tokens of so many texts together in such an engine.
- `command`: `flatout generate RUN --tokens 1` as a process, and `import torch` as one.
"""

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEXT, TOKENS, TURNS, COMMANDS = "ROMEO:", 200, 20, 8
CASES: list[dict[str, Any]] = [
    *({"case": case, "threads": 1} for case in ("generate", "chat")),
    {"case": "generate", "threads": None, "turns": 4},
    *({"case": "first", "by": by, "repeats": repeats} for by in ("function", "server") for repeats in (1, 5, 20)),
    *({"case": "rows", "rows": rows} for rows in (2, 4, 8)),
]


def main() -> None:
    run, *words = sys.argv[1:]
    pairs = [word.rsplit("=", 1) for word in words if "=" in word]
    wanted = [word for word in words if "=" not in word] or ["generate", "chat", "first", "rows", "command"]
    python = [sys.executable]
    environments = [{**os.environ, "PYTHONPATH": str(Path(tree).resolve() / "src")} for tree, _ in pairs]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen([*python, __file__, "--worker", run], env=env, **pipes) for env in environments]
    model = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), platform.machine()
    )
    machine = f"{os.cpu_count()} cores of {model.partition(': ')[2] or model}"
    for case in [case for case in CASES if case["case"] in wanted]:
        taken: list[list[list[float]]] = [[] for _ in pairs]
        for turn in range(case.get("turns", TURNS) + 1):
            for worker, times in zip(workers, taken, strict=True):
                assert worker.stdin is not None
                assert worker.stdout is not None
                worker.stdin.write(json.dumps({**case, "seed": turn}) + "\n")
                worker.stdin.flush()
                answer = json.loads(worker.stdout.readline())
                if turn and answer is not None:  # the first turn is a warm-up
                    times.append(answer)
        for (_, commit), times in zip(pairs, taken, strict=True):
            report({"commit": commit, **case}, times, machine)
    for worker in workers:
        worker.kill()
    command = [*python, "-m", "flatout", "generate", run, "--prompt", TEXT, "--tokens", "1"]
    named = [(commit, command, env) for (_, commit), env in zip(pairs, environments, strict=True)]
    named.append(("import torch", [*python, "-c", "import torch"], dict(os.environ)))
    found: dict[str, list[list[float]]] = {name: [] for name, *_ in named}
    for _ in range(COMMANDS if "command" in wanted else 0):
        for name, words, env in named:
            how: dict[str, Any] = {"env": env, "check": True, "stdout": subprocess.DEVNULL}
            found[name].append(
                timed(lambda words=words, how=how: subprocess.run(words, **how), resource.RUSAGE_CHILDREN)
            )
    for name, times in found.items():
        report({"commit": name, "case": "command"}, times, machine)


def report(row: dict[str, Any], times: list[list[float]], machine: str) -> None:
    if not times:
        return
    load = round(os.getloadavg()[0], 1)
    for name, part in zip(("seconds", "processor_seconds"), zip(*times, strict=True), strict=False):
        row |= {name: round(statistics.median(part), 4), f"{name}_least": round(min(part), 4)}
    count = {"generate": TOKENS, "chat": TOKENS, "rows": TOKENS * row.get("rows", 0)}.get(row["case"])
    row |= {} if count is None else {"tokens_per_second": round(count / row["seconds"])}
    print(json.dumps({**row, "turns": len(times), "load": load, "machine": machine}), flush=True)


def timed(work: Callable[[], Any], whose: int = resource.RUSAGE_SELF) -> list[float]:
    before, began = resource.getrusage(whose), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - began, resource.getrusage(whose)
    return [seconds, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime]


# --- inside a worker --------------------------------------------------------------------------------------------------


def work(run: str) -> None:
    import torch

    import flatout

    model: Any = flatout.load_model(run, device="cpu")
    usual = torch.get_num_threads()
    for line in sys.stdin:
        asked = json.loads(line)
        torch.set_num_threads(asked.get("threads") or usual)
        print(json.dumps(turn_of(model, **asked)), flush=True)


def turn_of(model: Any, *, case: str, seed: int, by: str = "", repeats: int = 1, **more: Any) -> list[float] | None:
    import flatout

    prompt = TEXT * repeats
    if by == "server" or case == "rows":
        return served(model, prompt, case=case, seed=seed, **more)
    text = (flatout.chat if case == "chat" else flatout.generate)(model, prompt, tokens=TOKENS, seed=seed)
    return timed(lambda: next(text) if case == "first" else "".join(text))


def served(model: Any, prompt: str, *, case: str, seed: int, rows: int = 1, **_: Any) -> list[float] | None:
    try:
        from flatout.generation.engine import Engine, TextRequest
    except ImportError:
        return None
    from flatout.generation.sampling import Sampling

    if not hasattr(model.model, "kept_engine"):
        how = {"rows": 8, "penalties": True, "vocab": model.tokenizer.vocab, "scope": model.scope}
        model.model.kept_engine = Engine(model.model, **how)
    engine = model.model.kept_engine
    requests: list[Any] = []

    def go() -> None:
        for row in range(rows):
            ids = model.tokenizer.encode(prompt).tolist()
            requests.append(engine.add(TextRequest(ids=ids, count=TOKENS, sampling=Sampling(seed=seed + row))))
        while not requests[0].made if case == "first" else engine.busy:
            engine.step()
        model.tokenizer.decode(requests[0].made)

    found = timed(go)
    for request in requests:
        engine.cancel(request)
    while engine.busy:
        engine.step()
    engine.kept = [[] for _ in engine.kept]  # no prompt is known
    return found


if __name__ == "__main__":
    work(sys.argv[2]) if sys.argv[1] == "--worker" else main()
