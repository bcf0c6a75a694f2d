"""The verb config: what there is to set, where values come from, presets to copy."""

import argparse
import json
from pathlib import Path

from flatout.errors import UsageError
from flatout.words import add_config, choose_action, load, quoted

CONFIG_ACTIONS = {
    "explain": "every value, where it came from and what it means",
    "show": "the resolved config as YAML",
    "search": "settings by a word: names, sentences, and what other trainers call them",
    "schema": "the JSON schema of a config file",
    "presets": "the presets and hardware overlays that ship with Flatout",
    "copy": "copy a preset to a file to edit",
}


def config(words: list[str]) -> int:
    action, parser, rest = choose_action("config", words, CONFIG_ACTIONS)
    if action == "copy":
        parser.add_argument("preset", help="name of the preset")
        parser.add_argument("file", nargs="?", help="file to write; default: PRESET.yaml")
    elif action == "search":
        parser.add_argument("words", nargs="+", metavar="WORD", help="settings that hold all of these words")
    elif action in ("explain", "show"):
        add_config(parser)
    if action in ("explain", "search"):
        parser.flag("--json", "print rows as JSON")
    parsed = parser.parse_mixed(rest) if action == "search" else parser.parse_words(rest)
    return _search(parsed) if action == "search" else _config_action(action, parsed)


def _search(parsed: argparse.Namespace) -> int:
    from flatout.config.suggest import nearest_fields, search_fields, way_elsewhere

    found = search_fields(parsed.words)
    if not found:
        asked = " ".join(parsed.words)
        near = nearest_fields(parsed.words[0])
        hint = way_elsewhere(parsed.words[0]) or (
            f"did you mean {' or '.join(near)}?" if near else "`flatout config explain` lists every setting"
        )
        raise UsageError(f"no setting is about {quoted(asked)}", hint)
    if parsed.json:
        print(json.dumps([vars(row) for row in found], ensure_ascii=False))
        return 0
    cells = [(row.path, row.default) for row in found]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row, texts in zip(found, cells, strict=True):
        aligned = (f"{text:<{width}}" for text, width in zip(texts, widths, strict=True))
        elsewhere = f" (elsewhere: {', '.join(row.elsewhere)})" if row.elsewhere else ""
        print("  ".join([*aligned, row.description]) + elsewhere)
    return 0


def _config_action(action: str, parsed: argparse.Namespace) -> int:
    from flatout.config import catalogue
    from flatout.config import load as configs
    from flatout.config.yaml_loader import format_value

    if action == "schema":
        print(json.dumps(configs.schema_json(), indent=2))
    elif action == "presets":
        kinds: dict[catalogue.ShippedKind, str] = {"preset": "presets", "hardware": "hardware overlays"}
        for kind, title in kinds.items():
            print(f"{title}:")
            names = catalogue.shipped_names(kind)
            width = max(map(len, names)) + 2
            for name in names:
                print(f"  {name:<{width}}{catalogue.summary(kind, name)}")
    elif action == "copy":
        if parsed.file == "":
            raise UsageError("the name of the file to write is empty", "leave it out, or name a .yaml file")
        print(f"wrote {catalogue.copy_preset(parsed.preset, Path(parsed.file or f'{parsed.preset}.yaml'))}")
    elif action == "show":
        print(configs.show(load(parsed).config), end="")
    else:
        rows = configs.explain(load(parsed))
        if parsed.json:
            print(json.dumps([vars(row) for row in rows], ensure_ascii=False))
            return 0
        cells = [(row.path, format_value(row.value), row.source) for row in rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row, texts in zip(rows, cells, strict=True):
            aligned = (f"{text:<{width}}" for text, width in zip(texts, widths, strict=True))
            print("  ".join([*aligned, row.description]))
    return 0
