"""Hugging Face folders: what is read from them, where they are found, and one clear error for each that is no good."""

import builtins
import itertools
import json
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import flatout
from flatout.config.catalogue import shipped_names
from flatout.config.schema import ModelConfig
from flatout.config.yaml_loader import format_value
from flatout.data.prepare import data_folder
from flatout.errors import CheckpointError, UsageError, UserError
from flatout.model.gpt import GPT, build_model
from flatout.model.hub import check_same_model, model_type_of, read_description
from flatout.model.hub_folder import FoundModel, export_huggingface, find_model, load_huggingface
from tests.chat_models import as_a_stranger
from tests.hub_folders import from_huggingface

VOCAB = 41
SHAPE = {"layers": 2, "width": 24, "heads": 4, "kv_heads": 2, "context": 32, "mlp_width": 40}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"qk_norm": False, "tied": False},
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "qwen3": {"head_size": 10},
    "smollm3": {"qk_norm": False, "pattern": "AN"},
    "olmo2": {"norm_place": "after", "qk_norm_whole": True, "head_size": 10},
    "phi3": {
        "qk_norm": False,
        "fused_projections": True,
        "pattern": "W",
        "window": 9,
        "rope_share": 0.7,
        "rope_scaling": "longrope",
        "rope_factors": [1.0, 2.5],
        "rope_gain": 1.1,
    },
    "gemma2": {
        "norm": "offset-rmsnorm",
        "norm_place": "both",
        "mlp": "geglu",
        "embedding_scale": 24**0.5,
        "qk_norm": False,
        "attention_cap": 50.0,
        "logit_cap": 30.0,
        "score_divisor": 9,
        "pattern": "WA",
        "window": 5,
    },
    "gemma3_text": {
        "norm": "offset-rmsnorm",
        "norm_place": "both",
        "mlp": "geglu",
        "embedding_scale": 24**0.5,
        "pattern": "WA",
        "window": 40,
        "rope_local_base": 500.0,
        "rope_scaling": "linear",
    },
}


def build(kind: str, seed: int = 1) -> GPT:
    return build_model(ModelConfig(**SHAPE, **KINDS[kind]), VOCAB, seed=seed)


def write(folder: Path, kind: str = "llama", *, shard_bytes: int = 10**9, **options: Any) -> Path:
    with mock.patch("flatout.model.hub_folder.SHARD_BYTES", shard_bytes):
        export_huggingface(build(kind), folder, end_of_text=2, **options)
    return as_a_stranger(folder)


def change(folder: Path, **values: Any) -> None:
    """Other values in config.json; None stays null, ... takes the key out."""
    path = folder / "config.json"
    now = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in now.items() if value is not ...}))


