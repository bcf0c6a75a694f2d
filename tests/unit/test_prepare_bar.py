"""Progress of preparing: what is shown on a terminal and elsewhere."""

import io

import pytest

from flatout.observe.terminal import PrepareBar
from flatout.records import PrepareProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_a_measurement_is_one_line_of_its_own(stream: io.StringIO) -> None:
    reading = PrepareProgress("reading", 0, 1, 10, 100, 1, 5, 0)
    with PrepareBar(stream) as bar:
        bar(reading)
        bar(PrepareProgress("measuring", 0, 0, 0, 0, 0, 0, 0, "measuring a size"))
        assert stream.getvalue().count("measuring") == stream.getvalue().count("note: measuring a size\n") == 1
        bar(reading)  # a later phase opens another bar


def test_the_last_line_of_a_log_is_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = io.StringIO(), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with PrepareBar(stream) as bar:
        now[0] = 12.0  # a tokenizer was learned before
        bar(PrepareProgress("reading", 0, 274, 0, 5_000_000, 0, 0, 0))
        bar(PrepareProgress("merging", 274, 274, 5_000_000, 5_000_000, 900, 10**6, 0))
        assert stream.getvalue().splitlines() == ["preparing: 0/274 files  0 MB"]
    assert stream.getvalue().splitlines()[1].startswith("writing shards: 274/274 files  5 MB")
