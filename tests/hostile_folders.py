"""Folders that mean harm, for tests/end_to_end/test_hostile.py: numbers and files without an end, bombs, pipes, links.

Beside `nasty_inputs`, which are wrong, these are made to exhaust memory, time or the stack, or to read other files.
Each kind writes one folder into the current one and gives the command that reads it; the same seed gives the same ones.
"""

import gzip
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.damaged import compress
from tests.nasty_inputs import TRAIN, TUNE, Kit, Maker, _rows, _spoil_index, _spoil_tensors, _template

LETTERS = "€ßжq漢"  # none is in the texts that a tokenizer is tried out with, except where a kind says so
HUGE: list[Any] = [
    10**9, 2**31, 2**40, 2**63, 10**30, 10**400, -(10**9), 1e300, float("inf"), float("nan"), 65536, 1000, 1024, 10**6,
]  # fmt: skip


def _read_model(make: Maker, base: str = "base", prompt: str = "Hello") -> list[str]:
    tuned = ["chat.source=" + str(make.kit.rows), "data.folder=samples"]
    return make.chance.choice(
        [
            ["chat", base, "--device", "cpu", "--message", prompt, "--tokens", "2"],
            ["generate", base, "--device", "cpu", "--prompt", prompt, "--tokens", "2"],
            ["export", base, "out"],
            ["eval", base, "--device", "cpu", "--tokens", "9", "--data", str(make.kit.data)],
            ["doctor", "lora", "--quick", f"model.init_from={base}", *tuned],
            [*TRAIN, f"model.init_from={base}", f"data.source={make.kit.text}", "data.folder=data"],
            [*TUNE, f"model.init_from={base}", *tuned],
        ]
    )


def _read_text(make: Maker, source: str, tokenizer: str = "bytes") -> list[str]:
    where = [f"data.source={source}", "data.folder=data"]
    return make.chance.choice(
        [
            ["prepare", "--workers", "0", f"data.tokenizer={tokenizer}", *where],
            ["doctor", "--quick", f"data.tokenizer={tokenizer}", *where],
            [*TRAIN, f"data.tokenizer={tokenizer}", *where],
        ]
    )


def _read_run(make: Maker) -> list[str]:
    data = f"data.folder={make.kit.data}"
    return make.chance.choice(
        [
            ["generate", "made", "--device", "cpu", "--tokens", "2"],
            ["train", "--resume", "made", "train.steps=2", data],
            ["eval", "made", "--device", "cpu", "--tokens", "9", "--data", str(make.kit.data)],
            ["plot", "made", "--out", "plots"],
            ["report", "made", "--out", "page.html"],
            ["watch", "made", "--json"],
            ["watch", "made"],
            ["report", "--zip", "made", "--no-doctor", "--out", "bug.zip"],
        ]
    )


# --- models -----------------------------------------------------------------------------------------------------------


def _numbers(make: Maker) -> list[str]:
    """Numbers of a config.json, in all its types, that are multiplied or made lists of."""
    base = make.copy(make.kit.base, "base")
    values = json.loads((base / "config.json").read_text())
    kind = make.chance.choice(["llama", "mistral", "qwen2", "qwen3", "gpt2"])
    values |= {
        "model_type": kind,
        "architectures": None,
        "head_dim": 8,
        "sliding_window": 4,
        "use_sliding_window": True,
    }
    if kind == "gpt2":
        values |= {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64}
    numbers = [key for key, value in values.items() if isinstance(value, int) and not isinstance(value, bool)]
    for key in make.chance.sample(numbers, make.chance.choice([1, 1, 2, len(numbers)])):
        values[key] = make.chance.choice(HUGE)
    if make.chance.random() < 0.2:
        values["layer_types"] = ["sliding_attention"] * 10**6
    if make.chance.random() < 0.2:
        values["rope_scaling"] = {"rope_type": "linear", "factor": make.chance.choice(HUGE)}
    make.write("base/config.json", values)
    return _read_model(make)


