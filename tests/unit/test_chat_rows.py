"""Rows of instruction files to conversations: every format, and what is wrong with rows that are none."""

import json
from pathlib import Path

import pytest

from flatout.corpus.document import InputFile, Problem, Row
from flatout.corpus.readers import read_rows
from flatout.corpus.sources import find_files
from flatout.data.conversations import Conversation, choose_reading, conversation_of
from flatout.errors import ConfigError, DataError

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
GOOD = {
    "messages": {"messages": [USER, ANSWER]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}]},
    "alpaca": {"instruction": "Hi", "output": "Hello"},
    "prompt-completion": {"prompt": "Hi", "completion": "Hello"},
    "text": {"text": "Hi"},
}


def read(value: object, beside: str | None = None, **fields: str) -> Conversation | Problem:
    """What becomes of a row, alone or `beside` a good one of a format."""
    row = Row(value, "line 1")
    first = [row] if beside is None else [Row(GOOD[beside], "line 0"), row]
    return conversation_of(row, choose_reading(fields, first, "rows.jsonl"), "rows.jsonl")


def turns(value: object, **fields: str) -> list[tuple[str, str]]:
    result = read(value, **fields)
    assert isinstance(result, Conversation), result
    return [(message["role"], message["content"]) for message in result.messages]


@pytest.mark.parametrize(
    ("row", "format", "columns"),
    [
        ({"messages": [USER, ANSWER]}, "messages", "'messages'"),
        ({"conversations": [USER, ANSWER]}, "messages", "'conversations' for messages"),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, "sharegpt", "'conversations'"),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, "alpaca", "'instruction' and 'output'"),
        ({"prompt": "Hi", "completion": "Hello"}, "prompt-completion", "'prompt' and 'completion'"),
        ({"question": "Hi", "answer": "Hello"}, "prompt-completion", "'question' for prompt"),
        ({"input": "Hi", "output": "Hello"}, "prompt-completion", "'input' for prompt"),
        ({"text": "Hi"}, "text", "'text'"),
        # Several fit: the most particular one is taken.
        ({"text": "Hi", "messages": [USER, ANSWER], "prompt": "Hi", "completion": "x"}, "messages", "'messages'"),
    ],
)
def test_formats_are_detected_and_the_reason_is_told(row: dict, format: str, columns: str):
    reading = choose_reading({}, [Row("damaged", "line 1"), Row(row, "line 2")], "rows.jsonl")
    assert reading.format == format
    assert columns in reading.why


def test_mapped_fields_decide_the_format():
    row = {"q": "Hi", "a": "Hello", "text": "other"}
    assert turns(row, prompt="q", completion="a") == [("user", "Hi"), ("assistant", "Hello")]
    assert turns({"x": [{"who": "user", "said": "Hi"}]}, messages="x", role="who", content="said") == [("user", "Hi")]
    assert turns({"turns": [{"speaker": "gpt", "value": "Hi"}]}, conversations="turns", **{"from": "speaker"})


@pytest.mark.parametrize("wanted", GOOD)
def test_columns_that_are_named_are_read_whatever_else_there_is(wanted: str):
    row = {name: value for good in GOOD.values() for name, value in good.items()}
    assert choose_reading({name: name for name in GOOD[wanted]}, [Row(row, "line 1")], "rows.jsonl").format == wanted


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function", "ipython"])
def test_roles_of_messages(role: str):
    assert turns({"messages": [{"role": role, "content": "Hi"}]}) == [(role, "Hi")]


@pytest.mark.parametrize(
    ("speaker", "role"),
    [("human", "user"), ("user", "user"), ("gpt", "assistant"), ("system", "system"), ("observation", "tool")],
)
def test_speakers_of_sharegpt(speaker: str, role: str):
    assert turns({"conversations": [{"from": speaker, "value": "Hi"}]}) == [(role, "Hi")]


