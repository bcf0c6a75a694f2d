"""What Muon costs and keeps: milliseconds of an update, its share of a step, resume, and one micro-batch or eight.

    python benchmarks/muon_cost.py COMMIT [--layers 12] [--width 768] [--tokens 131072] [--micro 32]

Each row is appended to benchmarks/muon_cost.jsonl, and to $OUT/muon_cost.jsonl where OUT is set:

- `update`: one update of the matrices of `gpt-124m` by Muon, gradients and weights in place, in several forms: with our
  kernels, the same recorded as a CUDA graph, with plain torch operations, and with NorMuon and cautious decay. Median
  over 50 on the device's clock; `tflops` is the products' work over that time.
- `step`: whole steps of `gpt-124m` on random tokens with AdamW and with Muon, and what share of Muon's step its update
  takes.
- `resume`: whether a run in deterministic mode that was stopped and resumed has the bits of one that was not.
- `micro_batches`: how far Muon's first and twentieth update from the same weights and momentum differ, by their norms:
  of all matrices together (`whole`), the mean and the largest of the matrices. One micro-batch is compared with eight;
  with one whose products come from other kernels, which add up in another order; and with one in fp32. Gradients are
  summed in fp32, so cutting a batch brings no more than the other kernels that smaller products get: activations round
  to other bf16 numbers, the matrix that is made orthogonal does too, and an orthogonal update makes as much of the
  weakest directions as of the strongest.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flatout
from flatout.checkpoints.checkpoint import list_checkpoints, read_checkpoint
from flatout.config.load import LoadedConfig, load_config
from flatout.engine.graphs import Recorder, UpdateGraph
from flatout.engine.notices import Notices
from flatout.model.gpt import build_model
from flatout.optim.muon import Muon, Unit
from flatout.optim.optimizers import Optimizers, trainables
from flatout.optim.rules import rules_of
from flatout.tuning.measure import Steps, borrowed_run
from flatout.tuning.practice_data import practice_data

ROWS = Path(__file__).with_name("muon_cost.jsonl")
REPEATS, WARM_UP, STEPS, ITERATIONS, COMPARED = 50, 8, 30, 5, 20
QUIET = ["eval.every=0", "eval.sample_tokens=0", "eval.tokens=8192", "checkpoint.every=0"]
FORMS: dict[str, list[str]] = {
    "kernels": [],
    "recorded": [],
    "plain": [],
    "normuon and cautious": ["optim.optimizer=normuon"],
}


def written(row: dict[str, Any]) -> None:
    """Append the row at once: a call that is cut off keeps what it has finished."""
    places = [ROWS, *([Path(os.environ["OUT"]) / ROWS.name] if os.environ.get("OUT") else [])]
    for place in places:
        with place.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def milliseconds(function: Callable[[], None], device: torch.device) -> list[float]:
    """Of each of REPEATS calls; on CUDA by events, so that the host's time counts only where the device waits."""
    for _ in range(WARM_UP):
        function()
    if device.type != "cuda":
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            function()
            times.append(1000 * (time.perf_counter() - began))
        return times
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    torch.cuda._sleep(100_000_000)  # so that the host is ahead, as it is in training
    for before, after in marks:
        before.record()
        function()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in marks]


def work_of(units: list[Unit]) -> float:
    """FLOPs of one update: two for every multiplication of the products."""
    return 2.0 * ITERATIONS * sum(unit.work for unit in units)


def update(loaded: LoadedConfig, form: str, device: torch.device) -> dict[str, Any]:
    model = build_model(loaded.config.model, 50304).to(device)
    optimizers = Optimizers(rules_of(loaded.config.optim, 100, fused=form != "plain"), trainables(model))
    muon = next(one for one in optimizers.optimizers if isinstance(one, Muon))
    for parameter in muon.parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizers.create_state()
    optimizers.look_up(torch.zeros((), dtype=torch.int64, device=device))
    run: Callable[[Tensor, Tensor], None] = muon.update
    if form == "recorded":
        run = UpdateGraph(muon, Notices(), Recorder(device))
    numbers = (torch.ones((), device=device), torch.ones((), dtype=torch.bool, device=device))
    times = milliseconds(lambda: run(*numbers), device)
    work = work_of([unit for rounds in muon.rounds for units in rounds for unit in units])
    took = statistics.median(times)
    row = {"form": form, "median_ms": round(took, 3), "lowest_ms": round(min(times), 3)}
    row |= {"matrices": len(muon.parameters), "parameters": sum(p.numel() for p in muon.parameters)}
    return row | {"tflop": round(work / 1e12, 4), "tflops": round(work / took / 1e9, 1)}


def step_ms(loaded: LoadedConfig) -> float:
    """Median milliseconds of a step, on the device's clock."""
    with borrowed_run(loaded) as run, Steps(run) as stepping:
        stepping.take(WARM_UP)
        return 1000 * statistics.median(report.seconds for report in stepping.take(STEPS))


def resumed_alike(words: list[str], scratch: Path) -> dict[str, Any]:
    """Whether twelve steps, and twelve of which a stop and a resume are in the middle, end with the same bits."""
    ends = []
    for name, stop_at in (("whole", None), ("stopped", 5)):
        folder = scratch / name
        taken = 0

        def stop(at: int | None = stop_at) -> bool:
            nonlocal taken
            taken += 1
            return taken == at

        config = load_config("gpt-124m", [*words, f"output.folder={folder}"])
        for _ in flatout.train(config, stop=stop):
            pass
        if stop_at is not None:
            for _ in flatout.train(config, resume=str(folder)):
                pass
        step, path = list_checkpoints(folder / "checkpoints")[-1]
        ends.append((step, read_checkpoint(path)))
    (steps, one), (others, other) = ends
    parts = [(getattr(one, part), getattr(other, part)) for part in ("model", "optimizer")]
    same = all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in parts)
    return {"steps": [steps, others], "identical": same and steps == others}


