"""Whole models of every mixer, A, W, E and mixtures: what must hold of each, on a CPU in float64."""

import dataclasses
import importlib.util

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.config.schema import ModelConfig, OptimConfig
from flatout.errors import CheckpointError, ConfigError
from flatout.generation.engine import generate_tokens
from flatout.generation.sampling import Sampling
from flatout.model import eigenstate
from flatout.model.adapter_targets import AdapterPlan
from flatout.model.adapters import attach
from flatout.model.cache import LayerCache
from flatout.model.execution import Execution
from flatout.model.gpt import GPT, build_model, empty_model
from flatout.model.hub_folder import export_huggingface
from flatout.ops.documents import lay_out
from flatout.optim.optimizers import trainables
from flatout.optim.rules import decays
from tests.made_optimizers import made_optimizers

VOCAB = 50
SHAPE = {"layers": 3, "width": 32, "heads": 2, "context": 40, "window": 5, "states": 8}
MODELS = {
    "A": {"pattern": "A"},
    "W": {"pattern": "W"},
    "E": {"pattern": "E"},
    "EA": {"pattern": "EA"},
    "WEA": {"pattern": "WEA", "mlp": "relu2", "norm": "layernorm", "bias": True},
    "EWA": {"pattern": "EWA", "positions": "learned"},
}
every_model = pytest.mark.parametrize("model_name", MODELS)
# All kinds of blocks, with turned and with learned positions; the others are parts of these.
two_models = pytest.mark.parametrize(
    "model_name",
    [pytest.param(name, marks=[] if name in {"WEA", "EWA"} else [pytest.mark.slow]) for name in MODELS],
)
with_interpreter = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels do not take tensors of the host"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of infinities in masked lanes, which it computes too
]


def config_of(model_name: str, **more) -> ModelConfig:
    return ModelConfig(**{**SHAPE, **MODELS[model_name], **more})


def built(model_name: str, execution: Execution | None = None, **more) -> GPT:
    return build_model(config_of(model_name, **more), VOCAB, seed=1, execution=execution).double()


def tokens(batch: int = 2, length: int = 40, seed: int = 3) -> Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def results_of(model: GPT, row: Tensor, layout=None) -> list[Tensor]:
    """The loss and all gradients."""
    loss = model(row, row.flip(1), 0.0, layout)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@every_model
def test_a_token_sees_nothing_after_it(model_name):
    model, row = built(model_name), tokens(1)
    before = model.logits(row)
    for place in (0, 7, 20, 39):
        other = row.clone()
        other[:, place] = (other[:, place] + 1) % VOCAB
        changed = (model.logits(other) != before).any(dim=-1)[0]
        assert not changed[:place].any(), "what comes later is seen"
        reach = 40 if model_name != "W" else 3 * (5 - 1) + 1
        assert changed[place : place + reach].all(), "what came before is not seen"


@every_model
def test_the_fast_forms_equal_the_references(model_name):
    ways = Execution(attention="reference", scan="reference"), Execution(attention="sdpa", scan="chunked")
    for mine, theirs in zip(*(results_of(built(model_name, how), tokens()) for how in ways), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("model_name", [name for name, more in MODELS.items() if "E" in more["pattern"]])
def test_the_chunk_changes_nothing(model_name):
    model, row, found = built(model_name, context=600, layers=2), tokens(1, 600), []
    for chunk in (16, 64, 512):
        for mixer in model.eigenstates:
            mixer.chunk = chunk
        found.append(results_of(model, row))
    for other in found[1:]:
        for mine, first in zip(other, found[0], strict=True):
            torch.testing.assert_close(mine, first, rtol=1e-9, atol=1e-10)


@every_model
@pytest.mark.parametrize("prompt", [1, 4, 17])
def test_a_prompt_and_then_tokens_equal_one_pass(model_name, prompt):
    model, row = built(model_name).eval(), tokens()
    with torch.inference_mode():
        whole, cache = model.logits(row), model.empty_cache(2)
        pieces = [model.logits(row[:, :prompt], cache)]
        pieces += [model.logits(row[:, place : place + 1], cache) for place in range(prompt, 30)]
        pieces.append(model.logits(row[:, 30:37], cache))  # several at once in the middle of a text
        pieces += [model.logits(row[:, place : place + 1], cache) for place in range(37, 40)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-9, atol=1e-11)


@every_model
def test_rows_of_different_lengths_decode_as_each_alone(model_name):
    """Prompts of their own, then joined: token after token, and several at once."""
    model, row = built(model_name).eval(), tokens(3, 30)
    with torch.inference_mode():
        together, alone = model.empty_cache(3), [model.empty_cache() for _ in range(3)]
        for index, (count, cache) in enumerate(zip((13, 1, 7), alone, strict=True)):
            model.logits(row[index : index + 1, :count], cache)
        for joined, *layers in zip(together.layers, *(cache.layers for cache in alone), strict=True):
            for name, tensor in vars(joined).items():
                if isinstance(tensor, torch.Tensor):
                    tensor.copy_(torch.cat([getattr(layer, name) for layer in layers]))
        together.length_B.copy_(torch.cat([cache.length_B for cache in alone]))
        together.most, together.level = 13, False
        for first, end in ((13, 14), (14, 15), (15, 16), (16, 21), (21, 22), (22, 29), (29, 30)):
            logits = model.logits(row[:, first:end], together)
            expected = torch.cat([model.logits(row[i : i + 1, first:end], cache) for i, cache in enumerate(alone)])
            torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-11)
    assert together.length_B.tolist() == [int(cache.length_B) for cache in alone] == [30, 18, 24]


