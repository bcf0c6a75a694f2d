"""Every knob of a run, typed, with one sentence each. No torch here: a config error must answer at once.

`speed` holds the switches that may not change what is learned; everything that does change it lives in the other
sections. A value of null means "work it out"; what was worked out is shown in the run's first record.
"""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from flatout.config.yaml_loader import format_value

Positive = Annotated[int, Field(ge=1, le=2**40)]
Natural = Annotated[int, Field(ge=0, le=2**40)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Name = Annotated[str, Field(min_length=1)]
Switch = Literal["auto", "on", "off"]
Format = Literal["text", "jsonl", "json", "csv", "tsv", "parquet", "warc", "smiles", "tokens"]


class Conflict(ValueError):
    """Values that do not go together; `hint` says what would."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def _multiple_near(number: int, of: int) -> int:
    return max(1, round(number / of)) * of


class Section(BaseModel):
    """A strict, frozen group of fields: no unknown keys, no silent conversions, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# What `model.family` decides when a field is not written. The fields of gpt2 are fixed: with other values it would
# not be GPT-2, and its weights could not be exchanged with other libraries.
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt": {
        "norm": "rmsnorm",
        "positions": "rope",
        "mlp": "swiglu",
        "bias": False,
        "qk_norm": True,
        "residual_scale": None,
        "logit_cap": None,
        "tied": True,
        "kv_heads": None,
        "head_size": None,
        "mlp_width": None,
        "qkv_bias": None,
        "norm_eps": 1e-5,
        "rope_scaling": None,
    },
    "gpt2": {
        "norm": "layernorm",
        "positions": "learned",
        "mlp": "gelu",
        "bias": True,
        "qk_norm": False,
        "residual_scale": None,
        "logit_cap": None,
        "tied": True,
        "kv_heads": None,
        "head_size": None,
        "mlp_width": None,
        "qkv_bias": None,
        "norm_eps": 1e-5,
        "rope_scaling": None,
    },
}


