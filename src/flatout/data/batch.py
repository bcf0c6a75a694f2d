"""One batch, and what every loader of batches answers.

Contract: a loader is a one-pass iterator over the batches of its steps, in their order, and a context manager. After
`close`, which never waits for more than what is being read, none of its threads runs. What a worker raises is raised in
the loop.
"""

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from flatout.ops.documents import PackedRows


@dataclass(frozen=True)
class Batch:
    """Tokens and, for each, the token that follows it: both [B, T] int64 on the device; IGNORED has no label.

    `documents`, where there are any, is [B, T] int32: which document of its row each token belongs to, from 0 on, and
    -1 for padding. `packed` says the same on the host, of rows in which attention must stay inside documents. `pieces`
    is how many rows a window of the longest length was cut into, `window` the attention window of this step.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    step: int
    documents: torch.Tensor | None = None
    packed: PackedRows | None = None
    pieces: int = 1
    window: int | None = None

    @property
    def count(self) -> int:
        """Tokens, without padding where that is known."""
        return self.tokens.numel() if self.packed is None else self.packed.tokens


class BatchLoader:
    """Batches in the order of steps. Data that is found by the step number alone has no position and no notices."""

    def __next__(self) -> Batch:
        raise NotImplementedError

    def close(self) -> None:
        """Stop the threads and end the iteration. May be called at any time and more than once."""
        raise NotImplementedError

    def position(self) -> dict[str, Any] | None:
        """Plain JSON from which to go on for the step after the last batch that was handed out."""
        return None

    def notices(self) -> list[str]:
        """What there is to tell since this was asked last."""
        return []

    def __iter__(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
