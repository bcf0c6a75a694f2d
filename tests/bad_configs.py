"""Config files and overrides that are wrong on purpose, for campaigns of thousands.

Each begins as a config that loads and gets exactly one mistake from a list of kinds, so every one is guaranteed to be
bad and the reason is known. The same seed gives the same sequence. The kinds take turns, so even a short campaign
meets all of them; the schema is read for fields, types and ranges, so new fields join without a change here.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

from flatout.config.facts import field_facts, section_paths, spot_at

Sections = dict[str, dict[str, str]]
ENCODINGS_OF_OTHERS = ("utf-16", "utf-32", "utf-16-le", "utf-16-be")


# Overrides that exclude each other, or that nothing reads.
CONFLICTS = [
    ["model.width=100", "model.heads=7"],
    ["model.width=105", "model.heads=7"],
    ["train.steps=5", "train.tokens=1000"],
    ["train.epochs=1", "train.tokens=1e6"],
    ["train.steps=null", "train.epochs=null", "train.tokens=null"],
    ["model.context=64", "train.batch_tokens=100"],
    ["model.family=gpt2", "model.norm=rmsnorm"],
    ["model.context=64", "train.batch_tokens=640", "speed.accumulation=7"],
    ["model.context=16", "train.batch_tokens=192", "speed.accumulation=3", "speed.micro_batch=3"],
    ["model.heads=4", "model.kv_heads=3"],
    ["model.head_size=7", "model.positions=rope"],
    ["model.rope_scaling=llama3", "model.rope_low=8", "model.rope_high=2"],
    ["model.rope_scaling=linear", "model.positions=learned"],
    ["model.family=gpt2", "model.qkv_bias=false"],
    ["model.family=gpt2", "model.pattern=WWWA"],
    ["model.pattern=W", "model.dropout=0.1"],
    ["model.attention_cap=30", "model.dropout=0.1"],
    ["model.pattern=AN", "model.positions=learned"],
    ["model.qk_norm=false", "model.qk_norm_whole=true"],
    ["model.rope_share=0.01", "model.head_size=16"],
    ["model.rope_scaling=longrope", "model.rope_factors=[1, 2, 3]", "model.head_size=16"],
    ["model.family=gpt2", "model.norm_place=both"],
    ["data.streaming=true", "train.epochs=1"],
    ["data.streaming=true", "data.source=null"],
    ["data.streaming=true", "data.packing=best_fit"],
    ["data.streaming=true", "data.stride=4"],
    ["data.streaming=true", "data.documents=apart", "model.dropout=0"],
    ["data.packing=reshuffle", "data.streaming=true"],
    ["data.documents=apart", "model.dropout=0.1"],
    ["data.packing=best_fit", "data.stride=4"],
    ["train.minutes=1", "train.steps=null", "train.epochs=null", "train.tokens=null", "optim.schedule=linear"],
    ["model.context=64", "train.batch_stages=[64, 100]"],
    ["lora.rank=4"],
    ["chat.source=rows.jsonl"],
    ["chat.source=rows.jsonl", "model.init_from=base", "lora.rank=4", "optim.optimizer=muon"],
    ["chat.source=rows.jsonl", "model.init_from=base", "lora.rank=4", "optim.optimizer=adamw", "optim.ema=0.9"],
    ["chat.source=rows.jsonl", "model.init_from=base", "model.dropout=0.1"],
]


BAD_IN_SOURCE = (
    *("weight: -1", "weight: 0", "weight: 1001", "weight: heavy", "weight: '2'", "weight: .nan", "weight: null"),
    *("weight: [1]", "weight: {a: 1}", "wieght: 1", "Weight: 1", "text_column: t", "format: jsnl", "format: 5"),
    *("field: body", "document_start: x", "zzz: 1", "tokenizer: char", "path.b: c"),
)


def bad_config_files(seed: int, count: int) -> Iterator[bytes]:
    """The bytes of `count` config files, none of which may load."""
    for index in range(count):
        rng = random.Random(f"file {seed} {index}")
        yield FILE_KINDS[index % len(FILE_KINDS)](rng)


def bad_overrides(seed: int, count: int) -> Iterator[list[str]]:
    """`count` lists of overrides, none of which may load over any shipped preset; fit for a process's arguments."""
    for index in range(count):
        rng = random.Random(f"override {seed} {index}")
        yield OVERRIDE_KINDS[index % len(OVERRIDE_KINDS)](rng)


