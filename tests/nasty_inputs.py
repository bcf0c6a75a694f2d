"""Files, folders and names that are wrong, hostile or merely strange, for tests/end_to_end/test_fuzz.py.

Each kind draws one nasty thing, writes it into the folder that the command runs in, and gives the words that read it.
The kinds take turns and the same seed gives the same inputs. Some inputs turn out to be valid; the campaign counts
those. Nothing can start a long training: a step count of one stands in every line that could train.
"""

import gzip
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.called import call
from tests.chat_models import write_chat_model
from tests.conftest import TINY
from tests.damaged import COMPRESSIONS, DAMAGES, SUFFIXES, build, compress, damage, texts_for

TRAIN = ["train", *TINY, "train.steps=1", "output.folder=run"]
TUNE = [
    "finetune", "model.context=64", "train.steps=1", "train.epochs=null", "lora.rank=2",
    "eval.sample_tokens=4", "speed.device=cpu", "output.folder=run",
]  # fmt: skip
DEEP = 100_000


@dataclass(frozen=True)
class Kit:
    """Good things that nasty ones are made from: a base model, rows, an adapter, a run and a dataset."""

    base: Path
    rows: Path
    adapter: Path
    run: Path
    data: Path
    text: Path


def make_kit(folder: Path) -> Kit:
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_chat_model(Path("base"))
        rows = [{"instruction": f"What is {number} and one?", "output": f"It is {number + 1}."} for number in range(20)]
        Path("rows.json").write_text(json.dumps(rows), encoding="utf-8")
        Path("text.txt").write_text("the old fox over the moon.\n" * 100, encoding="utf-8")
        for words in [
            [*TUNE, f"model.init_from={folder / 'base'}", "chat.source=rows.json", "data.folder=samples"],
            ["export", "run", "adapter", "--adapter"],
            [*TRAIN, "data.source=text.txt", "data.folder=data", "output.folder=pretrained"],
        ]:
            outcome = call(words)
            assert outcome.code == 0, outcome
    names = ("base", "rows.json", "adapter", "pretrained", "data", "text.txt")
    return Kit(*(folder / name for name in names))


@dataclass
class Maker:
    """Writes one nasty thing into the current folder."""

    kit: Kit
    chance: random.Random

    def write(self, path: str, content: bytes | str | Any) -> str:
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(raw)
        return path

    def copy(self, thing: Path, name: str) -> Path:
        shutil.copytree(thing, name)
        return Path(name)

    def spoil_json(self, path: Path, values: list[Any] | None = None) -> None:
        """Another value at a random place of a JSON file: a wrong type, a huge number, a deep list, or none at all."""
        content = json.loads(path.read_text(encoding="utf-8"))
        place = content
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = self.chance.choice(keys)
            if isinstance(place[key], (dict, list)) and place[key] and self.chance.random() < 0.6:
                place = place[key]
                continue
            if self.chance.random() < 0.2:
                del place[key]
            else:
                place[key] = self.chance.choice(values or VALUES)
            break
        path.write_text(json.dumps(content), encoding="utf-8")


VALUES: list[Any] = [
    None, True, 0, -1, 1.5, 10**12, 10**400, -(2**63), float("nan"), float("inf"), 1e308, "", "x", "8", "\x00",
    "\ud800", "é" * 300, "../../../etc/passwd", "a\nb\x1b[31m", [], [[]], {}, {"": 1}, [None], ["x"] * 1000,
    {"a": {"b": {}}},
]  # fmt: skip


# --- text, tables, archives -------------------------------------------------------------------------------------------


def _damaged_file(make: Maker) -> list[str]:
    form, suffix = make.chance.choice(list(SUFFIXES)), make.chance.choice(COMPRESSIONS)
    how = make.chance.choice([how for how in DAMAGES if how != "none"])
    raw = damage(compress(build(form, texts_for(form, make.chance, 40)), suffix), how, make.chance)
    name = make.write(f"input{SUFFIXES[form]}{suffix}", raw)
    return ["prepare", "--workers", "0", "data.tokenizer=bytes", f"data.source={name}", "data.folder=data"]


