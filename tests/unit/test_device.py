"""What torch holds for the whole process is borrowed and given back."""

import torch

from flatout.device import cpu_threads, with_cpu_threads


def test_threads_are_borrowed():
    before = cpu_threads()
    with with_cpu_threads(before + 2):
        assert torch.get_num_threads() == before + 2
        with with_cpu_threads(None):
            assert cpu_threads() == before + 2
    assert torch.get_num_threads() == before