def _json_text(make: Maker) -> list[str]:
    """JSON that is large, wide, deep, has a key a million times, or is no UTF-8, in any file of a model or adapter."""
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    places = [("base", name) for name in names] + [("adapter", "adapter_config.json"), ("adapter", "flatout.json")]
    folder, name = make.chance.choice(places)
    make.copy(make.kit.base if folder == "base" else make.kit.adapter, folder)
    Path(folder, "flatout.json").unlink(missing_ok=True)
    text = make.chance.choice(
        [
            "[" + "[]," * make.chance.choice([4, 4, 20]) * 10**6 + "1]",
            '{"model_type":"llama","x":[' + '{"a":1},' * 2_000_000 + "1]}",
            "[" * 2_000_000,
            '{"a":' * 2_000_000,
            "{" + '"a":1,' * 2_000_000 + '"b":2}',
            b'{"model_type": "\xff\xfe"}',
            '{"model_type": "' + "x" * 30_000_000 + '"}',
            '{"num_hidden_layers": ' + "9" * 1_000_000 + "}",
            '{"model_type": "llama", "num_hidden_layers": 1e999, "vocab_size": -0.0}',
            '{"' + "k" * 1_000_000 + '": 1}',
        ]
    )
    make.write(f"{folder}/{name}", text)
    if folder == "adapter":
        return ["export", "adapter", "out", "--base", str(make.kit.base)]
    return _read_model(make)


def _no_plain_file(make: Maker) -> list[str]:
    """A pipe, a device, a link or a sparse file of terabytes in the place of any file."""
    which = make.chance.choice(["base", "adapter", "made", "data"])
    thing = {"base": make.kit.base, "adapter": make.kit.adapter, "made": make.kit.run, "data": make.kit.data}[which]
    folder = make.copy(thing, which)
    path = make.chance.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    raw = path.read_bytes()
    path.unlink()
    kind = make.chance.randrange(5)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        os.symlink(make.chance.choice(["/dev/zero", "/dev/urandom", "/proc/self/mem", "/etc/passwd", "..", "."]), path)
    elif kind == 2:
        path.mkdir()
    else:
        size = make.chance.choice([3 * 10**9, 5 * 10**9, 10**11])
        with path.open("wb") as file:
            file.write(raw if kind == 3 else b"")
            file.truncate(size)
    return {
        "base": lambda: _read_model(make),
        "adapter": lambda: ["export", "adapter", "out", "--base", str(make.kit.base)],
        "made": lambda: _read_run(make),
        "data": lambda: make.chance.choice(
            [
                ["prepare", "inspect", "data"],
                ["prepare", "verify", "data"],
                [*TRAIN, "data.folder=data"],
            ]
        ),
    }[which]()


def _tensors(make: Maker) -> list[str]:
    base = make.copy(make.kit.base, "base")
    if make.chance.random() < 0.3:
        _spoil_index(make, base)
        return _read_model(make)
    path = base / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    names = [name for name in header if name != "__metadata__"]
    first, second = make.chance.sample(names, 2)
    kind = make.chance.randrange(5)
    if kind == 0:  # two tensors in one place
        header[first]["data_offsets"] = header[second]["data_offsets"]
    elif kind == 1:  # all there is, in one value of a large shape
        header[first] |= {"shape": [2**31, 2**31], "data_offsets": [0, 2**62]}
    elif kind == 2:
        header |= {f"x{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(200_000)}
    elif kind == 3:
        header[first]["shape"] = [1] * 100_000
    else:
        _spoil_tensors(make, path)
        return _read_model(make)
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + body)
    return _read_model(make)


def _adapter(make: Maker) -> list[str]:
    make.copy(make.kit.adapter, "adapter")
    values = json.loads(Path("adapter/adapter_config.json").read_text())
    Path("adapter/flatout.json").unlink()
    pattern = make.chance.choice(["(a+)+$", "(.*)*" * 9 + "!", "(" * 5000, "[" * 99, "(?:x{0,60000}){0,60000}", "\\"])
    key, value = make.chance.choice(
        [
            ("r", make.chance.choice(HUGE)),
            ("lora_alpha", make.chance.choice(HUGE)),
            ("rank_pattern", {pattern: make.chance.choice(HUGE)}),
            ("target_modules", pattern),
            ("target_modules", ["q_proj"] * 10**6),
            ("layers_to_transform", list(range(10**6))),
            ("alpha_pattern", {f"q{number}": 1 for number in range(10**5)}),
            ("exclude_modules", pattern),
            ("base_model_name_or_path", make.chance.choice(["../" * 999, "/dev/zero", "\0", "x" * 10**6])),
        ]
    )
    make.write("adapter/adapter_config.json", values | {key: value})
    base = ["--base", str(make.kit.base)] if make.chance.random() < 0.8 else []
    return make.chance.choice([["export", "adapter", "out"], ["generate", "adapter", "--tokens", "2"]]) + base


# --- tokenizers -------------------------------------------------------------------------------------------------------


