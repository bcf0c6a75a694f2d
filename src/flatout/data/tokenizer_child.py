"""A tokenizer.json of somebody else, tried out where nothing is lost: the library ends the whole process on some.

This is what runs in the child process of `confined`, for `tokenizer.try_out`.
"""

import os
from collections.abc import Mapping

# Spaces, lines, numbers, other scripts, joined characters, and what looks like special tokens.
_TEXTS = (
    "a",
    " Hello  world,\n\n it's 1234.5\t",
    "äß 你好 مرحبا नमस्ते 👩‍👩‍👧",
    "<s>[INST] <|im_start|></s>",
    "",
    "\ufffd\u0000\x7f",
)


def answer(request: Mapping[str, str]) -> str | None:
    """What is wrong with a tokenizer.json; None where the library reads it and encodes some texts by it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads reserve more memory than there may be
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_str(request["content"])
        for special in (False, True):
            for text in _TEXTS:
                tokenizer.decode(tokenizer.encode(text, add_special_tokens=special).ids)
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 - the library raises nothing more particular, and panics
        return str(error)[:2000] or type(error).__name__
    return None