class ModelConfig(Section):
    family: Literal["gpt", "gpt2"] = Field(
        default="gpt", description="`gpt2` is exactly GPT-2; `gpt` is the modern decoder."
    )
    layers: Annotated[int, Field(ge=1, le=1000)] = Field(default=6, description="Number of transformer blocks.")
    width: Annotated[int, Field(ge=1, le=65536)] = Field(default=384, description="Size of the residual stream.")
    heads: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=6, description="Query heads per block; must divide width unless head_size is given."
    )
    kv_heads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None,
        description="Key and value heads per block, fewer than heads for grouped-query attention; null means heads.",
    )
    head_size: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        default=None, description="Size of each head; null means width over heads."
    )
    pattern: Annotated[str, Field(pattern=r"^[AEW]{1,1000}$")] = Field(
        default="A",
        description="Kinds of blocks, a letter each, over and over: A full attention, W a sliding window, E states.",
    )
    window: Annotated[int, Field(ge=1, le=2**24)] = Field(
        default=1024, description="Tokens that attention of a W block reaches, the token itself included."
    )
    states: Annotated[int, Field(ge=1, le=65536)] = Field(
        default=128, description="Complex states of an E block, each with a decay and a frequency of its own."
    )
    state_heads: Annotated[int, Field(ge=1, le=65536)] = Field(
        default=8, description="Groups of an E block's states that share a resonance matrix and a modulation."
    )
    resonance: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        default=0.0, description="How much states of a head are mixed with each other as they are read; 0 not at all."
    )
    modulation: Annotated[float, Field(ge=0.0, le=10.0)] = Field(
        default=0.0, description="How far the input moves the logarithm of a head's rates of decay; 0 fixes them."
    )
    convolution: Annotated[int, Field(ge=0, le=256)] = Field(
        default=0, description="Positions of a causal filter before the states, the token's own included; 0 is none."
    )
    scales: list[Annotated[int, Field(ge=1, le=1024)]] = Field(
        default=[],
        description="Means over so many last tokens, as [1, 4], each for an equal share of the states; [] is none.",
    )
    energy: Annotated[float, Field(ge=0.0, le=1000.0)] = Field(
        default=0.0, description="Weight of the mean squared size of all eigenvalues in the training loss."
    )
    context: Annotated[int, Field(ge=1, le=2**24)] = Field(default=256, description="Tokens the model sees at once.")
    vocab: Annotated[int, Field(ge=1, le=2**24)] | None = Field(
        default=None, description="Number of token ids; null takes the tokenizer's."
    )
    norm: Literal["rmsnorm", "layernorm"] = Field(
        default="rmsnorm", description="Normalisation before attention and MLP."
    )
    norm_eps: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=1e-5, description="What norms add to the mean square or variance before the root."
    )
    positions: Literal["rope", "learned"] = Field(
        default="rope", description="How the model knows where a token stands."
    )
    rope_base: Annotated[float, Field(gt=1.0)] = Field(default=10000.0, description="Base of the rotary frequencies.")
    rope_scaling: Literal["linear", "llama3"] | None = Field(
        default=None,
        description="Rotary frequencies stretched for a longer context: all alike, or only the slow ones as Llama 3.1.",
    )
    rope_factor: Annotated[float, Field(ge=1.0, le=1e6)] = Field(
        default=8.0, description="By how much rope_scaling slows rotary frequencies down."
    )
    rope_low: Annotated[float, Field(gt=0.0, le=1e6)] = Field(
        default=1.0, description="llama3 slows frequencies of fewer turns in rope_original_context by the whole factor."
    )
    rope_high: Annotated[float, Field(gt=0.0, le=1e6)] = Field(
        default=4.0, description="llama3 leaves frequencies of more turns in rope_original_context as they are."
    )
    rope_original_context: Annotated[int, Field(ge=1, le=2**24)] = Field(
        default=8192, description="Context that llama3's model had before it was stretched."
    )
    mlp: Literal["swiglu", "relu2", "gelu"] = Field(
        default="swiglu", description="Feed-forward kind; gelu is the tanh form."
    )
    mlp_width: Annotated[int, Field(ge=1, le=2**20)] | None = Field(
        default=None,
        description="Hidden size of the MLP; null means 4 times width, two thirds of that for swiglu's three matrices.",
    )
    bias: bool = Field(default=False, description="Bias vectors in linear layers and LayerNorm.")
    qkv_bias: bool | None = Field(
        default=None, description="Bias of the projection to queries, keys and values; null follows bias."
    )
    qk_norm: bool = Field(default=True, description="RMS-normalise queries and keys per head before the product.")
    residual_scale: Annotated[float, Field(gt=0.0, le=10.0)] | None = Field(
        default=None, description="Initial value of learned scales on both residual branches; null has no scales."
    )
    logit_cap: Annotated[float, Field(gt=0.0, le=1e6)] | None = Field(
        default=None, description="Bends logits to stay below this: cap·tanh(logits / cap); null leaves them alone."
    )
    tied: bool = Field(default=True, description="Share one matrix between token embedding and output head.")
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(default=0.0, description="Dropout share in training.")
    init_from: str | None = Field(
        default=None,
        description="What to start from: a run of ours, or a model's folder or hub name (GPT-2; to fine-tune any).",
    )
    ignore_auto_map: bool = Field(
        default=False,
        description="Take a model whose files name code of its own (auto_map) without that code, which is never run.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_family(cls, values: Any) -> Any:
        family = values.get("family", "gpt") if isinstance(values, dict) else None
        return {**FAMILY_DEFAULTS[family], **values} if family in ("gpt", "gpt2") else values

    @property
    def kinds(self) -> str:
        """The letter of every block."""
        return "".join(self.pattern[index % len(self.pattern)] for index in range(self.layers))

    @property
    def attends(self) -> bool:
        """Whether any block has attention."""
        return set(self.kinds) != {"E"}

    @property
    def windows(self) -> tuple[int | None, ...]:
        """How far attention of each block that has some reaches; None is everything before."""
        return tuple(self.window if kind == "W" else None for kind in self.kinds if kind != "E")

    @property
    def size(self) -> int:
        """Values in one head."""
        return self.head_size or self.width // self.heads

    @property
    def queries(self) -> int:
        """Values in the queries of one token, over all heads: what attention hands to its output projection."""
        return self.heads * self.size

    @property
    def has_qkv_bias(self) -> bool:
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.width % self.heads and self.head_size is None:
            near = _multiple_near(self.width, self.heads * (2 if self.positions == "rope" else 1))
            raise Conflict(
                f"width {self.width} is not a multiple of heads {self.heads}",
                f"set model.width={near}, or model.heads to a divisor of {self.width}",
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise Conflict(
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}",
                f"set model.kv_heads to a divisor of {self.heads}, or to null for as many as heads",
            )
        if set(self.pattern) != {"A"} and self.family == "gpt2":
            raise Conflict(f"pattern is {self.pattern}, and GPT-2 has full attention only", "set model.family=gpt")
        if "W" in self.pattern and self.dropout > 0:
            raise Conflict("attention within a window has no dropout", "set model.dropout=0, or model.pattern=A")
        if "E" in self.pattern and self.states % self.state_heads:
            raise Conflict(
                f"states {self.states} is not a multiple of state_heads {self.state_heads}",
                f"set model.states={_multiple_near(self.states, self.state_heads)}, or model.state_heads to a divisor",
            )
        if "E" in self.pattern and self.scales and self.states % len(self.scales):
            raise Conflict(
                f"states {self.states} do not divide into {len(self.scales)} scales",
                f"set model.states={_multiple_near(self.states, math.lcm(len(self.scales), self.state_heads))}, "
                "or other model.scales",
            )
        if "E" in self.pattern and self.scales and max(self.scales) >= self.context:
            raise Conflict(
                f"scales up to {max(self.scales)} reach beyond the context of {self.context}",
                "set model.scales to numbers of tokens well below model.context",
            )
        if self.positions == "rope" and self.head_size is not None and self.head_size % 2:
            raise Conflict(
                f"rotary positions need an even head_size, not {self.head_size}",
                f"set model.head_size={self.head_size + 1}, or model.positions=learned",
            )
        if self.positions == "rope" and self.size % 2:
            raise Conflict(
                f"rotary positions need an even head size (width over heads), not {self.width // self.heads}",
                f"set model.width={_multiple_near(self.width, 2 * self.heads)}, or model.positions=learned",
            )
        if self.rope_scaling is not None and self.positions != "rope":
            raise Conflict(
                f"rope_scaling {self.rope_scaling} needs rotary positions, not {self.positions} ones",
                "set model.positions=rope, or leave model.rope_scaling out",
            )
        if self.rope_scaling == "llama3" and self.rope_low >= self.rope_high:
            raise Conflict(
                f"rope_low {self.rope_low} is not below rope_high {self.rope_high}",
                "set model.rope_low lower or model.rope_high higher; Llama 3.1 has 1.0 and 4.0",
            )
        if self.family == "gpt2":
            for name, fixed in FAMILY_DEFAULTS["gpt2"].items():
                if getattr(self, name) != fixed:
                    raise Conflict(
                        f"family gpt2 fixes {name} to {format_value(fixed)}, not {format_value(getattr(self, name))}",
                        f"leave model.{name} out, or set model.family=gpt",
                    )
        return self


class SourceConfig(Section):
    """One of several sources of a mixture."""

    path: Name = Field(description="What `data.source` takes as a single text.")
    weight: Annotated[float, Field(gt=0.0, le=1000.0)] = Field(
        default=1.0,
        description="How often each training document is taken: 2 is twice, 0.25 a quarter of them, chosen by hash.",
    )
    field: Name | None = Field(default=None, description="Instead of data.field for this source.")
    format: Format | None = Field(default=None, description="Instead of data.format for this source.")
    document_start: Name | None = Field(default=None, description="Instead of data.document_start for this source.")


class DataConfig(Section):
    source: str | Annotated[list[Name | SourceConfig], Field(min_length=1)] | None = Field(
        default="shakespeare",
        description="Raw text: `shakespeare` (shipped), a file, a folder, `hf:NAME`, `-` (standard input), or a list.",
    )
    val_source: str | None = Field(
        default=None, description="Source of the validation text; null takes val_fraction of data.source."
    )
    folder: Name | None = Field(
        default=None,
        description="Folder of prepared token shards; null means data/SOURCE-TOKENIZER, filled on first use.",
    )
    tokenizer: str = Field(
        default="char", description="`char`, `bytes`, `gpt2`, or the path of a Hugging Face tokenizer.json."
    )
    unknown_characters: Literal["error", "drop", "replace"] = Field(
        default="error", description="What tokenizer `char` does with a character it has never seen."
    )
    format: Format | None = Field(default=None, description="Format of the source; null tells it by the file's name.")
    field: Name = Field(
        default="text", description="Field of a row that holds its text, nested as in `a.b`; `*` takes every element."
    )
    document_start: Name | None = Field(
        default=None,
        description="In text files, each line that begins with this, after spaces, begins a document; null has one.",
    )
    invalid_utf8: Literal["strict", "replace", "skip"] = Field(
        default="strict",
        description="Documents with bytes that are not UTF-8: list and leave out, repair with U+FFFD, or drop.",
    )
    split: Literal["contiguous", "document"] = Field(
        default="contiguous", description="Take validation from the end of the text, or choose whole documents by hash."
    )
    val_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        default=0.1, description="Share of the text kept for validation."
    )
    shard_tokens: Annotated[int, Field(ge=1, le=2**40)] = Field(
        default=100_000_000, description="Tokens in a shard file."
    )
    packing: Literal["concat", "best_fit"] = Field(
        default="concat",
        description="Windows over the joined documents, or whole documents fitted into windows with little padding.",
    )
    documents: Literal["joined", "apart"] = Field(
        default="joined",
        description="Whether a token sees all of its window before it, or its own document alone, labels included.",
    )
    streaming: bool = Field(
        default=False, description="Train while reading data.source, without preparing shards first."
    )
    stride: Positive | None = Field(
        default=None, description="Tokens between window starts; null means the context, so no overlap."
    )


