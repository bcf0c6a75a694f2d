"""The summary of a dataset against plain counting, its report and problems, and what it says of damage."""

import hashlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout.cli import main
from flatout.data import inspect
from flatout.data.inspect import read_problems, read_report, shown, summarize
from flatout.data.shards import VERSION, FileInfo, Manifest, SplitInfo, open_dataset
from flatout.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, token_dtype
from flatout.errors import DataError
from flatout.records import DataSummary, record_to_json

REPORT: dict[str, Any] = {
    "format": "flatout-report",
    "records": 100,
    "kept": {"train": 60, "val": 10},
    "dropped": {"exact_duplicate": 20, "language": 7},
    "damaged": 3,
    "problem_count": 2,
    "replaced_characters": 4,
    "files": 2,
    "passed_over": {".pdf": 3},
    "input_bytes": 5000,
    "text_bytes": 4000,
}
PROBLEM = {"file": "a.jsonl", "place": "line 3", "kind": "json", "message": "not JSON", "records": 1}


def store(folder: Path, name: str, content: bytes) -> FileInfo:
    (folder / name).write_bytes(content)
    return FileInfo(name, len(content), hashlib.sha256(content).hexdigest())


def write_ids(
    folder: Path,
    tokenizer: Tokenizer,
    splits: dict[str, Sequence[Sequence[int]]],
    *,
    shard_tokens: int = 10**9,
    report: Any = None,
    problems: Sequence[Any] | None = None,
) -> Path:
    """A dataset of documents given as ids, written without the packer."""
    folder.mkdir(parents=True, exist_ok=True)
    infos = {}
    for name, documents in splits.items():
        ids = np.concatenate([np.asarray(document) for document in documents]).astype(token_dtype(tokenizer.vocab))
        starts = np.cumsum([0, *(len(document) for document in documents)])[:-1].astype("<u8")
        cuts = range(0, len(ids), shard_tokens)
        infos[name] = SplitInfo(
            tokens=len(ids),
            documents=len(documents),
            text_bytes=len(tokenizer.decode(ids).encode("utf-8")),
            shards=tuple(
                store(folder, f"{name}-{number:05}.bin", ids[cut : cut + shard_tokens].tobytes())
                for number, cut in enumerate(cuts)
            ),
            offsets=store(folder, f"{name}.offsets.bin", starts.tobytes()),
        )
    manifest = Manifest(
        version=VERSION,
        dtype=token_dtype(tokenizer.vocab).name,
        vocab=tokenizer.vocab,
        tokenizer_kind=tokenizer.kind,
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer=store(folder, "tokenizer.json", json.dumps(tokenizer.to_json()).encode()),
        splits=infos,
        settings={},
        report=None if report is None else store(folder, "report.json", _json(report)),
        problems=None if problems is None else store(folder, "problems.jsonl", b"".join(map(_json, problems))),
    )
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    return folder


