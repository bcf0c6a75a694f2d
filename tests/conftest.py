"""What the tests share: one thread, no GPU surprises, and a model small enough to train in a blink."""

import contextlib
import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests are tiny: threads would cost more than they bring
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from flatout.config.load import LoadedConfig, load_config
from flatout.confined import Child
from flatout.corpus import sources
from tests.bf16_products import summed_in_fp32
from tests.interpreter import replace_once

torch.set_num_threads(1)

# Without bytecode on the disk, pytest rewrites all assertions again in every process and run: 12 seconds each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell ignores Ctrl-C for what it runs in the background, and nohup ignores the hang-up; so would every process that
# a test starts, and the tests of signals would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A test ends processes, never the machine, and a run waits for the disk 40 times: longer than it computes.
# `tests/power_loss.py` records which calls there are, and in which order.
os.fsync = os.fstat

if not torch.cuda.is_available():
    # Triton reads this when it is first imported, which torch.compile does too; it does not mind.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton"):
        replace_once()

# The network of the preset shakespeare-char in another size: tests meet what people train. The optimizer is AdamW,
# because a step with Muon takes half as long again.
TINY = [
    "model.layers=2",
    "model.width=32",
    "model.heads=2",
    "model.context=16",
    "data.tokenizer=char",  # nothing has to be learned first
    "optim.optimizer=adamw",
    "optim.learning_rate=4e-3",
    "optim.embedding_rate=null",
    "optim.head_rate=null",
    "optim.schedule=cosine",
    "optim.decay_fraction=0.2",
    "optim.min_ratio=0.02",
    "optim.weight_decay=0.1",
    "optim.betas=[0.9, 0.95]",
    "optim.clip=1.0",
    "data.unknown_characters=error",
    "train.batch_tokens=64",
    "optim.warmup=5",
    "eval.every=0",
    "eval.tokens=512",
    "eval.sample_tokens=8",
    "checkpoint.every=0",
    "speed.device=cpu",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="K/N: every Nth test from the Kth on, to share work among processes")


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may not be there
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: some tests wait for processes and clocks."""
    return (os.cpu_count() or 1) + 1


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are collected
    if find_spec("flash_attn"):  # where FlashAttention-4 is, it and its compiler warn about each other
        config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning")
        config.addinivalue_line("filterwarnings", r"ignore:Argument \w+ \(position:UserWarning")


def _thin_grids(items: list[pytest.Item]) -> None:
    """Of a test marked `grid`, cases that hold every value of every parameter stay; the other combinations are slow.

    On a GPU all combinations stay: there they test what the interpreter cannot.
    """
    grids: dict[object, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("grid") and "gpu" not in item.keywords:
            grids.setdefault((item.path, item.originalname), []).append(item)
    for cases in grids.values():
        values = {item: [(name, str(value)) for name, value in item.callspec.params.items()] for item in cases}
        uses: Counter[tuple[str, str]] = Counter()
        missing = {value for case in cases for value in values[case]}
        while missing:
            # Most new values first, then the least used: cases of a grid lie on its diagonal.
            best = min(cases, key=lambda case: (-len(missing & {*values[case]}), sum(uses[v] for v in values[case])))
            missing -= {*values[best]}
            uses.update(values[best])
            cases.remove(best)
        for case in cases:
            case.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _thin_grids(items)
    part, parts = (int(number) for number in str(config.getoption("--part")).split("/"))
    items[:] = items[part - 1 :: parts]
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Eight thousand tests and all they import stay to the end: the collector of garbage need not look at them."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _what_is_old_is_not_looked_at_again() -> Iterator[None]:
    """Our code collects garbage between measurements, and pays for every module that any test has imported."""
    longest, began = 0.0, 0.0

    def watch(phase: str, info: dict[str, int]) -> None:
        nonlocal longest, began
        if phase == "start":
            began = time.perf_counter()
        elif info["generation"] == 2:
            longest = max(longest, time.perf_counter() - began)

    gc.callbacks.append(watch)
    yield
    gc.callbacks.remove(watch)
    if longest > 0.02:
        gc.collect()
        gc.freeze()


def _global_switches() -> dict[str, object]:
    """What is one for the whole process in torch, and changes what later tests compute."""
    flags, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "precision of fp32 products": torch.get_float32_matmul_precision(),
        "sums in bf16": flags.matmul.allow_bf16_reduced_precision_reduction,
        "sums in fp16": flags.matmul.allow_fp16_reduced_precision_reduction,
        "cuDNN": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        "attention": (
            flags.flash_sdp_enabled(),
            flags.mem_efficient_sdp_enabled(),
            flags.cudnn_sdp_enabled(),
            flags.math_sdp_enabled(),
        ),
        "determinism": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "default type": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
        "threads": torch.get_num_threads(),
    }


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was() -> Iterator[None]:
    """A test that leaves TF32 or determinism on fails itself, not a later one; only the first is put back."""
    before = _global_switches()
    yield
    after = _global_switches()
    if before["precision of fp32 products"] != after["precision of fp32 products"]:
        torch.set_float32_matmul_precision(str(before["precision of fp32 products"]))
    assert after == before, "a test left torch's process-wide switches changed"


@pytest.fixture
def bf16_products() -> Iterator[None]:
    """For a test that computes in bf16: without it, a product may take 200 times as long, and is rounded otherwise.

    Not beside a GPU, where such CPUs are rare and torch 2.11 refuses to replace its kernels a second time.
    """
    with contextlib.nullcontext() if torch.cuda.is_available() else summed_in_fp32():
        yield


@pytest.fixture(scope="module")
def children_stay() -> Iterator[Callable[[], None]]:
    """The processes that run what strangers wrote stay for all tests of a module; the value ends them.

    A run starts two or three, and each takes a tenth of a second. `test_confined` is about their ends.
    """
    staying: set[Child] = set()
    end = Child.close

    def end_all() -> None:
        for child in staying:
            end(child)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Child, "close", lambda child: staying.add(child))
        yield end_all
    end_all()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text with some structure, so that training has something to learn."""
    path = tmp_path_factory.mktemp("corpus") / "lines.txt"
    lines = [
        f"the {a} {b} over the {c}.\n" for a in ("old", "red", "sly") for b in ("fox", "cow") for c in ("dog", "moon")
    ]
    path.write_text("".join(lines * 40), encoding="utf-8")
    return path


@pytest.fixture
def short_shakespeare(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source `shakespeare` is its first speeches: learning 1,024 tokens from all of it takes two seconds."""
    path = tmp_path_factory.mktemp("shakespeare") / "first.txt"
    path.write_bytes(sources.shakespeare().read_bytes()[:100_000])
    monkeypatch.setattr(sources, "shakespeare", lambda: path)


@pytest.fixture
def tiny(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LoadedConfig]:
    """Loads a tiny config whose files all lie in this test's folder; more `a.b=c` words may follow."""
    monkeypatch.chdir(tmp_path)

    def load(*overrides: str) -> LoadedConfig:
        length = (
            [] if any(word.startswith(("train.steps", "train.epochs")) for word in overrides) else ["train.steps=40"]
        )
        return load_config("shakespeare-char", [*TINY, f"data.source={corpus}", *length, *overrides])

    return load