class CleanConfig(Section):
    min_characters: Natural = Field(default=0, description="Drop documents shorter than this; 0 keeps them.")
    max_characters: Annotated[int, Field(ge=1, le=2**22)] | None = Field(
        default=None, description="Drop documents longer than this."
    )
    exact_duplicates: bool = Field(default=False, description="Keep only the first of documents with the same text.")
    near_duplicates: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        default=None, description="Drop documents this similar to an earlier one (Jaccard of word 5-grams, by MinHash)."
    )
    languages: Annotated[list[Annotated[str, Field(pattern=r"^[a-z]{2,3}$")]], Field(min_length=1)] | None = Field(
        default=None, description="Keep only documents in these languages, such as [en, de]."
    )
    repetition: bool = Field(default=False, description="Drop documents that repeat lines, paragraphs or word n-grams.")
    quality: bool = Field(
        default=False, description="Drop documents whose word lengths, symbols or lines are not those of prose."
    )
    blocked_urls: str | None = Field(
        default=None, description="File of domains, URLs or words, one a line, whose crawl pages are dropped."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_characters is not None and self.min_characters > self.max_characters:
            raise Conflict(
                f"min_characters {self.min_characters} is above max_characters {self.max_characters}",
                f"set clean.min_characters to at most {self.max_characters}, or clean.max_characters higher",
            )
        return self


class ChatConfig(Section):
    source: str | None = Field(
        default=None,
        description="File or folder of conversations or instructions to fine-tune on; null trains on plain text.",
    )
    val_source: str | None = Field(
        default=None, description="File or folder to evaluate on; null holds out a share of the rows."
    )
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt-completion", "text"] = Field(
        default="auto", description="How a row tells a conversation; auto looks at the first rows."
    )
    fields: list[Name] = Field(
        default=[], description="Columns under other names, such as [prompt=question, completion=answer]."
    )
    template: Name = Field(
        default="model", description="Chat template: the model's own, chatml, plain, none, or a file of Jinja."
    )
    train_on: Literal["assistant", "last", "all"] = Field(
        default="assistant", description="What has a label: assistant turns, the last of them, or every token."
    )
    max_tokens: Positive | None = Field(
        default=None, description="Most tokens of a sample; null means model.context, which they never exceed."
    )
    too_long: Literal["truncate", "drop"] = Field(
        default="truncate", description="What happens to samples with more tokens than that; both are counted."
    )
    val_fraction: Share = Field(default=0.05, description="Share of the rows that is held out for evaluation.")
    packing: bool = Field(
        default=True, description="Several samples in a row, none of which sees another; false pads each to a row."
    )
    batch_samples: Positive = Field(default=8, description="Samples per optimizer step.")

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
    rank: Annotated[int, Field(ge=0, le=4096)] = Field(
        default=0, description="Rank of the adapters that are trained beside frozen weights; 0 trains the weights."
    )
    alpha: Annotated[float, Field(gt=0.0, le=1e6)] | None = Field(
        default=None, description="Adapters count alpha / rank times; null is twice the rank."
    )
    targets: list[Name] = Field(
        default=["all-linear"], description="Projections with an adapter, such as [q_proj, v_proj]; all-linear is all."
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.0, description="Dropout share on what adapters read, in training."
    )
    rank_stabilised: bool = Field(default=False, description="Scale by alpha / sqrt(rank) instead of alpha / rank.")
    dora: bool = Field(default=False, description="Learn the length of every row of a weight apart from its direction.")
    init_from: Name | None = Field(
        default=None, description="Adapter to go on from: a folder that PEFT wrote, or a run of ours; null begins anew."
    )
    quantize: Literal["none", "nf4"] = Field(
        default="none",
        description="Hold the frozen linear layers in 4 bits (QLoRA); needs bitsandbytes: less memory, slower steps.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.quantize != "none" and self.rank == 0:
            raise Conflict("weights in 4 bits cannot be trained, only adapters beside them", "set rank, such as 16")
        return self


class OptimConfig(Section):
    learning_rate: Annotated[float, Field(gt=0.0, le=100.0)] = Field(default=1e-3, description="Peak learning rate.")
    schedule: Literal["cosine", "linear", "wsd", "one-cycle", "constant"] = Field(
        default="cosine", description="Shape of the learning rate after warm-up; wsd is warm-up, stable, decay."
    )
    warmup_steps: Natural = Field(
        default=100, description="Updates over which the rate rises to its peak; 0 starts at the peak."
    )
    min_ratio: Share = Field(default=0.1, description="Final learning rate as a share of the peak.")
    decay_fraction: Share = Field(default=0.2, description="Share of the run that wsd spends decaying at its end.")
    weight_decay: Annotated[float, Field(ge=0.0, le=10.0)] = Field(
        default=0.1, description="Decoupled weight decay, on matrices only: never on biases, norms or scales."
    )
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(default=0.9, description="AdamW's memory of the gradient.")
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.95, description="AdamW's memory of the squared gradient."
    )
    eps: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=1e-8, description="AdamW's guard against division by zero."
    )
    clip: Annotated[float, Field(ge=0.0)] = Field(
        default=1.0, description="Largest gradient norm, larger ones are scaled down; 0 never clips."
    )