def _json(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode() + b"\n"


def write_texts(folder: Path, tokenizer: Tokenizer, train: Sequence[str], val: Sequence[str], **named: Any) -> Path:
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    documents = {
        name: [[*tokenizer.encode(text).tolist(), *end] for text in texts]
        for name, texts in (("train", train), ("val", val))
    }
    return write_ids(folder, tokenizer, documents, **named)


def refused(action: Any, *arguments: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        action(*arguments)
    return caught.value


# Counting


@pytest.mark.parametrize("chunk", [2**20, 7, 8])  # the last divides the number of documents
@pytest.mark.parametrize("shard_tokens", [10**9, 50])
def test_a_summary_counts_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, shard_tokens: int
) -> None:
    monkeypatch.setattr(inspect, "_CHUNK", chunk)
    train, val = [f"{'ab' * (n % 13)}c{n}" for n in range(40)], ["xyz", "é" * 30]
    tokenizer = ByteTokenizer()
    folder = write_texts(tmp_path / "set", tokenizer, train, val, shard_tokens=shard_tokens)
    summary = summarize(folder, context=16, samples=3, top=4)
    assert (summary.tokenizer, summary.vocab, summary.dtype, summary.context) == ("bytes", 257, "uint16", 16)
    ids: Counter[int] = Counter()
    for split, texts in zip(summary.splits, (train, val), strict=True):
        encoded = [[*text.encode(), 256] for text in texts]
        lengths = sorted(len(document) for document in encoded)
        ids.update(number for document in encoded for number in document)
        assert (split.documents, split.tokens) == (len(texts), sum(lengths))
        assert split.bytes_per_token == split.text_bytes / split.tokens
        assert split.shards == -(-split.tokens // shard_tokens)
        assert split.disk_bytes == 2 * split.tokens + 8 * split.documents
        assert list(split.quantiles) == ["min", "1%", "10%", "50%", "90%", "99%", "max"]
        assert list(split.quantiles.values()) == [
            lengths[0],
            *(lengths[-(-share * len(lengths) // 100) - 1] for share in (1, 10, 50, 90, 99)),
            lengths[-1],
        ]
        windows = max(0, (split.tokens - 1) // 16)
        expected = (windows, split.tokens - 16 * windows - bool(windows))
        if split.name == "val":  # an evaluation reads all of it, in a last window that may be short
            expected = (-(-(split.tokens - 1) // 16), 0)
        assert (split.windows, split.remainder) == expected
    expected = sorted(ids.items(), key=lambda pair: (-pair[1], pair[0]))[:4]
    assert [(token.id, token.count) for token in summary.top_tokens] == expected
    assert summary.top_tokens[0].share == expected[0][1] / ids.total()
    assert summary.unused_ids == 257 - len(ids)


def test_without_a_context_there_are_no_windows(tmp_path: Path) -> None:
    summary = summarize(write_texts(tmp_path, CharTokenizer("ab"), ["abab"], ["a"]))
    assert [(split.windows, split.remainder) for split in summary.splits] == [(None, None), (None, None)]


def test_documents_of_a_context_and_more_are_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "_CHUNK", 2)  # documents that are looked at at once
    documents = [[1] * length for length in (3, 8, 7, 20, 8)]
    folder = write_ids(tmp_path, ByteTokenizer(), {"train": documents, "val": [[1, 2]]})
    train = open_dataset(folder).train
    assert inspect.tokens_in_long_documents(train, 8) == {"documents": 3, "tokens": 36}
    assert inspect.tokens_in_long_documents(train, 21) == {"documents": 0, "tokens": 0}


def test_a_report_of_nothing_wrong_is_one(tmp_path: Path) -> None:
    report = {**REPORT, "dropped": {}, "damaged": 0, "problem_count": 0, "replaced_characters": 0, "records": 70}
    folder = write_ids(tmp_path, ByteTokenizer(), {"train": [[1, 2]], "val": [[1, 2]]}, report=report)
    assert read_report(folder) == report


# Tokens and samples


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        (" the", " the"),
        ("\n\t", "\\n\\t"),
        ("\\n", "\\\\n"),
        ("\x1b[31m", "\\x1b[31m"),
        ("é日", "é日"),
        ("\u202e", "\\u202e"),
    ],
)
def test_token_texts_are_safe_to_show(text: str, safe: str) -> None:
    assert shown(text) == safe
    assert shown(text).isprintable()


def test_part_of_a_character_has_no_text_unless_it_is_a_byte(tmp_path: Path) -> None:
    from flatout.data.tokenizer import Gpt2Tokenizer

    texts = {
        token.text for token in summarize(write_texts(tmp_path / "a", ByteTokenizer(), ["日" * 9], ["a"])).top_tokens
    }
    assert texts == {"\\xe6", "\\x97", "\\xa5", "a", "<|endoftext|>"}
    gpt2 = summarize(write_texts(tmp_path / "b", Gpt2Tokenizer(), ["\U0001f9ec" * 9], [" the"])).top_tokens
    assert "" in {token.text for token in gpt2}
    assert " the" in {token.text for token in gpt2}
    assert not any("\ufffd" in token.text for token in gpt2)


def test_samples_are_the_beginnings_of_documents_and_always_the_same(tmp_path: Path) -> None:
    texts = [f"{n} " + "é😀" * (n * 10) for n in range(50)]
    folder = write_texts(tmp_path, ByteTokenizer(), texts, ["x"])
    samples = summarize(folder, samples=7).samples
    assert samples == summarize(folder, samples=7).samples
    assert len(samples) == 7
    assert [sample.document for sample in samples] == sorted({sample.document for sample in samples})
    for sample in samples:
        text = texts[sample.document]
        assert (sample.split, sample.text, sample.cut) == ("train", text[:300], len(text) > 300)
        assert sample.tokens == len(text.encode()) + 1
    assert [sample.text for sample in summarize(folder, samples=100).samples] == [text[:300] for text in texts]
    assert summarize(folder, samples=0).samples == ()


# The report and the problems


def test_the_report_and_the_first_problems_are_part_of_the_summary(tmp_path: Path) -> None:
    problems = [{**PROBLEM, "place": f"line {n}"} for n in range(100)]
    folder = write_texts(tmp_path, CharTokenizer("ab"), ["ab"], ["a"], report=REPORT, problems=problems)
    summary = summarize(folder)
    assert summary.report == read_report(folder) == REPORT
    assert list(summary.problems) == read_problems(folder, 20) == problems[:20]
    assert read_problems(folder, 0) == []
    assert read_problems(folder, 1000) == problems
    read_back = json.loads(record_to_json(summary))
    assert read_back["type"] == "data"
    assert read_back["report"] == REPORT
    assert len(read_back["splits"]) == 2


def test_a_dataset_from_before_reports_has_none(tmp_path: Path) -> None:
    folder = write_texts(tmp_path, CharTokenizer("ab"), ["ab"], ["a"])
    # A file that the manifest does not know is not the dataset's.
    (folder / "report.json").write_text("{}")
    assert read_report(folder) is None
    assert read_problems(folder, 10) == []
    assert (summarize(folder).report, summarize(folder).problems) == (None, ())


@pytest.mark.parametrize(
    "report",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        {},
        {**REPORT, "format": "other"},
        {**REPORT, "records": 101},
        {**REPORT, "records": -1},
        {**REPORT, "damaged": True},
        {**REPORT, "kept": {"train": 70}},
        {**REPORT, "dropped": [27]},
        {**REPORT, "dropped": {"language": 13.5, "length": 13.5}},
        b"[" * 100_000,
    ],
)
def test_a_report_that_is_not_one_is_damage(tmp_path: Path, report: Any) -> None:
    folder = write_texts(tmp_path, CharTokenizer("ab"), ["ab"], ["a"], report=report)
    assert "report.json is damaged" in refused(read_report, folder).message


@pytest.mark.parametrize(
    "line",
    [b"{\n", b"[]\n", b"5\n", b'{"file": "a"}\n', {**PROBLEM, "file": 5}, {**PROBLEM, "records": "1"}, b"\xff\n"],
)
def test_problems_that_are_none_are_damage(tmp_path: Path, line: Any) -> None:
    folder = write_texts(tmp_path, CharTokenizer("ab"), ["ab"], ["a"], report=REPORT, problems=[PROBLEM, line])
    assert read_problems(folder, 1) == [PROBLEM]
    assert "problems.jsonl is damaged in line 2" in refused(read_problems, folder, 2).message


def test_changed_and_missing_files_are_named_with_both_values(tmp_path: Path) -> None:
    folder = write_texts(tmp_path, CharTokenizer("ab"), ["ab"], ["a"], report=REPORT, problems=[PROBLEM])
    whole = (folder / "report.json").read_bytes()
    (folder / "report.json").write_bytes(whole.replace(b"60", b"61"))
    assert "its SHA-256 is" in refused(read_report, folder).message
    (folder / "report.json").write_bytes(whole + b" ")
    assert f"has {len(whole) + 1} bytes and should have {len(whole)}" in refused(read_report, folder).message
    (folder / "report.json").unlink()
    assert "report.json is missing" in refused(read_report, folder).message
    (folder / "problems.jsonl").write_bytes(b"")
    assert "has 0 bytes" in refused(read_problems, folder, 1).message
    (folder / "problems.jsonl").unlink()
    assert "problems.jsonl is missing" in refused(read_problems, folder, 1).message


# Damage in the tokens


def test_ids_outside_the_vocabulary_are_noticed_before_they_are_counted(tmp_path: Path) -> None:
    folder = write_texts(tmp_path, CharTokenizer("ab"), ["ab" * 50], ["a"])
    ids = np.fromfile(folder / "train-00000.bin", dtype="<u2")
    ids[70] = 9
    ids.tofile(folder / "train-00000.bin")
    error = refused(summarize, folder)
    assert "split train" in error.message
    assert "holds token id 9" in error.message
    assert "the vocabulary has 3" in error.message


@pytest.mark.parametrize("starts", [[1, 2], [0, 0], [0, 8], [0, 2**63], [0, 2**64 - 1]])
def test_document_starts_that_do_not_rise_are_noticed(tmp_path: Path, starts: list[int]) -> None:
    folder = write_texts(tmp_path, CharTokenizer("ab"), ["abab", "b"], ["a"])
    np.array(starts, dtype="<u8").tofile(folder / "train.offsets.bin")
    assert "document starts of split train" in refused(summarize, folder).message


def test_a_folder_without_a_dataset(tmp_path: Path) -> None:
    for action in (summarize, read_report, lambda folder: read_problems(folder, 1)):
        assert "there is no dataset" in refused(action, tmp_path).message


def test_the_root_of_a_disk_is_a_folder_without_a_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    """It has no name to call the picture by."""
    assert main(["prepare", "inspect", "/"]) == 3
    assert "there is no dataset in /" in capsys.readouterr().err


def test_of_many_problems_the_first_are_shown_and_the_rest_counted(tmp_path: Path, capsys) -> None:
    problems = [{**PROBLEM, "place": f"line {n}"} for n in range(30)]
    report = {**REPORT, "problem_count": len(problems)}
    write_texts(tmp_path, CharTokenizer("ab"), ["abab"], ["a"], report=report, problems=problems)
    assert main(["prepare", "inspect", str(tmp_path)]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem:")]
    assert len(told) == 6
    assert told[-1] == "problem: ... and 25 more in problems.jsonl"


def test_inspecting_needs_no_torch(tmp_path: Path) -> None:
    folder = write_texts(tmp_path, CharTokenizer("ab"), ["abab"], ["a"], report=REPORT, problems=[])
    code = (
        "import sys, flatout.data.inspect as inspect; from flatout.observe import dataset, sheets;"
        f"sheets.print_sheet(dataset.data_sheet(inspect.summarize({str(folder)!r})));"
        "print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False False"


def test_a_summary_is_plain_values(tmp_path: Path) -> None:
    summary = summarize(write_texts(tmp_path, CharTokenizer("ab"), ["abab"], ["a"]), context=2)
    assert isinstance(summary, DataSummary)
    plain = json.loads(record_to_json(summary))
    assert plain["splits"][0]["quantiles"]["50%"] == 5
    assert plain["top_tokens"][0] == {"id": 0, "text": "a", "count": 3, "share": 3 / 7}
