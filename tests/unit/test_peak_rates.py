"""The peak rate of a card by its name, as the driver spells it."""

import pytest
import torch

from flatout.device import Device


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA GeForce RTX 4080", 97.5),
        ("NVIDIA GeForce RTX 4080 SUPER", 104.4),
        ("NVIDIA GeForce RTX 3080", 59.5),
        ("NVIDIA GeForce RTX 3080 Ti", 68.2),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2),
        ("NVIDIA GeForce RTX 2080 Ti", 53.8),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA GeForce RTX 5090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 2070 with Max-Q Design", None),
        ("NVIDIA GeForce GTX 1660", None),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A40", 149.7),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX A4000", 76.7),
        ("NVIDIA RTX 4000 Ada Generation", 106.9),
        ("Quadro RTX 8000", 130.5),
        ("Tesla V100-PCIE-16GB", 112.0),
        ("Tesla V100-SXM2-32GB", 125.0),
        ("Tesla T4", 65.0),
    ],
)
def test_peak_rates_go_by_the_whole_name(name: str, teraflops: float | None):
    card = Device(torch_device=torch.device("cuda", 0), name=name, memory_bytes=None, capability=None)
    assert card.peak_flops == (None if teraflops is None else pytest.approx(teraflops * 1e12))
