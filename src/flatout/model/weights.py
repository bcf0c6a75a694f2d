"""Weights to and from disk: safetensors only, one name per tensor, shapes checked before anything is overwritten."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flatout.config.schema import ModelConfig
from flatout.errors import CheckpointError
from flatout.model.gpt import GPT, build_model


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, on the CPU."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors: {error}", "check the path, or fetch the file again"
        ) from error


def assign_weights(model: torch.nn.Module, tensors: dict[str, Tensor], origin: str) -> None:
    """Copies tensors into the model; names and shapes must match exactly."""
    expected = dict(model.named_parameters())
    for name in sorted(expected.keys() - tensors.keys()):
        raise CheckpointError(f"{origin} has no tensor {name}", "it belongs to another model; check the model section")
    for name in sorted(tensors.keys() - expected.keys()):
        raise CheckpointError(
            f"{origin} holds an unknown tensor {name}", "it belongs to another model; check the model section"
        )
    for name, parameter in expected.items():
        if tensors[name].shape != parameter.shape:
            raise CheckpointError(
                f"{origin}: {name} has shape {tuple(tensors[name].shape)}, the model needs {tuple(parameter.shape)}",
                "check layers, width, heads, context and vocab in the model section",
            )
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(tensors[name])


def model_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """The trained tensors by name; a tied head appears once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


# --- Hugging Face GPT-2 -----------------------------------------------------------------------------------------------

# Hugging Face stores GPT-2's projections as "Conv1D": the transpose of a linear layer's weight.
_BLOCK_NAMES = {
    "attention_norm": ("ln_1", False),
    "attention.qkv": ("attn.c_attn", True),
    "attention.out": ("attn.c_proj", True),
    "mlp_norm": ("ln_2", False),
    "mlp.up": ("mlp.c_fc", True),
    "mlp.out": ("mlp.c_proj", True),
}


def _huggingface_names(layers: int) -> dict[str, tuple[str, bool]]:
    """Our name -> (Hugging Face name, transposed)."""
    names = {"embedding.weight": ("wte.weight", False), "positions.weight": ("wpe.weight", False)}
    for layer in range(layers):
        for ours, (theirs, transposed) in _BLOCK_NAMES.items():
            for kind in ("weight", "bias"):
                names[f"blocks.{layer}.{ours}.{kind}"] = (f"h.{layer}.{theirs}.{kind}", transposed and kind == "weight")
    for kind in ("weight", "bias"):
        names[f"norm.{kind}"] = (f"ln_f.{kind}", False)
    return names


def export_huggingface(model: GPT, folder: Path, *, end_of_text: int | None = None) -> None:
    """Writes config.json and model.safetensors that `transformers` loads as GPT2LMHeadModel."""
    config = model.config
    if config.family != "gpt2":
        raise CheckpointError(
            f"only family gpt2 has a Hugging Face twin, not {config.family}", "train with model.family=gpt2 to export"
        )
    folder.mkdir(parents=True, exist_ok=True)
    ours = model_tensors(model)
    theirs: dict[str, Tensor] = {}
    for name, (target, transposed) in _huggingface_names(config.layers).items():
        tensor = ours[name].float().cpu()
        theirs[f"transformer.{target}"] = (tensor.T if transposed else tensor).contiguous()
    save_file(theirs, folder / "model.safetensors", metadata={"format": "pt"})
    description = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocab,
        "n_positions": config.context,
        "n_ctx": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "tie_word_embeddings": True,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def read_huggingface_config(folder: Path) -> tuple[ModelConfig, int]:
    """(model section, vocabulary) of a Hugging Face GPT-2 folder; refuses what is not plain GPT-2."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}", "name a folder with config.json and model.safetensors"
        ) from error
    if not isinstance(values, dict) or values.get("model_type") != "gpt2":
        kind = values.get("model_type") if isinstance(values, dict) else None
        raise CheckpointError(f"{path} describes a {kind!r} model, not gpt2", "only GPT-2 weights can be loaded here")
    fixed = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_inner": None, "scale_attn_weights": True}
    for key, needed in fixed.items():
        found = values.get(key, needed)
        if found != needed and not (key == "n_inner" and found == 4 * values.get("n_embd", 0)):
            raise CheckpointError(
                f"{path}: {key} is {found!r}, GPT-2 has {needed!r}", "only plain GPT-2 weights can be loaded"
            )
    try:
        config = ModelConfig(
            family="gpt2",
            layers=values["n_layer"],
            width=values["n_embd"],
            heads=values["n_head"],
            context=values.get("n_positions", 1024),
            dropout=values.get("resid_pdrop", 0.1),
        )
        return config, int(values["vocab_size"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is not a usable GPT-2 description: {error}", "fetch the folder again") from error


def load_huggingface(model: GPT, folder: Path) -> None:
    """Fills a gpt2-family model from a Hugging Face folder (safetensors only, nothing executed)."""
    path = folder / "model.safetensors"
    found = {name.removeprefix("transformer."): tensor for name, tensor in read_safetensors(path).items()}
    tensors: dict[str, Tensor] = {}
    for name, (source, transposed) in _huggingface_names(model.config.layers).items():
        if source not in found:
            raise CheckpointError(f"{path} has no tensor {source}", "the folder must hold GPT-2 weights of this size")
        tensors[name] = found[source].T if transposed else found[source]
    assign_weights(model, tensors, str(path))


def from_huggingface(folder: Path) -> GPT:
    """A GPT-2 model on the CPU, exactly as stored in the folder."""
    config, vocab = read_huggingface_config(folder)
    model = build_model(config, vocab)
    load_huggingface(model, folder)
    return model
