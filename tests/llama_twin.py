"""A tiny Llama of transformers and the same weights in our GPT, for tests that compare with PEFT."""

from typing import TYPE_CHECKING

import torch

from flatout.config.schema import ModelConfig
from flatout.model.gpt import GPT, build_model

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

VOCAB, CONTEXT = 97, 24


def build_llama(seed: int = 0, *, layers: int = 2, mlp_width: int = 40) -> "LlamaForCausalLM":
    from transformers import LlamaConfig, LlamaForCausalLM  # here: every process that collects tests would pay

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=mlp_width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def our_twin(theirs: "LlamaForCausalLM") -> GPT:
    """Our GPT with the weights of a Llama that carries no adapter yet."""
    config = theirs.config
    ours = build_model(
        ModelConfig(
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            mlp_width=config.intermediate_size,
            context=CONTEXT,
            qk_norm=False,
            tied=False,
        ),
        VOCAB,
    )
    found = dict(theirs.named_parameters())
    weights = {
        "embedding.weight": found["model.embed_tokens.weight"],
        "norm.weight": found["model.norm.weight"],
        "head.weight": found["lm_head.weight"],
    }
    for layer in range(config.num_hidden_layers):
        there, here = f"model.layers.{layer}", f"blocks.{layer}"
        qkv = [found[f"{there}.self_attn.{name}_proj.weight"] for name in "qkv"]
        gate_up = [found[f"{there}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        weights |= {
            f"{here}.attention_norm.weight": found[f"{there}.input_layernorm.weight"],
            f"{here}.mlp_norm.weight": found[f"{there}.post_attention_layernorm.weight"],
            f"{here}.attention.qkv.weight": torch.cat(qkv),
            f"{here}.attention.out.weight": found[f"{there}.self_attn.o_proj.weight"],
            f"{here}.mlp.up.weight": torch.cat(gate_up),
            f"{here}.mlp.out.weight": found[f"{there}.mlp.down_proj.weight"],
        }
    expected = dict(ours.named_parameters())
    assert expected.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(weights[name])
    return ours


def tokens(seed: int = 1, rows: int = 3) -> torch.Tensor:
    return torch.randint(VOCAB, (rows, CONTEXT), generator=torch.Generator().manual_seed(seed))
