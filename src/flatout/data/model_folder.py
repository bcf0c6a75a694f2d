"""Tokenizer and chat template from the folder of a Hugging Face model.

Idea: three files speak about tokens. `tokenizer.json` is the tokenizer; `tokenizer_config.json` names the special
tokens and often holds the chat template; `special_tokens_map.json` names special tokens in older models. They are read
as the `transformers` library reads them, as far as ids can depend on it, and become values that know no folder.

Contract: what is missing or contradicts itself is a `DataError` that names the file. Nothing is executed: a template is
text here, and `chat_template` renders it in a sandbox.

Trap: a token that `tokenizer_config.json` names as special need not be an added token in `tokenizer.json`; unless it is
made one, its text falls apart into ordinary pieces. A token that only `added_tokens_decoder` knows is missing from
`tokenizer.json` altogether.
"""

import os
from pathlib import Path
from typing import Any

from flatout.corpus.document import shown
from flatout.data.tokenizer import ModelTokenizer, names_code, try_out
from flatout.errors import DataError
from flatout.files import leads_outside, parse_json, read_bounded

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
OLD_TEMPLATE = "chat_template.json"
DEFAULT = "default"

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def read_model_tokenizer(folder: str | Path) -> ModelTokenizer:
    """The tokenizer of the model in `folder`, with special tokens as its files name them.

    One that names code of its own (`auto_map`) is refused.
    """
    folder = Path(folder)
    path = folder / TOKENIZER
    if not os.path.isfile(path):
        others = [name for name in ("tokenizer.model", "vocab.json", "spiece.model") if (folder / name).is_file()]
        found = f"; it has {others[0]}, which is of another kind" if others else ""
        raise DataError(
            f"there is no {TOKENIZER} in {shown(folder)}{found}",
            "give the folder of a Hugging Face model with its fast tokenizer, or save one there",
        )
    content = _json_object(path)
    config, older = _object_if_there(folder / CONFIG), _object_if_there(folder / SPECIAL_TOKENS)
    if config.get("auto_map"):
        raise names_code(folder / CONFIG)
    try:
        _check_entries(content)
        special = _special_tokens(config, older)
        content = _with_added_tokens(content, config, special)
        put_first = try_out(content)
        known = _known(content)
        # A model can do without these, and files name some that it never had.
        for name in ("pad_token", "mask_token", "sep_token", "cls_token", "unk_token"):
            if special.get(name) not in known:
                special.pop(name, None)
        return ModelTokenizer(content, special, _first_token(put_first, config, special))
    except ValueError as error:
        raise DataError(
            f"the tokenizer in {shown(folder)} is not usable: {error}",
            f"check {TOKENIZER} and {CONFIG}, or fetch them again",
        ) from error


def read_templates(folder: str | Path) -> dict[str, str]:
    """The chat templates of the model in `folder` by name; most have one, `default`, and some have none."""
    folder = Path(folder)
    found: dict[str, str] = {}
    for path in (folder / CONFIG, folder / OLD_TEMPLATE):
        found |= _named(_object_if_there(path).get("chat_template"), path)
    files = {path.stem: _file_text(path, folder) for path in sorted((folder / TEMPLATES).glob("*.jinja"))}
    if (folder / TEMPLATE).is_file():
        files[DEFAULT] = _file_text(folder / TEMPLATE, folder)
    return files or found  # files of their own stand for all of what JSON says