def test_function_calls_of_sharegpt():
    call = {"name": "f", "arguments": {"a": 1}}
    row = {
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": json.dumps(call)}],
        "tools": json.dumps([{"name": "f", "parameters": {}}]),
        "system": "be short",
    }
    result = read(row)
    assert isinstance(result, Conversation)
    assert [message["role"] for message in result.messages] == ["system", "user", "assistant"]
    assert result.messages[2]["tool_calls"] == [{"type": "function", "function": call}]
    assert result.tools == ({"type": "function", "function": {"name": "f", "parameters": {}}},)


def test_tool_calls_of_messages_have_their_arguments_as_objects():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    row = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call], "name": None}]}
    result = read(row)
    assert isinstance(result, Conversation)
    expected = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    assert result.messages[1] == {"role": "assistant", "content": "", "tool_calls": [expected]}


def test_content_in_parts_and_other_keys():
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    message = {"role": "assistant", "content": parts, "reasoning_content": "hm", "train": True}
    result = read({"messages": [USER, message]})
    assert isinstance(result, Conversation)
    assert result.messages[1] == {"role": "assistant", "content": "Hi there", "reasoning_content": "hm"}
    assert result.train == (None, True)


@pytest.mark.parametrize(("flags", "train"), [({"weight": 0}, False), ({"weight": 1}, True), ({"train": False}, False)])
def test_flags_of_messages(flags: dict, train: bool):
    result = read({"messages": [USER, {**ANSWER, **flags}]})
    assert isinstance(result, Conversation)
    assert result.train == (None, train)


def test_alpaca_with_input_system_and_history():
    row = {"instruction": "Add", "input": "1 2", "output": "3", "system": "be short", "history": [["Hi", "Hello"]]}
    assert turns(row) == [
        ("system", "be short"),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Add\n\n1 2"),
        ("assistant", "3"),
    ]
    assert turns({"instruction": "Add", "input": None, "output": "3"})[0] == ("user", "Add")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"instruction": "Add", "output": "3"},
        {"prompt": "Hi", "completion": "Hello"},
        {"text": "Hi"},
    ],
    ids=lambda row: next(iter(row)),
)
def test_columns_that_no_format_has_are_not_read(row: dict):
    assert isinstance(read(row), Conversation)
    assert read({"id": 7, **row, "embedding": [0.1, None], "score": {"of": "x"}}) == read(row)


def test_prompts_of_messages_teach_the_completion_only():
    row = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}
    result = read(row)
    assert isinstance(result, Conversation)
    assert result.train == (False, False, False, None)
    assert result.prompt is None


def test_prompts_of_text_can_do_without_a_template():
    result = read({"prompt": "[1, 2] sums to", "completion": " 3"})
    assert isinstance(result, Conversation)
    assert (result.prompt, result.completion) == ("[1, 2] sums to", " 3")
    assert result.messages[0] == {"role": "user", "content": "[1, 2] sums to"}


