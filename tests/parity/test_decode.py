"""The kernels for decoding against the plain pass over the whole text, and the draw of a token against torch's form."""

import dataclasses
import functools

import pytest
import torch

from flatout.config.load import load_config
from flatout.config.schema import ModelConfig
from flatout.device import arithmetic
from flatout.generation.engine import Engine, TextRequest, uncached_tokens
from flatout.generation.sampling import Rules, Sampling, choose
from flatout.model.gpt import GPT, build_model
from flatout.model.int8 import Int8Linear
from flatout.model.quantize import narrow_linears
from tests.unit.test_generate import KINDS, requests

decode = pytest.importorskip("flatout.ops.kernels.decode")
VOCAB = 61
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OTHERS = {
    "learned positions": {"family": "gpt", "positions": "learned", "norm": "layernorm", "bias": True, "qk_norm": False},
    "scaled": {"family": "gpt", "head_size": 6, "qkv_bias": True, "rope_scaling": "llama3", "rope_original_context": 8},
    "scaled embedding": {"embedding_scale": 5.5, "pattern": "WA", "window": 4, "rope_local_base": 20.0},
    "residual scale": {"family": "gpt", "residual_scale": 0.3, "mlp": "gelu"},
}


def lively(kind: dict, device: str, context: int = 24) -> GPT:
    model = build_model(ModelConfig(layers=2, width=32, heads=4, context=context, **kind), VOCAB, seed=5)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.to(device).eval()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
