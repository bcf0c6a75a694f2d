"""Text to a prepared dataset: whole or not at all, by as many processes as there are, and again after a kill.

Idea: the input is cut into parts, each part becomes tokens in a worker process, and finished parts lie in a hidden work
folder beside the target until all are there. Then they are put together in order, flushed, and moved into place by one
rename. Whoever opens the target sees a complete dataset or none, wherever the packer was killed; the next packer goes
on with the finished parts.

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
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

import flatout
from flatout.corpus.document import Document
from flatout.data.journal import Journal
from flatout.data.manifest import FILE_NAME, MANIFEST, TOKENIZER, VERSION, Manifest
from flatout.data.merge import merge_parts, write_file
from flatout.data.part import Part, Recipe, judged
from flatout.data.plan import PART_BYTES, Done, Inputs, Request, check_free, find_inputs, find_part, parts_of
from flatout.data.tokenizer import CharTokenizer, Tokenizer, load_tokenizer, token_dtype
from flatout.data.workers import EngineName, open_engine
from flatout.errors import DataError, ResourceError
from flatout.files import sync_folder
from flatout.records import PrepareProgress

if sys.platform != "win32":
    import fcntl

Progress = Callable[[PrepareProgress], None]

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def pack_corpus(
    request: Request,
    folder: str | Path,
    *,
    workers: int | None = None,
    engine: EngineName = "local",
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Prepare what `request` asks for into `folder`, which must not hold a dataset yet unless `overwrite` is given.

    `workers` is the number of worker processes; None takes one per core, or none for a small corpus.
    """
    target = Path(folder).resolve()
    work = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_packer(target):
            _check_target(target, overwrite)
            work.mkdir(exist_ok=True)
            try:
                manifest = _Packer(request, work, workers, engine, progress).pack()
            except DataError:
                shutil.rmtree(work, ignore_errors=True)  # going on would meet the same error
                raise
            finally:
                with contextlib.suppress(OSError):
                    work.rmdir()  # if nothing was begun, nothing is left
            _move_into_place(work / "dataset", target)
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise _write_error(error, target) from error
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

    def __init__(
        self, request: Request, work: Path, workers: int | None, engine: EngineName, progress: Progress | None
    ) -> None:
        self._request = request
        self._work = work
        self._progress = progress
        self._inputs = find_inputs(request, work)
        self._settings = request.settings(self._inputs.bytes, self._inputs.digest())
        count = worker_count(self._inputs.bytes) if workers is None else min(workers, self._inputs.most_parts)
        self._engine = open_engine(engine, count)
        self._told = PrepareProgress("reading", 0, len(self._inputs.files), 0, self._inputs.bytes, 0, 0, 0)

    def pack(self) -> Manifest:
        stamps = self._inputs.stamps()
        with self._engine:
            tokenizer = self._tokenizer()
            itemsize = token_dtype(tokenizer.vocab).itemsize
            subword = tokenizer.kind not in ("char", "bytes")
            check_free(self._work, self._inputs, itemsize, subword)
            recipe = self._recipe(tokenizer)
            journal = Journal(self._work, self._plan(tokenizer, stamps))
            parts = self._tokenize(recipe, journal, itemsize)
        if self._inputs.stamps() != stamps:
            raise DataError("the source changed while it was read", "prepare it again when nothing writes to it")
        return self._merge(journal, parts, recipe, tokenizer)

    def _recipe(self, tokenizer: Tokenizer | None) -> Recipe:
        description = None if tokenizer is None else tokenizer.to_json()
        near = self._request.clean.near_duplicates is not None
        return Recipe(self._request.options, self._request.rules, description, near)

    def _plan(self, tokenizer: Tokenizer, stamps: list[list[object]]) -> dict[str, object]:
        """All that a finished part depends on."""
        return {
            "flatout": flatout.__version__,
            "settings": self._settings,
            "tokenizer": tokenizer.fingerprint,
            "inputs": hashlib.sha256(json.dumps(stamps).encode("ascii")).hexdigest(),
        }

    def _tokenizer(self) -> Tokenizer:
        data = self._request.data
        if data.tokenizer != "char":
            return load_tokenizer(data.tokenizer, None)
        recipe = self._recipe(None)
        parts = (part for part in parts_of(self._inputs, recipe.options, Done()) if isinstance(part, Part))
        found: set[str] = set()
        for part, characters in self._engine.run("characters", recipe, parts):
            found.update(characters)
            self._tell("characters", part.files, part.bytes, 0, 0, 0)
        self._told = PrepareProgress("reading", 0, len(self._inputs.files), 0, self._inputs.bytes, 0, 0, 0)
        if not found:
            found = {"\n"}  # there is no text; what became of the input is told when it has been read
        return CharTokenizer("".join(sorted(found)), unknown=data.unknown_characters)

    def _tokenize(self, recipe: Recipe, journal: Journal, itemsize: int) -> int:
        """Make sure that every part is in the journal, and return how many there are."""
        parts = 0

        def missing() -> Iterator[Part]:
            nonlocal parts
            for part in parts_of(self._inputs, recipe.options, journal):
                parts += 1
                if isinstance(part, Part):
                    yield part
                else:
                    head = journal.head(part)
                    self._tell("reading", head.files, head.bytes, head.documents, head.tokens, len(head.problems))

        for part, result in self._engine.run("tokens", recipe, missing()):
            head = journal.write(part.number, part.source, part.bytes, part.files, result, itemsize)
            self._tell("reading", head.files, head.bytes, head.documents, head.tokens, len(head.problems))
        return parts

    def _merge(self, journal: Journal, parts: int, recipe: Recipe, tokenizer: Tokenizer) -> Manifest:
        folder = self._work / "dataset"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        merged = merge_parts(
            journal,
            parts,
            self._inputs,
            self._request,
            tokenizer,
            folder,
            lambda number, high, low: _text_of(self._inputs, recipe, number, high, low),
            lambda number: self._tell("merging", 0, 0, 0, 0, 0),
        )
        manifest = Manifest(
            version=VERSION,
            dtype=token_dtype(tokenizer.vocab).name,
            vocab=tokenizer.vocab,
            tokenizer_kind=tokenizer.kind,
            tokenizer_fingerprint=tokenizer.fingerprint,
            tokenizer=write_file(folder / TOKENIZER, [json.dumps(tokenizer.to_json()).encode("ascii"), b"\n"]),
            splits=merged.splits,
            settings=self._settings,
            report=merged.report,
            problems=merged.problems,
        )
        write_file(folder / MANIFEST, [manifest.to_bytes()])
        return manifest

    def _tell(self, phase: str, files: int, size: int, documents: int, tokens: int, problems: int) -> None:
        told = self._told
        self._told = PrepareProgress(
            phase,
            told.files + files,
            told.total_files,
            told.bytes + size,
            told.total_bytes,
            told.documents + documents,
            told.tokens + tokens,
            told.problems + problems,
        )
        if self._progress is not None:
            self._progress(self._told)


