"""What was found, as a config file: a preset, what the user had written beyond it, and the tuned switches.

A plain file is enough: `flatout train FILE` trains what was tuned. A cap that emulated a smaller card is not in it.
The first line ends with a checksum of all the others, so that a file edited since can be told from one that was not.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from flatout.config.load import LoadedConfig
from flatout.config.sizes import AUTO, LONG
from flatout.config.source import Source
from flatout.config.usual import TUNED as TUNED_FILE
from flatout.config.yaml_loader import format_value
from flatout.errors import many
from flatout.records import TuneRow
from flatout.tuning.search import Candidate

# The switches of `speed` that tune turns; what a preset says of them is where it starts from, what the user wrote is a
# rule.
TUNED = ("micro_batch", "accumulation", "checkpointing", "loss", "loss_chunk", "kernels", "compile")
TUNED += ("optimizer_offload", "threads")
_CHECKSUM = " Checksum of the rest: "


def written_paths(loaded: LoadedConfig) -> dict[str, Source]:
    """The fields that the user wrote, and where."""
    return {path: source for path, source in loaded.sources.items() if source.by_user}


def kept_settings(loaded: LoadedConfig) -> dict[str, Any]:
    """What the user wrote of the switches that tune turns, by name; auto and null leave the choice to tune."""
    written = written_paths(loaded)
    values = {name: getattr(loaded.config.speed, name) for name in TUNED if f"speed.{name}" in written}
    return {name: value for name, value in values.items() if value not in ("auto", None)}


def train_words(overrides: Sequence[str], tuned: Sequence[str]) -> list[str]:
    """The words of a command line that trains with what was found: tuned words stand in for the user's own."""
    words = {word.partition("=")[0].strip(): word for word in overrides}
    return list((words | {word.partition("=")[0]: word for word in tuned}).values())


def tuned_settings(candidate: Candidate, loaded: LoadedConfig) -> dict[str, Any]:
    """The tuned switches by path; those that say nothing beyond the config are left out."""
    before = loaded.config.speed
    return {
        f"speed.{name}": value
        for name, value in dataclasses.asdict(candidate).items()
        if name not in ("loss_chunk", "optimizer_offload", "threads") or value != getattr(before, name)
    }


def words_of(found: Mapping[str, Any]) -> tuple[str, ...]:
    """The values found as they stand on a command line."""
    return tuple(f"{path}={value if isinstance(value, str) else format_value(value)}" for path, value in found.items())


def fragment_of(loaded: LoadedConfig, settings: dict[str, Any], row: TuneRow, device: str, capacity: int | None) -> str:
    """The YAML of a config file that is the given config with the tuned switches."""
    of = "" if capacity is None else f" of {capacity / 2**30:.1f}"
    peak = "" if row.peak_bytes is None else f", at most {row.peak_bytes / 2**30:.2f}{of} GiB"
    batch = f"{row.micro_batch} x {row.accumulation} sequences"
    if loaded.config.fine_tunes:
        batch = f"{many(loaded.config.chat.batch_samples, 'sample')}, {many(row.micro_batch, 'row')} at once"
    speed = f"{row.tokens_per_second or 0.0:,.0f} tokens/s, {row.milliseconds or 0.0:,.1f} ms per step of {batch}"
    holds = "The switches hold for that device and this model; what is learned depends on them by rounding at most."
    return config_text(loaded, settings, f" on {device}: {speed}{peak}.", [holds])


def config_text(loaded: LoadedConfig, found: Mapping[str, Any], first: str, comments: Sequence[str] = ()) -> str:
    """The YAML of a config file that is the given config with the values of `found`, by dotted path.

    `first` is the rest of the first line, after its opening words: what was found, and where.
    """
    values, sections = loaded.config.model_dump(), {}
    named = {one.kind: one.where.split()[1] for one in loaded.sources.values() if one.where.startswith(f"{one.kind} ")}
    preset = named.get("preset")
    replaced = {*found, "speed.accumulation"} if "speed.micro_batch" in found else {*found}
    for path, source in loaded.sources.items():
        section, _, name = path.partition(".")
        # A layer's null that silences an alternative below it (train.tokens beside train.steps) follows by itself.
        silenced = source.where.endswith(")") and values[section][name] is None
        if path not in replaced and (source.by_user or source.kind == "hardware") and not silenced:
            sections.setdefault(section, {})[name] = values[section][name]
    for path, value in found.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, {})[name] = value
    lines = [*(f"# {' '.join(comment.split())}" for comment in comments), *([f"preset: {preset}"] if preset else [])]
    # One that follows from minutes does so again.
    size = loaded.size.name if loaded.size is not None else named.get("size") if preset in LONG else None
    lines += [f"size: {size}"] if size not in (None, AUTO) else []
    for section, fields in sections.items():
        lines += ["", f"{section}:", *(f"  {name}: {format_value(value)}" for name, value in fields.items())]
    body = "\n".join(lines) + "\n"
    return f"{' '.join(f'{TUNED_FILE}{first}'.split())}{_CHECKSUM}{_checksum(body)}\n{body}"


def is_unchanged(text: str) -> bool | None:
    """Whether the text of a file is as `config_text` made it; None for a file that is not from here at all."""
    first, _, body = text.partition("\n")
    if not first.startswith(TUNED_FILE):
        return None
    return first.rstrip().endswith(f"{_CHECKSUM}{_checksum(body)}")


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode("utf-8", "replace")).hexdigest()[:16]
