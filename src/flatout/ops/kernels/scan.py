"""The recurrence h_t = λ_t · h_{t-1} + x_t (ops/scan.py) in chunks, forward and backward, and the gate after it.

Three passes forward. (1) Every chunk on its own: the final state E from a zero state, and the product A of its λ. (2)
The initial state of every chunk, by a scan over chunks, h → A·h + E. (3) Every chunk again, from its initial state,
writing its states. In passes 1 and 3 a program is one warp with up to 128 channels of one chunk: it reads whole rows,
keeps states in registers and never waits for another warp. It loads rows in groups; a few thousand warps with one group
each saturate the memory.

Backward is the same in reverse. With g the gradient of the states, a_t = g_t + r_t is the gradient of x_t, and r_{t-1}
= conj(λ_t) · a_t is passed to the position before; r begins as the gradient of the last state and ends as that of the
initial state. With u_t = λ_t · h_{t-1}, the gradients of log_decay and phase are the sums of Re(conj(a_t)·u_t) and
Im(conj(u_t)·a_t), which pass 3 adds up per program. Only h, the result, is saved.

`gated_scan` is silu(gate) ⊙ states as one step of autograd. Inputs and gate are halves of one buffer, as one product
writes them, and so are their gradients, so nothing is split or concatenated. That buffer and the states are saved. The
gate takes one pass forward and one backward.

Bytes for B 4, T 32,768, K 128: a tensor of states is 67 MB in bf16, 134 MB in fp32. Forward reads x twice and writes h:
201 or 403 MB, 0.05 or 0.09 ms at 4.3 TB/s. Backward reads g twice and h, and writes dx: 268 or 537 MB, 0.06 or 0.13 ms.
Data between passes is at most 1/16 of a tensor in fp32. Decoupled look-back would save a third of the bytes but make
programs wait for each other; the products around the scan take several times as long.

Trap: λ near 1 needs precision. Its magnitude and angle are computed in float64, since the fast exponential may be off
by 2^-22, which is 3e-3 after 32,768 positions.

Shape legend: B rows, T positions, K channels, C = 2K (real parts, then imaginary), N chunks, P programs that sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.ops.kernels.launch import dense, fold, multiprocessors


@triton.jit
def _table(log_ptr, phase_ptr, table_ptr, channels, BLOCK: tl.constexpr):
    """λ of every channel."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < channels
    phase = tl.load(phase_ptr + column, inside, 0.0).to(tl.float64)
    magnitude = tl.exp(tl.load(log_ptr + column, inside, 0.0).to(tl.float64))
    tl.store(table_ptr + column, (magnitude * tl.cos(phase)).to(tl.float32), inside)
    tl.store(table_ptr + channels + column, (magnitude * tl.sin(phase)).to(tl.float32), inside)


@triton.jit
def _pair(ptr, place, channels, mask):
    real = tl.load(ptr + place, mask, 0.0)
    imaginary = tl.load(ptr + place + channels, mask, 0.0)
    return real, imaginary


@triton.jit
def _row(x_ptr, begins_ptr, origin, position, positions, stride_t, column, inside, channels, RESETS: tl.constexpr):
    """Loads one position; issued early and used late."""
    alive = position < positions
    mask = inside & alive
    real, imaginary = _pair(x_ptr, position.to(tl.int64) * stride_t + column, channels, mask)  # pyright: ignore
    begins = 0
    if RESETS:
        begins = tl.load(begins_ptr + origin + position, alive, 0).to(tl.int32)
    return real, imaginary, begins


@triton.jit
def _eigenvalue(row, base_re, base_im, alive, RESETS: tl.constexpr):
    """λ of one position: 0 where a document begins, 1 beyond the last position, which keeps the state."""
    real, imaginary = base_re, base_im
    if RESETS:
        real = tl.where(row[2] == 0, real, 0.0)
        imaginary = tl.where(row[2] == 0, imaginary, 0.0)
    return tl.where(alive, real, 1.0), tl.where(alive, imaginary, 0.0)


