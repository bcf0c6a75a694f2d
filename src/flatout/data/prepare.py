"""The dataset that a config asks for: where it lies, whether it still fits, and making it.

No torch here: `flatout prepare` and its workers must not pay for it.
"""

import hashlib
import json
from pathlib import Path

from flatout.config.schema import CleanConfig, DataConfig
from flatout.data.inspect import read_problems, read_report
from flatout.data.manifest import MANIFEST, PROBLEMS, Manifest, read_manifest
from flatout.data.pack import Progress, pack_corpus
from flatout.data.plan import STDIN, Request, request_of, source_bytes
from flatout.data.tokenizer import load_tokenizer
from flatout.data.workers import EngineName
from flatout.errors import ConfigError, DataError


class IncompleteError(DataError):
    """A dataset was made and some of its input could not be used. The dataset is there, and it is usable."""


def data_folder(data: DataConfig) -> Path:
    """Where the token shards live: as written, or data/SOURCE-TOKENIZER."""
    if data.folder is not None:
        return Path(data.folder)
    if data.source is None:
        raise ConfigError("neither data.source nor data.folder is set", "set data.source to a text file or folder")
    return Path("data") / f"{_source_name(data)}-{Path(data.tokenizer).stem}"


def _source_name(data: DataConfig) -> str:
    if isinstance(data.source, list):
        described = json.dumps(data.model_dump(mode="json")["source"], sort_keys=True)
        return f"mix-{hashlib.sha256(described.encode('utf-8')).hexdigest()[:8]}"
    if data.source == STDIN:
        return "stdin"
    source = str(data.source)
    if source.startswith("hf:"):
        return source.removeprefix("hf:").replace("/", "-").replace(":", "-")
    name = Path(source).name
    for suffix in (".gz", ".zst", ".xz", ".bz2"):
        name = name.removesuffix(suffix)
    return Path(name).stem


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
    if (folder / MANIFEST).exists() and not overwrite:
        _check_settings(data, clean, folder)
        return folder, False
    if data.source is None:
        raise DataError(
            f"{folder} holds no prepared data and data.source is not set",
            "set data.source to a text file or folder, or data.folder to prepared shards",
        )
    request = request_of(data, clean)
    pack_corpus(request, folder, workers=workers, engine=engine, progress=progress, overwrite=overwrite)
    return folder, True


def check_complete(folder: Path) -> None:
    """Raise `IncompleteError` where some of the input could not be used."""
    report = read_report(folder)
    if report is not None and report["problem_count"]:
        first = read_problems(folder, 1)[0]
        place = f", {first['place']}" if first["place"] else ""
        more = f", and {report['problem_count'] - 1:,} more" if report["problem_count"] > 1 else ""
        mend = "set data.field to where the text is" if first["kind"] == "field" else "mend the input"
        raise IncompleteError(
            f"{report['damaged']:,} of {report['records']:,} records could not be used: "
            f"{first['file']}{place}: {first['message']}{more}",
            f"all are listed in {folder / PROBLEMS}; {mend} and prepare with --overwrite, "
            f"or go on with the rest, which is prepared",
        )


def _check_settings(data: DataConfig, clean: CleanConfig | None, folder: Path) -> None:
    """Shards prepared from other settings must not be trained on by mistake."""
    if data.source is None:
        return
    manifest = read_manifest(folder)
    request = request_of(data, clean)
    asked = request.settings(0)
    defaults = request_of(DataConfig(), CleanConfig()).settings(0)
    for name, wanted in {**asked, "tokenizer": None}.items():
        if name == "source_bytes":
            continue
        stored = manifest.settings.get(name, defaults.get(name))
        if name == "tokenizer":
            stored, wanted = _tokenizers(manifest, data)
        if stored != wanted:
            raise DataError(
                f"{folder} was prepared with {name} {stored!r}, the config says {wanted!r}",
                "set data.folder to a new folder, or run `flatout prepare --overwrite` with this config",
            )
    _check_source_size(data, request, manifest, folder)


def _tokenizers(manifest: Manifest, data: DataConfig) -> tuple[str, str]:
    """What a dataset was tokenized with, and what is asked for."""
    if data.tokenizer in ("char", "bytes", "gpt2"):
        return manifest.tokenizer_kind, data.tokenizer
    return manifest.tokenizer_fingerprint, load_tokenizer(data.tokenizer, None).fingerprint


def _check_source_size(data: DataConfig, request: Request, manifest: Manifest, folder: Path) -> None:
    before = manifest.settings["source_bytes"]
    try:
        now = source_bytes(request)
    except DataError:  # the text is gone; the shards stand for themselves
        now = before
    if now is not None and now != before:
        raise DataError(
            f"{folder} was prepared from {before:,} bytes of text, {data.source} now has {now:,}",
            "run `flatout prepare --overwrite` with this config, or set data.folder to a new folder",
        )
