"""A tokenizer learned from a corpus, and how well a tokenizer fits one.

Idea: byte-pair encoding begins with the 256 bytes, so it knows every text from the start; learning only adds tokens for
what is frequent. The corpus goes by once as a stream of words that are counted. What has to fit into memory are the
different words, not the text.

Contract: the same texts in the same order give the same bytes, whatever the number of threads. The vocabulary has
exactly the size that was asked for: 256 bytes, the merges that were learned, and `<|endoftext|>` as the last id. What
comes out is an ordinary `tokenizer.json`, which `load_tokenizer` and other libraries read, and which gives back every
text unchanged.

Trap: a small or repetitive corpus does not hold enough pairs that occur `min_frequency` times. That is an error, since
ids that no text can ever use would cost memory and time in every step of a training run.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flatout.data.tokenizer import END_OF_TEXT, Tokenizer, groups, word_segments
from flatout.data.tokenizer_parts import GPT4_SPLIT
from flatout.errors import DataError, ResourceError, UsageError
from flatout.files import write_whole
from flatout.folders import make_folders, remove_empty

Split = Literal["gpt2", "gpt4"]

SMALLEST_VOCAB = 257
# The library takes 256 texts at a time out of a stream, so what is one text to it must be small.
_SEGMENT = 2**16
# Its time grows with the square of a word's length: a sequence of DNA, or one base64 line, would take minutes.
_LONGEST_WORD = 512
_LONG_WORD = re.compile(rf"\w{{{_LONGEST_WORD}}}|[^\w\s]{{{_LONGEST_WORD}}}|\s{{{_LONGEST_WORD}}}")


@dataclass(frozen=True)
class Fertility:
    """How many tokens a tokenizer makes of some texts. A word is what stands between white space.

    `unused` counts the ids that came up in no text, the end-of-text id aside. `round_trip_failures` counts the texts
    that decoding does not give back as they were.
    """

    texts: int
    bytes: int
    characters: int
    words: int
    tokens: int
    bytes_per_token: float
    tokens_per_word: float
    unused: int
    round_trip_failures: int


def train_bpe(
    texts: Iterable[str], vocab: int, *, min_frequency: int = 2, split: Split = "gpt2", exact: bool = True
) -> dict[str, Any]:
    """Learn a byte-level BPE of `vocab` ids; the result is the content of a `tokenizer.json`.

    Where it need not be `exact`, a small text gives fewer.
    """
    if vocab < SMALLEST_VOCAB:
        raise UsageError(
            f"a vocabulary of {vocab} ids is too small",
            f"ask for {SMALLEST_VOCAB} or more: there are 256 bytes and {END_OF_TEXT}",
        )
    if min_frequency < 1:
        raise UsageError(f"pairs cannot be asked to occur {min_frequency} times", "ask for 1 or more")
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library: Any = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = _pre_tokenizer(split)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 1,
        min_frequency=min_frequency,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    characters = 0

    def parts() -> Iterator[str]:
        nonlocal characters
        for text in texts:
            for segment in word_segments(text, _SEGMENT):
                yield from _cut_long_words(segment)
            characters += len(text)

    library.train_from_iterator(parts(), trainer)
    if not characters:
        raise DataError("there is no text to learn a tokenizer from", "give a source that is not empty")
    learned = library.get_vocab_size()
    if exact and learned < vocab - 1:
        raise DataError(
            f"the text is too small for a vocabulary of {vocab:,}: only {learned + 1:,} ids could be learned",
            f"ask for {learned + 1} or fewer, or give more text",
        )
    library.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, normalized=False, special=True)])
    return json.loads(library.to_str())


def _cut_long_words(text: str) -> Iterator[str]:
    """The text in parts without a word above `_LONGEST_WORD`; almost always in one."""
    start = 0
    for match in _LONG_WORD.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    if start < len(text):
        yield text[start:]


def write_tokenizer(content: dict[str, Any], path: str | Path, overwrite: bool = False) -> None:
    """Write a `tokenizer.json`; the file is there whole or not at all. A link of that name is replaced."""
    path = Path(path)
    if os.path.lexists(path) and not overwrite:
        raise UsageError(f"there is already a file {str(path)!r}", "choose another name, or ask to overwrite it")
    if os.path.isdir(path) and not os.path.islink(path):
        raise UsageError(f"{str(path)!r} is a folder", "name a file, for example tokenizer.json")
    made = []
    try:
        made = make_folders(path.parent)
        raw = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        write_whole(path, raw.encode("utf-8"), durable=True)
    except OSError as error:
        remove_empty(made)
        raise ResourceError(
            f"could not write the tokenizer {str(path)!r}: {error.strerror or error}",
            "make room or choose another place",
        ) from error


def fertility(tokenizer: Tokenizer, texts: Iterable[str]) -> Fertility:
    """What `tokenizer` makes of `texts`, in one pass."""
    number = size = characters = words = tokens = failures = 0
    used = np.zeros(tokenizer.vocab, dtype=bool)
    for batch in groups(texts):
        for text, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
            number += 1
            size += len(text.encode("utf-8", "surrogatepass"))
            characters += len(text)
            words += sum(len(part.split()) for part in word_segments(text, 4 * _SEGMENT))
            tokens += len(ids)
            used[ids] = True
            failures += tokenizer.decode(ids) != text
    return Fertility(
        texts=number,
        bytes=size,
        characters=characters,
        words=words,
        tokens=tokens,
        bytes_per_token=size / tokens if tokens else 0.0,
        tokens_per_word=tokens / words if words else 0.0,
        unused=tokenizer.vocab - int(used.sum()) - (tokenizer.end_of_text is not None),
        round_trip_failures=failures,
    )


def _pre_tokenizer(split: Split) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if split == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split == "gpt4":
        words = pre_tokenizers.Split(Regex(GPT4_SPLIT), behavior="isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise UsageError(f"there is no split {split!r}", "use gpt2 or gpt4")