@torch.inference_mode()
def test_logits_are_those_of_the_whole_text(kind, parts, device, monkeypatch):
    monkeypatch.setattr(decode, "_parts", lambda *_: parts)
    model = lively((KINDS | OTHERS)[kind], device, context=96)
    texts = [[1, 2, 3], [4], list(range(5, 14)) * 8]
    cache, now = model.empty_cache(len(texts)), []
    for row, text in enumerate(texts):
        part = cache.rows(row, 1, level=True)
        part.clear()
        now.append(model.logits(torch.tensor([text], device=device), part, last=True)[0, 0].argmax())
    cache.kernels = True
    for rows in (3, 1):
        tokens_B1 = torch.stack(now[:rows])[:, None]
        found = model.logits(tokens_B1, cache.rows(0, rows, level=False), last=True)[:, 0]
        for row in range(rows):
            texts[row].append(int(now[row]))
            expected = model.logits(torch.tensor([texts[row]], device=device), last=True)[0, 0]
            torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
        now = list(found.argmax(-1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("inputs", "outputs", "activation"), [(36, 48, None), (64, 40, "swiglu"), (256, 1300, "gelu"), (5632, 96, None)]
)
@torch.inference_mode()
def test_products_of_8_bit_weights(inputs, outputs, activation, device):
    torch.manual_seed(0)
    wide = torch.nn.Linear(inputs, outputs)
    bias = wide.bias.to(device)
    linear = Int8Linear(wide.weight, wide.bias).to(device)
    x_RK = torch.randn(3, inputs, device=device)
    exact_NK = linear.weight.double() * linear.scale_N.double()[:, None]
    expected = x_RK.double() @ exact_NK.T + bias.double()
    if activation == "gelu":
        expected = torch.nn.functional.gelu(expected, approximate="tanh")
    elif activation == "swiglu":
        gate, value = expected.chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * value
    weights = decode.Weights(linear.weight, linear.scale_N)
    for rows in (1, 3):
        made = decode.product(x_RK[:rows], weights, linear.bias, dtype=torch.float32, activation=activation)
        assert float((made - expected[:rows]).abs().max()) < 1e-6 * float(expected.abs().max())
    if activation is not None:  # the inputs of those below are rounded before
        return
    x_RK = x_RK.bfloat16()
    expected = x_RK.double() @ exact_NK.T + bias.double()
    for rows, digits in ((1, 1e-4), (3, 3 * 2**-9)) if device == "cuda" else ((1, 1e-4),):
        made = decode.product(x_RK[:rows], weights, linear.bias, dtype=torch.bfloat16)
        assert float((made - expected[:rows]).abs().max()) < digits * float(expected.abs().max())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_in_kernels_give_the_texts_of_the_plain_pass(kind, device):
    model = lively(KINDS[kind], device)
    engine, waiting = Engine(model, rows=4, penalties=True, kernels=True), requests(12)
    if device == "cpu":  # in Triton's interpreter
        waiting = [dataclasses.replace(one, count=min(one.count, 9)) for one in waiting[:4]]
    made = [engine.add(one) for one in waiting]
    while engine.busy:
        engine.step()
    for one in made:
        assert one.made == list(uncached_tokens(model, one.ids, count=one.count, sampling=one.sampling)), one


BF16 = functools.partial(arithmetic, "bf16", False, torch.device("cuda"))


def decoded(model: GPT, texts: list[TextRequest], **how) -> list[TextRequest]:
    engine = Engine(model, rows=8, kernels=True, scope=BF16, **how)
    made = [engine.add(dataclasses.replace(one, made=[], probabilities=[])) for one in texts]
    while engine.busy:
        engine.step()
    engine.close()
    return made


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.parametrize("preset", ["gpt2-124m", "record", "modern"])
@torch.inference_mode()
def test_tokens_in_bf16_are_nearly_the_likeliest_and_exact_where_asked(preset, weights):
    config = load_config(preset).config.model.model_copy(update={"layers": 12, "width": 768})
    model = build_model(config, 50_257, seed=1).cuda().eval()
    with torch.no_grad():  # projections that start at zero would leave blocks without effect
        for block in model.blocks:
            block.attention.out.weight.normal_(0.0, 0.02)
            block.mlp.out.weight.normal_(0.0, 0.02)
    narrow_linears(model, weights)
    draw = torch.Generator().manual_seed(0)
    greedy = {"sampling": Sampling(temperature=0.0), "logprobs": 0}
    texts = [
        TextRequest(
            ids=torch.randint(0, 50_257, (20 + 7 * one,), generator=draw).tolist(), count=40 + 8 * one, **greedy
        )
        for one in range(12)
    ]
    for one in decoded(model, texts):
        with BF16():
            logits_TV = model.logits(torch.tensor([[*one.ids, *one.made]], device="cuda"))[0, len(one.ids) - 1 : -1]
        chosen_T = logits_TV.gather(1, torch.tensor(one.made, device="cuda")[:, None])[:, 0]
        assert float((logits_TV.max(dim=1).values - chosen_T).max()) < 0.05
    beside, (alone,) = decoded(model, texts, invariant=True), decoded(model, texts[3:4], invariant=True)
    assert (beside[3].made, beside[3].probabilities) == (alone.made, alone.probabilities)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("at_once", [16, 16_384])
def test_the_kernel_draws_what_torch_draws(device, at_once, monkeypatch):
    sample = pytest.importorskip("flatout.ops.kernels.sample")
    monkeypatch.setattr(sample, "_MOST", at_once)
    rows = [
        Sampling(temperature=0.0),
        Sampling(temperature=1.0, seed=5),
        Sampling(temperature=0.7, top_k=5, seed=-3),
        Sampling(temperature=1.2, top_p=0.6, seed=2**40 + 7),
        Sampling(temperature=1.0, top_k=20, top_p=0.9, min_p=0.02, seed=9),
        Sampling(temperature=1.0, repetition_penalty=1.7),
        Sampling(temperature=1e-30, seed=3),
        Sampling(temperature=0.9, top_p=0.0),
    ]
    both = []
    for _ in range(2):
        rules = Rules.room(len(rows), torch.device(device), VOCAB)
        for row, one in enumerate(rows):
            rules.assign(row, one, 3, [1, 2, 3])
        both.append((rules, torch.zeros(len(rows), dtype=torch.int64, device=device)))
    generator = torch.Generator().manual_seed(0)
    (plain, tokens_B), (ours, drawn_B) = both
    for last in (False, False, True):
        logits_BV = 3 * torch.randn(len(rows), VOCAB, generator=generator).to(device)
        if last:
            logits_BV[0, 3], logits_BV[1, 5], logits_BV[2] = torch.inf, torch.nan, -torch.inf
        choose(logits_BV, plain, tokens_B)
        choose(logits_BV, ours, drawn_B, kernels=True)
        assert drawn_B.tolist() == tokens_B.tolist()
        assert torch.equal(plain.whole_B3, ours.whole_B3)
        assert tokens_B[:3].tolist() == [-1, -1, -1] or not last