def _text_of(inputs: Inputs, recipe: Recipe, number: int, high: int, low: int) -> str:
    """The text with that hash in the part of that number, read again."""
    wanted = high.to_bytes(8, "big") + low.to_bytes(8, "big")
    for _, item in judged(recipe, find_part(inputs, recipe.options, number)):
        if isinstance(item, Document):
            raw = item.text.encode("utf-8", "surrogatepass")
            if hashlib.sha256(raw).digest()[:16] == wanted:
                return item.text
    raise DataError("the source changed while it was read", "prepare it again when nothing writes to it")


@contextlib.contextmanager
def _only_packer(target: Path) -> Iterator[None]:
    """Hold a lock that the system releases even when the process is killed, so that two packers never mix files."""
    if sys.platform == "win32":
        yield
        return
    path = target.with_name(f".{target.name}.lock")
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise DataError(
                f"another process is preparing {target}", "wait until it has finished, or choose another folder"
            ) from error
        # The holder before us may have removed the file between our opening and locking it; then the lock is void.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                break
        os.close(descriptor)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _check_target(target: Path, overwrite: bool) -> None:
    """Refuse a target that holds a dataset (unless told to overwrite it) or anything that is not ours to remove."""
    if not target.exists():
        return
    if not target.is_dir():
        raise DataError(f"{target} is a file, not a folder", "choose another folder for the dataset")
    names = sorted(entry.name for entry in target.iterdir())
    if (foreign := [name for name in names if not FILE_NAME.fullmatch(name)]) or (names and MANIFEST not in names):
        raise DataError(
            f"the folder {target} is not empty and not a dataset; it holds {(foreign or names)[0]!r}",
            "choose another folder for the dataset, or empty this one",
        )
    if names and not overwrite:
        raise DataError(
            f"the folder {target} already holds a dataset", "use it as it is, remove it, or choose another folder"
        )


def _move_into_place(made: Path, target: Path) -> None:
    sync_folder(made)
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        # A kill between the two renames leaves no dataset at the target, never a mixed one.
        target.rename(old)
    made.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_error(error: OSError, target: Path) -> DataError | ResourceError:
    if error.errno in _DISK_FULL:
        return ResourceError(
            f"no room to write the dataset {target}: {error.strerror}",
            "free some disk space and run it again: it goes on where it stopped",
        )
    return DataError(
        f"cannot write the dataset {target}: {error.strerror or error}", "check that the folder can be written to"
    )