class TrainConfig(Section):
    steps: Positive | None = Field(
        default=None, description="Length of the run in optimizer steps; give one of steps, epochs, tokens."
    )
    epochs: Annotated[float, Field(gt=0.0, le=1e6)] | None = Field(
        default=None, description="Length of the run in passes over the windows."
    )
    tokens: Positive | None = Field(
        default=None, description="Length of the run in training tokens, rounded up to whole steps."
    )
    batch_tokens: Positive = Field(
        default=16384, description="Tokens per optimizer step over all micro-batches and devices."
    )
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.0, description="Label smoothing in training; evaluation never smooths."
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=1337, description="Seed of initial weights, data order and dropout."
    )
    deterministic: bool = Field(
        default=False, description="Use only kernels whose result repeats bit for bit, at some cost in speed."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in ("steps", "epochs", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            raise Conflict(
                f"give exactly one of steps, epochs, tokens, not {' and '.join(given) or 'none'}",
                "keep one of train.steps, train.epochs and train.tokens, such as train.steps=1000",
            )
        return self


class SpeedConfig(Section):
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda|cuda:\d{1,3})$")] = Field(
        default="auto", description="auto, cpu, mps, cuda or cuda:N; auto takes the fastest there is."
    )
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = Field(
        default="auto",
        description="Arithmetic of matrix products over fp32 weights; auto is bf16 where the GPU has it.",
    )
    residual: Literal["auto", "fp32", "bf16"] = Field(
        default="auto",
        description="Storage of the residual stream between blocks; auto is bf16 beside bf16 products in our kernels.",
    )
    fp8: list[Literal["qkv", "out", "up", "down", "head"]] = Field(
        default=[], description="Linear layers whose products run in 8-bit floats, such as [up, down]; needs Triton."
    )
    kernels: Literal["auto", "torch", "triton"] = Field(
        default="auto",
        description="Norms, activations and residual adds: torch's operations or our Triton kernels; auto on CUDA.",
    )
    products: Literal["auto", "torch", "tuned"] = Field(
        default="auto",
        description="Matrix products by torch's choice of kernel, or by the fastest tried; auto beside our kernels.",
    )
    attention: Literal[
        "auto", "sdpa", "flash", "cudnn", "efficient", "flex", "fa3", "fa4", "cudnn+fa4", "reference"
    ] = Field(
        default="auto",
        description="Attention kernel; sdpa lets torch pick, auto is cudnn from Hopper on (with fa4, if installed).",
    )
    scan: Literal["auto", "reference", "chunked", "triton"] = Field(
        default="auto",
        description="States of E blocks: token by token, in chunks, or in our Triton kernels; auto is those on CUDA.",
    )
    fused_qkv: bool = Field(
        default=True, description="Queries, keys and values in one matrix product instead of three."
    )
    compile: Literal["auto", "off", "default", "reduce-overhead", "max-autotune", "regional"] = Field(
        default="auto",
        description="torch.compile and its mode; regional compiles one block for all; auto only where it is faster.",
    )
    cuda_graphs: Switch = Field(
        default="auto",
        description="Replay each micro-batch as one CUDA graph; auto where launching kernels would be the bottleneck.",
    )
    loss: Literal["auto", "plain", "chunked", "fused"] = Field(
        default="auto",
        description="Head and loss: all logits at once, chunks computed again in backward, or differentiated at once.",
    )
    loss_chunk: Annotated[int, Field(ge=16, le=2**20)] = Field(
        default=8192, description="Tokens whose logits exist at once in the chunked and fused losses."
    )
    fused_optimizer: Switch = Field(
        default="auto", description="One kernel for the AdamW update; auto where torch has it."
    )
    optimizer_state: Literal["fp32", "8bit"] = Field(
        default="fp32", description="Storage of AdamW's moments; 8bit quantises them in blocks of 256."
    )
    optimizer_offload: bool = Field(
        default=False, description="Keep AdamW's moments in the host's memory and update there."
    )
    pad_vocab: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=64,
        description="Round the vocabulary up to this multiple inside the head's product only; 1 is off.",
    )
    micro_batch: Positive | None = Field(
        default=None,
        description="Most sequences at once, rounded down to a divisor of the batch; null is the whole batch.",
    )
    accumulation: Positive | None = Field(
        default=None,
        description="Micro-batches per optimizer step; null follows from batch_tokens, context and micro_batch.",
    )
    checkpointing: Literal["none", "selective", "full"] = Field(
        default="none",
        description="What backward recomputes instead of keeping: nothing, the cheap parts of a block, or all of it.",
    )
    activation_offload: bool = Field(
        default=False, description="Keep what backward needs in the host's pinned memory instead of the GPU's."
    )
    loader: Literal["auto", "host", "device"] = Field(
        default="auto",
        description="Where tokens live; auto is the device for corpora up to 2 GiB on CUDA, else the host.",
    )
    workers: Annotated[int, Field(ge=0, le=64)] = Field(
        default=1,
        description="Threads that read batches ahead on the host; 0 reads in the loop, and the batches are the same.",
    )
    expandable_segments: Switch = Field(
        default="auto", description="Let torch grow its memory blocks instead of fragmenting; auto on CUDA."
    )
    memory_limit: Annotated[float, Field(gt=0.0, le=10000.0)] | None = Field(
        default=None, description="GiB of the GPU that this run may use, to emulate a smaller card; null is all of it."
    )

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