def retensor(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


# --- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_ours_comes_back(kind, tmp_path):
    model = build(kind)
    export_huggingface(model, tmp_path / "out", end_of_text=2)
    found = read_description(tmp_path / "out")
    assert (found.model_type, found.vocab, found.config) == (kind, VOCAB, model.config)
    again = dict(from_huggingface(tmp_path / "out").named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(again[name], parameter), name


def test_facts_beside_the_shape(tmp_path):
    write(tmp_path / "m")
    change(tmp_path / "m", eos_token_id=[7, 8], bos_token_id=5, pad_token_id=-1, torch_dtype="torch.bfloat16")
    (tmp_path / "m" / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    found = read_description(tmp_path / "m")
    assert (found.begin_of_text, found.end_of_text, found.padding) == (5, (7, 8, 9), None)
    assert found.dtype == "bfloat16"
    assert found.values["architectures"] == ["LlamaForCausalLM"]


def test_a_shorter_context_is_the_same_model(tmp_path):
    folder = write(tmp_path / "m")
    x = torch.arange(12)[None]
    with torch.no_grad():
        long, short = from_huggingface(folder), from_huggingface(folder, context=12)
        assert short.config.context == 12
        assert torch.equal(long.logits(x), short.logits(x))
    export_huggingface(short, tmp_path / "out", source=read_description(folder))
    assert read_description(tmp_path / "out").config.context == SHAPE["context"], "the model itself did not shrink"


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention"] * 2}),
        ("llama", {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}),
    ],
)
def test_a_sliding_window_becomes_ours_where_it_is_shorter_than_the_context(kind, values, tmp_path):
    write(tmp_path / "m", kind)
    change(tmp_path / "m", **values)
    found = read_description(tmp_path / "m").config
    assert (found.kinds, found.window) == ("WW", 16)
    short = read_description(tmp_path / "m", context=16)
    assert (short.config.context, short.config.kinds) == (16, "AA")
    check_same_model(short.config, read_description(tmp_path / "m"), "")
    for window in (32, None):
        change(tmp_path / "m", sliding_window=window)
        plain = read_description(tmp_path / "m")
        assert (plain.config.context, plain.config.kinds) == (32, "AA")
        with pytest.raises(CheckpointError, match="pattern 'W' and window 16"):
            check_same_model(found, plain, "")


def test_layers_that_slide_become_a_pattern(tmp_path):
    write(tmp_path / "m", "qwen2")
    change(tmp_path / "m", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    assert read_description(tmp_path / "m").config.kinds == "AW"
    change(tmp_path / "m", layer_types=["sliding_attention", "full_attention"])
    assert read_description(tmp_path / "m").config.kinds == "WA"
    change(tmp_path / "m", layer_types=["sliding_attention"])
    with pytest.raises(CheckpointError, match="layer_types names 1 layers, and there are 2"):
        read_description(tmp_path / "m")


def test_windows_that_no_layer_uses_do_not_matter(tmp_path):
    write(tmp_path / "m", "qwen2")
    plain = read_description(tmp_path / "m").config
    change(tmp_path / "m", use_sliding_window=True, sliding_window=16, max_window_layers=2)
    assert read_description(tmp_path / "m").config == plain
    change(tmp_path / "m", use_sliding_window=False, max_window_layers=0)
    assert read_description(tmp_path / "m").config == plain


@pytest.mark.parametrize("how", ["twice", "as the head only"])
def test_a_shared_matrix_may_be_stored_in_several_ways(how, tmp_path):
    folder = write(tmp_path / "m", "qwen2")
    before = from_huggingface(folder)

    def edit(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        if how == "as the head only":
            del tensors["model.embed_tokens.weight"]

    retensor(folder, edit)
    assert torch.equal(from_huggingface(folder).embedding.weight, before.embedding.weight)


def test_names_without_prefix_and_old_tables_are_read(tmp_path):
    folder = write(tmp_path / "m")
    before = dict(from_huggingface(folder).named_parameters())

    def edit(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)

    retensor(folder, edit)
    for name, parameter in from_huggingface(folder).named_parameters():
        assert torch.equal(before[name], parameter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_are_as_large_as_they_may_be_and_their_index_tells_all_bytes(dtype: torch.dtype, tmp_path: Path):
    most = 2250 * dtype.itemsize
    folder = write(tmp_path / "m", shard_bytes=most, dtype=dtype)
    shards = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    sizes = [[tensor.nbytes for tensor in shard.values()] for shard in shards]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    values = sum(parameter.numel() for parameter in build("llama").parameters())
    assert index["metadata"]["total_size"] == sum(map(sum, sizes)) == dtype.itemsize * values
    assert all(sum(size) <= most for size in sizes)
    assert all(sum(size) + max(following) > most for size, following in itertools.pairwise(sizes))


def test_only_one_stored_tensor_is_held_at_a_time(tmp_path, monkeypatch):
    folder = write(tmp_path / "m", shard_bytes=6000)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = read = 0

    class Watched:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.inner = safe_open(*arguments, **options)

        def __enter__(self) -> "Watched":
            self.file = self.inner.__enter__()
            return self

        def __exit__(self, *reason: Any) -> None:
            self.inner.__exit__(*reason)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def get_tensor(self, name: str) -> torch.Tensor:
            nonlocal most, read
            tensor = self.file.get_tensor(name)
            alive.add(tensor)
            most, read = max(most, len(alive)), read + 1
            return tensor

    monkeypatch.setattr("flatout.model.weights.safe_open", Watched)
    from_huggingface(folder)
    assert read == 2 * 9 + 3, "every tensor once"
    assert most <= 2, "one is read while the name of the last one still holds it"


# --- folders that are no good -----------------------------------------------------------------------------------------


def truncated(folder: Path, share: float) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def reindexed(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


def as_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


Q = "model.layers.1.self_attn.q_proj.weight"
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# What is done to a good folder, and what the error says. The second word chooses shards.
DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json cannot be read: No such file"),
    "config is a folder": (
        lambda f: ((f / "config.json").unlink(), (f / "config.json").mkdir()),
        r"config\.json cannot be read",
    ),
    "config cut off": (lambda f: (f / "config.json").write_text('{"model_type": "lla'), r"not valid JSON"),
    "config is empty": (lambda f: (f / "config.json").write_bytes(b""), r"not valid JSON"),
    "config not UTF-8": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{}"), r"not valid JSON"),
    "config too deep": (lambda f: (f / "config.json").write_text("[" * 100_000), r"not valid JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[1]"), r"holds no JSON object"),
    "no type": (lambda f: change(f, model_type=...), r"a model of type null, which is not supported"),
    "another type": (lambda f: change(f, model_type="mamba"), r"type 'mamba', which is not supported"),
    "type is a list": (lambda f: change(f, model_type=["llama"]), r"not supported"),
    "remote code": (
        lambda f: change(f, model_type="mine", auto_map={"AutoModel": "m.M"}),
        r"type 'mine', which is not supported",
    ),
    "a classifier": (
        lambda f: change(f, architectures=["LlamaForSequenceClassification"]),
        r"LlamaForSequenceClassification', not a language model \(LlamaForCausalLM\)",
    ),
    "quantised": (lambda f: change(f, quantization_config={"bits": 4}), r"the weights are quantised"),
    "no width": (lambda f: change(f, hidden_size=...), r"hidden_size is missing"),
    "width in words": (lambda f: change(f, hidden_size="24"), r"hidden_size is '24', not a whole number"),
    "half a layer": (lambda f: change(f, num_hidden_layers=1.5), r"num_hidden_layers is 1\.5, not a whole number"),
    "no layer": (lambda f: change(f, num_hidden_layers=0), r"num_hidden_layers is 0, not a whole number"),
    "no vocabulary": (lambda f: change(f, vocab_size=...), r"vocab_size is missing"),
    "too many layers": (
        lambda f: change(f, num_hidden_layers=10**6),
        r"num_hidden_layers is 1000000, and Flatout takes at most",
    ),
    "heads do not divide": (lambda f: change(f, num_key_value_heads=3), r"cannot be built: heads 4 is not a multiple"),
    "odd heads": (lambda f: change(f, head_dim=7), r"cannot be built: .* even head_size"),
    "no positions": (lambda f: change(f, max_position_embeddings=-1), r"max_position_embeddings is -1"),
    "eps is text": (lambda f: change(f, rms_norm_eps="1e-5"), r"rms_norm_eps is '1e-5', not a number"),
    "eps is nothing": (lambda f: change(f, rms_norm_eps=0), r"rms_norm_eps is 0, not a number above 0"),
    "another activation": (lambda f: change(f, hidden_act="gelu"), r"hidden_act is 'gelu'"),
    "half of the biases": (lambda f: change(f, attention_bias=True), r"only both or none are supported"),
    "bias is text": (lambda f: change(f, attention_bias="no"), r"attention_bias is 'no', not true or false"),
    "yarn": (lambda f: change(f, rope_scaling={"rope_type": "yarn", "factor": 4.0}), r"of type 'yarn' is not"),
    "longrope": (lambda f: change(f, rope_scaling={"type": "longrope"}), r"of type 'longrope' is not supported"),
    "dynamic": (lambda f: change(f, rope_parameters={"rope_type": "dynamic"}), r"of type 'dynamic' is not supported"),
    "scaling without factor": (lambda f: change(f, rope_scaling={"type": "linear"}), r"factor is missing"),
    "scaling is text": (lambda f: change(f, rope_scaling="llama3"), r"one set for all layers"),
    "scaling by layer": (
        lambda f: change(f, rope_parameters={"full_attention": {"rope_type": "default"}}),
        r"one set for all layers",
    ),
    "scaling upside down": (
        lambda f: change(f, rope_scaling={**ROPE, "high_freq_factor": 0.5}),
        r"rope_low 1\.0 is not below rope_high 0\.5",
    ),
    "half of a head turned": (lambda f: change(f, partial_rotary_factor=0.5), r"partial_rotary_factor is 0\.5"),
    "end of text is text": (lambda f: change(f, eos_token_id="</s>"), r"eos_token_id is '</s>', not a token id"),
    "generation config broken": (
        lambda f: (f / "generation_config.json").write_text("{"),
        r"generation_config\.json is not valid JSON",
    ),
    "tied is text": (lambda f: change(f, tie_word_embeddings="yes"), r"tie_word_embeddings is 'yes'"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"has no model\.safetensors and no"),
    "weights that run code": (as_bin, r"format that can run code when it is read, and no safetensors"),
    "weights empty": (lambda f: truncated(f, 0.0), r"model\.safetensors cannot be read as safetensors"),
    "weights cut in the header": (lambda f: truncated(f, 0.02), r"model\.safetensors cannot be read as safetensors"),
    "weights cut in the data": (lambda f: truncated(f, 0.9), r"model\.safetensors cannot be read as safetensors"),
    "weights are something else": (
        lambda f: (f / "model.safetensors").write_bytes(b"PK\x03\x04" * 100),
        r"cannot be read as safetensors",
    ),
    "a pointer": (
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        r"is a pointer of Git LFS, not the weights",
    ),
    "a tensor missing": (
        lambda f: retensor(f, lambda t: t.pop(Q)),
        r"has no tensor layers\.1\.self_attn\.q_proj\.weight",
    ),
    "no head": (lambda f: retensor(f, lambda t: t.pop("lm_head.weight")), r"has no tensor lm_head\.weight"),
    "a tensor too many": (
        lambda f: retensor(f, lambda t: t.update({Q.replace("weight", "bias"): torch.zeros(24)})),
        r"model\.safetensors holds model\.layers\.1\.self_attn\.q_proj\.bias, which a llama model",
    ),
    "a layer too many": (
        lambda f: change(f, num_hidden_layers=1),
        r"holds model\.layers\.1\.input_layernorm\.weight, which a llama model",
    ),
    "a layer too few": (lambda f: change(f, num_hidden_layers=3), r"has no tensor layers\.2\.input_layernorm"),
    "another shape": (
        lambda f: retensor(f, lambda t: t.update({Q: torch.zeros(24, 23)})),
        r"q_proj\.weight has shape \(24, 23\), .*config\.json needs \(24, 24\)",
    ),
    "transposed": (
        lambda f: retensor(f, lambda t: t.update({Q.replace("q_", "k_"): torch.zeros(24, 12)})),
        r"k_proj\.weight has shape \(24, 12\), .*config\.json needs \(12, 24\)",
    ),
    "a vocabulary of terabytes": (lambda f: change(f, vocab_size=2**40), "vocab_size is 1099511627776, and .* at most"),
    "another vocabulary": (lambda f: change(f, vocab_size=42), r"has shape \(41, 24\), .* needs \(42, 24\)"),
    "eight bits": (
        lambda f: retensor(f, lambda t: t.update({Q: torch.zeros(24, 24, dtype=torch.int8)})),
        r"q_proj\.weight is stored as I8; F32, BF16, F16 can be read",
    ),
    "not a number": (
        lambda f: retensor(f, lambda t: t[Q].fill_(float("nan"))),
        r"model\.safetensors: model\.layers\.1\.self_attn\.q_proj\.weight holds values that are not finite",
    ),
    "one infinity": (
        lambda f: retensor(f, lambda t: t["model.norm.weight"][3:4].fill_(float("inf"))),
        r"model\.norm\.weight holds values that are not finite",
    ),
    "stored twice": (
        lambda f: retensor(f, lambda t: t.update({"norm.weight": torch.ones(24)})),
        r"norm\.weight is stored twice",
    ),
    "two heads for one": (
        lambda f: change(f, tie_word_embeddings=True),
        r"lm_head\.weight differs from model\.embed_tokens\.weight",
    ),
    "shards: one missing": (
        lambda f: (f / "model-00002-of-00006.safetensors").unlink(),
        r"model-00002-of-00006\.safetensors is missing",
    ),
    "shards: one cut": (
        lambda f: (f / "model-00003-of-00006.safetensors").write_bytes(b"\x08"),
        r"model-00003-of-00006\.safetensors cannot be read as safetensors",
    ),
    "shards: index broken": (
        lambda f: (f / "model.safetensors.index.json").write_text("{"),
        r"index\.json is not valid JSON",
    ),
    "shards: index without map": (lambda f: reindexed(f, lambda v: v.pop("weight_map")), r"has no map from tensors"),
    "shards: index points outside": (
        lambda f: reindexed(f, lambda v: v["weight_map"].update({Q: "../model-00001-of-00006.safetensors"})),
        r"not a file of this folder",
    ),
    "shards: index points at code": (
        lambda f: reindexed(f, lambda v: v["weight_map"].update({Q: "weights.bin"})),
        r"not a file of this folder",
    ),
    "shards: index is wrong": (
        lambda f: reindexed(f, lambda v: v["weight_map"].update({Q: "model-00001-of-00006.safetensors"})),
        r"model-00001-of-00006\.safetensors has no tensor model\.layers\.1\.self_attn\.q_proj\.weight",
    ),
    "shards: index lists less": (
        lambda f: reindexed(f, lambda v: v["weight_map"].pop(Q)),
        r"has no tensor layers\.1\.self_attn\.q_proj",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    place = tmp_path_factory.mktemp("good")
    folders = {False: write(place / "whole"), True: write(place / "shards", shard_bytes=9000)}
    assert len(list(folders[True].glob("*.safetensors"))) == 6
    return folders


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_folder_gives_one_clear_error(what, good, tmp_path):
    damage, message = DAMAGED[what]
    for path in good[what.startswith("shards")].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    from_huggingface(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message) as error:
        from_huggingface(tmp_path)
    assert str(tmp_path) in error.value.message, "the file is named"
    assert error.value.hint
    assert error.value.exit_code == 3
    assert len(error.value.message) < 600


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (
            "smollm3",
            {"use_sliding_window": True, "sliding_window": 8},
            "windows are not supported beside no_rope_layers",
        ),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers is \[1\], not a 0 or 1 for each of 2 layers"),
        ("smollm3", {"no_rope_layers": [1, 2]}, "not a 0 or 1"),
        ("smollm3", {"no_rope_layers": 3}, "not a 0 or 1"),
        ("smollm3", {"no_rope_layers": ..., "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        ("olmo2", {"attention_bias": True}, "only both or none"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary scaling of type 'linear'"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "short_factor is null, not a list of numbers"),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "short_factor": [1.0]}},
            "rope_factors has 1 numbers, and heads have 2",
        ),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": ["1", 2]}}, "not a list of numbers"),
        ("phi3", {"original_max_position_embeddings": 1}, "original_max_position_embeddings is 1, not a whole number"),
        ("phi3", {"partial_rotary_factor": 1.5}, "rope_share: "),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu', only gelu_pytorch_tanh is supported"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 2}, "only full and sliding attention"),
        ("gemma2", {"attn_logit_softcapping": "50"}, "attn_logit_softcapping is '50', not a number"),
        ("gemma2", {"attention_bias": True}, "only both or none"),
        ("gemma3_text", {"model_type": "gemma3"}, "a model of type 'gemma3', which is not supported"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, Gemma 3 has none"),
        ("gemma3_text", {"sliding_window_pattern": 0, "layer_types": None}, "sliding_window_pattern is 0"),
        ("gemma3_text", {"rope_parameters": [1]}, "rotary settings .* are not supported"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rotary scaling of type 'linear' in windows",
        ),
        ("gemma3_text", {"rope_local_base_freq": "x"}, "rope_local_base_freq is 'x', not a number"),
        ("phi3", {"partial_rotary_factor": 0.1}, "rope_share 0.1 turns 0 of 6 channels"),
    ],
)
def test_what_a_family_has_beyond_ours_is_refused_by_name(kind, values, message, tmp_path):
    write(tmp_path / "m", kind)
    read_description(tmp_path / "m")
    change(tmp_path / "m", **values)
    with pytest.raises(CheckpointError, match=message):
        read_description(tmp_path / "m")


@pytest.mark.parametrize(
    ("kind", "values"),
    [("smollm3", {"no_rope_layers": [1, 1]}), ("gemma3_text", {"layer_types": ["full_attention"] * 2})],
)
def test_blocks_that_turn_otherwise_are_another_model(kind, values, tmp_path):
    write(tmp_path / "m", kind)
    before = read_description(tmp_path / "m")
    check_same_model(before.config, read_description(tmp_path / "m", context=9), "")
    change(tmp_path / "m", **values)
    with pytest.raises(CheckpointError, match="the model has pattern"):
        check_same_model(before.config, read_description(tmp_path / "m"), "")


def test_longrope_goes_as_far_as_its_short_factors(tmp_path):
    write(tmp_path / "m", "phi3")
    scaling = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [4.0, 8.0]}
    change(tmp_path / "m", max_position_embeddings=128, original_max_position_embeddings=32, rope_scaling=scaling)
    found = read_description(tmp_path / "m").config
    assert (found.context, found.rope_factors) == (32, [1.0, 2.0])
    assert found.rope_gain == pytest.approx((1 + 2 / 5) ** 0.5)
    with pytest.raises(CheckpointError, match="the model has 32 positions, and 33 are asked for"):
        read_description(tmp_path / "m", context=33)


def test_gpt2_with_changes_is_refused(tmp_path):
    model = build_model(ModelConfig(family="gpt2", layers=1, width=16, heads=2, context=8), VOCAB)
    export_huggingface(model, tmp_path / "m")
    as_a_stranger(tmp_path / "m")
    for values, message in [
        ({"activation_function": "relu"}, "activation_function is 'relu'"),
        ({"n_inner": 65}, "n_inner is 65"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is false"),
    ]:
        before = (tmp_path / "m" / "config.json").read_text()
        change(tmp_path / "m", **values)
        with pytest.raises(CheckpointError, match=message):
            read_description(tmp_path / "m")
        (tmp_path / "m" / "config.json").write_text(before)
    change(tmp_path / "m", n_inner=64, activation_function="gelu_pytorch_tanh")
    assert read_description(tmp_path / "m", context=4).config.context == 8, "learned positions stay whole"


def test_values_too_large_for_half_precision_are_told(tmp_path):
    folder = write(tmp_path / "m")
    retensor(folder, lambda t: t[Q].fill_(1e6))
    with pytest.raises(CheckpointError, match=r"q_proj\.weight holds values beyond the range of float16"):
        from_huggingface(folder, dtype=torch.float16)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight holds values that are not finite as float16"):
        export_huggingface(from_huggingface(folder), tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["m"], "nothing half written is left"


def test_a_model_of_another_shape_is_not_filled(tmp_path):
    folder = write(tmp_path / "m")
    before = build("qwen3", seed=5)
    with pytest.raises(CheckpointError, match=r"head_size 10, .* describes null"):
        load_huggingface(before, folder)
    fresh = dict(build("qwen3", seed=5).named_parameters())
    assert all(torch.equal(fresh[name], p) for name, p in before.named_parameters()), "nothing was overwritten"


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"norm": "layernorm", "mlp": "relu2"}, "model.norm=rmsnorm model.mlp=swiglu"),
        ({"positions": "learned", "residual_scale": 0.1}, "model.positions=rope model.residual_scale=null"),
        ({"logit_cap": 30.0, "norm": "plain-rmsnorm", "qk_norm": 1.2}, "model.logit_cap=null"),
        ({"embedding_norm": True}, "model.embedding_norm=false"),  # tied, as it comes
        ({"bias": True}, "model.qk_norm=false"),
        ({"qkv_bias": True}, "model.qkv_bias=null"),
        ({"bias": True, "qkv_bias": False}, "model.qk_norm=false model.qkv_bias=null"),
        ({"width": 30, "head_size": 8, "qk_norm": False}, "model.qk_norm=true"),
        ({"width": 30, "head_size": 8, "bias": True}, "model.bias=false"),
    ],
)
def test_what_transformers_lacks_is_not_exported_and_what_it_has_is_named(changes, needed, tmp_path):
    model = build_model(ModelConfig(**{**SHAPE, **changes}), VOCAB)
    with pytest.raises(CheckpointError) as error:
        export_huggingface(model, tmp_path / "out")
    free = (
        "head_size",
        *(["qk_norm", "norm"] if changes.get("qk_norm") else []),
    )  # exported as they are, or by the weights
    named = [f"model.{name}={format_value(value)}" for name, value in changes.items() if name not in free]
    assert all(word in error.value.message for word in named)
    assert f"one that is trained with {needed} can" in error.value.hint
    assert not (tmp_path / "out").exists()
    words = dict(word.removeprefix("model.").split("=") for word in needed.split())
    values = {name: {"null": None, "true": True, "false": False}.get(value, value) for name, value in words.items()}
    assert model_type_of(ModelConfig(**{**SHAPE, **changes, **values})) in ("llama", "qwen2", "qwen3")


