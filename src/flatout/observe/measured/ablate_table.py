"""An ablation on the terminal: a line for each run as it ends, and the table of what each field is worth.

Contract: it reads the JSON form of a result (`AblateResult.to_json`). A difference is the loss with the change minus
the loss as configured, so a positive one speaks for the value in the config, and so does the verdict "helps".
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.table import Table

from flatout.errors import many
from flatout.observe.human import human_seconds, printable
from flatout.observe.picture import shortened
from flatout.observe.terminal import Terminal, say
from flatout.records import AblateRow

HELPS, HURTS = "helps", "hurts"
_STYLES = {HELPS: "green", HURTS: "bold red"}
_VALUES = ("config", "change")
_SHORT, _LONG = 6, 24  # characters of a value; longer ones are cut
_WIDE = 102  # columns of a terminal that has room for all of the table


def run_line(row: AblateRow, number: int, total: int) -> str:
    """One finished run in one line."""
    name = f"{row.field}={row.changed}" if row.field else "as configured"
    at = ", equal seconds" if row.equal == "seconds" else ""
    told = f"loss {row.loss:.4f}" if row.loss is not None else f"{row.status}: {row.reason}"
    steps = f"after {many(row.steps, 'step')}, {human_seconds(row.whole_seconds)}"
    return printable(f"[{number}/{total}] {name}, seed {row.seed}{at}: {told} {steps}")


def print_ablation(body: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """What each field is worth, at equal tokens and at equal seconds, and how small a difference could be seen."""
    console = Terminal(stream, width_of_files=160)
    say(console, sentence(body))
    for equal in ("tokens", "seconds"):
        rows = ordered(body, equal)
        if rows:
            say(console, "")
            say(console, title(body, equal), "bold")
            console.print(_table(rows, console.width, seconds=equal == "seconds"))
    say(console, "")
    for line in notes(body):
        say(console, line)


def ordered(body: Mapping[str, Any], equal: str) -> list[Mapping[str, Any]]:
    """The effects at equal tokens or seconds, what helps most first; without a difference last."""
    rows = [one for one in body["effects"] if one["equal"] == equal]
    return sorted(rows, key=lambda one: (one["difference"] is None, -(one["difference"] or 0.0)))


def sentence(body: Mapping[str, Any]) -> str:
    if body["loss"] is None:
        return f"{body['config']}: no run of the config as it is has ended yet; on {body['device']}"
    ended = sum(not row["field"] for row in body["rows"])
    spread = "" if body["spread"] is None else f" (standard deviation {body['spread']:.4f})"
    return (
        f"{body['config']} as it is: validation loss {body['loss']:.4f} over "
        f"{many(ended, 'seed')}{spread}, {many(body['steps'], 'step')}, {body['tokens']:,} tokens, "
        f"{_seconds(body['training_seconds'])} of training; on {body['device']}"
    )


def title(body: Mapping[str, Any], equal: str) -> str:
    amount = f"{body['tokens']:,}" if equal == "tokens" else f"{_seconds(body['training_seconds'])} of training steps"
    return f"at equal {equal} ({amount})"


def difference_text(one: Mapping[str, Any]) -> str:
    error = "" if one["half_width"] is None else f" ± {one['half_width']:.4f}"
    return "-" if one["difference"] is None else f"{one['difference']:+.4f}{error}"


def _table(rows: Sequence[Mapping[str, Any]], width: int, *, seconds: bool) -> Table:
    """A narrow terminal goes without the two losses, and cuts the values of fields before anything else."""
    names = ["field", "config", "change", *(["steps"] if seconds else [])]
    names += [*(["loss", "changed"] if width >= _WIDE else []), "difference", "verdict"]
    cells = [_cells(one) for one in rows]
    widths = {name: max(len(name), *(len(cell[name]) for cell in cells)) for name in names}
    room = width - sum(widths[name] for name in names if name not in _VALUES) - 2 * (len(names) - 1)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        left = name in ("field", "verdict", *_VALUES)
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for one, cell in zip(rows, cells, strict=True):
        cell |= {name: shortened(cell[name], min(_LONG, max(_SHORT, room // 2))) for name in _VALUES}
        table.add_row(*(printable(cell[name]) for name in names), style=_STYLES.get(one["verdict"], ""))
    return table


def _cells(one: Mapping[str, Any]) -> dict[str, str]:
    def loss(name: str) -> str:
        return "-" if one[name] is None else f"{one[name]:.4f}"

    return {
        "field": one["field"],
        "config": one["configured"],
        "change": one["changed"],
        "steps": f"{one['steps']:,}" if one["pairs"] else "-",
        "loss": loss("loss"),
        "changed": loss("changed_loss"),
        "difference": difference_text(one),
        "verdict": one["reason"].partition(":")[0].replace("_", " ") or one["verdict"] or _without_verdict(one),
    }


def _without_verdict(one: Mapping[str, Any]) -> str:
    return "one pair: no verdict" if one["pairs"] else "not run yet"


def notes(body: Mapping[str, Any]) -> Iterator[str]:
    """What the table means, what it could not have shown, and what is still missing."""
    yield (
        "difference: loss with the change minus loss as configured, over pairs of one seed, with its 95% interval; "
        "helps, hurts: of the value in the config"
    )
    for equal in ("tokens", "seconds"):
        widths = [one["half_width"] for one in body["effects"] if one["equal"] == equal and one["half_width"]]
        if widths:
            spread = f"{min(widths):.4f}" + (f" to {max(widths):.4f}" if max(widths) > 1.05 * min(widths) else "")
            yield (
                f"smallest difference that could be seen at equal {equal}: {spread} (noise of a pair "
                f"{body['noise'][equal]:.4f}, {body['degrees'][equal]:.1f} degrees of freedom)"
            )
    failed = {f"{one['field']}={one['changed']}: {one['reason']}" for one in body["effects"] if one["reason"]}
    yield from sorted(failed)
    for one in body["effects"]:
        if one["verdict"] == HURTS:
            yield (
                f"{one['field']}={one['changed']} instead of {one['configured']} lowered the loss by "
                f"{-one['difference']:.4f} ± {one['half_width']:.4f} at equal {one['equal']}"
            )
    unread = {one["field"] for one in body["effects"] if one["pairs"] and one["difference"] == 0.0}
    if unread:
        yield f"equal to the last digit with and without: {', '.join(sorted(unread))}; does this run use it?"
    if body["loss"] is not None and not body["noise"]:
        way = ": --seeds 2 trains a second one" if len(body["seeds"]) == 1 else ""
        yield f"one pair says nothing of the noise, so there is no verdict{way}"
    if body["left_out"]:
        reasons = dict.fromkeys(body["left_out"].values())
        paths = {why: [path for path, other in body["left_out"].items() if other == why] for why in reasons}
        told = "; ".join(f"{', '.join(those)} ({why})" for why, those in paths.items())
        yield f"left out: {told}; --fields names what to change"
    if body["missing"]:
        yield f"not run yet: {many(body['missing'], 'run')}; the same command goes on with them"


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 10 else human_seconds(value)
