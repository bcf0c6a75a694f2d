"""Tokens to text, piece by piece."""

from typing import final

from flatout.data.tokenizer import Tokenizer

_MOST_HELD = 16  # tokens; a character has at most four bytes, so what is not whole by then never will be
_BROKEN = "\ufffd"  # stands for bytes that are no text, or not yet


@final
class TextPieces:
    """Text as it becomes whole. A character of several tokens waits for its last one.

    Only the tokens since the piece before the last are decoded again, so long outputs cost no more per token than
    short ones; the piece before is kept for tokenizers that write a space differently at the start of a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []  # from the beginning of the piece before on
        self.fresh = 0  # where it ended
        self.before = ""  # its text

    def add(self, *tokens: int) -> str:
        """The text that is whole with these tokens, the same as one after the other; empty where nothing is."""
        ids, begin = [*self.ids, *tokens], self.fresh
        now = self.tokenizer.decode(ids)
        if len(tokens) > 1:
            begin = len(ids) - 1
            last = now if _BROKEN in self.before + now else self.tokenizer.decode(ids[:begin])
            if last == now:
                half = len(tokens) // 2
                return self.add(*tokens[:half]) + self.add(*tokens[half:])
            while last.endswith(_BROKEN) and begin > self.fresh:
                begin -= 1
                last = self.tokenizer.decode(ids[:begin])
        self.ids = ids
        whole = len(now) > len(self.before) and not now.endswith(_BROKEN)
        return self._given(now, begin) if whole or len(ids) - self.fresh >= _MOST_HELD else ""

    def rest(self) -> str:
        """What has been held back."""
        return self._given(self.tokenizer.decode(self.ids), self.fresh)

    def _given(self, now: str, begin: int) -> str:
        """`begin` of the last piece."""
        new = now[len(self.before) :]
        self.ids = self.ids[begin:]
        self.fresh, self.before = len(self.ids), self.tokenizer.decode(self.ids)
        return new