def test_the_documents_name_the_presets_that_can_be_exported():
    text = (Path(__file__).parents[2] / "docs" / "guides" / "models.md").read_text(encoding="utf-8")
    named = next(line for line in text.splitlines() if line.startswith("Of the presets, "))
    for preset in shipped_names("preset"):
        model = flatout.load_config(preset).config.model
        if model.init_from is not None:
            continue  # a fine-tuned model is exported as its base
        try:
            model_type_of(model)
            can = True
        except CheckpointError:
            can = False
        assert can == (f"`{preset}`" in named.partition(" can be exported")[0]), preset


def test_export_keeps_what_the_source_said_and_its_tokenizer(tmp_path):
    folder = write(tmp_path / "m")
    change(folder, dtype="bfloat16", torch_dtype="bfloat16", my_note="kept", eos_token_id=[4, 5])
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"):
        (folder / name).write_text(name)
    source = read_description(folder)
    export_huggingface(from_huggingface(folder), tmp_path / "out", dtype=torch.float16, source=source)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == source.values | {"dtype": "float16", "torch_dtype": "float16"}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "flatout.json",
    }  # fmt: skip
    with pytest.raises(CheckpointError, match=r"head_size 10, .* describes null"):
        export_huggingface(build("qwen3"), tmp_path / "other", source=source)
    with pytest.raises(CheckpointError, match="not empty"):
        export_huggingface(build("llama"), tmp_path / "out")


