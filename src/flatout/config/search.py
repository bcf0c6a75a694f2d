"""Settings found by a word: in their names, their sentences, what they allow, and what other trainers call them."""

from collections.abc import Sequence
from dataclasses import dataclass

from flatout.config.facts import choices, field_facts
from flatout.config.suggest import FIELD_ELSEWHERE_CALLED
from flatout.config.yaml_loader import format_value


@dataclass(frozen=True)
class Found:
    """A setting; `elsewhere` are other trainers' names for it that hold one of the words."""

    path: str
    default: str
    description: str
    elsewhere: tuple[str, ...] = ()


def search_fields(words: Sequence[str]) -> list[Found]:
    """The settings that hold all of the words, those that have them in their own name first."""
    wanted = [word.lower().strip("-").replace("-", "_") for word in words]
    named: list[Found] = []
    others: list[Found] = []
    for path, field in field_facts().items():
        description = f"{field.description} {choices(path)}".rstrip()
        foreign = [name for name, ours in FIELD_ELSEWHERE_CALLED.items() if ours == path]
        text = " ".join([path, description.lower(), *foreign])
        if all(word in text or word.replace("_", " ") in text for word in wanted):
            said = tuple(name for name in foreign if any(word in name for word in wanted))
            found = Found(path, format_value(field.get_default(call_default_factory=True)), description, said)
            (named if all(word in path for word in wanted) else others).append(found)
    return named + others