def good_sections(rng: random.Random) -> Sections:
    """A valid config, as sections of YAML values."""
    heads = rng.choice([1, 2, 4, 8])
    context = rng.choice([16, 64, 256])
    return {
        "model": {
            "layers": str(rng.randint(1, 24)),
            "width": str(heads * 2 * rng.randint(8, 64)),
            "heads": str(heads),
            "context": str(context),
            "dropout": rng.choice(["0", "0.0", ".1", "1e-1"]),
        },
        "data": {"source": rng.choice(["shakespeare", "corpus.txt", "null"]), "tokenizer": "char"},
        "optim": {"learning_rate": rng.choice(["1e-3", "3E-4", "0.01"]), "warmup": str(rng.randint(0, 500))},
        "train": {"steps": str(rng.randint(1, 10**6)), "batch_tokens": str(context * rng.randint(1, 64))},
        "eval": {"every": str(rng.randint(0, 500))},
    }


def as_yaml(sections: Sections) -> str:
    lines: list[str] = []
    for section, fields in sections.items():
        lines.append(f"{section}:")
        lines += [f"  {name}: {value}" for name, value in fields.items()]
    return "\n".join(lines) + "\n"


def bad_value(rng: random.Random, path: str) -> str:
    """A YAML value on one line that the field refuses: of another type, outside its range, or unknown."""
    described = spot_at(path.split(".")).described
    parts = described.get("anyOf", [described])
    types = {part.get("type"): part for part in parts}
    lists, number = types.get("array"), types.get("number")
    forms = ["{a: 1}"] + ([] if "null" in types else ["null", "~"])
    forms += [] if lists is not None and lists["items"].get("type") in ("integer", "number") else ["[1, 2]"]
    forms += ["[]"] if lists is None or lists.get("minItems") else []
    forms += bad_items(path) if lists is not None else []
    main = parts[0]
    if main is lists:
        forms += ["word", "'[word]'", "5", "true"]
    elif "enum" in main:
        forms += ["neither", "'" + "x" * rng.randint(1, 300) + "'", str(rng.randint(2, 99)), "0.5"]
    elif main["type"] == "boolean":
        forms += ["yes", "no", "on", "off", "y", "0", "'true'", "truee"] + (["1"] if number is None else [])
    elif main["type"] in ("integer", "number"):
        forms += ["six", "'5'", '"1e-3"', "true", "0x10", "0o7", "1:30", "1,5", "2024-01-01", ".nan", ".inf", "-.inf"]
        forms += ["1e999", "--1", "1__0", "_1", "1e", "5 steps", "9" * 5000]
        forms += ["1.5"] if main["type"] == "integer" else []
        forms += ["1e-1"] if number is None else []
        forms += _outside(main)
    else:
        forms += ["true", "1e9"] + (["'a b c/'", "''"] if "pattern" in main else [])
        forms += [] if "integer" in types else ["3"]
        forms += ["''", '""'] if main.get("minLength") else []
        forms += ["0.5"] if number is None else _outside(number)
    return rng.choice(forms)


def bad_items(path: str) -> list[str]:
    """Lists on one line of which one item is wrong."""
    items = ["5", "null", "true", "[x]", "[]", "1e3", "{}", "{a: 1}", "{weight: 2}", "{path: 5}", "{path: null}"]
    if path == "data.source":
        items += [f"{{path: a, {wrong}}}" for wrong in BAD_IN_SOURCE]
        good = ["a.txt", "{path: b, weight: 2}", "'c d'"]
    elif path == "model.rope_factors":
        items = ["null", "true", "[x]", "[]", "{}", "{a: 1}", "0", "-1", ".nan", "word", "''"]
        good = ["1", "2.5", "1e3"]
    elif path == "clean.languages":
        items += ["EN", "e", "engl", "''", "'e n'"]
        good = ["en", "de", "no"]
    else:
        items += ["''"]
        good = ["q_proj", "v_proj", "o_proj"]
    return [f"[{', '.join([*good[:place], item, *good[place:]])}]" for item in items for place in range(3)]