BAD_ROWS = [
    (["a"], "messages", "field", "a list, not an object"),
    ({"message": []}, "messages", "field", "lacks the field 'messages'; there are: message"),
    ({"messages": []}, "messages", "empty", "an empty list"),
    ({"messages": "Hi"}, "messages", "field", "a text, not a list"),
    ({"messages": ["Hi"]}, "messages", "field", "message 1 is a text"),
    ({"messages": [{"role": "alien", "content": "Hi"}]}, "messages", "role", "'alien'; known are assistant"),
    ({"messages": [{"content": "Hi"}]}, "messages", "role", "the role null"),
    ({"messages": [{"role": 7, "content": "Hi"}]}, "messages", "role", "the role a number"),
    ({"messages": [{"role": "user"}]}, "messages", "field", "null as 'content'"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", "field", "a number as 'content'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
        "messages",
        "field",
        "only text can be learned",
    ),
    ({"messages": [{**ANSWER, "train": "yes"}]}, "messages", "field", "not true or false"),
    ({"messages": [{**ANSWER, "weight": 0.5}]}, "messages", "field", "not 0 or 1"),
    ({"messages": [{**ANSWER, "weight": True}]}, "messages", "field", "not 0 or 1"),
    ({"messages": [{**ANSWER, "weight": 1, "train": False}]}, "messages", "field", "two things"),
    ({"messages": [{**USER, "train": True}]}, "messages", "role", "only assistant turns"),
    ({"messages": [{**ANSWER, "tool_calls": "x"}]}, "messages", "field", "no list of objects"),
    ({"messages": [{**ANSWER, "tool_calls": [{}]}]}, "messages", "field", "without the name"),
    (
        {"messages": [{**ANSWER, "tool_calls": [{"name": "f", "arguments": "{"}]}]},
        "messages",
        "field",
        "no JSON object",
    ),
    ({"messages": [USER], "tools": {"name": "f"}}, "messages", "field", "no list of tools"),
    ({"messages": [USER], "documents": ["x"]}, "messages", "field", "no list of documents"),
    ({"messages": [{"role": "system", "content": "a"}], "system": "b"}, "messages", "turns", "system text of its own"),
    ({"messages": [USER], "system": 1}, "messages", "field", "'system' is a number"),
    ({"conversations": [{"from": "robot", "value": "Hi"}]}, "sharegpt", "role", "'robot'; known are human"),
    ({"conversations": [{"value": "Hi"}]}, "sharegpt", "role", "from null"),
    ({"conversations": [{"from": "human", "value": None}]}, "sharegpt", "field", "null as 'value'"),
    ({"conversations": [{"from": "function_call", "value": "f()"}]}, "sharegpt", "field", "no JSON of one"),
    ({"conversations": 3}, "sharegpt", "field", "a number, not a list"),
    ({"instruction": "Hi"}, "alpaca", "field", "lacks the field 'output'"),
    ({"instruction": "Hi", "output": ""}, "alpaca", "empty", "'output' is empty"),
    ({"instruction": " ", "input": "", "output": "x"}, "alpaca", "empty", "'instruction' is empty"),
    ({"instruction": "Hi", "output": ["x"]}, "alpaca", "field", "a list, not a text"),
    ({"instruction": "Hi", "output": "x", "input": 3}, "alpaca", "field", "'input' is a number"),
    ({"instruction": "Hi", "output": "x", "history": [["a"]]}, "alpaca", "field", "no pair of two texts"),
    ({"prompt": "Hi"}, "prompt-completion", "field", "lacks the field 'completion'"),
    ({"prompt": "Hi", "completion": None}, "prompt-completion", "field", "not two texts or lists"),
    ({"prompt": "Hi", "completion": "\n"}, "prompt-completion", "empty", "'completion' is empty"),
    ({"prompt": "Hi", "completion": [ANSWER]}, "prompt-completion", "field", "not two texts or lists"),
    ({"text": ""}, "text", "empty", "'text' is empty"),
    ({"text": 3}, "text", "field", "a number, not a text"),
]


@pytest.mark.parametrize(("row", "format", "kind", "words"), BAD_ROWS)
def test_bad_rows(row: object, format: str, kind: str, words: str):
    problem = read(row, format)
    assert isinstance(problem, Problem)
    assert problem.kind == kind
    assert words in problem.message
    assert (problem.file, problem.place, problem.records) == ("rows.jsonl", "line 1", 1)


def test_wrong_fields_are_config_errors():
    with pytest.raises(ConfigError, match=r"no format has a field 'promt'.*did you mean 'prompt'"):
        choose_reading({"promt": "x"}, [], "rows.jsonl")
    with pytest.raises(ConfigError, match="mapped to ''"):
        choose_reading({"text": ""}, [], "rows.jsonl")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "a", "completion": 5}, "'prompt' and 'completion' are a text and a number, not two texts or lists"),
        ({"instruction": "a", "output": None}, "the field 'output' is null, not a text"),
        ({"messages": "a"}, "the field 'messages' is a text, not a list of messages"),
        ({"conversations": [{"speaker": "a"}]}, "message 1 is from null"),
        ({"text": 5}, "the field 'text' is a number, not a text"),
    ],
)
def test_rows_with_the_columns_of_a_format_are_told_what_is_wrong_in_them(row: dict, why: str):
    with pytest.raises(DataError, match=f"the first has {', '.join(row)}, but {why}"):
        read(row)


