"""Models of other projects by their size, as settings, for `flatout estimate --gpus --size`. No torch here.

They have the shapes of Llama 2 (7b, 13b) and Llama 3 (8b, 70b). Smaller sizes are those of our presets.
"""

from collections.abc import Sequence

_LLAMA = "family=gpt norm=rmsnorm positions=rope pattern=A dropout=0 mlp=swiglu tied=false qk_norm=false"
_LLAMA2 = f"{_LLAMA} kv_heads=null vocab=32000 context=4096"
_LLAMA3 = f"{_LLAMA} kv_heads=8 vocab=128256 context=8192"
STEP_TOKENS = 2**22
LLAMAS = {  # settings of the model section
    "7b": f"{_LLAMA2} layers=32 width=4096 heads=32 mlp_width=11008",
    "8b": f"{_LLAMA3} layers=32 width=4096 heads=32 mlp_width=14336",
    "13b": f"{_LLAMA2} layers=40 width=5120 heads=40 mlp_width=13824",
    "70b": f"{_LLAMA3} layers=80 width=8192 heads=64 mlp_width=28672",
}


def llama_words(size: str, written: Sequence[str], *, batch: bool) -> list[str]:
    """The settings of a Llama that the user has not written, `batch` with its usual tokens per step."""
    words = [f"model.{setting}" for setting in LLAMAS[size].split()]
    words += [f"train.batch_tokens={STEP_TOKENS}", "speed.micro_batch=null"] if batch else []
    given = {word.partition("=")[0] for word in written}
    return [word for word in words if word.partition("=")[0] not in given]