@two_models
def test_no_shape_of_decoding_depends_on_how_much_came_before(model_name):
    model, cache, shapes = built(model_name).eval(), built(model_name).empty_cache(2, 30), []

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            assert function is not torch.ops.aten._local_scalar_dense.default, "the host asked the device"
            shapes[-1].append((str(function), getattr(result, "shape", None)))
            return result

    cache.level = False
    with torch.no_grad():
        model.logits(tokens(2, 6), cache)
        for place in range(6, 30):
            shapes.append([])
            with Shapes():
                model.logits(tokens()[:, place : place + 1], cache)
    assert all(made == shapes[0] for made in shapes)


@two_models
def test_text_with_a_cache_is_that_without(model_name):
    """Also where the context is full and generation goes on from its second half."""
    model = built(model_name)
    how = {"count": 60, "sampling": Sampling(temperature=0.0)}
    with_cache, without = (list(generate_tokens(model, [1, 2, 3], cached=cached, **how)) for cached in (True, False))
    assert with_cache == without


def test_caches_hold_what_can_be_seen_and_no_more():
    model = build_model(config_of("WEA", context=4096), VOCAB)
    cache = model.empty_cache()
    window, states, whole = cache.layers
    assert isinstance(window, LayerCache)
    assert window.k_BGSD.shape[2] == 5
    assert states.state_BC.shape == (1, 16)
    assert isinstance(whole, LayerCache)
    assert whole.k_BGSD.shape[2] == 4096
    assert [model.empty_cache(positions=count).layers[2].k_BGSD.shape[2] for count in (20, 5000)] == [20, 4096]
    with torch.autocast("cpu", torch.bfloat16):
        narrow = model.empty_cache().layers
    assert (narrow[0].k_BGSD.dtype, narrow[1].state_BC.dtype) == (torch.bfloat16, torch.float32)
    wide = build_model(config_of("W", context=5), VOCAB).empty_cache().layers
    assert all(layer.k_BGSD.shape[2] == 5 for layer in wide), "the window is the context"


@pytest.mark.grid
@every_model
@pytest.mark.parametrize("scan", ["chunked", "reference"])
def test_documents_are_as_if_alone(model_name, scan):
    lengths = [[1, 14, 25], [33, 7]]
    numbers = np.array([np.repeat(np.arange(len(row)), row) for row in lengths], dtype=np.int32)
    layout = lay_out(numbers, None, torch.device("cpu"))
    model, row = built(model_name, Execution(scan=scan)), tokens()
    packed = model.logits(row, layout=layout)
    for text, counts, found in zip(row, lengths, packed, strict=True):
        alone = torch.cat([model.logits(document[None])[0] for document in text.split(counts)])
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-11)
    other = row.clone()
    other[0, 1:15] = (other[0, 1:15] + 1) % VOCAB
    moved = (model.logits(other, layout=layout) != packed).any(dim=-1)
    assert moved[0, 1:15].all()
    assert int(moved.sum()) == 14, "to the last bit, in all other documents"


@pytest.mark.grid
@every_model
@pytest.mark.parametrize("packed", [False, True])
def test_no_parameter_is_without_gradient(model_name, packed):
    model = built(model_name)
    documents = np.repeat(np.array([[0, 1], [0, 0]], dtype=np.int32), 20, axis=1)
    layout = lay_out(documents, None, torch.device("cpu")) if packed else None
    model(tokens(), tokens().flip(1), 0.0, layout).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        if "embedding" not in name and "positions" not in name:  # of those only some rows were looked up
            share = (parameter.grad != 0).double().mean()
            assert share > 0.9, f"{name}: {share:.0%} of it has a gradient"


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
@pytest.mark.parametrize("model_name", ["EA", "E"])
def test_what_is_computed_again_changes_nothing(model_name, checkpointing):
    results = []
    for how in (Execution(), Execution(checkpointing=checkpointing)):
        model = built(model_name, how)
        results.append(results_of(model, tokens()))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("model_name", "packed", "checkpointing"),
    [
        pytest.param("EA", False, "none", marks=with_interpreter),
        pytest.param("EA", True, "full", marks=with_interpreter),
        pytest.param("EWA", True, "none", marks=with_interpreter),
    ],
)
def test_our_kernels_equal_torchs_operations(model_name, packed, checkpointing):
    kernels = Execution(kernels="triton", scan="triton", loss="fused", checkpointing=checkpointing)
    documents = np.repeat(np.array([[0, 1]], dtype=np.int32), 12, axis=1)
    layout = lay_out(documents, None, torch.device("cpu")) if packed else None
    config = config_of(model_name, context=24, layers=len(MODELS[model_name]["pattern"]))
    results = []
    for how in (Execution(), kernels):
        model = build_model(config, VOCAB, seed=1, execution=how)
        results.append(results_of(model, tokens(1, 24), layout))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=5e-4, atol=5e-4)