def misspelt(rng: random.Random, word: str, known: list[str]) -> str:
    """The word with one to three letters changed, and no known word."""
    while True:
        letters = list(word)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(letters))
            letters[place : place + 1] = rng.choice(
                [[], [letters[place]] * 2, [rng.choice("abcdefghijklmnopqrstuvwxyz_-9")], [letters[place].upper()]]
            )
            letters = letters or list(word)
        result = "".join(letters)
        if (
            result not in known
            and result[0].isalpha()
            and result not in ("preset", "hardware", "null", "true", "false")
        ):
            return result


def _outside(described: dict[str, Any]) -> list[str]:
    whole = described["type"] == "integer"
    forms: list[str] = []
    if "minimum" in described:
        forms += [repr(described["minimum"] - 1), "-1e9"]
    if "exclusiveMinimum" in described:
        forms += [repr(described["exclusiveMinimum"]), "-1"]
    if "maximum" in described:
        forms += [repr(described["maximum"] + 1), "1e99" if whole else "1e30"]
    if "exclusiveMaximum" in described:
        forms += [repr(described["exclusiveMaximum"])]
    return forms


def _any_path(rng: random.Random) -> str:
    return rng.choice(list(field_facts()))


def _names_in(section: str) -> list[str]:
    return [path.removeprefix(section + ".") for path in field_facts() if path.startswith(section + ".")]


def _with(rng: random.Random, path: str, value: str) -> bytes:
    sections = good_sections(rng)
    section, _, name = path.partition(".")
    sections.setdefault(section, {})[name] = value
    return as_yaml(sections).encode()


def _with_line(rng: random.Random, line: str) -> bytes:
    """A good config with one more line at the top level: before, after or between its sections."""
    sections = good_sections(rng)
    texts = [as_yaml({name: fields}) for name, fields in sections.items()]
    texts.insert(rng.randint(0, len(texts)), line + "\n")
    return "".join(texts).encode()


def _misspelt_field(rng: random.Random) -> bytes:
    section, _, name = _any_path(rng).partition(".")
    return _with(rng, f"{section}.{misspelt(rng, name, _names_in(section))}", "1")


def _misspelt_section(rng: random.Random) -> bytes:
    word = misspelt(rng, rng.choice(section_paths()), list(section_paths()))
    return _with_line(rng, f"{word}: {rng.choice(['', '{}', '1', '{a: 1}'])}")


def _wrong_value(rng: random.Random) -> bytes:
    path = _any_path(rng)
    return _with(rng, path, bad_value(rng, path))


def _out_of_range(rng: random.Random) -> bytes:
    ranged = {}
    for path in field_facts():
        described = spot_at(path.split(".")).described
        main = described.get("anyOf", [described])[0]
        if main.get("type") in ("integer", "number") and _outside(main):
            ranged[path] = _outside(main)
    path = rng.choice(list(ranged))
    return _with(rng, path, rng.choice(ranged[path]))


def _wrong_item(rng: random.Random) -> bytes:
    """A list with one item that is wrong, on one line or over several."""
    path = rng.choice(["data.source", "clean.languages"])
    if path == "data.source" and rng.random() < 0.5:
        lines = ["", "    - a.txt", "    - path: b", f"      {rng.choice(BAD_IN_SOURCE)}", "    - c"]
        return _with(rng, path, "\n".join(lines))
    return _with(rng, path, rng.choice(bad_items(path)))


def _duplicate_field(rng: random.Random) -> bytes:
    lines = as_yaml(good_sections(rng)).splitlines()
    place = rng.choice([index for index, line in enumerate(lines) if line.startswith("  ")])
    copy = lines[place]
    if rng.random() < 0.5:
        name = copy.strip().partition(":")[0]
        copy = copy.replace(name, f"'{name}'", 1)
    lines.insert(place + 1, copy)
    return "\n".join(lines).encode()