def _named(value: object, path: Path) -> dict[str, str]:
    """What stands under `chat_template`: nothing, a text, or a list of names with texts."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, dict):
        value = [{"name": name, "template": text} for name, text in value.items()]
    if not isinstance(value, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
        for entry in value
    ):
        raise DataError(
            f"the chat_template in {shown(path)} is neither a text nor a list of names with templates",
            "mend the file, or set chat.template to a file of its own",
        )
    return {entry["name"]: entry["template"] for entry in value}


def _special_tokens(config: dict[str, Any], older: dict[str, Any]) -> dict[str, str]:
    special: dict[str, str] = {}
    for name in _NAMES:
        value = config.get(name, older.get(name))
        text = value.get("content") if isinstance(value, dict) else value
        if text is None:
            continue
        if not isinstance(text, str) or not text:
            raise ValueError(f"its {name} is {text!r}, which is no text")
        special[name] = text
    return special


def _check_entries(content: dict[str, Any]) -> None:
    """Refuses a file whose parts are not of the kinds that the rest of this module takes them for."""
    added = content.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(entry, dict) for entry in added):
        raise ValueError("added_tokens is no list of objects")
    for entry in added:
        if not isinstance(entry.get("content"), str) or type(entry.get("id")) is not int:
            raise ValueError(f"{entry!r:.100} is no added token: it needs an id and a content")


def _known(content: dict[str, Any]) -> dict[str, int]:
    """The ids of all tokens that the file knows by their text."""
    model = content.get("model")
    vocab = model.get("vocab", {}) if isinstance(model, dict) else {}
    if isinstance(vocab, list):  # unigram: pairs of a text and its score
        known = {str(entry[0]): number for number, entry in enumerate(vocab) if isinstance(entry, list) and entry}
    else:
        known = dict(vocab) if isinstance(vocab, dict) else {}
    return known | {entry["content"]: entry["id"] for entry in content.get("added_tokens") or []}


def _with_added_tokens(content: dict[str, Any], config: dict[str, Any], special: dict[str, str]) -> dict[str, Any]:
    """The file with added tokens that only the other files know of."""
    known = _known(content)
    added = list(content.get("added_tokens") or [])
    present = {entry["content"] for entry in added}
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise ValueError("added_tokens_decoder is no object")
    for number, entry in sorted(decoder.items(), key=lambda pair: int(pair[0]) if str(pair[0]).isdigit() else -1):
        if not str(number).isdigit() or not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise ValueError(f"added_tokens_decoder has {number!r}, which is no id with a token")
        text = entry["content"]
        if known.get(text, int(number)) != int(number):
            raise ValueError(f"{text!r} has id {known[text]} in {TOKENIZER} and {number} in {CONFIG}")
        if text not in present:
            flags = {name: bool(entry.get(name, usual)) for name, usual in _FLAGS.items()}
            added.append({"id": int(number), "content": text, **flags})
            known[text] = int(number)
            present.add(text)
    more = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    more = list(more.values()) if isinstance(more, dict) else more
    more = more if isinstance(more, list) else []
    texts = [entry.get("content") if isinstance(entry, dict) else entry for entry in more]
    for text in (*special.values(), *texts):
        if isinstance(text, str) and text in known and text not in present:
            added.append({"id": known[text], "content": text, **_FLAGS})
            present.add(text)
    return {**content, "added_tokens": sorted(added, key=lambda entry: entry["id"])}


def _first_token(put_first: str | None, config: dict[str, Any], special: dict[str, str]) -> str | None:
    """The token that the model expects before a text: by the config, or else what the post-processor puts there."""
    asked = config.get("add_bos_token")
    if asked is False or (asked is True and "bos_token" in special):
        return special["bos_token"] if asked else None
    return put_first if special.get("bos_token", put_first) == put_first else None


def _object_if_there(path: Path) -> dict[str, Any]:
    return _json_object(path) if path.is_file() else {}


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(_file_text(path, path.parent))
    except ValueError as error:
        raise DataError(f"{shown(path)} is not JSON: {error}", "fetch the file again") from error
    if not isinstance(content, dict):
        raise DataError(f"{shown(path)} holds no JSON object", "fetch the file again")
    return content


def _file_text(path: Path, folder: Path) -> str:
    if leads_outside(path, folder):
        raise DataError(
            f"{shown(path)} is a link that leads out of its folder",
            "put the file itself there, or name the folder it lies in",
        )
    try:
        return read_bounded(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{shown(path)} is not UTF-8 at byte {error.start}", "fetch the file again") from error
    except OSError as error:
        raise DataError(f"cannot read {shown(path)}: {error.strerror}", "check that you may read it") from error
