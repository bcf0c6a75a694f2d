"""`model`: the network, and what its family decides."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from flatout.config.sections import Conflict, Section, multiple_near
from flatout.config.yaml_loader import format_value

# What `model.family` decides when a field is not written: this for gpt2, the defaults of the schema for gpt. The fields
# of gpt2 are fixed: with other values it would not be GPT-2, and other libraries could not take its weights.
GPT2: dict[str, Any] = {
    "norm": "layernorm",
    "norm_place": "before",
    "positions": "learned",
    "mlp": "gelu",
    "bias": True,
    "qk_norm": False,
    "qk_norm_whole": False,
    "fused_projections": False,
    "embedding_norm": False,
    "residual_scale": None,
    "logit_cap": None,
    "attention_cap": None,
    "score_divisor": None,
    "embedding_scale": None,
    "tied": True,
    "kv_heads": None,
    "head_size": None,
    "mlp_width": None,
    "qkv_bias": None,
    "norm_eps": 1e-5,
    "rope_scaling": None,
    "first_mix": False,
    "value_tables": 0,
    "head_gate": False,
    "bigram_rows": 0,
}

# The values that our kernels know. A model with others uses torch's operations, in training and in decoding.
_IN_KERNELS: dict[str, tuple[Any, ...]] = {
    "norm": ("rmsnorm", "layernorm", "plain-rmsnorm"),
    "norm_place": ("before",),
    "rope_share": (1.0,),
    "mlp": ("swiglu", "relu2", "gelu"),
    "qk_norm_whole": (False,),
    "score_divisor": (None,),
    "attention_cap": (None,),
}

STATE_HEADS = 8  # of an E block, or as many as divide its states


class ModelConfig(Section):
    family: Literal["gpt", "gpt2"] = "gpt"
    """`gpt2` is exactly GPT-2; `gpt` is the modern decoder."""
    layers: Annotated[int, Field(ge=1, le=1000)] = 6
    """Number of transformer blocks."""
    width: Annotated[int, Field(ge=1, le=65536)] = 384
    """Size of the residual stream."""
    heads: Annotated[int, Field(ge=1, le=1024)] = 6
    """Query heads per block; must divide width unless head_size is given."""
    kv_heads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Key and value heads per block, fewer than heads for grouped-query attention; null means heads."""
    head_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Size of each head; null means width over heads."""
    pattern: Annotated[str, Field(pattern=r"^[AENW]{1,1000}$")] = "A"
    """Kinds of blocks, over and over: A full attention, N the same without positions, W a sliding window, E states."""
    window: Annotated[int, Field(ge=1, le=2**24)] = 1024
    """Tokens that attention of a W block reaches, the token itself included."""
    states: Annotated[int, Field(ge=1, le=65536)] = 128
    """Complex states of an E block, each with a decay and a frequency of its own."""
    context: Annotated[int, Field(ge=1, le=2**24)] = 256
    """Tokens the model sees at once."""
    vocab: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Number of token ids; null takes the tokenizer's."""
    norm: Literal["rmsnorm", "layernorm", "plain-rmsnorm", "offset-rmsnorm"] = "rmsnorm"
    """Kind of norms; plain-rmsnorm has no weights, offset-rmsnorm multiplies by 1 + weight, in queries and keys too."""
    norm_place: Literal["before", "after", "both"] = "before"
    """Norms of attention and MLP: of what goes in, of what comes out, or both."""
    norm_eps: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-5
    """What norms add to the mean square or variance before the root."""
    embedding_norm: bool = False
    """RMS norm without weights right after the embedding."""
    embedding_scale: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Multiplies the embedding, after its norm; null leaves it alone."""
    zero_init: bool = False
    """Start with zeros where attention and MLP join the residual stream, and with large embeddings."""
    positions: Literal["rope", "learned"] = "rope"
    """How the model knows where a token stands."""
    rope_base: Annotated[float, Field(gt=1.0)] = 10000.0
    """Base of the rotary frequencies."""
    rope_local_base: Annotated[float, Field(gt=1.0)] | None = None
    """Base of the rotary frequencies in W blocks, which are not scaled then; null: those of all other blocks."""
    rope_share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of a head's channels that rotary positions turn, the first ones; the others stay as they are."""
    rope_scaling: Literal["linear", "llama3", "longrope"] | None = None
    """Rotary frequencies stretched for a longer context: all alike, the slow ones as Llama 3.1, or by rope_factors."""
    rope_factor: Annotated[float, Field(ge=1.0, le=1e6)] = 8.0
    """By how much rope_scaling slows rotary frequencies down."""
    rope_low: Annotated[float, Field(gt=0.0, le=1e6)] = 1.0
    """llama3 slows frequencies of fewer turns in rope_original_context by the whole factor."""
    rope_high: Annotated[float, Field(gt=0.0, le=1e6)] = 4.0
    """llama3 leaves frequencies of more turns in rope_original_context as they are."""
    rope_original_context: Annotated[int, Field(ge=1, le=2**24)] = 8192
    """Context that llama3's model had before it was stretched."""
    rope_factors: list[Annotated[float, Field(gt=0.0, le=1e6)]] = Field(default=[])
    """By how much longrope slows each rotary frequency down."""
    rope_gain: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0
    """What longrope multiplies turned channels with."""
    mlp: Literal["swiglu", "geglu", "relu2", "gelu"] = "swiglu"
    """Feed-forward kind; gelu is the tanh form, and geglu has it in the place of swiglu's silu."""
    mlp_width: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Hidden size of the MLP; null means 4 times width, two thirds of that for three matrices (swiglu, geglu)."""
    bias: bool = False
    """Bias vectors in linear layers and LayerNorm."""
    qkv_bias: bool | None = None
    """Bias of the projection to queries, keys and values; null follows bias."""
    qk_norm: bool | Annotated[float, Field(gt=0.0, le=100.0)] = True
    """RMS-normalise queries and keys per head before the product; a number multiplies both after that."""
    qk_norm_whole: bool = False
    """Norms of queries and keys go over all heads together."""
    score_divisor: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Products of queries and keys are divided by the root of this; null means the size of a head."""
    attention_cap: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Bends scores of attention to stay below this: cap·tanh(scores / cap); null leaves them alone."""
    fused_projections: bool = False
    """One adapter for queries, keys and values together, and one for the two halves of swiglu, as Phi-3 has them."""
    residual_scale: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    """Initial value of learned scales on both residual branches; null has no scales."""
    logit_cap: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Bends logits to stay below this: cap·tanh(logits / cap); null leaves them alone."""
    first_mix: bool = False
    """Begin every block with a·x + b·x0, where x0 is the first residual stream; a and b are learned, from 1 and 0.1."""
    value_tables: Annotated[int, Field(ge=0, le=500)] = 0
    """Tables of a row per token id, added to attention's values; table i serves blocks i and layers - tables + i."""
    head_gate: bool = False
    """Multiply each head's attention output by a gate between 0 and 2 that reads 12 channels of the block's input."""
    bigram_rows: Annotated[int, Field(ge=0, le=2**28)] = 0
    """Rows of a table that is added to the embedding, looked up by a hash of a token and the one before; 0 has none."""
    tied: bool = True
    """Share one matrix between token embedding and output head."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout share in training."""
    init_from: str | None = None
    """What to start from: a run of ours, or a model's folder, GGUF file or hub name (GPT-2; to fine-tune any)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_family(cls, values: Any) -> Any:
        return {**GPT2, **values} if isinstance(values, dict) and values.get("family") == "gpt2" else values

    def __hash__(self) -> int:
        """For caches of what follows from a model's shape."""
        return hash(repr(self))

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
    def state_heads(self) -> int:
        """Groups of an E block's states, each with horizons from short to long."""
        return math.gcd(self.states, STATE_HEADS)

    @property
    def size(self) -> int:
        """Values in one head."""
        return self.head_size or self.width // self.heads

    @property
    def gated_mlp(self) -> bool:
        """Whether the MLP's first product makes a gate beside each value."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def turned(self) -> int:
        """Channels of a head that rotary positions turn."""
        return int(self.size * self.rope_share)

    @property
    def qk_scale(self) -> float:
        """What multiplies queries, and keys, after their norm."""
        return 1.0 if isinstance(self.qk_norm, bool) else self.qk_norm

    @property
    def norm_weights(self) -> bool:
        """Whether norms have learned weights, those of queries and keys included."""
        return self.norm != "plain-rmsnorm"

    @property
    def beyond_kernels(self) -> tuple[str, ...]:
        """The settings that our kernels do not have."""
        found = {field: getattr(self, field) for field in _IN_KERNELS}
        return tuple(f"model.{name}={format_value(x)}" for name, x in found.items() if x not in _IN_KERNELS[name])

    @property
    def queries(self) -> int:
        """Values in the queries of one token, over all heads: what attention hands to its output projection."""
        return self.heads * self.size

    @property
    def keys(self) -> int:
        """Values in the keys of one token, over all of their heads; its values have as many."""
        return (self.kv_heads or self.heads) * self.size

    def table_of(self, place: int) -> int | None:
        """Which of `value_tables` serves the block at `place`; those of the last blocks come again in order."""
        from_end = place - (self.layers - self.value_tables)
        return place if place < self.value_tables else from_end if from_end >= 0 else None

    @property
    def has_qkv_bias(self) -> bool:
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.width % self.heads and self.head_size is None:
            near = multiple_near(self.width, self.heads * (2 if self.positions == "rope" else 1))
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
        if "N" in self.pattern and self.positions != "rope":
            raise Conflict(
                f"pattern is {self.pattern}, and positions are {self.positions}: N is A without rotary positions",
                "set model.positions=rope, or write A instead of N",
            )
        if self.qk_norm_whole and not self.qk_norm:
            raise Conflict("qk_norm_whole is set, and there are no norms of queries and keys", "set model.qk_norm=true")
        if "W" in self.pattern and self.dropout > 0:
            raise Conflict("attention within a window has no dropout", "set model.dropout=0, or model.pattern=A")
        if self.attention_cap is not None and self.dropout > 0:
            raise Conflict(
                "attention with a cap has no dropout", "set model.dropout=0, or leave model.attention_cap out"
            )
        if self.positions == "rope" and self.head_size is not None and self.head_size % 2:
            raise Conflict(
                f"rotary positions need an even head_size, not {self.head_size}",
                f"set model.head_size={self.head_size + 1}, or model.positions=learned",
            )
        if self.positions == "rope" and self.size % 2:
            raise Conflict(
                f"rotary positions need an even head size (width over heads), not {self.width // self.heads}",
                f"set model.width={multiple_near(self.width, 2 * self.heads)}, or model.positions=learned",
            )
        if self.positions == "rope" and (self.turned % 2 or not self.turned):
            raise Conflict(
                f"rope_share {self.rope_share} turns {self.turned} of {self.size} channels, and they come in pairs",
                "set model.rope_share=1.0, or to a share that gives an even number",
            )
        if self.rope_scaling == "longrope" and len(self.rope_factors) != self.turned // 2:
            raise Conflict(
                f"rope_factors has {len(self.rope_factors)} numbers, and heads have {self.turned // 2} frequencies",
                f"write {self.turned // 2} numbers, such as those of a model's config.json, or leave both out",
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
            for name, fixed in GPT2.items():
                if getattr(self, name) != fixed:
                    raise Conflict(
                        f"family gpt2 fixes {name} to {format_value(fixed)}, not {format_value(getattr(self, name))}",
                        f"leave model.{name} out, or set model.family=gpt",
                    )
        return self

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        if 2 * self.value_tables > self.layers:
            raise Conflict(
                f"{self.value_tables} value_tables serve {2 * self.value_tables} blocks, and there are {self.layers}",
                f"set model.value_tables={self.layers // 2} at most",
            )
        without = [place for place in range(self.layers) if self.kinds[place] == "E"]
        if any(self.table_of(place) is not None for place in without):
            raise Conflict(
                "value_tables are for attention, and a block that they serve has kind E",
                "set model.value_tables=0, or a model.pattern with attention in the first and last blocks",
            )
        if self.bigram_rows == 1:
            raise Conflict(
                "bigram_rows 1 leaves no row for pairs", "set model.bigram_rows=0, or a few times the vocabulary"
            )
        return self
