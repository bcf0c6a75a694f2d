"""Which known key a mistyped or foreign one was meant to be."""

import re

from flatout.config.elsewhere import FIELD_ELSEWHERE_CALLED
from flatout.config.facts import field_facts, section_paths
from flatout.config.yaml_loader import shorten
from flatout.errors import ConfigError


def unknown_key(path: str, where: str, *, top_level_extras: tuple[str, ...] = ()) -> ConfigError:
    """The error for a dotted path that is no field, with the nearest known one."""
    if path in section_paths():
        parts = [known.rpartition(".")[2] for known in field_facts() if known.startswith(path + ".")]
        return ConfigError(f"{where}: {path} is a section, not a value", f"give one of its fields: {', '.join(parts)}")
    close = nearest_paths(path, top_level_extras)
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        parent = path.rpartition(".")[0]
        hint = known_below(parent if parent in section_paths() else "", top_level_extras)
    return ConfigError(f"{where}: {shorten_path(path)} is not a known key", hint)


def known_below(section: str, extras: tuple[str, ...]) -> str:
    if section:
        names = [path.removeprefix(section + ".") for path in field_facts() if path.startswith(section + ".")]
        return f"the keys of {section} are {', '.join(names)}"
    return f"the keys at the top level are {', '.join([*section_paths(), *extras])}"


def nearest_paths(path: str, top_level_extras: tuple[str, ...] = ()) -> list[str]:
    """At most two known paths that `path` was probably meant to be, the likeliest first."""
    # difflib takes quadratic time, and no field's name is this long.
    path = path[:100].strip().lower().replace("-", "_").lstrip("_")
    parent, _, name = path.rpartition(".")
    if name in FIELD_ELSEWHERE_CALLED:
        return [FIELD_ELSEWHERE_CALLED[name]]
    known = [*field_facts(), *section_paths(), *top_level_extras]
    same_name = [other for other in known if other.rpartition(".")[2] == name]
    if same_name:
        return same_name[:2]
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == parent}
    found = [siblings[match] for match in close_matches(name, list(siblings), 0.6)]
    found += close_matches(path, known, 0.75)
    if not found:
        names = {other.rpartition(".")[2]: other for other in known}
        found = [names[match] for match in close_matches(name, list(names), 0.7)]
    return list(dict.fromkeys(found))[:2]


def nearest_fields(name: str) -> list[str]:
    """The same for a word without a section: fields only, whichever section's name it resembles too."""
    found = [path for path in nearest_paths(name) if path in field_facts()]
    if found:
        return found
    names = {path.rpartition(".")[2]: path for path in reversed(field_facts())}
    return [names[match] for match in close_matches(name[:100].lower(), list(names), 0.7)]


def is_called_elsewhere(name: str) -> bool:
    """Whether a word is another trainer's for a field of ours, whose values may be in other units."""
    return name.lower() in FIELD_ELSEWHERE_CALLED


def shorten_path(path: str) -> str:
    """A key as it is shown in a message: as written where it is a plain word, quoted and escaped otherwise."""
    return path if re.fullmatch(r"[\w.-]{1,80}", path) and path.isprintable() else shorten(path)


def close_matches(word: str, known: list[str], cutoff: float) -> list[str]:
    from difflib import get_close_matches  # here: only a mistake pays for the import

    return get_close_matches(word, known, n=1, cutoff=cutoff)
