"""The dataset that a config asks for: where it lies, whether it still fits, and making it.

No torch here: `flatout prepare` and its workers must not pay for it.
"""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flatout.config.catalogue import source_name
from flatout.config.facts import field_facts
from flatout.config.former import as_now
from flatout.config.load import LoadedConfig, load_config, with_values
from flatout.config.schema import CleanConfig, DataConfig
from flatout.config.sizes import learned_vocab
from flatout.config.source import Source
from flatout.config.suggest import close_matches
from flatout.config.yaml_loader import format_value
from flatout.corpus.document import Problem
from flatout.data.inspect import Cause, all_problems, causes_of, encoding_mend, mend_of, names_to_read, read_report
from flatout.data.pack import Progress, pack_corpus
from flatout.data.part import LIMITS
from flatout.data.plan import DECISIVE, Request, find_inputs, request_of
from flatout.data.shards import MANIFEST, PROBLEMS, TOKENIZER, Manifest, read_manifest
from flatout.data.tokenizer import load_tokenizer
from flatout.errors import ConfigError, DataError, UsageError, many

# YAML reads it as text without quotes, as it does a name, which `format_value` leaves as it is.
_PATH = re.compile(r"-|\.{0,2}/[A-Za-z0-9_./-]*")


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
    """Whether there is a manifest. An unreadable folder has none; writing to it raises the error."""
    return os.path.exists(folder / MANIFEST)  # unlike Path.exists, it never raises


def _source_name(data: DataConfig) -> str:
    if isinstance(data.source, list):
        described = json.dumps(data.model_dump(mode="json")["source"], sort_keys=True)
        return f"mix-{hashlib.sha256(described.encode('utf-8')).hexdigest()[:8]}"
    return source_name(str(data.source))


def prepare_data(
    data: DataConfig,
    clean: CleanConfig | None = None,
    progress: Progress | None = None,
    *,
    overwrite: bool = False,
    workers: int | None = None,
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
    check_outside(folder, request)
    check = partial(_check_not_worse, folder=folder, data=data, clean=request.clean)
    pack_corpus(request, folder, workers=workers, progress=progress, overwrite=overwrite, check=check)
    return folder, True


def _check_not_worse(fresh: Path, folder: Path, data: DataConfig, clean: CleanConfig) -> None:
    """Keeps the dataset in `folder` if the new one lacks more of the source, as after a mistake in a setting."""
    try:
        before, after = read_report(folder) if has_dataset(folder) else None, read_report(fresh)
    except DataError:  # what is there cannot be used
        return
    if before is None or after is None or after["damaged"] <= before["damaged"]:
        return
    if sum(after["kept"].values()) >= sum(before["kept"].values()):
        return
    causes = read_causes(fresh)
    raise DataError(
        f"{folder} stays as it is: it lacks {before['damaged']:,} of {many(before['records'], 'record')}, and the new "
        f"dataset would lack {after['damaged']:,} of {after['records']:,}: {causes[0].text}",
        f"{_how_to_use(causes, data, clean)}; or set data.folder to a new folder to prepare it so all the same",
    )


def check_outside(folder: Path, request: Request) -> None:
    """A dataset inside its own source would be read as text by the next prepare."""
    for source in request.sources:
        if _lies_inside(folder, source.path):
            raise DataError(
                f"the dataset {folder} would lie inside its own source {source.path}",
                "set data.folder to a folder outside of it",
            )


def _lies_inside(folder: Path, source: str) -> bool:
    """Whether a dataset there would be part of a source that is a folder."""
    try:
        return os.path.isdir(source) and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(source))
    except (OSError, ValueError):  # a name that no file can have
        return False


def check_complete(data: DataConfig, clean: CleanConfig) -> None:
    """Raise an error where some of the input could not be used. The dataset is there all the same, and usable."""
    folder = data_folder(data)
    report = read_report(folder)
    if report is not None and report["problem_count"]:
        causes = read_causes(folder)
        lost = (
            f"{report['damaged']:,} of {many(report['records'], 'record')} could not be used"
            if report["damaged"]
            else f"the input has {many(report['problem_count'], 'problem')}, but no whole record is known to be lost"
        )
        raise DataError(
            f"{lost}: {causes[0].text}",
            f"{_how_to_use(causes, data, clean)}; or go on with the rest: "
            f"`flatout train {shlex.quote(f'data.folder={folder}')}` (every problem is listed in {folder / PROBLEMS})",
        )


