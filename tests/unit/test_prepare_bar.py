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
