"""What is shipped: presets, as YAML files beside this module, and the names of hardware overlays.

The idea: a preset is an ordinary config file whose first line is `# summary: one sentence`, so a user can read it, copy
it and change it. An overlay makes a run fit a card's memory; its name is the card's gigabytes, and what it sets is
worked out for each model (`resolve/sizing.py`).

The contract: a name that is not shipped is a `ConfigError` that offers the nearest one.
"""

import re
from pathlib import Path
from typing import Literal

from flatout.config.sizes import DEFAULT_SIZE, LONG_NAMES, SIZED, preset_and_size
from flatout.config.suggest import shorten_path
from flatout.config.yaml_loader import printable
from flatout.errors import ConfigError

DEFAULT_PRESET = "shakespeare"
_PRESETS = Path(__file__).with_name("presets")

ShippedKind = Literal["preset", "hardware"]
_OVERLAYS = (4, 8, 12, 16, 24, 48, 80)  # gigabytes of cards


def summary(kind: ShippedKind, name: str) -> str:
    """The sentence that the first line of a shipped preset or overlay gives."""
    if kind == "hardware":
        size = gigabytes(name)
        larger = next((other for other in _OVERLAYS if other > size), None)
        cards = f"of {size} GB and more" if larger is None else f"from {size} GB, below {larger}"
        return f"For cards {cards}: micro-batch and checkpointing by the memory that the model needs."
    with (_PRESETS / f"{name}.yaml").open(encoding="utf-8") as file:
        return file.readline().removeprefix("# summary:").strip()


def preset_text(name: str) -> str:
    """The YAML of a preset, with its comments."""
    return preset_path(name, "command line").read_text(encoding="utf-8")


def copy_preset(name: str, destination: Path) -> Path:
    """Write a preset, comments and all, to a new file; never overwrites. A folder as destination gets NAME.yaml.

    It loads to the same config but for the run's name, which is the file's: runs of the copy are not the preset's.
    """
    text = preset_text(name)
    preset, size = preset_and_size(name, DEFAULT_SIZE if name in SIZED else None, "")
    if size is not None:  # the rules for its size are the preset's
        text += f"\npreset: {preset}\nsize: {size}\n"
    path = destination / f"{name}.yaml" if destination.is_dir() else destination
    shown = printable(str(path))
    try:
        with path.open("x", encoding="utf-8", newline="\n") as file:  # "x" cannot overwrite, not even in a race
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{shown}: already exists", "choose another name or remove that file") from None
    except (OSError, ValueError) as error:
        reason = (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"{shown}: cannot be written: {printable(reason)}", "check that the folder exists and is writable"
        ) from None
    return path


def hardware_for(vram_bytes: int) -> str:
    """The overlay for a card with this much memory; a card below the smallest overlay gets the smallest.

    Cards report less than their name says, because ECC and firmware take a share, so nine tenths are enough.
    """
    names = shipped_names("hardware")
    fitting = [name for name in names if vram_bytes >= 0.9 * gigabytes(name) * 2**30]
    return fitting[-1] if fitting else names[0]


def run_name(stem: str) -> str:
    """A run's name from a file's: what `output.name` allows, and `run` when nothing is left."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip("._-")[:100] or "run"


def source_name(source: str) -> str:
    """What a text is called, from its path or its name on the hub: no folders, no endings."""
    if source.startswith("hf:"):
        return source.removeprefix("hf:").replace("/", "-").replace(":", "-")
    name = Path(source).name
    for suffix in (".gz", ".zst", ".xz", ".bz2"):
        name = name.removesuffix(suffix)
    return Path(name).stem


def preset_path(name: str, where: str) -> Path:
    """The file of a preset; `where` says in the error who named one that is not shipped."""
    check_shipped("preset", name, where)
    return _PRESETS / f"{LONG_NAMES.get(name, (name,))[0]}.yaml"


def check_shipped(kind: ShippedKind, name: str, where: str) -> None:
    """Refuses a preset or an overlay that is not shipped; `where` says who named it."""
    from difflib import get_close_matches  # here: keeps the command line's start short

    names = preset_names() if kind == "preset" else shipped_names(kind)
    if name not in names:
        wanted = name[:100].lower()
        begun = [known for known in names if len(wanted) > 2 and known.startswith(wanted)]
        close = begun[:2] or get_close_matches(wanted, names, n=2, cutoff=0.5)
        meant = f"did you mean {' or '.join(close)}? " if close else ""
        listed = "`flatout config presets` lists the presets; a file ends in .yaml; a setting is SECTION.FIELD=VALUE"
        hint = meant + (listed if kind == "preset" else f"the overlays are {', '.join(names)}")
        if kind == "hardware" and name == "auto":  # in a file it would mean another config on every machine
            hint += "; auto is taken on the command line only: --hardware auto"
        noun = "preset" if kind == "preset" else "hardware overlay"
        raise ConfigError(f"{where}: there is no {noun} {shorten_path(name)}", hint)


def shipped_names(kind: ShippedKind) -> list[str]:
    """Names of the presets in alphabetical order, or of the overlays from small to large."""
    if kind == "hardware":
        return [f"{size}gb" for size in _OVERLAYS]
    return sorted(path.stem for path in _PRESETS.glob("*.yaml"))


def preset_names() -> list[str]:
    """What a preset may be called: also names with a size in them, which are not listed."""
    return [*shipped_names("preset"), *LONG_NAMES]


def gigabytes(overlay: str) -> int:
    """The memory that an overlay is for."""
    return int(overlay.removesuffix("gb"))
