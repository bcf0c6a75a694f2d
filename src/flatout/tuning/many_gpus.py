"""A run on many GPUs: memory, communication and time, all computed; no GPU is needed.

Idea: a step on one GPU is known, measured or from a stated share of the card's peak rate. `cluster.py` spreads it
over GPUs and hosts. Nothing is measured or written.

Contract: the global batch is the config's on any number of GPUs. A form takes the largest micro-batch that fits, with
the config's own checkpointing if that fits and more of it if not. A rate (`seconds_per_token`) is that of one GPU
without recomputation; full checkpointing adds one forward pass. Efficiency is tokens per second and GPU over those of
one GPU without recomputation, whether or not the model fits there.
"""

import dataclasses
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flatout.config.load import LoadedConfig
from flatout.config.schema import ModelConfig, at_last_stage, micro_batch_of
from flatout.config.sizes import Known
from flatout.config.source import DEFAULT, Source
from flatout.data.prepare import data_folder, has_dataset
from flatout.data.shards import read_manifest
from flatout.device import limit_memory
from flatout.errors import HardwareError, UsageError, many
from flatout.model.count import MemoryEstimate, block_count, flops_per_token, parameter_count
from flatout.resolve.case import Probes, ShardingChoice
from flatout.resolve.fit_check import ROOM, fits_well
from flatout.resolve.form import by_preference, not_in_slices
from flatout.resolve.memory import memory_of, state_of
from flatout.resolve.sizing import sized, uncounted
from flatout.resolve.switches import Speed, resolve_speed
from flatout.rows import (
    FAINT,
    OWN,
    Bar,
    BarPanel,
    Heading,
    Picture,
    ResultRow,
    Sentence,
    Sheet,
    Table,
    human_bytes,
    human_count,
    human_seconds,
    or_dash,
)
from flatout.tuning.cluster import (
    AGAIN,
    FORMS,
    Card,
    Cluster,
    Layout,
    Work,
    step_time,
    update_seconds,
)


def work_of(model: ModelConfig, vocab: int, **known: float) -> Work:
    """The step of a model; `known` are the other fields of `Work`."""
    blocks = [block_count(model, kind) for kind in model.kinds]
    parameters = parameter_count(model, vocab)
    root = parameters - sum(blocks)
    return Work(
        parameters=parameters,
        layers=model.layers,
        block=max(blocks),
        root=root,
        last=root if model.tied else root - vocab * model.width,
        twice=0 if model.tied else root,
        head_share=6.0 * vocab * model.width / flops_per_token(model, vocab),
        **known,
    )


