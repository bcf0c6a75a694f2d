"""What the command line says today, word for word. `python -m tests.recordings.transcripts --write` records it anew."""

from pathlib import Path

import pytest

from tests.recordings.transcripts import difference, groups, transcripts


@pytest.mark.parametrize(
    "group",
    [pytest.param(name, marks=[pytest.mark.slow] if name.startswith("slow") else []) for name in groups()],
)
def test_commands_say_what_was_recorded(group: str, tmp_path: Path):
    changed = difference(group, transcripts(group, tmp_path))
    assert not changed, f"\n{changed}\nIf this is meant: python -m tests.recordings.transcripts --write {group}"
