"""What a source means: the files it names, their formats, and the slices they can be read in.

Idea: `find_files` lists files in an order that depends on names only, never on the file system, so that preparing twice
gives the same bytes. The end of a name gives the format; a text that begins like a crawl is one whatever its name.

Contract: what cannot be used is not dropped in silence. A file or folder that cannot be read, and a link that leads out
of its folder, are `Problem`s; in a folder, empty files and files of other types are counted by type. Only a source that
is not there, or that has nothing of a known type, is a `DataError`.

Trap: in folders, hidden names (with a dot in front) do not count as there at all, and folders behind links are not
entered. A link to a file inside the source is read only if the file it leads to is not read itself.
"""

import difflib
import os
import stat
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flatout.corpus.document import InputFile, Problem, Slice, shakespeare, shown
from flatout.corpus.readers import has_tokens
from flatout.corpus.streams import PIECE, ByteStream, whole_characters
from flatout.errors import DataError, many

SHAKESPEARE = "shakespeare"
HUB = "hf:"
_FORMATS = {
    "text": ".txt .text .md",
    "jsonl": ".jsonl .ndjson",
    "json": ".json",
    "csv": ".csv",
    "tsv": ".tsv",
    "parquet": ".parquet",
    "warc": ".warc .wet",
    "smiles": ".smi .smiles",
    "tokens": ".bin",
}
SUFFIXES = {suffix: format for format, suffixes in _FORMATS.items() for suffix in suffixes.split()}
COMPRESSIONS: Mapping[str, str] = {".gz": "gz", ".zst": "zst", ".xz": "xz", ".bz2": "bz2"}
# Parquet compresses inside; a file that is also compressed outside could not be read at any place.
_NEVER_COMPRESSED = ("parquet",)
# What programs leave behind or have not finished; with a format given, nothing else would keep them out.
_LEFTOVERS = (".lock", ".part", ".partial", ".tmp", ".temp", ".incomplete", ".crdownload", ".download", ".swp", "~")
# Files that are never text, though some begin like one; other unknown types are looked into.
_BINARY_TYPES = (".docx", ".gif", ".jpeg", ".jpg", ".pdf", ".png", ".ps", ".rtf", ".svg", ".xlsx", ".zip")
BINARY = " (binary)"  # after the type of a file that is passed over and holds no text
_NO_TOKENS = " (not GPT-2 tokens)"
_EMPTY = "empty"
_SAVED = {"dataset_dict.json", "dataset_info.json"}  # of datasets in Arrow files
_LOOKED_AT = 2**13  # bytes
# Formats whose byte ranges can be read by themselves where they are not compressed.
_SLICED = ("text", "jsonl", "smiles")
# A file that can only be read from its beginning is left to one reader up to this size.
_WHOLE_BYTES = 2**24
_CRAWL = b"WARC/1."
_TYPES_LISTED = 3
_BINARY_LISTED = 6
_AS_TOKENS = " (as GPT-2 tokens)"
_NO_SUFFIX = "no suffix"
_MOST_SHARES = 4096
_TYPES = f"{' '.join(SUFFIXES)}, and most of them also with {' '.join(COMPRESSIONS)}"
_CHOICES = f"{SHAKESPEARE!r}, a file such as .txt or .jsonl, a folder of them, or hf:NAME"


