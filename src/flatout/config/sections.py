"""The sections of a config but for `model`.

What the sections of a config are made of: strict groups of fields, and common kinds of values.

`data`, `clean` and `chat`: the text, its tokens, what is dropped, and what a model is fine-tuned on.

`lora`, `optim`, `train`, `eval`, `checkpoint`, `parallel`, `output`: how a run learns, is judged, saved, shown.

`speed`: the switches that may not change what is learned.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from flatout.config.optimizers import OPTIMIZERS, OptimizerKind, OptimizerName
from flatout.config.sizes import MOST_DECAY

Positive = Annotated[int, Field(ge=1, le=2**40)]
Natural = Annotated[int, Field(ge=0, le=2**40)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Name = Annotated[str, Field(min_length=1)]
Switch = Literal["auto", "on", "off"]


class Conflict(ValueError):
    """Values that do not go together; `hint` says what would."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class Section(BaseModel):
    """A strict, frozen group of fields: no unknown keys, no silent conversions, no NaN."""

    model_config = ConfigDict(
        extra="forbid", defer_build=True, frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def multiple_near(number: int, of: int) -> int:
    """The multiple of `of` that is nearest to a number, for a hint."""
    return max(1, round(number / of)) * of


Format = Literal["text", "jsonl", "json", "csv", "tsv", "parquet", "warc", "smiles", "tokens"]


Fields = Name | Annotated[list[Name], Field(min_length=1)]


class _Validated(Section):
    if TYPE_CHECKING:  # a field here would come before all others
        validation: str | float

    @property
    def val_source(self) -> str | None:
        """The source of the validation data, where it is none of the training data."""
        return self.validation if isinstance(self.validation, str) else None

    @property
    def val_fraction(self) -> float:
        """The share that is held out; 0 where validation has a source of its own."""
        return self.validation if isinstance(self.validation, float) else 0.0


class SourceConfig(Section):
    """One of several sources of a mixture."""

    path: Name
    """What `data.source` takes as a single text."""
    weight: Annotated[float, Field(gt=0.0, le=1000.0)] = 1.0
    """How often each training document is taken: 2 is twice, 0.25 a quarter of them, chosen by hash."""
    format: Format | None = None
    """Instead of data.format for this source."""


class DataConfig(_Validated):
    source: str | Annotated[list[Name | SourceConfig], Field(min_length=1)] | None = "shakespeare"
    """Raw text: `shakespeare` (shipped), a file, a folder, `hf:NAME`, or a list."""
    validation: Name | Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Share of the text that is kept for validation, or another source for it."""
    folder: Name | None = None
    """Folder of prepared token shards; null means data/SOURCE-TOKENIZER, filled on first use."""
    tokenizer: str = "char"
    """`char`, `bytes`, `gpt2`, `bpe-512` (learned from the text, of any size), or a tokenizer.json's path."""
    unknown_characters: Literal["error", "drop", "replace"] = "error"
    """What tokenizer `char` does with a character it has never seen."""
    format: Format | None = None
    """Format of the source; null: by the file's name."""
    field: Fields = "text"
    """Field of a row that holds its text, nested as in `a.b` or `a.*.b`; of several, the first that has text."""
    document_start: Name | None = None
    """In text files, each line that begins with this, after spaces, begins a document; null has one."""
    invalid_utf8: Literal["strict", "replace", "skip"] = "strict"
    """Documents with bytes that are not UTF-8: list and leave out, repair with U+FFFD, or drop."""
    max_documents: Positive | None = None
    """Take at most this many documents of each source, the first ones; null takes all."""
    max_tokens: Positive | None = None
    """Take the first documents of each source up to this many tokens, cutting plain text there; null takes all."""
    max_bytes: Positive | None = None
    """Take the first documents of each source up to this many bytes, cutting plain text there; null takes all."""
    split: Literal["contiguous", "document"] = "contiguous"
    """Take validation from the end of the text, or choose whole documents by hash."""
    packing: Literal["concat", "reshuffle", "best_fit"] = "concat"
    """Windows over the joined documents, joined anew in every epoch, or whole ones fitted with little padding."""
    documents: Literal["joined", "apart"] = "joined"
    """Whether a token sees all of its window before it, or its own document alone, labels included."""
    streaming: bool = False
    """Train while reading data.source, without preparing shards first."""
    stride: Positive | None = None
    """Tokens between window starts; null means the context, so no overlap."""


class CleanConfig(Section):
    drop: list[Literal["short", "exact_duplicates", "near_duplicates", "repetition", "quality"]] = Field(default=[])
    """Drop documents below 200 characters, like an earlier one (near: 80%), that repeat themselves, or are no prose."""
    languages: Annotated[list[Annotated[str, Field(pattern=r"^[a-z]{2,3}$")]], Field(min_length=1)] | None = None
    """Keep only documents in these languages, such as [en, de]."""


class ChatConfig(_Validated):
    source: str | None = None
    """File or folder of conversations or instructions to fine-tune on; null trains on plain text."""
    validation: Name | Share = 0.05
    """Share of the rows that is held out for evaluation, or a file or folder to evaluate on."""
    fields: list[Name] = Field(default=[])
    """Columns to read, such as [prompt=question, completion=answer]; [] goes by the names in the first rows."""
    template: Name = "model"
    """Chat template: the model's own, chatml, plain, none, or a file of Jinja."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """What has a label: assistant turns, the last of them, or every token."""
    max_tokens: Positive | None = None
    """Most tokens of a sample; longer ones are cut; null means model.context, which they never exceed."""
    packing: bool = True
    """Several samples in a row, none of which sees another; false pads each to a row."""
    batch_samples: Positive = 8
    """Samples per optimizer step."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for pair in self.fields:
            name, sign, column = pair.partition("=")
            if not (name and sign and column):
                raise Conflict(
                    f"fields has {pair!r}, which is no name with a column", "write chat.fields=[prompt=question]"
                )
        return self


_Number = TypeVar("_Number", int, float)


class LoraConfig(Section):
    rank: Annotated[int, Field(ge=0, le=4096)] = 0
    """Rank of the adapters that are trained beside frozen weights; 0 trains the weights."""
    alpha: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Adapters count alpha / rank times; null is twice the rank."""
    targets: list[Name] = Field(default=["all-linear"])
    """Projections with an adapter, such as [q_proj, v_proj]; all-linear is all."""
    ranks: list[Name] = Field(default=[])
    """Ranks of some projections, such as [q_proj=8, mlp.down_proj=32]; a name is a path or the end of one."""
    alphas: list[Name] = Field(default=[])
    """Alphas of some projections, in the same form."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout share on what adapters read, in training."""
    rank_stabilised: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank."""
    dora: bool = False
    """Learn the length of every row of a weight apart from its direction."""
    init_from: Name | None = None
    """Adapter to go on from: a folder that PEFT wrote, or a run of ours; null begins anew."""
    quantize: Literal["none", "nf4"] = "none"
    """Hold the frozen linear layers in 4 bits (QLoRA); needs bitsandbytes: less memory, slower steps."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.quantize != "none" and self.rank == 0:
            raise Conflict("weights in 4 bits cannot be trained, only adapters beside them", "set rank, such as 16")
        for field, number, pairs in (("ranks", int, self.ranks), ("alphas", float, self.alphas)):
            names: set[str] = set()
            for pair in pairs:
                try:
                    name, value = _pair(pair, number)
                except ValueError:
                    name, value = "", 0
                if not name or not 0 < value < math.inf:
                    raise Conflict(
                        f"{field} has {pair!r}, which is no name with a number above 0", f"write {field}=[q_proj=8]"
                    )
                if name in names:  # a file holds a number for each, so the second one would be the adapter's there
                    raise Conflict(f"{field} has {name!r} twice", "leave one of the two out")
                names.add(name)
        return self

    @property
    def named_ranks(self) -> tuple[tuple[str, int], ...]:
        """`ranks` as pairs."""
        return tuple(_pair(pair, int) for pair in self.ranks)

    @property
    def named_alphas(self) -> tuple[tuple[str, float], ...]:
        """`alphas` as pairs."""
        return tuple(_pair(pair, float) for pair in self.alphas)


def _pair(text: str, number: Callable[[str], _Number]) -> tuple[str, _Number]:
    name, _, value = text.rpartition("=")  # the last sign: a name is a regular expression, which may have one
    return name, number(value)


MOST_RATE = 100.0
_Rate = Annotated[float, Field(gt=0.0, le=MOST_RATE)]
_Decay = Annotated[float, Field(ge=0.0, le=MOST_DECAY)]
_Memory = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimConfig(Section):
    optimizer: OptimizerName = "adamw"
    """For matrices of blocks; muon orthogonalises updates, normuon scales their rows too and decays cautiously."""
    learning_rate: _Rate = 1e-3
    """Peak learning rate of AdamW; with muon that of scalars, norms and whatever has no rate of its own."""
    muon_rate: _Rate = 0.02
    """Peak learning rate of Muon's matrices."""
    embedding_rate: _Rate | None = None
    """Peak learning rate of the token embedding, and of a head tied to it; null is learning_rate."""
    head_rate: _Rate | None = None
    """Peak learning rate of an untied head; null is learning_rate."""
    table_rate: _Rate | None = None
    """Peak learning rate of other embedding tables; null is embedding_rate, then learning_rate."""
    schedule: Literal["cosine", "linear", "wsd", "one-cycle", "constant"] = "cosine"
    """Shape of the learning rate after warm-up; wsd is warm-up, stable, decay."""
    warmup: Natural | Share | Annotated[str, Field(pattern=r"^[0-9]{1,6}(\.[0-9]{1,6})? epochs?$")] = 100
    """How long the rate rises to its peak: updates (100), a share of the run (0.05), or epochs (`2 epochs`)."""
    min_ratio: Share = 0.1
    """Final learning rate as a share of the peak; 0 is reached after the last update."""
    decay_fraction: Share = 0.2
    """Share of the run that wsd spends decaying at its end."""
    weight_decay: _Decay = 0.1
    """Decoupled weight decay, on matrices only: never on biases, norms or scales; with muon on its matrices alone."""
    embedding_decay: _Decay | None = None
    """Weight decay of what has embedding_rate; null is weight_decay, with muon none."""
    head_decay: _Decay | None = None
    """Weight decay of an untied head; null is weight_decay, with muon none."""
    table_decay: _Decay | None = None
    """Weight decay of the tables that have table_rate; null is weight_decay, with muon none."""
    betas: Annotated[list[_Memory], Field(min_length=2, max_length=2)] = Field(default=[0.9, 0.95])
    """AdamW's memory of the gradient, and of the squared gradient."""
    clip: Annotated[float, Field(ge=0.0)] = 1.0
    """Largest gradient norm, larger ones are scaled down; 0 never clips."""
    ema: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Evaluate, sample and export an average of weights, of which update n keeps min(ema, (1+n)/(10+n)); 0 has none."""

    @property
    def kind(self) -> OptimizerKind:
        return OPTIMIZERS[self.optimizer]

    @property
    def rates(self) -> dict[str, float]:
        """Every peak rate that is set, by field: first that of the matrices, which decides whether a run is stable."""
        fields = dict.fromkeys([self.kind.rate, "learning_rate", "embedding_rate", "head_rate", "table_rate"])
        return {name: rate for name in fields if (rate := getattr(self, name)) is not None}

    def scaled_rates(self, factor: float) -> dict[str, float]:
        """All peak rates times a factor, by the paths of their fields."""
        return {f"optim.{name}": factor * rate for name, rate in self.rates.items()}

    @property
    def warmup_epochs(self) -> float | None:
        """The warm-up in epochs, where it is given in epochs."""
        return float(self.warmup.split()[0]) if isinstance(self.warmup, str) else None

    def with_warmup_steps(self, steps: int, epochs_to_steps: Callable[[float], int]) -> Self:
        """The same with the warm-up in steps, for a run of `steps`."""
        epochs = self.warmup_epochs
        if epochs is not None:
            return self.model_copy(update={"warmup": epochs_to_steps(epochs)})
        if isinstance(self.warmup, float):
            return self.model_copy(update={"warmup": round(self.warmup * steps)})
        return self

    @property
    def warmup_steps(self) -> int:
        """The warm-up of a plan, which has it in steps."""
        assert isinstance(self.warmup, int), "resolved by with_warmup_steps"
        return self.warmup


LENGTHS = ("steps", "epochs", "tokens", "minutes")
_STAGES = ("batch_stages", "length_stages", "window_stages")


class TrainConfig(Section):
    steps: Positive | None = None
    """Length of the run in optimizer steps; give one of steps, epochs, tokens, minutes."""
    epochs: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Length of the run in passes over the windows."""
    tokens: Positive | None = None
    """Length of the run in training tokens, rounded up to whole steps."""
    minutes: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Length of the run in minutes, from its first step to its last checkpoint; steps beside it are the plan."""
    batch_tokens: Positive = 16384
    """Tokens per optimizer step over all micro-batches and devices."""
    batch_stages: list[Positive] = Field(default=[])
    """Tokens per step in stages of equally many tokens, rates going with their root; [] has batch_tokens throughout."""
    length_stages: list[Positive] = Field(default=[])
    """Sequence length of each stage, a divisor of model.context; evaluation has the whole context, and so has []."""
    window_stages: list[Positive] = Field(default=[])
    """Attention window of W blocks in each stage; evaluation and the trained model have model.window, and so has []."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Label smoothing in training; evaluation never smooths."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1337
    """Seed of initial weights, data order and dropout."""
    deterministic: bool = False
    """Use only kernels whose result repeats bit for bit, at some cost in speed."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in LENGTHS if getattr(self, name) is not None]
        if len(given) != 1 and given != ["steps", "minutes"]:
            raise Conflict(
                f"give exactly one of {', '.join(LENGTHS)}, not {' and '.join(given) or 'none'}",
                "keep one of train.steps, train.epochs, train.tokens and train.minutes, such as train.steps=1000",
            )
        counts = {name: len(stages) for name in _STAGES if (stages := getattr(self, name))}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise Conflict(
                f"the lists of stages differ in length: {listed}", "give each list one entry for every stage of the run"
            )
        return self

    @property
    def staged(self) -> bool:
        return any(getattr(self, name) for name in _STAGES)

    @property
    def mean_batch(self) -> float:
        """Tokens of a step on average: stages have equally many tokens, so small batches have more steps."""
        batches = self.batch_stages or [self.batch_tokens]
        return len(batches) / sum(1 / batch for batch in batches)

    def stages(self, context: int) -> list[tuple[int, int, int | None]]:
        """(tokens of a step, sequence length, attention window) of each stage; one where there are no lists."""
        count = max(1, *(len(getattr(self, name)) for name in _STAGES))
        batches = self.batch_stages or [self.batch_tokens] * count
        lengths, windows = self.length_stages or [context] * count, self.window_stages or [None] * count
        return list(zip(batches, lengths, windows, strict=True))


_Epochs = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5} epochs?$")]
_Minutes = Annotated[str, Field(pattern=r"^[0-9]{1,6}(\.[0-9]{1,6})? minutes?$")]


def _interval(every: int | str, unit: str) -> float:
    """The length of an interval in a unit; 0 where it is in another one."""
    number, _, said = (every if isinstance(every, str) else f"{every} step").partition(" ")
    return float(number) if said.removesuffix("s") == unit else 0.0


class EvalConfig(Section):
    every: Natural | _Epochs = 250
    """Steps between evaluations, or `2 epochs`; 0 evaluates only at the end."""
    tokens: Positive | None = None
    """Validation tokens to use, from the start; null uses all."""
    patience: Natural = 0
    """Stop after this many evaluations without improvement; 0 never stops early."""
    sample_every: Natural = 0
    """Steps between printed samples; 0 samples only at the end."""
    sample_tokens: Natural = 200
    """Length of each sample in tokens; 0 never samples."""
    sample_prompt: str = "\n"
    """Text the samples continue."""
    sample_temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 0.8
    """Randomness of the samples; 0 is greedy, the likeliest token each time."""
    tasks: list[Name] = Field(default=[])
    """Task files, or folders of them, to evaluate during training; docs/guides/after-training.md has their forms."""
    tasks_every: Natural = 0
    """Steps between rounds of tasks; 0 has one at the end."""
    tasks_rows: Positive | None = None
    """Questions of each task, the first ones; null asks all."""

    @property
    def steps(self) -> int:
        """Steps between evaluations, 0 where the interval is given in epochs."""
        return int(_interval(self.every, "step"))

    @property
    def epochs(self) -> int:
        return int(_interval(self.every, "epoch"))


class CheckpointConfig(Section):
    every: Natural | _Epochs | _Minutes = 500
    """Steps between checkpoints, `2 epochs` or `10 minutes`; 0 saves only at the end and when interrupted."""
    keep: Annotated[int, Field(ge=1, le=10000)] = 2
    """Newest checkpoints to keep, besides the one with the lowest validation loss."""

    @property
    def steps(self) -> int:
        """Steps between checkpoints, 0 where the interval is given in minutes or epochs."""
        return int(_interval(self.every, "step"))

    @property
    def epochs(self) -> int:
        return int(_interval(self.every, "epoch"))

    @property
    def minutes(self) -> float:
        return _interval(self.every, "minute")


def keeps_best(evaluating: EvalConfig, saving: CheckpointConfig) -> bool:
    """Whether each checkpoint with the lowest validation loss so far is saved, and kept beside the newest: not where
    only the end is, unless the run may stop after its best."""
    return saving.every != 0 or evaluating.patience > 0


class ParallelConfig(Section):
    form: Literal["auto", "data", "fsdp", "hybrid"] = "auto"
    """How processes share a model: data (each has a copy), fsdp (slices of it), hybrid (slices inside a host)."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients of all processes are added up; bf16 sends half the bytes and rounds."""
    timeout: Annotated[float, Field(ge=1.0, le=86400.0)] = 600.0
    """Seconds that a process waits for the others before it gives the run up; at the start, those of other hosts."""


class OutputConfig(Section):
    folder: Name | None = None
    """Run folder; null means runs/NAME, numbered when that is taken."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "run"
    """Name of the run, for its folder."""
    log_every: Positive = 10
    """Steps between lines on the terminal; metrics.jsonl gets every step."""
    trackers: list[Literal["tensorboard", "wandb"]] = Field(default=[])
    """Where records go besides metrics.jsonl; each needs its package."""


class SpeedConfig(Section):
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda|cuda:\d{1,3})$")] = "auto"
    """auto, cpu, mps, cuda or cuda:N; auto takes the fastest there is."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Arithmetic of matrix products over fp32 weights; auto is bf16 where the GPU has it."""
    residual: Literal["auto", "fp32", "bf16"] = "auto"
    """Storage of the residual stream between blocks; auto is bf16 beside bf16 products in our kernels."""
    fp8: list[Literal["qkv", "out", "up", "down", "head"]] = Field(default=[])
    """Linear layers whose products run in 8-bit floats, such as [up, down]; needs Triton."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """Norms, activations and residual adds: torch's operations or our Triton kernels; auto on CUDA."""
    products: Literal["auto", "torch", "tuned"] = "auto"
    """Matrix products by torch's choice of kernel, or by the fastest tried; auto beside our kernels."""
    attention: Literal["auto", "sdpa", "flash", "cudnn", "efficient", "fa4", "cudnn+fa4", "reference"] = "auto"
    """Attention kernel; sdpa lets torch pick, auto is cudnn from Hopper on (with fa4, if installed)."""
    scan: Literal["auto", "reference", "chunked", "triton"] = "auto"
    """States of E blocks: token by token, in chunks, or in our Triton kernels; auto is those on CUDA."""
    fused_qkv: bool = True
    """Queries, keys and values in one matrix product instead of three."""
    compile: Literal["auto", "off", "default", "reduce-overhead", "max-autotune", "regional"] = "auto"
    """torch.compile and its mode; regional compiles one block for all; auto only where it is faster."""
    cuda_graphs: Switch = "auto"
    """Replay each micro-batch as one CUDA graph; auto where launching kernels would be the bottleneck."""
    loss: Literal["auto", "plain", "chunked", "fused"] = "auto"
    """Head and loss: all logits at once, chunks computed again in backward, or differentiated at once."""
    loss_chunk: Annotated[int, Field(ge=16, le=2**20)] = 8192
    """Tokens whose logits exist at once in the chunked and fused losses."""
    fused_optimizer: Switch = "auto"
    """One kernel for the AdamW update; auto where torch has it."""
    optimizer_state: Literal["fp32", "8bit"] = "fp32"
    """Storage of AdamW's moments; 8bit quantises them in blocks of 256."""
    optimizer_offload: bool = False
    """Keep AdamW's moments in the host's memory and update there."""
    pad_vocab: Annotated[int, Field(ge=1, le=4096)] = 64
    """Round the vocabulary up to this multiple inside the head's product only; 1 is off."""
    micro_batch: Positive | None = None
    """Most sequences at once, rounded down to a divisor of the batch; null is the whole batch."""
    accumulation: Positive | None = None
    """Micro-batches per optimizer step, fewer if packed samples need fewer; null follows from the other fields."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """What backward recomputes instead of keeping: nothing, the cheap parts of a block, or all of it."""
    loader: Literal["auto", "host", "device"] = "auto"
    """Where tokens live; auto is the device for corpora up to 2 GiB on CUDA, else the host."""
    workers: Annotated[int, Field(ge=0, le=64)] = 1
    """Threads that read batches ahead on the host; 0 reads in the loop, and the batches are the same."""
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """Threads of torch on a CPU; auto tries some at the start, unless OMP_NUM_THREADS is set."""
    expandable_segments: Switch = "auto"
    """Let torch grow its memory blocks instead of fragmenting; auto on CUDA."""
    memory_limit: Annotated[float, Field(gt=0.0, le=10000.0)] | None = None
    """GiB of the GPU that this run may use, to emulate a smaller card; null is all of it."""

    @model_validator(mode="before")
    @classmethod
    def _booleans_are_switches(cls, values: Any) -> Any:
        if isinstance(values, dict):
            words = {True: "on", False: "off"}
            switches = ("compile", "fused_optimizer", "cuda_graphs", "expandable_segments")
            values = {k: words[v] if k in switches and isinstance(v, bool) else v for k, v in values.items()}
            if values.get("compile") == "on":
                values["compile"] = "default"
        return values