def test_the_verbs_take_any_folder_with_a_tokenizer(tiny, tmp_path):
    """A run of the modern family, exported in bf16, is evaluated and continued like the run itself."""
    shape = ["model.family=gpt", "model.norm=rmsnorm", "model.mlp=swiglu", "data.tokenizer=bytes"]
    list(flatout.train(tiny(*shape, "train.steps=10", "output.folder=run")))
    flatout.export("run", "out", dtype="bf16")
    kinds = {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()}
    assert kinds == {torch.bfloat16}
    run, exported = (flatout.load_model(name, device="cpu") for name in ("run", "out"))
    assert exported.tokenizer.fingerprint == run.tokenizer.fingerprint
    assert run.config is not None
    assert flatout.evaluate(exported, data=data_folder(run.config.data)).loss == pytest.approx(
        flatout.evaluate(run).loss, abs=0.05
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "out" / name).unlink()
    as_a_stranger(tmp_path / "out")
    with pytest.raises(CheckpointError, match="it has no tokenizer"):
        flatout.load_model("out", device="cpu")
    with pytest.raises(UsageError, match="'int4'"):
        flatout.export("run", "again", dtype="int4")
    (tmp_path / "out" / "tokenizer.json").write_text(json.dumps(run.tokenizer.to_json()))
    loaded = flatout.load_model("out", device="cpu")
    assert loaded.description is not None
    x = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.allclose(loaded.model.logits(x), run.model.logits(x), atol=0.05)
    assert len("".join(flatout.generate(loaded, "the ", tokens=5))) > 0