@triton.jit
def _where_am_i(positions, chunks, channels, blocks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """(row, chunk, its first position, columns, mask of columns). Blocks of one chunk are neighbours."""
    program = tl.program_id(0)
    chunk = program // blocks
    column = program % blocks * BLOCK + tl.arange(0, BLOCK)
    return chunk // chunks, chunk % chunks, chunk % chunks * CHUNK, column, column < channels


@triton.jit
def _ends(
    x_ptr, table_ptr, begins_ptr, ends_ptr, positions, chunks, channels, blocks, stride_b, stride_t,
    REVERSE: tl.constexpr, RESETS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pass 1. In reverse x is the gradient of the states, and a chunk ends before its first position."""
    batch, chunk, first, column, inside = _where_am_i(positions, chunks, channels, blocks, CHUNK, BLOCK)  # pyright: ignore
    base_re, base_im = _pair(table_ptr, column, channels, inside)
    x_ptr += batch.to(tl.int64) * stride_b
    origin = batch.to(tl.int64) * positions
    state_re = tl.zeros((BLOCK,), tl.float32)
    state_im = tl.zeros((BLOCK,), tl.float32)
    product_re = tl.full((BLOCK,), 1.0, tl.float32)
    product_im = tl.zeros((BLOCK,), tl.float32)
    for group in range(0, CHUNK, ROWS):
        rows = ()
        for step in tl.static_range(ROWS):
            position = first + (CHUNK - 1 - group - step if REVERSE else group + step)
            rows += (_row(x_ptr, begins_ptr, origin, position, positions, stride_t, column, inside, channels, RESETS),)
        for step in tl.static_range(ROWS):
            position = first + (CHUNK - 1 - group - step if REVERSE else group + step)
            factor_re, factor_im = _eigenvalue(rows[step], base_re, base_im, position < positions, RESETS)
            x_re = rows[step][0].to(tl.float32)
            x_im = rows[step][1].to(tl.float32)
            if REVERSE:
                x_re += state_re
                x_im += state_im
                state_re = factor_re * x_re + factor_im * x_im
                state_im = factor_re * x_im - factor_im * x_re
            else:
                before_re = state_re
                state_re = factor_re * before_re - factor_im * state_im + x_re
                state_im = factor_re * state_im + factor_im * before_re + x_im
            before_re = product_re
            product_re = factor_re * before_re - factor_im * product_im
            product_im = factor_re * product_im + factor_im * before_re
    ends_ptr += (batch * chunks + chunk).to(tl.int64) * 4 * channels
    tl.store(ends_ptr + column, state_re, inside)
    tl.store(ends_ptr + channels + column, state_im, inside)
    tl.store(ends_ptr + 2 * channels + column, product_re, inside)
    tl.store(ends_ptr + 3 * channels + column, -product_im if REVERSE else product_im, inside)


@triton.jit
def _then(a_re, a_im, x_re, x_im, b_re, b_im, y_re, y_im):
    """The composition of h → a·h + x and then h → b·h + y."""
    return (
        b_re * a_re - b_im * a_im,
        b_re * a_im + b_im * a_re,
        b_re * x_re - b_im * x_im + y_re,
        b_re * x_im + b_im * x_re + y_im,
    )


@triton.jit
def _carry(
    ends_ptr, outer_ptr, starts_ptr, chunks, channels, blocks,
    HAS_OUTER: tl.constexpr, REVERSE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pass 2: the initial state of every chunk, from the outer state and the chunks before it."""
    batch = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < channels
    start_re = tl.zeros((BLOCK,), tl.float32)
    start_im = tl.zeros((BLOCK,), tl.float32)
    if HAS_OUTER:
        start_re, start_im = _pair(outer_ptr, batch.to(tl.int64) * 2 * channels + column, channels, inside)
    lane = tl.arange(0, ROWS)
    for group in range(0, chunks, ROWS):
        index = group + lane
        # Shifted by one: the end of a chunk is the start of the next one.
        earlier = index - 1
        mask = ((earlier >= 0) & (earlier < chunks))[:, None] & inside[None, :]
        chunk = chunks - 1 - earlier if REVERSE else earlier
        place = (batch * chunks + chunk).to(tl.int64)[:, None] * 4 * channels + column[None, :]
        x_re, x_im = _pair(ends_ptr, place, channels, mask)
        a_re = tl.load(ends_ptr + place + 2 * channels, mask, 1.0)
        a_im = tl.load(ends_ptr + place + 3 * channels, mask, 0.0)
        a_re, a_im, x_re, x_im = tl.associative_scan((a_re, a_im, x_re, x_im), 0, _then)
        h_re = a_re * start_re[None, :] - a_im * start_im[None, :] + x_re
        h_im = a_re * start_im[None, :] + a_im * start_re[None, :] + x_im
        mask = (index < chunks)[:, None] & inside[None, :]
        chunk = chunks - 1 - index if REVERSE else index
        place = (batch * chunks + chunk).to(tl.int64)[:, None] * 2 * channels + column[None, :]
        tl.store(starts_ptr + place, h_re, mask)
        tl.store(starts_ptr + place + channels, h_im, mask)
        start_re = tl.sum(tl.where((lane == ROWS - 1)[:, None], h_re, 0.0), 0)
        start_im = tl.sum(tl.where((lane == ROWS - 1)[:, None], h_im, 0.0), 0)


@triton.jit
def _states(
    x_ptr, table_ptr, begins_ptr, starts_ptr, h_ptr, last_ptr, positions, chunks, channels, blocks, stride_b, stride_t,
    RESETS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pass 3, forward."""
    batch, chunk, first, column, inside = _where_am_i(positions, chunks, channels, blocks, CHUNK, BLOCK)  # pyright: ignore
    base_re, base_im = _pair(table_ptr, column, channels, inside)
    x_ptr += batch.to(tl.int64) * stride_b
    origin = batch.to(tl.int64) * positions
    place = (batch * chunks + chunk).to(tl.int64) * 2 * channels + column
    state_re, state_im = _pair(starts_ptr, place, channels, inside)
    for group in range(0, CHUNK, ROWS):
        rows = ()
        for step in tl.static_range(ROWS):  # pyright: ignore
            position = first + group + step
            rows += (_row(x_ptr, begins_ptr, origin, position, positions, stride_t, column, inside, channels, RESETS),)
        for step in tl.static_range(ROWS):
            position = first + group + step
            alive = position < positions
            factor_re, factor_im = _eigenvalue(rows[step], base_re, base_im, alive, RESETS)
            before_re = state_re
            state_re = factor_re * before_re - factor_im * state_im + rows[step][0].to(tl.float32)
            state_im = factor_re * state_im + factor_im * before_re + rows[step][1].to(tl.float32)
            place = (origin + position) * 2 * channels + column
            tl.store(h_ptr + place, state_re.to(h_ptr.dtype.element_ty), inside & alive)
            tl.store(h_ptr + place + channels, state_im.to(h_ptr.dtype.element_ty), inside & alive)
    place = batch.to(tl.int64) * 2 * channels + column
    tl.store(last_ptr + place, state_re, inside & (chunk == chunks - 1))
    tl.store(last_ptr + place + channels, state_im, inside & (chunk == chunks - 1))


@triton.jit
def _gradients(
    g_ptr, h_ptr, initial_ptr, table_ptr, begins_ptr, starts_ptr, dx_ptr, sums_ptr, dinitial_ptr,
    positions, chunks, channels, blocks, stride_b, stride_t, dx_stride_b, dx_stride_t,
    HAS_INITIAL: tl.constexpr, RESETS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pass 3 in reverse, from a chunk's last position to its first."""
    batch, chunk, first, column, inside = _where_am_i(positions, chunks, channels, blocks, CHUNK, BLOCK)  # pyright: ignore
    base_re, base_im = _pair(table_ptr, column, channels, inside)
    g_ptr += batch.to(tl.int64) * stride_b
    dx_ptr += batch.to(tl.int64) * dx_stride_b
    origin = batch.to(tl.int64) * positions
    number = (batch * chunks + chunk).to(tl.int64)
    state_re, state_im = _pair(starts_ptr, number * 2 * channels + column, channels, inside)
    log_sum = tl.zeros((BLOCK,), tl.float32)
    phase_sum = tl.zeros((BLOCK,), tl.float32)
    for group in range(0, CHUNK, ROWS):
        rows = ()
        befores = ()
        for step in tl.static_range(ROWS):  # pyright: ignore
            position = first + CHUNK - 1 - group - step
            place = (origin + position - 1) * 2 * channels + column
            befores += (_pair(h_ptr, place, channels, inside & (position > 0) & (position < positions)),)
            rows += (_row(g_ptr, begins_ptr, origin, position, positions, stride_t, column, inside, channels, RESETS),)
        for step in tl.static_range(ROWS):  # pyright: ignore
            position = first + CHUNK - 1 - group - step
            alive = position < positions
            factor_re, factor_im = _eigenvalue(rows[step], base_re, base_im, alive, RESETS)
            h_re = befores[step][0].to(tl.float32)
            h_im = befores[step][1].to(tl.float32)
            if HAS_INITIAL:
                at_first = inside & (position == 0)
                place = batch.to(tl.int64) * 2 * channels + column
                initial_re, initial_im = _pair(initial_ptr, place, channels, at_first)
                h_re += initial_re
                h_im += initial_im
            u_re = factor_re * h_re - factor_im * h_im
            u_im = factor_re * h_im + factor_im * h_re
            a_re = rows[step][0].to(tl.float32) + state_re
            a_im = rows[step][1].to(tl.float32) + state_im
            state_re = factor_re * a_re + factor_im * a_im
            state_im = factor_re * a_im - factor_im * a_re
            place = position.to(tl.int64) * dx_stride_t + column
            tl.store(dx_ptr + place, a_re.to(dx_ptr.dtype.element_ty), inside & alive)
            tl.store(dx_ptr + place + channels, a_im.to(dx_ptr.dtype.element_ty), inside & alive)
            log_sum += a_re * u_re + a_im * u_im
            phase_sum += a_im * u_re - a_re * u_im
    sums_ptr += number * 2 * channels
    tl.store(sums_ptr + column, log_sum, inside)
    tl.store(sums_ptr + channels + column, phase_sum, inside)
    if HAS_INITIAL:
        place = batch.to(tl.int64) * 2 * channels + column
        tl.store(dinitial_ptr + place, state_re, inside & (chunk == 0))
        tl.store(dinitial_ptr + place + channels, state_im, inside & (chunk == 0))


_ROWS = 8  # rows that a program loads together; half as many in backward, which loads two tensors
_CARRIED = (256, 16)  # chunks and channels that a program of pass 2 has in registers


def chunk_and_block(batch: int, positions: int, channels: int, device: torch.device) -> tuple[int, int]:
    """(positions of a chunk, channels of a program): the longest chunks that give enough programs.

    Shorter chunks give more programs but more work in pass 2. 12 warps of 8 rows per multiprocessor have 48 KiB of
    loads in flight, about twice as much as an H200 needs to saturate its memory.
    """
    block = min(128, int(triton.next_power_of_2(channels)))
    if triton.cdiv(channels, 128) * 128 > triton.cdiv(channels, 64) * 64:  # e.g. 160 or 192 channels
        block = min(64, block)
    chunk, enough = 256, 12 * multiprocessors(device)
    while chunk > 32 and batch * triton.cdiv(positions, chunk) * triton.cdiv(channels, block) < enough:
        chunk //= 2
    return max(_ROWS, min(chunk, int(triton.next_power_of_2(positions)))), block


class Passes:
    """The three passes for one shape and one set of λ."""

    def __init__(self, shape: torch.Size, log_decay: Tensor, phase: Tensor, begins: Tensor | None, chunk: int | None):
        self.batch, self.positions, both = shape
        self.channels, self.device = both // 2, log_decay.device
        chosen, self.block = chunk_and_block(self.batch, self.positions, self.channels, self.device)
        self.chunk = chosen if chunk is None else chunk
        self.chunks = triton.cdiv(self.positions, self.chunk)
        self.blocks = triton.cdiv(self.channels, self.block)
        table = self._made(2, self.channels)
        _table[(triton.cdiv(self.channels, 32),)](log_decay, phase, table, self.channels, BLOCK=32, num_warps=1)
        self.eigenvalues, self.resets = (table, begins), begins is not None
        self.types = log_decay.dtype, phase.dtype
        self.counts = (self.positions, self.chunks, self.channels, self.blocks)
        self.grid = (self.batch * self.chunks * self.blocks,)

    def _made(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def starts(self, x: Tensor, outer: Tensor | None, *, reverse: bool) -> Tensor:
        """Initial states [B, N, C] of all chunks, with `outer` before the first one: passes 1 and 2."""
        starts = self._made(self.batch, self.chunks, 2 * self.channels)
        ends = self._made(self.batch, self.chunks, 4 * self.channels)
        _ends[self.grid](
            x, *self.eigenvalues, ends, *self.counts, x.stride(0), x.stride(1), REVERSE=reverse,
            RESETS=self.resets, CHUNK=self.chunk, ROWS=_ROWS, BLOCK=self.block, num_warps=1,
        )  # fmt: skip
        rows = min(_CARRIED[0], int(triton.next_power_of_2(self.chunks)))
        block = min(_CARRIED[1], int(triton.next_power_of_2(self.channels)))
        blocks = triton.cdiv(self.channels, block)
        _carry[(self.batch * blocks,)](
            ends, outer, starts, self.chunks, self.channels, blocks, HAS_OUTER=outer is not None, REVERSE=reverse,
            ROWS=rows, BLOCK=block, num_warps=max(1, rows * block // 512),
        )  # fmt: skip
        return starts

    def states(self, x: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        h = torch.empty(x.shape, dtype=x.dtype, device=self.device)
        last = self._made(self.batch, 2 * self.channels)
        _states[self.grid](
            x, *self.eigenvalues, self.starts(x, initial, reverse=False), h, last, *self.counts, x.stride(0),
            x.stride(1), RESETS=self.resets, CHUNK=self.chunk, ROWS=_ROWS, BLOCK=self.block, num_warps=1,
        )  # fmt: skip
        return h, last

    def gradients(
        self, g: Tensor, h: Tensor, initial: Tensor | None, dlast: Tensor | None, into: Tensor | None = None
    ) -> list[Tensor | None]:
        """Gradients of x, log_decay, phase and the initial state; `into` takes that of x, rows may be strided."""
        starts = self.starts(g, dlast, reverse=True)
        dx = torch.empty(h.shape, dtype=h.dtype, device=self.device) if into is None else into
        sums = self._made(self.batch * self.chunks, 2, self.channels)
        dinitial = None if initial is None else self._made(self.batch, 2 * self.channels)
        _gradients[self.grid](
            g, h, initial, *self.eigenvalues, starts, dx, sums, dinitial, *self.counts, g.stride(0), g.stride(1),
            dx.stride(0), dx.stride(1), HAS_INITIAL=initial is not None, RESETS=self.resets, CHUNK=self.chunk,
            ROWS=_ROWS // 2, BLOCK=self.block, num_warps=1,
        )  # fmt: skip
        dlog, dphase = (total.to(given) for total, given in zip(_total(sums), self.types, strict=True))
        return [dx, dlog, dphase, dinitial]


def _total(sums_PXK: Tensor) -> Tensor:
    """The sum over programs. If there are many, in two steps, so that the first one uses all multiprocessors."""
    programs, width = sums_PXK.shape[0], 64
    if programs > 4 * width and programs % width == 0:
        sums_PXK = fold(sums_PXK.view(width, programs // width, *sums_PXK.shape[1:]))
    return fold(sums_PXK)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log_decay, phase, initial, begins, chunk):
        passes = Passes(x.shape, log_decay, phase, begins, chunk)
        h, last = passes.states(dense(x), initial)
        ctx.save_for_backward(h, log_decay, phase, initial, begins)
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        return h, last

    @staticmethod
    @once_differentiable
    def backward(ctx, dh, dlast):
        h, log_decay, phase, initial, begins = ctx.saved_tensors
        dh = torch.zeros_like(h) if dh is None else dense(dh)
        dlast = None if dlast is None else dlast.contiguous()
        passes = Passes(h.shape, log_decay, phase, begins, ctx.chunk)
        return *passes.gradients(dh, h, initial, dlast), None, None


def scan_kernels(
    x_BTC: Tensor,
    log_decay: Tensor,
    phase: Tensor,
    initial_BC: Tensor | None,
    begins_BT: Tensor | None,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    """(states, the last state in fp32). Called by `ops.scan.scan`, which checks the shapes."""
    values = (x_BTC, *as_kernels_take(x_BTC, log_decay, phase, initial_BC, begins_BT, chunk), chunk)
    if torch.compiler.is_compiling():
        return _one_operation(*values)
    return _Scan.apply(*values)  # pyright: ignore


def as_kernels_take(
    x_BTC: Tensor,
    log_decay: Tensor,
    phase: Tensor,
    initial_BC: Tensor | None,
    begins_BT: Tensor | None,
    chunk: int | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """All arguments but x in the types and layouts that kernels take; a ValueError for unsupported ones."""
    if x_BTC.dtype == torch.float64:
        raise ValueError("these kernels have states in fp32; float64 takes another path")
    if chunk is not None and (chunk < _ROWS or chunk % _ROWS):
        raise ValueError(f"a chunk of {chunk} positions; kernels take multiples of {_ROWS}")
    initial_BC = None if initial_BC is None else initial_BC.float().contiguous()
    begins_BT = None if begins_BT is None else begins_BT.bool().contiguous().view(torch.uint8)
    return log_decay.contiguous(), phase.contiguous(), initial_BC, begins_BT


# --- opaque operations for compiled code ------------------------------------------------------------------------------


@torch.library.custom_op("flatout::scan", mutates_args=())
def _one_operation(
    x: Tensor, log_decay: Tensor, phase: Tensor, initial: Tensor | None, begins: Tensor | None, chunk: int | None
) -> tuple[Tensor, Tensor]:
    return Passes(x.shape, log_decay, phase, begins, chunk).states(dense(x), initial)


@_one_operation.register_fake
def _(x, log_decay, phase, initial, begins, chunk):
    return x.new_empty(x.shape), x.new_empty((x.shape[0], x.shape[2]), dtype=torch.float32)


@torch.library.custom_op("flatout::scan_backward", mutates_args=())
def _one_backward(
    dh: Tensor,
    dlast: Tensor,
    h: Tensor,
    log_decay: Tensor,
    phase: Tensor,
    initial: Tensor | None,
    begins: Tensor | None,
    chunk: int | None,
) -> list[Tensor]:
    passes = Passes(h.shape, log_decay, phase, begins, chunk)
    gradients = passes.gradients(dense(dh), h, initial, dlast.contiguous())
    # The gradients of log_decay and phase are views of one sum, but outputs of a custom op must not share memory.
    return [gradient.clone() if gradient.dim() == 1 else gradient for gradient in gradients if gradient is not None]


@_one_backward.register_fake
def _(dh, dlast, h, log_decay, phase, initial, begins, chunk):
    like = (h, log_decay, phase) if initial is None else (h, log_decay, phase, initial)
    return [x.new_empty(x.shape) for x in like]


def _keep_for_backward(ctx, inputs, output) -> None:
    _, log_decay, phase, initial, begins, ctx.chunk = inputs
    ctx.save_for_backward(output[0], log_decay, phase, initial, begins)


def _backward(ctx, dh, dlast):
    gradients = _one_backward(dh, dlast, *ctx.saved_tensors, ctx.chunk)
    return *gradients, *(None,) * (6 - len(gradients))


_one_operation.register_autograd(_backward, setup_context=_keep_for_backward)


@triton.jit
def _gate_forward(gate_ptr, h_ptr, y_ptr, rows, columns, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    gate = tl.load(gate_ptr + row[:, None] * stride + column[None, :], mask, 0.0).to(tl.float32)
    place = row[:, None] * columns + column[None, :]
    h = tl.load(h_ptr + place, mask, 0.0).to(tl.float32)
    tl.store(y_ptr + place, (gate * tl.sigmoid(gate) * h).to(y_ptr.dtype.element_ty), mask)


@triton.jit
def _gate_backward(
    dy_ptr, gate_ptr, h_ptr, dgate_ptr, dh_ptr, rows, columns, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    apart = row[:, None] * stride + column[None, :]
    place = row[:, None] * columns + column[None, :]
    gate = tl.load(gate_ptr + apart, mask, 0.0).to(tl.float32)
    h = tl.load(h_ptr + place, mask, 0.0).to(tl.float32)
    dy = tl.load(dy_ptr + place, mask, 0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    tl.store(dh_ptr + place, (dy * gate * share).to(dh_ptr.dtype.element_ty), mask)
    dgate = dy * h * share * (1.0 + gate * (1.0 - share))
    tl.store(dgate_ptr + apart, dgate.to(dgate_ptr.dtype.element_ty), mask)


_GATE_ROWS, _GATE_BLOCK, _GATE_WARPS = 4, 256, 4


def _grid(h_BTC: Tensor) -> tuple[int, int]:
    rows, columns = h_BTC.shape[0] * h_BTC.shape[1], h_BTC.shape[2]
    return int(triton.cdiv(rows, _GATE_ROWS)), int(triton.cdiv(columns, _GATE_BLOCK))


class _GatedScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, both, log_decay, phase, begins, chunk):
        both = both.contiguous()
        x, gate = both.chunk(2, dim=-1)
        h, _ = Passes(x.shape, log_decay, phase, begins, chunk).states(x, None)
        y = torch.empty(h.shape, dtype=h.dtype, device=h.device)
        rows, columns = h.shape[0] * h.shape[1], h.shape[2]
        _gate_forward[_grid(h)](
            gate, h, y, rows, columns, both.shape[2], ROWS=_GATE_ROWS, BLOCK=_GATE_BLOCK, num_warps=_GATE_WARPS
        )  # fmt: skip
        ctx.save_for_backward(both, h, log_decay, phase, begins)
        ctx.chunk = chunk
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        both, h, log_decay, phase, begins = ctx.saved_tensors
        dboth = torch.empty(both.shape, dtype=both.dtype, device=both.device)
        dx, dgate = dboth.chunk(2, dim=-1)
        dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
        rows, columns = h.shape[0] * h.shape[1], h.shape[2]
        _gate_backward[_grid(h)](
            dy.contiguous(), both.chunk(2, dim=-1)[1], h, dgate, dh, rows, columns, both.shape[2],
            ROWS=_GATE_ROWS, BLOCK=_GATE_BLOCK, num_warps=_GATE_WARPS,
        )  # fmt: skip
        passes = Passes(h.shape, log_decay, phase, begins, ctx.chunk)
        _, dlog, dphase, _ = passes.gradients(dh, h, None, None, into=dx)
        return dboth, dlog, dphase, None, None


def gated_scan(
    both_BTC: Tensor, log_decay: Tensor, phase: Tensor, begins_BT: Tensor | None, chunk: int | None
) -> Tensor:
    """silu(gate) ⊙ states of inputs and gate side by side, [B, T, 2C]; λ as in `ops.scan.scan`, one per channel."""
    log_decay, phase, _, begins_BT = as_kernels_take(both_BTC, log_decay, phase, None, begins_BT, chunk)
    return _GatedScan.apply(both_BTC, log_decay, phase, begins_BT, chunk)  # pyright: ignore
