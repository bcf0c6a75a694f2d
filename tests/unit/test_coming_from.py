"""The pages for users of other trainers: our column resolves, and `flatout config search` finds their names."""

import re
import shlex
from pathlib import Path

import pytest

from flatout.config.catalogue import preset_names
from flatout.config.facts import field_facts, section_paths
from flatout.config.load import load_config
from flatout.config.suggest import search_fields
from flatout.front.commands import command_for, parser_of

PAGES = sorted((Path(__file__).parents[2] / "docs" / "coming-from").glob("*.md"))
FIELD = re.compile(rf"((?:{'|'.join(section_paths())})\.[a-z_0-9]+)(?:=.+)?")


def rows(page: Path) -> list[tuple[list[str], list[str]]]:
    """What stands in backticks in the first and the second column of every row."""
    lines = [line.strip("|").split("|") for line in page.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    return [(re.findall(r"`(.+?)`", cells[0]), re.findall(r"`(.+?)`", cells[1])) for cells in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_our_commands_parse_and_lead_to_the_runs_that_the_page_names(page: Path):
    made: set[str] = set()
    commands = [one for _, ours in rows(page) for one in ours if one.startswith("flatout ")]
    assert len(commands) > 3
    for line in commands:
        command, rest = command_for(shlex.split(line)[1:])
        parsed = parser_of(command).parse(rest)
        if hasattr(parsed, "overrides"):
            config = parsed.config if parsed.config in preset_names() else None  # others are files of the reader
            loaded = load_config(config or command.preset, parsed.overrides, size=parsed.size)
            stem = "" if config or parsed.config is None else Path(parsed.config).stem  # of a file of the reader
            if command.name in ("train", "finetune"):
                made.add(f"runs/{stem or loaded.config.output.name}")
    assert set(re.findall(r"\bruns/[\w.-]+", page.read_text(encoding="utf-8"))) <= made


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_settings_exist_and_are_found_by_the_other_names(page: Path):
    settings = [(theirs, ours) for theirs, ours in rows(page) if any(FIELD.fullmatch(one) for one in ours)]
    assert len(settings) > 8
    for theirs, ours in settings:
        fields = {found[1] for one in ours if (found := FIELD.fullmatch(one))}
        assert fields <= field_facts().keys()
        for name in theirs:
            assert fields & {found.path for found in search_fields([name])}, (
                f"{page.stem}: {name} does not lead to {ours}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_settings_beside_the_tables_are_valid(page: Path):
    """Such as `lora.quantize=nf4` in a note."""
    words = re.findall(r"`([a-z]+\.[a-z_0-9]+(?:=[^`]*)?)`", page.read_text(encoding="utf-8"))
    for word in words:
        if (found := FIELD.fullmatch(word)) is not None:
            assert found[1] in field_facts(), word
            if "=" in word:
                load_config("lora", [word])


def test_there_are_six_short_pages():
    assert [page.stem for page in PAGES] == ["axolotl", "litgpt", "nanochat", "nanogpt", "trl", "unsloth"]
    assert all(len(page.read_text(encoding="utf-8").split()) <= 250 for page in PAGES)
