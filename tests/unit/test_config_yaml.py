"""The strict YAML loader: scalars by YAML 1.2's core rules, line numbers, and one kind of error for anything else."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.config.yaml_loader import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_NODES,
    Node,
    format_value,
    has_control_character,
    parse_word,
    parse_yaml,
    printable,
    read_yaml,
    resolve_scalar,
    shorten,
)
from flatout.errors import ConfigError


def assert_speaks(error: ConfigError) -> None:
    assert error.message.isprintable()
    assert error.hint.isprintable()
    assert error.hint


def refused(data: bytes | str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(data.encode() if isinstance(data, str) else data, "my.yaml")
    assert_speaks(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("1e+5", 1e5),
        (".5", 0.5),
        ("3.", 3.0),
        ("-2.5e3", -2500.0),
        ("0.0", 0.0),
        ("7", 7),
        ("-7", -7),
        ("+7", 7),
        ("010", 10),
        ("1_000_000", 1_000_000),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
        *[(text, text) for text in ("on", "off", "yes", "no", "y", "n", "nan", "inf", "tRue", "nULL")],
        *[(text, text) for text in ("2024-01-01", "12:30", "1:30:00", "0x10", "0o10", "0b1", "1__0", "_1", "1_", "e5")],
        *[(text, text) for text in (".", "-", "1e", "1,5", "1_0.5", "١", "=", "<<")],
    ],
)
def test_scalars_follow_the_core_rules(text: str, value: object) -> None:
    result = resolve_scalar(text)
    assert result == value
    assert type(result) is type(value)


def test_not_a_number_and_infinity_are_floats_for_the_schema_to_refuse() -> None:
    assert resolve_scalar(".inf") == math.inf
    assert resolve_scalar("-.INF") == -math.inf
    assert math.isnan(float(resolve_scalar(".nan") or 0))
    assert resolve_scalar("1e400") == math.inf


def test_quoted_and_block_scalars_are_text() -> None:
    tree = parse_yaml(b"a: '1'\nb: \"true\"\nc: |\n  12\nd: >\n  null\n", "my.yaml")
    assert [node.value for node in tree.values()] == ["1", "true", "12\n", "null\n"]


def test_lines_are_those_of_the_keys() -> None:
    tree = parse_yaml(b"# first\na:\n  b: 1\n\n  c:\n    2\nd: [1,\n 2]\n", "my.yaml")
    inner = tree["a"].value
    assert isinstance(inner, dict)
    assert (tree["a"].line, inner["b"].line, inner["c"], tree["d"].line) == (2, 3, Node(2, 5), 7)


@pytest.mark.parametrize("breaks", [b"\n", b"\r\n", b"\r"])
def test_lines_are_right_for_every_kind_of_line_break(breaks: bytes) -> None:
    assert parse_yaml(breaks.join([b"a: 1", b"", b"b: 2"]), "my.yaml")["b"].line == 3
    assert refused(breaks.join([b"a: 1", b"", b"b: \x07"])).message.startswith("my.yaml:3:")


@pytest.mark.parametrize(
    "data", [b"", b"\n\n", b"# only a comment\n", b"---\n", b"--- # nothing\n...\n", b"null", b"{}"]
)
def test_nothing_is_no_values(data: bytes) -> None:
    assert parse_yaml(data, "my.yaml") == {}


def test_byte_order_mark_of_utf8_is_allowed() -> None:
    assert parse_yaml(b"\xef\xbb\xbfa: 1", "my.yaml")["a"].value == 1


@pytest.mark.parametrize(
    ("data", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "'a' is written twice, first on line 1"),
        ("s:\n  a: 1\n  'a': 3\n", 3, "'a' is written twice, first on line 2"),
        ("{a: 1, a: 2}", 1, "written twice"),
        ("a: 1\n1: 2\n", 2, "the key 1 is a number"),
        ("true: 2\n", 1, "the key true is a boolean"),
        ("~: 2\n", 1, "the key null is null"),
        ("a: !!python/object/apply:os.system [x]\n", 1, "python/object/apply:os.system"),
        ("a: !!int 5\n", 1, "tag"),
        ("? [a]\n: 2\n", 1, "is a list"),
        ("a: *x\n", 1, "undefined alias 'x'"),
        ("a: &x [*x]\n", 1, f"more than {MAX_DEPTH} deep"),
        (
            "a: &x0 [1, 1]\n" + "".join(f"b{n}: &x{n + 1} [*x{n}, *x{n}]\n" for n in range(16)),
            1,
            f"more than {MAX_NODES} values",
        ),
        ("a: 1\n---\nb: 2\n", 2, "another document"),
        ("a: 1\n---\n", 2, "another document"),
        ("- a\n", 1, "holds a list"),
        ("\n\n5\n", 3, "holds a number"),
        ("text\n", 1, "holds text"),
        ("a:\n\tb: 1\n", 2, "'\\t'"),
        ("a: 'open\n", 2, "not valid YAML"),
        ("a: {b: 1\n", 2, "not valid YAML"),
        ("a: 1\nb: c: d\n", 2, "not valid YAML"),
        ('a: "\\q"\n', 1, "not valid YAML"),
        ('a: 1\nb: "\\UFFFFFFFF"\n', 2, "out of range"),
        ('a: 1\nb: "\\U00110000"\n', 2, "out of range"),
        ("a: 1\nb: \x1b[31m\n", 2, "'\\x1b'"),
        ("a: 1\nb: x\u2028y\n", 2, "'\\u2028'"),
        ("a: 1\nb: x\x85y\n", 2, "'\\x85'"),
        ("a: 1\nb: \0\n", 2, "'\\x00'"),
        (b"a: 1\nb: \xff\n", 2, "0xff is not UTF-8"),
        ("[" * 50_000, 1, f"more than {MAX_DEPTH} deep"),
        ("- " * 40_000, 1, f"more than {MAX_DEPTH} deep"),
        ("{a: " * 20_000, 1, f"more than {MAX_DEPTH} deep"),
        ("a: [" + "1," * (MAX_NODES + 1) + "]", 1, f"more than {MAX_NODES} values"),
    ],
)
def test_refusals_name_file_line_and_reason(data: bytes | str, line: int, words: str) -> None:
    error = refused(data)
    assert error.message.startswith(f"my.yaml:{line}: ")
    assert words in error.message
    assert len(error.message) < 300


def test_depth_up_to_the_limit_is_read() -> None:
    data = "a: " + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert "a" in parse_yaml(data.encode(), "my.yaml")
    refused("a: " + "[" * MAX_DEPTH + "]" * MAX_DEPTH)


def test_large_files_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        read_yaml(path)
    path.write_bytes(b"#" * MAX_BYTES)
    assert read_yaml(path) == {}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(Path("a\0.yaml"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(tmp_path / ("x" * 5000))
    (tmp_path / "plain").write_text("")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(tmp_path / "plain" / "below.yaml")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Made unreadable by hand: for root, permissions alone would not do it.
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "secret.yaml"
    path.write_text("a: 1")
    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        read_yaml(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        (" 5 ", 5),
        ("null", None),
        ("on", "on"),
        ("ROMEO:", "ROMEO:"),
        ("a: b", "a: b"),
        ("a #b", "a #b"),
        ("a=b", "a=b"),
        ("C:\\text", "C:\\text"),
        ("-", "-"),
        ('"\\n"', "\n"),
        ("'5'", "5"),
        ('""', ""),
        ("'it''s'", "it's"),
        ('"[1]"', "[1]"),
    ],
)
def test_command_line_values(text: str, value: object) -> None:
    result = parse_word(text, "command line")
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    "text", ["", "  ", "[1]", "{a: 1}", "&a b", "*a", "!!int 5", "| a", "> a", "# a", "- a", "? a", "@a", "`a", "%a"]
)
def test_command_line_values_that_are_not_one_value(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_word(text, "command line")


@pytest.mark.parametrize("text", ["'a", '"a', "'a' b", '"a": b', "a\nb", "a\x1b", '"\\UFFFFFFFF"', "\udcff"])
def test_command_line_text_that_is_broken(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_word(text, "command line: a.b")
    assert caught.value.message.startswith("command line: a.b: ")
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[a.txt,b.txt]", ["a.txt", "b.txt"]),
        (" [en, no] ", ["en", "no"]),
        ("[]", []),
        ("[-, a]", ["-", "a"]),
        ("[a, -]", ["a", "-"]),
        ("[1, 1e-3, null, true, '5']", [1, 1e-3, None, True, "5"]),
        ("[{path: a, weight: 2.0}, b]", [{"path": "a", "weight": 2.0}, "b"]),
        ("[hf:owner/name, C:\\x]", ["hf:owner/name", "C:\\x"]),
        ("{a: [1]}", {"a": [1]}),
    ],
)
def test_command_line_lists(text: str, value: object) -> None:
    assert parse_word(text, "command line", collections=True) == value


@pytest.mark.parametrize(
    "text",
    [
        *["[", "[a", "[a}", "{a", "[a] b", "[a] # b", "[a]: b", "[*a]", "[!!int 5]", "[a, 'b]", "[a,\nb]"],
        *["[{a: 1, a: 2}]", "[{1: 2}]", "[\x1b]", "[\udcff]", "[" * 50, "]", "[a]\n---\n[b]"],
        *["[" + "a," * (MAX_NODES + 1) + "]"],
    ],
)
def test_command_line_lists_that_are_broken(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_word(text, "command line: a.b", collections=True)
    assert_speaks(caught.value)
    assert caught.value.message.startswith("command line: a.b: ")
    assert "line 0" not in caught.value.message
    assert len(caught.value.message) < 300


plain_text = st.text().filter(lambda text: not has_control_character(text))
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**90), 10**90) | st.floats(allow_nan=False) | plain_text,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(plain_text.filter(lambda key: key != "<<"), inner, max_size=3)
    ),
    max_leaves=5,
)


def without_lines(node: Node) -> object:
    if isinstance(node.value, list):
        return [without_lines(item) for item in node.value]
    if isinstance(node.value, dict):
        return {key: without_lines(item) for key, item in node.value.items()}
    return node.value


@given(plain_values)
def test_formatted_values_read_back(value: object) -> None:
    text = format_value(value)
    assert "\n" not in text
    result = without_lines(parse_yaml(f"key: {text}".encode(), "my.yaml")["key"])
    assert result == value
    assert type(result) is type(value)
    assert parse_word(text, "command line", collections=isinstance(value, list | dict)) == value


def test_formatted_values_that_need_quotes() -> None:
    assert [format_value(text) for text in ("on", "true", "1e3", "a b", "\n")] == [
        "on",
        '"true"',
        '"1e3"',
        '"a b"',
        '"\\n"',
    ]
    assert format_value({"a": [1, None], "b": math.nan}) == "{a: [1, null], b: .nan}"
    assert [format_value(number) for number in (math.inf, -math.inf)] == [".inf", "-.inf"]


def test_shown_values_are_short_and_printable() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    shown = [
        shorten(value) for value in ("x" * 999, "\x1b\n\x00\u202e", 10**5000, 10**99, deep, ["\x1b"] * 99, b"\xff" * 99)
    ]
    assert all(len(text) <= 80 and text.isprintable() for text in shown)
    assert printable("a\nb\x1b\ud800é") == "a\\nb\\x1b\\ud800é"
    # Taking a list this deep apart in one go would overflow the interpreter's own stack.
    while deep:
        deep = deep.pop()  # type: ignore[assignment]


@settings(deadline=None, max_examples=200)
@given(st.text() | st.text(alphabet="ab:-?[]{},&*!|>%@`#'\"\\\n\t 01.e<~=x"))
def test_any_text_is_a_mapping_or_a_config_error(text: str) -> None:
    try:
        assert isinstance(parse_yaml(text.encode("utf-8", "surrogatepass"), "my.yaml"), dict)
    except ConfigError as error:
        assert_speaks(error)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_mapping_or_a_config_error(data: bytes) -> None:
    try:
        assert isinstance(parse_yaml(data, "my.yaml"), dict)
    except ConfigError as error:
        assert_speaks(error)