class EvalConfig(Section):
    every: Natural = Field(default=250, description="Steps between evaluations; 0 evaluates only at the end.")
    epoch_end: bool = Field(default=False, description="Evaluate at the end of every epoch as well.")
    tokens: Positive | None = Field(
        default=None, description="Validation tokens to use, from the start; null uses all."
    )
    patience: Natural = Field(
        default=0, description="Stop after this many evaluations without improvement; 0 never stops early."
    )
    min_delta: Annotated[float, Field(ge=0.0)] = Field(
        default=0.0, description="Smallest fall in loss that counts as improvement."
    )
    sample_every: Natural = Field(default=0, description="Steps between printed samples; 0 samples only at the end.")
    sample_tokens: Natural = Field(default=200, description="Length of each sample in tokens; 0 never samples.")
    sample_prompt: str = Field(default="\n", description="Text the samples continue.")


class CheckpointConfig(Section):
    every: Natural = Field(
        default=500, description="Steps between checkpoints; 0 saves only at the end and when interrupted."
    )
    keep: Annotated[int, Field(ge=1, le=10000)] = Field(default=2, description="Newest checkpoints to keep.")
    best: bool = Field(default=True, description="Also keep the checkpoint with the lowest validation loss.")


class OutputConfig(Section):
    folder: Name | None = Field(
        default=None, description="Run folder; null means runs/NAME, numbered when that is taken."
    )
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = Field(
        default="run", description="Name of the run, for its folder."
    )
    log_every: Positive = Field(
        default=10, description="Steps between lines on the terminal; metrics.jsonl gets every step."
    )
    trackers: list[Literal["tensorboard", "trackio", "wandb"]] = Field(
        default=[], description="Where records go besides metrics.jsonl; each needs its package."
    )
    plots: bool = Field(default=True, description="Draw plots/*.png in the run folder when `flatout train` ends.")


