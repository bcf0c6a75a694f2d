"""Where a model comes from: a folder of ours, a Hugging Face folder, or a name on the hub.

Contract: a folder is taken for what it holds, and its kind is told. A name `org/name` is looked for in
huggingface_hub's cache on this machine first; the network is asked only where the cache has not all of it. Only
description, safetensors and tokenizer files are fetched, never code.

Trap: the cache also answers for a repository of which only some files were fetched before, for a tokenizer say. A
snapshot counts as found only when its weights are there.
"""

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from flatout.config.yaml_loader import shorten
from flatout.errors import CheckpointError
from flatout.model.hub import CONFIG_FILE
from flatout.model.hub_weights import weight_files
from flatout.model.seal import check_seal

FETCHED = [
    CONFIG_FILE,
    "*.safetensors",
    "*.index.json",
    "tokenizer*",
    "*.jinja",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template*",
]
NOT_FETCHED = ["*/*", "consolidated*"]  # the same weights once more, in formats of others
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@dataclasses.dataclass(frozen=True)
class FoundModel:
    """A folder on this machine, and whether it is a Hugging Face folder, a run of ours or one of its checkpoints."""

    path: Path
    kind: Literal["huggingface", "run", "checkpoint"]


def find_model(name: str) -> FoundModel:
    """The folder that a name means, fetched from the hub if need be."""
    path = Path(name)
    if name and os.path.isdir(path):  # of os.path: a name that is too long is that of no folder
        return _found(path)
    if name and os.path.exists(path):
        raise CheckpointError(f"{shorten(name)} is a file", "name the folder that the model is in")
    if not _HUB_NAME.fullmatch(name):
        raise CheckpointError(
            f"there is no folder {shorten(name)}", "name a folder that is there, or a model of the hub as org/name"
        )
    if path.parent.is_dir():  # a folder of ours that is not there, rather than an organisation
        raise CheckpointError(f"there is no folder {name}", f"name one of the folders in {path.parent}")
    return FoundModel(_from_hub(name), "huggingface")


def is_within_reach(name: str) -> bool:
    """Whether `find_model` does without a network: there is a folder, or a whole model in the cache, or it refuses."""
    if os.path.exists(name) or not _HUB_NAME.fullmatch(name) or Path(name).parent.is_dir():
        return True
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return True  # it says what is missing
    return _cached(snapshot_download, name) is not None


def _found(path: Path) -> FoundModel:
    if (path / "manifest.json").is_file():
        return FoundModel(path, "checkpoint")
    if any((path / "checkpoints").glob("step-*")):
        return FoundModel(path, "run")
    if (path / CONFIG_FILE).is_file():
        return FoundModel(path, "huggingface")
    if (path / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{path} holds an adapter, not a model",
            "name the model that the adapter was made for; to train it on, set lora.init_from to it",
        )
    if any(path.glob("*.gguf")):
        raise CheckpointError(f"{path} holds a GGUF file, which cannot be trained", "name the model it was made from")
    check_seal(path)  # of a folder that lost its config.json
    raise CheckpointError(
        f"{path} holds no model", "name a run, a checkpoint, or a folder with config.json and model.safetensors"
    )


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"there is no folder {name}, and the package huggingface_hub, which would fetch it, is not installed",
            "pip install huggingface_hub, or name a local folder",
        ) from error
    cached = _cached(snapshot_download, name)
    if cached is not None:
        return cached
    try:
        fetched = snapshot_download(name, allow_patterns=FETCHED, ignore_patterns=NOT_FETCHED)
    except Exception as error:  # whatever lies between us and the hub
        raise _hub_error(name, error) from error
    folder = Path(fetched)
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"{name} has no config.json on the hub", "name a model, not a dataset or an adapter")
    try:
        weight_files(folder)
    except CheckpointError as error:  # without a network the library may hand over what it has
        raise CheckpointError(
            f"{name}: {error.message}",
            "check the network and HF_HUB_OFFLINE; a model that has no safetensors on the hub cannot be used",
        ) from error
    return folder


def _cached(snapshot_download: Callable[..., Any], name: str) -> Path | None:
    """The folder in the cache, if all of it is there."""
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
        weight_files(folder)
    except Exception:  # noqa: BLE001 - not cached, or not all of it; the library has many words for that
        return None
    return folder if (folder / CONFIG_FILE).is_file() else None


def _hub_error(name: str, error: Exception) -> CheckpointError:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return CheckpointError(
            f"{name} is only for those who accepted its terms", "accept them on its page, then run `hf auth login`"
        )
    if kinds & {"RepositoryNotFoundError", "RevisionNotFoundError", "HFValidationError"}:
        return CheckpointError(
            f"the hub has no model {name}", "check the name, or run `hf auth login` if it is a private one"
        )
    reason = shorten(str(error).strip().partition("\n")[0] or type(error).__name__, 160)
    return CheckpointError(
        f"{name} is neither a folder here nor in the hub's cache, and could not be fetched: {reason}",
        "check the network and HF_HUB_OFFLINE, or name a folder on this machine: model.init_from=FOLDER",
    )