def _duplicate_section(rng: random.Random) -> bytes:
    sections = good_sections(rng)
    return (as_yaml(sections) + f"{rng.choice(list(sections))}:\n").encode()


def _tag(rng: random.Random) -> bytes:
    path = _any_path(rng)
    tags = ["!!python/object/apply:os.system ['true']", "!!python/name:os.system", "!!int 5", "!mine 5"]
    tags += ["!!set {a, b}", "!!binary aGk=", "!<tag:example.org,2000:x> 5", "!undefined!handle 5"]
    return _with(rng, path, rng.choice(tags))


def _anchor(rng: random.Random) -> bytes:
    return _with(rng, _any_path(rng), "*nowhere")


def _anchor_bomb(rng: random.Random) -> bytes:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, rng.randint(5, 40))]
    return "\n".join(lines).encode()


def _merge_key(rng: random.Random) -> bytes:
    return rng.choice([_with_line(rng, "<<: {model: {}}"), _with(rng, "model.<<", "{layers: 3}")])


def _tab(rng: random.Random) -> bytes:
    lines = as_yaml(good_sections(rng)).splitlines()
    place = rng.choice([index for index, line in enumerate(lines) if line.startswith("  ")])
    lines[place] = "\t" + lines[place].strip()
    return "\n".join(lines).encode()


def _garbage(rng: random.Random) -> bytes:
    """Random bytes with one that no UTF-8 text holds."""
    data = bytearray(rng.randbytes(rng.randint(1, 400)))
    data.insert(rng.randint(0, len(data)), 0xFF)
    return bytes(data)


def _broken_byte(rng: random.Random) -> bytes:
    data = bytearray(as_yaml(good_sections(rng)).encode())
    data.insert(rng.randint(0, len(data)), rng.choice([0xC0, 0xC1, 0xF5, 0xFE, 0xFF, 0x80]))
    return bytes(data)


def _control_character(rng: random.Random) -> bytes:
    text = as_yaml(good_sections(rng))
    place = rng.randint(0, len(text))
    return (text[:place] + chr(rng.choice([0, 1, 7, 8, 11, 12, 27, 31, 127, 155, 0x2028])) + text[place:]).encode()


def _other_encoding(rng: random.Random) -> bytes:
    return as_yaml(good_sections(rng)).encode(rng.choice(ENCODINGS_OF_OTHERS))


def _truncated(rng: random.Random) -> bytes:
    ends = [
        'output: {name: "abc',
        "output: {name: 'abc",
        "model: {layers: 4",
        "model: {layers: [1, 2",
        'model: {"layers"',
    ]
    ends += ["output:\n  name: 'a\n  folder: b", 'data:\n  source: "a\\', "model: {layers: 4]", "}", "]"]
    del_keys = ("model", "data", "output")
    sections = {name: fields for name, fields in good_sections(rng).items() if name not in del_keys}
    return (as_yaml(sections) + rng.choice(ends)).encode()


def _deep(rng: random.Random) -> bytes:
    depth = rng.choice([21, 30, 500, 5000, 40000])
    block = "".join(f"{' ' * level}a:\n" for level in range(min(depth, 300)))
    forms = ["[" * depth, "[" * depth + "]" * depth, "{a: " * min(depth, 20000), "- " * depth, "? " * depth, block]
    return rng.choice(forms).encode()


def _section_is_value(rng: random.Random) -> bytes:
    section = rng.choice(section_paths())
    sections = good_sections(rng)
    sections.pop(section, None)
    value = rng.choice(["5", "text", "[]", "[layers, width]", "true", "1e3", "''", "- steps"])
    return (as_yaml(sections) + f"{section}: {value}\n").encode()


def _not_a_mapping(rng: random.Random) -> bytes:
    forms = ["- model\n- train\n", "42\n", "just text\n", "[]", "true", "'quoted'", "| \n block\n", "- - - x\n", "3.5"]
    return rng.choice(forms).encode()


