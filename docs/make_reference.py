"""Writes docs/reference from the code: `python docs/make_reference.py`.

Settings come from the schema, verbs from their parsers, records from their dataclasses and the comments beside the
fields, Python functions from signatures and docstrings. A test compares the pages with what this makes, so it is run
whenever one of them has changed. Only the first paragraphs of each page are written here.
"""

import ast
import dataclasses
import importlib
import inspect
import textwrap
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flatout
from flatout import records
from flatout.config import catalogue
from flatout.config.facts import allowed_values, field_facts, spot_at
from flatout.config.schema import RunConfig
from flatout.config.suggest import FIELD_ELSEWHERE_CALLED, WAY_ELSEWHERE_CALLED
from flatout.config.yaml_loader import format_value
from flatout.front.commands import COMMANDS, VERBS, actions_of, help_text
from flatout.front.words import Command, Option

FOLDER = Path(__file__).with_name("reference")
_MADE = "Made from the code by `python docs/make_reference.py`."


def pages() -> dict[str, str]:
    """Every page by its file name."""
    return {
        "README.md": _INDEX,
        "settings.md": settings_page(),
        "verbs.md": verbs_page(),
        "records.md": records_page(),
        "api.md": api_page(),
    }


_INDEX = f"""# Reference
{_MADE}

- [Settings](settings.md): every field of a config, its values, default and meaning, and what other trainers call it;
  presets and hardware overlays.
- [Verbs](verbs.md): every command with its options, and the exit codes.
- [Records](records.md): what a run writes to `metrics.jsonl` and prints with `--json`, field by field.
- [API](api.md): every Python function and class.
"""


# --- settings ---------------------------------------------------------------------------------------------------------

_SETTINGS = f"""# Settings
{_MADE}

A value comes from a preset, a hardware overlay, a file or the command line (`SECTION.FIELD=VALUE`); the last one wins,
and each remembers where it came from. `null` means that Flatout works the value out; the run's first lines show what it
is. `model.family=gpt2` has some defaults of its own. Unknown, duplicate and mistyped keys are refused with file, line
and a suggestion.

```sh
flatout config presets                    # what ships
flatout config copy shakespeare my.yaml
flatout config explain my.yaml            # every value, its source, its meaning
flatout config explain optim.learning_rate my.yaml   # one setting: why, and what it may be
flatout config search save_steps          # settings by a word, also by another trainer's
flatout config show gpt2-124m --hardware 8gb
flatout config schema                     # JSON schema, for editors
```

A file may name the preset that it changes, and an overlay, in its first lines:

```yaml
preset: gpt2-124m
hardware: 12gb
train:
  steps: 2000
```

A file without `preset:` has Flatout's own defaults, those of this page, for all that it leaves out, and a note says so.
"""


def settings_page() -> str:
    sections = [f"[{name}](#{name})" for name in RunConfig.model_fields]
    after = "[presets](#presets) · [hardware overlays](#hardware-overlays) · [other trainers](#other-trainers-settings)"
    parts = [_SETTINGS, f"\n{' · '.join(sections)} · {after}\n"]
    for section, holder in RunConfig.model_fields.items():
        fields = {path: field for path, field in field_facts().items() if path.startswith(f"{section}.")}
        rows = [_setting(path, field) for path, field in fields.items()]
        parts.append(f"\n## {section}\n{holder.description}\n\n{_table(('setting', 'default', 'meaning'), rows)}")
    kinds: dict[catalogue.ShippedKind, str] = {"preset": "Presets", "hardware": "Hardware overlays"}
    for kind, title in kinds.items():
        rows = [(f"`{name}`", catalogue.summary(kind, name)) for name in catalogue.shipped_names(kind)]
        parts.append(f"\n## {title}\n{_ABOUT[kind]}\n\n{_table(('name', 'what it is for'), rows)}")
    ways: dict[str, list[str]] = {}
    for name, way in WAY_ELSEWHERE_CALLED.items():
        if "." not in name:  # `optim.name` looks like a setting of ours
            ways.setdefault(way, []).append(f"`{name}`")
    rows = [(", ".join(names), way) for way, names in ways.items()]
    parts.append(f"\n## Other trainers' settings\n{_FOREIGN}\n\n{_table(('elsewhere', 'here'), rows)}")
    return "".join(parts)


