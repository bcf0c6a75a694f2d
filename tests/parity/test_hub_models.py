"""A Hugging Face model read into ours is that model: logits, every gradient, and the way back, against transformers."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flatout.config.schema import ModelConfig
from flatout.errors import CheckpointError
from flatout.model.execution import Execution
from flatout.model.families import SUPPORTED
from flatout.model.gpt import GPT, build_model
from flatout.model.hub import model_type_of, read_description
from flatout.model.hub_folder import export_huggingface, pieces_of
from flatout.model.operations import scaled_rates
from tests.hub_folders import from_huggingface
from tests.parity.checking import DEVICES

CONTEXT = 48
SHAPE = {
    "hidden_size": 60, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "vocab_size": 211, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 300.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 300.0, "partial_rotary_factor": 0.6,
    "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 3.0], "long_factor": [1.0, 2.0, 4.0, 8.0, 8.0, 9.0],
}  # fmt: skip
GEMMA3 = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rms_norm_eps": 1e-3}),
    "llama-tied-heads-of-8": ("Llama", {"tie_word_embeddings": True, "head_dim": 8, "vocab_size": 257}),
    "llama-3.1": ("Llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 6}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-wide-window": ("Mistral", {"sliding_window": CONTEXT, "head_dim": 16, "vocab_size": 97}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 3}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "vocab_size": 101, "rms_norm_eps": 1e-2}),
    "qwen3": ("Qwen3", {"head_dim": 14}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "pad_token_id": None}),
    "smollm3-untied": ("SmolLM3", {"no_rope_layers": [0, 1, 1], "tie_word_embeddings": False, "pad_token_id": None}),
    "olmo2": ("Olmo2", {"pad_token_id": None}),
    "olmo2-tied": ("Olmo2", {"tie_word_embeddings": True, "num_key_value_heads": 6, "pad_token_id": None,
                             "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}),
    "phi3": ("Phi3", {"pad_token_id": None}),
    "phi3-window": ("Phi3", {"pad_token_id": None, "sliding_window": 7, "tie_word_embeddings": True}),
    "phi4-mini": ("Phi3", {"pad_token_id": None, "num_attention_heads": 3, "num_key_value_heads": 1,
                           "max_position_embeddings": 4 * CONTEXT, "original_max_position_embeddings": CONTEXT,
                           "rope_parameters": LONGROPE}),
    "gemma2": ("Gemma2", {"pad_token_id": None, "head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 17,
                          "attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0, "num_hidden_layers": 4}),
    "gemma2-uncapped": ("Gemma2", {"pad_token_id": None, "head_dim": 10, "query_pre_attn_scalar": 10,
                                   "attn_logit_softcapping": None, "final_logit_softcapping": None,
                                   "tie_word_embeddings": False, "sliding_window": CONTEXT}),
    "gemma3": ("Gemma3", {"pad_token_id": None, "head_dim": 10, "sliding_window": 7, "query_pre_attn_scalar": 17,
                          "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
                          "rope_parameters": GEMMA3}),
    "gemma3-wide-window": ("Gemma3", {"pad_token_id": None, "head_dim": 12, "sliding_window": CONTEXT,
                                      "query_pre_attn_scalar": 12, "tie_word_embeddings": False,
                                      "final_logit_softcapping": 3.0}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 10, "rms_norm_eps": 1e-2}),
}  # fmt: skip


def build_theirs(name: str) -> Any:
    """One of transformers' models, its norms and biases away from ones and zeros so that a mixed-up one shows."""
    import transformers  # here: every process that collects tests would pay

    kind, changes = MODELS[name]
    config = getattr(transformers, f"{kind}{'Text' if kind == 'Gemma3' else ''}Config")(**SHAPE | changes)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    theirs = build_theirs(request.param)
    folder = tmp_path_factory.mktemp("hub") / request.param
    theirs.save_pretrained(folder)
    return theirs, folder