# --- where a model comes from -----------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Stands in for huggingface_hub: `cached` and `online` are folders or errors, `asked` what was asked for."""
    filtering = pytest.importorskip("huggingface_hub.utils").filter_repo_objects
    calls = types.SimpleNamespace(
        filter=filtering, cached=FileNotFoundError("not cached"), online=OSError("no network"), asked=[]
    )

    def snapshot_download(name: str, **options: Any) -> str:
        calls.asked.append((name, options))
        answer = calls.cached if options.get("local_files_only") else calls.online
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.chdir(tmp_path)
    return calls


def test_folders_are_taken_for_what_they_hold(hub, tmp_path):
    write(tmp_path / "theirs")
    (tmp_path / "run" / "checkpoints" / "step-00000005").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "run" / "checkpoints" / "step-00000005" / "manifest.json").write_text("{}")
    (tmp_path / "run" / "checkpoints" / "step-00000005" / "config.json").write_text("{}")
    assert find_model("theirs") == FoundModel(Path("theirs"), "huggingface")
    assert find_model("run").kind == "run"
    assert find_model("run/checkpoints/step-00000005").kind == "checkpoint"
    assert hub.asked == [], "a folder needs no hub"


def test_the_cache_comes_first(hub, tmp_path):
    hub.cached = write(tmp_path / "cache")
    assert find_model("org/name") == FoundModel(tmp_path / "cache", "huggingface")
    assert [options.get("local_files_only") for _, options in hub.asked] == [True], "the network was not asked"


