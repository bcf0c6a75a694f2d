"""The files that ship with Flatout, checked before they are used."""

import binascii
import hashlib
from functools import cache
from importlib import resources
from pathlib import Path

from flatout.errors import DataError

SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
GPT2_RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
GPT2_END_OF_TEXT = 50256  # the last id of GPT-2


def shakespeare() -> Path:
    """The path of Tiny Shakespeare."""
    return _checked("tiny_shakespeare.txt", SHAKESPEARE_SHA256)[0]


@cache
def gpt2_tokens() -> tuple[bytes, ...]:
    """The bytes of each token of GPT-2 but the end of text, in the order of their ids."""
    _, raw = _checked("gpt2.tiktoken", GPT2_RANKS_SHA256)
    pairs = [line.split() for line in raw.splitlines()]
    return tuple(binascii.a2b_base64(token) for token, _ in sorted(pairs, key=lambda pair: int(pair[1])))


def _checked(name: str, wanted: str) -> tuple[Path, bytes]:
    path = Path(str(resources.files("flatout.data"))) / "bundled" / name
    raw = path.read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != wanted:
        raise DataError(
            f"the shipped file {name} is damaged: its SHA-256 is {found} and should be {wanted}",
            "install flatout again",
        )
    return path, raw
