import collections
import dataclasses
import random

import pytest
import torch

from flatout.config.schema import ModelConfig
from flatout.errors import CheckpointError
from flatout.generation.engine import Engine, TextRequest, generate_tokens, uncached_tokens
from flatout.generation.sampling import Rules, Sampling, choose
from flatout.model.gpt import GPT, build_model
from flatout.model.quantize import narrow_linears

VOCAB = 61
GREEDY = Sampling(temperature=0.0)
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
    cached = list(generate_tokens(model, prompt, count=22, sampling=GREEDY))
    uncached = list(generate_tokens(model, prompt, count=22, sampling=GREEDY, cached=False))
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
    list(generate_tokens(model, range(length), count=14 - length, sampling=GREEDY, cached=False))
    assert seen == [5, 6, 7, 8, 4, 5, 6, 7, 8][length - 5 :], "a full context is read once, then from its second half"


def test_a_seed_repeats_and_another_differs():
    model = lively_model({})
    draw = lambda seed: list(generate_tokens(model, [1], count=20, sampling=Sampling(temperature=1.0, seed=seed)))  # noqa: E731
    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_sampling_leaves_the_global_random_state_alone():
    model = lively_model({})
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    list(generate_tokens(model, [1], count=5, sampling=Sampling()))
    assert torch.equal(torch.rand(3), expected)


def test_the_models_mode_is_put_back():
    model = lively_model({}).train()
    list(generate_tokens(model, [1], count=3, sampling=GREEDY))
    assert model.training
    stream = generate_tokens(model.eval(), [1], count=3, sampling=GREEDY)
    next(stream)
    stream.close()
    assert not model.training


def test_generation_ends_after_the_stop_token():
    model = lively_model({})
    plain = list(generate_tokens(model, [1], count=30, sampling=GREEDY))
    stop = plain[7]
    ended = list(generate_tokens(model, [1], count=30, sampling=GREEDY, stops=(stop,)))
    assert ended == plain[: plain.index(stop) + 1]


def draws(logits: list[float], count: int = 400, **settings) -> collections.Counter[int]:
    """What `count` texts draw, each with a seed of its own."""
    rules, tokens_B = Rules.room(count, torch.device("cpu")), torch.zeros(count, dtype=torch.int64)
    for row in range(count):
        rules.assign(row, Sampling(**{"temperature": 1.0, **settings}, seed=row), 0, [])
    choose(torch.tensor(logits).expand(count, -1), rules, tokens_B)
    return collections.Counter(tokens_B.tolist())


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


# --- many requests ----------------------------------------------------------------------------------------------------

KINDS = {
    "gpt2": {"family": "gpt2"},
    "grouped": {"family": "gpt", "kv_heads": 2, "mlp": "relu2", "tied": False},
    "record": {
        "family": "gpt",
        "norm": "plain-rmsnorm",
        "qk_norm": 1.2,
        "mlp": "relu2",
        "tied": False,
        "logit_cap": 15.0,
        "embedding_norm": True,
        "first_mix": True,
        "head_gate": True,
        "value_tables": 1,
        "bigram_rows": 50,
    },
    "windows": {"family": "gpt", "pattern": "WA", "window": 4},
    "eigenstates": {"family": "gpt", "pattern": "EA", "states": 16},
    "no positions": {"pattern": "AN", "kv_heads": 2},
    "norms after": {"norm_place": "after", "qk_norm_whole": True, "kv_heads": 2},
    "part of a head": {"rope_share": 0.75},
    "gemma": {
        "norm": "offset-rmsnorm",
        "norm_place": "both",
        "mlp": "geglu",
        "score_divisor": 3,
        "attention_cap": 2.0,
        "pattern": "WA",
        "window": 4,
        "embedding_scale": 5.5,
    },
}