def _key_is_not_text(rng: random.Random) -> bytes:
    key = rng.choice(["1", "1.5", "true", "null", "~", "[a, b]", "{a: b}", "? - a\n", ".inf", "-7", "? "])
    return rng.choice([_with_line(rng, f"{key}: 1"), _with(rng, "model.layers", "{" + f"{key.strip('? ')}: 1" + "}")])


def _conflict(rng: random.Random) -> bytes:
    sections = good_sections(rng)
    model, train = sections["model"], sections["train"]

    def odd_heads() -> None:
        model["width"], model["heads"] = "100", rng.choice(["3", "7", "64"])

    def odd_batch() -> None:
        train["batch_tokens"] = str(int(train["batch_tokens"]) + rng.randint(1, int(model["context"]) - 1))

    def two_lengths() -> None:
        train.update({"steps": "5", rng.choice(["tokens", "epochs"]): "1000"})

    def no_length() -> None:
        train["steps"] = "null"

    def not_gpt2() -> None:
        model.update({"family": "gpt2", **rng.choice([{"norm": "rmsnorm"}, {"bias": "false"}, {"positions": "rope"}])})

    def odd_accumulation() -> None:
        sequences = int(train["batch_tokens"]) // int(model["context"])
        sections["speed"] = {"accumulation": str(sequences + rng.randint(1, 9))}

    def odd_reading() -> None:
        streaming = {"streaming": "true", **rng.choice([{"source": "null"}, {"packing": "best_fit"}, {"stride": "4"}])}
        sections["data"].update(rng.choice([streaming, {"packing": "best_fit", "stride": "4"}]))

    rng.choice([odd_heads, odd_batch, two_lengths, no_length, not_gpt2, odd_accumulation, odd_reading])()
    return as_yaml(sections).encode()


def _two_documents(rng: random.Random) -> bytes:
    text = as_yaml(good_sections(rng))
    return (text + rng.choice(["---\n", "---\n" + text, "...\n---\n{}\n"])).encode()


def _unknown_name(rng: random.Random) -> bytes:
    key = rng.choice(["preset", "hardware"])
    value = rng.choice(["nope", "../gpt2-124m", "5", "[gpt2-124m]", "GPT2", "24", "''", "{a: b}", "x" * 5000])
    return _with_line(rng, f"{key}: {value}")


def _wrong_nesting(rng: random.Random) -> bytes:
    path = _any_path(rng)
    section, _, name = path.partition(".")
    other = rng.choice([other for other in section_paths() if name not in _names_in(other)])
    if rng.random() < 0.3 and name not in section_paths():
        return _with_line(rng, f"{name}: 1")
    if rng.random() < 0.5:
        return _with(rng, f"{other}.{name}", "1")
    return rng.choice([_with_line(rng, f"{path}: 1"), _with(rng, f"{other}.{section}", f"{{{name}: 1}}")])


