"""Whatever a config file or an override holds, it loads or is one `ConfigError` of two plain lines."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.config.facts import field_facts
from flatout.config.load import load_config
from flatout.errors import ConfigError
from tests.bad_configs import FILE_KINDS, OVERRIDE_KINDS, as_yaml, bad_config_files, bad_overrides, good_sections


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
