"""The model of a Hugging Face folder, as `flatout` comes to it in two steps."""

from pathlib import Path
from typing import Any

from flatout.model.gpt import GPT
from flatout.model.hub import read_description
from flatout.model.hub_folder import load_described


def from_huggingface(folder: Path, *, context: int | None = None, **how: Any) -> GPT:
    return load_described(read_description(folder, context=context), **how)