def layouts(cluster: Cluster, gpus: int) -> list[Layout]:
    """The forms that `gpus` GPUs can take, in the order in which `parallel.form=auto` tries them."""
    hosts = cluster.hosts(gpus)
    local = gpus // hosts
    where = {"data": (1, 1), "hybrid": (local, 1), "fsdp": (local, hosts)}
    found = []
    for sharding in by_preference(gpus, local if hosts > 1 else None):
        ranks, over = where[sharding.form]
        found.append(Layout(form=sharding.form, local=ranks, hosts=over, replicas=gpus // (ranks * over)))
    return found


MOST_AT_ONCE = 4096  # sequences of a micro-batch that is looked at
NOT_COUNTED = (
    "not counted: what hidden communication takes from compute, waiting for a slower rank, what FSDP2 does on the host "
    "(small models feel it), evaluations, samples and start-up"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """How fast one GPU trains: tokens per second of this model, or a share of the card's peak rate."""

    source: str
    tokens_per_second: float | None = None
    mfu: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One form on one number of GPUs. Bytes and seconds are of one rank and one step; None where it cannot run."""

    gpus: int
    hosts: int
    form: str
    auto: bool = False  # what `parallel.form=auto` takes here
    fits: bool
    refused: bool = False  # by the config or the batch, whatever the memory
    why: str = ""  # why it does not fit, or is refused
    micro_batch: int
    accumulation: int
    checkpointing: str
    memory_bytes: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    sent_bytes: float | None = None
    step_seconds: float | None = None
    compute_seconds: float | None = None
    update_seconds: float | None = None
    communication_seconds: float | None = None
    exposed_seconds: float | None = None
    tokens_per_second: float | None = None
    efficiency: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanResult:
    """Rows by number of GPUs and form. `inside` and `across` are bytes per second, inside a host and between hosts."""

    config: str
    size: str | None = None  # as the user named it
    parameters: int
    context: int
    batch_tokens: int
    card: str
    card_bytes: int
    usable_bytes: int
    per_host: int
    inside: float
    across: float
    rate_source: str
    mfu: float | None
    one_gpu_tokens_per_second: float
    rows: tuple[PlanRow, ...]
    recommendation: str
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"type": "plan", **dataclasses.asdict(self)}

    def sheet(self) -> Sheet:
        return sheet_of(self)

    def picture(self) -> Picture:
        return picture_of(self)


def plan(loaded: LoadedConfig, cluster: Cluster, rate: Rate, counts: Sequence[int]) -> PlanResult:
    """What the run of a config is like on each of these numbers of GPUs."""
    _check_counts(counts, cluster)
    if not loaded.config.fine_tunes:
        loaded = dataclasses.replace(loaded, config=at_last_stage(loaded.config))
    look = _Look(loaded, cluster, rate)
    rows = [row for gpus in counts for row in _with_auto([look.row(gpus, layout) for layout in layouts(cluster, gpus)])]
    return PlanResult(
        config=look.config.output.name,
        parameters=look.work.parameters,
        context=look.config.model.context,
        batch_tokens=look.config.train.batch_tokens,
        card=cluster.card.name,
        card_bytes=look.device.memory_bytes or 0,
        usable_bytes=int(ROOM * (look.device.memory_bytes or 0)),
        per_host=cluster.per_host,
        inside=cluster.inside,
        across=cluster.across,
        rate_source=rate.source,
        mfu=look.mfu,
        one_gpu_tokens_per_second=look.one_gpu,
        rows=tuple(rows),
        recommendation=_recommendation(rows, loaded),
        notes=tuple(look.notes(rows)),
    )


def _check_counts(counts: Sequence[int], cluster: Cluster) -> None:
    for gpus in counts:
        if gpus > cluster.per_host and gpus % cluster.per_host:
            raise UsageError(
                f"{gpus} GPUs do not fill hosts of {cluster.per_host}",
                f"give a multiple of {cluster.per_host}, or the GPUs of a host with --per-host",
            )


class _Look:
    """A config on one card, and what is the same for all forms and numbers of GPUs."""

    def __init__(self, loaded: LoadedConfig, cluster: Cluster, rate: Rate) -> None:
        self.loaded, self.config, self.cluster = loaded, loaded.config, cluster
        model = self.config.model
        self.device = limit_memory(cluster.card.device, self.config.speed.memory_limit)
        self.known = _known(loaded)
        self.vocab = self.known.vocab
        self.alone = self._speed(1, ShardingChoice())
        flops, peak = flops_per_token(model, self.vocab), self.device.peak_flops or 0.0
        seconds = 1 / rate.tokens_per_second if rate.tokens_per_second else flops / ((rate.mfu or 0) * peak)
        self.work = work_of(
            model,
            self.vocab,
            seconds_per_token=seconds,
            state=self._state(self.alone),
            cell=2 if self.alone.precision in ("bf16", "fp16") and self.alone.kernels == "triton" else 4,
            reduced=2 if self.config.parallel.reduce == "bf16" else 4,
        )
        update = update_seconds(self.work, cluster, 1)
        batch = self.config.train.batch_tokens
        if rate.tokens_per_second:  # its step had an update too
            self.work = dataclasses.replace(self.work, seconds_per_token=max(seconds - update / batch, 0.1 * seconds))
        self.one_gpu = batch / (batch * self.work.seconds_per_token + update)
        self.mfu = flops * self.one_gpu / peak if peak else None
        narrow = self.alone.precision in ("bf16", "fp16")
        self.other_products = rate.mfu is not None and (not narrow or bool(self.alone.fp8))

    def _speed(self, gpus: int, sharding: ShardingChoice, source: Callable[[str], Source] = lambda _: DEFAULT) -> Speed:
        shape = {"vocab": self.vocab, "ranks": gpus, "sharding": sharding, "probes": _all_works()}
        speed = resolve_speed(self.config, self.device, None, source, **shape)
        return dataclasses.replace(speed, cuda_graphs=False)  # what recording costs is not planned

    def _state(self, speed: Speed) -> float:
        return state_of(
            self.config.model, self.config.optim, speed, parameter_count(self.config.model, self.vocab)
        ).device

    def row(self, gpus: int, layout: Layout) -> PlanRow:
        sharding = ShardingChoice(layout.form, layout.shards) if gpus > 1 else ShardingChoice()
        (speed, memory), fits = self._fitting(gpus, self._speed(gpus, sharding))
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
        refused = self._refused(gpus, sharding)
        if refused or not fits:
            short = f"it needs {memory.total / 2**30:,.0f} GiB with micro-batches of {speed.micro_batch}"
            return PlanRow(**same, fits=False, refused=bool(refused), why=refused or short)
        work = dataclasses.replace(self.work, again=AGAIN[speed.checkpointing], state=self._state(speed))
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
            step_seconds=step.seconds,
            compute_seconds=step.compute,
            update_seconds=step.update,
            communication_seconds=step.communication,
            exposed_seconds=step.exposed,
            tokens_per_second=each,
            efficiency=each / self.one_gpu,
        )

    def _refused(self, gpus: int, sharding: ShardingChoice) -> str:
        """Why a run of this config would be refused there, whatever the memory; empty where it would not."""
        sequences = self.config.train.batch_tokens // self.config.model.context
        if sequences % gpus:
            return f"a step has {sequences:,} sequences, which {gpus:,} GPUs cannot share evenly"
        if sharding.shards == 1:
            return ""
        refused = not_in_slices(self.config)
        missing = {f"speed.{feature.name}" for feature in self.alone.features if feature.why}  # by one GPU, too
        try:
            self._speed(gpus, sharding, lambda path: DEFAULT if path in missing else self.loaded.sources[path])
        except HardwareError as error:
            refused = refused or error.message
        return refused or ""

    def _fitting(self, gpus: int, speed: Speed) -> tuple[tuple[Speed, MemoryEstimate], bool]:
        """(the first way that fits, or the smallest there is, whether it fits)."""
        tried = list(self._ways(gpus, speed))
        fitting = [one for one in tried if fits_well(one[1], self.device)]
        return (fitting[0], True) if fitting else (min(tried, key=lambda one: one[1].total), False)

    def _ways(self, gpus: int, speed: Speed) -> Iterator[tuple[Speed, MemoryEstimate]]:
        kinds = list(AGAIN)
        most, passes = micro_batch_of(self.config, gpus)
        share = most * passes
        for checkpointing in kinds[kinds.index(speed.checkpointing) :]:
            for size in (size for size in range(min(most, MOST_AT_ONCE), 0, -1) if share % size == 0):
                one = dataclasses.replace(
                    speed, micro_batch=size, accumulation=share // size, checkpointing=checkpointing
                )
                yield one, memory_of(self.config, self.vocab, one)

    def notes(self, rows: Sequence[PlanRow]) -> Iterator[str]:
        yield NOT_COUNTED
        refusals: dict[str, list[str]] = {}
        for row in rows:
            if row.refused and FORMS[row.form] not in refusals.setdefault(row.why, []):
                refusals[row.why].append(FORMS[row.form])
        yield from (f"refused in {' and '.join(forms)}: {why}" for why, forms in refusals.items())
        if self.config.model.vocab is None and self.config.data.tokenizer != "gpt2" and not self.known.unique:
            yield f"the vocabulary is not known before the data is prepared: counted as {self.vocab:,}"
        if self.other_products:
            yield "the share of the peak rate is for products in 16 bits, and this config has others: give --rate"
        if self.config.speed.optimizer_offload:
            yield "the update on the host (speed.optimizer_offload) is not counted into the step"


def on_card(loaded: LoadedConfig, card: Card) -> LoadedConfig:
    """The config with what its preset leaves open until the data is known, as far as it is; no data is prepared."""
    known = _known(loaded)
    found = sized(loaded, known, limit_memory(card.device, loaded.config.speed.memory_limit))
    if loaded.size is None or found is loaded:
        return found
    read = "" if known.unique else ", and is settled as for text that is read once, because its tokens are not counted"
    notice = f"size {loaded.size.name} has the batch of one GPU{read}"
    return dataclasses.replace(found, notices=(*found.notices, notice))


def planned_parameters(loaded: LoadedConfig) -> int:
    """How large the model is, for who looks for a measured rate of one of its size."""
    return parameter_count(loaded.config.model, _known(loaded).vocab)


def _known(loaded: LoadedConfig) -> Known:
    """What is known of the data where it is prepared, and else of its tokenizer."""
    data, known = loaded.config.data, uncounted(loaded.config)
    named = loaded.config.data_kind == "text" and (data.folder is not None or data.source is not None)
    if not (named and has_dataset(data_folder(data))):
        return known
    manifest = read_manifest(data_folder(data))
    vocab = loaded.config.model.vocab or manifest.vocab
    return dataclasses.replace(known, vocab=vocab, unique=manifest.splits["train"].tokens)


def _all_works() -> Probes:
    """A card that is elsewhere: all that torch and Triton have works there; packages beside them are not assumed."""

    def attention(backend: str, *_: object, **__: object) -> str | None:
        return "it is not assumed to be installed" if backend in ("fa4", "cudnn+fa4") else None

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
    """The rows of one number of GPUs, with the one marked that `parallel.form=auto` takes."""
    # No form takes more checkpointing than the config has as long as another one fits without.
    taken = min((row for row in rows if row.fits), key=lambda row: list(AGAIN).index(row.checkpointing), default=None)
    return [dataclasses.replace(row, auto=row is taken) for row in rows]


def _recommendation(rows: Sequence[PlanRow], loaded: LoadedConfig) -> str:
    """Which form `parallel.form=auto` takes on which numbers of GPUs, and with which settings."""
    found = []
    for gpus in dict.fromkeys(row.gpus for row in rows):
        at = [row for row in rows if row.gpus == gpus]
        own = next((row for row in at if row.auto), None)
        if own is None:
            least = min(at, key=lambda row: row.memory_bytes)
            found.append(f"no form at {many(gpus, 'GPU')} ({FORMS[least.form]}: {least.why})")
        else:
            share = f"{100 * (own.efficiency or 0):.0f}% of one GPU's rate"
            words = ", ".join([share, *_settings(own, loaded)])
            found.append(f"{FORMS[own.form]} at {many(gpus, 'GPU')} ({words})")
    return "parallel.form=auto takes " + "; ".join(found)


def _settings(own: PlanRow, loaded: LoadedConfig) -> Iterator[str]:
    """Settings of the planned run that its config does not have: a run takes its micro-batch as the config has it."""
    config, settings = loaded.config, {}
    if own.micro_batch != micro_batch_of(config, own.gpus)[0]:
        settings["speed.micro_batch"] = own.micro_batch
    if own.checkpointing != config.speed.checkpointing:
        settings["speed.checkpointing"] = own.checkpointing
    if settings:
        yield "with " + " ".join(f"{name}={value}" for name, value in settings.items())


# --- what is shown ----------------------------------------------------------------------------------------------------

_EXTRAS = ("compute", "sent", "tokens/s/GPU", "micro-batch")


def sheet_of(result: PlanResult) -> Sheet:
    """A row for each form and number of GPUs."""
    lines = [
        "* parallel.form=auto; micro-batch: sequences x micro-batches of a rank; sent: by a rank in a step",
        "exposed: communication that compute does not hide; of each card "
        f"{human_bytes(result.usable_bytes)} are usable",
        *result.notes,
        "",
    ]
    return Sheet(
        blocks=[
            *map(Sentence, [*_headline(result), ""]),
            Table(rows=list(_step_rows(result)), names="GPUs", left=("form",), extras=_EXTRAS, numbers=True),
            *map(Sentence, lines),
            Sentence(result.recommendation, OWN),
        ],
        width=180,
    )


def _headline(result: PlanResult) -> list[str]:
    share = "" if result.mfu is None else f", {100 * result.mfu:.0f}% of the peak rate"
    return [
        f"{result.size or result.config}: {human_count(result.parameters)} parameters, {result.batch_tokens:,} tokens "
        f"a step of context {result.context:,}, on hosts of {result.per_host} {result.card}",
        f"one GPU: {result.one_gpu_tokens_per_second:,.0f} tokens/s{share}; {result.rate_source}",
        f"each GPU sends {result.inside / 1e9:g} GB/s inside a host, {result.across / 1e9:g} GB/s between hosts",
    ]


def _step_rows(result: PlanResult) -> Iterator[ResultRow]:
    before = None
    for row in result.rows:
        first, before = row.gpus != before, row.gpus
        again = "" if row.checkpointing == "none" else f" {row.checkpointing}"
        unfit = "refused" if row.refused else "does not fit"
        cells = {
            "form": f"{FORMS[row.form]}{' *' if row.auto else ''}",
            "micro-batch": f"{row.micro_batch} x {row.accumulation}{again}" if row.fits else unfit,
            "memory": human_bytes(row.memory_bytes),
        }
        if row.fits:
            cells |= {
                "sent": or_dash(row.sent_bytes, human_bytes),
                "step": or_dash(row.step_seconds, _short),
                "compute": or_dash(row.compute_seconds, _short),
                "exposed": or_dash(row.exposed_seconds, _short),
                "tokens/s/GPU": or_dash(row.tokens_per_second, "{:,.0f}"),
                "efficiency": or_dash(row.efficiency, "{:.1%}"),
            }
        tone = FAINT if not row.fits else OWN if row.auto else ""
        yield ResultRow(name=f"{row.gpus:,}" if first else "", cells=cells, tone=tone)


def _short(value: float) -> str:
    if value < 1:
        return f"{1000 * value:.{0 if value >= 0.1 else 1}f} ms"
    return f"{value:.2f} s" if value < 90 else human_seconds(value)


def picture_of(result: PlanResult) -> Picture:
    """What fills a rank's memory in each form, and the rate per GPU. A form that cannot run says so beside its bar."""
    parts = {"weights": "blue", "gradients": "orange", "optimizer": "grey", "activations": "teal"}
    usable = result.usable_bytes / 2**30
    names: list[str | Heading] = []
    memory: list[Bar] = []
    rates: list[Bar] = []
    before = None
    for row in result.rows:
        names += [""] if before not in (None, row.gpus) else []
        before, line = row.gpus, len(names)
        names.append(f"{many(row.gpus, 'GPU')}, {FORMS[row.form]}{' *' if row.auto else ''}")
        words = f"{row.memory_bytes / 2**30:,.1f}"
        words += "" if row.fits else " refused" if row.refused else " does not fit"
        shown = min(1.0, 1.4 * usable * 2**30 / row.memory_bytes)  # what is far too large is drawn smaller
        sizes = [(shown * getattr(row, f"{part}_bytes") / 2**30, colour) for part, colour in parts.items()]
        ink = "blue" if row.fits else "red"
        memory.append(Bar(line=line, parts=sizes, words=words, colour=ink, pale=not row.fits))
        if row.fits and row.efficiency is not None:
            words = f"{row.efficiency:.0%}, a step in {or_dash(row.step_seconds, _short)}"
            colour = "purple" if row.auto else "faint"
            rates.append(Bar(line=line, parts=[(100 * row.efficiency, colour)], words=words))
    limits = (0, 1.12 * usable if all(row.fits for row in result.rows) else 1.45 * usable)
    panels = [
        BarPanel(title="memory of a rank, GiB", bars=memory, limits=limits, at=usable, legend=parts),
        BarPanel(title="rate of a GPU, % of one GPU alone", bars=rates, limits=(0, 110), at=100),
    ]
    lines = [*_headline(result)[:2], *textwrap.wrap(result.recommendation, 150)[:4]]
    title = f"{result.size or result.config} on {many(max(row.gpus for row in result.rows), 'GPU')}"
    return Picture(title=title, lines=lines, names=names, bars=panels)
