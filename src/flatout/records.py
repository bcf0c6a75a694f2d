"""What a run says about itself, as frozen dataclasses and JSON lines.

The engine yields these and does not know who reads them; console, files and reports read these and do not know the
engine. A record holds plain numbers and strings only, never a tensor, so it can outlive the run that made it.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

from flatout.shown import Shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feature:
    """One switch: what was asked for, what really runs, and why they differ."""

    name: str  # the setting of `speed`
    asked: str  # the value of the config
    used: str  # the value that the run has
    why: str = ""  # empty where both are the same


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo(Shown):
    """The first record of every run: what is trained, on what, with which switches."""

    flatout: str  # version
    torch: str  # version
    device: str  # name of the device
    folder: str  # where the run writes
    family: str  # model.family
    parameters: int  # of the whole model
    flops_per_token: float  # forward and backward pass
    memory_estimate_bytes: int  # peak of a step, by the formula
    steps: int  # of the whole run
    batch_tokens: int  # tokens of a step, on average where stages have different batches
    micro_batch: int  # sequences at once
    accumulation: int  # micro-batches of a step, of the largest one where stages have different batches
    context: int  # tokens of a sequence
    vocab: int  # ids of the model
    train_tokens: int | None  # tokens to train on; not known of a stream
    val_tokens: int  # tokens of the validation set
    windows: int | None  # training windows of an epoch; not known of a stream
    dataset: str  # fingerprint of the prepared data
    tokenizer: str  # kind, such as char or gpt2
    start_step: int  # 0, or the step of the checkpoint that is resumed
    resumed_from: str | None  # path of that checkpoint
    features: tuple[Feature, ...]  # every switch of `speed`
    config: dict[str, Any]  # all settings by section
    batch_samples: int | None = None  # samples of a step; only fine-tuning has them, with other numbers of tokens each
    trained_parameters: int | None = None  # None where all are trained
    table_parameters: int = 0  # of all parameters, those in value and bigram tables
    base: str | None = None  # hash of the frozen weights under adapters
    # Of a fine-tuning run: rows, rows_not_used, files, train and val (samples), labelled (tokens), format, template.
    samples: dict[str, Any] | None = None
    ranks: int = 1  # how many processes that train together

    @property
    def nothing_left(self) -> bool:
        """Whether a run was resumed that had all its steps."""
        return self.resumed_from is not None and self.start_step >= self.steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord(Shown):
    """One optimizer step. `loss` is the mean over the labelled tokens of the step, label smoothing included."""

    step: int  # counts from 1
    epoch: float | None  # passes over the data so far; not known of a stream
    loss: float
    learning_rate: float  # of this update, for the matrices
    grad_norm: float  # of all gradients, before clipping
    applied: bool  # false: skipped, because a value was not finite
    tokens: int  # seen since the start of the run
    seconds: float  # of this step
    tokens_per_second: float | None  # of this step
    mfu: float | None  # share of the device's peak rate; None where that is not known
    memory_bytes: int | None  # most held at once so far: on CUDA by tensors, on a CPU by the whole process
    loss_scale: float | None  # of fp16; None otherwise
    micro_batch: int  # sequences at once; smaller than at the start after the device ran out of memory
    parameter_norm: float | None = None  # of all weights, before the update
    update_ratio: dict[str, float] | None = None  # norm of the update over that of the weights, by rule
    data_seconds: float | None = None  # how long the host waited for the batch
    reserved_bytes: int | None = None  # what torch's allocator holds, its cache included


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalRecord(Shown):
    """Loss on the fixed validation set, without dropout and without label smoothing."""

    step: int  # the last step before it
    loss: float  # mean over the tokens
    perplexity: float  # exp(loss)
    bits_per_byte: float | None  # None where the text's bytes are not known
    tokens: int  # that were predicted
    seconds: float  # that it took
    best: bool  # lowest loss of the run so far
    reason: str  # why now: step (eval.every), epoch or end


STEP_SPANS = ("wait", "forward", "backward", "micro-batch", "reduction", "optimizer")  # these add up to the steps
OTHER_SPANS = ("evaluation", "sample", "checkpoint", "data")  # beside them


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanRecord(Shown):
    """Where the time went since the last one, `steps` steps ago, by name; `calls` says how often.

    On the device's clock, and adding up to the steps: wait (it stood still), forward, backward, optimizer; a replayed
    graph is one piece, micro-batch; reduction is what a rank waits for the gradients of the others, beyond what its own
    backward pass hides. On the host's clock, beside the steps: evaluation, sample, checkpoint; and data,
    the time it waited for batches, which may have passed while the device was busy. Any other name is a `flatout.span`
    of the user's own code, which lies inside the steps.
    """

    step: int  # the last of them
    steps: int
    seconds: dict[str, float]  # by name
    calls: dict[str, int]  # by name, as `seconds`
    # Of several ranks, how long each was at work on these steps, waiting for the others not counted.
    rank_seconds: tuple[float, ...] = ()


SLOW_RANK = 0.02  # above the median: a rank that takes longer is reported


def slowest_over_median(seconds: Sequence[float]) -> tuple[int, float]:
    """The rank that takes longest, and how many times as long as the median; of two ranks, as the other."""
    median = statistics.median_low(seconds)
    slowest = max(range(len(seconds)), key=lambda rank: seconds[rank])
    return slowest, seconds[slowest] / median if median > 0 else 1.0


def slowest_rank(seconds: Sequence[float]) -> str:
    """Which rank takes longest, against the median of all."""
    slowest, times = slowest_over_median(seconds)
    above = times - 1
    return f"rank {slowest}, {above:.1%} above the median" if above >= 0.005 else "none, all within 0.5%"


def exposed_share(reduction: float, busy: float) -> float:
    """The share of a rank's time in steps that it waits for the gradients of others."""
    whole = reduction + busy
    return reduction / whole if whole > 0 else 0.0


