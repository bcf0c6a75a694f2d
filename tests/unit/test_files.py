"""Files that are whole or not there, sizes in words."""

import pytest

from flatout.files import readable_sizes


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((1.5 * 2**30, 2**20), ["1.5 GiB", "1.0 MiB"]),
        ((1.001 * 2**30, 1.002 * 2**30), ["1.001 GiB", "1.002 GiB"]),
        ((2**30, 2**30), ["1.0 GiB", "1.0 GiB"]),
        ((3, 5_000_000), ["3 bytes", "4.8 MiB"]),
        ((0.0,), ["0 bytes"]),
    ],
)
def test_different_sizes_read_differently(sizes, words):
    assert readable_sizes(*sizes) == words
