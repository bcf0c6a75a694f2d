"""Names of common model sizes, as settings: what `flatout plan --size` stands for. No torch here.

The small ones are GPT-2's shapes in the modern decoder, the others those of Llama 2 (7b, 13b) and Llama 3 (8b, 70b).
"""

from collections.abc import Sequence

from flatout.config.sizes import GPT2_VOCAB
from flatout.errors import UsageError

_COMMON = "family=gpt norm=rmsnorm positions=rope pattern=A dropout=0"
_SMALL = f"{_COMMON} kv_heads=null mlp=relu2 mlp_width=null tied=true vocab={GPT2_VOCAB} context=1024"
_LLAMA = f"{_COMMON} mlp=swiglu tied=false qk_norm=false"
_LLAMA2 = f"{_LLAMA} kv_heads=null vocab=32000 context=4096"
_LLAMA3 = f"{_LLAMA} kv_heads=8 vocab=128256 context=8192"
# (settings of the model section, tokens of a step)
SIZES = {
    "124m": (f"{_SMALL} layers=12 width=768 heads=12", 2**19),
    "350m": (f"{_SMALL} layers=24 width=1024 heads=16", 2**19),
    "1.5b": (f"{_SMALL} layers=48 width=1600 heads=25", 2**20),
    "7b": (f"{_LLAMA2} layers=32 width=4096 heads=32 mlp_width=11008", 2**22),
    "8b": (f"{_LLAMA3} layers=32 width=4096 heads=32 mlp_width=14336", 2**22),
    "13b": (f"{_LLAMA2} layers=40 width=5120 heads=40 mlp_width=13824", 2**22),
    "70b": (f"{_LLAMA3} layers=80 width=8192 heads=64 mlp_width=28672", 2**22),
}


def size_words(size: str, written: Sequence[str], *, batch: bool) -> list[str]:
    """The settings of a size that the user has not written, `batch` with its usual tokens per step."""
    if size.lower() not in SIZES:
        raise UsageError(f"--size {size[:40]!r} is not a size we know", f"use one of {', '.join(SIZES)}, or a config")
    model, tokens = SIZES[size.lower()]
    words = [f"model.{setting}" for setting in model.split()]
    words += [f"train.batch_tokens={tokens}", "speed.micro_batch=null"] if batch else []
    given = {word.partition("=")[0] for word in written}
    return [word for word in words if word.partition("=")[0] not in given]
