"""Crawls: what WARC and WET records become, and what is said of every record that damage has cost."""

import gzip
import itertools
import sys
import zlib
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.corpus import crawl
from flatout.corpus.crawl import DEPTH_LIMIT, read_warc
from flatout.corpus.document import Document, InputFile, Problem, ReadOptions
from flatout.corpus.streams import ByteStream
from flatout.errors import DataError
from tests.handmade import Memory

HTML = "text/html; charset=utf-8"
OK = "HTTP/1.1 200 OK"


def record(
    kind: str, block: bytes | str = b"", line: str = "\r\n", length: int | str | None = None, **fields: str
) -> bytes:
    block = block.encode() if isinstance(block, str) else block
    fields = {"WARC-Type": kind, "WARC-Record-ID": "<urn:uuid:1>"} | {
        name.replace("_", "-"): value for name, value in fields.items()
    }
    head = "".join(f"{name}: {value}{line}" for name, value in fields.items())
    size = len(block) if length is None else length
    return f"WARC/1.0{line}{head}Content-Length: {size}{line}{line}".encode() + block + 2 * line.encode()


def response(
    body: bytes | str, type: str | None = HTML, status: str = OK, url: str = "http://a.org/", **fields: str
) -> bytes:
    body = body.encode() if isinstance(body, str) else body
    stated = {} if type is None else {"content-type": type}
    stated |= {name.replace("_", "-"): value for name, value in fields.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in stated.items())
    block = f"{status}\r\n{head}\r\n".encode() + body
    return record("response", block, Content_Type="application/http; msgtype=response", WARC_Target_URI=url)


def page(text: str) -> str:
    return f"<!DOCTYPE html><html><head><title>t</title></head><body><p>{text}</p></body></html>"


def wet(text: bytes | str, url: str = "http://a.org/", line: str = "\r\n", length: int | str | None = None) -> bytes:
    return record("conversion", text, line, length, WARC_Target_URI=url, Content_Type="text/plain")


FILE = InputFile("crawl", "crawl", "warc", "none", 0)


def read_bytes(data: bytes, policy: str = "strict", problem: Problem | None = None, **limits: int) -> list:
    step = limits.pop("step", 2**20)
    with patch.object(crawl, "LINE_LIMIT", limits.get("limit", crawl.LINE_LIMIT)):
        return list(read_warc(Memory(data, problem, step), FILE, ReadOptions(invalid_utf8=policy)))


def read(folder: Path, data: bytes, method: str = "none", policy: str = "strict", **limits: int) -> list:
    path = folder / f"crawl.{method}"
    path.write_bytes(data)
    file = InputFile(str(path), "crawl", "warc", method, len(data))
    with ByteStream(file) as stream, patch.object(crawl, "LINE_LIMIT", limits.get("limit", crawl.LINE_LIMIT)):
        return list(read_warc(stream, file, ReadOptions(invalid_utf8=policy)))


def texts(results: list) -> list[str]:
    return [result.text for result in results if isinstance(result, Document)]


def problems(results: list) -> list[Problem]:
    return [result for result in results if isinstance(result, Problem)]


def lost(results: list) -> int:
    return sum(problem.records for problem in problems(results))


CRAWL = (
    record("warcinfo", "software: a test\r\n"),
    record("request", "GET / HTTP/1.1\r\n\r\n", Content_Type="application/http; msgtype=request"),
    response(page("the first page"), url="http://a.org/1"),
    record("metadata", "fetchTimeMs: 3\r\n"),
    wet("the second,\nwhich is plain\n\nand long", url="http://a.org/2"),
    response(page("the third page"), url="http://a.org/3"),
)
TEXTS = ["the first page", "the second,\nwhich is plain\n\nand long", "the third page"]


def test_pages_and_texts_become_documents_and_the_rest_is_not_counted(tmp_path: Path) -> None:
    results = read(tmp_path, b"".join(CRAWL))
    assert texts(results) == TEXTS
    assert [result.place for result in results] == ["record 3", "record 5", "record 6"]
    assert not any(result.rejected for result in results)


def test_records_of_warc_1_1_and_addresses_in_brackets_are_read(tmp_path: Path) -> None:
    data = response(page("new"), url="<http://a.org/>").replace(b"WARC/1.0", b"WARC/1.1")
    (found,) = read(tmp_path, data)
    assert found.text == "new"


def test_only_the_main_text_of_a_page_is_kept(tmp_path: Path) -> None:
    html = (
        "<html><head><style>p {}</style></head><body><nav><a href='/'>Home</a></nav><main><h1>Tea</h1>"
        "<p>Water, then leaves.</p></main><script>let x = 1</script><footer>all rights</footer></body></html>"
    )
    assert texts(read(tmp_path, response(html))) == ["Tea\n\nWater, then leaves."]