def test_the_cache_of_the_real_library(monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="could not be fetched"):
        find_model("org/name")
    repository = tmp_path / "cache" / "models--org--name"
    snapshot = write(repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    assert find_model("org/name") == FoundModel(snapshot, "huggingface")
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"org/name: .* has no model\.safetensors") as error:
        find_model("org/name")
    assert "HF_HUB_OFFLINE" in error.value.hint


@pytest.mark.parametrize("lacking", ["all", "weights", "config", "a shard"])
def test_what_the_cache_lacks_is_fetched(lacking, hub, tmp_path):
    filter_repo_objects = hub.filter
    hub.online = write(tmp_path / "online")
    if lacking != "all":
        hub.cached = write(tmp_path / "cache", shard_bytes=8000)
        gone = {"weights": "*.safetensors*", "config": "config.json", "a shard": "model-00002*"}[lacking]
        for path in hub.cached.glob(gone):
            path.unlink()
    assert find_model("org/name").path == tmp_path / "online"
    name, options = hub.asked[-1]
    assert name == "org/name"
    assert "local_files_only" not in options
    offered = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "chat_template.jinja"]
    refused = ["modeling_mine.py", "pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors"]
    filtered = filter_repo_objects(
        [*offered, *refused], allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
    )
    assert list(filtered) == offered