WAITING = 0.3  # threads of a CPU run without a core, on average: it has too many of them, or others use too much


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineRecord(Shown):
    """The state of the card, as its driver reports it, and of the host; None for values that are not reported.

    `elapsed` is seconds since the run was started, `throttled` why the clock is held down: empty, power, heat or both.
    What cores did is counted since the record before.
    """

    step: int  # the newest one
    elapsed: float
    utilisation: float | None  # 0 to 1
    memory_bytes: int | None  # in use on the card, by all processes
    power_watts: float | None  # at this moment
    power_limit_watts: float | None  # set for the card
    temperature: float | None  # of the card, in degrees Celsius
    clock_mhz: float | None  # of the card's processors now
    throttled: str
    memory_total_bytes: int | None = None  # of the card
    clock_most_mhz: float | None = None  # that the card can have
    power_default_watts: float | None = None  # the limit that the card has unless another is set
    allocated_bytes: int | None = None  # by this run's tensors on the card
    cores: float | None = None  # of the host, that the run may use
    cores_busy: float | None = None  # by all processes: 1.5 is one and a half cores
    cores_others: float | None = None  # by processes that the run did not start
    threads_waiting: float | None = None  # threads of the run that waited for a core, on average
    load: float | None = None  # processes that ran or waited, as the system's mean over a minute
    process_bytes: int | None = None  # of the host's memory, allocated by the run; files that it maps left out
    host_bytes: int | None = None  # of the host's memory in use, by all processes
    host_total_bytes: int | None = None  # of the host, or of the container if that has less
    swap_bytes: int | None = None  # of the host's memory that lie on the disk


