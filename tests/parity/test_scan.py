"""The recurrence in every form against the plain one in float64: results, gradients, chunks, documents, long texts.

Without a GPU the kernels run in Triton's interpreter, with one they are compiled; the tests are the same.
"""

import functools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from flatout.model.eigenstate import Eigenstate
from flatout.model.execution import Execution
from flatout.ops.documents import lay_out
from flatout.ops.kernels import scan as kernels_module
from flatout.ops.kernels.scan import gated_scan
from flatout.ops.scan import scan
from tests.mixing import mixed, mixer_config
from tests.parity.checking import DEVICES, assert_near, compare, draw, strided

FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
CHUNKS = (16, 32, 64, 128, 256, 512)
on_every_device = pytest.mark.parametrize("device", DEVICES)
# The interpreter computes masked lanes too, and numpy tells of every infinity in them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def eigenvalues(channels: int, *, dtype=FP64, device="cpu", horizon=20.0):
    """(log_decay, phase): horizons from 1 token to `horizon`, any angle."""
    spread = torch.rand(channels, generator=torch.Generator().manual_seed(3), dtype=FP64)
    log_decay = -(horizon**-spread)
    phase = 2 * draw(channels, dtype=FP64, seed=4).detach()
    return tuple(value.to(device, dtype).requires_grad_() for value in (log_decay, phase))


def beginnings(batch: int, positions: int, chunk: int = 16) -> Tensor:
    """Another pattern in every row: here and there, at the ends of chunks, everywhere, nowhere, at both ends."""
    here_BT = torch.zeros(batch, positions, dtype=torch.bool)
    for row in range(batch):
        pattern = (row + positions) % 5
        if pattern == 0:
            here_BT[row, torch.rand(positions, generator=torch.Generator().manual_seed(row)) < 0.2] = True
        elif pattern == 1:
            here_BT[row, chunk::chunk] = True
            here_BT[row, chunk - 1 :: chunk] = True
        elif pattern == 2:
            here_BT[row] = True
        elif pattern == 4:
            here_BT[row, 0] = here_BT[row, -1] = True
    return here_BT


def values_and_gradients(inputs: list[Tensor], begins: Tensor | None, **how) -> list[Tensor]:
    x, log_decay, phase, *initial = inputs
    h, last = scan(x, log_decay, phase, initial_BC=initial[0] if initial else None, begins_BT=begins, **how)
    sent = [draw(*value.shape, dtype=value.dtype, device=x.device.type, seed=6).detach() for value in (h, last)]
    return [h.detach(), last.detach(), *torch.autograd.grad((h, last), inputs, sent)]


