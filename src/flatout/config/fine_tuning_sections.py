"""`chat` and `lora`: what a model is fine-tuned on, and adapters."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from flatout.config.section import Conflict, Name, Positive, Section, Share


class ChatConfig(Section):
    source: str | None = None
    """File or folder of conversations or instructions to fine-tune on; null trains on plain text."""
    val_source: str | None = None
    """File or folder to evaluate on; null holds out a share of the rows."""
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt-completion", "text"] = "auto"
    """How a row tells a conversation; auto looks at the first rows."""
    fields: list[Name] = Field(default=[])
    """Columns under other names, such as [prompt=question, completion=answer]."""
    template: Name = "model"
    """Chat template: the model's own, chatml, plain, none, or a file of Jinja."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """What has a label: assistant turns, the last of them, or every token."""
    max_tokens: Positive | None = None
    """Most tokens of a sample; null means model.context, which they never exceed."""
    too_long: Literal["truncate", "drop"] = "truncate"
    """What happens to samples with more tokens than that; both are counted."""
    val_fraction: Share = 0.05
    """Share of the rows that is held out for evaluation."""
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


class LoraConfig(Section):
    rank: Annotated[int, Field(ge=0, le=4096)] = 0
    """Rank of the adapters that are trained beside frozen weights; 0 trains the weights."""
    alpha: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Adapters count alpha / rank times; null is twice the rank."""
    targets: list[Name] = Field(default=["all-linear"])
    """Projections with an adapter, such as [q_proj, v_proj]; all-linear is all."""
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
        return self