@dataclasses.dataclass(frozen=True, kw_only=True)
class EigenstateLayer:
    """What the states of one block can remember, as quantiles over them from `min` over `50%` to `max`.

    `layer` counts all blocks of the model, from 1. `magnitude` is |λ|. `horizon` is in tokens: after these, 1/e of a
    state is left, -1 / ln |λ|. `period` is the tokens of a whole turn, 2 at least: half a turn per token is the fastest
    there is. All are learned values. `beyond` is the share of the states whose horizon is longer than the context.
    """

    layer: int
    states: int  # of the block
    magnitude: dict[str, float]
    horizon: dict[str, float]
    period: dict[str, float]
    beyond: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class EigenstateRecord(Shown):
    """The eigenstate blocks of a model after `step`: at a run's start, at every evaluation and at the end."""

    step: int
    context: int  # tokens of a sequence
    layers: tuple[EigenstateLayer, ...]  # one for each block with eigenstates


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochRecord(Shown):
    """An epoch's end: every training window was seen once since the last one. In fine-tuning windows are samples."""

    step: int  # the last of the epoch
    epoch: int  # counts from 1
    mean_loss: float  # of its steps
    seconds: float  # of its steps
    windows_per_second: float  # of its steps
    tokens_per_second: float  # of its steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleRecord(Shown):
    """Text that the model wrote while it was being trained."""

    step: int  # the last step before it
    prompt: str  # eval.sample_prompt, as the tokenizer reads it
    text: str  # what the model wrote after it


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskRecord(Shown):
    """A score of a task: during training (`eval.tasks`), or by `flatout eval RUN --tasks` in the run's tasks.jsonl."""

    step: int  # whose weights were asked
    task: str  # name
    metric: str  # such as acc
    value: float  # of the metric
    error: float | None  # standard error
    rows: int  # questions
    shots: int  # solved examples before each


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreviewRecord(Shown):
    """The first sample of a fine-tuning run before anything is learned: its text in pieces, and whether each is."""

    step: int  # always 0
    pieces: tuple[tuple[str, bool], ...]  # text, and whether it is trained on


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointRecord(Shown):
    """A checkpoint that is on the disk and judged.

    `seconds` is how long training stood still for it. Where it was written beside training, `background_seconds` is how
    long that took, and records of later steps may come before this one.
    """

    step: int  # whose state it holds
    path: str  # of its folder
    bytes: int  # of all its files
    seconds: float
    best: bool  # lowest validation loss of the run so far
    background_seconds: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoticeRecord(Shown):
    """Something the user should know and need not act on at once: a fallback, a skipped update."""

    step: int  # the newest one
    message: str  # one line of text


