"""The lab for the recipe: every field works alone, Muon orthogonalises, and plans spend equal tokens."""

import dataclasses
import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

LAB = Path(__file__).parents[2] / "lab" / "lab.py"
spec = importlib.util.spec_from_file_location("lab", LAB)
assert spec is not None
assert spec.loader is not None
lab = importlib.util.module_from_spec(spec)
sys.modules["lab"] = lab  # dataclasses look their module up
spec.loader.exec_module(lab)


def test_every_field_has_a_variation() -> None:
    assert list(lab.VARIATIONS) == [field.name for field in dataclasses.fields(lab.Recipe)]


@pytest.mark.parametrize("field", lab.VARIATIONS)
def test_a_field_switched_alone_changes_the_loss_and_every_parameter_learns(field: str) -> None:
    plain, other, still = lab.tiny_pair(field, 3)
    assert math.isfinite(other)
    assert other != plain
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


def test_candidates_and_campaigns_can_be_read() -> None:
    recipes = {name: lab.recipe_of(text) for name, text in lab.NAMED.items()}
    assert all(name in recipes for names in lab.CAMPAIGNS.values() for name in names.split())
    assert len(set(recipes.values())) == len(recipes)
    assert lab.candidate_of("x=from:adamw,tied:true")[1] == recipes["adamw-tied"]
    without = dict(lab.switched(("muon", recipes["muon"]), on=False))
    assert without["muon-qk_norm"] == recipes["no-qk-norm"]
    with pytest.raises(ValueError, match="no field 'batches'"):
        lab.recipe_of("batches:1")
