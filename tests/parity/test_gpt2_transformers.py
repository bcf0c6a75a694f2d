"""Our GPT-2 is GPT-2: the same weights give the same logits and gradients in transformers, both ways."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flatout.config.schema import ModelConfig
from flatout.errors import CheckpointError
from flatout.model.gpt import build_model
from flatout.model.hub_folder import export_huggingface
from tests.hub_folders import from_huggingface

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

VOCAB, CONTEXT = 211, 48


@pytest.fixture(scope="module")
def theirs() -> "GPT2LMHeadModel":
    from transformers import GPT2Config, GPT2LMHeadModel  # here: every process that collects tests would pay

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=CONTEXT, n_embd=60, n_layer=3, n_head=5, bos_token_id=0, eos_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():  # away from initial zeros and ones, so that a mixed-up bias or norm shows
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def folder(theirs: "GPT2LMHeadModel", tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2")
    theirs.save_pretrained(path)
    return path


def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (3, CONTEXT), generator=torch.Generator().manual_seed(1))


def test_logits_and_gradients_agree(theirs, folder):
    ours = from_huggingface(folder).eval()
    x = tokens()
    targets = x.roll(-1, dims=1)
    assert (ours.logits(x) - theirs(x).logits).abs().max() < 1e-4
    theirs.zero_grad()
    loss = torch.nn.functional.cross_entropy(theirs(x).logits.flatten(0, 1), targets.flatten())
    loss.backward()
    mine = ours(x, targets) / targets.numel()
    mine.backward()
    assert abs(mine - loss) < 1e-5
    names = {
        "embedding.weight": theirs.transformer.wte.weight.grad,
        "positions.weight": theirs.transformer.wpe.weight.grad,
        "norm.bias": theirs.transformer.ln_f.bias.grad,
    }
    for index, block in enumerate(theirs.transformer.h):
        names |= {
            f"blocks.{index}.attention_norm.weight": block.ln_1.weight.grad,
            f"blocks.{index}.attention.qkv.weight": block.attn.c_attn.weight.grad.T,
            f"blocks.{index}.attention.qkv.bias": block.attn.c_attn.bias.grad,
            f"blocks.{index}.attention.out.weight": block.attn.c_proj.weight.grad.T,
            f"blocks.{index}.mlp_norm.bias": block.ln_2.bias.grad,
            f"blocks.{index}.mlp.up.weight": block.mlp.c_fc.weight.grad.T,
            f"blocks.{index}.mlp.out.weight": block.mlp.c_proj.weight.grad.T,
            f"blocks.{index}.mlp.out.bias": block.mlp.c_proj.bias.grad,
        }
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    for name, expected in names.items():
        relative = (gradients[name] - expected).norm() / expected.norm()
        assert relative < 1e-4, (name, float(relative))


def test_export_loads_in_transformers_and_comes_back(theirs, folder, tmp_path):
    ours = from_huggingface(folder).eval()
    export_huggingface(ours, tmp_path / "out", end_of_text=0)
    from transformers import GPT2LMHeadModel

    loaded: Any = GPT2LMHeadModel.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    again, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    x = tokens()
    assert torch.equal(again.eval()(x).logits, theirs(x).logits), "the weights made the round trip unchanged"
    back = from_huggingface(tmp_path / "out").eval()
    assert torch.equal(back.logits(x), ours.logits(x))


def test_fresh_weights_have_gpt2s_statistics():
    model = build_model(ModelConfig(family="gpt2", layers=8, width=256, heads=4, context=64), 1000, seed=0)
    weights = dict(model.named_parameters())
    assert weights["blocks.0.attention.qkv.weight"].std().item() == pytest.approx(0.02, rel=0.03)
    assert weights["blocks.3.mlp.out.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert weights["embedding.weight"].std().item() == pytest.approx(0.02, rel=0.03)
    assert weights["blocks.5.mlp.up.bias"].abs().max() == 0


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b'{"model_type": "llama"}'),
        ("config.json", b'{"model_type": "gpt2", "n_layer": 3, "n_embd": 60, "n_head": 7, "vocab_size": 211}'),
        ("model.safetensors", b"not safetensors"),
    ],
)
def test_a_damaged_folder_is_refused(folder, tmp_path, file, content):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError):
        from_huggingface(tmp_path)
