"""What a model has, does and keeps, found out on a model without memory.

Idea: each block that differs from the others is built once. All elements of a weight are one number in memory, a few
tokens go forward, and products are noted, not computed. So sizes are the real ones and a pass takes milliseconds.

What autograd saves on the way is what torch's operations keep for backward (`saved`). Compiled code and our kernels
keep what products and attention take and give, and what norms take (`lean`, `stream`), and compute the rest again.
Eigenstates have torch's operations in every form, except where they are one kernel.

Trap: torch makes its compiler skip a dispatch mode and imports it for that, which takes seconds. `_should_skip_dynamo`
says no.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.config.schema import ModelConfig
from flatout.model.eigenstate import Eigenstate
from flatout.model.execution import Execution
from flatout.model.gpt import GPT
from flatout.model.layers import Block
from flatout.model.norms import Norm
from flatout.ops.scan import CHUNK

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
TOKENS = 4  # in a pass; the scan in chunks needs two chunks


@dataclasses.dataclass(kw_only=True)
class ModelPart:
    """A block, or, with no kind, what is outside all blocks. Bytes and values are of one token."""

    kind: str
    times: int  # how many such blocks the model has
    work: int = 0  # weights that a token is multiplied with
    saved: float = 0.0  # bytes
    lean: float = 0.0  # bytes
    copies: float = 0.0  # bytes of the same in another layout, which our kernels do not need
    stream: float = 0.0  # values that norms take
    results: float = 0.0  # bytes that products and attention give
    fixed_saved: int = 0  # bytes that do not grow with tokens
    fixed_lean: int = 0


@functools.lru_cache(maxsize=256)
def outline(config: ModelConfig, vocab: int = 1, scan: str = "sum") -> tuple[GPT, tuple[int, ...]]:
    """(the model with each block that differs from the others once, how often each of them comes)."""
    tables = config.value_tables  # their blocks differ, and are the first and the last ones
    last = config.layers - tables
    middle = Counter(config.kinds[tables:last])
    kinds = config.kinds[:tables] + "".join(middle) + config.kinds[last:]
    shorter = config.model_copy(update={"layers": len(kinds), "pattern": kinds, "dropout": 0.0})
    with torch.device("meta"):
        return GPT(shorter, vocab, Execution(scan=scan)), (1,) * tables + (*middle.values(),) + (1,) * tables


@functools.lru_cache(maxsize=256)
def parts_of(
    config: ModelConfig, half: bool = False, frozen: bool = False, chunked: bool = False
) -> tuple[ModelPart, ...]:
    """The blocks of the outline, and last what is outside of them.

    `half` has products in half precision. `frozen` weights have the type of products, and norms are not trained.
    `chunked` says that the scan of eigenstates is made of torch's operations.
    """
    model, times = outline.__wrapped__(config, 1, "chunked" if chunked else "sum")  # one of its own: it gets hooks
    dtype = torch.bfloat16 if half and frozen else torch.float32
    model._apply(lambda x: torch.zeros((), dtype=dtype).expand(x.shape))
    for module in model.modules():
        if isinstance(module, Norm):
            module.requires_grad_(not frozen)
    positions = 2 * CHUNK if chunked and "E" in config.kinds else TOKENS
    tokens = torch.zeros(1, min(config.context, positions), dtype=torch.int64)
    watch = _Watch(model, tokens)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(watch.save, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=half),
        watch,
    ):
        model.hidden(tokens, window=config.context)  # attention keeps as much with any
    parts = [ModelPart(kind=kind, times=count) for kind, count in zip(model.config.kinds, times, strict=True)]
    return watch.sorted_into([*parts, ModelPart(kind="", times=1)])


class _Watch(TorchDispatchMode):
    """Notes each tensor that is made: where, and who takes it. It holds all of them, so no memory comes twice."""

    def __init__(self, model: GPT, tokens: Tensor) -> None:
        super().__init__()
        self.tokens, self.heads = tokens.numel(), model.config.heads
        self.chunked = model.execution.scan == "chunked"
        self.held, self.of_tokens = [tokens], {_memory(tokens)}
        self.made: dict[int, tuple[Tensor, int, Eigenstate | None]] = {}
        self.copies: dict[int, int] = {}
        self.saved, self.taken, self.results, self.added, self.normed = (set[int]() for _ in range(5))
        outside = len(model.blocks)
        self.work, self.place, self.mixer = [0] * (outside + 1), outside, None
        for place, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            block.register_forward_pre_hook(lambda *_, place=place: setattr(self, "place", place))
            block.register_forward_hook(lambda *_: setattr(self, "place", outside))
            for name in ("out", "down"):
                block.linears()[name].register_forward_hook(lambda _, __, y: self.added.add(_memory(y)))
        for module in model.modules():
            if isinstance(module, Norm):
                module.register_forward_pre_hook(lambda _, values: self.normed.add(_memory(values[0])))
            elif isinstance(module, Eigenstate):
                module.register_forward_pre_hook(lambda mixer, _: setattr(self, "mixer", mixer))
                module.register_forward_hook(lambda *_: setattr(self, "mixer", None))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def save(self, x: Tensor) -> Tensor:
        self.held.append(x)
        self.saved.add(_memory(x))
        return x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        given = [_memory(x) for x in _tensors(args)]
        takes = self.of_tokens.intersection(given)
        if name in PRODUCTS:
            left, right = args[-2:]
            result = left.new_empty((*left.shape[:-1], right.shape[-1]))
            self.work[self.place] += left.numel() * right.shape[-1]
        elif name == "_to_copy" and not takes:  # a weight in another type
            result = args[0].new_zeros((), dtype=kwargs.get("dtype")).expand(args[0].shape)
        elif name == "add" and len(takes) == 1 and takes <= self.results:  # a bias, which a product adds by itself
            result = args[0].view_as(args[0])
        else:
            result = func(*args, **kwargs)
        dear = name in PRODUCTS or "dot_product" in name or name == "cumsum"
        self.taken |= takes if dear else set()
        for x in _tensors([result]):
            memory = _memory(x)
            self.held.append(x)
            if memory not in given:
                self.made.setdefault(memory, (x, self.place, self.mixer))
            if name == "clone":
                self.copies[memory] = given[0]
            if takes:
                self.of_tokens.add(memory)
                self.results |= {memory} if dear else set()
                self.added |= {memory} if name == "bmm" else set()
        return result

    def sorted_into(self, parts: list[ModelPart]) -> tuple[ModelPart, ...]:
        """Results that are only added to something are not needed again; statistics are too small to count."""
        for part, work in zip(parts, self.work, strict=True):
            part.work = work // self.tokens
        lean = self.taken | (self.results - self.added) | (self.results & self.saved)
        for memory, (x, place, mixer) in self.made.items():
            part, size, saved = parts[place], x.untyped_storage().nbytes(), memory in self.saved
            if size <= self.tokens * self.heads * x.itemsize:
                continue
            if memory not in self.of_tokens:
                part.fixed_saved += size if saved else 0
                part.fixed_lean += size if saved or (mixer is not None and not self.chunked) else 0
                continue
            each = size / self.tokens
            part.saved += each if saved else 0.0
            part.results += each if memory in self.results else 0.0
            if self.copies.get(memory) in lean:
                part.copies += each
            elif memory in lean or (saved and mixer is not None and (self.chunked or mixer.config.scales)):
                part.lean += each
            elif memory in self.normed:
                part.stream += each / x.itemsize
        return tuple(parts)


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found = [x for value in values for x in (value if isinstance(value, list | tuple) else (value,))]
    return [x for x in found if isinstance(x, Tensor)]