_ABOUT = {
    "preset": "The first word of a command: `flatout train gpt2-124m`. `flatout config copy NAME` writes one to edit. "
    "`small-32k`,\n`medium-32k-hybrid` and the like, a size and a preset of 32,768 tokens in one name, are taken, too.",
    "hardware": "`--hardware NAME`, or `auto`. An overlay keeps the global batch and the context, and sets what has to "
    "fit:\nthe micro-batch and activation checkpointing.",
}
_FOREIGN = """What they call our settings stands behind "Elsewhere" above. Such a name is refused with ours; values may
be in other units. These have no setting here:"""


def _setting(path: str, field: Any) -> tuple[str, str, str]:
    default = format_value(field.get_default(call_default_factory=True))
    allowed = allowed_values(spot_at(path.split(".")).described)
    foreign = [f"`{name}`" for name, ours in FIELD_ELSEWHERE_CALLED.items() if ours == path]
    elsewhere = f" Elsewhere: {', '.join(foreign)}." if foreign else ""
    return f'<a id="{path}"></a>`{path}`', f"`{default}`", f"{field.description} *{_sentence(allowed)}*{elsewhere}"


# --- verbs ------------------------------------------------------------------------------------------------------------

_VERBS = f"""# Verbs
{_MADE} `flatout VERB --help` prints the same.

```sh
flatout train                                        # the default: a small Shakespeare model
flatout train --resume auto                          # resume it if it was interrupted, else start
flatout train my.yaml optim.learning_rate=1e-3       # a config file, one value changed
flatout train 32k model.init_from=runs/short   # from another run's weights, here with a longer context
flatout train gpt2-124m --hardware auto data.source=texts/ train.epochs=1   # on a GPU: GPT-2 small, your own files
flatout train gpt2-124m --gpus 8 data.source=texts/  # the same on eight GPUs
flatout train --view                                 # a panel with curve, speed, card and warnings
flatout prepare gpt2-124m data.source=texts/         # only make the token shards; killed, it goes on where it was
flatout prepare inspect data/gpt2-corpus             # what is in them, what was dropped and why
flatout prepare data.source=texts/ data.tokenizer=bpe-8192   # with a byte-pair encoding of your own
flatout eval runs/shakespeare                   # loss, perplexity, bits per byte
flatout generate runs/shakespeare --prompt "ROMEO:" --temperature 0.8 --top-p 0.95
flatout generate --interactive                       # the newest run, prompt by prompt
flatout doctor gpt2-124m data.source=texts/          # what is wrong before it starts, and what to do about it
flatout estimate gpt2-124m --price 3                 # time, memory and cost, from a few real steps
flatout estimate --gpus 8..64 --size 7b --gpu h100   # memory, communication and time on many GPUs
flatout tune gpt2-124m --out tuned.yaml              # what trains fastest on this machine, as a config
flatout tune lr                                      # a learning rate by a range test
flatout bench                                        # what every speed switch is worth here
flatout ablate --fields model.qk_norm                # what a field is worth to the loss, by pairs of runs
flatout profile                                      # what holds a step on this machine, and the switch to try
flatout runs --sort loss                             # all runs: state, step, loss, size, age
flatout watch runs/a                                 # follow a run from another terminal
flatout plot runs/a runs/b                           # curves as pictures and CSV; each run draws its own when it ends
flatout report runs/a                                # one page: curves, switches, samples, where the time went
flatout finetune model.init_from=FOLDER chat.source=rows.jsonl   # LoRA on conversations
flatout chat runs/lora                               # talk to it
flatout serve runs/lora                              # OpenAI's interface and a chat page
flatout export runs/lora merged/                     # the adapters written into the weights
flatout export runs/my-gpt2 exported/                # config.json and model.safetensors for Hugging Face tools
```

`--resume RUN` takes all settings from the run; words on the command line change them. `make train` puts the command
into `.venv/bin/flatout`; `. .venv/bin/activate` lets you write `flatout`. `source <(flatout completion bash)` in
`~/.bashrc`, or `zsh` in `~/.zshrc`, completes verbs, options, presets, settings and runs.
"""


def verbs_page() -> str:
    links = " · ".join(f"[{verb}](#flatout-{verb})" for verb in VERBS)
    parts = [_VERBS, f"\n{links}\n\n## All verbs and exit codes\n`flatout --help` prints:\n```\n{help_text(100)}```\n"]
    for name, command in COMMANDS.items():
        parts.append(f"\n##{'#' if ' ' in name else ''} flatout {name}\n")
        if command.run is not None:
            parts.append(_verb(command))
        if actions := actions_of(name):
            listed = ", ".join(f"[{action}](#flatout-{name}-{action})" for action in actions)
            parts.append(f"{chr(10) if command.run else ''}Actions: {listed}.\n")
        if command.twin:
            parts.append(f"\nIn Python: [`flatout.{command.twin}`](api.md#{command.twin}).\n")
    return "".join(parts)