def test_rows_that_fit_nothing_are_told_with_their_columns():
    with pytest.raises(DataError, match="fit no format; the first has title, body"):
        choose_reading({}, [Row({"title": "a", "body": "b"}, "line 1")], "rows.jsonl")
    with pytest.raises(DataError, match="a text instead of an object"):
        choose_reading({}, [Row("a", "line 1")], "rows.jsonl")


@pytest.mark.parametrize(
    ("row", "fields", "words"),
    [
        ({"ask": "a", "say": "b"}, {"prompt": "aks", "completion": "say"}, "'aks', .* as prompt.*did you mean 'ask'"),
        ({"turns": [{"who": "user"}]}, {"messages": "turns", "role": "whom"}, "'whom', .* as role.*mean 'who'"),
        ({"ask": "a"}, {"text": "body"}, "'body', .* as text.*the columns are ask"),
    ],
)
def test_a_column_that_is_not_there_is_told(row: dict, fields: dict, words: str):
    with pytest.raises(DataError, match=f"no column {words}"):
        choose_reading(fields, [Row(row, "line 1")], "rows.jsonl")


# Files.


def rows_of(path: Path) -> list[Row | Problem]:
    return list(read_rows(find_files(str(path)).files[0]))


def test_line_separators_of_unicode_do_not_end_lines(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    text = "a\u2028b\u2029c\u0085d\x0be"
    path.write_text(json.dumps({"text": text}, ensure_ascii=False) + '\r\n\n{"text": "x"}', encoding="utf-8")
    assert rows_of(path) == [Row({"text": text}, "line 1"), Row({"text": "x"}, "line 3")]


def test_the_same_rows_from_every_kind_of_file(tmp_path: Path):
    import gzip

    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": "Hi", "completion": "é\n"}, {"prompt": 'a,"b"', "completion": "x"}]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "b.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode("utf-8")))
    (tmp_path / "d.csv").write_text('prompt,completion\nHi,"é\n"\n"a,""b""",x\n', encoding="utf-8")
    (tmp_path / "f.tsv").write_text('prompt\tcompletion\nHi\t"é\n"\n"a,""b"""\tx\n', encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "e.parquet")
    for path in sorted(tmp_path.iterdir()):
        assert [row.value for row in rows_of(path) if isinstance(row, Row)] == rows, path.name


@pytest.mark.parametrize(
    ("name", "content", "kind", "words"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "json", "line 2"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b', "truncated", "line 2"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xc3', "truncated", "line 2"),
        ("a.jsonl", b'{"text": "a"}\n{"text": b}', "json", "line 2"),
        ("a.jsonl", b'{"text": "a"}\n]', "json", "line 2"),
        ("a.jsonl", b'{"text": "\xff"}\n', "not-utf8", "line 1"),
        ("a.json", b'[{"text": "a"}, {"text": "b"', "truncated", "element 2"),
        ("a.json", b'[{"text": "\xff"}]', "not-utf8", "element 1"),
        ("a.csv", b"text\na,b\n", "csv", "line 2"),
        ("a.csv", b'text\n"\xff"\n', "not-utf8", "line 2"),
        ("a.parquet", b"PAR1", "truncated", ""),
        ("a.jsonl", b"\0" * 100, "binary", ""),
        ("a.jsonl.gz", b"not gzip", "compression", "byte 0"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, kind: str, words: str):
    (tmp_path / name).write_bytes(content)
    problems = [row for row in rows_of(tmp_path / name) if isinstance(row, Problem)]
    assert [problem.kind for problem in problems] == [kind]
    assert words in problems[0].place


def test_a_last_line_is_cut_wherever_it_ends_early(tmp_path: Path):
    row = b'{"a": "\\u00e9\xc3\xa9\\n", "c": [-1.5e-3, true, null], "d": {}}'
    for end in range(1, len(row)):
        (tmp_path / "a.jsonl").write_bytes(b"{}\n" + row[:end])
        assert [row.kind for row in rows_of(tmp_path / "a.jsonl") if isinstance(row, Problem)] == ["truncated"], end


def test_rows_of_other_formats_are_a_bug():
    with pytest.raises(ValueError, match="no rows"):
        list(read_rows(InputFile("a.txt", "a.txt", "smiles", "none", 0)))
