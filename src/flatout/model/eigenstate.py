"""The eigenstate mixer: a bank of damped, rotating states in place of attention.

    β_t = γ ⊙ (W_β · x_t)          complex, K of them;  γ = √(1 − |λ|²) keeps states of all horizons at one size
    c_t = λ ⊙ c_{t-1} + β_t        |λ| = exp(−exp ν), so it is below 1 whatever is learned;  angle of λ = α + φ · exp ν
    y_t = W_out · (silu(W_g · x_t) ⊙ [Re c_t, Im c_t])

For inputs of size B at most, states have √E(t) ≤ √E(0) + t·B.

Contract: the interface of `Attention`. The result at t depends on positions up to t of its own document. States are
fp32, and their gradients are never truncated. With a cache, a prompt and then single tokens give the same as one pass;
a token costs the same at any length. Call `init_states` after all other weights are drawn: it sets everything except
the linear layers.

Trap: horizons. A state decays to 1/e in exp(−ν) tokens. Initial horizons are log-uniform from a few tokens to the whole
context, because states that begin with short horizons never see far enough to learn long ones.

Trap: angles. A change of a state's angle rotates an input h tokens back by h times that change. So the learned
parameter is φ, the rotation over the state's own horizon. It is added to a fixed angle α, which follows from the shape
and is in no checkpoint. If the angle itself (or its logarithm) were learned, every step would scramble the contribution
of inputs thousands of tokens back.

Shape legend: B batch, T positions, W width, K states, C = 2K (real parts, then imaginary; in `both` 4K).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.config.schema import ModelConfig
from flatout.model.cache import EigenstateCache
from flatout.model.operations import Branch, Own, Shared
from flatout.ops.scan import scan, state_type

_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0  # any number of its multiples are spread evenly on a circle


_SHORTEST = 4.0  # tokens: the shortest initial horizon; the longest is the context


def horizons(config: ModelConfig, within_K: Tensor) -> Tensor:
    """Initial horizons in tokens, log-uniform from the shortest to the context.

    The range has one part per state; `within_K`, 0 to 1, is a state's place in its part.
    """
    # Heads are runs of states, and each head gets short and long horizons.
    heads = config.state_heads
    dealt_K = torch.cat([torch.arange(first, config.states, heads) for first in range(heads)])
    longest = max(_SHORTEST, float(config.context))
    return _SHORTEST * (longest / _SHORTEST) ** ((dealt_K + within_K) / config.states)


def angles(states: int, place: int) -> Tensor:
    """α in radians per token, spread evenly within a head, a block and the model, from 0 to π.

    Waves of all lengths distinguish distances. Beyond π a state equals one that rotates the other way with another
    read-out.
    """
    number_K = place * states + torch.arange(states, dtype=torch.float64)
    return math.pi * torch.frac((number_K + 0.5) * _GOLDEN)


class Eigenstate(nn.Module):
    """The mixer. `init_states` initialises all weights but those of the linear layers."""

    # No weight decay: for these parameters 0 is not a simpler value than others.
    undecayed = ("decay_K", "detuning_K")

    def __init__(self, config: ModelConfig, place: int = 0) -> None:
        """`place`: index among the model's blocks, whose angles all differ."""
        super().__init__()
        self.config, self.place = config, place
        self.chunk: int | None = None  # positions at once in the scan; None leaves it to the scan
        states = config.states
        # One product for the complex input and the gate, which has a value for the real and the imaginary parts.
        self.inward = nn.Linear(config.width, 4 * states, bias=False)
        self.parts = {"inward.weight": (2 * states, 2 * states)}
        self.out = nn.Linear(2 * states, config.width, bias=config.bias)
        self.decay_K = nn.Parameter(torch.empty(states))  # ν
        self.detuning_K = nn.Parameter(torch.empty(states))  # φ
        self.register_buffer("angle_K", torch.empty(states), persistent=False)  # α
        self.angle_K: Tensor
        self.fill()

    @torch.no_grad()
    def fill(self) -> None:
        """Computes the fixed angles, unless on the meta device."""
        if not self.angle_K.is_meta:
            self.angle_K.copy_(angles(self.config.states, self.place))

    @torch.no_grad()
    def init_states(self, generator: torch.Generator) -> None:
        """Initialises everything except the linear layers."""
        within_K = torch.rand(self.config.states, generator=generator)
        self.decay_K.copy_(-horizons(self.config, within_K).log())
        self.detuning_K.zero_()

    # --- what to look at -----------------------------------------------------------------------------------------

    def eigenvalues(self) -> tuple[Tensor, Tensor]:
        """(log|λ|, angle of λ in radians per token) of every state, in fp32 at least."""
        wide = state_type(self.decay_K)
        rate_K = torch.exp(self.decay_K.to(wide))
        return -rate_K, self.angle_K.to(wide) + self.detuning_K.to(wide) * rate_K

    def empty_cache(self, batch: int, dtype: torch.dtype, device: torch.device | str) -> EigenstateCache:
        """`dtype` is that of the products."""
        return EigenstateCache(batch, 2 * self.config.states, dtype, device)

    # --- the mixer -----------------------------------------------------------------------------------------------

    def forward(self, x_BTW: Tensor, shared: Shared, own: Own) -> Branch:
        """Uses no positions: the angle of a state encodes how long ago an input was."""
        layout, cache = shared.layout, own.cache
        if cache is not None and layout is not None:
            raise ValueError("packed documents are not decoded")
        do, narrow = shared.operations, own.narrow
        advanced_BTC = do.advance_states(self, x_BTW, shared, own)
        if advanced_BTC is not None:
            return do.product(advanced_BTC, self.out, narrow.out)
        log_decay_K, phase_K = self.eigenvalues()
        scale_C, weight = _input_scale(log_decay_K), None
        if do.scales_weights(self.inward, narrow.qkv):
            weight, scale_C = self._scaled(self.inward.weight, scale_C), None
        both_BTC = do.product(x_BTW, self.inward, narrow.qkv, weight).value_BTW
        if do.kernels and do.execution.scan == "triton" and scale_C is None:
            from flatout.ops.kernels.scan import gated_scan

            begins_BT = None if layout is None else document_begins(layout.documents_BT)
            y_BTC = gated_scan(both_BTC, log_decay_K, phase_K, begins_BT, self.chunk)
        else:
            y_BTC = self._mixed(both_BTC, scale_C, (log_decay_K, phase_K), shared, cache)
        return do.product(y_BTC, self.out, narrow.out)

    def advanced(self, both_BTC: Tensor, shared: Shared, cache: EigenstateCache) -> Tensor:
        """Gated states, from what `inward` made."""
        eigenvalue = self.eigenvalues()
        return self._mixed(both_BTC, _input_scale(eigenvalue[0]), eigenvalue, shared, cache)

    def _scaled(self, weight: Tensor, scale_C: Tensor) -> Tensor:
        """The weights with the input's scale in them, which saves a pass over the input; rows of the gate stay."""
        return weight * F.pad(scale_C.to(weight.dtype), (0, scale_C.numel()), value=1.0)[:, None]

    def _mixed(
        self,
        both_BTC: Tensor,
        scale_C: Tensor | None,
        eigenvalue: tuple[Tensor, Tensor],
        shared: Shared,
        cache: EigenstateCache | None,
    ) -> Tensor:
        """Gated states, from inputs and gate side by side. `scale_C`: the input's scale if not in the weights."""
        input_BTC, gate_BTC = both_BTC.chunk(2, dim=-1)
        layout = shared.layout
        if scale_C is not None:
            input_BTC = input_BTC * scale_C.to(input_BTC.dtype)
        states_BTC, last_BC = scan(
            input_BTC,
            *eigenvalue,
            initial_BC=None if cache is None else cache.state_BC,
            begins_BT=None if layout is None else document_begins(layout.documents_BT),
            path="reference" if both_BTC.shape[1] == 1 else shared.operations.execution.scan,
            chunk=self.chunk,
        )
        if cache is not None:
            cache.state_BC.copy_(last_BC.detach())
        return F.silu(gate_BTC) * states_BTC


def document_begins(documents_BT: Tensor) -> Tensor:
    """True where the document differs from that of the previous position; always true at a row's first position."""
    return F.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0))


def _input_scale(log_decay_K: Tensor) -> Tensor:
    """√(1 − |λ|²) for both halves, by expm1 because 1 − |λ|² loses its digits for |λ| near 1."""
    return torch.sqrt(-torch.expm1(2 * log_decay_K)).tile(2)