def _too_large(rng: random.Random) -> bytes:
    filler = rng.choice(["# a long comment\n", "a: 1\n", "\n", "x"])
    return as_yaml(good_sections(rng)).encode() + filler.encode() * (1_000_001 // len(filler) + 1)


def _broken_syntax(rng: random.Random) -> bytes:
    lines = [
        "model\n  layers: 3",
        "a: b: c",
        "  indented: 1\nless: 2",
        "key: 'open",
        "@at: 1",
        "`tick: 1",
        "%no: 1",
        "a: }",
    ]
    lines += ["a: [1, 2", "- item\nkey: 1", "key: |\n text\nmore", "*: 1", ": : :", "train: steps: 5"]
    return rng.choice(lines).encode()


def _bad_escape(rng: random.Random) -> bytes:
    escape = rng.choice(["\\x00", "\\e", "\\ud800", "\\UFFFFFFFF", "\\U00110000", "\\q", "\\x1", "\\x7f", "\\0"])
    return _with(rng, "data.source", f'"a{escape}b"')


def _override_without_equals(rng: random.Random) -> list[str]:
    return [
        rng.choice(["", " ", "=", "=5", "steps", "train.steps", "train.steps:5", "train.steps 5", "100", " =", "é"])
    ]


def _override_unknown(rng: random.Random) -> list[str]:
    section, _, name = _any_path(rng).partition(".")
    wrong = misspelt(rng, name, _names_in(section))
    forms = [
        f"{section}.{wrong}",
        f"{section}.{name}.{name}",
        f"{misspelt(rng, section, list(section_paths()))}.{name}",
    ]
    forms += [
        f".{section}.{name}",
        f"{section}..{name}",
        f"{section}.{name.upper()}",
        f"{section}/{name}",
        f"{section}.",
    ]
    forms += ["preset", "hardware", "x" * 5000, f"{section}.\x1b[31m{name}"]
    return [rng.choice(forms) + "=1"]


def _override_section(rng: random.Random) -> list[str]:
    return [rng.choice(section_paths()) + rng.choice(["=1", "={}", "=null", "=", "={layers: 3}"])]


def _override_wrong_value(rng: random.Random) -> list[str]:
    path = _any_path(rng)
    return [f"{path}={bad_value(rng, path)}"]


def _override_wrong_item(rng: random.Random) -> list[str]:
    path = rng.choice(["data.source", "clean.languages"])
    broken = ["[a", "[a}", "[a] b", "[a], b", "[a] # b", "[a]: b", "[&a b]", "[!x b]", "[*a]", "[a, 'b]", '["\\x00"]']
    broken += ["[{path: a, path: b}]", "[{1: 2}]", "[{<<: a}]", "[a,\nb]", "[" * 30 + "]" * 30, "{path: a}", "{}"]
    broken += ["[" + "a," * 10_001 + "]", "]", "[\x1b]"]
    return [f"{path}={rng.choice([*broken, *bad_items(path)])}"]


def _override_broken_value(rng: random.Random) -> list[str]:
    values = [
        "",
        "  ",
        "'open",
        '"open',
        '"a" b',
        "'a' 'b'",
        "[1",
        "{",
        "&a 1",
        "*a",
        "!!int 5",
        "!x",
        "| text",
        "> text",
    ]
    values += [
        '"\\x00"',
        '"\\ud800"',
        '"\\UFFFFFFFF"',
        "a\nb",
        "a\x1bb",
        "# comment",
        "@x",
        "`x`",
        "%x",
        '"a": b',
        "- a",
    ]
    return [f"{_any_path(rng)}={rng.choice(values)}"]


def _override_conflict(rng: random.Random) -> list[str]:
    return rng.choice(CONFLICTS)


def _override_among_good(rng: random.Random) -> list[str]:
    overrides = ["train.seed=1", "optim.learning_rate=1e-3", "eval.sample_prompt=ROMEO:"]
    while True:
        bad = rng.choice([_override_wrong_value, _override_unknown])(rng)[0]
        # The last of two values for one field wins, so a good one could make up for the bad one.
        if bad.partition("=")[0] not in {good.partition("=")[0] for good in overrides}:
            overrides.insert(rng.randint(0, 3), bad)
            return overrides


FILE_KINDS: list[Callable[[random.Random], bytes]] = [
    _misspelt_field,
    _misspelt_section,
    _wrong_value,
    _out_of_range,
    _wrong_item,
    _duplicate_field,
    _duplicate_section,
    _tag,
    _anchor,
    _anchor_bomb,
    _merge_key,
    _tab,
    _garbage,
    _broken_byte,
    _control_character,
    _other_encoding,
    _truncated,
    _deep,
    _section_is_value,
    _not_a_mapping,
    _key_is_not_text,
    _conflict,
    _two_documents,
    _unknown_name,
    _wrong_nesting,
    _too_large,
    _broken_syntax,
    _bad_escape,
]
OVERRIDE_KINDS: list[Callable[[random.Random], list[str]]] = [
    _override_without_equals,
    _override_unknown,
    _override_section,
    _override_wrong_value,
    _override_wrong_item,
    _override_broken_value,
    _override_conflict,
    _override_among_good,
]