def _verb(command: Command) -> str:
    words = [_shown(option) for option in command.options if option.by_place]
    words += ["[options]"] if len(words) < len(command.options) else []
    usage = command.usage or " ".join([f"flatout {command.name}", *words])
    places = sorted(command.options, key=lambda option: not option.by_place)
    rows = [(f"`{_shown(option)}`", _meaning(option)) for option in places]
    about = f"{textwrap.fill(command.heading, 120)}\n```\n{usage}\n```\n"
    return about + (_table(("word or option", "meaning"), rows) if rows else "")


def _shown(option: Option) -> str:
    """A word or an option as usage shows it."""
    name, more = option.names[0], option.more
    dest = more.get("dest", name).strip("-").replace("-", "_").upper()
    value: str = more.get("metavar", dest)
    if option.by_place:
        return {"?": f"[{value}]", "+": f"{value} ...", "*": f"[{value} ...]"}.get(str(more.get("nargs")), value)
    return name if more.get("action") == "store_true" else f"{name} {'|'.join(more.get('choices', [value]))}"


def _meaning(option: Option) -> str:
    text, default = option.more["help"], option.more.get("default")
    text += f" ({option.limits})" if option.limits not in text else ""
    text += f"; default: {default}" if default and "default" not in text and str(default) not in text else ""
    return text + (" (required)" if option.more.get("required") else "")


# --- records ----------------------------------------------------------------------------------------------------------

_RECORDS = f"""# Records
{_MADE}

A run writes a record per line to `metrics.jsonl` in its folder, `flatout train --json` prints the same lines, and
`flatout.train` yields them as objects of these classes. In JSON every record begins with its `type`; numbers that are
not finite are the strings "nan", "inf" and "-inf".

## The folder of a run
`runs/NAME`, or `runs/NAME+2` when that is taken. NAME is the config file's or the preset's; a text of your own in
`data.source` adds its name, and without a preset is the name. `output.folder` and `output.name` set both.

| file | what it holds |
|---|---|
| `config.yaml` | all settings of the run |
| `metrics.jsonl` | every record |
| `checkpoints/step-N` | a checkpoint: safetensors and JSON, with a SHA-256 for every file |
| `best.json` | which checkpoint has the lowest validation loss |
| `plots/` | the run's curves as pictures and CSV, drawn when it ends |
| `run.lock` | which process has the run; a second one is refused |
"""


def records_page() -> str:
    run = typing.get_args(records.Record)
    others = [made for made in records.NAMES if made not in run]
    made = [one for one in vars(records).values() if inspect.isclass(one) and dataclasses.is_dataclass(one)]
    rest = [one for one in made if one.__module__ == records.__name__ and one not in records.NAMES]
    progress = [one for one in rest if one.__name__.endswith("Progress")]
    parts = [one for one in rest if one not in progress]
    groups = {
        "Records of a run": run,
        "Records of `prepare inspect`, `bench`, `ablate` and `tune`": others,
        "Parts of records": parts,
        "Progress": progress,
    }
    listed = " · ".join(f"[{one.__name__}](#{one.__name__.lower()})" for one in (*run, *others))
    text = [_RECORDS, f"\n{textwrap.fill(listed, 120, break_long_words=False, break_on_hyphens=False)}\n"]
    for title, members in groups.items():
        text.append(f"\n## {title}\n")
        text += [_record(member) for member in members]
    return "".join(text)


def _record(made: type) -> str:
    about = inspect.getdoc(made) or ""
    lines, _ = inspect.getsourcelines(made)
    (node,) = ast.parse("".join(lines)).body
    assert isinstance(node, ast.ClassDef)
    rows = []
    for field in node.body:
        if isinstance(field, ast.AnnAssign):
            assert isinstance(field.target, ast.Name)
            said = _comment(lines, field.lineno - 1)
            assert said or f"`{field.target.id}`" in about, f"{made.__name__}.{field.target.id} says nothing"
            kind = ast.unparse(field.annotation).replace(" | ", " or ")
            rows.append((f"`{field.target.id}`", kind, said or "see above"))
    named = records.NAMES.get(made)
    in_json = f'In JSON `"type": "{named}"`.\n\n' if named else ""
    return f"\n### {made.__name__}\n{in_json}{about}\n\n{_table(('field', 'type', 'meaning'), rows)}"