def _replace(letter: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": letter}, "content": content}


def _regex(make: Maker, letter: str) -> str:
    forms = ["({0}+)+$", "({0}|{0})*$", "({0}*)*!", "(?:{0}{{0,900}}){{0,900}}!", "({0}+{0}+)+!", "(?=({0}+))\\1+!"]
    return make.chance.choice(forms).format(letter)


def _bomb(make: Maker, content: dict[str, Any], letter: str) -> None:
    """Puts a part into a tokenizer.json that explodes at a letter."""
    times = make.chance.choice([10, 30])
    normalizers = [content["normalizer"]] if content["normalizer"] else []
    pre_tokenizers = [content["pre_tokenizer"]] if content["pre_tokenizer"] else []
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": _regex(make, letter)}, "behavior": "Isolated", "invert": False}
    kind = make.chance.randrange(9)
    if kind == 0:
        normalizers += [_replace(letter, letter * 10)] * times
    elif kind == 1:
        normalizers += [_replace(letter, letter * 3_000_000)]
    elif kind == 2:
        normalizers += [{"type": "Replace", "pattern": {"Regex": _regex(make, letter)}, "content": letter}]
    elif kind == 3:
        pre_tokenizers = [split, *pre_tokenizers]
    elif kind == 4:
        pre_tokenizers += [byte_level] * times
    elif kind == 5:
        steps = [content["decoder"], *[_replace("e", "ee" * 5)] * times]
        content["decoder"] = {"type": "Sequence", "decoders": steps}
    elif kind == 6:
        pieces = [[letter * length, -1.0] for length in range(1, 3000)]
        content["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], *pieces], "byte_fallback": False}
        content["added_tokens"] = []
    elif kind == 7:
        normalizers += [{"type": "Precompiled", "precompiled_charsmap": make.chance.choice(["/////w==", "AAAA", "x"])}]
    else:
        content["added_tokens"] += [
            {"id": make.chance.choice([2**31, 2**32 - 1, 10**7]), "content": letter, "single_word": False,
             "lstrip": False, "rstrip": False, "normalized": True, "special": False}
        ]  # fmt: skip
    content["normalizer"] = {"type": "Sequence", "normalizers": normalizers} if normalizers else None
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": pre_tokenizers} if pre_tokenizers else None


def _tokenizer(make: Maker) -> list[str]:
    letter = make.chance.choice(LETTERS)
    text = make.chance.choice(["", "Hello "]) + letter * make.chance.choice([1, 60, 5000]) + "b"
    base = make.copy(make.kit.base, "base")
    content = json.loads((base / "tokenizer.json").read_text())
    _bomb(make, content, letter)
    make.write("base/tokenizer.json", content)
    make.write("text.txt", f"the old fox {text} over the moon.\n" * 9)
    row = {"instruction": f"What is {text}?", "output": "It is one."}
    make.write("rows.json", [row] * 9)
    if make.chance.random() < 0.5:
        return _read_text(make, "text.txt", "base/tokenizer.json")
    if make.chance.random() < 0.3:
        return [*TUNE, "model.init_from=base", "chat.source=rows.json", "data.folder=samples"]
    return _read_model(make, prompt=text)


# --- sources ----------------------------------------------------------------------------------------------------------


def _compressed(make: Maker) -> list[str]:
    """Text that is a thousandth of itself on disk, without a place to cut."""
    count = make.chance.choice([30, 60])
    million = make.chance.choice([b"a", b"[", b'"', b"\0", b",", b'{"text":', b"\xff", b" "]) * 10**6
    form = make.chance.choice([".txt", ".jsonl", ".json", ".csv", ".warc", ".smi", ".bin"])
    head = {".csv": b"text\n", ".jsonl": b'{"text": "', ".json": b'[{"text": "'}.get(form, b"")
    if form == ".warc":
        head = b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: 99000000\r\n\r\n"
    suffix = make.chance.choice([".gz", ".zst", ".xz", ".bz2"])
    if suffix == ".gz":
        raw = gzip.compress(head + million * count, make.chance.choice([1, 6]))
    else:
        raw = compress(head + million * count, suffix)
    return _read_text(make, make.write(f"in/a{form}{suffix}", raw).split("/", 1)[0])


def _table(make: Maker) -> list[str]:
    """Parquet whose rows are one text again and again, which takes no room in the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = make.chance.choice([50, 150])
    column = pa.array(["a" * 10**6] * rows)
    Path("in").mkdir()
    pq.write_table(pa.table({"text": column}), "in/a.parquet", compression="zstd", row_group_size=rows)
    return _read_text(make, "in")


def _sparse_source(make: Maker) -> list[str]:
    suffix = make.chance.choice([".txt", ".jsonl", ".json", ".csv", ".parquet", ".warc", ".bin", ".txt.gz", ".smi"])
    Path("in").mkdir()
    with Path(f"in/a{suffix}").open("wb") as file:
        file.write({".txt.gz": gzip.compress(b"abc"), ".parquet": b"PAR1"}.get(suffix, b"the old fox\n" * 99))
        file.truncate(7 * 10**7)  # on an honest text of this size a command may take as long
    return _read_text(make, "in")


def _chat_rows(make: Maker) -> list[str]:
    turns = [{"role": ("user", "assistant")[n % 2], "content": "a" * 100} for n in range(2 * 10**4)]
    row = make.chance.choice(
        [
            {"messages": [{"role": "user", "content": "Hello " * 3_000_000}, {"role": "assistant", "content": "one"}]},
            {"messages": turns},
            {"messages": [{"role": "user", "content": "a"}] * 10**6},
            {"instruction": "a", "output": "b" * 20_000_000},
            {"instruction": ["a"] * 10**6, "output": "b"},
            {"messages": turns[:2], "tools": [{"type": "function", "function": {"name": "x" * 10**6}}] * 9},
            {f"key{n}": "a" for n in range(10**5)},
        ]
    )
    rows = [*json.loads(make.kit.rows.read_text()), row] if "instruction" in row else [row, row]
    make.write("rows.json", rows)
    return [*TUNE, f"model.init_from={make.kit.base}", "chat.source=rows.json", "data.folder=samples"]


# --- runs and datasets ------------------------------------------------------------------------------------------------


def _run(make: Maker) -> list[str]:
    run = make.copy(make.kit.run, "made")
    line = {"type": "step", "step": 1, "loss": 1.0, "tokens": 5}
    key = make.chance.choice(["step", "loss", "tokens", "seconds", "grad_norm", "learning_rate", "memory_bytes"])
    text = make.chance.choice(
        [
            json.dumps(line | {key: make.chance.choice(HUGE)}),
            json.dumps(line | {key: "x" * 10**7}),
            json.dumps(
                {"type": "notice", "step": 1, "message": make.chance.choice(["a", "token", "a.", "://"]) * 10**6}
            ),
            "[" * 10**6,
            "9" * 10**6,
            json.dumps({"type": "run", "step": 0, "config": {"a" * 10**6: [[]] * 10**5}, "steps": 10**400}),
            "\n".join(json.dumps(line | {"step": step}) for step in range(10**5)),
        ]
    )
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(text + "\n")
    return _read_run(make)


def _dataset(make: Maker) -> list[str]:
    """A manifest that says something else; most of its numbers are held against files or its own hash."""
    data = make.copy(make.kit.data, "data")
    path = make.chance.choice([data / "manifest.json", data / "tokenizer.json", data / "report.json"])
    make.spoil_json(path, [*HUGE, "../../../etc/passwd", "/dev/zero", "x" * 10**6, [[]] * 10**6, {"a": {}}])
    return make.chance.choice(
        [
            ["prepare", "verify", "data"],
            ["prepare", "inspect", "data"],
            [*TRAIN, "data.folder=data", "data.source=null"],
            ["doctor", "--quick", "data.tokenizer=data/tokenizer.json", f"data.source={make.kit.text}"],
        ]
    )


KINDS: list[Callable[[Maker], list[str]]] = [
    _numbers, _tokenizer, _json_text, _no_plain_file, _tensors, _compressed, _adapter, _run, _tokenizer, _chat_rows,
    _numbers, _dataset, _template, _table, _tokenizer, _no_plain_file, _sparse_source, _rows, _json_text,
]  # fmt: skip


# Those that take little time.
QUICK = [_numbers, _tensors, _adapter, _run, _dataset]


def hostile_folders(
    kit: Kit, seed: int, count: int, kinds: Sequence[Callable[[Maker], list[str]]] = KINDS
) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """`count` hostile folders: the kind of each, and a function that writes it here and gives words that read it."""
    for index in range(count):
        kind = kinds[index % len(kinds)]
        chance = random.Random(f"hostile {seed} {index}")
        yield kind.__name__.strip("_"), lambda kind=kind, chance=chance: kind(Maker(kit, chance))
