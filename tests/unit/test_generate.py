import collections

import pytest
import torch

from flatout.config.schema import ModelConfig
from flatout.generation import generate_tokens, sample_token
from flatout.model.gpt import GPT, build_model

VOCAB = 61
FAMILIES = [
    {"family": "gpt2"},
    {"family": "gpt"},
    {"family": "gpt", "kv_heads": 2, "mlp": "relu2", "tied": False},
    {"family": "gpt", "head_size": 6, "qkv_bias": True, "rope_scaling": "llama3", "rope_original_context": 8},
    {"family": "gpt", "positions": "learned", "norm": "layernorm", "bias": True, "qk_norm": False},
]


def lively_model(variant: dict, context: int = 24) -> GPT:
    """Random weights large enough that greedy text wanders instead of repeating one token."""
    model = build_model(ModelConfig(layers=2, width=32, heads=4, context=context, **variant), VOCAB, seed=5)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.grid
@pytest.mark.parametrize("variant", FAMILIES)
@pytest.mark.parametrize("prompt", [[3], [1, 2, 3, 4, 5], list(range(12)), list(range(20))])
def test_cached_greedy_text_equals_uncached(variant, prompt):
    model = lively_model(variant, context=12)
    cached = list(generate_tokens(model, prompt, count=22, temperature=0.0))
    uncached = list(generate_tokens(model, prompt, count=22, temperature=0.0, cached=False))
    assert cached == uncached
    assert len(set(cached)) > 3, "the model must wander for this to mean anything"


@pytest.mark.parametrize("length", [5, 8])
def test_a_token_follows_from_all_that_the_context_holds(length, monkeypatch):
    model = lively_model({}, context=8)
    seen, logits = [], model.logits

    def looked_at(tokens_BT, *more, **how):
        seen.append(tokens_BT.shape[1])
        return logits(tokens_BT, *more, **how)

    monkeypatch.setattr(model, "logits", looked_at)
    list(generate_tokens(model, range(length), count=14 - length, cached=False))
    assert seen == [5, 6, 7, 8, 4, 5, 6, 7, 8][length - 5 :], "a full context is read once, then from its second half"


def test_a_seed_repeats_and_another_differs():
    model = lively_model({})
    draw = lambda seed: list(generate_tokens(model, [1], count=20, temperature=1.0, seed=seed))  # noqa: E731
    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_sampling_leaves_the_global_random_state_alone():
    model = lively_model({})
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    list(generate_tokens(model, [1], count=5))
    assert torch.equal(torch.rand(3), expected)


def test_the_models_mode_is_put_back():
    model = lively_model({}).train()
    list(generate_tokens(model, [1], count=3))
    assert model.training
    stream = generate_tokens(model.eval(), [1], count=3)
    next(stream)
    stream.close()
    assert not model.training


def test_generation_ends_after_the_stop_token():
    model = lively_model({})
    plain = list(generate_tokens(model, [1], count=30, temperature=0.0))
    stop = plain[7]
    ended = list(generate_tokens(model, [1], count=30, temperature=0.0, stops=(stop,)))
    assert ended == plain[: plain.index(stop) + 1]


def draws(logits: list[float], count: int = 400, **settings) -> collections.Counter[int]:
    generator = torch.Generator().manual_seed(0)
    options = {"temperature": 1.0, "top_k": None, "top_p": None, **settings}
    return collections.Counter(sample_token(torch.tensor(logits), generator=generator, **options) for _ in range(count))


def test_top_k_and_top_p_cut_the_tail():
    logits = [2.0, 1.0, 0.0, -1.0]
    assert set(draws(logits, top_k=2)) == {0, 1}
    assert set(draws(logits, top_k=100)) == {0, 1, 2, 3}
    assert set(draws(logits, top_p=0.7)) == {0, 1}
    assert set(draws(logits, top_p=0.0)) == {0}, "at least one token always stays"
    assert set(draws([0.0, 0.0, 0.0], top_p=1e-9)) <= {0, 1, 2}


def test_temperature():
    logits = [1.0, 0.9, 0.0]
    assert set(draws(logits, temperature=0.0)) == {0}
    assert set(draws(logits, temperature=1e-40)) == {0}, "a tiny temperature is greedy, not an overflow"
    assert draws(logits, temperature=0.05)[0] > 300
    hot = draws(logits, temperature=100.0, count=3000)
    assert min(hot.values()) > 850


def test_probabilities_are_the_softmax():
    logits = torch.tensor([1.0, 0.0, -1.0])
    counts = draws(logits.tolist(), count=5000)
    expected = torch.softmax(logits, dim=0)
    for token in range(3):
        assert counts[token] / 5000 == pytest.approx(expected[token].item(), abs=0.02)
