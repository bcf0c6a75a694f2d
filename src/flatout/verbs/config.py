"""The verb config: what there is to set, where values come from, presets to copy."""

import argparse
import json
from pathlib import Path

from flatout.errors import UsageError
from flatout.words import Parser, add_config, choose_action, load, sentence

CONFIG_ACTIONS = {
    "explain": "every value, where it came from and what it means",
    "show": "the resolved config as YAML",
    "schema": "the JSON schema of a config file",
    "presets": "the presets and hardware overlays that ship with Flatout",
    "copy": "copy a preset to a file to edit",
}


def config(words: list[str]) -> int:
    action, rest = choose_action("config", words, CONFIG_ACTIONS)
    if action is None:
        return 0
    parser = Parser(f"config {action}", sentence(CONFIG_ACTIONS[action]))
    if action == "copy":
        parser.add_argument("preset", help="name of the preset")
        parser.add_argument("file", nargs="?", help="file to write; default: PRESET.yaml")
    elif action in ("explain", "show"):
        add_config(parser)
    if action == "explain":
        parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parsed = parser.parse_words(rest)
    return _config_action(action, parsed)


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
        widths = [max(len(row.path) for row in rows), max(len(format_value(row.value)) for row in rows)]
        sources = max(len(row.source) for row in rows)
        for row in rows:
            value = format_value(row.value)
            print(f"{row.path:<{widths[0]}}  {value:<{widths[1]}}  {row.source:<{sources}}  {row.description}")
    return 0