def _odd_file(make: Maker) -> list[str]:
    name, raw = make.chance.choice(list(ODD_FILES))
    make.write(name, raw)
    source = f"data.source={make.chance.choice([name, '.'])}" if make.chance.random() < 0.2 else f"data.source={name}"
    verbs = [
        ["prepare", "--workers", "0", "data.tokenizer=bytes"],
        TRAIN,
    ]
    more = make.chance.choice([[], [], ["data.format=text"], ["data.format=jsonl"], ["data.format=csv"]])
    return [*make.chance.choice(verbs), source, *more, "data.folder=data"]


ODD_FILES: list[tuple[str, bytes]] = [
    ("a.txt", b""), ("a.txt", b"\x00" * 5000), ("a.txt", b"\xff\xfe" * 99), ("a.txt", "text".encode("utf-16")),
    ("a.txt", b"\xef\xbb\xbf"), ("a.txt", b" \n\t\r\n" * 99), ("a.txt", b"x"), ("a.txt", b"x" * 5_000_000),
    ("a.txt", b"\x1b]0;title\x07" * 99), ("a.txt", b"\r" * 999), ("a.json", b"["), ("a.json", b"[" * DEEP),
    ("a.json", b'{"text": ' * DEEP), ("a.json", b'"just text"'), ("a.json", b"7"), ("a.json", b"null"),
    ("a.json", b"[1, 2, 3]"), ("a.json", b'[{"text": 7}]'), ("a.json", b'[{"text": NaN}]'),
    ("a.json", b'[{"text": "a"},' * 9), ("a.json", b'{"text": "\\ud800"}'), ("a.json", b"9" * 100_000),
    ("a.json", b'[{"text": "a"}]]'), ("a.json", b'{"a": 1, "a": 2}'), ("a.jsonl", b"[" * DEEP + b"\n"),
    ("a.jsonl", b'{"text": "\\ud800"}\n' * 9), ("a.jsonl", b'{"txt": "a"}\n' * 9), ("a.jsonl", b"\n" * 999),
    ("a.jsonl", b"1e999999\n" * 9), ("a.jsonl", b"-" * 9999), ("a.jsonl", b'{"text": ["a"]}\n' * 9),
    ("a.jsonl", b'{"text": {"a": "b"}}\n'), ("a.jsonl", b'{"text": "' + b"a" * 3_000_000),
    ("a.jsonl", b"9" * 6000 + b"\n"), ("a.jsonl", b'{"text": "a\x00b"}\n'), ("a.csv", b""), ("a.csv", b"text\n"),
    ("a.csv", b'text\n"open\n' + b"x\n" * 99), ("a.csv", b"a,b\n" * 9), ("a.csv", b"text\rone\rtwo\r"),
    ("a.csv", b"," * DEEP + b"\n" + b"," * 9), ("a.csv", b"text\n\x00\x00\n"), ("a.csv", b"text,text\na,b\n"),
    ("a.csv", b'"text"x\na\n'), ("a.tsv", b"\t\t\t\n" * 9), ("a.parquet", b""), ("a.parquet", b"PAR1"),
    ("a.parquet", b"PAR1" + b"\xff" * 99 + b"PAR1"), ("a.parquet", b"PAR1" + b"\x00" * 99 + b"\xff\xff\xff\x7fPAR1"),
    ("a.arrow", b"ARROW1\x00\x00" + b"\xff" * 99), ("a.txt.gz", b"\x1f\x8b"), ("a.txt.gz", b"not gzip"),
    ("a.txt.gz", gzip.compress(b"a" * 999)[:-9]), ("a.txt.gz", gzip.compress(bytes(30_000_000))),
    ("a.jsonl.gz", gzip.compress(gzip.compress(b'{"text": "a"}\n'))), ("a.txt.zst", b"\x28\xb5\x2f\xfd"),
    ("a.txt.zst", b"\x28\xb5\x2f\xfd\xff\xff\xff\xff"), ("a.txt.xz", b"\xfd7zXZ\x00"), ("a.txt.bz2", b"BZh9"),
    ("a.warc", b""), ("a.warc", b"WARC/1.0\r\n"), ("a.warc", b"WARC/1.0\r\nContent-Length: -5\r\n\r\n"),
    ("a.warc", b"WARC/1.0\r\nWARC-Type: response\r\nContent-Length: 99999999999999999999\r\n\r\n"),
    ("a.warc", b"WARC/1.0\r\n" + b"A: b\r\n" * DEEP),
    ("a.warc.gz", gzip.compress(b"WARC/1.0\r\nContent-Length: x\r\n\r\n")),
    ("a.wet", b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: 5\r\n\r\nab"), ("a.bin", b"\x00"),
    ("a.bin", b"\xff" * 9), ("a.smi", b"\x00\n" * 9), ("a.png", b"\x89PNG\r\n\x1a\n"), ("a", b"no suffix"),
    ("a.docx", b"PK\x03\x04"), ("a.pkl", b"\x80\x04."), ("a.pt", b"PK\x03\x04"), ("a.txt\n", b"name with a newline"),
    ("-a.txt", b"name with a dash"), ("a.", b"x"),
]  # fmt: skip


def _source_that_is_no_file(make: Maker) -> list[str]:
    def links() -> str:
        os.symlink("b.txt", "a.txt")
        os.symlink("a.txt", "b.txt")
        return "a.txt"

    def nowhere() -> str:
        os.symlink("gone", "a.txt")
        return "a.txt"

    def folder_as_file() -> str:
        Path("a.txt").mkdir()
        return "a.txt"

    def pipe_in_a_folder() -> str:
        Path("in").mkdir()
        os.mkfifo("in/a.txt")
        return "in"

    def folders_only() -> str:
        Path("in/" + "d/" * 100).mkdir(parents=True)
        return "in"

    def circle() -> str:
        Path("in").mkdir()
        os.symlink(".", "in/again")
        return "in"

    def out_of_the_folder() -> str:
        Path("in").mkdir()
        os.symlink(make.kit.text, "in/a.txt")
        return "in"

    places = [
        links,
        nowhere,
        folder_as_file,
        pipe_in_a_folder,
        folders_only,
        circle,
        out_of_the_folder,
        lambda: "hf:",
        lambda: "-",
    ]
    verbs = [["prepare", "--workers", "0"], TRAIN]
    source = make.chance.choice(places)()
    return [*make.chance.choice(verbs), f"data.source={source}", "data.folder=data"]


# --- rows, templates, models, adapters --------------------------------------------------------------------------------


def _rows(make: Maker) -> list[str]:
    good = {"instruction": "What is one?", "output": "one"}
    spoilt = make.chance.choice(ROWS)
    content = [spoilt] * 9 if make.chance.random() < 0.5 else [good] * 3 + [spoilt] * 6
    if make.chance.random() < 0.3:
        name = make.write("rows.jsonl", "\n".join(json.dumps(row) for row in content))
    else:
        name = make.write("rows.json", content)
    return [*TUNE, f"model.init_from={make.kit.base}", f"chat.source={name}", "data.folder=samples"]


def _messages(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


_USER = {"role": "user", "content": "Hello"}
ROWS: list[Any] = [
    None, 7, "text", [], {}, [[]], {"": ""}, {"instruction": None, "output": None},
    {"instruction": "a", "output": ["b"]}, {"instruction": "a" * 200_000, "output": "b"},
    {"instruction": "\ud800", "output": "\udfff"}, {"instruction": "a\x00", "output": "\x1b[31m"},
    {"instruction": "<|im_end|>", "output": "<|im_start|>system"}, {"messages": None}, {"messages": "text"},
    {"messages": {}}, _messages(), _messages(None), _messages([]), _messages("text"), _messages(_USER),
    _messages(_USER, {"role": "assistant"}), _messages({"role": 7, "content": "x"}),
    _messages(_USER, {"role": "assistant", "content": None}),
    _messages(_USER, {"role": "assistant", "content": {"a": 1}}),
    _messages(_USER, {"role": "assistant", "content": [{"type": "image"}]}),
    _messages(_USER, {"role": "assistant", "content": "x", "tool_calls": 7}),
    _messages(_USER, {"role": "assistant", "content": "x", "tool_calls": [None]}),
    _messages(_USER, {"role": "\x1b[31m", "content": "x"}), _messages({"role": "assistant", "content": "first"}),
    _messages(*[_USER] * 500), {"conversations": [{"from": "human"}]}, {"conversations": [{"from": [], "value": {}}]},
    {"prompt": 1, "completion": 2}, {"prompt": [], "completion": []}, {"chosen": [], "rejected": []},
]  # fmt: skip


def _template(make: Maker) -> list[str]:
    text = make.chance.choice(TEMPLATES)
    if make.chance.random() < 0.5:
        name = make.write("mine.jinja", text)
        return [
            *TUNE,
            f"model.init_from={make.kit.base}",
            f"chat.source={make.kit.rows}",
            f"chat.template={name}",
            "data.folder=samples",
        ]
    base = make.copy(make.kit.base, "base")
    settings = json.loads((base / "tokenizer_config.json").read_text(encoding="utf-8"))
    make.write("base/tokenizer_config.json", {**settings, "chat_template": text})
    return ["chat", "base", "--device", "cpu", "--message", "Hello", "--tokens", "2"]


TEMPLATES = [
    "", " ", "{{", "{% for %}", "{{ messages }}", "{{ messages[9] }}", "{{ nothing.at.all }}", "{{ 1 / 0 }}",
    "{{ [] | first }}",
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(99) %}{% endfor %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10000000000 }}",
    "{% set a = 'aaaaaaaa' %}{% for i in range(60) %}{% set a = a ~ a %}{% endfor %}{{ a }}",
    "{% set n = namespace(a='aaaaaaaa') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}{{ n.a }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ 10 ** 10 ** 10 }}", "{{ 'x' | center(10 ** 10) }}", "{% if 1 %}" * 3000, "{% include 'tokenizer.json' %}",
    "{% import 'x' as x %}", "{% extends 'x' %}", "{{ ''.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch broken') }}", "{{ messages.append(1) }}",
    "{{ self._TemplateReference__context }}", "{{ lipsum.__globals__ }}", "{{ '%999999999999d' % 1 }}",
    "{{ '{:>9999999999}'.format(1) }}", "{{ raise_exception('\x1b[31mno\nthanks') }}", "{{ range(10 ** 12) | list }}",
    "{% generation %}{{ 'a' }}", "{{ messages | tojson(indent=10 ** 9) }}", "{{ strftime_now('%' * 9999) }}",
    "{{ '\ud800' }}", "{{ messages[0].content.split('') }}", "{{ dict(**{'a' * 9: 1})['b'].c }}",
    "{{ 'a' | replace('', 'b' * 10 ** 9) }}",
]  # fmt: skip