class GatedRepoError(OSError):
    pass


class RepositoryNotFoundError(OSError):
    pass


@pytest.mark.parametrize(
    ("name", "online", "message", "hint"),
    [
        ("org/name", OSError("no route"), "could not be fetched: .*no route", "HF_HUB_OFFLINE"),
        ("org/name", GatedRepoError("401"), "accepted its terms", "hf auth login"),
        ("org/name", RepositoryNotFoundError("404"), "the hub has no model org/name", "check the name"),
        ("org/name", ValueError("a\nb\x1b[0m"), "could not be fetched", "network"),
        ("nowhere", None, "there is no folder 'nowhere'", "org/name"),
        ("../nowhere", None, "there is no folder", "org/name"),
        ("/no/such/folder", None, "there is no folder", "org/name"),
        ("https://hub/org/name", None, "there is no folder", "org/name"),
        ("here/missing", None, "there is no folder here/missing", "in here"),
        ("here/file", None, "is a file", "name the folder"),
        ("here", None, "here holds no model", "config.json and model.safetensors"),
        ("adapter", None, "holds an adapter, not a model", "made for"),
        ("", None, "there is no folder ''", "org/name"),
    ],
)
def test_what_is_not_found_gives_one_error(name, online, message, hint, hub, tmp_path):
    for folder, file in [("here", "file"), ("adapter", "adapter_config.json")]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("")
    hub.online = online
    with pytest.raises(CheckpointError, match=message) as error:
        find_model(name)
    assert hint in error.value.hint
    assert "\x1b" not in error.value.message
    assert bool(hub.asked) == (name == "org/name")


def test_a_fetched_repository_without_safetensors(hub, tmp_path):
    hub.online = write(tmp_path / "online")
    as_bin(hub.online)
    with pytest.raises(CheckpointError, match="no safetensors"):
        find_model("org/name")
    (hub.online / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        find_model("org/name")


def test_without_the_package(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match="huggingface_hub, which would fetch it, is not installed") as error:
        find_model("org/name")
    assert "pip install huggingface_hub" in error.value.hint
