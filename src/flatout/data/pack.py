"""Text to a prepared dataset: whole or not at all, by as many processes as there are, and again after a kill.

Idea: the input is cut into parts, each part becomes tokens in a worker process, and finished parts lie in a hidden work
folder beside the target until all are there. Then they are put together in order, flushed, and moved into place by one
rename. Whoever opens the target sees a complete dataset or none, wherever the packer was killed; the next packer
resumes with the finished parts.

Nothing is removed but what carries our mark: the work folder, unfinished datasets, and the files that the manifest of
an older dataset names. A command that is refused leaves the disk as it was.

Contract: the bytes are a pure function of the input and the settings: neither the number of workers nor an
interruption changes them. Memory does not grow with the corpus. Bad input is listed in `problems.jsonl` and the rest is
prepared; only an input of which nothing is left is an error. The end-of-text id follows every document, where the
tokenizer has one; ids of different documents are never merged, since each is tokenized by itself.

Trap: `char` needs a pass over the source before the one that tokenizes. A source that changes while it is read is
noticed and refused.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import final

import flatout
from flatout.config.sizes import learned_vocab
from flatout.corpus.document import Document, shown
from flatout.data.library_tokenizers import HuggingFaceTokenizer
from flatout.data.merge import Finished, Journal, PassingError, clear, foreign_in, merge_parts
from flatout.data.part import CorpusPart, Count, PartHead, Recipe, Tally
from flatout.data.plan import (
    CUTTING,
    PART_BYTES,
    Done,
    Request,
    check_free,
    documents_of,
    find_inputs,
    find_part,
    limits_of,
    parts_of,
)
from flatout.data.shards import FILE_NAME, MANIFEST, REPORT, Manifest, read_manifest
from flatout.data.tokenizer import CharTokenizer, Tokenizer, load_tokenizer, token_dtype
from flatout.data.tokenizer_files import train_bpe
from flatout.data.workers import ProcessEngine
from flatout.errors import DataError, ResourceError
from flatout.files import temporary_name
from flatout.folders import MARK, claim, foreign_entry, make_folders, remove_empty, sweep, whole_folder
from flatout.records import PrepareProgress

if sys.platform != "win32":
    import fcntl

Progress = Callable[[PrepareProgress], None]

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_FOLDER = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EEXIST, errno.EINVAL)
_LEARNED_FROM = 2**26  # characters
_OTHER_FOLDER = "set data.folder to another folder"


def pack_corpus(
    request: Request,
    folder: str | Path,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    check: Callable[[Path], None] | None = None,
) -> Manifest:
    """Prepare what `request` asks for into `folder`, which must not hold a dataset yet unless `overwrite` is given.

    `workers` is the number of worker processes; None takes one per core, or none for a small corpus. `check` may raise
    an error about the new dataset before it takes the place of what is in `folder`.
    """
    target = _resolved(folder)
    try:
        made = make_folders(target.parent)
        try:
            with _only_packer(target):
                return _pack(_Packer(request, workers, progress), target, overwrite, check)
        except BaseException:
            remove_empty(made)
            raise
    except OSError as error:
        raise _write_error(error, target) from error


def _pack(packer: "_Packer", target: Path, overwrite: bool, check: Callable[[Path], None] | None) -> Manifest:
    """Prepares with the lock held."""
    _check_target(target, overwrite)
    hidden = target.with_name(f".{target.name}.partial")
    for place in (target, hidden):
        sweep(place.parent, re.escape(place.name), locked=True)
    work = _work_folder(hidden, overwrite)
    try:
        finished = packer.tokenize(work)
        with whole_folder(target, replaces=_files_of(target), occupied=_occupied) as folder:
            manifest = merge_parts(finished, folder, lambda: packer.report("merging"))
            if check is not None:
                check(folder)
    except PassingError:
        raise
    except DataError:
        if packer.began:  # going on would meet the same error
            clear(work)
        raise
    finally:
        if not packer.began:
            _forget(work)
    clear(work)
    return manifest


def worker_count(input_bytes: int) -> int:
    """One per core that this process may use; a corpus of a few megabytes is done before a worker has started."""
    if input_bytes < 2 * PART_BYTES:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 64)


@final
class _Packer:
    """One prepare, from the list of files to a dataset in `work`/dataset."""

    def __init__(self, request: Request, workers: int | None, progress: Progress | None) -> None:
        self.began = False  # the work folder is ours from here on; before, it may hold the parts of another command
        self._request = request
        self._workers = workers
        self._progress = progress

    def tokenize(self, work: Path) -> Finished:
        """Every part of the request into a journal in `work`."""
        request = self._request
        self._inputs = inputs = find_inputs(request)
        settings = request.settings(inputs.bytes, inputs.digest())
        self._state = PrepareProgress("reading", 0, len(inputs.files), 0, inputs.bytes, 0, 0, 0)
        if self._progress is not None and inputs.summary:
            self._progress(replace(self._state, notice=inputs.summary))
        count = worker_count(inputs.bytes) if self._workers is None else min(self._workers, inputs.most_parts)
        stamps = inputs.stamps()
        with ProcessEngine(count) as engine:
            tokenizer = self._find_tokenizer(engine)
            subword = tokenizer.kind not in ("char", "bytes")
            check_free(
                work, inputs, token_dtype(tokenizer.vocab).itemsize, subword, limits_of(request.data) is not None
            )
            self.began = True
            plan = {  # all that a finished part depends on
                "flatout": flatout.__version__,
                "settings": settings,
                "tokenizer": tokenizer.fingerprint,
                "inputs": hashlib.sha256(json.dumps(stamps).encode("ascii")).hexdigest(),
                "cutting": CUTTING,
            }
            journal, recipe = Journal(work, plan), self._recipe(tokenizer)
            parts = self._tokenize(engine, journal, recipe)
        if inputs.stamps() != stamps:
            raise DataError("the source changed while it was read", "prepare it again when nothing writes to it")
        return Finished(journal, parts, inputs, request, recipe, tokenizer, settings)

    def _recipe(self, tokenizer: Tokenizer | None) -> Recipe:
        description = None if tokenizer is None else tokenizer.to_json()
        near = "near_duplicates" in self._request.clean.drop
        return Recipe(self._request.options, self._request.rules, description, near)

    def _find_tokenizer(self, engine: ProcessEngine) -> Tokenizer:
        data = self._request.data
        vocab = learned_vocab(data.tokenizer)
        if vocab is not None:
            return HuggingFaceTokenizer(train_bpe(self._texts_to_learn_from(), vocab))
        if data.tokenizer != "char":
            return load_tokenizer(data.tokenizer, None)
        found: set[str] = set()
        if limits_of(data) is not None:  # in order, since what is taken depends on what came before
            for item in documents_of(self._request, self._inputs):
                found.update(item.text if isinstance(item, Document) else "")
        else:
            recipe = self._recipe(None)
            parts = (part for part in parts_of(self._inputs, recipe.options, Done()) if isinstance(part, CorpusPart))
            for part, characters in engine.run("characters", recipe, parts):
                found.update(characters)
                self.report("characters", files=part.files, bytes=part.bytes)
        self._state = replace(self._state, phase="reading", files=0, bytes=0)
        if not found:
            found = {"\n"}  # there is no text; the report says what became of the input
        return CharTokenizer("".join(sorted(found)), unknown=data.unknown_characters)

    def _texts_to_learn_from(self) -> list[str]:
        """The beginning of the text, without what a contiguous split keeps for validation."""
        data, texts, size = self._request.data, [], 0
        for item in documents_of(self._request, self._inputs):
            if size >= _LEARNED_FROM:
                return texts
            if isinstance(item, Document):
                texts.append(item.text)
                size += len(item.text)
        left = int(size * (1.0 - data.val_fraction)) if data.split == "contiguous" and data.val_source is None else size
        while texts and size > left:
            size -= len(texts[-1])
            texts[-1] = texts[-1][: max(0, left - size)]
            size += len(texts[-1])
            texts = texts if texts[-1] else texts[:-1]
        return texts or ["\n"]  # there is no text; the report says what became of the input

    def _tokenize(self, engine: ProcessEngine, journal: Journal, recipe: Recipe) -> int:
        """Make sure that every part is in the journal, and return how many there are."""
        if limits_of(self._request.data) is None:
            return self._tokenize_parts(engine, journal, recipe, None, 0)
        parts = 0
        for source in range(len(self._request.sources)):
            parts = self._tokenize_parts(engine, journal, recipe, source, parts)
        return parts

    def _tokenize_parts(
        self, engine: ProcessEngine, journal: Journal, recipe: Recipe, source: int | None, first: int
    ) -> int:
        """The parts of one source, or of all, numbered from `first`; the number after the last that counts.

        Where limits end a source, workers may have gone further by then. The next source uses those numbers again.
        """
        parts = first
        limited = (None, "") if source is None else (self._request.limits(source), self._request.sources[source].path)

        def trim(number: int, count: int, after: Count) -> Count:
            limits, options = limited[0], recipe.options
            assert limits is not None, "only a limit ends a source"
            assert source is not None, "limits are counted by source"
            part = partial(find_part, self._inputs, options, number, source, first)
            result, after = limits.trimmed(journal.read(number), count, after, recipe, part)
            journal.write(number, result)
            return after

        tally = Tally(*limited, first, trim)

        def missing() -> Iterator[CorpusPart]:
            nonlocal parts
            for part in parts_of(self._inputs, recipe.options, journal, source=source, first=first):
                parts += 1
                if isinstance(part, CorpusPart):
                    yield part
                else:
                    self._report_part(journal.head(part))
                    if source is not None:
                        tally.add(part, journal.read(part, tokens=False, signatures=False))
                if tally.full:
                    return

        for part, result in engine.run("tokens", recipe, missing()):
            journal.write(part.number, result)
            self._report_part(result.head)
            tally.add(part.number, result)
        return tally.parts if tally.full else parts

    def _report_part(self, head: PartHead) -> None:
        more = {"documents": head.documents, "tokens": head.tokens, "problems": len(head.problems)}
        self.report("reading", files=head.files, bytes=head.bytes, **more)

    def report(self, phase: str, **more: int) -> None:
        """Add to the counts and report the progress."""
        self._state = replace(self._state.plus(**more), phase=phase)
        if self._progress is not None:
            self._progress(self._state)


# --- folders ----------------------------------------------------------------------------------------------------------


def _resolved(folder: str | Path) -> Path:
    """The folder of a dataset, which must be one that a rename can put in place."""
    try:
        target = Path(folder).resolve()
        inside = Path.cwd().is_relative_to(target)
    except (OSError, ValueError, RuntimeError) as error:  # a NUL byte, a loop of links, a folder that is gone
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot use {shown(folder)} as a folder: {reason}", _OTHER_FOLDER) from error
    if inside:
        raise DataError(f"the dataset cannot take the place of {shown(target)}, which you are in", _OTHER_FOLDER)
    return target


@contextlib.contextmanager
def _only_packer(target: Path) -> Iterator[None]:
    """Hold a lock that the system releases even when the process is killed, so that two packers never mix files.

    The lock file is empty. One that holds something is not ours, and neither is a link.
    """
    if sys.platform == "win32":
        yield
        return
    path = target.with_name(f".{target.name}.lock")
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR):
                raise _in_the_way(path) from error
            raise
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size:
                raise _in_the_way(path)
            _lock(descriptor, path, target)
            # The holder before us may have removed the file between our opening and locking it; then the lock is void.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(found, os.lstat(path)):
                    break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(descriptor: int, path: Path, target: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DataError(
            f"another process is preparing {shown(target)}", "wait until it has finished, or choose another folder"
        ) from error
    except OSError as error:
        path.unlink(missing_ok=True)
        raise DataError(
            f"the disk of {shown(target.parent)} cannot lock files, which keeps two processes from preparing the same "
            f"dataset: {error.strerror}",
            "set data.folder to a folder on a local disk",
        ) from error


def _work_folder(hidden: Path, overwrite: bool) -> Path:
    """The folder for finished parts: the one of an earlier prepare, or a new one.

    Where its name is taken by something that we did not make, the command is refused, or with `overwrite` works
    elsewhere; what is there is left alone.
    """
    foreign = foreign_in(hidden) if claim(hidden) else ""
    if foreign is None:
        return hidden
    if not overwrite:
        what = f"holds {foreign!r}, which is not ours" if foreign else "is not ours"
        raise DataError(
            f"finished parts would go to {shown(hidden)}, which {what}",
            "move it away, set data.folder to another folder, or run `flatout prepare` with --overwrite, which starts "
            "anew and leaves it alone",
        )
    fresh = temporary_name(hidden)
    claim(fresh)
    return fresh


def _forget(work: Path) -> None:
    """Removes a work folder in which nothing was begun; finished parts of an earlier command stay."""
    if not any(path.name != MARK for path in work.iterdir()):
        clear(work)


def _check_target(target: Path, overwrite: bool) -> None:
    """Refuse a target that holds a dataset (unless it may be overwritten) or anything that is not ours to remove."""
    if not target.exists():
        return
    if not target.is_dir():
        raise DataError(
            f"{shown(target)} is a file, not a folder", "choose another folder for the dataset: data.folder"
        )
    if not any(target.iterdir()):
        return
    if (foreign := foreign_entry(target, _files_of(target))) is not None:
        raise _occupied(target, foreign)
    if not overwrite:
        raise DataError(
            f"the folder {shown(target)} already holds a dataset",
            "use it as it is, replace it with `flatout prepare --overwrite`, or choose another folder",
        )


def _files_of(target: Path) -> list[str]:
    """The names of the files of the dataset in a folder; none where it holds no dataset of ours."""
    with contextlib.suppress(DataError):
        return [MANIFEST, *(info.name for info in read_manifest(target).files)]
    # A damaged manifest names nothing, and must not keep its folder from being prepared again. That the folder is ours
    # is then decided by what our files say of themselves, and by the names of all of them.
    with contextlib.suppress(OSError):
        if b"flatout-tokens" in _raw(target / MANIFEST) or b"flatout-report" in _raw(target / REPORT):
            return [path.name for path in target.iterdir() if FILE_NAME.fullmatch(path.name)]
    return []


def _raw(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() and not path.is_symlink() else b""


def _occupied(target: Path, name: str) -> PassingError:
    return PassingError(
        f"the folder {shown(target)} is not empty and not a dataset; it holds {shown(name)!r}",
        "name another folder as data.folder; where its files are the text, name it as data.source",
    )


def _in_the_way(path: Path) -> DataError:
    return DataError(
        f"{shown(path)} is in the way: it is not a lock file of ours",
        "move it away, or set data.folder to another folder",
    )


def _write_error(error: OSError, target: Path) -> DataError | ResourceError:
    if error.errno in _DISK_FULL:
        return ResourceError(
            f"no room to write the dataset {shown(target)}: {error.strerror}",
            "free some disk space and run it again: it goes on where it stopped",
        )
    hint = _OTHER_FOLDER if error.errno in _NO_FOLDER else "check that the folder can be written to, or set data.folder"
    return DataError(f"cannot write the dataset {shown(target)}: {error.strerror or error}", hint)
