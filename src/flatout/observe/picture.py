"""Pictures to disk: PNG or SVG by the file's name, the same bytes for the same figure, and whole or not at all.

Each one names us as its software (PNG) or creator (SVG). Only a picture with that mark is replaced by another.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import DataError, ResourceError, UsageError
from flatout.files import check_replaceable, disk_errors, write_whole
from flatout.observe.human import printable
from flatout.rows import shortened as shortened

if TYPE_CHECKING:  # matplotlib is imported only where something is drawn; who draws takes these names from here
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    Axes = Figure = Any

INK, FAINT, LINE = "#22272e", "#6e7781", "#b6bcc3"
BLUE, ORANGE, RED, TEAL = "#2f6db5", "#e08a1e", "#c0392b", "#3a9d8f"
PURPLE, GREY = "#7b5aa6", "#8a929b"
SMALL = 9.0
_METADATA = {"png": {"Software": "flatout"}, "svg": {"Creator": "flatout", "Date": None}}
_PNG_MARK = b"tEXtSoftware\0flatout"
_SVG_MARK = b"<dc:title>flatout</dc:title>"


def new_figure(width: float, height: float, dpi: int = 120) -> Figure:
    """A figure of so many inches that belongs to no window and to no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def write_picture(path: str | Path, draw: Callable[[], Figure], *, overwrite: bool = False) -> None:
    """Writes what `draw` makes, without the user's own style, a date or random names in it.

    With `overwrite`, also in the place of a file that is no picture of ours.
    """
    path = Path(path)
    shown = printable(str(path))
    form = path.suffix.lower().removeprefix(".")
    if form not in ("png", "svg"):
        raise UsageError(f"a picture cannot be written as {printable(path.name)!r}", "name a .png or .svg file")
    try:
        import matplotlib
    except ImportError as error:
        raise DataError("a picture needs the package matplotlib", "pip install matplotlib") from error
    content = io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": "flatout", "text.parse_math": False})
        draw().savefig(content, format=form, metadata=_METADATA[form])
    if "\0" in str(path) or not path.parent.is_dir():
        raise ResourceError(
            f"could not write the picture {shown}: there is no such folder", "name a folder that is there"
        )
    check_replaceable(path, is_picture, overwrite=overwrite)
    with disk_errors(f"the picture {shown}", safe=""):
        write_whole(path, content.getvalue())


def is_picture(path: Path) -> bool:
    """Whether `write_picture` wrote this file."""
    with path.open("rb") as file:
        begin = file.read(4096)
    if begin.startswith(b"\x89PNG\r\n\x1a\n"):
        return _PNG_MARK in begin.partition(b"IDAT")[0]
    return begin.startswith(b"<?xml") and _SVG_MARK in begin.partition(b"</metadata>")[0]


def drawable(text: str, family: str = "DejaVu Sans") -> str:
    """The text with each character that the font lacks as an escape: an empty box would tell nothing."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    glyphs = get_font(findfont(FontProperties(family=[family]))).get_charmap()
    return "".join(
        letter if letter.isprintable() and ord(letter) in glyphs else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )
