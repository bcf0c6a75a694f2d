"""Every knob of a run, typed, with one sentence each. No torch here: a config error must answer at once.

`speed` holds the switches that may not change what is learned; everything that does change it lives in the other
sections. A value of null means "work it out"; what was worked out is shown in the run's first record.
"""

import math
from typing import Any, Self

from pydantic import Field, model_validator

from flatout.config.model_section import ModelConfig
from flatout.config.sections import (
    ChatConfig,
    CheckpointConfig,
    CleanConfig,
    Conflict,
    DataConfig,
    EvalConfig,
    LoraConfig,
    OptimConfig,
    OutputConfig,
    ParallelConfig,
    Section,
    SpeedConfig,
    TrainConfig,
    multiple_near,
)
from flatout.errors import many


class RunConfig(Section):
    """The whole of a run. `flatout config explain` prints it with the source of each value."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    """The network."""
    data: DataConfig = Field(default_factory=DataConfig)
    """The text and its tokens."""
    clean: CleanConfig = Field(default_factory=CleanConfig)
    """What is dropped of the text."""
    chat: ChatConfig = Field(default_factory=ChatConfig)
    """What a model is fine-tuned on."""
    lora: LoraConfig = Field(default_factory=LoraConfig)
    """Adapters on a frozen model."""
    optim: OptimConfig = Field(default_factory=OptimConfig)
    """The optimizer and its schedule."""
    train: TrainConfig
    """Length, batch and seed of the run."""
    speed: SpeedConfig = Field(default_factory=SpeedConfig)
    """Switches that may not change what is learned."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Validation, early stopping and samples."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """What is saved and when."""
    output: OutputConfig = Field(default_factory=OutputConfig)
    """Where the run writes."""
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """Several processes that train together."""

    @property
    def fine_tunes(self) -> bool:
        """Whether a model that has a shape learns from samples of a chat."""
        return self.chat.source is not None

    @property
    def data_kind(self) -> str:
        """What kind of data it names: a row of `KINDS` in resolve/opening.py, where it is opened."""
        if self.fine_tunes:
            return "samples"
        return "stream" if self.data.streaming else "text"

    @property
    def reads_text(self) -> bool:
        """Whether its data is text, which is prepared or streamed. Other kinds are taken as they are."""
        return self.data_kind in ("text", "stream")

    @property
    def documents_apart(self) -> bool:
        """Whether documents of plain text must not see each other. Samples of a chat never do, whatever this says."""
        return self.data.documents == "apart" and not self.fine_tunes

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.fine_tunes:
            return self._check_chat()
        if self.lora.rank:
            raise Conflict("lora.rank trains adapters, and there is nothing to fine-tune on", "set chat.source")
        self._check_minutes()
        self._check_data()
        context, batch = self.model.context, self.train.batch_tokens
        if batch % context:
            raise Conflict(
                f"train.batch_tokens {batch} is not a multiple of model.context {context}",
                f"set train.batch_tokens={multiple_near(batch, context)}, or model.context to a divisor of {batch}",
            )
        self._check_stages()
        sequences, count = windows_of_steps(self)[0], self.speed.accumulation
        if count is not None and sequences % count:
            raise Conflict(
                f"a batch of {many(sequences, 'sequence')} does not split into speed.accumulation {count}",
                f"set speed.accumulation to a divisor of {sequences}; the batch is train.batch_tokens / model.context",
            )
        if count is not None and self.speed.micro_batch is not None and count * self.speed.micro_batch != sequences:
            raise Conflict(
                f"speed.micro_batch {self.speed.micro_batch} times speed.accumulation {count} "
                f"is not the batch of {many(sequences, 'sequence')}",
                f"set speed.micro_batch={sequences // count}, or give only one of the two",
            )
        return self

    def _check_minutes(self) -> None:
        if self.train.minutes is None:
            return
        if self.optim.schedule != "wsd" or self.optim.decay_fraction > 0.95:
            raise Conflict(
                "train.minutes needs a rate that stays up until the clock says that it must fall",
                "set optim.schedule=wsd and optim.decay_fraction=0.6, or give the length in train.steps",
            )
        if self.train.staged:
            raise Conflict(
                "stages are shares of a length that is known, and train.minutes ends when the clock says so",
                "give the length in train.steps or train.tokens, or leave the stages out",
            )

    def _check_data(self) -> None:
        if self.data.streaming and (self.data.source is None or self.train.epochs is not None):
            raise Conflict(
                "data.streaming needs data.source, and a length in train.steps, train.tokens or train.minutes",
                "name files in data.source and set train.steps, or leave data.streaming out",
            )
        if self.data.streaming and (self.data.packing != "concat" or self.data.stride is not None):
            raise Conflict(
                "data.streaming goes with data.packing concat and no data.stride",
                "set data.packing=concat and data.stride=null, or data.streaming=false",
            )
        if self.data.streaming and self.data.documents != "joined":
            raise Conflict(
                "data.streaming does not tell where documents end",
                "set data.documents=joined, or data.streaming=false",
            )
        if self.data.documents != "joined" and self.model.dropout > 0 and self.model.attends:
            raise Conflict(
                "attention inside documents has no dropout, and model.dropout is set",
                "set model.dropout=0, or data.documents=joined",
            )
        if self.data.packing == "best_fit" and self.data.stride is not None:
            raise Conflict(
                "data.packing best_fit fits whole documents and takes no data.stride",
                "set data.stride=null, or data.packing=concat",
            )

    def _check_stages(self) -> None:
        train, context = self.train, self.model.context
        for batch in train.batch_stages:
            if batch % context:
                raise Conflict(
                    f"train.batch_stages has {batch}, which is not a multiple of model.context {context}",
                    f"set it to {multiple_near(batch, context)}",
                )
        for length in train.length_stages:
            if context % length:
                near = min((one for one in range(1, context + 1) if context % one == 0), key=lambda n: abs(n - length))
                raise Conflict(
                    f"train.length_stages has {length}, which does not divide model.context {context}",
                    f"set it to {near}, or to another divisor of {context}",
                )
        if len(set(train.batch_stages)) > 1 and self.speed.accumulation is not None:
            raise Conflict(
                "speed.accumulation is the micro-batches of a step, and steps of train.batch_stages differ in size",
                "set speed.micro_batch instead",
            )

    def _check_chat(self) -> Self:
        if self.lora.rank and self.optim.kind.matrices_only:
            raise Conflict(
                f"optim.optimizer {self.optim.optimizer} takes whole matrices, and adapters have none",
                "set optim.optimizer=adamw",
            )
        if self.model.init_from is None:
            raise Conflict(
                "chat.source is something to fine-tune on, and there is no model to start from",
                "set model.init_from to a folder with a model, or to a name on the hub",
            )
        if self.train.tokens is not None or self.train.minutes is not None:
            raise Conflict(
                "the length of a fine-tuning run is given in steps or epochs",
                "set train.epochs, such as train.epochs=3",
            )
        if self.model.dropout > 0:
            raise Conflict(
                "attention inside samples has no dropout, and model.dropout is set", "set lora.dropout instead"
            )
        if self.lora.rank and self.optim.ema:
            raise Conflict("optim.ema averages whole weights, and lora.rank trains adapters", "set optim.ema=0")
        if self.data.streaming:
            raise Conflict("data.streaming is for plain text", "leave data.streaming out, or chat.source")
        count, samples = self.speed.accumulation, self.chat.batch_samples
        if count is not None and samples % count:
            raise Conflict(
                f"a batch of {many(samples, 'sample')} does not split into speed.accumulation {count}",
                f"set speed.accumulation to a divisor of {samples}",
            )
        return self