def _how_to_use(causes: Sequence[Cause], data: DataConfig, clean: CleanConfig) -> str:
    """How to prepare a source again so that records which could not be used can."""
    fields = _listed(data.field)
    if data.source is None:  # the text is not known
        return f"to use them, prepare the text again: {mend_of(causes, fields)}"
    names = names_to_read(causes, fields)
    command = prepare_command(data.model_copy(update={"field": names}) if names else data, clean)
    if not names:
        return f"to use them, {mend_of(causes, fields)}, then `{command}`"
    count = sum(cause.records for cause in causes if cause.first.instead)
    first = f"; before that, {mend}" if (mend := encoding_mend(causes)) else ""
    return f"to use {f'{count:,} of them' if count else 'them'}: `{command}`{first}"


def prepare_command(data: DataConfig, clean: CleanConfig | None) -> str:
    """The whole command that prepares with these settings what is already there, to be pasted into a shell."""
    usual, words = load_config().config, ["flatout", "prepare"]
    names = ("source", "tokenizer", "folder", *DECISIVE[1:], *LIMITS)
    sections: list[tuple[str, Any, Any, tuple[str, ...]]] = [("data", data, usual.data, names)]
    if clean is not None:
        sections.append(("clean", clean, usual.clean, tuple(CleanConfig.model_fields)))
    for section, asked, other, names in sections:
        values = asked.model_dump(mode="json", exclude_none=True)
        for name in names:
            if getattr(asked, name) != getattr(other, name):
                value = values.get(name)
                plain = isinstance(value, str) and _PATH.fullmatch(value)
                words.append(f"{section}.{name}={value if plain else format_value(value)}")
    return f"{shlex.join(words)} --overwrite"


def read_causes(folder: Path) -> list[Cause]:
    """Why records of a dataset's input could not be used, the cause with the most records first."""
    return causes_of(Problem(**problem) for problem in all_problems(folder))


def check_text(loaded: LoadedConfig, verb: str) -> None:
    """Refuses a config without text in a verb that reads text."""
    if not loaded.config.reads_text:
        raise UsageError(
            f"`flatout {verb}` is for text, and the data of this config is of the kind {loaded.config.data_kind}",
            "train on it as it is, or name a text file or folder in data.source instead",
        )


def as_prepared(loaded: LoadedConfig) -> LoadedConfig:
    """A config with the settings that its folder was prepared with, where the user wrote no others.

    `prepare` may have been given settings that the next command does not repeat; a notice names them.
    """
    config, by_user = loaded.config, {path for path, source in loaded.sources.items() if source.by_user}
    if config.data_kind != "text" or config.data.source is None:
        return loaded
    folder = data_folder(config.data)
    if "data.folder" in by_user and "data.source" not in by_user:
        _check_meant(folder, config.data)
    try:
        manifest = read_manifest(folder) if has_dataset(folder) else None
    except DataError:  # opening it raises the same error with a hint
        manifest = None
    if manifest is None:
        return loaded
    own = by_user if "data.folder" in by_user else {*by_user, "data.source", "data.tokenizer"}  # they name the folder
    values = {
        path: stored
        for path, (stored, _) in _differences(config.data, config.clean, manifest).items()
        if path in field_facts() and path not in own and (path != "data.tokenizer" or _is_named(stored))
    }
    if not values:
        return loaded
    used = ", ".join(f"{path}={format_value(stored)}" for path, stored in values.items())
    notice = f"{folder} was prepared with {used}, which is used here, too"
    loaded = with_values(loaded, values, Source("preset", f"as {folder} was prepared"))
    return replace(loaded, notices=(*loaded.notices, notice))