@pytest.mark.parametrize(
    "scan", [pytest.param("chunked", marks=pytest.mark.slow), pytest.param("triton", marks=with_interpreter)]
)
def test_a_model_with_eigenstates_compiles_in_one_graph(scan):
    results = []
    for compiled in (False, True):
        config = config_of("E" if scan == "chunked" else "EA", context=24, layers=2)
        model = build_model(config, VOCAB, seed=1, execution=Execution(scan=scan))
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        loss = model(tokens(1, 24), tokens(1, 24))
        loss.backward()
        results.append([loss, *(parameter.grad for parameter in model.parameters())])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


# --- weights ---------------------------------------------------------------------------------------------------------


def test_weights_depend_on_the_seed_alone_and_horizons_are_in_place():
    first, second, other = (build_model(config_of("EA", context=4096), VOCAB, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    mixers = first.eigenstates
    assert len(mixers) == 2
    assert not torch.equal(mixers[0].decay_K, other.eigenstates[0].decay_K)
    assert not torch.equal(mixers[0].decay_K, mixers[1].decay_K)
    angles = [mixer.eigenvalues()[1] for mixer in (*mixers, *other.eigenstates)]
    assert torch.equal(torch.stack(angles[:2]), torch.stack(angles[2:])), "angles follow from the shape"
    assert not torch.equal(*angles[:2])
    for mixer in mixers:
        horizon = -1.0 / mixer.eigenvalues()[0]
        assert horizon.min() >= 4.0 * 0.999
        assert 4096 / 4 < horizon.max() <= 4096 * 1.001


def test_what_follows_from_the_shape_is_in_place_where_weights_are_read():
    """A checkpoint holds parameters alone."""
    written = build_model(config_of("EA"), VOCAB, seed=3)
    read = empty_model(config_of("EA"), VOCAB)
    with torch.no_grad():
        for mine, theirs in zip(read.parameters(), written.parameters(), strict=True):
            mine.copy_(theirs)
    assert not any(name.endswith("angle_K") for name in written.state_dict())
    assert torch.equal(read.logits(tokens(1, 9)), written.logits(tokens(1, 9)))
    shapes = empty_model(config_of("EA"), VOCAB, device="meta")
    assert all(mixer.angle_K.is_meta for mixer in shapes.eigenstates)


def test_a_model_of_states_alone_has_no_table_of_positions():
    assert build_model(config_of("E"), VOCAB).rotary is None
    assert build_model(config_of("EA"), VOCAB).rotary is not None


def test_what_is_no_matrix_does_not_decay():
    model = build_model(config_of("E"), VOCAB)
    matrices = [one for one in trainables(model) if decays(one)]
    assert {one.name.rpartition(".")[2] for one in matrices} == {"weight"}
    spared = {one.name.rpartition(".")[2] for one in trainables(model) if not decays(one)}
    assert {"decay_K", "detuning_K"} <= spared
    optimizer = made_optimizers(model, OptimConfig(weight_decay=0.5))
    assert sum(len(group.parameters) for group in optimizer.groups) == len(list(model.parameters()))
    decaying = {id(p) for group in optimizer.groups if group.numbers["decay"] for p in group.parameters}
    assert decaying == {id(one.parameter) for one in matrices}


# --- what does not go ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"family": "gpt2", "context": 16}, "GPT-2 has full attention only"),
        ({"states": 0}, "states"),
        ({"pattern": "EX"}, "pattern"),
    ],
)
def test_what_eigenstates_do_not_go_with(more, word):
    with pytest.raises(ValueError, match=word):
        ModelConfig(**{**SHAPE, "pattern": "E", **more})


def test_fields_of_eigenstates_are_looked_at_where_there_are_some():
    assert ModelConfig(**{**SHAPE, "pattern": "A", "states": 9}).kinds == "AAA"


def test_others_do_not_know_such_models(tmp_path):
    model = build_model(config_of("EA"), VOCAB)
    with pytest.raises(CheckpointError, match=r"model\.pattern='EA'"):
        export_huggingface(model, tmp_path / "out")
    with pytest.raises(ConfigError, match="adapters are for blocks with attention"):
        attach(model, AdapterPlan(rank=2), seed=0)


def test_other_switches_may_come_later(monkeypatch):
    model, row, paths = build_model(config_of("EA"), VOCAB, seed=1), tokens(), []
    real = eigenstate.scan
    monkeypatch.setattr(eigenstate, "scan", lambda *x, path, **how: (paths.append(path), real(*x, path=path, **how))[1])
    before = model(row, row)
    model.use(dataclasses.replace(model.execution, scan="reference"))
    torch.testing.assert_close(model(row, row), before)
    assert paths == ["chunked"] * 2 + ["reference"] * 2
