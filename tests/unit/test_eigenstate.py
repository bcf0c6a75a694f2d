"""The eigenstate mixer against its own formulas, written out in float64, and against what others got wrong."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flatout.model import eigenstate
from flatout.model.eigenstate import Eigenstate
from flatout.model.execution import Execution
from flatout.ops.documents import lay_out
from flatout.ops.scan import scan
from tests.mixing import mixed, mixer_config

WIDTH, STATES, CONTEXT = 12, 16, 64
VARIANTS = {
    "plain": {},
    "bias": {"bias": True},
}
# Triton's interpreter computes masked lanes too, and numpy tells of every infinity in them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def made(variant: str, *, dtype: torch.dtype = torch.float64, seed: int = 3, **more) -> Eigenstate:
    """A mixer whose parameters are all away from their beginnings, which would hide mistakes."""
    shape = {"width": WIDTH, "states": STATES, "context": CONTEXT, **VARIANTS[variant], **more}
    mixer = Eigenstate(mixer_config(**shape))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for linear in (module for module in mixer.modules() if isinstance(module, nn.Linear)):
            linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator) / math.sqrt(linear.in_features))
            if linear.bias is not None:
                linear.bias.zero_()
        mixer.init_states(generator)
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return mixer.to(dtype)


def inputs(batch: int = 2, positions: int = 21, *, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, positions, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def written_out(mixer: Eigenstate, x_TW: Tensor) -> Tensor:
    """The mixer on one document, position by position, from the formulas and with no function of ours."""
    shape = mixer.config
    ring = torch.exp(-torch.exp(mixer.decay_K))
    angle = mixer.angle_K + mixer.detuning_K * torch.exp(mixer.decay_K)
    weight_re, weight_im, gate_re, gate_im = mixer.inward.weight.chunk(4)
    gamma = torch.sqrt(1 - ring**2)
    state = torch.zeros(shape.states, dtype=torch.complex128)
    rows = []
    for x in x_TW:
        state = torch.polar(ring, angle) * state + gamma * torch.complex(weight_re @ x, weight_im @ x)
        gate = torch.cat([gate_re @ x, gate_im @ x])
        y = mixer.out.weight @ (gate * torch.sigmoid(gate) * torch.cat([state.real, state.imag]))
        rows.append(y if mixer.out.bias is None else y + mixer.out.bias)
    return torch.stack(rows)


@every_variant
def test_the_mixer_is_what_its_formulas_say(variant):
    mixer, x = made(variant), inputs().requires_grad_()
    y = mixed(mixer, x)
    expected = torch.stack([written_out(mixer, row) for row in x])
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    sent = inputs(seed=9)
    wanted = [x, *mixer.parameters()]
    ours, theirs = torch.autograd.grad(y, wanted, sent), torch.autograd.grad(expected, wanted, sent)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-10)


@every_variant
def test_no_parameter_is_without_gradient(variant):
    for path in ("chunked", "triton"):
        if path == "triton":
            pytest.importorskip("triton")
            if torch.cuda.is_available() or variant != "plain":
                continue  # kernels are compiled there, and tests/parity has them; here the interpreter takes its time
        mixer = made(variant, dtype=torch.float32)
        mixer.chunk = 16
        mixed(mixer, inputs(1, 18, dtype=torch.float32), how=Execution(scan=path)).square().sum().backward()
        for name, parameter in mixer.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
            share = (parameter.grad != 0).double().mean()
            assert share > 0.9, f"{name}: {share:.0%} of it has a gradient"


@every_variant
def test_a_position_sees_nothing_after_it(variant):
    mixer, x = made(variant), inputs(1, 40)
    mixer.chunk = 16
    y = mixed(mixer, x)
    for t in (0, 15, 16, 30, 39):
        moved = x.clone()
        moved[:, t] += 1.0
        change = (mixed(mixer, moved) - y).abs().amax((0, 2))
        assert (change[:t] == 0).all(), "what comes later is seen"
        assert (change[t:] > 0).all(), "what came before is not seen"


@every_variant
def test_the_chunk_changes_nothing(variant):
    mixer, x = made(variant), inputs(1, 200)
    results = []
    for chunk in (16, 32, 64, 128, 256, 512):
        mixer.chunk = chunk
        y = mixed(mixer, x)
        results.append([y, *torch.autograd.grad(y.square().sum(), list(mixer.parameters()))])
    for other in results[1:]:
        for mine, first in zip(other, results[0], strict=True):
            torch.testing.assert_close(mine, first, rtol=1e-9, atol=1e-10)


@every_variant
@pytest.mark.parametrize("prompt", [1, 2, 17])
def test_a_prompt_and_then_tokens_equal_one_pass(variant, prompt):
    mixer, x = made(variant), inputs(2, 30)
    mixer.chunk = 16
    with torch.no_grad():
        whole = mixed(mixer, x)
        cache = mixer.empty_cache(2, torch.float64, "cpu")
        sizes = {name: value.numel() for name, value in vars(cache).items()}
        parts = [mixed(mixer, x[:, :prompt], cache)]
        parts += [mixed(mixer, x[:, t : t + 1], cache, t) for t in range(prompt, 25)]
        parts.append(mixed(mixer, x[:, 25:], cache, 25))  # and several tokens at once in the middle of a text
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-12)
    assert {name: value.numel() for name, value in vars(cache).items()} == sizes


@every_variant
def test_documents_in_a_row_are_as_if_alone(variant):
    mixer, lengths = made(variant), [[1, 7, 13], [16, 5]]
    x = inputs(2, 21)
    numbers = np.array([np.repeat(np.arange(len(row)), row) for row in lengths], dtype=np.int32)
    layout = lay_out(numbers, None, torch.device("cpu"))
    x.requires_grad_()
    packed = mixed(mixer, x, layout=layout)
    alone = []
    for row, counts in zip(x, lengths, strict=True):
        documents = row.split(counts)
        alone.append(torch.cat([mixed(mixer, document[None])[0] for document in documents]))
    torch.testing.assert_close(packed, torch.stack(alone), rtol=1e-10, atol=1e-12)
    one_row = mixed(mixer, x.flatten(0, 1)[None], layout=layout.in_one_row)  # as our kernels have it
    torch.testing.assert_close(one_row.view_as(packed), packed, rtol=1e-10, atol=1e-12)
    # The second document of the first row depends on itself alone, to the last bit.
    (gradient,) = torch.autograd.grad(packed[0, 1:8].sum(), x)
    assert (gradient[0, 1:8] != 0).all()
    gradient[0, 1:8] = 0
    assert (gradient == 0).all()


def test_the_path_in_our_kernels_equals_the_plain_one():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    for variant in VARIANTS:
        mixer = made(variant, dtype=torch.float32)
        layout = lay_out(np.array([[0] * 5 + [1] * 15], dtype=np.int32), None, torch.device("cpu"))
        results = []
        for kernels in ("torch", "triton"):
            path = "triton" if kernels == "triton" else "chunked"
            mixer.chunk = 8
            x = inputs(1, 20, dtype=torch.float32).requires_grad_()
            y = mixed(mixer, x, layout=layout, how=Execution(kernels=kernels, scan=path))
            results.append([y, *torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])])
        for mine, other in zip(*results, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4 * float(other.detach().abs().max()))


def test_a_projection_that_is_more_than_its_weight_is_asked_itself():
    """As one with adapters: the input's scale cannot hide in the weight then."""

    class Other(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    mixer, x = made("plain"), inputs()
    expected = mixed(mixer, x)
    other = Other(WIDTH, 4 * STATES, bias=False).double()
    with torch.no_grad():
        other.weight.copy_(mixer.inward.weight / 2)
    mixer.inward = other
    torch.testing.assert_close(mixed(mixer, x), expected)


def test_gradients_reach_back_through_all_chunks():
    """Cut at a chunk's end, as others have it, a mixer learns nothing that is further away."""
    mixer = made("plain", context=4096)
    mixer.chunk = 16
    x = inputs(1, 400).requires_grad_()
    (gradient,) = torch.autograd.grad(mixed(mixer, x)[0, -1].sum(), x)
    assert (gradient[0, 0].abs() > 0).all()
    assert gradient[0, 0].norm() > 1e-3 * gradient[0, -1].norm()


def horizons(mixer: Eigenstate) -> torch.Tensor:
    """Tokens after which 1/e of a state is left: [K]."""
    return -1.0 / mixer.eigenvalues()[0].detach()


@pytest.mark.parametrize("context", [1024, 32768])
def test_horizons_span_the_context_in_every_head(context):
    mixer = Eigenstate(mixer_config(width=4, states=128, context=context))
    for linear in (mixer.inward, mixer.out):  # a pass that draws all linear layers comes first and harms nothing
        nn.init.normal_(linear.weight)
    mixer.init_states(torch.Generator().manual_seed(0))
    horizon = horizons(mixer)
    assert horizon.shape == (128,)
    assert horizon.min() >= 4.0 * 0.999
    assert context / 2 < horizon.max() <= context * 1.001
    by_head = horizon.view(8, -1)
    assert (by_head.amin(1) < 4.0 * 2).all()
    assert (by_head.amax(1) > context / 4).all()
    log_decay, phase = mixer.eigenvalues()
    torch.testing.assert_close(torch.exp(log_decay * horizon), torch.full_like(horizon, math.exp(-1)))
    assert (phase > 0).all()
    assert (phase <= math.pi * 1.001).all()


def test_angles_of_all_blocks_together_are_spread_evenly():
    places = [Eigenstate(mixer_config(width=4, states=24, context=512), place).angle_K for place in range(6)]
    for angles in (*places, torch.cat(places), places[0][8:16]):
        ordered = torch.cat([torch.zeros(1), angles.sort().values, torch.tensor([math.pi])]).double()
        assert ordered.diff().max() < 3.0 * math.pi / len(angles)
        assert ordered.diff()[1:-1].min() > 0.3 * math.pi / len(angles)


def test_a_step_of_an_optimizer_turns_every_state_by_the_same_over_its_horizon():
    """And not thousands of times as far where a state remembers thousands of tokens."""
    mixer = made("plain", states=64, context=32768)
    mixer.init_states(torch.Generator().manual_seed(0))
    before = mixer.eigenvalues()[1].detach()
    with torch.no_grad():
        mixer.detuning_K += 1e-3
    turned = (mixer.eigenvalues()[1].detach() - before) * horizons(mixer)
    assert horizons(mixer).max() > 16384
    torch.testing.assert_close(turned, torch.full_like(turned, 1e-3))


def test_states_of_all_horizons_have_one_size(monkeypatch):
    """White noise in, states of variance 1 out, whether they remember 4 tokens or 1,000."""
    mixer = made("plain", states=32, context=1000)
    mixer.init_states(torch.Generator().manual_seed(1))
    seen = []

    def watched(*values, **how):
        states_BTC, last_BC = scan(*values, **how)
        seen.append(states_BTC)
        return states_BTC, last_BC

    monkeypatch.setattr(eigenstate, "scan", watched)
    with torch.no_grad():
        mixed(mixer, inputs(4, 4000))
    variance_K = seen[0][:, 1000:].square().mean((0, 1)).view(2, -1).mean(0)
    assert variance_K.min() > 0.2
    assert variance_K.max() < 5.0


def test_energy_grows_as_the_square_and_no_faster():
    """√E(t) ≤ √E(0) + t·B is reached as |λ| nears 1; E(0) + t·B² is not a bound."""
    x = torch.ones(1, 50, 2, dtype=torch.float64)
    x[..., 1] = 0
    zero = torch.zeros(1, dtype=torch.float64)
    states, _ = scan(x, zero - 1e-9, zero, initial_BC=torch.tensor([[3.0, 0.0]], dtype=torch.float64))
    energy = states.square().sum(-1)[0]
    steps = torch.arange(1, 51)
    assert (energy.sqrt() <= 3.0 + steps).all()
    assert (energy > 9.0 + steps).all()


def test_packed_documents_are_not_decoded():
    mixer = made("plain")
    layout = lay_out(np.zeros((1, 4), dtype=np.int32), None, torch.device("cpu"))
    with pytest.raises(ValueError, match="decoded"):
        mixed(mixer, inputs(1, 4), mixer.empty_cache(1, torch.float64, "cpu"), layout=layout)


@pytest.mark.usefixtures("bf16_products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_inputs_have_wide_states(dtype):
    """Under autocast, over 4,096 positions: the state is carried in fp32 and does not drift."""
    mixer = made("plain", dtype=torch.float32, context=4096)
    x = inputs(1, 4096, dtype=torch.float32)
    with torch.no_grad():
        exact = mixed(made("plain", context=4096), x.double())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            cache = mixer.empty_cache(1, dtype, "cpu")
            y = mixed(mixer, x, cache)
    assert cache.state_BC.dtype == torch.float32
    assert y.dtype == dtype
    error = (y.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < (1e-2 if dtype == torch.bfloat16 else 3e-5)  # an angle has the digits of fp32
