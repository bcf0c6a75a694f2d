"""The interface of a model that the engine trains: a `GPT`, or a custom module (engine/custom.py).

FSDP, adapters, recorded passes, decoding with a cache and export need a `GPT`.

Shape legend: B batch, T positions, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from flatout.config.schema import ModelConfig
from flatout.model.cache import Cache
from flatout.model.narrow import ModelNarrow
from flatout.ops.documents import DocumentLayout


class LanguageModel(Protocol):
    config: ModelConfig
    vocab: int
    narrow: ModelNarrow  # copies of weights in narrower types, and scales that go to checkpoints
    training: bool

    def __call__(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        label_smoothing: float = 0.0,
        layout: DocumentLayout | None = None,
        window: int | None = None,
    ) -> Tensor:
        """The loss summed over labelled tokens; `window` replaces the model's attention window."""
        ...

    def logits(
        self, tokens_BT: Tensor, cache: Cache | None = None, *, last: bool = False, layout: DocumentLayout | None = None
    ) -> Tensor:
        """Logits [B, T, V] in at least fp32; `last`: [B, 1, V] of the last position. Reads and extends the cache."""
        ...

    def drop(self) -> None:
        """Frees what a failed pass left behind."""

    # Methods of every torch module.
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...
    def state_dict(self) -> Mapping[str, Tensor]: ...
    def train(self, mode: bool = True) -> Any: ...
    def eval(self) -> Any: ...