@dataclasses.dataclass(frozen=True)
class PrepareProgress:
    """How far preparing has come: `phase` is characters, reading, merging, validation or measuring; sizes are of the
    input on disk.

    In the phase validation, of a stream, how much there is in all plays no part. `notice` is printed before
    any of it is read; in the phase measuring, of a run with a length in minutes, it is all there is.
    """

    phase: str
    files: int  # read so far
    total_files: int  # in all
    bytes: int  # read so far
    total_bytes: int  # in all
    documents: int  # kept so far
    tokens: int  # of them
    problems: int  # places that could not be read
    notice: str = ""

    def plus(self, **counts: int) -> "PrepareProgress":
        """So much further."""
        return dataclasses.replace(self, **{name: getattr(self, name) + count for name, count in counts.items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndRecord(Shown):
    """The last record. `reason` is finished, early_stop or interrupted."""

    step: int  # the last one
    reason: str
    seconds: float  # of all steps; evaluations and saves are not in it
    val_loss: float | None  # of the last evaluation
    best_loss: float | None  # of all evaluations
    best_step: int | None  # where it was
    checkpoint: str | None  # path of the newest one


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitSummary:
    """One split of a prepared dataset. Lengths are in tokens, an end-of-text id included.

    `quantiles` goes from `min` over `50%` to `max`. `windows` and `remainder` are None without a context;
    validation is read to its last token, so its `remainder` is 0.
    """

    name: str  # train or val
    documents: int  # count
    tokens: int  # count
    text_bytes: int  # of the text before it was tokenized
    bytes_per_token: float  # of the text
    shards: int  # files with tokens
    disk_bytes: int  # of all files of the split
    quantiles: dict[str, int]
    windows: int | None
    remainder: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenCount:
    """How often an id occurs; `text` is what it stands for, with escapes, or empty when that is no whole character."""

    id: int  # of the vocabulary
    text: str
    count: int  # in both splits
    share: float  # of all tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentSample:
    """The beginning of a document, as it is; `document` counts from 0, and `cut` says that there is more."""

    split: str  # train or val
    document: int
    tokens: int  # of the whole document
    text: str  # its beginning
    cut: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSummary:
    """What a prepared dataset holds. `report` is its report.json, None if it has none; `problems` are the first few."""

    folder: str  # of the dataset
    fingerprint: str  # hash of its content and settings
    tokenizer: str  # kind, such as char or gpt2
    vocab: int  # ids
    dtype: str  # of a token on disk
    context: int | None  # by which windows were counted
    splits: tuple[SplitSummary, ...]  # train and val
    top_tokens: tuple[TokenCount, ...]  # the most frequent ids
    unused_ids: int  # that never occur
    samples: tuple[DocumentSample, ...]  # documents
    report: dict[str, Any] | None
    problems: tuple[dict[str, Any], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchRow(Shown):
    """One rung of the ladder (`flatout bench`).

    `status` is green (parity holds), red (it does not, so there is no speed), out_of_memory, absent (this device cannot
    have the switch) or failed; `reason` says why. `parity` is the largest difference between its losses and the
    reference's over `parity_steps` steps. `gain` is the speed over that of the rung `against`, both timed in turns; of
    a rung that takes a switch out it is the other way round, what the switch is worth in the full set. It is the median
    of `pairs` paired ratios. Its interval goes from `gain_low` to `gain_high`, `error` is half of that as a share, and
    `verdict` is what it carries: faster, slower, no difference seen or too noisy to tell. `factor` is over the
    baseline, a product of such ratios with `factor_error`. `load` is the host's load average while it was timed.
    `words` is what the rung adds, `settings` all it sets, `used` what really ran; `milliseconds` is a median, but a
    mean for a trick that happens in some steps only. `place` is the rung's place in the list of all.
    """

    rung: str  # name of the switch
    group: str  # part of the ladder
    place: int
    status: str
    reason: str
    against: str | None
    words: tuple[str, ...]
    settings: tuple[str, ...]
    used: dict[str, str]
    parity: float | None
    parity_steps: int
    tolerance: float  # largest `parity` that is green
    tokens_per_second: float | None  # by `milliseconds`
    milliseconds: float | None
    mean_milliseconds: float | None  # of a step
    spread: float | None  # middle half of the steps' times, as a share of the median
    mfu: float | None  # share of the device's peak rate
    peak_bytes: int | None  # most memory held at once
    compile_seconds: float | None  # of the first step, beyond an ordinary one
    steps: int  # that were timed
    gain: float | None
    factor: float | None
    config: str  # name of the config
    config_words: tuple[str, ...]  # settings on top of it
    data: str  # what was trained on
    parameters: int  # of the model
    context: int  # tokens of a sequence
    batch_tokens: int  # tokens of a step
    micro_batch: int | None  # sequences at once
    accumulation: int | None  # micro-batches of a step
    device: str  # name of the machine's device
    flatout: str  # version
    torch: str  # version
    commit: str | None  # of Flatout's sources, if known
    # From here on: not in rows of earlier versions, which timed rungs one after the other.
    gain_low: float | None = None
    gain_high: float | None = None
    error: float | None = None
    verdict: str = ""
    pairs: int = 0
    factor_error: float | None = None
    load: float | None = None


@dataclasses.dataclass(frozen=True)
class BenchProgress:
    """Where the ladder is: rung `number` of `total`, in `phase` (reference, parity or timing)."""

    number: int
    total: int
    rung: str  # its name
    phase: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblateRow(Shown):
    """One run of `flatout ablate`: the config as it is, or with one field changed.

    `status` is done, diverged, out_of_memory or invalid, and `reason` says why. `seconds` and those in `curve` are of
    training steps alone, without evaluation, compiling and warm-up; `curve` has a point for each evaluation.
    """

    field: str  # path of the field that is changed; empty for the config as it is
    configured: str  # its value in the config, as YAML
    changed: str  # its value in this run, as YAML
    seed: int  # train.seed
    status: str
    reason: str
    loss: float | None  # validation loss at the end; None where the run did not get there
    steps: int  # taken
    tokens: int  # trained on
    seconds: float
    whole_seconds: float  # of the run with all that belongs to it
    curve: tuple[tuple[int, float, float], ...]  # tokens, seconds, validation loss
    hash: str  # of settings, data and device
    config: str  # name of the config
    device: str  # name of the machine's device
    flatout: str  # version
    torch: str  # version


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneRow(Shown):
    """One setting that `flatout tune` tried.

    `status` is fits, over (it ran, but without the margin), out_of_memory or absent (this device cannot have it, see
    `reason`). `tokens_per_second` and `milliseconds` are of a whole optimizer step at the config's global batch,
    `seconds` is what trying took.
    """

    number: int  # counts from 1
    status: str
    reason: str
    micro_batch: int  # sequences at once
    accumulation: int  # micro-batches of a step
    checkpointing: str  # speed.checkpointing
    loss: str  # speed.loss
    loss_chunk: int  # speed.loss_chunk
    kernels: str  # speed.kernels
    compile: str  # speed.compile
    cuda_graphs: bool  # speed.cuda_graphs
    optimizer_offload: bool  # speed.optimizer_offload
    tokens_per_second: float | None
    milliseconds: float | None
    peak_bytes: int | None  # most memory held at once; None on a CPU
    estimate_bytes: int  # the same by the formula
    seconds: float
    threads: int | str = "auto"  # of torch on a CPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneResult(Shown):
    """The last record of `flatout tune`: the row it took, and why it stopped looking.

    `words` are the settings as they stand on a command line, `fragment` a config file that holds them and everything
    else that was asked for. `confirmed` says whether the figures are of whole steps or put together from shorter ones.
    Of fine-tuning, which has `batch_samples`, all figures are of whole steps, and `confirmed` ones were measured again.
    """

    chosen: TuneRow  # the row it took
    words: tuple[str, ...]
    fragment: str
    device: str  # its name
    capacity_bytes: int | None  # memory that a setting may use
    batch_tokens: int  # tokens of a step
    data: str  # what was trained on
    tried: int  # rows in all
    ended: str  # why it stopped looking
    confirmed: bool
    seconds: float  # in all
    flatout: str  # version
    torch: str  # version
    batch_samples: int | None = None
    note: str = ""  # why the choice may be another at another time


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneProgress:
    """What is being tried now, and how much time has been used."""

    number: int  # of the setting
    text: str  # the setting in words
    seconds: float  # used so far
    budget: float  # seconds that may be used


Record = (
    RunInfo
    | StepRecord
    | EvalRecord
    | EpochRecord
    | SampleRecord
    | TaskRecord
    | PreviewRecord
    | CheckpointRecord
    | NoticeRecord
    | SpanRecord
    | MachineRecord
    | EigenstateRecord
    | EndRecord
)

NAMES: dict[type, str] = {
    RunInfo: "run",
    StepRecord: "step",
    EvalRecord: "eval",
    EpochRecord: "epoch",
    SampleRecord: "sample",
    TaskRecord: "task",
    PreviewRecord: "preview",
    CheckpointRecord: "checkpoint",
    NoticeRecord: "notice",
    SpanRecord: "spans",
    MachineRecord: "machine",
    EigenstateRecord: "eigenstates",
    EndRecord: "end",
    DataSummary: "data",
    BenchRow: "bench",
    AblateRow: "ablate",
    TuneRow: "tune",
    TuneResult: "tuned",
}


def record_to_json(record: Record | DataSummary | BenchRow | AblateRow | TuneRow | TuneResult) -> str:
    """One JSON line. Non-finite numbers become the strings "nan", "inf", "-inf": JSON has no word for them, and a
    NaN loss must be visible in the log, never averaged or filtered away."""
    body = {"type": NAMES[type(record)], **dataclasses.asdict(record)}
    return json.dumps(_finite(body), ensure_ascii=False, allow_nan=False)


def bench_row_from_json(line: str) -> BenchRow:
    """The row that `record_to_json` wrote; a line of anything else is a ValueError."""
    try:
        body = json.loads(line)
        if body.pop("type") != NAMES[BenchRow]:
            raise ValueError("a record of another kind")
        parity = body["parity"]
        for former in ("claim_rows", "claim", "claim_low", "claim_high"):  # in rows of earlier versions
            body.pop(former, None)
        body |= {name: tuple(value) for name, value in body.items() if isinstance(value, list)}
        return BenchRow(**{**body, "parity": None if parity is None else float(parity)})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def ablate_row_from_json(line: str) -> AblateRow:
    """The row that `record_to_json` wrote; a line of anything else is a ValueError."""
    try:
        body = json.loads(line)
        if body.pop("type") != NAMES[AblateRow]:
            raise ValueError("a record of another kind")
        if body.pop("equal", "tokens") != "tokens":
            body["hash"] = ""  # an earlier version compared runs at equal seconds too; such a row is never looked up
        curve = tuple((int(tokens), float(seconds), float(loss)) for tokens, seconds, loss in body["curve"])
        return AblateRow(**{**body, "curve": curve})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
