"""The lab for the recipe: every field works alone, Muon orthogonalises, and plans spend equal tokens."""

import dataclasses
import functools
import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

LAB = Path(__file__).parents[2] / "lab" / "lab.py"
spec = importlib.util.spec_from_file_location("lab", LAB)
assert spec is not None
assert spec.loader is not None
lab = importlib.util.module_from_spec(spec)
sys.modules["lab"] = lab  # dataclasses look their module up
spec.loader.exec_module(lab)


TINY = lab.Size(2, 32, 2, 256, 32)
PLAIN = lab.Recipe(batch=128, warmup=1)
# For each field another value, and what must be on for the field to mean something.
VARIATIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "batch": (256, {}),
    "ramp": ("1/2", {}),
    "ramp_power": (1.0, {"ramp": "1/2"}),
    "optimizer": ("adamw", {}),
    "rate": (0.5, {}),
    "muon_rate": (0.01, {}),
    "adam_rate": (1e-3, {"optimizer": "adamw"}),
    "embedding_rate": (0.03, {}),
    "head_rate": (0.01, {}),
    "table_rate": (0.03, {"value_tables": 1}),
    "table_decay": (0.5, {"value_tables": 1}),
    "embedding_decay": (0.5, {}),
    "head_decay": (0.5, {}),
    "scalar_rate": (0.01, {"x0_mix": True}),
    "beta1": (0.9, {}),
    "beta2": (0.99, {}),
    "clip": (0.01, {}),
    "iteration": ("newton", {}),
    "scale": ("rms", {}),
    "momentum": (0.9, {"momentum_warmup": 2}),
    "momentum_start": (0.9, {}),
    "momentum_warmup": (2, {}),
    "momentum_cooldown": (4, {"momentum_warmup": 1}),
    "normuon": (True, {}),
    "normuon_beta": (0.5, {"normuon": True}),
    "decay_form": ("cautious", {}),
    "decay": (0.2, {"decay_form": "plain"}),
    "schedule": ("cosine", {}),
    "warmup": (0, {}),
    "cooldown": (0.3, {}),
    "floor": (0.1, {}),
    "tied": (True, {}),
    "activation": ("swiglu", {}),
    "qk_norm": (False, {}),
    "qk_scale": (1.2, {}),
    "zero_init": (False, {}),
    "cap": (0.0, {}),
    "cap_form": ("sigmoid", {}),
    "norm_weights": (True, {}),
    "embedding_norm": (False, {}),
    "embedding_std": (0.5, {}),
    "rope_base": (1000.0, {}),
    "half_rotary": (True, {}),
    "x0_mix": (True, {}),
    "skips": (True, {}),
    "value_tables": (1, {}),
    "attention_gates": (True, {}),
    "smear": (True, {}),
    "bigram_rows": (512, {}),
    "mtp": (0.5, {}),
    "mtp_end": (0.3, {"mtp": 0.5}),
    "dropout": (0.2, {}),
    "table_dropout": (0.2, {"value_tables": 1}),
    "shift": (True, {}),
}


@functools.cache
def made_up() -> Any:
    """Tokens that can be learned a little: each one mostly follows from the two before it."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(TINY.vocab, (9000,), generator=generator).tolist()
    luck = torch.rand(9000, generator=generator).tolist()
    tokens = noise[:2]
    for i in range(2, 9000):
        follows = (tokens[-1] * 3 + tokens[-2]) % min(32, TINY.vocab)
        tokens.append(follows if luck[i] < 0.8 else noise[i])
    both = torch.tensor(tokens, dtype=torch.int32)
    return lab.Data(both[:8000], both[8000 : 8000 + 4 * TINY.context + 1])


@functools.cache
def trained(recipe: Any) -> tuple[float, list[str]]:
    """Three eager steps of a tiny model: its validation loss, and the parameters that did not move."""
    place = lab.Place(torch.device("cpu"), torch.float32, False)
    protocol = lab.Protocol(TINY, place, made_up(), 3 * PLAIN.batch, 4, 1, lambda _: None)
    model = lab.Model(recipe, TINY, place, 0)
    began_with = {name: tensor.detach().clone() for name, tensor in model.parameters.items()}
    loss = lab.trained(model, recipe, protocol)["loss"]
    still = [name for name, tensor in model.parameters.items() if torch.equal(tensor, began_with[name])]
    return math.nan if loss is None else loss, still


def test_every_field_has_a_variation() -> None:
    assert list(VARIATIONS) == [field.name for field in dataclasses.fields(lab.Recipe)]


@pytest.mark.parametrize("field", VARIATIONS)
def test_a_field_switched_alone_changes_the_loss_and_every_parameter_learns(field: str) -> None:
    value, also = VARIATIONS[field]
    plain = dataclasses.replace(PLAIN, **also)
    loss, still = trained(dataclasses.replace(plain, **{field: value}))
    assert math.isfinite(loss)
    assert loss != trained(plain)[0]
    assert not still


@pytest.mark.parametrize("iteration", ["polar", "newton"])
@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 64, 16), (2, 16, 64)])
def test_muon_orthogonalises(iteration: str, shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    got = left.mT @ lab.orthogonal(matrices, iteration).float() @ right.mT
    stretched = got.diagonal(dim1=-2, dim2=-1)
    large = values > 0.02 * values[:, :1]  # smaller ones need more than five iterations
    assert ((stretched > 0.65) & (stretched < 1.25))[large].all()
    assert (got - torch.diag_embed(stretched)).abs().max() < 1e-3


@pytest.mark.parametrize(
    "words", ["batch:32768", "batch:262144", "batch:131072,ramp:0.5/1/1", "batch:98304,ramp:0.334/0.667/1"]
)
def test_every_plan_spends_the_same_tokens(words: str) -> None:
    steps = lab.planned(lab.recipe_of(words), 793, 32_768)
    assert sum(step.micro_batches for step in steps) == 793
    assert all(0 < step.factor <= 1 for step in steps)


def test_candidates_are_named_by_their_rows() -> None:
    recipes = lab.named()
    assert len(set(recipes.values())) == len(recipes) > 50
    assert lab.candidate_of("muon")[1] == lab.Recipe()
    assert lab.candidate_of("x=from:muon,normuon:true")[1] == recipes["normuon"]
    assert lab.candidate_of("y=optimizer:adamw")[1] == recipes["adamw-modern"]
    with pytest.raises(ValueError, match="no field 'batches'"):
        lab.recipe_of("batches:1")
    with pytest.raises(ValueError, match="no candidate 'moon'"):
        lab.candidate_of("moon")
