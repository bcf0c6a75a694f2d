"""What `flatout estimate --gpus` says of runs that others have published, beside what they measured.

    python lab/plan_truth.py            prints a table; needs no GPU

The rows (`plan_rows.jsonl`) are torchtitan's runs with FSDP2 alone, bf16, each with its source. What is assumed:

- Utilisation is stated once for each kind of machine, from one row of it (`anchor`), which therefore proves nothing
  about time. It covers eager and compiled code on H100, and A100. All other times are predictions.
- Bandwidths and latencies are the plan's own (`tuning/cluster.py`). torchtitan states 400 Gb/s for each H100; what the
  64 A100 were connected by is not published, and 200 Gb/s is assumed. It is hidden either way.
- What a block keeps follows their checkpointing, not ours: the residual stream in bf16, and of the products of a block
  every second one, besides attention's output (`apply_ac` at 9dec370). The rest of the memory is the plan's own.
- They publish what the allocator reserved. A plan counts what tensors take, and leaves 8% for the allocator
  (`engine/fit_check.ROOM`); so the reserved memory is predicted as that sum over 0.92.
"""

import dataclasses
import json
from pathlib import Path

from flatout.config.model_section import ModelConfig
from flatout.model.count import MemoryEstimate, estimate_memory, flops_per_token
from flatout.model.execution import Execution
from flatout.resolve.fit_check import ROOM
from flatout.tuning.cluster import CARDS, Cluster, step_time
from flatout.tuning.many_gpus import layouts, work_of