def _model(make: Maker) -> list[str]:
    base = make.copy(make.kit.base, "base")
    kind = make.chance.randrange(5)
    if kind == 0:
        make.spoil_json(base / "config.json")
    elif kind == 1:
        make.spoil_json(base / "tokenizer_config.json")
    elif kind == 2:
        make.write(
            "base/config.json",
            make.chance.choice(["", "{", "[]", "null", "[" * DEEP, '{"a":' * DEEP, b"\xff\xfe", "{}", "7"]),
        )
    elif kind == 3:
        _spoil_tensors(make, base / "model.safetensors")
    else:
        _spoil_index(make, base)
    words = [
        ["chat", "base", "--device", "cpu", "--message", "Hello", "--tokens", "2"],
        ["export", "base", "out"],
        ["generate", "base", "--device", "cpu", "--tokens", "2"],
        [*TUNE, "model.init_from=base", f"chat.source={make.kit.rows}", "data.folder=samples"],
    ]
    return make.chance.choice(words)


def _spoil_tensors(make: Maker, path: Path) -> None:
    """A safetensors file whose header is not what it should be."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    name = make.chance.choice([name for name in header if name != "__metadata__"])
    kind = make.chance.randrange(9)
    if kind == 0:
        header[name]["data_offsets"] = make.chance.choice([[0, 2**62], [-8, 8], [8, 0], [0], "x", [0, 0], [1.5, 2]])
    elif kind == 1:
        header[name]["shape"] = make.chance.choice([[2**62, 2**62], [-1], [0], "x", [1.5], [1] * 999, [10**30]])
    elif kind == 2:
        header[name]["dtype"] = make.chance.choice(["F128", "", 7, "BOOL", "F8_E4M3", "I64"])
    elif kind == 3:
        header["\x1b[31m" + "x" * make.chance.choice([1, 9999])] = header.pop(name)
    elif kind == 4:
        header["__metadata__"] = make.chance.choice([7, {"format": 7}, [], {"": "\x00"}])
    elif kind == 5:
        del header[name]
    encoded = json.dumps(header).encode()
    length = len(encoded)
    if kind == 6:
        length = make.chance.choice([0, 2**63, 2**64 - 1, length + len(body) + 1, 100_000_001])
    elif kind == 7:
        encoded = b"[" * DEEP
        length = len(encoded)
    elif kind == 8:
        body = body[: len(body) // 2]
    path.write_bytes(length.to_bytes(8, "little") + encoded + body)


def _spoil_index(make: Maker, base: Path) -> None:
    """Weights in several files, by an index that names strange ones."""
    (base / "model.safetensors").rename(base / "part.safetensors")
    names = ["../part.safetensors", "/etc/passwd", "", ".", "part.safetensors/x", "\x00", "x" * 300, "gone.safetensors"]
    names += ["base", None, 7, ["a"], "tokenizer.json", "link.safetensors"]
    os.symlink(make.kit.base / "model.safetensors", base / "link.safetensors")
    name = make.chance.choice(names)
    weights = {"model.embed_tokens.weight": name, "model.norm.weight": "part.safetensors"}
    contents = [
        {"weight_map": weights},
        {"weight_map": {}},
        {"weight_map": []},
        {"weight_map": 7},
        {},
        [],
        7,
        {"weight_map": {"x": name}},
    ]
    make.write(
        "base/model.safetensors.index.json", contents[0] if make.chance.random() < 0.6 else make.chance.choice(contents)
    )


def _tokenizer(make: Maker) -> list[str]:
    path = Path("tokenizer.json")
    shutil.copyfile(make.kit.base / "tokenizer.json", path)
    kind = make.chance.randrange(4)
    if kind < 2:
        make.spoil_json(path)
    elif kind == 2:
        raw = path.read_bytes()
        path.write_bytes(
            damage(raw, make.chance.choice(["cut", "flip", "insert", "zeros", "empty", "noise", "remove"]), make.chance)
        )
    else:
        make.write("tokenizer.json", make.chance.choice(TOKENIZERS))
    if make.chance.random() < 0.4:
        base = make.copy(make.kit.base, "base")
        path.rename(base / "tokenizer.json")
        return ["chat", "base", "--device", "cpu", "--message", "Hello", "--tokens", "2"]
    verbs = [
        ["prepare", "--workers", "0", "data.tokenizer=./tokenizer.json", "data.folder=data"],
        [*TRAIN, "data.tokenizer=./tokenizer.json", "data.folder=data"],
    ]
    return [*make.chance.choice(verbs), f"data.source={make.kit.text}"]


_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
_BPE = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
TOKENIZERS: list[Any] = [
    {}, [], None, 7, "text", "[" * DEEP, {"model": None}, {"model": {}}, {"model": {"type": "BPE"}},
    {"model": {"type": "BPE", "vocab": {}, "merges": []}},
    {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 10**12}, "merges": []}},
    {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}},
    {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
    {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}},
    {"version": "9.9", "model": {"type": "Nope"}}, {"kind": "char", "characters": ""},
    {"kind": "char", "characters": "aa"}, {"kind": "char", "characters": 7}, {"kind": "bytes"}, {"kind": None},
    {"version": "1.0", "pre_tokenizer": {**_SPLIT, "pattern": {"Regex": "(a+)+$"}}, "model": _BPE},
    {"version": "1.0", "pre_tokenizer": {**_SPLIT, "pattern": {"Regex": "("}}, "model": _BPE},
]  # fmt: skip


def _adapter(make: Maker) -> list[str]:
    adapter = make.copy(make.kit.adapter, "adapter")
    kind = make.chance.randrange(4)
    if kind == 0:
        make.spoil_json(adapter / "adapter_config.json")
    elif kind == 1:
        described = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        name, values = make.chance.choice(list(ADAPTER_VALUES.items()))
        make.write("adapter/adapter_config.json", {**described, name: make.chance.choice(values)})
    elif kind == 2:
        _spoil_tensors(make, adapter / "adapter_model.safetensors")
    else:
        name = make.chance.choice([path.name for path in adapter.iterdir()])
        raw = (adapter / name).read_bytes()
        (adapter / name).write_bytes(
            damage(raw, make.chance.choice(["cut", "flip", "zeros", "empty", "noise"]), make.chance)
        )
    words = [
        ["chat", "adapter", "--base", str(make.kit.base), "--device", "cpu", "--message", "Hello", "--tokens", "2"],
        ["export", "adapter", "out", "--base", str(make.kit.base)],
        [
            *TUNE,
            f"model.init_from={make.kit.base}",
            f"chat.source={make.kit.rows}",
            "data.folder=samples",
            "lora.init_from=adapter",
        ],
    ]
    return make.chance.choice(words)


_SLOW_PATTERN = "(.*)*" * 8 + "(a|a)*" * 20 + "(([a-z_]+)+)+!"
ADAPTER_VALUES: dict[str, list[Any]] = {
    "r": [0, -1, 10**12, 10**400, 1.5, "8", None, True],
    "lora_alpha": [0, -1, 1e308, float("nan"), float("inf"), "8", None, 10**400],
    "target_modules": ["", [], "(", _SLOW_PATTERN, ".*", ["lm_head"], [7], {}, None, ["q_proj"] * 9999, ["\x1b[31m"]],
    "rank_pattern": [{"(": 2}, {_SLOW_PATTERN: 2}, {"q_proj": 10**12}, {"q_proj": "x"}, [], 7, {"": 0}],
    "alpha_pattern": [{_SLOW_PATTERN: 2}, {"q_proj": float("nan")}, {"q_proj": -1}, "x"],
    "layers_to_transform": [[10**9], -1, "x", [[]], list(range(9999))],
    "base_model_name_or_path": ["", "\x00", "../../..", "x" * 300, 7, ["a"], "/", "a\nb", "adapter"],
    "peft_type": ["", None, 7, "lora", "LORA\x00"], "use_dora": [True, "yes"],
    "modules_to_save": [["lm_head"], "x", {}], "bias": ["all", 7], "fan_in_fan_out": [True, "x"],
    "auto_mapping": [{"base_model_class": "x", "parent_library": "os"}], "layer_replication": [[[0, 9]], "x"],
}  # fmt: skip


# --- what we made ourselves, names, configs ---------------------------------------------------------------------------


def _made_by_us(make: Maker) -> list[str]:
    """A checkpoint, run or dataset in which a file says something else, without the hashes that would go with it."""
    if make.chance.random() < 0.5:
        data = make.copy(make.kit.data, "data")
        path = make.chance.choice(sorted(data.glob("*.json*")))
        _spoil_any(make, path)
        return make.chance.choice(
            [
                ["prepare", "verify", "data"],
                ["prepare", "inspect", "data"],
                [*TRAIN, "data.folder=data", "data.source=null"],
            ]
        )
    run = make.copy(make.kit.run, "made")
    files = [path for path in sorted(run.rglob("*")) if path.suffix in (".json", ".jsonl", ".yaml") and path.is_file()]
    _spoil_any(make, make.chance.choice(files))
    data = f"data.folder={make.kit.data}"
    words = [
        ["generate", "made", "--device", "cpu", "--tokens", "2"],
        ["train", "--resume", "made", "train.steps=2", data],
        ["export", "made", "out"],
    ]
    words += [
        ["eval", "made", "--device", "cpu", "--tokens", "9", "--data", str(make.kit.data)],
        ["plot", "made", "--out", "plots"],
        ["report", "made", "--json"],
        ["watch", "made", "--json"],
    ]
    return make.chance.choice(words)


def _spoil_any(make: Maker, path: Path) -> None:
    raw = path.read_bytes()
    if path.suffix == ".json" and make.chance.random() < 0.5 and isinstance(json.loads(raw), dict):
        make.spoil_json(path)
    elif make.chance.random() < 0.3:
        make.write(
            str(path),
            make.chance.choice(["", "{}", "[]", "null", "[" * DEEP, b"\xff\xfe\x00", '{"a": 1e999}', "9" * 9999]),
        )
    else:
        path.write_bytes(
            damage(raw or b"x", make.chance.choice(["cut", "flip", "insert", "zeros", "noise"]), make.chance)
        )


NAMES = [
    "x" * 300, "é" * 200, "a/" * 2500 + "a", "new\nline", "red\x1b[31mname", "bell\x07", "caf\udce9", "\ud800",
    "\u202eevil", " ", "  a ", ".", "..", "../..", "../up", "/", "//", "a//b", "-", "--", "-x", "~", "$HOME", "a\\b",
    "con", "a:b", "a*b", "%s%n", "{0}", "file.txt/below", "gone/..", "'", '"', "#x", "a b",
]  # fmt: skip


def _name(make: Maker) -> list[str]:
    name = make.chance.choice(NAMES)
    make.write("file.txt", "the old fox over the moon.\n" * 50)
    shown = json.dumps(name) if make.chance.random() < 0.5 or name == "\ud800" else name
    name = "caf\udce9" if name == "\ud800" else name  # as a word of a command line, there is no such name
    # `/` could be written to by a test that runs as root, so a run never goes there.
    out = shown if name.strip("/") not in ("", "..", "../..") else "/proc/version/run"
    text, data = f"data.source={make.kit.text}", "data.folder=data"
    words = [
        [*TRAIN, f"data.source={shown}", data],
        [*TRAIN, text, f"data.folder={shown if name not in ('..', '../..') else 'file.txt'}"],
        [*TRAIN[:-1], text, data, f"output.folder={out}"], [*TRAIN[:-1], text, data, f"output.name={shown}"],
        [*TRAIN, text, data, f"data.tokenizer={shown}"], [*TRAIN, text, data, f"model.init_from={shown}"],
        [*TUNE, f"model.init_from={shown}", f"chat.source={make.kit.rows}", "data.folder=samples"],
        [*TUNE, f"model.init_from={make.kit.base}", f"chat.source={shown}", "data.folder=samples"],
        [*TUNE, f"model.init_from={make.kit.base}", f"chat.source={make.kit.rows}", f"chat.template={shown}"],
        ["train", f"{name}.yaml"], ["train", "--resume", name], ["generate", name],
        ["chat", str(make.kit.base), "--base", name], ["config", "copy", name], ["prepare", "inspect", name],
        ["plot", name], ["report", name, "--json"], ["watch", name], ["tune", "search", name],
        ["export", name, "out"], ["prepare", "--workers", "0", text, data, f"data.tokenizer={name}"],
        ["eval", str(make.kit.run), "--data", name, "--device", "cpu"],
        ["report", str(make.kit.run), "--out", f"{name}.html" if name.strip("/.") else "gone/a.html"],
        ["train", "--hardware", name],
    ]  # fmt: skip
    return make.chance.choice(words)


def _config(make: Maker) -> list[str]:
    make.write("mine.yaml", make.chance.choice(CONFIGS))
    return [
        *make.chance.choice(
            [["config", "show"], ["config", "explain"], ["train"], ["prepare"], ["estimate", "--no-probe"]]
        ),
        "mine.yaml",
    ]


_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)
)
CONFIGS: list[bytes | str] = [
    _BOMB, "&a [*a]", "a: &a {b: *a}", "!!python/object/apply:os.system ['touch broken']",
    "model: !!python/name:os.system", "? {a: b}\n: c", "model: " + "{a: " * 500, "[" * DEEP, "- " * 9999,
    "model:\n" + "  layers: 2\n" * 999, "<<: *nope", "--- a\n--- b", "%YAML 9.9\n---\nmodel: {}",
    "%TAG ! tag:evil,2000:\n---\nmodel: !x {}", "model: {layers: !!float 2}", "\x00", b"\xff\xfem\x00",
    "\ufeffmodel: {layers: 0}", "data: {source: \"a\\0b\"}", 'data: {source: "\\ud800"}',
    "train: {steps: " + "9" * 5000 + "}", "train: {steps: 1e999}", "train: {steps: 0x10}", "train: {steps: 1_0}",
    "output: {name: ../../x}", "output: {name: \"a\\nb\"}", "model: 'x'" * 2, "a: b: c", "\t", "model:\n\tlayers: 2",
    "preset: ../x", "hardware: [a]", "data: {source: [" + "{path: a}, " * 20_000 + "]}", "#" * 1_100_000,
    "x" * 2_000_000, "model: null\ntrain: null", "model: {layers: [" + "1," * 9999 + "]}",
    "train: {steps: 2024-01-01}", "train: {steps: 12:30:45}", "{model: {layers: 2}", "'model': {'layers': \"two\"}",
    "model: &a {layers: 2}\nmodel: *a",
]  # fmt: skip


KINDS: list[Callable[[Maker], list[str]]] = [
    _damaged_file, _odd_file, _rows, _name, _config, _template, _model, _tokenizer, _adapter, _made_by_us, _odd_file,
    _source_that_is_no_file, _name, _model,
]  # fmt: skip


def nasty_inputs(kit: Kit, seed: int, count: int) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """`count` nasty inputs: the kind of each, and a function that writes it into the current folder and gives words."""
    for index in range(count):
        kind = KINDS[index % len(KINDS)]
        chance = random.Random(f"nasty {seed} {index}")
        yield kind.__name__.strip("_"), lambda kind=kind, chance=chance: kind(Maker(kit, chance))
