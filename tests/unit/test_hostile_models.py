"""Models that mean harm: code, links, JSON of any shape. Refused by name, or taken without what does the harm."""

import contextlib
import copy
import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from flatout.checkpoints.base_and_adapter import adapter_at
from flatout.cli import main
from flatout.data import library_tokenizers, tokenizer
from flatout.data import tokenizer_files as portable
from flatout.data.chat_template import load_template
from flatout.data.tokenizer_files import read_model_tokenizer
from flatout.errors import CheckpointError, UserError
from flatout.model.adapter_files import read_origin
from flatout.model.hub import read_description
from flatout.model.hub_folder import export_huggingface, find_model, is_within_reach
from tests.chat_models import FAMILIES, write_chat_model, write_model
from tests.hub_folders import from_huggingface
from tests.unit.test_hub import build, change, write


def test_code_of_a_model_s_own_is_refused(tmp_path):
    folder = write(tmp_path / "m")
    change(folder, auto_map={"AutoModelForCausalLM": "modeling.Evil"})
    with pytest.raises(CheckpointError, match=r"config\.json names code of the model's own \(auto_map\)") as caught:
        read_description(folder)
    assert "take auto_map out of the file" in caught.value.hint


def test_code_that_a_tokenizer_names_is_told_wherever_it_is_read(tmp_path, monkeypatch, capsys):
    """As the tokenizer of data, and in a folder that says it is an export of ours."""
    monkeypatch.chdir(tmp_path)
    write_chat_model(tmp_path / "m")
    settings = tmp_path / "m" / "tokenizer_config.json"
    values = json.loads(settings.read_text()) | {"auto_map": {"AutoTokenizer": ["a.B", None]}}
    for own in ({}, {portable.OWN: {"kind": "bytes"}}):
        settings.write_text(json.dumps(values | own))
        for words in (["generate", "m", "--tokens", "1"], ["prepare", "data.tokenizer=m/tokenizer.json"]):
            assert main(words) == 3
            assert "tokenizer_config.json names code of the tokenizer's own" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json", "shard", "index"])
def test_a_file_that_links_to_another_place_is_refused(name, tmp_path):
    folder = write(tmp_path / "m", shard_bytes=20_000 if name in ("shard", "index") else 10**9)
    (folder / "generation_config.json").write_text("{}")
    name = {"shard": next(folder.glob("model*.safetensors")).name, "index": "model.safetensors.index.json"}.get(
        name, name
    )
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=rf"{name} is a link that leads out of its folder"):
        from_huggingface(folder)
    (folder / name).unlink()
    (tmp_path / "elsewhere").rename(folder / "inside")
    (folder / name).symlink_to("inside")
    from_huggingface(folder)


def test_a_link_among_the_companions_is_not_copied(tmp_path):
    folder = write(tmp_path / "m")
    (tmp_path / "secret").write_text("x")
    (folder / "tokenizer_secret").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="leads out of its folder"):
        export_huggingface(build("llama"), tmp_path / "out", source=read_description(folder))
    assert not (tmp_path / "out").exists()


def test_snapshots_of_the_hub_s_cache_are_links_and_are_read(tmp_path):
    """And no others: a link out of the repository's own folder is none of the cache."""
    whole = write(tmp_path / "m")
    repository = tmp_path / "hub" / "models--somebody--a-model"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(whole.iterdir())):
        path.rename(repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    from_huggingface(snapshot)
    (tmp_path / "link").symlink_to(snapshot)
    from_huggingface(tmp_path / "link")
    target = (snapshot / "config.json").resolve()
    target.rename(tmp_path / "elsewhere")
    target.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="leads out of its folder"):
        from_huggingface(snapshot)


@pytest.mark.parametrize("name", ["x" * 300, "a/" + "x" * 300, "../" + "x" * 300 + "/y"])
def test_names_that_are_too_long_are_those_of_nothing(name):
    with pytest.raises(CheckpointError, match="there is no folder"):
        find_model(name)
    assert is_within_reach(name)
    with pytest.raises(CheckpointError, match="there is no folder"):
        adapter_at(name)