ROWS = Path(__file__).with_name("plan_rows.jsonl")
_LLAMA = {"qk_norm": False, "tied": False}
# layers, width, heads, kv_heads, mlp_width, vocab
SHAPES = {
    "llama2-7b": (32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": (40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": (80, 8192, 64, 8, 28672, 32000),
    "llama3-8b": (32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": (80, 8192, 64, 8, 28672, 128256),
}
# Their H100 have HBM2e of 2.4 TB/s and 95 GiB, and are held to 500 W.
MACHINES = {"h100-500w": dataclasses.replace(CARDS["h100"], memory=95.04, bandwidth=2.4e12), "a100": CARDS["a100"]}


@dataclasses.dataclass(frozen=True)
class Compared:
    """One row, with predicted over published time and memory; None where nothing was published."""

    row: dict
    seconds: float
    time: float
    memory: float | None  # of what was reserved
    active: float | None  # of what tensors took, where that was published too


def model_of(row: dict) -> ModelConfig:
    names = ("layers", "width", "heads", "kv_heads", "mlp_width", "vocab")
    shape = dict(zip(names, SHAPES[row["model"]], strict=True))
    return ModelConfig.model_validate({**shape, **_LLAMA, "context": row["context"]})


def theirs(model: ModelConfig, checkpointing: str) -> tuple[int | None, float]:
    """(bytes per token that their block keeps, share of its forward pass that backward computes again).

    Products of a block in order: queries, keys, values, output, gate, up, down. None keeps what our kernels keep.
    """
    keys = (model.kv_heads or model.heads) * model.size
    hidden = model.mlp_width or 0
    outputs = [model.queries, keys, keys, model.width, hidden, hidden, model.width]
    inputs = [model.width] * 3 + [model.queries] + [model.width] * 2 + [hidden]
    sizes = [output * input for output, input in zip(outputs, inputs, strict=True)]
    stream, attention = 2 * model.width, 2 * model.queries + 4 * model.heads
    if checkpointing == "selective op":
        # Attention, about a tenth of the FLOPs of a block at 8,192 tokens, is kept and not computed again.
        return stream + 2 * sum(outputs[::2]) + attention, sum(sizes[1::2]) / sum(sizes) * _products_share(model)
    if checkpointing == "selective layer":  # every second block has full checkpointing
        return None, 0.5
    return (stream, 1.0) if checkpointing == "full" else (None, 0.0)


def _products_share(model: ModelConfig) -> float:
    """Of a block's FLOPs, those of products with weights."""
    vocab = model.vocab or 0
    head = 6 * vocab * model.width
    attention = 12.0 * model.queries * model.layers * (model.context + 1) / 2
    return 1 - attention / (flops_per_token(model, vocab) - head)


def memory_of(row: dict, model: ModelConfig) -> MemoryEstimate:
    vocab, tokens = model.vocab or 0, row["local_batch"] * row["context"]
    kept, _ = theirs(model, row["checkpointing"])
    checkpointing = "none" if kept is None else "full"
    ours = Execution(kernels="triton", residual="bf16", checkpointing=checkpointing, sharded=True)
    # The loss is torch's, over all logits at once, and not compiled.
    plain = Execution(kernels="torch", checkpointing="full")
    common = {"micro_batch": row["local_batch"], "half": True, "compiled": False, "accumulated": False}
    estimate = estimate_memory(model, vocab, execution=ours, shards=row["gpus"], **common)
    loss = estimate_memory(model, vocab, execution=plain, **common).working
    if kept is not None:
        inputs = 4 * model.width  # what `ours` keeps of a block
        estimate = dataclasses.replace(
            estimate, activations=estimate.activations + tokens * model.layers * (kept - inputs)
        )
    return dataclasses.replace(estimate, working=loss)


def predict(row: dict, utilisation: float) -> tuple[float, float]:
    """(seconds of a step, bytes that tensors take on a rank)."""
    model, card = model_of(row), MACHINES[row["machine"]]
    vocab = model.vocab or 0
    cluster = Cluster(card=card, per_host=8, inside=card.inside, across=card.across)
    layout = next(one for one in layouts(cluster, row["gpus"]) if one.form == "fsdp")
    rate = flops_per_token(model, vocab) / (utilisation * (card.device.peak_flops or 0))
    work = work_of(model, vocab, seconds_per_token=rate, state=8, again=theirs(model, row["checkpointing"])[1])
    step = step_time(work, cluster, layout, micro_batches=1, tokens=row["local_batch"] * row["context"])
    return step.seconds, memory_of(row, model).total


def utilisation_of(anchor: dict) -> float:
    """The utilisation with which the plan has this row's time, by bisection."""
    low, high = 0.05, 1.0
    measured = anchor["local_batch"] * anchor["context"] / anchor["tokens_per_second"]
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (middle, high) if predict(anchor, middle)[0] > measured else (low, middle)
    return round((low + high) / 2, 3)


def compare() -> list[Compared]:
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    anchors = {_kind(row): utilisation_of(row) for row in rows if row["anchor"]}
    compared = []
    for row in rows:
        seconds, size = predict(row, anchors[_kind(row)])
        measured = row["local_batch"] * row["context"] / row["tokens_per_second"]
        reserved, active = (row.get(name) for name in ("reserved_gib", "active_gib"))
        compared.append(
            Compared(
                row,
                seconds,
                seconds / measured,
                None if reserved is None else size / ROOM / 2**30 / reserved,
                None if active is None else size / 2**30 / active,
            )
        )
    return compared


def _kind(row: dict) -> tuple[str, bool]:
    """A kind of machine and code that has one utilisation; A100 has one for both kinds of code."""
    return row["machine"], row["compiled"] and row["machine"] != "a100"


def main() -> None:
    print(f"{'case':30} {'tokens/s/GPU':>12} {'time':>6} {'memory':>7} {'active':>7}   (predicted / published)")
    for one in compare():
        shares = [f"{share:7.2f}" if share is not None else "      -" for share in (one.memory, one.active)]
        anchor = "anchor" if one.row["anchor"] else f"{one.time:6.2f}"
        print(f"{one.row['case']:30} {one.row['tokens_per_second']:12,.0f} {anchor:>6} {' '.join(shares)}")


if __name__ == "__main__":
    main()
