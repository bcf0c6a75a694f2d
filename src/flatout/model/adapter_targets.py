"""Which projections get an adapter, by the names that users and PEFT write.

A checkpoint of Hugging Face has q_proj, k_proj and v_proj; here they are rows of one matrix, `qkv`. A `Target` is one
such projection: its path there, its matrix and rows here. A plan selects targets by PEFT's rules, so that a config of
PEFT means the same here:
- a list of names: each is a whole path, or the end of one after a dot;
- `all-linear`: every projection of every block, without the output head.
Ranks and alphas that differ are named in the same way; the first name that fits wins.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterable

from flatout.config.yaml_loader import shorten
from flatout.errors import AdapterError
from flatout.model.fields import projections
from flatout.model.gpt import GPT
from flatout.model.layers import Attention, Block

ALL_LINEAR = "all-linear"
_MOST = 2**20  # of ranks and alphas: more than any side of a matrix
_MOST_NAMES = 2000
_NO_ADAPTER = ("lm_head", "embed_tokens", "wte", "wpe", "embedding", "head")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A projection that may have an adapter: some rows of one of our matrices."""

    layer: int
    linear: str  # as Block.linears names it
    path: str  # in the checkpoint it came from
    first: int
    rows: int
    inputs: int

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterPlan:
    """Adapters as configured. `ranks` and `alphas` map names to values that differ."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    rank_stabilised: bool = False
    dora: bool = False
    ranks: tuple[tuple[str, int], ...] = ()
    alphas: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for what, rank in [("rank", self.rank), *((f"the rank of {name!r}", rank) for name, rank in self.ranks)]:
            if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= _MOST:
                wrong = f"{what} is {rank!r:.40}, it must be a whole number from 1 to {_MOST:,}"
                raise AdapterError(wrong, "16 is a usual rank", "lora.ranks")
        for what, alpha in [("alpha", self.alpha), *((f"the alpha of {name!r}", value) for name, value in self.alphas)]:
            number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
            if not number or not 0 < alpha < math.inf or alpha > _MOST:
                wrong = f"{what} is {alpha!r:.40}, it must be a number above 0"
                raise AdapterError(wrong, "twice the rank is usual", "lora.alphas")
        if not 0 <= self.dropout < 1:
            raise AdapterError(f"dropout is {self.dropout!r}, it must be from 0 to below 1", "0 is usual, and fastest")
        if len(self.ranks) + len(self.alphas) > _MOST_NAMES:
            raise AdapterError(f"more than {_MOST_NAMES:,} ranks and alphas by name", "list fewer")
        if not self.targets:
            raise AdapterError("an adapter needs at least one target", f"list names, or write {ALL_LINEAR}")

    def scale(self, rank: int, alpha: float) -> float:
        return alpha / math.sqrt(rank) if self.rank_stabilised else alpha / rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A target with its adapter."""

    target: Target
    rank: int
    alpha: float
    scale: float


def targets_of(model: GPT) -> list[Target]:
    """Every projection of every block, in the order of layers, matrices and rows."""
    if not all(isinstance(block.attention, Attention) for block in model.blocks):
        raise AdapterError(
            f"model.pattern is {model.config.pattern}, and adapters are for blocks with attention only",
            "set lora.rank=0, which trains all weights",
        )
    found = []
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        linears = block.linears()
        for path, (linear, piece) in projections(model.config).items():
            module = linears[linear]
            found.append(
                Target(
                    layer=layer,
                    linear=linear,
                    path=path.replace("*", str(layer)),
                    first=piece.first,
                    rows=(piece.last or module.out_features) - piece.first,
                    inputs=module.in_features,
                )
            )
    return found


def choose(plan: AdapterPlan, targets: Iterable[Target], *, strict: bool = True) -> list[Choice]:
    """The targets that the plan selects, each with its rank and scale.

    `strict` refuses a listed name without a match. PEFT accepts it as long as some target matches.
    """
    targets = list(targets)
    names = () if plan.targets == (ALL_LINEAR,) else plan.targets
    for name in names:
        if strict and not any(ends_with(name, target.path) for target in targets):
            raise _unknown(name, targets)
    chosen = []
    for target in targets:
        if names and not any(ends_with(name, target.path) for name in names):
            continue
        rank = next((rank for name, rank in plan.ranks if ends_with(name, target.path)), plan.rank)
        alpha = next((alpha for name, alpha in plan.alphas if ends_with(name, target.path)), plan.alpha)
        chosen.append(Choice(target=target, rank=rank, alpha=alpha, scale=plan.scale(rank, alpha)))
    if not chosen:
        raise AdapterError(
            f"the targets {shorten(plan.targets)} choose none of the model's projections",
            f"the names are {', '.join(_names(targets))}",
        )
    for setting, pairs in (("lora.ranks", plan.ranks), ("lora.alphas", plan.alphas)):
        for name, _ in pairs:
            if strict and not any(ends_with(name, choice.target.path) for choice in chosen):
                raise _unknown(name, [choice.target for choice in chosen], setting)
    return chosen


def needless_rank(choices: Iterable[Choice]) -> tuple[str, ...]:
    """A notice if a rank is larger than the rank that an update of its matrix can have."""
    sides = {choice.target.name: (choice.rank, min(choice.target.rows, choice.target.inputs)) for choice in choices}
    beyond = {name: (rank, side) for name, (rank, side) in sides.items() if rank > side}
    if not beyond:
        return ()
    rank, where = max(beyond.values())[0], ", ".join(f"{name} ({side:,})" for name, (_, side) in beyond.items())
    return (f"lora.rank {rank:,} is more than the smaller side of {where}: beyond that side ranks add nothing",)


def ends_with(name: str, path: str) -> bool:
    """Whether a name is a path, or the end of one after a dot."""
    return path == name or path.endswith(f".{name}")


def _names(targets: Iterable[Target]) -> list[str]:
    """Short names, each once. GPT-2's c_proj means two projections, attn.c_proj and mlp.c_proj."""
    return list(dict.fromkeys(target.name for target in targets))


def _unknown(name: str, targets: list[Target], setting: str = "lora.targets") -> AdapterError:
    if name.rpartition(".")[2] in _NO_ADAPTER:
        way = "leave it out: adapters are for the linear layers of blocks; lora.rank=0 trains all weights"
        return AdapterError(f"{name} cannot have an adapter here", way, setting)
    names = _names(targets)
    near = difflib.get_close_matches(name, names, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    way = f"{meant}the names are {', '.join(names)}, or {ALL_LINEAR} for all"
    return AdapterError(f"there is no projection {name} to choose", way, setting)