@pytest.mark.parametrize(
    "verb", [["chat", "x" * 300, "--message", "Hi"], ["generate", "x" * 300]], ids=["chat", "generate"]
)
def test_names_that_are_too_long_are_two_lines(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(verb) in (2, 3)
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == ["error", "hint"]


def test_a_target_whose_name_is_too_long_is_two_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_chat_model(tmp_path / "m")
    assert main(["export", "m", "x" * 300]) in (2, 3, 5)
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == ["error", "hint"]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


WEIRD = [10**400, None, True, -1, 0, 10**30, 1e308, math.nan, "", "x", [], {}, [[]], {"a": []}, [None], "\ud800", "\0"]
FUZZED = {
    "config.json": lambda folder: from_huggingface(folder),
    "generation_config.json": lambda folder: read_description(folder),
    "tokenizer.json": lambda folder: read_model_tokenizer(folder),
    "tokenizer_config.json": lambda folder: (read_model_tokenizer(folder), load_template_of(folder)),
    "special_tokens_map.json": lambda folder: read_model_tokenizer(folder),
}


def load_template_of(folder: Path) -> Any:
    tokenizer = read_model_tokenizer(folder)
    return load_template("model", folder, tokenizer)


@pytest.fixture
def one_process(monkeypatch):
    """The process that tries out tokenizers is not started anew for each of hundreds."""
    with monkeypatch.context() as patched:
        patched.setattr(library_tokenizers.child(), "close", lambda: None)
        yield
    library_tokenizers.child().close()


@pytest.mark.parametrize("name", FUZZED)
@pytest.mark.usefixtures("one_process")
def test_any_value_in_any_place_is_taken_or_refused(name, tmp_path):
    """Whatever stands under a key, also inside: an error of ours, never a traceback."""
    folder = write_chat_model(tmp_path / "m")
    start = {"generation_config.json": {"eos_token_id": 2}, "special_tokens_map.json": {"bos_token": "<|im_start|>"}}
    values = json.loads((folder / name).read_text()) if (folder / name).exists() else start[name]
    read = FUZZED[name]
    (folder / name).write_text(json.dumps(values))
    read(folder)
    places = [(key,) for key in values]
    if name == "tokenizer.json":
        values["model"]["vocab"] = dict(list(values["model"]["vocab"].items()))
        places += [("model", key) for key in (*values["model"], "unk_id")] + [("added_tokens", 0)]
        places += [("added_tokens", 0, key) for key in values["added_tokens"][0]]
    if name == "tokenizer_config.json":
        places += [("added_tokens_decoder",), ("extra_special_tokens",), ("additional_special_tokens",)]
    for number, place in enumerate(places):
        for weird in WEIRD[number % 3 :: 3]:  # a third of them in each place, every one in some
            changed = copy.deepcopy(values)
            inside = changed
            for key in place[:-1]:
                inside = inside[key]
            inside[place[-1]] = weird
            (folder / name).write_text(json.dumps(changed))
            with contextlib.suppress(UserError):
                read(folder)


@pytest.mark.parametrize("name", [*FUZZED, "model.safetensors.index.json"])
def test_deep_json_is_refused_by_its_name(name, tmp_path):
    folder = write_chat_model(tmp_path / "m")
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    for deep in ("[" * 100_000 + "]" * 100_000, '{"a":' * 500 + "1" + "}" * 500):
        (folder / name).write_text(deep)
        with pytest.raises(UserError, match=name) as caught:
            (FUZZED.get(name) or (lambda folder: from_huggingface(folder)))(folder)
        assert caught.value.exit_code == 3


def test_a_pipe_in_the_place_of_the_hashes_is_refused(tmp_path):
    folder = write_chat_model(tmp_path / "m")
    os.mkfifo(folder / "flatout.json")
    with pytest.raises(CheckpointError, match="not a plain file"):
        read_description(folder)


@pytest.mark.parametrize("name", [*FUZZED, "model.safetensors.index.json", "adapter_config.json"])
def test_json_that_is_too_large_or_a_pipe_is_refused_before_it_is_read(name, tmp_path):
    """A file of 5 GB (sparse here) would be read whole; a pipe would never end."""
    folder = write_chat_model(tmp_path / "m")
    read = {"adapter_config.json": read_origin, "model.safetensors.index.json": from_huggingface} | FUZZED
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    with (folder / name).open("wb") as file:
        file.truncate(5 * 10**9)
    with pytest.raises(UserError, match=rf"{name}.* 5,000,000,000 bytes; files of its kind have at most 67,108,864"):
        read[name](folder)
    if name in ("config.json", "adapter_config.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(UserError, match=rf"{name} cannot be read: it is not a plain file") as refused:
            read[name](folder)
        assert refused.value.hint == "fetch the folder again, or name another one"


def test_numbers_of_a_billion_are_refused_by_their_key(tmp_path):
    """`layers` letters were made of the first one: 7.9 GB."""
    qwen = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 8}
    qwen |= {"head_dim": 4, "intermediate_size": 8, "vocab_size": 9, "max_position_embeddings": 8}
    gpt2 = {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 8, "vocab_size": 9}
    for kind, values in (("qwen3", qwen), ("gpt2", gpt2)):
        for key in (None, *values):
            large = {} if key is None else {key: 10**9}
            (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **values, **large}))
            if key is None:
                read_description(tmp_path)
                continue
            with pytest.raises(CheckpointError, match=rf"{key} is 1000000000, and Flatout takes at most [\d,]+ "):
                read_description(tmp_path)