def windows_of_steps(config: RunConfig) -> list[int]:
    """Windows of `model.context` tokens that a step reads, for each stage of a run on plain text."""
    context = config.model.context
    return [batch // context for batch, _, _ in config.train.stages(context)]


def at_last_stage(config: RunConfig) -> RunConfig:
    """The run without stages: as many tokens, all read in steps like the last ones, in the micro-batch of all stages.

    What measures a step, or judges one, takes this.
    """
    train = config.train
    if not train.staged:
        return config
    fields = ("batch_stages", "length_stages", "window_stages")
    changes: dict[str, Any] = {name: TrainConfig.model_fields[name].default for name in fields}
    changes["batch_tokens"] = last = (train.batch_stages or [train.batch_tokens])[-1]
    if train.steps is not None:
        changes["steps"] = max(1, round(train.steps * train.mean_batch / last))
    speed = config.speed.model_copy(update={"micro_batch": micro_batch_of(config)[0], "accumulation": None})
    return config.model_copy(update={"train": train.model_copy(update=changes), "speed": speed})


def micro_batch_of(config: RunConfig, ranks: int = 1) -> tuple[int, int]:
    """(sequences per micro-batch, micro-batches per step) of one of `ranks` processes.

    The global batch never changes: a `micro_batch` that does not divide a process's share of it is lowered to the next
    divisor. `accumulation` is of the whole batch, so that several processes keep the micro-batch that one has. Stages
    share one micro-batch, which divides the steps of all of them; its count is then that of the largest steps.
    """
    # Rows of a step: those of the batch, or as many as it has samples at most.
    chat = config.chat
    steps = [chat.batch_samples] if config.fine_tunes else windows_of_steps(config)
    shares, count = [-(-windows // ranks) for windows in steps], config.speed.accumulation
    share = math.gcd(*shares)
    most = min((config.speed.micro_batch if count is None else steps[0] // count) or share, share)
    size = next(size for size in range(most, 0, -1) if share % size == 0)
    return size, max(shares) // size
