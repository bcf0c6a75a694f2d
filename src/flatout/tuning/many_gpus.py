"""A run on many GPUs, before anybody rents them: memory, communication, time, checkpoints and interruptions.

Idea: a step on one GPU is known, by measuring or by a stated share of the card's peak rate. `spread.py` says what
becomes of it over GPUs and hosts, `goodput.py` what interruptions leave of it. Nothing is measured and nothing is
written here, and no GPU is needed.

Contract: the global batch is the config's on any number of GPUs. A form takes the largest micro-batch that fits, with
the config's own checkpointing if that fits and more of it if not. Efficiency is tokens per second and GPU over those of
one GPU without recomputation, whether or not the model fits there.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from flatout.config.load import LoadedConfig
from flatout.config.schema import RunConfig
from flatout.config.source import DEFAULT
from flatout.device import limit_memory
from flatout.engine.case import Probes
from flatout.engine.features import Speed, resolve_speed
from flatout.engine.fit_check import ROOM, memory_of
from flatout.engine.switches import COMMON_VOCAB
from flatout.engine.trained import checkpoint_size
from flatout.errors import UsageError
from flatout.model.count import MemoryEstimate, flops_per_token, parameter_count
from flatout.optim.rules import state_bytes
from flatout.tuning.cluster import GB, Cluster
from flatout.tuning.goodput import FAILURE_HOURS, FAILURE_SOURCE, Goodput, plan_saves
from flatout.tuning.spread import AGAIN, FORMS, Layout, layouts, rank_memory, step_time, update_seconds, work_of

MOST_AT_ONCE = 4096  # sequences of a micro-batch that is looked at
AUTO = ("dp", "hybrid", "fsdp")  # what `parallel: auto` takes, the first that fits
OVERLAP = (
    "hidden behind compute: gradients of all blocks but the last (data parallel), the next block's weights and the "
    "gradients of the one before (FSDP2), sums over hosts beside what goes on inside them (hybrid)",
    "not hidden: the first block's weights, the last block's gradients, embedding and head (FSDP2: in every "
    "micro-batch), and what a block's compute is too short for",
    "not counted: what hidden communication takes from compute, waiting for a slower rank, what FSDP2 does on the host "
    "(small models feel it), evaluations, samples and start-up",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """How fast one GPU trains: tokens per second of this model, or a share of the card's peak rate."""

    source: str
    tokens_per_second: float | None = None
    mfu: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One form on one number of GPUs. Bytes and seconds are of one rank and one step; None where it does not fit."""

    gpus: int
    hosts: int
    form: str
    auto: bool = False  # what `parallel: auto` takes here
    fits: bool
    why: str = ""  # why it does not fit
    micro_batch: int
    accumulation: int
    checkpointing: str
    memory_bytes: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    sent_bytes: float | None = None
    crossed_bytes: float | None = None  # its share of what passes between hosts
    step_seconds: float | None = None
    compute_seconds: float | None = None
    update_seconds: float | None = None
    communication_seconds: float | None = None
    exposed_seconds: float | None = None
    tokens_per_second: float | None = None
    efficiency: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanResult:
    """Rows by number of GPUs and form, and for each number what saving and interruptions leave of them."""

    config: str
    parameters: int
    context: int
    batch_tokens: int
    card: str
    card_bytes: int
    usable_bytes: int
    per_host: int
    inside: float
    inside_source: str
    across: float
    across_source: str
    rate_source: str
    mfu: float | None
    one_gpu_tokens_per_second: float
    rows: tuple[PlanRow, ...]
    saves: dict[int, Goodput]
    failure_hours: float
    failure_source: str
    disk: float
    forms: dict[str, str]
    recommendation: str
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"type": "plan", **dataclasses.asdict(self)}


def plan(
    loaded: LoadedConfig,
    cluster: Cluster,
    rate: Rate,
    counts: Sequence[int],
    *,
    disk: float = 2 * GB,
    restart: float = 300.0,
    failure_hours: float = FAILURE_HOURS,
) -> PlanResult:
    """What the run of a config is like on each of these numbers of GPUs.

    `disk` is what a host writes, in bytes per second, `restart` the seconds from an interruption to the first step
    without reading the checkpoint, `failure_hours` the GPU-hours between interruptions.
    """
    for gpus in counts:
        if gpus > cluster.per_host and gpus % cluster.per_host:
            raise UsageError(
                f"{gpus} GPUs do not fill hosts of {cluster.per_host}",
                f"give a multiple of {cluster.per_host}, or the GPUs of a host with --per-host",
            )
    look = _Look(loaded, cluster, rate)
    rows = [row for gpus in counts for row in _with_auto([look.row(gpus, layout) for layout in layouts(cluster, gpus)])]
    checkpoint = checkpoint_size(look.work.parameters, look.config.optim, look.speed)
    saves = {
        gpus: plan_saves(
            checkpoint,
            gpus=gpus,
            hosts=cluster.hosts(gpus),
            to_host=cluster.card.to_host,
            disk=disk,
            restart=restart,
            failure_hours=failure_hours,
        )
        for gpus in counts
    }
    return PlanResult(
        config=look.config.output.name,
        parameters=look.work.parameters,
        context=look.config.model.context,
        batch_tokens=look.config.train.batch_tokens,
        card=cluster.card.name,
        card_bytes=look.have,
        usable_bytes=int(ROOM * look.have),
        per_host=cluster.per_host,
        inside=cluster.inside,
        inside_source=_source(cluster.inside, cluster.card.inside, cluster.card.inside_source),
        across=cluster.across,
        across_source=_source(cluster.across, cluster.card.across, cluster.card.across_source),
        rate_source=rate.source,
        mfu=look.mfu,
        one_gpu_tokens_per_second=look.one_gpu,
        rows=tuple(rows),
        saves=saves,
        failure_hours=failure_hours,
        failure_source=_source(failure_hours, FAILURE_HOURS, FAILURE_SOURCE),
        disk=disk,
        forms=FORMS,
        recommendation=_recommendation(rows, look.have),
        notes=tuple(look.notes()),
    )


def _source(value: float, usual: float, source: str) -> str:
    return source if value == usual else "as told"


class _Look:
    """A config on one card, and what is the same for all forms and numbers of GPUs."""

    def __init__(self, loaded: LoadedConfig, cluster: Cluster, rate: Rate) -> None:
        self.config, self.cluster = loaded.config, cluster
        model, device = self.config.model, limit_memory(cluster.card.device, self.config.speed.memory_limit)
        self.vocab = model.vocab or COMMON_VOCAB
        speed = resolve_speed(self.config, device, None, lambda _: DEFAULT, vocab=self.vocab, probes=_all_works())
        self.speed = dataclasses.replace(speed, cuda_graphs=False)  # what recording costs is not planned
        self.have = device.memory_bytes or 0
        flops, peak = flops_per_token(model, self.vocab), device.peak_flops or 0.0
        seconds = 1 / rate.tokens_per_second if rate.tokens_per_second else flops / ((rate.mfu or 0) * peak)
        self.work = work_of(
            model,
            self.vocab,
            seconds_per_token=seconds,
            state=state_bytes(self.config.optim, state=speed.optimizer_state, offload=speed.optimizer_offload).device,
            cell=2 if speed.precision in ("bf16", "fp16") else 4,
        )
        update = update_seconds(self.work, cluster, 1)
        batch = self.config.train.batch_tokens
        if rate.tokens_per_second:  # its step had an update too
            self.work = dataclasses.replace(self.work, seconds_per_token=max(seconds - update / batch, 0.1 * seconds))
        self.one_gpu = batch / (batch * self.work.seconds_per_token + update)
        self.mfu = flops * self.one_gpu / peak if peak else None
        self.other_products = rate.mfu is not None and (self.work.cell == 4 or bool(speed.fp8))

    def row(self, gpus: int, layout: Layout) -> PlanRow:
        sequences = self.config.train.batch_tokens // self.config.model.context
        local = -(-sequences // gpus)  # of the rank that has the most
        found, fits = self._fitting(layout, local)
        speed, memory = found
        same = {
            "gpus": gpus,
            "hosts": self.cluster.hosts(gpus),
            "form": layout.form,
            "micro_batch": speed.micro_batch,
            "accumulation": speed.accumulation,
            "checkpointing": speed.checkpointing,
            "memory_bytes": memory.total,
            "weights_bytes": memory.weights,
            "gradients_bytes": memory.gradients,
            "optimizer_bytes": memory.optimizer,
            "activations_bytes": memory.activations + memory.working - memory.later,
        }
        if sequences < gpus:
            return PlanRow(**same, fits=False, why=f"the batch has {sequences} sequences, fewer than GPUs")
        if not fits:
            return PlanRow(
                **same, fits=False, why=f"it needs {memory.total / 2**30:,.0f} GiB with one sequence at once"
            )
        work = dataclasses.replace(self.work, again=AGAIN[speed.checkpointing])
        step = step_time(
            work,
            self.cluster,
            layout,
            micro_batches=speed.accumulation,
            tokens=speed.micro_batch * self.config.model.context,
        )
        each = self.config.train.batch_tokens / gpus / step.seconds
        return PlanRow(
            **same,
            fits=True,
            sent_bytes=step.sent,
            crossed_bytes=step.crossed,
            step_seconds=step.seconds,
            compute_seconds=step.compute,
            update_seconds=step.update,
            communication_seconds=step.communication,
            exposed_seconds=step.exposed,
            tokens_per_second=each,
            efficiency=each / self.one_gpu,
        )

    def _fitting(self, layout: Layout, local: int) -> tuple[tuple[Speed, MemoryEstimate], bool]:
        """(the first way that fits, or the smallest there is, whether it fits)."""
        tried = list(self._ways(layout, local))
        fitting = [one for one in tried if one[1].total <= ROOM * self.have]
        return (fitting[0], True) if fitting else (min(tried, key=lambda one: one[1].total), False)

    def _ways(self, layout: Layout, local: int) -> Iterator[tuple[Speed, MemoryEstimate]]:
        kinds = list(AGAIN)
        most = min(self.config.speed.micro_batch or local, local, MOST_AT_ONCE)
        for checkpointing in kinds[kinds.index(self.speed.checkpointing) :]:
            for size in (size for size in range(most, 0, -1) if local % size == 0):
                speed = dataclasses.replace(
                    self.speed, micro_batch=size, accumulation=local // size, checkpointing=checkpointing
                )
                yield speed, rank_memory(memory_of(self.config, self.vocab, speed), self.work, layout)

    def notes(self) -> Iterator[str]:
        yield from OVERLAP
        if self.config.model.vocab is None and self.config.data.tokenizer != "gpt2":
            yield f"the vocabulary is not known before the data is prepared: counted as {self.vocab:,}"
        if self.other_products:
            yield "the share of the peak rate is for products in 16 bits, and this config has others: give --rate"
        if self.config.speed.optimizer_offload:
            yield "the update on the host (speed.optimizer_offload) is not counted into the step"


def planned_parameters(config: RunConfig) -> int:
    """How large the model is, for who looks for a measured rate of one of its size."""
    return parameter_count(config.model, config.model.vocab or COMMON_VOCAB)


def _all_works() -> Probes:
    """A card that is elsewhere: all that torch and Triton have works there; packages beside them are not assumed."""

    def attention(backend: str, *_: object, **__: object) -> str | None:
        return "it is not assumed to be installed" if backend in ("fa3", "fa4", "cudnn+fa4") else None

    return Probes(
        attention=attention,
        picked=lambda *_, **__: None,
        documents=attention,
        compiler=lambda _: None,
        products=lambda: None,
        triton=lambda: True,
    )


# --- which form -------------------------------------------------------------------------------------------------------


def _with_auto(rows: list[PlanRow]) -> list[PlanRow]:
    """The rows of one number of GPUs, with the one marked that `parallel: auto` takes."""
    fitting = {row.form: row for row in rows if row.fits}
    least = min((list(AGAIN).index(row.checkpointing) for row in fitting.values()), default=0)
    # No form takes more checkpointing than the config has as long as another one fits without.
    ready = [form for form in AUTO if form in fitting and list(AGAIN).index(fitting[form].checkpointing) == least]
    return [dataclasses.replace(row, auto=bool(ready) and row.form == ready[0]) for row in rows]


def _recommendation(rows: Sequence[PlanRow], have: int) -> str:
    """Which form `parallel: auto` takes for which numbers of GPUs, and why."""
    groups: list[tuple[str, list[int]]] = []
    for gpus in dict.fromkeys(row.gpus for row in rows):
        form = next((row.form for row in rows if row.gpus == gpus and row.auto), "")
        if not groups or groups[-1][0] != form:
            groups.append((form, []))
        groups[-1][1].append(gpus)
    return "parallel: auto takes " + "; ".join(_group_words(form, counts, rows, have) for form, counts in groups)


def _group_words(form: str, counts: Sequence[int], rows: Sequence[PlanRow], have: int) -> str:
    """What is taken at some numbers of GPUs; reason and rate are those of the largest."""
    largest = [row for row in rows if row.gpus == counts[-1]]
    at = f"{counts[0]} to {counts[-1]} GPUs" if len(counts) > 1 else f"{counts[0]} GPU{'s' if counts[0] > 1 else ''}"
    if not form:
        least = min(largest, key=lambda row: row.memory_bytes)
        return f"no form at {at} ({FORMS[least.form]} comes closest, but {least.why})"
    own = next(row for row in largest if row.auto)
    best = max((row for row in largest if row.fits), key=lambda row: row.efficiency or 0.0)
    share = f"{100 * (own.efficiency or 0):.0f}% of one GPU's rate"
    words = [_reason(own, largest, have), share + (f" at {counts[-1]}" if len(counts) > 1 else "")]
    if (best.efficiency or 0) > 1.02 * (own.efficiency or 0):
        words.append(f"{FORMS[best.form]} would have {100 * (best.efficiency or 0):.0f}%")
    if own.checkpointing != "none":
        words.append(f"with speed.checkpointing={own.checkpointing}")
    return f"{FORMS[form]} at {at} ({', '.join(words)})"


def _reason(own: PlanRow, rows: Sequence[PlanRow], have: int) -> str:
    card = f"{have / 2**30:.0f} GiB"
    if own.form == "dp":
        return f"a whole copy fits every GPU: {own.memory_bytes / 2**30:.1f} of {card}"
    whole = next(row for row in rows if row.form == "dp")
    alone = f"a whole copy does not fit one GPU of {card}"
    if whole.fits:
        alone = f"a whole copy fits one GPU of {card} only with speed.checkpointing={whole.checkpointing}"
    if own.form == "hybrid":
        return f"{alone}, but the GPUs of one host"
    return f"{alone}, nor the GPUs of one host" if own.hosts > 1 else f"{alone}, but all of them together"