def _check_meant(folder: Path, data: DataConfig) -> None:
    """Refuses a folder without a dataset where one of nearly the same name has one: a preset's text would fill it."""
    if os.path.exists(folder):
        return
    try:
        others = [path.name for path in folder.parent.iterdir() if has_dataset(path)]
    except OSError:
        return
    near = close_matches(folder.name, others, 0.9)
    if near:
        raise DataError(
            f"there is no dataset {folder}",
            f"did you mean data.folder={folder.parent / near[0]}? data.source={format_value(data.source)} makes one of "
            "that text there",
        )


def _differences(data: DataConfig, clean: CleanConfig | None, manifest: Manifest) -> dict[str, tuple[Any, Any]]:
    """By path, the settings that differ between a dataset and a config: (of the dataset, of the config)."""
    no_limits = dict.fromkeys(LIMITS)
    asked = {**no_limits, **request_of(data, clean).settings(0, None)}
    usual = request_of(DataConfig(), CleanConfig()).settings(0, None)
    stored = {**no_limits, **usual, **as_now({"data": manifest.settings})["data"]}
    rules, wanted_rules = (as_now({"clean": settings["clean"]})["clean"] for settings in (stored, asked))
    pairs = {f"data.{name}": (stored[name], asked[name]) for name in (*DECISIVE, *LIMITS)}
    pairs |= {f"clean.{name}": (rules.get(name), wanted_rules.get(name)) for name in {**rules, **wanted_rules}}
    pairs["data.tokenizer"] = _tokenizers(manifest, data)
    if manifest.tokenizer_kind != "char":  # no other reads it
        del pairs["data.unknown_characters"]
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}


def _check_settings(data: DataConfig, clean: CleanConfig | None, folder: Path) -> None:
    """Shards prepared from other settings must not be trained on by mistake."""
    if data.source is None:
        return
    manifest, request = read_manifest(folder), request_of(data, clean)
    for path, (stored, wanted) in _differences(data, clean, manifest).items():
        name = path.removeprefix("data.")
        if name == "source" and "hf:" not in str(data.source):
            find_inputs(request)  # which says so where there is no such text
        own = folder / TOKENIZER if name == "tokenizer" and not _is_named(stored) else format_value(stored)
        word = shlex.quote(f"{path}={own}")
        # The folder may be named after source and tokenizer.
        leave = "" if name in ("source", "tokenizer") else f"leave {path} out or "
        keep = f"{leave}set {word} to use it as it is, or " if path in field_facts() else ""
        raise DataError(
            f"{folder} was prepared with {name} {stored!r}, the config says {wanted!r}",
            f"{keep}set data.folder to a new folder to prepare it anew",
        )
    _check_source_size(data, request, manifest, folder)


def _listed(field: str | list[str]) -> list[str]:
    return [field] if isinstance(field, str) else field


def _tokenizers(manifest: Manifest, data: DataConfig) -> tuple[str, str]:
    """What a dataset was tokenized with, and what is asked for."""
    learned = manifest.settings.get("tokenizer", manifest.tokenizer_kind)
    if _is_named(data.tokenizer):
        return learned, data.tokenizer
    return manifest.tokenizer_fingerprint, load_tokenizer(data.tokenizer, None).fingerprint


def _is_named(tokenizer: str) -> bool:
    return tokenizer in ("char", "bytes", "gpt2") or learned_vocab(tokenizer) is not None


def _check_source_size(data: DataConfig, request: Request, manifest: Manifest, folder: Path) -> None:
    before, digest = manifest.settings["source_bytes"], manifest.settings.get("source_sha256")
    try:
        inputs = find_inputs(request)
    except DataError:  # the text is gone; the shards stand for themselves
        return
    changed = f"was prepared from {before:,} bytes of text, {data.source} now has {inputs.bytes:,}"
    if inputs.bytes == before:
        changed = f"was prepared from another content of {data.source} than it has now"
        if digest is None or inputs.digest() in (digest, None):
            return
    raise DataError(
        f"{folder} {changed}",
        f"set data.folder to a new folder to prepare the text as it is now, or data.source=null and "
        f"data.folder={folder} to use what was prepared; `{prepare_command(data, request.clean)}` replaces it",
    )