# --- torch's operations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("has_initial", [False, True])
def test_every_chunk_gives_the_plain_recurrence(resets, has_initial):
    batch, positions, channels = 5, 75, 3
    inputs = [draw(batch, positions, 2 * channels, dtype=FP64), *eigenvalues(channels)]
    inputs += [draw(batch, 2 * channels, dtype=FP64, seed=8)] if has_initial else []
    begins = beginnings(batch, positions) if resets else None
    expected = values_and_gradients(inputs, begins, path="reference")
    for chunk in (2, 7, *CHUNKS):
        for mine, other in zip(values_and_gradients(inputs, begins, chunk=chunk), expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("positions", [1, 2, 16, 17, 255])
def test_lengths_that_are_no_multiple_of_a_chunk(positions):
    inputs = [draw(2, positions, 4, dtype=FP64), *eigenvalues(2)]
    expected = values_and_gradients(inputs, None, path="reference")
    for mine, other in zip(values_and_gradients(inputs, None, chunk=16), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


def test_eigenvalues_near_one_and_near_nothing():
    """Over 4,096 positions in fp32, in chunks of every size, with nothing that overflows on the way."""
    log_decay = torch.tensor([-1e-9, -1e-5, -1e-3, -1.0, -30.0, -1e4], dtype=FP64)
    phase = torch.tensor([0.3, 3.0, 1e-4, 0.0, 2.0, 1.0], dtype=FP64)
    x = draw(1, 4096, 12, dtype=FP64)
    exact = [x, log_decay.requires_grad_(), phase.requires_grad_()]
    expected = values_and_gradients(exact, None, chunk=64)
    plain, last = scan(*(value.detach() for value in exact), path="reference")
    torch.testing.assert_close(expected[0], plain, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(expected[1], last, rtol=1e-9, atol=1e-9)
    narrow = [value.detach().float().requires_grad_() for value in exact]
    for chunk in (16, 512):
        for mine, other in zip(values_and_gradients(narrow, None, chunk=chunk), expected, strict=True):
            # An angle in fp32 is off by 1e-7 for every position: 5e-4 at the end, whatever the arithmetic.
            assert_near(mine, other, FP32, f"chunk {chunk}", slack=100.0)


def test_narrow_inputs_keep_wide_states():
    """In bf16 the result is rounded once, at the end; under autocast too."""
    x = draw(1, 4096, 8, dtype=BF16)
    log_decay, phase = eigenvalues(4, dtype=FP32, horizon=2000.0)
    with torch.autocast("cpu", dtype=BF16):
        h, last = scan(x, log_decay, phase)
    exact, exact_last = scan(x.double(), log_decay.double(), phase.double(), path="reference")
    assert (h.dtype, last.dtype) == (BF16, FP32)
    assert_near(last, exact_last, FP32, "last state", slack=20.0)
    assert ((h.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-3).all()


@pytest.mark.parametrize("path", ["reference", "chunked"])
@pytest.mark.parametrize("resets", [False, True])
def test_a_position_changes_what_comes_after_it_and_nothing_else(path, resets):
    x = draw(1, 60, 4, dtype=FP64).detach()
    log_decay, phase = (value.detach() for value in eigenvalues(2))
    begins = torch.zeros(1, 60, dtype=torch.bool) if resets else None  # each form of the chunked path, no document
    h, _ = scan(x, log_decay, phase, begins_BT=begins, path=path, chunk=16)
    for t in (0, 15, 16, 40, 59):
        moved = x.clone()
        moved[:, t] += 1
        again, _ = scan(moved, log_decay, phase, begins_BT=begins, path=path, chunk=16)
        change = (again - h).abs().amax((0, 2))
        assert (change[:t] == 0).all()
        assert (change[t:] > 0).all()


def test_what_does_not_fit_is_refused():
    x, (log_decay, phase) = draw(2, 20, 12, dtype=FP64), eigenvalues(6)
    for wrong in (log_decay[:4], log_decay[:3], log_decay.expand(2, 20, 6)):
        with pytest.raises(ValueError, match="eigenvalues of shape"):
            scan(x, wrong, phase)
    with pytest.raises(ValueError, match="initial state"):
        scan(x, log_decay, phase, initial_BC=x[:1, 0])
    with pytest.raises(ValueError, match="beginnings"):
        scan(x, log_decay, phase, begins_BT=torch.zeros(20, dtype=torch.bool))
    with pytest.raises(ValueError, match="at least 2"):
        scan(x, log_decay, phase, chunk=1)
    with pytest.raises(ValueError, match="path"):
        scan(x, log_decay, phase, path="fast")
    with pytest.raises(ValueError, match="float64"):
        scan(x, log_decay, phase, path="triton")
    with pytest.raises(ValueError, match="multiples of 8"):
        scan(x.float(), log_decay, phase, path="triton", chunk=12)


# --- kernels -----------------------------------------------------------------------------------------------------


def by_kernels(begins: Tensor | None, chunk: int | None):
    """(the kernels, the reference), both as functions of x, log_decay, phase and the initial state."""

    def fast(x, log_decay, phase, initial):
        return scan(x, log_decay, phase, initial_BC=initial, begins_BT=begins, path="triton", chunk=chunk)

    def slow(x, log_decay, phase, initial):
        return scan(x, log_decay, phase, initial_BC=initial, begins_BT=begins, path="reference")

    return fast, slow


def on_gpu(*values):
    return pytest.param(*values, marks=pytest.mark.gpu)


# batch, positions, channels, chunk, documents, initial state, type
CASES = [
    (1, 1, 1, None, False, False, FP32),
    (3, 19, 5, 8, True, True, FP32),
    (1, 33, 20, 16, False, True, BF16),
    (2, 11, 3, 8, True, True, FP32),
    (1, 17, 9, 8, False, False, BF16),
    (1, 10, 2, 8, True, False, FP32),
    *[
        on_gpu(batch, positions, channels, chunk, resets, has_initial, dtype)
        for batch, positions, channels, chunk in [(3, 1000, 160, None), (5, 777, 33, 16), (1, 2049, 130, 512)]
        for resets, has_initial in [(True, True), (False, False)]
        for dtype in (FP32, BF16)
    ],
]


@on_every_device
@pytest.mark.parametrize(("batch", "positions", "channels", "chunk", "resets", "has_initial", "dtype"), CASES)
@pytest.mark.usefixtures("guarded_memory")
def test_kernels(batch, positions, channels, chunk, resets, has_initial, dtype, device):
    inputs = [
        draw(batch, positions, 2 * channels, dtype=dtype, device=device),
        *eigenvalues(channels, dtype=FP32, device=device),
        draw(batch, 2 * channels, device=device, seed=8) if has_initial else None,
    ]
    begins = beginnings(batch, positions, chunk or 16).to(device) if resets else None
    compare(*by_kernels(begins, chunk), inputs, dtype=dtype, slack=2.0 if positions < 100 else 5.0)


@on_every_device
@pytest.mark.parametrize(
    ("batch", "positions", "channels", "chunk", "resets", "dtype"),
    [
        (1, 1, 1, None, False, FP32),
        (3, 19, 5, 8, True, FP32),
        (1, 33, 20, 16, False, BF16),
        *[on_gpu(3, 1000, 160, None, resets, dtype) for resets in (True, False) for dtype in (FP32, BF16)],
        on_gpu(2, 2049, 130, 512, True, BF16),
    ],
)
@pytest.mark.usefixtures("guarded_memory")
def test_kernels_with_a_gate(batch, positions, channels, chunk, resets, dtype, device):
    begins = beginnings(batch, positions, chunk or 16).to(device) if resets else None

    def slow(both, log_decay, phase):
        x, gate = both.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * scan(x, log_decay, phase, begins_BT=begins, path="reference")[0]

    both = draw(batch, positions, 4 * channels, dtype=dtype, device=device)
    inputs = [both, *eigenvalues(channels, dtype=FP32, device=device)]
    fast = functools.partial(gated_scan, begins_BT=begins, chunk=chunk)
    compare(fast, slow, inputs, dtype=dtype, slack=2.0 if positions < 100 else 5.0)


@on_every_device
@pytest.mark.usefixtures("guarded_memory")
def test_kernels_that_carry_over_more_chunks_than_fit_at_once(device, monkeypatch):
    """And over more programs than are summed in one step."""
    monkeypatch.setattr(kernels_module, "_CARRIED", (2, 2))
    inputs = [draw(1, 40, 6, device=device), *eigenvalues(3, dtype=FP32, device=device, horizon=200.0)]
    compare(*by_kernels(None, 8), [*inputs, draw(1, 6, device=device, seed=8)], dtype=FP32, slack=2.0)
    sums = draw(64 * 5, 2, 3, device=device).detach()
    assert_near(kernels_module._total(sums), sums.double().sum(0), FP32, "sums")


@on_every_device
@pytest.mark.usefixtures("guarded_memory")
def test_kernels_take_views_and_either_result_alone(device):
    wide = draw(2, 9, 20, device=device).detach()
    log_decay, phase = eigenvalues(3, dtype=FP32, device=device)
    inputs = [wide[..., 4:10].requires_grad_(), log_decay, phase]
    exact = [value.detach().double().requires_grad_() for value in inputs]
    results = scan(*inputs, path="triton")
    for mine, theirs in zip(results, scan(*exact, path="reference"), strict=True):
        sent = strided(draw(*mine.shape, device=device, seed=9)) if mine.dim() == 3 else torch.ones_like(mine)
        got = torch.autograd.grad(mine, inputs, sent, retain_graph=True)
        expected = torch.autograd.grad(theirs, exact, sent.double(), retain_graph=True)
        for a, b in zip(got, expected, strict=True):
            assert_near(a, b, FP32, "gradient", slack=2.0)


@on_every_device
def test_kernels_keep_documents_apart_to_the_last_bit(device):
    x, (log_decay, phase) = draw(1, 24, 6, device=device), eigenvalues(3, dtype=FP32, device=device)
    begins = torch.zeros(1, 24, dtype=torch.bool, device=device)
    begins[0, [5, 16]] = True
    h, _ = scan(x, log_decay, phase, begins_BT=begins, path="triton", chunk=8)
    (gradient,) = torch.autograd.grad(h[:, 5:16].sum(), x)
    assert (gradient[:, 5:16] != 0).all()
    assert (gradient[:, :5] == 0).all()
    assert (gradient[:, 16:] == 0).all()
    other = x.detach().clone()
    other[:, :5] += 7
    other[:, 16:] -= 3
    again, _ = scan(other, log_decay, phase, begins_BT=begins, path="triton", chunk=8)
    assert torch.equal(again[:, 5:16], h[:, 5:16])
    assert not torch.equal(again[:, 16:], h[:, 16:])


def test_sizes_fill_a_large_card(monkeypatch):
    monkeypatch.setattr(kernels_module, "multiprocessors", lambda device: 132)
    for batch, positions, channels in [
        (4, 32768, 128),
        (1, 131072, 128),
        (2, 32768, 768),
        (1, 1000, 16),
        (8, 1024, 160),
    ]:
        chunk, block = kernels_module.chunk_and_block(batch, positions, channels, torch.device("cpu"))
        programs = batch * math.ceil(positions / chunk) * math.ceil(channels / block)
        assert programs >= 12 * 132 or chunk == 32
        assert chunk % kernels_module._ROWS == 0
        assert block <= 128


# --- long texts on a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("resets", [False, True])
def test_kernels_over_32768_positions(dtype, resets):
    batch, positions, channels = 2, 32768, 128
    x = draw(batch, positions, 2 * channels, dtype=dtype, device="cuda")
    inputs = [x, *eigenvalues(channels, dtype=FP32, device="cuda", horizon=32768.0)]
    begins = None
    if resets:
        begins = torch.rand(batch, positions, generator=torch.Generator().manual_seed(1)).to("cuda") < 1e-3
    expected = values_and_gradients([value.detach().double().requires_grad_() for value in inputs], begins, chunk=64)
    for chunk in (None, *CHUNKS):
        found = values_and_gradients(inputs, begins, path="triton", chunk=chunk)
        for name, mine, other in zip(("h", "last", "dx", "dlog", "dphase"), found, expected, strict=True):
            # λ itself is rounded to fp32, and that counts for as many positions as a state lasts. In bf16 both factors
            # of a gradient of λ are rounded: the worst of eight million is off by 1.24 tolerances, and in the chunked
            # form, which is torch's operations alone, the worst of two million by 0.88.
            slack = 200.0 if dtype == FP32 else 2.0 if name == "dlog" else 1.0
            assert_near(mine, other, dtype, f"{name}, chunk {chunk}", slack=slack)


FAST = Execution(scan="triton")


def mixers(context: int) -> tuple[Eigenstate, Eigenstate]:
    """(in our kernels and fp32, in torch's operations and float64), the same weights in both."""
    config = mixer_config(width=64, states=32, context=context)
    mixer, exact = Eigenstate(config), Eigenstate(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    mixer.init_states(generator)
    exact.load_state_dict(mixer.state_dict())
    return mixer.cuda(), exact.cuda().double()


def apart(mine: Tensor, theirs: Tensor) -> float:
    """The difference as a root mean square, relative to the size."""
    mine, theirs = mine.detach().double(), theirs.detach().double()
    return float((mine - theirs).norm() / theirs.norm())


@pytest.mark.gpu
def test_the_mixer_over_32768_tokens_in_bf16():
    mixer, exact = mixers(32768)
    x = draw(1, 32768, 64, device="cuda").detach()
    with torch.autocast("cuda", dtype=BF16):
        y = mixed(mixer, x, how=FAST)
    expected = mixed(exact, x.double())
    assert apart(y, expected) < 2e-2
    sent = draw(1, 32768, 64, device="cuda", seed=3).detach()
    y.backward(sent.to(y.dtype))
    expected.backward(sent.double())
    for (name, mine), other in zip(mixer.named_parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None, name
        assert other.grad is not None, name
        assert apart(mine.grad, other.grad) < 5e-2, name


@pytest.mark.gpu
def test_the_mixer_on_a_gpu():
    mixer, exact = mixers(1024)
    x = draw(2, 700, 64, device="cuda").detach()
    with torch.no_grad():
        whole, expected = mixed(mixer, x, how=FAST), mixed(exact, x.double())
        assert apart(whole, expected) < 1e-3
        for mixer.chunk in CHUNKS:
            assert apart(mixed(mixer, x, how=FAST), expected) < 1e-3
        moved = x.clone()
        moved[:, 300] += 1
        change_T = (mixed(mixer, moved, how=FAST) - mixed(mixer, x, how=FAST)).abs().amax((0, 2))
        assert (change_T[:300] == 0).all()
        assert (change_T[300:320] > 0).all()
        cache = mixer.empty_cache(2, FP32, "cuda")
        parts = [mixed(mixer, x[:, :500], cache, how=FAST)]
        parts += [mixed(mixer, x[:, t : t + 1], cache, t, how=FAST) for t in range(500, 520)]
        assert apart(torch.cat(parts, 1), expected[:, :520]) < 1e-3
        numbers = np.repeat(np.arange(2, dtype=np.int32), [333, 367])[None].repeat(2, 0)
        packed = mixed(mixer, x, layout=lay_out(numbers, None, torch.device("cuda")), how=FAST)
        assert apart(packed[:, 333:], mixed(exact, x[:, 333:].double())) < 1e-3


@pytest.mark.gpu
def test_kernels_after_a_prompt_go_on_where_it_ended():
    x, (log_decay, phase) = draw(2, 3000, 64, device="cuda"), eigenvalues(32, dtype=FP32, device="cuda")
    whole, last = scan(x, log_decay, phase, path="triton")
    first, state = scan(x[:, :1234], log_decay, phase, path="triton")
    second, end = scan(x[:, 1234:], log_decay, phase, initial_BC=state, path="triton")
    assert_near(torch.cat([first, second], 1), whole.double(), FP32, "in two parts")
    assert_near(end, last.double(), FP32, "last state")
