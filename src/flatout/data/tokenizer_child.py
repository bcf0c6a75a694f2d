"""A tokenizer.json of somebody else, where nothing is lost: the library ends the whole process on some.

This is what runs in the child process of `confined`. `tokenizer.try_out` has a file loaded and used on a few texts, and
`tokenizer._Confined` has texts encoded and ids decoded by a file that may not run elsewhere (`tokenizer_parts`).
"""

import base64
import os
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

# Spaces, lines, numbers, other scripts, joined characters, and what looks like special tokens.
_TEXTS = (
    "a",
    " Hello  world,\n\n it's 1234.5\t",
    "äß 你好 مرحبا नमस्ते 👩‍👩‍👧",
    "<s>[INST] <|im_start|></s>",
    "",
    "\ufffd\u0000\x7f",
)
UNKNOWN = "unknown"
_opened: dict[str, Any] = {}


def answer(request: Mapping[str, Any]) -> list[Any]:
    """["done", what was asked for], ["wrong", why] where the library refuses, or [UNKNOWN] for a key not opened yet."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads reserve more memory than there may be
    try:
        if "try" in request:
            return ["done", _try_out(request["try"])]
        if "open" in request:
            _opened.clear()  # only one: two large ones may take more memory than there is
            _opened[request["key"]] = _open(request["open"], request["special"])
            return ["done", None]
        if request["key"] not in _opened:
            return [UNKNOWN]
        tokenizer = _opened[request["key"]]
        if "ids" in request:
            return ["done", tokenizer.decode(request["ids"], skip_special_tokens=False)]
        return ["done", [_encoded(tokenizer, text, offsets=request["offsets"]) for text in request["texts"]]]
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 - the library raises nothing more particular, and panics
        return ["wrong", str(error)[:2000] or type(error).__name__]


def _open(content: str, special: bool) -> Any:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(content)
    tokenizer.encode_special_tokens = special
    return tokenizer


def _encoded(tokenizer: Any, text: str, *, offsets: bool) -> list[str]:
    """The ids and, if asked for, where each token's characters begin and end."""
    if not offsets:
        return [packed(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)]
    found = tokenizer.encode(text, add_special_tokens=False)
    places = (found.token_to_chars(token) or (0, 0) for token in range(len(found.ids)))
    return [packed(found.ids), packed(place for both in places for place in both)]


def _try_out(content: str) -> str | None:
    """Uses a file on some texts; returns the token that its post-processor puts before a text, or None."""
    tokenizer = _open(content, special=False)
    for special in (False, True):
        for text in _TEXTS:
            tokenizer.decode(tokenizer.encode(text, add_special_tokens=special).ids)
    bare, whole = (tokenizer.encode("a", add_special_tokens=add).ids for add in (False, True))
    added = whole[: len(whole) - len(bare)] if whole != bare else []
    # Only one token, in front: some put others there or behind, which are none of a text's beginning.
    return tokenizer.id_to_token(added[0]) if added and whole[1 : 1 + len(bare)] == bare else None


def packed(numbers: Iterable[int]) -> str:
    """Numbers of four bytes each: shorter than lists in JSON, and read without an object for each."""
    return base64.b64encode(array("I", numbers).tobytes()).decode("ascii")
