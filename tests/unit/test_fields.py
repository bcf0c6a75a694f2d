"""Every field of the model section is declared once, and what is declared for export agrees with the schema."""

from collections import Counter
from pathlib import Path

import pytest

from flatout.config.schema import ModelConfig
from flatout.errors import CheckpointError
from flatout.model import fields, hub
from flatout.model.families import DEFAULTS, HubValues
from flatout.model.fields import FEATURES, RESIDUAL_SCALE, Format, ModelFeature
from flatout.model.gpt import build_model, empty_model
from flatout.model.hub import description_of
from flatout.model.hub_folder import export_huggingface, pieces_of

DEFAULT = ModelConfig()


def test_every_field_belongs_to_one_feature():
    owners = Counter(field for feature in FEATURES for field in feature.fields)
    known = set(ModelConfig.model_fields)
    missing, unknown = sorted(known - owners.keys()), sorted(owners.keys() - known)
    twice = sorted(field for field, count in owners.items() if count > 1)
    assert not missing, f"declare {missing} in model/fields.py: see 'Adding a model field' in docs/extending.md"
    assert not unknown, f"model/fields.py declares {unknown}, which ModelConfig does not have"
    assert not twice, f"model/fields.py declares {twice} more than once"


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.fields[0])
def test_a_feature_is_stated_by_a_format_or_says_why_not(feature: ModelFeature):
    assert feature.no_export or feature.llama != Format(), f"{feature.fields}: say how it is exported, or why not"
    assert set(feature.without) <= set(feature.fields)
    # Where a config.json says nothing of it, a model that is read must be without it.
    assert all(getattr(DEFAULT, field) == value for field, value in feature.without.items())


@pytest.mark.parametrize("kind", DEFAULTS)
def test_formats_set_only_fields_of_their_own_feature(kind: str):
    stated = {
        "n_layer": 2, "n_embd": 8, "n_head": 2, "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
        "intermediate_size": 16,
        "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    }  # fmt: skip
    if kind == "phi3":
        stated["rope_scaling"] = {"rope_type": "longrope", "short_factor": [2.0]}
    for feature in FEATURES:
        assert set(feature.format(kind).fields(HubValues(stated, Path(), kind))) <= set(feature.fields)


def test_the_defaults_of_the_family_gpt_can_be_exported():
    assert description_of(DEFAULT, 11, dtype="float32")["model_type"] == "qwen3"


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "gpt2"},
        {"kv_heads": 2, "tied": False},
        {"bias": True, "qk_norm": False},
        {"qkv_bias": True, "qk_norm": False},
        {"head_size": 6},
    ],
    ids=str,
)
def test_their_tensors_cover_each_parameter_exactly_once(changes: dict):
    config = ModelConfig(layers=3, width=32, heads=4, context=16, **changes)
    parameters = dict(empty_model(config, 11, device="meta").named_parameters())
    covered = Counter[str]()
    for piece in pieces_of(config).values():
        covered[piece.name] += piece.of(parameters[piece.name]).numel()
    assert covered == {name: parameter.numel() for name, parameter in parameters.items()}


def test_a_feature_that_no_format_has_is_refused_by_name_in_every_family(monkeypatch, tmp_path):
    """As a new field would be: `states` stands for it, which no format states and which both families may have."""
    gate = ModelFeature(fields=("states",), without={"states": 128}, no_export="nobody else has such a gate")
    monkeypatch.setattr(hub, "FEATURES", (*fields.FEATURES, gate))
    for family in ("gpt", "gpt2"):
        assert description_of(ModelConfig(family=family), 11, dtype="float32")
        model = build_model(ModelConfig(family=family, layers=1, width=8, heads=2, context=8, states=24), 11)
        with pytest.raises(CheckpointError, match=r"no such model with model\.states=24") as error:
            export_huggingface(model, tmp_path / family)
        assert error.value.hint.startswith("nobody else has such a gate; ")
        assert "trained with model.states=128 can be exported" in error.value.hint


def test_a_refusal_says_why():
    with pytest.raises(CheckpointError, match=r"model\.residual_scale=0\.1") as error:
        description_of(ModelConfig(residual_scale=0.1), 11, dtype="float32")
    assert RESIDUAL_SCALE.no_export in error.value.hint
