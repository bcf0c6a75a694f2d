"""Tokens to text, piece by piece."""

from typing import final

from flatout.data.tokenizer import Tokenizer

_MOST_HELD = 16  # tokens; a character has at most four bytes, so what is not whole by then never will be


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

    def add(self, token: int) -> str:
        """The text that is whole with this token; empty where it is not."""
        self.ids.append(token)
        now = self.tokenizer.decode(self.ids)
        whole = len(now) > len(self.before) and not now.endswith("\ufffd")
        if not whole and len(self.ids) - self.fresh < _MOST_HELD:
            return ""
        return self._given(now)

    def rest(self) -> str:
        """What has been held back."""
        return self._given(self.tokenizer.decode(self.ids))

    def _given(self, now: str) -> str:
        new = now[len(self.before) :]
        self.ids = self.ids[self.fresh :]
        self.fresh = len(self.ids)
        self.before = self.tokenizer.decode(self.ids)
        return new
