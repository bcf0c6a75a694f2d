"""Values as short tables in a notebook, and as one line elsewhere; text that cannot move the cursor."""

import dataclasses
import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

_MOST_ROWS = 30
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text without control characters, newlines and tabs kept."""
    return _CONTROL.sub("\ufffd", text)


def html_table(rows: Mapping[str, object]) -> str:
    """Names and values as an HTML table, without those that are None; nothing in it is markup."""
    known = {name: value for name, value in rows.items() if value is not None}
    return _table("".join(f"<tr>{_head(name)}<td>{_text(value)}</td></tr>" for name, value in known.items()))


def _table(lines: str) -> str:
    return f'<table style="font: 13px sans-serif">{lines}</table>'


def _head(name: str) -> str:
    return f'<th style="text-align: left">{html.escape(name)}</th>'


def _text(value: object) -> str:
    shown = f"{value:.5g}" if isinstance(value, float) else "" if value is None else str(value)
    return html.escape(shown if len(shown) <= 200 else shown[:197] + "...")


class Shown:
    """Something that a notebook shows as a table: its fields, and below them a table of each list of rows in it."""

    def _shown_rows(self) -> dict[str, Any]:
        """Names and values of the table."""
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        return {field.name: getattr(self, field.name) for field in fields}

    def _repr_html_(self) -> str:
        rows = self._shown_rows()
        lists = {name: value for name, value in rows.items() if _is_list(value)}
        plain = {name: f"{len(value)} rows" if name in lists else value for name, value in rows.items()}
        return html_table(plain) + "".join(_list_table(value) for value in lists.values())


class ShortlyShown(Shown):
    """Its text is one line of the same values, for what would fill pages; with `dataclass(repr=False)`."""

    def __repr__(self) -> str:
        words = ", ".join(f"{name}={value}" for name, value in self._shown_rows().items() if value is not None)
        return f"{type(self).__name__}({words if len(words) <= 500 else words[:497] + '...'})"


def _is_list(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) > 0 and all(isinstance(item, Shown) for item in value)


def _list_table(items: Sequence[Shown]) -> str:
    rows = [item._shown_rows() for item in items[:_MOST_ROWS]]
    head = "".join(map(_head, rows[0]))
    body = "".join(f"<tr>{''.join(f'<td>{_text(value)}</td>' for value in row.values())}</tr>" for row in rows)
    more = f"<tr><td>and {len(items) - _MOST_ROWS:,} more</td></tr>" if len(items) > _MOST_ROWS else ""
    return _table(f"<tr>{head}</tr>{body}{more}")