def tokens(vocab: int) -> torch.Tensor:
    return torch.randint(vocab, (2, CONTEXT), generator=torch.Generator().manual_seed(1))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def load_theirs(folder: Path, **options: Any) -> Any:
    """Loaded by transformers, which must find every tensor and no other."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", **options
    )
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


def test_logits_and_all_gradients_agree(pair):
    theirs, folder = pair
    ours = from_huggingface(folder)
    x = tokens(ours.vocab)
    targets = x.roll(-1, dims=1)
    with torch.no_grad():
        assert distance(ours.eval().logits(x), theirs(x).logits) < 5e-6
    theirs.zero_grad()
    loss = torch.nn.functional.cross_entropy(theirs(x).logits.flatten(0, 1), targets.flatten())
    loss.backward()
    mine = ours.train()(x, targets) / targets.numel()
    mine.backward()
    assert mine.item() == pytest.approx(loss.item(), rel=1e-6)
    gradients: dict[str, Any] = {name: parameter.grad for name, parameter in ours.named_parameters()}
    covered = dict.fromkeys(gradients, 0)
    pieces = pieces_of(ours.config)
    for name, parameter in theirs.named_parameters():
        piece = pieces[name.removeprefix("model.")]
        part = piece.of(gradients[piece.name])
        covered[piece.name] += part.numel()
        assert distance(part, parameter.grad) < 2e-5, name
    assert covered == {name: gradient.numel() for name, gradient in gradients.items()}, "every value was compared"


def test_a_round_trip_changes_nothing(pair, tmp_path):
    theirs, folder = pair
    ours = from_huggingface(folder).eval()
    export_huggingface(ours, tmp_path / "out", source=read_description(folder))
    x = tokens(ours.vocab)
    with torch.no_grad():
        assert torch.equal(load_theirs(tmp_path / "out")(x).logits, theirs(x).logits)
        assert torch.equal(from_huggingface(tmp_path / "out").eval().logits(x), ours.logits(x))
    before, after = (json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "out"))
    kinds = {"dtype", "torch_dtype"}
    assert {k: v for k, v in after.items() if k not in kinds} == {k: v for k, v in before.items() if k not in kinds}


def test_export_without_the_source_computes_the_same(pair, tmp_path):
    """A description made from our model alone; mistral becomes llama, which is the same without a window."""
    theirs, folder = pair
    ours = from_huggingface(folder).eval()
    if "W" in ours.config.kinds and theirs.config.model_type in ("mistral", "qwen2", "qwen3"):
        with pytest.raises(CheckpointError, match=r"no such model with model\.pattern"):
            export_huggingface(ours, tmp_path / "out", end_of_text=2)
        return
    export_huggingface(ours, tmp_path / "out", end_of_text=2)
    again = load_theirs(tmp_path / "out")
    assert again.config.model_type == theirs.config.model_type.replace("mistral", "llama")
    x = tokens(ours.vocab)
    with torch.no_grad():
        assert distance(again(x).logits, theirs(x).logits) < 1e-6
    assert read_description(tmp_path / "out").config == ours.config


@pytest.mark.parametrize("name", ["llama-tied-heads-of-8", "qwen2", "olmo2", "phi3", "gemma2", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_files_are_read_as_they_are(name, dtype, tmp_path):
    theirs = build_theirs(name).to(dtype)
    theirs.save_pretrained(tmp_path / "narrow")
    stored = load_file(tmp_path / "narrow" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    wide = from_huggingface(tmp_path / "narrow")
    kept = from_huggingface(tmp_path / "narrow", dtype=dtype)
    for (name, a), (_, b) in zip(wide.named_parameters(), kept.named_parameters(), strict=True):
        assert (a.dtype, b.dtype) == (torch.float32, dtype)
        assert torch.equal(a, b.float()), name
    assert kept.rotary is not None
    assert kept.rotary.cos_TD.dtype == torch.float32
    x = tokens(wide.vocab)
    with torch.no_grad():
        expected = load_theirs(tmp_path / "narrow", dtype=torch.float32)(x).logits
        assert distance(wide.eval().logits(x), expected) < 1e-5
        with torch.autocast("cpu", torch.bfloat16):
            assert distance(kept.eval().logits(x), expected) < 0.03
    export_huggingface(kept, tmp_path / "out", dtype=dtype, source=read_description(tmp_path / "narrow"))
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(stored[name], again[name]) for name in stored), "bit for bit"


def test_shards_are_read_and_written(tmp_path, monkeypatch):
    theirs = build_theirs("qwen2")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    assert not (tmp_path / "theirs" / "model.safetensors").exists()
    ours = from_huggingface(tmp_path / "theirs").eval()
    x = tokens(ours.vocab)
    with torch.no_grad():
        assert distance(ours.logits(x), theirs(x).logits) < 1e-5
        monkeypatch.setattr("flatout.model.hub_folder.SHARD_BYTES", 100_000)
        export_huggingface(ours, tmp_path / "ours")
        files = sorted(path.name for path in (tmp_path / "ours").glob("*.safetensors"))
        assert len(files) > 2
        assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
        assert max((tmp_path / "ours" / name).stat().st_size for name in files) < 103_000
        assert distance(load_theirs(tmp_path / "ours")(x).logits, theirs(x).logits) < 1e-6
        assert torch.equal(from_huggingface(tmp_path / "ours").eval().logits(x), ours.logits(x))


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama-3.1", "qwen2", "qwen3"])
def test_our_kernels_compute_the_same(name, device, tmp_path):
    theirs = build_theirs(name)
    theirs.save_pretrained(tmp_path / "m")
    how = Execution(kernels="triton", loss="fused")
    ours = from_huggingface(tmp_path / "m", device=device, execution=how)
    x = tokens(ours.vocab)[:, :5]
    targets = x.roll(-1, dims=1)
    loss = torch.nn.functional.cross_entropy(theirs(x).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    mine = ours.train()(x.to(device), targets.to(device))
    mine.backward()
    assert mine.item() == pytest.approx(loss.item(), rel=2e-6)
    gradients: dict[str, Any] = {name: parameter.grad for name, parameter in ours.named_parameters()}
    pieces = pieces_of(ours.config)
    for name, parameter in theirs.named_parameters():
        piece = pieces[name.removeprefix("model.")]
        assert distance(piece.of(gradients[piece.name]).cpu(), parameter.grad) < 5e-5, name


@pytest.mark.gpu
def test_weights_go_straight_to_the_device(tmp_path):
    build_theirs("qwen3").save_pretrained(tmp_path / "m")
    there = from_huggingface(tmp_path / "m", device="cuda", dtype=torch.bfloat16)
    here = from_huggingface(tmp_path / "m", dtype=torch.bfloat16)
    for (name, a), (_, b) in zip(there.named_parameters(), here.named_parameters(), strict=True):
        assert a.is_cuda
        assert torch.equal(a.cpu(), b), name
    assert there.rotary is not None
    assert there.rotary.cos_TD.is_cuda
    x = tokens(there.vocab)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        mine = there.eval().logits(x.cuda()).cpu()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert distance(mine, here.eval().logits(x)) < 0.03


# --- our own models ---------------------------------------------------------------------------------------------------

BARE = {"norm": "plain-rmsnorm", "qk_norm": 1.2, "embedding_norm": True, "tied": False, "kv_heads": 2}
BARE |= {"zero_init": True}
OWN: dict[str, tuple[dict[str, Any], str]] = {
    "as it comes": ({}, "qwen3"),
    "wide heads": ({"head_size": 12, "kv_heads": 2, "tied": False}, "qwen3"),
    "no weights in norms": (BARE, "qwen3"),
    "a scale, and weights in norms": ({"qk_norm": 0.8, "embedding_norm": True, "tied": False}, "qwen3"),
    "without norms of queries": ({"qk_norm": False, "tied": False}, "llama"),
    "stretched": ({"qk_norm": False, "rope_scaling": "llama3", "rope_original_context": 16}, "llama"),
    "stretched alike": ({"rope_scaling": "linear", "rope_factor": 2.5}, "qwen3"),
    "biases": ({"qk_norm": False, "bias": True}, "llama"),
    "biases of queries, keys and values": ({"qk_norm": False, "qkv_bias": True, "kv_heads": 2}, "qwen2"),
    "gpt2": ({"family": "gpt2"}, "gpt2"),
}


def lively(**changes: Any) -> GPT:
    config = ModelConfig(**{"layers": 2, "width": 32, "heads": 4, "context": CONTEXT, **changes})
    model = build_model(config, 67, seed=3).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", OWN)
def test_our_own_models_run_in_transformers(name, tmp_path):
    changes, kind = OWN[name]
    ours = lively(**changes)
    assert model_type_of(ours.config) == kind
    export_huggingface(ours, tmp_path / "out", end_of_text=3)
    theirs = load_theirs(tmp_path / "out")
    assert (theirs.config.model_type, theirs.config.eos_token_id) == (kind, 3)
    x = tokens(ours.vocab)
    with torch.no_grad():
        assert distance(theirs(x).logits, ours.logits(x)) < 1e-5
        assert (theirs(x).logits - ours.logits(x)).abs().max() < 1e-4


# What transformers itself takes for keys that a file does not have.
@pytest.mark.parametrize("kind", [kind for kind in SUPPORTED if kind != "gpt2"])
@pytest.mark.parametrize("old", [False, True], ids=["as transformers 5", "as transformers 4"])
def test_missing_keys_mean_what_they_mean_to_transformers(kind, old, tmp_path):
    values = {
        "model_type": kind, "vocab_size": 512, "hidden_size": 1024, "num_hidden_layers": 7, "num_attention_heads": 32,
        "intermediate_size": 300,
    }  # fmt: skip
    if old:
        scaling = None if kind == "phi3" else {"type": "linear", "rope_type": "linear", "factor": 2.0}
        values |= {"rope_theta": 7000.0, "rope_scaling": scaling, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    from transformers import AutoConfig

    theirs = AutoConfig.from_pretrained(tmp_path)
    ours = read_description(tmp_path, context=2000)
    assert ours.config.norm_eps == theirs.rms_norm_eps
    assert (ours.config.kv_heads or ours.config.heads) == theirs.num_key_value_heads
    assert ours.config.size == getattr(theirs, "head_dim", 32)
    assert ours.config.logit_cap == getattr(theirs, "final_logit_softcapping", None)
    assert ours.config.attention_cap == getattr(theirs, "attn_logit_softcapping", None)
    assert (ours.config.score_divisor or ours.config.size) == getattr(theirs, "query_pre_attn_scalar", ours.config.size)
    if kind == "smollm3":
        assert [kind != "N" for kind in ours.config.kinds] == [bool(one) for one in theirs.no_rope_layers]
    assert ours.config.tied == theirs.tie_word_embeddings
    rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    assert (ours.config.rope_base, ours.config.rope_scaling or "default") == (rope["rope_theta"], rope["rope_type"])
    if kind == "gemma3_text":
        assert ours.config.rope_local_base == theirs.rope_parameters["sliding_attention"]["rope_theta"]
        assert ["WA"[kind == "full_attention"] for kind in theirs.layer_types] == list(ours.config.kinds)
    assert ours.begin_of_text == theirs.bos_token_id
    assert ours.end_of_text == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.dtype == ("bfloat16" if old else None)
    with pytest.raises(CheckpointError, match=f"{theirs.max_position_embeddings:,}"):
        read_description(tmp_path, context=theirs.max_position_embeddings + 1)


def test_stretched_frequencies_are_those_of_llama_3():
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = {**LLAMA3, "rope_theta": 500_000.0, "factor": 32.0, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(**SHAPE | {"head_dim": 64, "rope_parameters": given})
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    rates = 500_000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    mine = scaled_rates(rates, ModelConfig(rope_scaling="llama3", rope_factor=32.0, rope_original_context=8192))
    assert torch.allclose(mine.float(), expected, rtol=2e-6, atol=0)
    assert len({bool(a == b) for a, b in zip(mine, rates, strict=True)}) == 2, "some are slowed, some are not"


# --- real weights -----------------------------------------------------------------------------------------------------

DATA = os.environ.get("FLATOUT_TEST_DATA", "")
STORIES = Path(DATA) / "weights" / "stories260K"


@pytest.mark.skipif(not DATA or not STORIES.is_dir(), reason="FLATOUT_TEST_DATA names no folder with real weights")
def test_real_weights(tmp_path):
    theirs = load_theirs(STORIES)
    ours = from_huggingface(STORIES).eval()
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    text = theirs.generate(torch.tensor([[1]]), max_new_tokens=200, do_sample=False)
    with torch.no_grad():
        logits, expected = ours.logits(text), theirs(text).logits
        assert distance(logits, expected) < 1e-5
        loss = float(ours(text[:, :-1], text[:, 1:]) / (text.shape[1] - 1))
    assert loss < 1.0, "a trained model knows its own greedy text"
    export_huggingface(ours, tmp_path / "out", source=read_description(STORIES))
    with torch.no_grad():
        assert torch.equal(load_theirs(tmp_path / "out")(text).logits, expected)
