"""The dataset that a config asks for: where it lies, whether it still fits, and making it.

No torch here: `flatout prepare` and its workers must not pay for it.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

from flatout.config.catalogue import source_name
from flatout.config.schema import CleanConfig, DataConfig
from flatout.config.sizes import learned_vocab
from flatout.corpus.document import Problem
from flatout.data.causes import Cause, causes_of, mend_of
from flatout.data.inspect import read_problems, read_report
from flatout.data.limits import LIMITS
from flatout.data.manifest import MANIFEST, PROBLEMS, Manifest, read_manifest
from flatout.data.pack import Progress, pack_corpus
from flatout.data.plan import STDIN, Request, find_inputs, request_of
from flatout.data.tokenizer import load_tokenizer
from flatout.data.workers import EngineName
from flatout.errors import ConfigError, DataError


def data_folder(data: DataConfig) -> Path:
    """Where the token shards live: as written, or data/SOURCE-TOKENIZER."""
    if data.folder is not None:
        return Path(data.folder)
    if data.source is None:
        raise ConfigError(
            "neither data.source nor data.folder is set",
            "set data.source to a text file or folder; a run on token arrays needs them again, as data= in Python",
        )
    return Path("data") / f"{_source_name(data)}-{Path(data.tokenizer).stem}"


def has_dataset(folder: Path) -> bool:
    """Whether there is a manifest. A folder that cannot be looked at has none; writing to it tells why."""
    return os.path.exists(folder / MANIFEST)  # unlike Path.exists, it never raises


def _source_name(data: DataConfig) -> str:
    if isinstance(data.source, list):
        described = json.dumps(data.model_dump(mode="json")["source"], sort_keys=True)
        return f"mix-{hashlib.sha256(described.encode('utf-8')).hexdigest()[:8]}"
    if data.source == STDIN:
        return "stdin"
    return source_name(str(data.source))


def prepare_data(
    data: DataConfig,
    clean: CleanConfig | None = None,
    progress: Progress | None = None,
    *,
    overwrite: bool = False,
    workers: int | None = None,
    engine: EngineName = "local",
) -> tuple[Path, bool]:
    """Prepare data.source into its folder; keeps what is already there when it fits. True: it was made just now."""
    folder = data_folder(data)
    if has_dataset(folder) and not overwrite:
        _check_settings(data, clean, folder)
        return folder, False
    if data.source is None:
        raise DataError(
            f"{folder} holds no prepared data and data.source is not set",
            "set data.source to a text file or folder, or data.folder to prepared shards",
        )
    request = request_of(data, clean)
    _check_outside(folder, request)
    pack_corpus(request, folder, workers=workers, engine=engine, progress=progress, overwrite=overwrite)
    return folder, True


def _check_outside(folder: Path, request: Request) -> None:
    """A dataset inside its own source would be read as text by the next prepare."""
    for source in request.sources:
        if lies_inside(folder, source.path):
            raise DataError(
                f"the dataset {folder} would lie inside its own source {source.path}",
                "set data.folder to a folder outside of it",
            )


def lies_inside(folder: Path, source: str) -> bool:
    """Whether a dataset there would be part of a source that is a folder."""
    try:
        return os.path.isdir(source) and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(source))
    except (OSError, ValueError):  # a name that no file can have
        return False


def refuse_second_pipe(data: DataConfig) -> None:
    """What is piped in cannot be compared with a dataset that is already there."""
    folder = data_folder(data)
    if request_of(data).piped and has_dataset(folder):
        raise DataError(
            f"{folder} holds a dataset already, and what is piped in now may be another text",
            "add --overwrite, or set data.folder to a new folder",
        )


def check_complete(folder: Path) -> None:
    """Raise an error where some of the input could not be used. The dataset is there all the same, and usable."""
    report = read_report(folder)
    if report is not None and report["problem_count"]:
        causes = read_causes(folder)
        lost = (
            f"{report['damaged']:,} of {report['records']:,} records could not be used"
            if report["damaged"]
            else f"the input has {report['problem_count']:,} problems, by which no whole record is known to be lost"
        )
        field = read_manifest(folder).settings.get("field", "text")
        mend = mend_of(causes, [field] if isinstance(field, str) else field)
        raise DataError(
            f"{lost}: {causes[0].told}",
            f"to use them, prepare again with --overwrite: {mend}; or go on with the rest, which is prepared (every "
            f"problem is listed in {folder / PROBLEMS})",
        )


def read_causes(folder: Path) -> list[Cause]:
    """Why records of a dataset's input could not be used, the cause with the most records first."""
    return causes_of(Problem(**problem) for problem in read_problems(folder, sys.maxsize))


def _check_settings(data: DataConfig, clean: CleanConfig | None, folder: Path) -> None:
    """Shards prepared from other settings must not be trained on by mistake."""
    if data.source is None:
        return
    manifest = read_manifest(folder)
    request = request_of(data, clean)
    asked = {**dict.fromkeys(LIMITS), **request.settings(0, None)}
    defaults = request_of(DataConfig(), CleanConfig()).settings(0, None)
    for name, wanted in {**asked, "tokenizer": None}.items():
        if name in ("source_bytes", "source_sha256"):
            continue
        stored = manifest.settings.get(name, defaults.get(name))
        if name == "tokenizer":
            stored, wanted = _tokenizers(manifest, data)
        if stored != wanted:
            if name == "source" and not request.piped and "hf:" not in str(data.source):
                find_inputs(request, Path())  # which says so where there is no such text
            raise DataError(
                f"{folder} was prepared with {name} {stored!r}, the config says {wanted!r}",
                "set data.folder to a new folder, or run `flatout prepare --overwrite` with this config",
            )
    _check_source_size(data, request, manifest, folder)


def _tokenizers(manifest: Manifest, data: DataConfig) -> tuple[str, str]:
    """What a dataset was tokenized with, and what is asked for."""
    learned = manifest.settings.get("tokenizer", manifest.tokenizer_kind)
    if data.tokenizer in ("char", "bytes", "gpt2") or learned_vocab(data.tokenizer) is not None:
        return learned, data.tokenizer
    return manifest.tokenizer_fingerprint, load_tokenizer(data.tokenizer, None).fingerprint


def _check_source_size(data: DataConfig, request: Request, manifest: Manifest, folder: Path) -> None:
    before, digest = manifest.settings["source_bytes"], manifest.settings.get("source_sha256")
    try:
        inputs = None if request.piped else find_inputs(request, Path())
    except DataError:  # the text is gone; the shards stand for themselves
        inputs = None
    if inputs is None:
        return
    changed = f"was prepared from {before:,} bytes of text, {data.source} now has {inputs.bytes:,}"
    if inputs.bytes == before:
        changed = f"was prepared from another content of {data.source} than it has now"
        if digest is None or inputs.digest() in (digest, None):
            return
    raise DataError(
        f"{folder} {changed}",
        "run `flatout prepare --overwrite` with this config, or set data.folder to a new folder",
    )
