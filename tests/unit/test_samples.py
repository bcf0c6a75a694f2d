"""Folders of samples: made whole, used again, made anew, and refused where nothing could be learned."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from flatout.data import chat_template
from flatout.data import library_tokenizers as tokenizer_module
from flatout.data.batch import Delivery
from flatout.data.chat_template import ChatTemplate, load_template, stops_of
from flatout.data.library_tokenizers import ModelTokenizer
from flatout.data.masking import ADVICE, COUNTS, count_text, preview
from flatout.data.sample_data import SampleData
from flatout.data.samples import SAMPLES, SampleRequest, SampleSet, check_target, open_samples, prepare_samples
from flatout.data.shards import MANIFEST
from flatout.data.tokenizer_files import read_model_tokenizer
from flatout.errors import ConfigError, DataError, ResourceError, UserError
from flatout.files import canonical_json
from flatout.observe.terminal import drawn, print_sample
from flatout.records import PrepareProgress
from tests.chat_models import FAMILIES, MARKED, THINKING, chat, write_model

ROWS = [{"prompt": f"Hi {number}", "completion": f"one two {number}"} for number in range(40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelTokenizer, ChatTemplate]:
    folder = write_model(tmp_path_factory.mktemp("marked"), FAMILIES["marked"])
    tokenizer = read_model_tokenizer(folder)
    template = load_template("model", folder, tokenizer)
    assert template is not None
    return tokenizer, template


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def prepare(tmp_path: Path, model: tuple[ModelTokenizer, ChatTemplate]):
    def run(rows: list[Any] | Path | None = None, *, template: Any = ..., folder: str = "samples", **request: Any):
        source = rows if isinstance(rows, Path) else write_rows(tmp_path / "rows.jsonl", ROWS if rows is None else rows)
        chosen = model[1] if template is ... else template
        asked = SampleRequest(str(source), **{"context": 64, **request})
        try:
            return prepare_samples(asked, model[0], chosen, tmp_path / folder)
        finally:
            assert chat_template.child()._process is None, "the process that renders has nothing more to do"

    return run


def test_a_tokenizer_that_a_checkpoint_could_not_give_back_is_refused(model, monkeypatch):
    """What counts is the size as written there, with line breaks and indents."""
    content = {**model[0]._content, "truncation": None, "padding": None}
    stored = len(canonical_json({"kind": "model", "content": content}))
    assert len(json.dumps(content)) < stored
    monkeypatch.setattr(tokenizer_module, "MOST_JSON", stored)
    tokenizer_module.try_out(content)
    monkeypatch.setattr(tokenizer_module, "MOST_JSON", stored - 1)
    with pytest.raises(ValueError, match=f"{stored:,} bytes as a checkpoint stores it"):
        tokenizer_module.try_out(content)


def test_a_tokenizer_that_was_tried_out_and_the_stops_of_a_template_leave_no_process(model):
    tokenizer_module.try_out(model[0]._content)
    assert tokenizer_module.child()._process is None
    with pytest.raises(ValueError, match="Model missing"):
        tokenizer_module.try_out({"version": "1.0"})
    assert tokenizer_module.child()._process is None
    stops_of(*model, ())
    assert chat_template.child()._process is None
    again = chat_template.template_from_json(model[1].to_json())
    assert chat_template.child()._process is None
    assert again.render([{"role": "user", "content": "Hi"}])
    again.release()


def texts(samples: SampleSet, tokenizer: ModelTokenizer, split: str = "train") -> list[str]:
    chosen = samples.train if split == "train" else samples.val
    assert chosen is not None
    return [tokenizer.decode(chosen.sample(number)[0]) for number in range(len(chosen))]


def test_samples_come_in_the_order_of_rows(prepare, model):
    samples = prepare()
    assert samples.made == "there were none yet"
    assert len(samples.train) == 40
    assert samples.val is None
    assert texts(samples, model[0])[3] == "<|im_start|>user\nHi 3<|im_end|>\n<|im_start|>assistant\none two 3<|im_end|>"
    ids, labelled = samples.train.sample(3)
    assert model[0].decode(ids[labelled]) == "one two 3<|im_end|>"
    manifest = samples.manifest
    assert manifest["reading"][0]["format"] == "prompt-completion"
    assert manifest["counts"]["rows"] == manifest["counts"]["turns"] == 40
    facts = manifest["splits"]["train"]
    assert (facts["samples"], facts["tokens"]) == (40, len(samples.train.tokens))
    assert facts["labelled"] == samples.train.labels == int(samples.train.labelled.sum())
    assert facts["labelled_share"] == pytest.approx(facts["labelled"] / facts["tokens"], abs=1e-6)
    assert manifest["tokenizer"]["fingerprint"] == model[0].fingerprint
    assert manifest["template"]["fingerprint"] == model[1].fingerprint


def test_the_same_is_used_again_and_another_is_made(prepare, tmp_path: Path, model):
    first = prepare()
    stamp = (tmp_path / "samples" / SAMPLES).stat().st_mtime_ns
    again = prepare()
    assert again.made == ""
    assert (tmp_path / "samples" / SAMPLES).stat().st_mtime_ns == stamp
    assert again.fingerprint == first.fingerprint
    moved = write_rows(tmp_path / "elsewhere.jsonl", ROWS)
    assert prepare(moved).made == ""
    assert prepare(context=63).made == "settings changed since they were made"
    assert prepare(ROWS[:-1], context=63).made == "source changed since they were made"
    other = ChatTemplate("other", {"default": model[1].text + "{# #}"}, model[1].variables)
    assert prepare(ROWS[:-1], context=63, template=other).made == "template changed since they were made"
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
        "chat_template.jinja",
        "manifest.json",
        "problems.jsonl",
        "samples.safetensors",
        "tokenizer.json",
    ]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_bytes_depend_on_content_only(prepare, tmp_path: Path):
    prepare(folder="a", val_fraction=0.2)
    prepare(folder="b", val_fraction=0.2)
    for name in (SAMPLES, MANIFEST):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("name", [SAMPLES, MANIFEST])
def test_damage_is_noticed_and_mended(prepare, tmp_path: Path, name: str):
    whole = prepare()
    path = tmp_path / "samples" / name
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match="damaged"):
        open_samples(tmp_path / "samples")
    mended = prepare()
    assert mended.made.startswith("those that were there could not be used")
    assert mended.fingerprint == whole.fingerprint
    path.unlink()
    assert prepare().made, "by either of the two files the folder is known as ours"
    for lost in (SAMPLES, MANIFEST):
        (tmp_path / "samples" / lost).unlink()
    with pytest.raises(DataError, match=r"is not one of samples; it holds 'chat_template\.jinja'"):
        prepare()


def rewritten(folder: Path, **changes: Any) -> None:
    """Other values in the manifest, with a hash that fits them; None takes one out."""
    content = {**json.loads((folder / MANIFEST).read_bytes()), **changes}
    body = {name: value for name, value in content.items() if name != "manifest_sha256" and value is not None}
    digest = hashlib.sha256(canonical_json(body)).hexdigest()
    (folder / MANIFEST).write_bytes(canonical_json({**body, "manifest_sha256": digest}))


ENTRY = {"bytes": 1, "sha256": "0" * 64}
SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "no format": ({"format": None}, "format"),
    "no version": ({"version": None}, "version is no number"),
    "a version of tomorrow": ({"version": 99}, "format version 99"),
    "no files": ({"files": {}}, "does not name the files"),
    "files are a list": ({"files": [SAMPLES]}, "files is no object"),
    "a name outside": ({"files": {"../x": ENTRY}}, "does not name the files"),
    "entries are texts": ({"files": dict.fromkeys([SAMPLES, "problems.jsonl", "tokenizer.json"], "x")}, "no size"),
    "a negative size": (
        {"files": {name: {**ENTRY, "bytes": -1} for name in (SAMPLES, "problems.jsonl", "tokenizer.json")}},
        "no size and hash",
    ),
    "no splits": ({"splits": {}}, "splits are not train and val"),
    "another split": ({"splits": {"train": {}, "test": {}}}, "splits are not train and val"),
    "splits are numbers": ({"splits": {"train": 1}}, "splits are no objects"),
    "a split that is not there": ({"splits": {"train": {}, "val": {}}}, "it has no split val"),
    "a tokenizer of nothing": ({"tokenizer": {}}, "no vocabulary"),
    "another vocabulary": ({"tokenizer": {"vocab": 3}}, "out of range"),
    "counts are texts": ({"counts": {"rows": "x"}}, "counts are no numbers"),
    "a key of texts": ({"key": "x"}, "key is no object"),
    "a reading of texts": ({"reading": ["x"]}, "reading is no list"),
    "no fingerprint": ({"fingerprint": None}, "fingerprint"),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_a_manifest_of_another_shape_is_refused_though_its_hash_is_right(prepare, tmp_path: Path, kind: str):
    prepare()
    changes, says = SHAPES[kind]
    rewritten(tmp_path / "samples", **changes)
    with pytest.raises(DataError, match=says) as caught:
        open_samples(tmp_path / "samples")
    assert caught.value.hint


def test_an_id_as_large_as_the_vocabulary_is_refused(prepare, tmp_path: Path):
    prepare()
    largest = int(open_samples(tmp_path / "samples").train.tokens.max())
    content = json.loads((tmp_path / "samples" / MANIFEST).read_bytes())
    rewritten(tmp_path / "samples", tokenizer={**content["tokenizer"], "vocab": largest})
    with pytest.raises(DataError, match="tokens of train are out of range"):
        open_samples(tmp_path / "samples")
    rewritten(tmp_path / "samples", tokenizer={**content["tokenizer"], "vocab": largest + 1})
    assert int(open_samples(tmp_path / "samples").train.tokens.max()) == largest


def test_a_link_or_a_folder_inside_is_not_replaced(prepare, tmp_path: Path):
    prepare()
    (tmp_path / "link").symlink_to(tmp_path / "samples")
    with pytest.raises(DataError, match="is a link"):
        check_target(tmp_path / "link")
    (tmp_path / "samples" / "sub").mkdir()
    with pytest.raises(DataError, match="it holds 'sub'"):
        prepare(ROWS[:5])
    assert (tmp_path / "samples" / "sub").is_dir()


def test_what_is_not_ours_is_left_alone(prepare, tmp_path: Path):
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(DataError, match=r"not one of samples; it holds 'thesis\.txt'"):
        prepare()
    (tmp_path / "samples" / "thesis.txt").rename(tmp_path / "samples" / "tokenizer.json")  # as our files are called
    with pytest.raises(DataError, match=r"not one of samples; it holds 'tokenizer\.json'"):
        prepare()
    assert (tmp_path / "samples" / "tokenizer.json").read_text(encoding="utf-8") == "years of work"
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="is a file"):
        prepare(folder="file")


def test_folders_with_names_like_ours_survive(prepare, tmp_path: Path):
    prepare(ROWS)
    names = [
        f".samples.old-{os.getpid()}",
        f".samples.tmp-{os.getpid()}",
        "samples.old-0123abcd",
        "samples.tmp-0123abcd",
    ]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    assert prepare(ROWS[1:]).made
    assert all((tmp_path / name / "notes.txt").read_text() == "mine" for name in names)


def test_a_full_disk_leaves_the_old_samples(prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    old = prepare()

    def full(*arguments: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(ResourceError, match="No space left"):
        prepare(ROWS[:5])
    assert open_samples(tmp_path / "samples").fingerprint == old.fingerprint
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_progress_is_told(tmp_path: Path, model):
    source = write_rows(tmp_path / "rows.jsonl", ROWS * 40)
    told: list[PrepareProgress] = []
    prepare_samples(SampleRequest(str(source), 64), *model, tmp_path / "samples", told.append)
    assert [progress.phase for progress in told][-1] == "merging"
    assert told[-1].documents == 1600
    assert told[-1].bytes == told[-1].total_bytes == source.stat().st_size
    assert [progress.documents for progress in told] == sorted(progress.documents for progress in told)
    assert len(told) >= 4


# Rows that are held out.


def test_a_share_is_held_out_by_the_text(prepare, model):
    rows = [{"prompt": f"Hi {number % 300}", "completion": "one"} for number in range(600)]
    samples = prepare(rows, val_fraction=0.2)
    train, val = (texts(samples, model[0], split) for split in ("train", "val"))
    assert not set(train) & set(val)
    assert len(train) + len(val) == 600
    assert 0.1 < len(val) / 600 < 0.3
    shuffled = prepare(rows[::-1], val_fraction=0.2)
    assert set(texts(shuffled, model[0], "val")) == set(val)
    grown = prepare([*rows, {"prompt": "new", "completion": "one"}], val_fraction=0.2)
    assert set(val) <= set(texts(grown, model[0], "val"))


def test_few_rows_leave_one_on_either_side(prepare):
    for fraction in (0.001, 0.999):
        samples = prepare(ROWS[:3], val_fraction=fraction)
        assert len(samples.train) >= 1
        assert len(samples.val) >= 1


def test_a_second_file_is_held_out(prepare, tmp_path: Path):
    held_out = write_rows(tmp_path / "val.jsonl", [{"messages": chat("Hi", "one")}])
    rows = [*ROWS, {"prompt": "no answer"}]
    samples = prepare(rows, val_source=str(held_out))
    assert samples.manifest["counts"]["rows_not_used"] == 1, "of the first file, which the second does not answer for"
    assert (len(samples.train), len(samples.val)) == (40, 1)
    assert [reading["format"] for reading in samples.manifest["reading"]] == ["prompt-completion", "messages"]
    write_rows(held_out, [{"messages": chat("Hi", "two")}])
    assert prepare(rows, val_source=str(held_out)).made == "val_source changed since they were made"


def test_samples_of_one_conversation_stay_together(prepare, model):
    rewriting = ChatTemplate("thinking", {"default": THINKING}, model[0].special)
    rows = [{"messages": chat(f"Hi {n}", "one</think>a", "Hi", "two</think>b")} for n in range(30)]
    samples = prepare(rows, template=rewriting, val_fraction=0.3)
    assert samples.manifest["counts"]["turns_apart"] == 30
    first_lines = [{text.split("<|im_end|>")[0] for text in texts(samples, model[0], s)} for s in ("train", "val")]
    assert not first_lines[0] & first_lines[1]
    assert len(samples.train) == 2 * len(first_lines[0])


# Long samples.


def test_long_samples_are_cut_and_counted(prepare, model):
    rows = [
        {"prompt": "Hi", "completion": "one two" * 20},
        {"prompt": "Hi there" * 40, "completion": "one"},
        {"prompt": "Hi", "completion": "one"},
    ]
    counts = prepare(rows, context=20).manifest["counts"]
    assert (counts["truncated"], counts["dropped_labels_cut"]) == (2, 1)
    samples = prepare(rows, context=20)
    assert samples.train.lengths.tolist() == [21, 11]
    assert counts["labels_cut"] == prepare(rows, context=2000).train.labels - samples.train.labels
    assert counts["longest"] > 80
    # One of context + 1 tokens fits: the last token is a target only.
    assert len(prepare(rows[2:], context=10).train) == 1
    assert prepare(rows[2:], context=10).manifest["counts"]["truncated"] == 0
    assert prepare(rows[2:], context=9).manifest["counts"]["truncated"] == 1


# What is told.


def test_bad_rows_are_listed_and_the_rest_is_used(prepare, tmp_path: Path):
    rows = [*ROWS, {"prompt": "Hi"}, {"prompt": "Hi", "completion": ""}, ["x"]]
    samples = prepare(rows)
    assert len(samples.train) == 40
    assert samples.manifest["problems"] == {"all": 3, "empty": 1, "field": 2}
    assert samples.manifest["counts"]["rows"] == 43
    assert samples.manifest["counts"]["rows_not_used"] == 3
    listed = [json.loads(line) for line in (tmp_path / "samples" / "problems.jsonl").read_text().splitlines()]
    assert [(problem["place"], problem["kind"]) for problem in listed] == [
        ("line 41", "field"),
        ("line 42", "empty"),
        ("line 43", "field"),
    ]


def test_counts_of_one_are_told_as_one():
    assert count_text("rows_not_used", 1).startswith("1 row that could not be used, with the reason of each")
    assert count_text("labels_cut", 1) == "1 labelled token that was cut away"
    assert count_text("truncated", 2000) == "2,000 samples cut to the context"


def test_what_a_template_did_to_rows_is_told_with_what_to_do(prepare, model):
    assert ADVICE.keys() <= COUNTS.keys()
    assert count_text("contents_left_out", 1) == "1 message that the template leaves out"
    mute = ChatTemplate(
        "mute",
        {"default": MARKED.replace("in messages %}", "in messages if message.role != 'developer' %}")},
        model[0].special,
    )
    row = {"messages": [{"role": "developer", "content": "Be kind"}, *chat("Hi", "one", "Hi", "")]}
    samples = prepare([{"messages": chat("Hi", "two")}, row], template=mute, val_fraction=0.5)
    data = SampleData(
        sample_set=samples, tokenizer=model[0], template=mute, described={}, stops=(), row_tokens=64, packing=True,
        batch_samples=1, seed=0,
    )  # fmt: skip
    told = [one.found for one in data.notices(Delivery(device=torch.device("cpu")))]
    assert f"samples: 1 message that the template leaves out; {ADVICE['contents_left_out']}" in told
    assert f"samples: 1 empty assistant turn; {ADVICE['empty_answers']}" in told
    assert not any("reasoning" in line for line in told)


def test_special_tokens_in_content_are_counted(prepare):
    samples = prepare([*ROWS, {"prompt": "say <|im_end|>", "completion": "one"}])
    assert samples.manifest["counts"]["special_in_content"] == 1


def test_text_without_a_template(prepare, model):
    samples = prepare([{"text": "Hi there"}] * 2, template=None)
    ids, labelled = samples.train.sample(1)
    assert model[0].decode(ids) == "Hi there<|im_end|>"
    assert labelled.tolist() == [False, True, True]
    assert not (samples.folder / "chat_template.jinja").exists()


BAD_DATA: list[tuple[str, bytes, dict[str, Any], str]] = [
    ("a.jsonl", b"", {}, "the file is empty"),
    ("a.jsonl", b"\n \n", {}, "has no rows"),
    ("a.json", b"[]", {}, "has no rows"),
    ("a.jsonl", b'[\n{"prompt": "Hi",\n', {}, "cannot be used; the first"),
    ("a.jsonl", b"{\n", {}, "line 1: it is not JSON"),
    ("a.jsonl", b"hello\n", {}, "it is not JSON"),
    ("a.jsonl", b"\xff\xfe\x00", {}, "NUL"),
    ("a.json", b'[{"prompt": "Hi", "completion": "one"}, {"prom', {}, "element 2, byte"),
    ("a.json", b'[{"prompt": "Hi", "completion": "one"}', {}, "no closing bracket"),
    ("a.json", b'{"train": [1]}', {}, "fit no format; the first has train"),
    ("a.jsonl", b"3\n", {}, "fit no format"),
    ("a.jsonl", b'{"title": "a"}\n', {}, "fit no format; the first has title"),
    ("a.jsonl", b'{"prompt": "Hi", "completion": ""}\n', {}, "'completion' is empty"),
    (
        "a.jsonl",
        b'{"prompt": "Hi", "completion": "x"}\n',
        {"fields": {"output": "output"}},
        "no column 'output', which",
    ),
    ("a.jsonl", b'{"q": "Hi", "a": "x"}\n', {"fields": {"prompt": "q", "completion": "b"}}, "no column 'b'"),
    ("a.jsonl", b'{"prompt": "Hi", "completion": "\\ud800"}\n', {}, "half of a surrogate"),
    ("a.jsonl", b'{"messages": [{"role": "user", "content": "Hi"}]}\n', {}, "no assistant turn"),
    ("a.jsonl", b'{"messages": [{"role": "boss", "content": "Hi"}]}\n', {}, "the role 'boss'"),
    ("a.jsonl", b'{"messages": [{"role": "user", "content": 3}]}\n', {}, "a number as 'content'"),
    (
        "a.jsonl",
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}\n',
        {},
        "marked as not to be learned",
    ),
    (
        "a.jsonl",
        b'{"prompt": "Hi there Hi there", "completion": "x"}\n',
        {"context": 4},
        "longer than the context of 4",
    ),
    ("a.jsonl", b'{"prompt": "Hi", "completion": "x"}\n' * 3, {"val_fraction": 0.1}, "fewer than two different"),
    ("a.jsonl", b'{"prompt": "Hi", "completion": "x"}\n{"text": 1}\n', {}, "1 of 2 rows"),
    ("a.jsonl.gz", b"not gzip", {}, "it is not gzip"),
    ("a.parquet", b"PAR1", {}, "its end is missing"),
    ("a.csv", b"text\n", {}, "has no rows"),
    ("a.csv", b'text\n"open\n', {}, "unexpected end of data"),
    ("a.txt", b"hello", {}, "holds no rows of instructions"),
    ("a.bin", b"hello", {}, "holds no rows of instructions"),
]


@pytest.mark.parametrize(("name", "content", "request_", "words"), BAD_DATA)
def test_bad_data_is_one_clear_error(prepare, tmp_path: Path, name: str, content: bytes, request_: dict, words: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        prepare(tmp_path / name, **request_)
    assert words in caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.message
    assert not (tmp_path / "samples").exists()


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"fields": {"answer": "a"}}, "no format has a field 'answer'"),
    ({"val_fraction": 1.0}, "chat.validation is 1.0"),
    ({"val_fraction": -0.1}, "chat.validation is -0.1"),
]


@pytest.mark.parametrize(("request_", "words"), BAD_REQUESTS)
def test_bad_requests_are_config_errors(prepare, request_: dict, words: str):
    with pytest.raises(ConfigError) as caught:
        prepare(**request_)
    assert words in caught.value.message
    assert caught.value.exit_code == 2


def test_sources_that_are_not_there(prepare, tmp_path: Path):
    with pytest.raises(UserError, match="there is no source"):
        prepare(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="there are no samples"):
        open_samples(tmp_path)


def test_without_a_template_only_plain_texts_can_be_written(prepare):
    with pytest.raises(DataError, match="no chat template to write them"):
        prepare([{"messages": chat("Hi", "one")}], template=None)


def test_a_tokenizer_without_an_end_is_refused_for_bare_text(tmp_path: Path):
    folder = write_model(tmp_path / "m", FAMILIES["marked"], None)
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    source = write_rows(tmp_path / "rows.jsonl", [{"text": "Hi there"}])
    with pytest.raises(DataError, match="no end-of-text token"):
        prepare_samples(SampleRequest(str(source), 64), read_model_tokenizer(folder), None, tmp_path / "samples")


# The preview.


def test_a_sample_is_shown_with_what_is_trained_on(prepare, model):
    samples = prepare([{"prompt": "Hi\t\x1b[31m", "completion": "one\ntwo\u202e"}])
    pieces = list(preview(*samples.train.sample(0), model[0]))
    assert [labelled for _, labelled in pieces] == [False, True]
    plain = drawn(pieces, most=1000, colour=False).plain
    assert "Hi⇥\\x1b[31m<|im_end|>⏎\n" in plain
    assert "⟦one⏎\ntwo\\u202e<|im_end|>⟧" in plain
    colourful = drawn(pieces, most=1000, colour=True)
    assert "⟦" not in colourful.plain
    trained = "".join(colourful.plain[span.start : span.end] for span in colourful.spans if span.style == "bold green")
    assert trained == "onetwo<|im_end|>"


def test_of_a_long_sample_the_beginning_is_shown():
    pieces = [("a" * 50, False), ("b" * 50, True), ("c" * 50, False), ("d" * 50, True)]
    assert drawn(pieces, most=120, colour=False).plain == (
        "a" * 50 + "⟦" + "b" * 50 + "⟧" + "c" * 20 + " [80 characters left out]"
    )
    assert drawn([("x" * 100, True)], most=10, colour=False).plain == "⟦xxxxxxxxxx⟧ [90 characters left out]"


def test_printing_needs_no_colour(capsys: pytest.CaptureFixture[str]):
    print_sample([("Hi", False), ("one", True)], console=Console(width=40, color_system=None))
    assert capsys.readouterr().out == "Hi⟦one⟧\n"


def test_arrays_are_what_they_say(prepare, model):
    samples = prepare(val_fraction=0.2)
    for split in (samples.train, samples.val):
        assert split.offsets[0] == 0
        assert split.offsets[-1] == len(split.tokens) == len(split.labelled)
        assert split.tokens.dtype == np.dtype("<u2")
        assert int(split.tokens.max()) < model[0].vocab
        assert not split.labelled[split.offsets[:-1]].any()
        assert all(split.sample(number)[1].any() for number in range(len(split)))


def test_rows_that_would_take_gigabytes_are_listed_and_left_out(prepare, tmp_path):
    """One of 16 MiB took 3.4 GB and 90 s; the text up to each of thousands of turns grows with their square."""
    long = {"messages": chat("Hi " * 2**19, "one")}
    many = {"messages": chat(*["a" * 250] * 3000)}
    made = prepare([*[{"messages": chat(f"Hi {number}", "one")} for number in range(40)], long, many])
    assert made.manifest["problems"] == {"all": 2, "too-long": 2}
    listed = [
        json.loads(line)["message"] for line in (tmp_path / "samples" / "problems.jsonl").read_text().splitlines()
    ]
    assert listed[0].startswith("the row has 1,572,")
    assert listed[0].endswith(" characters; the limit for this context is 1,048,576")
    assert listed[1] == "its 1,500 turns would be rendered as 1,125,000,000 characters"
