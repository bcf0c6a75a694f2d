"""Whatever a config file or an override holds, it loads or is one `ConfigError` of two plain lines."""

import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.config.facts import field_facts
from flatout.config.load import load_config
from flatout.config.unused import check_used
from flatout.errors import ConfigError
from tests.bad_configs import (
    CONFLICTS,
    FILE_KINDS,
    OVERRIDE_KINDS,
    as_yaml,
    bad_config_files,
    bad_overrides,
    good_sections,
)
from tests.end_to_end.test_every_field import OTHER, own_word
from tests.hints import ways_out, with_settings


def assert_speaks(error: ConfigError) -> None:
    assert error.message.isprintable()
    assert error.hint.isprintable()
    assert error.hint
    assert len(error.message) < 1000


def run_campaign(folder: Path, seed: int, count: int) -> None:
    path = folder / "bad.yaml"
    for data in bad_config_files(seed, count):
        path.write_bytes(data)
        check_refusal(path, [], data[:500])
    for overrides in bad_overrides(seed, count):
        check_refusal(None, overrides, overrides)


def check_refusal(target: Path | None, overrides: list[str], what: object) -> None:
    try:
        load_config(target, overrides)
    except ConfigError as error:
        assert_speaks(error)
    else:
        pytest.fail(f"loaded: {what!r}")


def test_bad_configs_are_refused(tmp_path: Path) -> None:
    run_campaign(tmp_path, seed=1, count=150)


@pytest.mark.parametrize("preset", [None, "shakespeare-char", "gpt2-124m"])
def test_settings_that_a_hint_names_mend_its_error(preset: str | None) -> None:
    """Each way out on its own, and those of the next error: none leads back to an error that was mended."""
    alone = [[own_word(path)] for path in OTHER if preset == "shakespeare-char"]
    applied = 0
    for words in [*CONFLICTS, *alone]:
        told = list[ConfigError]()
        open_ways = [words]
        while open_ways and len(told) < 20:
            command = open_ways.pop()
            error = refusal_of(preset, command)
            if error is None:
                continue
            same = [other for other in told if reduced(other.message) == reduced(error.message)]
            assert not same, f"{command}: {same[0].hint} leads to {error.message}"
            told.append(error)
            # `keep one of them, such as ...` is about settings to leave out.
            ways = [] if error.hint.startswith("keep one of") else ways_out(error.hint)
            open_ways += [with_settings(command, way) for way in ways[:1]]
            for way in ways:
                applied += 1
                after = refusal_of(preset, with_settings(command, way))
                assert after is None or reduced(after.message) != reduced(error.message), f"{command}: {error.hint}"
    assert applied > 20


def refusal_of(preset: str | None, words: list[str]) -> ConfigError | None:
    try:
        check_used(load_config(preset, words))
    except ConfigError as error:
        return error
    return None


def reduced(message: str) -> str:
    """A message without its numbers: the same complaint of another value is the same error."""
    return re.sub(r"[\d.]+", "N", message.partition(" (")[0])


@pytest.mark.slow
def test_thousands_of_bad_configs_are_refused(tmp_path: Path) -> None:
    run_campaign(tmp_path, seed=2, count=5000)


def test_bad_configs_are_bad_for_their_mistake_alone(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    for seed in range(30):
        path.write_text(as_yaml(good_sections(random.Random(seed))), encoding="utf-8")
        load_config(path)
    assert list(bad_config_files(3, 40)) == list(bad_config_files(3, 40))
    assert list(bad_overrides(3, 40)) == list(bad_overrides(3, 40))
    assert len(set(bad_config_files(3, len(FILE_KINDS)))) == len(FILE_KINDS)
    assert not any("\0" in part for overrides in bad_overrides(3, 20 * len(OVERRIDE_KINDS)) for part in overrides)


@settings(deadline=None)
@given(st.lists(st.text(), max_size=3), st.sampled_from(list(field_facts())), st.text())
def test_any_override_loads_or_is_a_config_error(overrides: list[str], path: str, value: str) -> None:
    for attempt in (overrides, [f"{path}={value}"]):
        try:
            load_config(overrides=attempt)
        except ConfigError as error:
            assert_speaks(error)


@settings(deadline=None)
@given(st.text(), st.sampled_from(list(field_facts())), st.text())
def test_any_file_loads_or_is_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, text: str, path: str, value: str
) -> None:
    section, _, name = path.partition(".")
    file = tmp_path_factory.mktemp("fuzz") / "my.yaml"
    for attempt in (text, f"train: {{steps: 5}}\n{section}:\n  {name}: {value}\n", f"{text}: {value}\n"):
        file.write_bytes(attempt.encode("utf-8", "surrogatepass"))
        try:
            load_config(file)
        except ConfigError as error:
            assert_speaks(error)