def _comment(lines: Sequence[str], number: int) -> str:
    """What stands behind a field, or in the lines before it."""
    _, found, text = lines[number].partition("  # ")
    if found:
        return text.strip()
    above = number
    while lines[above - 1].strip().startswith("# "):
        above -= 1
    return " ".join(line.strip().removeprefix("# ") for line in lines[above:number])


# --- Python -----------------------------------------------------------------------------------------------------------

_API = f"""# The API
{_MADE} How the functions go together, with examples:
[Python](../guides/python.md).

`Config` is a `LoadedConfig` or a `RunConfig`. `Progress` is a function that takes a `PrepareProgress`.
`ModelFromPython` is a torch module, or a function that takes the built model and returns one or None;
`OptimizerFromPython` a `Rule`, several, or a function that takes named parameters and returns a torch optimizer.
"""


def api_page() -> str:
    parts = [_API]
    for module_name, names in flatout.HOMES.items():
        module = importlib.import_module(module_name)
        about = (inspect.getdoc(module) or "").partition("\n\n")[0].replace("\n", " ")
        parts.append(f"\n## {module_name}\n{textwrap.fill(about, 120)}\n")
        if module is records:
            listed = ", ".join(f"[{name}](records.md#{name.lower()})" for name in names if name != "Record")
            listed = textwrap.fill(f"{listed}. `Record` is any of a run.", 120, break_on_hyphens=False)
            parts.append(f"\nEach is described in [records](records.md):\n{listed}\n")
        else:
            parts += [f"\n### {name}\n{_described(getattr(flatout, name))}" for name in names]
    return "".join(parts)


def _described(thing: Any) -> str:
    if inspect.isclass(thing):
        return _class(thing)
    if inspect.isfunction(thing):
        return _function(thing)
    members = ", ".join(f"`{one.__name__}`" for one in typing.get_args(thing))
    return textwrap.fill(f"One of {members}.", 120) + "\n"


def _function(function: Any) -> str:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    return f"{_code(_signature(node))}{inspect.getdoc(function)}\n"


def _class(made: type) -> str:
    lines, _ = inspect.getsourcelines(made)
    (node,) = ast.parse(textwrap.dedent("".join(lines))).body
    assert isinstance(node, ast.ClassDef)
    fields = [lines[one.lineno - 1].strip() for one in node.body if isinstance(one, ast.AnnAssign)]
    about = (made.__doc__ and inspect.getdoc(made)) or ""
    if about.startswith(f"{made.__name__}("):  # made by `dataclass`, where the class has none
        about = ""
    parts = [f"{about}\n" if about else "", _code("\n".join(fields)) if fields else ""]
    return "".join([*parts, *_methods(node)])


def _methods(node: ast.ClassDef) -> Iterator[str]:
    for one in node.body:
        if not isinstance(one, ast.FunctionDef) or (one.name[0] == "_" and one.name not in ("__call__", "__init__")):
            continue
        about = ast.get_docstring(one)
        if about is None and one.name != "__init__":
            continue
        is_property = any("property" in ast.unparse(mark) for mark in one.decorator_list)
        value = one.name if one.returns is None else f"{one.name}: {ast.unparse(one.returns)}"
        shown = value if is_property else _signature(one)
        yield f"{_code(shown)}{'' if about is None else about + chr(10)}"


def _signature(node: ast.FunctionDef) -> str:
    """A call with its types: on one line if it is short, else with a line for each argument."""
    arguments, returns = node.args, "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
    rows = [_argument(*one) for one in zip(arguments.args, defaults, strict=True) if one[0].arg != "self"]
    rows += ["*"] if arguments.kwonlyargs else []
    rows += [_argument(*one) for one in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    rows += [] if arguments.kwarg is None else [f"**{_argument(arguments.kwarg, None)}"]
    line = f"{node.name}({', '.join(rows)}){returns}"
    return line if len(line) <= 100 else "\n".join([f"{node.name}(", *(f"    {row}," for row in rows), f"){returns}"])


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    typed = one.arg if one.annotation is None else f"{one.arg}: {ast.unparse(one.annotation)}"
    return typed if default is None else f"{typed} = {ast.unparse(default)}"


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"


# --- all of them ------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [" | ".join(text.replace("|", "\\|").replace("\n", " ") for text in row) for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {row} |" for row in cells)]) + "\n"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