BEYOND_KERNELS = ("norms after", "part of a head", "gemma")
KINDS_IN_NUMPY = {kind: fields for kind, fields in KINDS.items() if kind not in BEYOND_KERNELS} | {
    "learned": {"family": "gpt", "positions": "learned", "norm": "layernorm", "bias": True, "residual_scale": 0.5},
    "scaled": {"embedding_scale": 5.5, "pattern": "WA", "window": 4, "rope_local_base": 20.0},
    "grouped values": {"family": "gpt", "kv_heads": 2, "value_tables": 1, "norm": "rmsnorm", "qk_norm": True},
    "unbounded": {"family": "gpt", "norm": "plain-rmsnorm", "qk_norm": 5.0},
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", KINDS_IN_NUMPY)
def test_passes_in_numpy_give_the_probabilities_of_torch(kind, rows):
    model = lively_model(KINDS_IN_NUMPY[kind])
    found = []
    for in_numpy in (True, False):
        engine = Engine(model, rows=rows, penalties=True)
        assert engine.in_numpy
        whole = kind not in ("windows", "eigenstates", "scaled")
        assert bool(engine.listed) == whole, "prompts in NumPy need whole caches"
        if not in_numpy:
            engine.in_numpy, engine.listed = False, 0
        asked = [engine.add(dataclasses.replace(one, logprobs=0)) for one in requests(7)]
        while engine.busy:
            engine.step()
        assert bool(engine.graphs) == in_numpy, "calls are kept and made again"
        found.append([(one.made, [own for own, _ in one.probabilities]) for one in asked])
    for (made, own), (expected, likely) in zip(*found, strict=True):
        assert made == expected
        assert own == pytest.approx(likely, abs=2e-4)


def test_a_long_prompt_is_read_by_torch_and_goes_on_in_numpy(monkeypatch):
    model = lively_model({})
    expected = list(uncached_tokens(model, range(20), count=30, sampling=GREEDY))
    monkeypatch.setattr("flatout.generation.engine.LISTED", 5 * sum(weight.numel() for weight in model.parameters()))
    assert list(generate_tokens(model, range(20), count=30, sampling=GREEDY)) == expected


def requests(number: int) -> list[TextRequest]:
    draw = random.Random(0)
    rules = (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 9},
        {"temperature": 0.8, "top_p": 0.8, "repetition_penalty": 1.3},
    )
    return [
        TextRequest(
            ids=[draw.randrange(VOCAB) for _ in range(draw.choice([1, 3, 10, 24, 30]))],
            count=draw.choice([1, 2, 9, 40]),
            sampling=Sampling(**rules[one % 4], seed=one),
        )
        for one in range(number)
    ]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_weights_of_8_bits_give_nearly_the_same_logits(kind):
    model = lively_model(KINDS[kind])
    tokens_BT = torch.tensor([[1, 2, 3, 4, 5]])
    before = model.logits(tokens_BT)
    narrow_linears(model, "int8")
    after = model.logits(tokens_BT)
    assert 0 < float((after - before).norm()) < 0.05 * float(before.norm())
    made = list(generate_tokens(model, [1, 2, 3], count=30, sampling=GREEDY))
    assert made == list(uncached_tokens(model, [1, 2, 3], count=30, sampling=GREEDY))


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_does_not_depend_on_its_neighbours(kind):
    model = lively_model(KINDS[kind])
    engine, waiting, draw = Engine(model, rows=4, penalties=True), requests(12), random.Random(1)
    made = list(waiting)
    while waiting or engine.busy:
        for _ in range(draw.choice([0, 0, 1, 3])):
            if waiting:
                engine.add(waiting.pop(0))
        engine.step()
    for one in made:
        assert one.made == list(uncached_tokens(model, one.ids, count=one.count, sampling=one.sampling)), one
    # A chat's next turn finds the row that has its beginning.
    text = [*made[-1].ids, *made[-1].made]
    turn = engine.add(TextRequest(ids=[*text[-12:], 5], count=6, sampling=GREEDY))
    while engine.busy:
        engine.step()
    assert turn.made == list(uncached_tokens(model, turn.ids, count=6, sampling=GREEDY))


def test_prompts_are_read_together_and_in_their_order(monkeypatch):
    """As on a GPU, where a pass over prompts stops all live rows."""
    model, reads, began = lively_model({}), [], {}

    begin = Engine._begin
    monkeypatch.setattr(
        Engine, "_begin", lambda engine, rows, *more: (reads.append(len(rows)), begin(engine, rows, *more))
    )
    engine = Engine(model, rows=4)
    engine.kernels, engine.in_numpy, engine.listed = True, False, 0
    made = [TextRequest(ids=[1, 5, number], count=5 + number % 7, sampling=GREEDY) for number in range(20)]
    for request in made:
        engine.add(request)
    for step in range(1000):
        engine.step()
        began |= {number: step for number, request in enumerate(made) if request.made and number not in began}
    assert sum(reads) == 20 > 2 * len(reads)
    assert [began[number] for number in range(20)] == sorted(began.values())
    for one in made:
        assert one.made == list(uncached_tokens(model, one.ids, count=one.count, sampling=GREEDY))


@pytest.mark.parametrize("kind", KINDS)
def test_an_invariant_engine_gives_the_same_bits_beside_others(kind):
    model = lively_model(KINDS[kind])

    def probabilities(others: int) -> list[float]:
        engine = Engine(model, rows=4, invariant=True)
        beside = [engine.add(one) for one in requests(others)]
        one = engine.add(TextRequest(ids=[1, 2, 3], count=12, sampling=GREEDY, logprobs=0))
        while engine.busy:
            engine.step()
        assert all(other.ended == "length" for other in beside)
        return [own for own, _ in one.probabilities]

    assert probabilities(0) == probabilities(3) == probabilities(9)


def test_a_request_that_is_cancelled_frees_its_row():
    engine = Engine(lively_model({}), rows=1)
    first = engine.add(TextRequest(ids=[1], count=10**6, sampling=GREEDY))
    second = engine.add(TextRequest(ids=[2], count=3, sampling=GREEDY))
    for _ in range(5):
        engine.step()
    engine.cancel(first)
    while engine.busy:
        engine.step()
    assert (first.ended, second.ended, len(second.made)) == ("cancelled", "length", 3)


def test_a_full_context_ends_a_request_that_does_not_slide():
    model = lively_model({}, context=8)
    engine = Engine(model)
    request = engine.add(TextRequest(ids=[1, 2, 3], count=50, sampling=GREEDY, slides=False))
    while engine.busy:
        engine.step()
    assert (request.ended, len(request.made)) == ("length", 6)  # five places, and the token after the last of them


def test_probabilities_of_tokens_are_those_of_the_model():
    model = lively_model({})
    engine = Engine(model)
    request = engine.add(TextRequest(ids=[1, 2, 3], count=4, sampling=GREEDY, logprobs=3))
    while engine.busy:
        engine.step()
    text = [1, 2, 3]
    for token, (own, likeliest) in zip(request.made, request.probabilities, strict=True):
        with torch.inference_mode():
            expected = torch.log_softmax(model.logits(torch.tensor([text]), last=True)[0, 0], dim=-1)
        assert own == pytest.approx(expected[token].item(), abs=1e-5)
        assert list(likeliest) == expected.topk(3).indices.tolist()
        text.append(token)


def test_a_model_without_probabilities_is_refused():
    model = lively_model({})
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(CheckpointError, match="not finite"):
        list(generate_tokens(model, [1], count=3, sampling=GREEDY))