def _replaces(letter: str, times: int) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": {"String": letter}, "content": letter * 10}
    return {"type": "Sequence", "normalizers": [step] * times}


def _splits(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


# Set off by a letter that no trial has: what is changed, the text, and what is said of it.
BOMBS = {
    "replacements": ({"normalizer": _replaces("€", 12)}, "€", r"the tokenizer (breaks the process|needs more)"),
    "backtracking": ({"pre_tokenizer": _splits("(€+)+$")}, "€" * 60 + "b", r"the tokenizer refuses a text: .*limit"),
}


@pytest.fixture
def little_memory(monkeypatch):
    """Filling as much as the process may really have takes seconds."""
    limits = dataclasses.replace(library_tokenizers.child().limits, memory=2**28)
    with monkeypatch.context() as patched:
        patched.setattr(library_tokenizers.child(), "limits", limits)
        yield
    library_tokenizers.child().close()


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_that_the_trial_does_not_set_off_ends_no_process(bomb, tmp_path):
    """The library aborted the process, or raised what is no `Exception`."""
    changes, text, said = BOMBS[bomb]
    folder = write_model(tmp_path / "m", FAMILIES["smollm2"])
    content = json.loads((folder / "tokenizer.json").read_text()) | changes
    (folder / "tokenizer.json").write_text(json.dumps(content))
    found = read_model_tokenizer(folder)
    assert len(found.encode("Hi there"))
    with pytest.raises(UserError, match=said):
        found.encodings([text])
    stored = {"kind": "huggingface", "content": found.to_json()["content"]}  # as a dataset or a checkpoint has it
    with pytest.raises(UserError, match=said):
        tokenizer.tokenizer_from_json(stored).encode(text)


@pytest.mark.usefixtures("little_memory")
def test_a_bomb_in_the_decoder_ends_no_process(tmp_path):
    folder = write_model(tmp_path / "m", FAMILIES["smollm2"])
    content = json.loads((folder / "tokenizer.json").read_text())
    steps = [{"type": "Replace", "pattern": {"String": "z"}, "content": "z" * 10}] * 12
    content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"], *steps]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    found = read_model_tokenizer(folder)
    with pytest.raises(CheckpointError, match=r"the tokenizer (breaks the process|needs more)"):
        found.decode(found.encode("z"))


@pytest.mark.parametrize("family", ["smollm2", "mistral"])
def test_a_tokenizer_in_a_child_process_gives_what_the_library_gives(family, tmp_path):
    """One with a part whose cost is not known, which leaves every text as it is."""
    texts = ["Hello there,\n\n  it's 1234", "", "äß 你好 👩‍👩‍👧 <|im_end|></s>", "x " * 300]
    folder = write_model(tmp_path / "m", FAMILIES[family])
    plain = read_model_tokenizer(folder)
    expected = plain.encodings(texts)
    assert library_tokenizers.child()._process is None, "well-known parts run in this process"
    content = json.loads((folder / "tokenizer.json").read_text())
    before = [content["normalizer"]] if content["normalizer"] else []
    same = {"type": "Replace", "pattern": {"Regex": "x"}, "content": "x"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [same, *before]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    confined = read_model_tokenizer(folder)
    with mock.patch.object(tokenizer, "_SEGMENT", 30):  # several requests
        found = list(zip(confined.encode_batch(texts), confined.encodings(texts), expected, strict=True))
    for ids, encoding, here in found:
        assert ids.tolist() == list(encoding.ids) == here.ids
        tokens = range(len(here.ids))
        assert list(map(encoding.token_to_chars, tokens)) == list(map(here.token_to_chars, tokens))
        assert confined.decode(ids) == plain.decode(ids)
    assert library_tokenizers.child()._process is not None
    library_tokenizers.child().close()