def test_what_is_no_page_is_rejected_by_reason(tmp_path: Path) -> None:
    rejected = {
        "not_html": (
            response(b"\x89PNG", "image/png"),
            response("{}", "application/json"),
            response("p {}", "text/css"),
            response(b"\x89PNG\r\n\x1a\n" + bytes(50), type=None),
            record("response", "20210101", Content_Type="text/dns", WARC_Target_URI="dns:a.org"),
            record("resource", b"\0", Content_Type="image/gif"),
            record("conversion", b"\0", Content_Type="image/gif"),
        ),
        "http_status": (
            response(page("gone"), status="HTTP/1.1 404 Not Found"),
            response("", status="HTTP/1.0 301"),
            response(page("part"), status="HTTP/2 206"),
        ),
    }
    for reason, records in rejected.items():
        results = read(tmp_path, b"".join(records))
        assert [(result.text, result.rejected) for result in results] == [("", reason)] * len(records)


def test_plain_text_and_resources_are_taken_as_they_are(tmp_path: Path) -> None:
    data = (
        response(" two\r\nlines\r\n", "text/plain") + record("resource", page("a file"), Content_Type="text/html"),
        record(
            "resource", "wget -r", WARC_Target_URI="metadata://gnu.org/wget_arguments.txt", Content_Type="text/plain"
        ),
    )
    assert texts(read(tmp_path, b"".join(data))) == [" two\r\nlines\r\n", "a file"]


def test_a_page_without_a_type_is_told_by_its_looks_or_by_the_crawler(tmp_path: Path) -> None:
    data = response(page("no type"), type=None) + response("<p>short</p>", type=None)
    assert texts(read(tmp_path, data)) == ["no type", "short"]
    named = response("<p>named</p>", None).replace(
        b"WARC-Type", b"WARC-Identified-Payload-Type: image/png\r\nWARC-Type"
    )
    assert read(tmp_path, named)[0].rejected == "not_html"


@pytest.mark.parametrize(
    ("encoding", "stated", "text"),
    [
        ("utf-8", "text/html; charset=UTF-8", "Größe 馬克"),
        ("cp1252", "text/html; charset=iso-8859-1", "Größe “so”"),
        ("cp1251", 'text/html; charset="windows-1251"', "Цитаты знаменитого"),
        ("cp932", "text/html; charset=Shift_JIS", "日本語①"),
        ("gb18030", "text/html; charset=gb2312", "中文𠀀"),
        ("utf-8-sig", "text/html", "Größe"),
        ("utf-16", "text/html; charset=utf-8", "Größe"),
        ("utf-8", "text/html; charset=no-such", "Größe"),
    ],
)
def test_a_page_is_decoded_as_it_says(tmp_path: Path, encoding: str, stated: str, text: str) -> None:
    assert read(tmp_path, response(page(text).encode(encoding), stated)) == [Document(text, "record 1", replaced=0)]


def test_without_a_word_about_its_encoding_a_page_is_looked_at(tmp_path: Path) -> None:
    text = "Grüße aus der schönen Stadt Köln, wo die Bäume blühen und die Vögel überall Lieder trällern."
    assert texts(read(tmp_path, response(page(text).encode("cp1252"), "text/html"))) == [text]
    meta = f"<html><head><meta charset='koi8-r'></head><body><p>{'Цитаты'}</p></body></html>".encode("koi8-r")
    assert texts(read(tmp_path, response(meta, "text/html"))) == ["Цитаты"]


def test_bytes_that_do_not_fit_follow_the_policy_if_they_are_in_the_text(tmp_path: Path) -> None:
    bad = response(page("caf\N{REPLACEMENT CHARACTER}").replace("\ufffd", "XX").encode().replace(b"XX", b"\xe9"))
    (problem,) = read(tmp_path, bad)
    assert (problem.kind, problem.records) == ("not-utf8", 1)
    assert "byte 0xe9" in problem.message
    assert problem.place.startswith("record 1, byte ")
    (replaced,) = read(tmp_path, bad, policy="replace")
    assert (replaced.text, replaced.replaced) == ("caf\ufffd", 1)
    (skipped,) = read(tmp_path, bad, policy="skip")
    assert (skipped.text, skipped.rejected) == ("", "invalid_utf8")
    hidden = response(b"<html><body><script>'\xe9'</script><p>all is well</p></body></html>")
    assert texts(read(tmp_path, hidden)) == ["all is well"]


