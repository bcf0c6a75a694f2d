"""Fields of the model section that say how it starts, which of them go together, and what becomes of an export."""

import functools
import math
import operator

import pytest
import torch

import flatout
from flatout.config.schema import ModelConfig
from flatout.config.unused import check_used
from flatout.errors import ConfigError
from flatout.model.gpt import GPT, build_model
from flatout.model.hub import read_description
from flatout.model.hub_folder import export_huggingface, folded_weights, own_fingerprint, weights_fingerprint
from tests.hub_folders import from_huggingface

SHAPE = {"layers": 2, "width": 32, "heads": 4, "context": 16}
BARE = {"norm": "plain-rmsnorm", "qk_norm": 1.2, "embedding_norm": True, "tied": False}


def built(**changes) -> GPT:
    return build_model(ModelConfig(**SHAPE, **changes), 31, seed=7)


@pytest.mark.parametrize(
    ("changes", "others"),
    [
        ({"zero_init": True}, (".attention.out.weight", ".mlp.out.weight", "embedding.weight")),
        ({"zero_init": True, "tied": False}, (".attention.out.weight", ".mlp.out.weight", "embedding.weight")),
        ({"norm": "plain-rmsnorm", "qk_norm": 1.2, "embedding_norm": True}, ()),
    ],
    ids=str,
)
def test_a_field_changes_no_weight_but_its_own(changes, others):
    model = built(**changes)
    plain, changed = dict(built(tied=model.config.tied).named_parameters()), dict(model.named_parameters())
    for name, weight in changed.items():
        if not name.endswith(others or "nothing"):
            assert torch.equal(weight, plain[name]), name
        elif name != "embedding.weight":
            assert not weight.any(), name
        else:
            own = 0.5 / math.sqrt(SHAPE["width"]) if model.config.tied else 1.0
            assert torch.allclose(weight, plain[name] * own / 0.02)
    gone = {name for name in plain if "norm" in name} if "norm" in changes else set()
    assert plain.keys() - changed.keys() == gone


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["family=gpt2", "norm=plain-rmsnorm"], "family gpt2 fixes norm to layernorm, not plain-rmsnorm"),
    ],
    ids=str,
)
def test_fields_that_do_not_go_together_are_refused(words, says):
    with pytest.raises(ConfigError, match=says):
        check_used(flatout.load_config(None, [f"model.{word}" for word in words]))


def test_a_norm_of_queries_and_keys_has_its_scale():
    assert flatout.load_config().config.model.qk_scale == 1.2
    assert flatout.load_config(None, ["model.qk_norm=2"]).config.model.qk_scale == 2.0
    assert flatout.load_config(None, ["model.qk_norm=true"]).config.model.qk_scale == 1.0
    assert flatout.load_config(None, ["model.family=gpt2"]).config.model.qk_scale == 1.0


def test_an_exported_model_is_the_same_model(tmp_path):
    """To who starts from it, and to adapters, which know their base by a hash."""
    model, tokens = built(**BARE).eval(), torch.arange(16)[None]
    export_huggingface(model, tmp_path / "out")
    back = from_huggingface(tmp_path / "out").eval()
    assert torch.allclose(back.logits(tokens), model.logits(tokens), rtol=1e-5, atol=1e-6)
    weights = {name: x.detach() for name, x in model.named_parameters()}
    own = own_fingerprint(weights, model.config, portable=True)
    assert own == weights_fingerprint(read_description(tmp_path / "out"))


def test_normed_rows_have_the_same_bits_on_every_machine():
    """Those that Python's own arithmetic gives: else the hash of a base were another where its export is made."""
    model = built(**BARE)
    table = model.embedding.weight.detach()
    factors = []
    for row in table.tolist():
        squares = functools.reduce(operator.add, (value * value for value in row))  # sum() compensates, from 3.12
        factors.append(1.0 / math.sqrt(squares / 32 + model.config.norm_eps))
    weights = folded_weights(model.config, {"embedding.weight": table})
    expected = table * torch.tensor(factors, dtype=torch.float64).float()[:, None]
    assert torch.equal(weights["embedding.weight"], expected)
