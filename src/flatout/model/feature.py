"""The form of a declaration: what fields of the model section mean for everything but the forward pass itself.

Idea: a feature of the architecture (a norm on queries and keys, learned positions, eigenstates) owns some fields of
`ModelConfig` and says in one place which values it trains, which work and memory it costs, and how Hugging Face's
formats state it, or why they cannot. `fields.py` lists all features; `count.py` adds them up, and the `hub` modules
read and write through them.

Block kinds are the letters of `model.pattern`: A full attention, W a sliding window, E eigenstates.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from flatout.config.schema import ModelConfig
from flatout.model.execution import Execution
from flatout.model.hub_values import HubValues
from flatout.model.layers import mlp_width_of

LINEARS = ("qkv", "out", "up", "down")  # the matrices of every block, as Block.linears and `speed.fp8` name them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How a block is carried out, as far as memory goes. `frozen` weights are held in the type of products."""

    half: bool
    compiled: bool
    execution: Execution
    frozen: bool = False

    @property
    def triton(self) -> bool:
        return self.execution.kernels == "triton"

    @property
    def eager(self) -> bool:
        """Whether each operation of torch keeps its own inputs for backward."""
        return not self.triton and not self.compiled

    @property
    def cell(self) -> int:
        """Bytes of a value in matrix products."""
        return 2 if self.half else 4

    @property
    def stream(self) -> int:
        """Bytes of a value in the residual stream."""
        if self.triton:
            return 2 if self.execution.residual == "bf16" else 4
        return self.cell if self.frozen else 4


@dataclasses.dataclass(frozen=True)
class Piece:
    """Something of theirs in ours: rows `first` to `last` of our parameter or module `name`, or all of it."""

    name: str
    first: int = 0
    last: int | None = None
    transposed: bool = False

    def of(self, parameter: Tensor) -> Tensor:
        """Its place in our parameter, in their layout."""
        part = parameter[self.first : self.last]
        return part.T if self.transposed else part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """How a Hugging Face format states a feature.

    `keys` of config.json hold a whole number each, which is a field of ours. `read` turns other keys into fields, and
    refuses what our model does not have; `write` is the way back, for a model type. `only` holds fields that have one
    value in all models of the format. `modules` maps names of their linear layers, norms and tables, without `model.`
    or `transformer.`, to ours; `*` is the number of a block.
    """

    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    read: Callable[[HubValues], Mapping[str, Any]] = lambda values: {}
    write: Callable[[ModelConfig, str], Mapping[str, Any]] = lambda model, kind: {}
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    modules: Callable[[ModelConfig], Mapping[str, Piece]] = lambda model: {}

    def fields(self, read: HubValues) -> dict[str, Any]:
        """Fields of ours, from a config.json."""
        return {**self.only, **{field: read.whole(key) for key, field in self.keys.items()}, **self.read(read)}

    def values(self, model: ModelConfig, kind: str) -> dict[str, Any]:
        """Keys of a config.json, for a model of the type `kind`."""
        return {**{key: getattr(model, field) for key, field in self.keys.items()}, **self.write(model, kind)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fold:
    """How weights take a feature in: a model of which `when` is true, with `fields` and `weights` in the place of its
    own, computes the same. `weights` gets all weights by name and returns those that are other ones."""

    when: Callable[[ModelConfig], bool]
    fields: Mapping[str, Any]
    weights: Callable[[ModelConfig, Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feature:
    """A feature of the architecture, declared once. Everything that is left out is nothing.

    `fields` are the names in `ModelConfig` that it owns; each field belongs to one feature.
    Counts: `matrices` are the trained matrices of a block of a kind, by name, which a token is multiplied with once.
    `values` counts all other trained values of a block, `outside` those outside the blocks or in some blocks of a kind
    only (given the vocabulary), and `tables` those of them that lie in tables beside the embedding. `work` has the
    weights of a block's products that are not in `matrices`, `outside_work` those of some blocks of a kind only.
    Memory: `kept` is how many bytes per token a block of a kind keeps for backward where nothing is computed again.
    `outside_kept` is the same for what is kept outside the blocks, or by some of a kind only.
    `fixed` is for bytes that do not grow with the batch, given the positions of a row: (kept by all blocks together,
    made again in backward).
    Export: `gpt2`, and `llama` for llama, mistral, qwen2 and qwen3. Where neither has the feature, `no_export` says
    why, and `without` holds the fields' values in a model that does not use it: any other value is refused by name.
    `fold` is for a feature that no format has, but whose work the weights of an exported model can do.
    `described=False` marks fields that may differ from the folder a model comes from.
    """

    fields: tuple[str, ...]
    matrices: Callable[[ModelConfig, str], Mapping[str, int]] = lambda model, kind: {}
    values: Callable[[ModelConfig, str], int] = lambda model, kind: 0
    outside: Callable[[ModelConfig, int], int] = lambda model, vocab: 0
    tables: Callable[[ModelConfig, int], int] = lambda model, vocab: 0
    work: Callable[[ModelConfig, str], int] = lambda model, kind: 0
    outside_work: Callable[[ModelConfig], int] = lambda model: 0
    kept: Callable[[ModelConfig, str, Form], int] = lambda model, kind, form: 0
    outside_kept: Callable[[ModelConfig, Form], int] = lambda model, form: 0
    fixed: Callable[[ModelConfig, int, Form], tuple[int, int]] = lambda model, positions, form: (0, 0)
    gpt2: Format = Format()
    llama: Format = Format()
    no_export: str = ""
    without: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fold: Fold | None = None
    described: bool = True

    def format(self, kind: str) -> Format:
        """The format of a model type of transformers'."""
        return self.gpt2 if kind == "gpt2" else self.llama


# --- sizes that several features share --------------------------------------------------------------------------------


def mlp_widths(model: ModelConfig) -> tuple[int, int]:
    """(columns of the MLP's first product, rows of its second)."""
    hidden = mlp_width_of(model)
    return (2 * hidden if model.mlp == "swiglu" else hidden), hidden


def key_width(model: ModelConfig) -> int:
    """Values in a token's keys, over all of their heads; its values have as many."""
    return (model.kv_heads or model.heads) * model.size


def mixer_widths(model: ModelConfig, kind: str) -> tuple[int, int]:
    """(columns of the product into attention or eigenstates, rows of the product out of it)."""
    if kind == "E":
        return 4 * model.states, 2 * model.states
    return model.queries + 2 * key_width(model), model.queries