class RunConfig(Section):
    """The whole of a run. `flatout config explain` prints it with the source of each value."""

    model: ModelConfig = Field(default_factory=lambda: ModelConfig(), description="The network.")
    data: DataConfig = Field(default_factory=lambda: DataConfig(), description="The text and its tokens.")
    clean: CleanConfig = Field(default_factory=lambda: CleanConfig(), description="What is dropped of the text.")
    chat: ChatConfig = Field(default_factory=lambda: ChatConfig(), description="What a model is fine-tuned on.")
    lora: LoraConfig = Field(default_factory=lambda: LoraConfig(), description="Adapters on a frozen model.")
    optim: OptimConfig = Field(default_factory=lambda: OptimConfig(), description="The optimizer and its schedule.")
    train: TrainConfig = Field(description="Length, batch and seed of the run.")
    speed: SpeedConfig = Field(
        default_factory=lambda: SpeedConfig(), description="Switches that may not change what is learned."
    )
    eval: EvalConfig = Field(
        default_factory=lambda: EvalConfig(), description="Validation, early stopping and samples."
    )
    checkpoint: CheckpointConfig = Field(
        default_factory=lambda: CheckpointConfig(), description="What is saved and when."
    )
    output: OutputConfig = Field(default_factory=lambda: OutputConfig(), description="Where the run writes.")

    @property
    def documents_apart(self) -> bool:
        """Whether documents of plain text must not see each other. Samples of a chat never do, whatever this says."""
        return self.data.documents == "apart" and self.chat.source is None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.chat.source is not None:
            return self._check_chat()
        if self.lora.rank:
            raise Conflict("lora.rank trains adapters, and there is nothing to fine-tune on", "set chat.source")
        context, batch = self.model.context, self.train.batch_tokens
        if self.data.streaming and (self.data.source is None or self.train.epochs is not None):
            raise Conflict(
                "data.streaming needs data.source, and a length in train.steps or train.tokens",
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
        if batch % context:
            raise Conflict(
                f"train.batch_tokens {batch} is not a multiple of model.context {context}",
                f"set train.batch_tokens={_multiple_near(batch, context)}, or model.context to a divisor of {batch}",
            )
        sequences, count = batch // context, self.speed.accumulation
        if count is not None and sequences % count:
            raise Conflict(
                f"a batch of {sequences} sequences does not split into speed.accumulation {count}",
                f"set speed.accumulation to a divisor of {sequences}; the batch is train.batch_tokens / model.context",
            )
        if count is not None and self.speed.micro_batch is not None and count * self.speed.micro_batch != sequences:
            raise Conflict(
                f"speed.micro_batch {self.speed.micro_batch} times speed.accumulation {count} "
                f"is not the batch of {sequences} sequences",
                f"set speed.micro_batch={sequences // count}, or give only one of the two",
            )
        return self

    def _check_chat(self) -> Self:
        if self.model.init_from is None:
            raise Conflict(
                "chat.source is something to fine-tune on, and there is no model to start from",
                "set model.init_from to a folder with a model, or to a name on the hub",
            )
        if self.train.tokens is not None:
            raise Conflict(
                "the length of a fine-tuning run is told in steps or epochs", "set train.epochs, such as train.epochs=3"
            )
        if self.model.dropout > 0:
            raise Conflict(
                "attention inside samples has no dropout, and model.dropout is set", "set lora.dropout instead"
            )
        if self.data.streaming:
            raise Conflict("data.streaming is for plain text", "leave data.streaming out, or chat.source")
        count, samples = self.speed.accumulation, self.chat.batch_samples
        if count is not None and samples % count:
            raise Conflict(
                f"a batch of {samples} samples does not split into speed.accumulation {count}",
                f"set speed.accumulation to a divisor of {samples}",
            )
        return self


def _sequences(config: RunConfig) -> int:
    """Rows of a step: those of the batch, or as many as it has samples at most."""
    chat = config.chat
    return chat.batch_samples if chat.source is not None else config.train.batch_tokens // config.model.context


def micro_batch_of(config: RunConfig) -> tuple[int, int]:
    """(sequences per micro-batch, micro-batches per step).

    The global batch never changes: a `micro_batch` that does not divide it is lowered to the next divisor.
    """
    sequences = _sequences(config)
    if config.speed.accumulation is not None:
        return sequences // config.speed.accumulation, config.speed.accumulation
    most = min(config.speed.micro_batch or sequences, sequences)
    size = next(size for size in range(most, 0, -1) if sequences % size == 0)
    return size, sequences // size