def test_wet_text_that_is_not_utf8_follows_the_policy(tmp_path: Path) -> None:
    data = wet(b"caf\xe9") + wet("fine")
    problem, after = read(tmp_path, data)
    assert (problem.kind, problem.records, problem.place) == ("not-utf8", 1, "record 1, byte 3 of it")
    assert after.text == "fine"
    assert read(tmp_path, data, policy="replace")[0] == Document("caf\ufffd", "record 1", replaced=1)
    assert read(tmp_path, data, policy="skip")[0].rejected == "invalid_utf8"


def chunked(data: bytes) -> bytes:
    parts = [data[start : start + 20] for start in range(0, len(data), 20)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def test_encodings_of_the_answer_are_undone(tmp_path: Path) -> None:
    html = page("hello there").encode()
    data = (
        response(chunked(html), transfer_encoding="chunked"),
        response(gzip.compress(html), content_encoding="gzip"),
        response(chunked(zlib.compress(html)), content_encoding="deflate", transfer_encoding="chunked"),
        response(html, content_encoding="identity"),
        response(html, content_encoding="gzip"),  # undone by the crawler already
        response(html, transfer_encoding="chunked"),
    )
    assert texts(read(tmp_path, b"".join(data))) == ["hello there"] * 6


def test_an_answer_that_cannot_be_decoded_is_a_problem(tmp_path: Path) -> None:
    results = read(tmp_path, response(b"\x1f\x8bnothing", content_encoding="gzip") + CRAWL[4])
    assert [problem.kind for problem in problems(results)] == ["record"]
    assert lost(results) == 1
    assert texts(results) == TEXTS[1:2]


def test_an_answer_that_decodes_to_too_much_is_a_problem(tmp_path: Path) -> None:
    results = read(tmp_path, response(gzip.compress(bytes(10**6)), content_encoding="gzip"), limit=10**4)
    assert [(problem.kind, problem.records) for problem in problems(results)] == [("too-long", 1)]


def test_deeply_nested_blocks_are_rejected(tmp_path: Path) -> None:
    fine, deep = 400, 100_000
    data = b"".join(
        response("<div>" * depth + "text" + end * depth)
        for depth, end in ((fine, "</div>"), (deep, "</div>"), (deep, ""), (deep, "</b>"))
    )
    flat = response("<div>a</div>" * (3 * DEPTH_LIMIT))
    results = read(tmp_path, data + flat)
    assert [result.rejected for result in results] == [None, "html_depth", "html_depth", "html_depth", None]


# Damage.


def expected_at(cut: int) -> tuple[list[str], bool]:
    """The texts that are whole in the first `cut` bytes of the crawl, and whether something is broken off."""
    whole: list[str] = []
    end = 0
    for data in CRAWL:
        end += len(data)
        if b"Target-URI" in data:
            whole += TEXTS[len(whole) : len(whole) + 1] if cut >= end - 4 else []
        if cut < end - 4:
            return whole, cut > end - len(data)
    return whole, False


def test_a_crawl_cut_anywhere_gives_a_prefix_and_tells_the_loss() -> None:
    data = b"".join(CRAWL)
    for cut in range(1, len(data) + 1):
        results = read_bytes(data[:cut])
        whole, broken = expected_at(cut)
        assert texts(results) == whole, cut
        assert [problem.kind for problem in problems(results)] == ["truncated"] * broken, (cut, results)


def test_a_crawl_with_other_line_ends_cut_anywhere_tells_the_loss() -> None:
    records = [wet(text, line="\n") for text in TEXTS]
    data = b"".join(records)
    ends = [0, *itertools.accumulate(map(len, records))]
    for cut in range(1, len(data) + 1):
        results = read_bytes(data[:cut])
        whole = sum(cut >= end - 2 for end in ends[1:])
        assert texts(results) == TEXTS[:whole], cut
        assert [problem.kind for problem in problems(results)] == ["truncated"] * (cut > ends[whole]), (cut, results)


def test_a_compressed_crawl_cut_anywhere_tells_the_loss(tmp_path: Path) -> None:
    data = b"".join(gzip.compress(part, mtime=0) for part in CRAWL)
    ends = [0]
    for part in CRAWL:
        ends.append(ends[-1] + len(gzip.compress(part, mtime=0)))
    for cut in range(1, len(data), 3):
        results = read(tmp_path, data[:cut], "gz")
        found = texts(results)
        assert found == TEXTS[: len(found)], cut
        assert len(found) >= sum(cut >= ends[number + 1] for number in (2, 4, 5)), cut
        assert [problem.kind for problem in problems(results)] == ["truncated"] * (cut not in ends), cut
        assert lost(results) <= 1


def test_damage_of_the_stream_costs_the_record_that_is_being_read() -> None:
    damage = Problem("crawl", "compressed byte 9", "compression", "garbage", records=0)
    data = b"".join(CRAWL)
    for cut in range(len(data)):
        whole, broken = expected_at(cut)
        results = read_bytes(data[:cut], problem=damage)
        assert texts(results) == whole
        (problem,) = problems(results)
        assert problem.kind == "compression"
        assert "compressed byte 9" in problem.message
        assert problem.records <= broken
    (problem,) = problems(read_bytes(data[:-9], problem=damage))
    assert problem.records == 1
    assert problem.place == f"record 6, byte {len(data) - len(CRAWL[5])}"


def test_a_wrong_checksum_is_told_beside_the_documents(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(wet("kept")))
    data[-6] ^= 1
    first, problem = read(tmp_path, bytes(data), "gz")
    assert first.text == "kept"
    assert (problem.kind, problem.records) == ("checksum", 0)


@pytest.mark.parametrize("step", [1, 2, 7, 50])
def test_it_does_not_matter_how_much_is_read_at_once(step: int) -> None:
    data = b"".join((*CRAWL[:4], b"XARC garbage, enough of it to be a record\r\n", *CRAWL[4:]))
    data += wet("x" * 400) + wet("a\nb", line="\n", length=1) + wet("c", line="\n") + wet("d", length=99)
    assert read_bytes(data, step=step, limit=300) == read_bytes(data, limit=300)
    assert len(read_bytes(data, limit=300)) == 8


@pytest.mark.parametrize("garbage", [0x00, 0x58, 0x0A, 0x39, 0xFF])
def test_a_changed_byte_loses_no_record_in_silence(garbage: int) -> None:
    data = b"".join(CRAWL)
    for place in range(len(data)):
        if data[place] == garbage:
            continue
        changed = data[:place] + bytes([garbage]) + data[place + 1 :]
        results = read_bytes(changed)
        assert len(texts(results)) + lost(results) >= len(TEXTS), place
        # Whatever was lost, it is the record with the changed byte or the one before it.
        assert len(set(texts(results)) & set(TEXTS)) >= len(TEXTS) - 1, place


def test_reading_goes_on_at_the_next_record_after_garbage(tmp_path: Path) -> None:
    garbage = b"some text about WARC/1.0\r\nand more\r\n"
    data = CRAWL[2] + garbage + CRAWL[4] + CRAWL[5]
    results = read(tmp_path, data)
    assert texts(results) == TEXTS
    (problem,) = problems(results)
    assert (problem.kind, problem.records) == ("record", 1)
    assert problem.place == f"record 2, byte {len(CRAWL[2])}"
    assert f"{len(garbage)} bytes" in problem.message


@pytest.mark.parametrize("length", [0, 3, 40, 10**4, 10**12, "x", "-1", "", "9" * 5000])
def test_a_wrong_length_costs_one_record(tmp_path: Path, length: int | str) -> None:
    data = CRAWL[2] + wet("a text of twenty-five bytes", length=length) + CRAWL[5]
    results = read(tmp_path, data)
    assert texts(results) == [TEXTS[0], TEXTS[2]]
    (problem,) = problems(results)
    assert (problem.kind, problem.records) == ("record", 1)
    assert problem.place == f"record 2, byte {len(CRAWL[2])}"


def test_a_broken_head_costs_one_record(tmp_path: Path) -> None:
    for old, new in (
        (b"WARC/1.0", b"XARC/1.0"),
        (b"WARC/1.0", b"WARC/7.0"),
        (b"WARC-Type: ", b"WARC-Type "),
        (b"conversion", b"conv\xffrsion"),
        (b"conversion", b"continuation"),
        (b"WARC-Record-ID", b"WARC-Segment-Number: 2\r\nWARC-Record-ID"),
        (b"Content-Length", b"Content-Lxngth"),
    ):
        results = read(tmp_path, CRAWL[2] + CRAWL[4].replace(old, new) + CRAWL[5])
        assert texts(results) == [TEXTS[0], TEXTS[2]]
        assert [(problem.kind, problem.records) for problem in problems(results)] == [("record", 1)]


def test_a_head_without_end_is_not_looked_for_without_end(tmp_path: Path) -> None:
    results = read(tmp_path, b"WARC/1.0\r\n" + b"name: value\r\n" * 10**5 + b"\r\n" + CRAWL[4])
    assert texts(results) == TEXTS[1:2]
    assert lost(results) == 1


def test_a_response_without_an_http_head_is_a_problem(tmp_path: Path) -> None:
    results = read(tmp_path, record("response", page("x"), Content_Type="application/http") + CRAWL[4])
    assert texts(results) == TEXTS[1:2]
    assert [(problem.kind, problem.records) for problem in problems(results)] == [("record", 1)]


def test_folded_heads_and_missing_blank_lines_are_no_damage(tmp_path: Path) -> None:
    folded = wet("folded").replace(b"Content-Type: ", b"X-Note: one\r\n two\r\nContent-Type:\r\n\t")
    tight = wet("tight").removesuffix(b"\r\n\r\n")
    assert texts(read(tmp_path, b"\r\n" + folded + tight + CRAWL[2] + tight)) == ["folded", "tight", TEXTS[0], "tight"]


def test_records_above_the_limit_are_passed_over(tmp_path: Path) -> None:
    data = CRAWL[2] + wet("x" * 5000) + CRAWL[4] + record("request", "y" * 5000) + wet("z" * 5000)
    results = read(tmp_path, data, limit=1000)
    assert texts(results) == TEXTS[:2]
    assert [(problem.kind, problem.records) for problem in problems(results)] == [
        ("too-long", 1),
        ("too-long", 0),
        ("too-long", 1),
    ]
    assert "5,000 bytes" in problems(results)[0].message
    (problem,) = problems(read(tmp_path, data[:-3000], limit=1000))[2:]
    assert (problem.kind, problem.records) == ("truncated", 1)


def test_records_longer_than_what_is_read_at_once_are_whole(tmp_path: Path) -> None:
    long = "0123456789" * 300_000
    data = wet(long) + wet("after", line="\n", length=3) + wet(long, line="\n", length=77) + CRAWL[5]
    assert texts(read(tmp_path, data)) == [long, "after", long, TEXTS[2]]


def test_what_is_no_warc_at_all_is_said_once(tmp_path: Path) -> None:
    for data in (b"hello\nworld\n" * 1000, bytes(1000), b"<html>"):
        (problem,) = read(tmp_path, data)
        assert (problem.kind, problem.records) == ("format", 0)
    (problem,) = read(tmp_path, gzip.compress(b""), "gz")
    assert (problem.kind, problem.records) == ("empty", 0)


def test_translated_line_ends_make_lengths_wrong_and_records_stay_whole(tmp_path: Path) -> None:
    """As in a WET file that went through an editor, or whose lengths count characters."""
    blocks = ["one\n\ntwo\nthree", "馬克·吐溫名言", "Цитаты\nзнаменитого", "last\nlines"]
    crlf = [len(block.replace("\n", "\r\n").encode()) for block in blocks]
    characters = [len(block) for block in blocks]
    for lengths in (crlf, characters, [length + 1 for length in characters]):
        data = b"".join(wet(block, line="\n", length=length) for block, length in zip(blocks, lengths, strict=True))
        assert [text.rstrip("\n") for text in texts(read(tmp_path, data + b"\n"))] == blocks


def test_translated_texts_above_the_limit_are_passed_over(tmp_path: Path) -> None:
    data = wet("x" * 5000, line="\n", length=9) + wet("short", line="\n", length=1)
    results = read(tmp_path, data, limit=1000)
    assert texts(results) == ["short"]
    assert [(problem.kind, problem.records) for problem in problems(results)] == [("too-long", 1)]


NASTY = st.lists(
    st.sampled_from(
        [b"WARC/1.0\r\n", b"WARC/1.", b"\r\n", b"\n", b"\r\n\r\n", b"A: b", b"Content-Length: 3", b"text", b"\r"]
    )
).map(b"".join)


@settings(max_examples=100, deadline=None)
@given(blocks=st.lists(NASTY, max_size=5), step=st.sampled_from([5, 2**20]))
def test_whatever_stands_in_texts_comes_back(blocks: list[bytes], step: int) -> None:
    data = b"".join(wet(block) for block in [*blocks, b"end"])
    assert read_bytes(data, step=step) == [
        Document(block.decode(), f"record {number}") for number, block in enumerate([*blocks, b"end"], start=1)
    ]


@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.one_of(NASTY, st.sampled_from(CRAWL), st.binary(max_size=20)), max_size=8))
def test_no_input_raises(parts: list[bytes]) -> None:
    results = read_bytes(b"".join(parts), policy="replace")
    assert all(isinstance(result, Document | Problem) for result in results)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resiliparse.extract.html2text", None)
    with pytest.raises(DataError, match="resiliparse") as caught:
        read(tmp_path, CRAWL[2])
    assert "flatout[data]" in caught.value.hint
    assert texts(read(tmp_path, CRAWL[4])) == TEXTS[1:2]