OTHERS: dict[str, dict[str, Any]] = {
    "eight micro-batches": {"accumulation": 8},
    "other kernels of products": {"products": "torch"},
    "fp32": {"precision": "fp32"},
}
State = tuple[dict[str, Tensor], dict[str, Tensor], Tensor]  # weights, state of optimizers, count of updates


def moved_by(stepping: Steps) -> list[Tensor]:
    """What the next update adds to Muon's matrices."""
    muon = next(one for one in stepping.run.step.optimizer.optimizers if isinstance(one, Muon))
    before = [parameter.detach().clone() for parameter in muon.parameters]
    stepping.take(1)
    return [p.detach() - b for p, b in zip(muon.parameters, before, strict=True)]


def first_and_last(
    loaded: LoadedConfig, given: State | None, **speed: Any
) -> tuple[tuple[list[Tensor], list[Tensor]], State]:
    """The first update and number COMPARED, and the state before the latter: `given`, or this run's own."""
    switches = loaded.config.speed.model_copy(update={"micro_batch": None, "accumulation": 1, **speed})
    config = LoadedConfig(loaded.config.model_copy(update={"speed": switches}), loaded.sources)
    with borrowed_run(config) as run, Steps(run) as stepping:
        step, weights = run.step, dict(run.model.named_parameters())
        first = moved_by(stepping)
        stepping.take(COMPARED - 2)
        if given is None:
            kept = [{name: x.detach().clone() for name, x in of.items()} for of in (weights, step.optimizer.tensors())]
            given = (kept[0], kept[1], step.updates.clone())
        with torch.no_grad():
            for name, value in given[0].items():
                weights[name].copy_(value)
        step.optimizer.assign(given[1], "the first run")
        step.updates.copy_(given[2])
        return (first, moved_by(stepping)), given


def apart(one: list[Tensor], other: list[Tensor]) -> dict[str, float]:
    pairs = [(float((a - b).norm()), float(a.norm())) for a, b in zip(one, other, strict=True)]
    ratios = [off / norm for off, norm in pairs]
    whole = (sum(off**2 for off, _ in pairs) / sum(norm**2 for _, norm in pairs)) ** 0.5
    return {"whole": round(whole, 5), "mean": round(statistics.fmean(ratios), 5), "largest": round(max(ratios), 5)}


def differences(loaded: LoadedConfig) -> Iterator[dict[str, Any]]:
    base, state = first_and_last(loaded, None)
    for name, speed in OTHERS.items():
        other, _ = first_and_last(loaded, state, **speed)
        found = [apart(one, two) for one, two in zip(base, other, strict=True)]
        yield {"against": name, "first": found[0], f"update {COMPARED}": found[1], "matrices": len(base[0])}


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--micro", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    facts = {"commit": asked.commit, "device": name, "torch": torch.__version__}
    facts |= {"layers": asked.layers, "width": asked.width}
    shape = [f"model.layers={asked.layers}", f"model.width={asked.width}", f"model.heads={max(1, asked.width // 64)}"]
    shape += [f"model.context={asked.context}", f"train.batch_tokens={asked.tokens}", "train.tokens=null"]
    shape += [*QUIET, "model.tied=false", "train.steps=200", "optim.warmup=4"]
    with tempfile.TemporaryDirectory() as scratch:
        data, _ = practice_data(load_config("gpt-124m", shape), Path(scratch))

        def loaded(*words: str) -> LoadedConfig:
            found = load_config("gpt-124m", [*shape, *words])
            return LoadedConfig(found.config.model_copy(update={"data": data}), found.sources)

        muon, micro = "optim.optimizer=muon", f"speed.micro_batch={asked.micro}"
        rows: dict[str, dict[str, Any]] = {}
        for form, words in FORMS.items():
            if form != "recorded" or device.type == "cuda":
                rows[form] = update(loaded(muon, *words), form, device)
                written({"type": "update", **rows[form], **facts})
        took = {kind: step_ms(loaded(f"optim.optimizer={kind}", micro)) for kind in ("adamw", "muon")}
        share = rows["kernels"]["median_ms"] / took["muon"]
        row: dict[str, Any] = {"tokens": asked.tokens, "micro_batch": asked.micro}
        row |= {f"{kind}_ms": round(ms, 2) for kind, ms in took.items()}
        row |= {"update_share": round(share, 4), "muon_over_adamw": round(took["muon"] / took["adamw"], 4)}
        written({"type": "step", **row, **facts})
        small = ["model.layers=4", "model.width=256", "model.heads=4", "model.context=256", "train.batch_tokens=4096"]
        small += [f"data.folder={data.folder}", "data.source=null", "train.tokens=null", "train.steps=12", *QUIET]
        small += ["train.deterministic=true", "optim.warmup=2", "optim.optimizer=normuon"]
        written({"type": "resume", **resumed_alike(small, Path(scratch)), **facts, "layers": 4, "width": 256})
        first = loaded(muon, "optim.warmup=0", f"train.batch_tokens={8 * asked.context}")
        for row in differences(first):
            written({"type": "micro_batches", **row, **facts})


if __name__ == "__main__":
    main()