@dataclass(frozen=True)
class FoundFiles:
    """The files of a source in the order they are read, what is wrong with others, and those passed over.

    `left` has the types of those passed over, by their paths.
    """

    files: tuple[InputFile, ...] = ()
    problems: tuple[Problem, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed_over(self) -> dict[str, int]:
        """How many files of each type are passed over."""
        return dict(sorted(Counter(self.left.values()).items()))

    @property
    def unknown(self) -> int:
        """How many of the files passed over hold text, or may, under a name of a type that is not known."""
        return sum(map(_may_hold_text, self.left.values()))

    @property
    def distinct(self) -> list[InputFile]:
        """The files; one that several sources read is listed once."""
        if len({file.source for file in self.files}) < 2:
            return list(self.files)
        return list({os.path.realpath(file.path): file for file in self.files}.values())

    @property
    def mostly_unknown(self) -> bool:
        """Whether most of what is there would be passed over."""
        return self.unknown > len(self.files) + len(self.problems)

    @property
    def summary(self) -> str:
        """What is read and what is not, by type, for a notice; nothing where every file is read as its name says."""
        read = Counter(type_of(file.path) + _AS_TOKENS * (file.format == "tokens") for file in self.distinct)
        if not self.left and (len(read) < 2 or not any(name.endswith(_AS_TOKENS) for name in read)):
            return ""
        total = read.total() + len(self.left)
        passed_over = f"; passed over {counted_by_type(self.passed_over)}" if self.left else ""
        return f"{many(total, 'file')}: read {counted_by_type(read) or 'none'}{passed_over}"


def counted_by_type(counts: Mapping[str, int]) -> str:
    """How many files there are of each type, the most frequent first: `200 .py, 60 .cfg, 12 others, 2 binary (.o)`."""
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    texts = [pair for pair in ordered if not pair[0].endswith(BINARY)]
    binary = [pair for pair in ordered if pair[0].endswith(BINARY)]
    # A type with a note on what it was taken for is always listed.
    rest = [pair for pair in texts[_TYPES_LISTED:] if " (" not in pair[0]]
    listed = [f"{count:,} {name}" for name, count in texts if (name, count) not in rest]
    if rest:
        listed.append(many(sum(count for _, count in rest), "other"))
    if binary:
        kinds = " ".join(name.removesuffix(BINARY) for name, _ in binary[:_BINARY_LISTED])
        more = " ..." if len(binary) > _BINARY_LISTED else ""
        listed.append(f"{sum(count for _, count in binary):,} binary ({kinds}{more})")
    return ", ".join(listed)


def unread_text(passed_over: Mapping[str, int]) -> list[str]:
    """The types among those passed over that hold text, or may, the most frequent first."""
    ordered = sorted(passed_over.items(), key=lambda pair: (-pair[1], pair[0]))
    return [name for name, _ in ordered if _may_hold_text(name)]


def _may_hold_text(type: str) -> bool:
    """Whether a file passed over under that type may hold text."""
    return (type.startswith(".") or type == _NO_SUFFIX) and " (" not in type and not type.endswith(_LEFTOVERS)


def but_read(found: Sequence[FoundFiles], named: Collection[str]) -> list[FoundFiles]:
    """The same, without passed-over files that another of the sources reads or names."""
    if len(found) < 2 or not any(each.left for each in found):
        return list(found)
    read = {os.path.realpath(path) for path in (*named, *(file.path for each in found for file in each.files))}
    # By real paths, so that what is passed over in two sources is counted once.
    kinds = [{os.path.realpath(path): kind for path, kind in each.left.items()} for each in found]
    return [
        replace(each, left={path: kind for path, kind in left.items() if path not in read})
        for each, left in zip(found, kinds, strict=True)
    ]


def format_of(name: str) -> tuple[str | None, str]:
    """Format and compression by the end of a file's name; None for a format that is not known."""
    stem, suffix = os.path.splitext(name.lower())
    compression = COMPRESSIONS.get(suffix, "none")
    if compression == "none":
        return SUFFIXES.get(suffix), compression
    format = SUFFIXES.get(os.path.splitext(stem)[1])
    return None if format in _NEVER_COMPRESSED else format, compression


def find_files(source: str, *, format: str | None = None, number: int = 0) -> FoundFiles:
    """The files of a source: `shakespeare`, a file, a folder, or `hf:NAME:CONFIG:SPLIT`.

    `format` holds for every file of the source, whatever its name. `number` is that of the source among several.
    """
    if source == SHAKESPEARE:
        path = shakespeare()
        return FoundFiles((InputFile(str(path), SHAKESPEARE, "text", "none", path.stat().st_size, number),))
    if source.startswith(HUB):
        hub_parts(source)  # an error now, rather than when everything before it has been read
        return FoundFiles((InputFile(source, shown(source), "hub", "none", 0, number),))
    try:
        mode = os.stat(source).st_mode
    except PermissionError as error:
        raise DataError(
            f"cannot read {shown(source)}: {error.strerror}", "check that you may read the folder it is in"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"there is no source {shown(source)}", _missing_hint(source)) from error
    if stat.S_ISDIR(mode):
        return _in_folder(source, format, number)
    if not stat.S_ISREG(mode):
        raise DataError(f"the source {shown(source)} is neither a file nor a folder", f"give {_CHOICES}")
    if (format or format_of(source)[0]) is None:
        mend = "convert it to text first" if _is_binary(source) else "set data.format, or rename the file"
        raise DataError(
            f"the source {shown(source)} is of a type that cannot be read: {type_of(source)}",
            f"the types are {_TYPES}; {mend}",
        )
    listed = _listed(source, format, number)
    return FoundFiles((listed,)) if isinstance(listed, InputFile) else FoundFiles(problems=(listed,))


def slices_of(file: InputFile, target: int = PIECE) -> list[Slice] | None:
    """Slices of about `target` bytes that can be read side by side; None for what is better read in one go.

    Small files that cannot be cut are one slice. So are crawl files of any size, which come in great numbers.
    """
    if file.format in _SLICED and file.compression == "none":
        return _ranges(file, file.bytes, target)
    if file.format == "parquet":
        return _row_groups(file, target)
    if file.format == "hub" or (file.format != "warc" and file.bytes > _WHOLE_BYTES):
        return None
    return [Slice(file)]


def text_bytes(file: InputFile, most: int) -> int:
    """How many bytes a file has when decompressed, counted up to a little more than `most`."""
    if file.compression == "none":
        return file.bytes
    total = 0
    with ByteStream(file) as stream:
        for chunk in stream:
            total += len(chunk)
            if total > most:
                break
    return total


def _ranges(file: InputFile, total: int, step: int) -> list[Slice]:
    starts = range(0, max(total, 1), step)
    # The last goes on to the end, wherever that is by now.
    return [Slice(file, start, start + step if start + step < total else None) for start in starts]


def _row_groups(file: InputFile, target: int) -> list[Slice]:
    from flatout.corpus import arrow

    slices: list[Slice] = []
    start = held = 0
    sizes = arrow.parquet_group_bytes(file.path)
    # What the footer of a damaged file says of sizes is no reason to read it a thousand times.
    most = min(1 + file.bytes // 2**10, _MOST_SHARES)
    for group, size in enumerate(sizes):
        if group > start and (held + size > target or size > PIECE):
            slices.append(Slice(file, start, group))
            start, held = group, 0
        held += size
        if size > PIECE:
            shares = min(-(-size // PIECE), most)
            slices += [Slice(file, group, group + 1, share, shares) for share in range(shares)]
            start, held = group + 1, 0
    return [*slices, Slice(file, start, None)] if start < len(sizes) or not slices else slices


def _in_folder(source: str, format: str | None, number: int) -> FoundFiles:
    root = os.path.realpath(source)
    files: dict[str, InputFile] = {}
    links: list[str] = []
    problems: list[Problem] = []
    left: dict[str, str] = {}

    def list_file(path: str) -> None:
        listed = _listed(path, format, number)
        if isinstance(listed, Problem):
            if listed.kind == "empty":
                left[path] = _EMPTY
            else:
                problems.append(listed)
        elif format is None and listed.format == "tokens" and not has_tokens(listed):
            left[path] = type_of(path) + _NO_TOKENS
        else:
            files[path] = listed

    def refuse(error: OSError) -> None:
        # os.walk would pass over a folder that it cannot read without a word.
        problems.append(_unreadable(str(error.filename or source), error, records=0))

    for parent, folders, names in os.walk(source, onerror=refuse):
        if format is None and not _SAVED.isdisjoint(names):
            raise DataError(
                f"{shown(parent)} is a dataset as `save_to_disk` writes it, which is not read",
                "write it as a file with `Dataset.to_parquet`, and name that",
            )
        folders[:] = [name for name in folders if not name.startswith(".")]
        problems.extend(filter(None, (_link_problem(os.path.join(parent, name), root) for name in folders)))
        for name in names:
            path = os.path.join(parent, name)
            if name.startswith("."):
                continue
            is_leftover = name.lower().endswith(_LEFTOVERS)
            if is_leftover or (format or format_of(name)[0]) is None:
                left[path] = type_of(name) + BINARY * (not is_leftover and _is_binary(path))
            elif problem := _link_problem(path, root):
                problems.append(problem)
            elif os.path.islink(path):
                links.append(path)
            elif os.path.isfile(path):
                list_file(path)
            else:
                left[path] = "no file"
    read = {os.path.realpath(path) for path in files}
    for path in sorted(links):
        target = os.path.realpath(path)
        if target not in read and os.path.isfile(target):
            read.add(target)
            list_file(path)
    if not files and not problems:
        found = ", ".join(f"{count} of {name}" for name, count in Counter(left.values()).most_common(4)) or "no files"
        as_text = (
            "; data.format=text reads every file as text, whatever its name" if FoundFiles(left=left).unknown else ""
        )
        raise DataError(
            f"the folder {shown(source)} holds no file that can be read; it has {found}",
            f"the types are {_TYPES}{as_text}",
        )
    order = sorted(files, key=lambda path: Path(os.path.relpath(path, source)).parts)
    problems.sort(key=lambda problem: (problem.file, problem.kind))
    return FoundFiles(tuple(files[path] for path in order), tuple(problems), left)


def _listed(path: str, format: str | None, number: int) -> InputFile | Problem:
    by_name, compression = format_of(path)
    file = InputFile(path, shown(path), format or by_name or "", compression, 0, number)
    try:
        with open(path, "rb") as opened:  # the only sure way to know whether we may
            file = replace(file, bytes=os.fstat(opened.fileno()).st_size)
    except OSError as error:
        return _unreadable(path, error, records=1 if file.format == "text" else 0)
    if file.bytes == 0:
        return Problem(file.name, "", "empty", "the file is empty", records=0)
    if format is None and file.format == "text":
        with ByteStream(file) as stream:
            if stream.read(len(_CRAWL)) == _CRAWL:
                return replace(file, format="warc")
    return file


def _link_problem(path: str, root: str) -> Problem | None:
    if not os.path.islink(path):
        return None
    target = os.path.realpath(path)
    if os.path.commonpath([root, target]) != root:
        message = f"the link leads out of the folder, to {shown(target)}"
    elif not os.path.exists(target):
        message = f"the link leads to {shown(target)}, which is not there"
    else:
        return None
    return Problem(shown(path), "", "link", message, records=0)


def _missing_hint(source: str) -> str:
    if source == "-":
        return "standard input cannot be read again: write it to a file, and name that"
    folder = os.path.dirname(source) or "."
    try:
        beside = [os.path.join(os.path.dirname(source), name) for name in os.listdir(folder)]
    except (OSError, ValueError):
        beside = []
    close = difflib.get_close_matches(source, [SHAKESPEARE, *beside], n=1, cutoff=0.75)
    if close:
        return f"did you mean {shown(close[0])}? Give {_CHOICES}"
    here = "" if os.path.isabs(source) else "; a path is taken from the folder you are in"
    return f"give {_CHOICES}{here}"


def type_of(name: str) -> str:
    """The type of a file as its name has it: the suffix, with that of its compression."""
    stem, suffix = os.path.splitext(os.path.basename(name))
    if suffix.lower() in COMPRESSIONS:
        suffix = os.path.splitext(stem)[1] + suffix
    return shown(suffix.lower()) or _NO_SUFFIX


def _is_binary(path: str) -> bool:
    """Whether a file of a type that is not known holds no text. One that cannot be read may hold some."""
    if os.path.splitext(path)[1].lower() in _BINARY_TYPES:
        return True
    if os.path.islink(path) or not os.path.isfile(path):  # opening a pipe would wait for ever
        return False
    try:
        with open(path, "rb") as file:
            head = file.read(_LOOKED_AT)
    except OSError:
        return False
    try:
        return "\0" in head[: whole_characters(head)].decode("utf-8")
    except UnicodeDecodeError:
        return True


def _unreadable(path: str, error: OSError, records: int) -> Problem:
    return Problem(shown(path), "", "unreadable", f"cannot read it: {error.strerror or error}", records)


# Corpora by the names that people use: the dataset on the hub, and the config of it that is taken if none is named.
ALIASES = {
    "c4": ("allenai/c4", "en"),
    "fineweb": ("HuggingFaceFW/fineweb", "sample-10BT"),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
    "openwebtext": ("Skylion007/openwebtext", ""),
    "tinystories": ("roneneldan/TinyStories", ""),
}
DEFAULT_SPLIT = "train"


def hub_parts(path: str) -> tuple[str, str | None, str]:
    """Name, config and split of `hf:NAME`, `hf:NAME:CONFIG`, `hf:NAME::SPLIT` or `hf:NAME:CONFIG:SPLIT`."""
    name, *others = path.removeprefix(HUB).split(":")
    if not path.startswith(HUB) or not name or len(others) > 2:
        raise DataError(f"{shown(path)} names no dataset", "write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    config, split = [*others, "", ""][:2]
    if name.lower() in ALIASES and not os.path.isdir(name):
        name, usual = ALIASES[name.lower()]
        config = config or usual
    return name, config or None, split or DEFAULT_SPLIT
