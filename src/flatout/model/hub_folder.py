"""Hugging Face models: where a name leads to, reading and writing their weights, and a hash of these.

Our matrices are fused, theirs are not. A `Piece` says where one of their tensors lies in ours: which parameter, which
rows, and whether it is stored transposed (GPT-2's "Conv1D"). Pieces are declared with the model's fields (`fields.py`);
reading and writing follow the same ones.

Contract: names, shapes and types of all files are checked before the first value is copied. Files are memory-mapped and
copied tensor by tensor into the model's own memory and type; nothing is held twice. A tensor that is missing, left
over, of another shape, torn or not finite is a `CheckpointError` that names file and tensor. Only safetensors are read.
An exported folder is whole or absent. A name `org/name` is looked up in the cache of huggingface_hub first; the network
is used only if the cache lacks a file. Only descriptions, safetensors and tokenizer files are fetched, never code.

The hash of a model's weights keeps adapters from being put on another model of the same shape. It covers every tensor's
name, type, shape and bytes, in the order of names. The number of files, a prefix before the names, and a second copy of
a tied head do not change it. Files are hashed as stored, so the hash is the same on every machine: a model saved again
in another type is another model, since adapters were trained on the rounded weights. A checkpoint of ours has the hash
of its fp32 export.

Traps:
- A model with one matrix for embedding and head may store it once, under either name, or twice. Two that differ are
  refused, because we cannot know which one is meant.
- The cache also answers for a repository of which only some files were fetched, for a tokenizer say. A snapshot counts
  as found only with its weights.
"""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from flatout.config.schema import ModelConfig
from flatout.config.yaml_loader import shorten
from flatout.errors import CheckpointError
from flatout.files import read_bounded, write_new
from flatout.folders import sweep, whole_folder
from flatout.gguf_file import gguf_at, is_gguf
from flatout.model.execution import Execution
from flatout.model.families import AGAIN
from flatout.model.fields import FEATURES, Piece, has_bias
from flatout.model.gguf_weights import opened_gguf
from flatout.model.gpt import GPT, empty_model
from flatout.model.hub import CONFIG_FILE, Description, check_same_model, description_of, read_description, read_json
from flatout.model.seal import check_seal, refuse_link, seal
from flatout.model.weights import opened, write_tensors

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
# Files that other programs need beside the weights, and that training does not change.
COMPANIONS = ("tokenizer*", "special_tokens_map.json", "*.jinja", "chat_template*", "generation_config.json")
COMPANIONS += ("vocab.json", "merges.txt", "added_tokens.json", "additional_chat_templates/*.jinja")

_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_WRONG_MODEL = f"config.json and the weights belong to different models; {AGAIN}"
# Tables that old versions of transformers stored with the weights, though config.json determines them.
_TABLES = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|h\.\d+\.attn\.(masked_)?bias")


def pieces_of(config: ModelConfig) -> dict[str, Piece]:
    """Their tensors' names, without the prefix `model.` or `transformer.`, to places in our parameters."""
    modules = [module for one in FEATURES for module in one.format(config.family).modules(config).items()]
    pieces: dict[str, Piece] = {}
    for layer in range(config.layers):
        for theirs, piece in modules:
            name, ours = theirs.replace("*", str(layer)), piece.name.replace("*", str(layer))
            pieces[f"{name}.weight"] = dataclasses.replace(piece, name=f"{ours}.weight")
            if has_bias(config, ours):
                pieces[f"{name}.bias"] = Piece(f"{ours}.bias", piece.first, piece.last)
    return pieces


def folded_weights(config: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights with features folded in that only our models have, as transformers needs them."""
    found = dict(weights)
    for feature in FEATURES:
        if feature.fold is not None and feature.fold.when(config):
            found |= feature.fold.weights(config, found)
    return found


def _embedding_name(config: ModelConfig) -> str:
    return "wte.weight" if config.family == "gpt2" else "embed_tokens.weight"


# --- reading ----------------------------------------------------------------------------------------------------------


def load_described(
    description: Description,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    execution: Execution | None = None,
) -> GPT:
    """The described model with the weights of its folder."""
    config, vocab = description.config, description.vocab
    shapes = empty_model(config, vocab, device="meta")  # check first: a wrong config could need any amount of memory
    stored = _checked(shapes, description)
    model = empty_model(config, vocab, execution=execution, dtype=dtype, device=device)
    _fill(model, stored)
    return model


def load_huggingface(model: GPT, folder: Path) -> None:
    """Loads the folder's weights into a model of the same shape."""
    description = read_description(folder)
    check_same_model(model.config, description, "make the model section equal to the weights")
    _fill(model, _checked(model, description))


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A tensor in a file, with its name there."""

    file: Path
    name: str
    shape: tuple[int, ...]


def inventory(description: Description) -> dict[str, _Stored]:
    """Every tensor of the folder by its name without prefix, except tables. Refuses types that we do not read."""
    found: dict[str, _Stored] = {}
    for path, listed in weight_files(description.folder).items():
        with _opened(path) as file:
            names = set(file.keys())
            for name in sorted((listed or names) - names):
                raise CheckpointError(f"{path} has no tensor {name}, which {INDEX_FILE} places there", AGAIN)
            for name in sorted(listed or names):
                slice_ = file.get_slice(name)
                plain = re.sub(r"^(model|transformer)\.", "", name)
                if _TABLES.fullmatch(plain):
                    continue
                if slice_.get_dtype() not in _TYPES:
                    raise CheckpointError(
                        f"{path}: {name} is stored as {slice_.get_dtype()}; {', '.join(_TYPES)} can be read",
                        "use the model in its unquantised form",
                    )
                if plain in found:
                    raise CheckpointError(f"{path}: {name} is stored twice, also as {found[plain].name}", AGAIN)
                found[plain] = _Stored(path, name, tuple(slice_.get_shape()))
    return found


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """Files with a folder's weights, each with the tensors that the index lists for it; None: all tensors in it."""
    if is_gguf(folder):
        return {folder: None}
    if (folder / WEIGHTS_FILE).is_file():
        refuse_link(folder / WEIGHTS_FILE, folder)
        return {folder / WEIGHTS_FILE: None}
    index = folder / INDEX_FILE
    if not index.is_file():
        raise _no_weights(folder)
    listed = read_json(index, "check the permissions of the file").get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise CheckpointError(f"{index} has no map from tensors to files (weight_map)", AGAIN)
    files: dict[Path, set[str] | None] = {}
    for tensor, name in listed.items():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} places {shorten(tensor)} in {shorten(name)}, not a file of this folder", AGAIN
            )
        names = files.setdefault(folder / name, set())
        assert names is not None
        names.add(tensor)
    for path in files:
        if not os.path.isfile(path):  # unlike Path.is_file, it returns False for a name that is too long
            raise CheckpointError(f"{path!s:.300} is missing, and {INDEX_FILE} lists it", AGAIN)
        refuse_link(path, folder)
    return files


def _opened(path: Path) -> AbstractContextManager[Any]:
    return opened_gguf(path) if is_gguf(path) else opened(path)


def _no_weights(folder: Path) -> CheckpointError:
    if any(folder.glob("pytorch_model*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        return CheckpointError(
            f"{folder} has its weights in a format that can run code when it is read, and no safetensors",
            "take a revision of it with model.safetensors, or load it with transformers if you trust it, and save it "
            "again with save_pretrained, which writes safetensors",
        )
    return CheckpointError(f"{folder} has no {WEIGHTS_FILE} and no {INDEX_FILE}", "name a folder that holds weights")


def _checked(model: GPT, description: Description) -> dict[str, _Stored]:
    """The folder's tensors by the names of `pieces_of`; refused unless they are what the model needs, in its shapes."""
    stored, pieces = inventory(description), pieces_of(model.config)
    embedding, head = _embedding_name(model.config), "lm_head.weight"
    if model.config.tied and head in stored:
        copy = stored.pop(head)
        if copy != stored.setdefault(embedding, copy):
            _check_same(stored[embedding], copy)
    _check_names(description, pieces, stored)
    parameters = dict(model.named_parameters())
    for name, piece in pieces.items():
        needed = tuple(piece.of(parameters[piece.name]).shape)
        if stored[name].shape != needed:
            raise CheckpointError(
                f"{stored[name].file}: {stored[name].name} has shape {stored[name].shape}, "
                f"{description.folder / CONFIG_FILE} needs {needed}",
                _WRONG_MODEL,
            )
    return stored


@torch.no_grad()
def _fill(model: GPT, stored: dict[str, _Stored]) -> None:
    pieces = pieces_of(model.config)
    parameters = dict(model.named_parameters())
    for path in dict.fromkeys(one.file for one in stored.values()):
        with _opened(path) as file:
            for name, piece in pieces.items():
                if stored[name].file == path:
                    _copy(file.get_tensor(stored[name].name), piece.of(parameters[piece.name]), stored[name])


def _check_names(description: Description, pieces: dict[str, Piece], stored: dict[str, _Stored]) -> None:
    for name in sorted(pieces.keys() - stored.keys()):
        hint = _WRONG_MODEL
        if name == "lm_head.weight":
            hint = "its config.json says that the head is a matrix of its own (tie_word_embeddings); " + AGAIN
        raise CheckpointError(f"{description.folder} has no tensor {name}", hint)
    for name in sorted(stored.keys() - pieces.keys()):
        raise CheckpointError(
            f"{stored[name].file} holds {stored[name].name}, which a {description.model_type} model of this shape has "
            "not",
            _WRONG_MODEL,
        )


def _check_same(embedding: _Stored, head: _Stored) -> None:
    with _opened(embedding.file) as first, _opened(head.file) as second:
        if torch.equal(first.get_tensor(embedding.name), second.get_tensor(head.name)):
            return
    raise CheckpointError(
        f"{head.file}: {head.name} differs from {embedding.name}, but tie_word_embeddings makes them one",
        "set tie_word_embeddings to false in config.json if the head is a matrix of its own",
    )


def _copy(source: Tensor, target: Tensor, stored: _Stored) -> None:
    target.copy_(source)
    low, high = target.aminmax()  # NaN if there is one
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        low, high = source.aminmax()
        kind = str(target.dtype).removeprefix("torch.")
        if bool(torch.isfinite(low) & torch.isfinite(high)):
            raise CheckpointError(
                f"{stored.file}: {stored.name} holds values beyond the range of {kind}",
                "load it as bfloat16 or float32",
            )
        raise CheckpointError(
            f"{stored.file}: {stored.name} holds values that are not finite", "the file is damaged; fetch it again"
        )


# --- writing ----------------------------------------------------------------------------------------------------------


def export_huggingface(
    model: GPT,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    end_of_text: int | None = None,
    source: Description | None = None,
    files: Mapping[str, bytes] | None = None,
    facts: Mapping[str, Any] | None = None,
    finish: Callable[[Path], None] = lambda _: None,
) -> None:
    """Writes a folder that transformers loads: config.json and safetensors, in shards if they are large.

    `source` describes the folder that the model came from: other keys of its config.json are kept, and its tokenizer
    files are copied, unless `files` replaces them. For `facts` and `finish` see `sealed_folder`.
    """
    kind = str(dtype).removeprefix("torch.")
    values = description_of(model.config, model.vocab, dtype=kind, end_of_text=end_of_text, source=source)
    if files is None:
        files = {} if source is None else companions(source.folder)
    with sealed_folder(folder, {"dtype": kind, **(facts or {})}, finish) as (work, known):
        known.update(_write_weights(model, work, dtype))
        for name, content in {**files, CONFIG_FILE: (json.dumps(values, indent=2) + "\n").encode()}.items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            write_new(work / name, content)


@contextmanager
def sealed_folder(
    folder: Path, facts: Mapping[str, Any], finish: Callable[[Path], None] = lambda _: None
) -> Iterator[tuple[Path, dict[str, dict[str, Any]]]]:
    """A new folder that appears whole and with its manifest: where to fill it, and a place for hashes that are known.

    `facts` go into the manifest. `finish` looks at the filled folder and may add to it; an error there leaves nothing.
    """
    folder = Path(os.path.abspath(folder))
    if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir() or any(folder.iterdir())):
        raise _occupied(folder)
    sweep(folder.parent, re.escape(folder.name), locked=False)
    with whole_folder(folder, occupied=lambda target, _: _occupied(target)) as work:
        known: dict[str, dict[str, Any]] = {}
        yield work, known
        finish(work)
        seal(work, facts, known)


def _occupied(folder: Path) -> CheckpointError:
    return CheckpointError(f"{folder} is a file, a link or not empty", "name a new folder to export into")


def companions(folder: Path) -> dict[str, bytes]:
    """Tokenizer files and the like beside the weights, by name; none if the folder does not exist any more."""
    paths = [path for pattern in COMPANIONS for path in sorted(folder.glob(pattern)) if path.is_file()]
    for path in paths:
        refuse_link(path, folder)
    try:
        return {path.relative_to(folder).as_posix(): read_bounded(path) for path in paths}
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}", AGAIN) from error


def _write_weights(model: GPT, folder: Path, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Writes the files of weights; returns size and hash of each."""
    parameters = folded_weights(model.config, {name: x.detach() for name, x in model.named_parameters()})
    prefix = "transformer." if model.config.family == "gpt2" else "model."
    shards: list[dict[str, Tensor]] = [{}]
    filled = total = 0
    for name, piece in pieces_of(model.config).items():
        part = piece.of(parameters[piece.name])
        size = part.numel() * dtype.itemsize
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name if name == "lm_head.weight" else prefix + name] = part
        filled, total = filled + size, total + size
    places: dict[str, str] = {}
    known: dict[str, dict[str, Any]] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else WEIGHTS_FILE
        # Copy one shard at a time: only one is in memory beside the model.
        copies = {name: _exported(name, part, dtype) for name, part in shard.items()}
        known[file] = write_tensors(folder / file, copies, {"format": "pt"})
        places |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_new(folder / INDEX_FILE, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
    return known


def _exported(name: str, part: Tensor, dtype: torch.dtype) -> Tensor:
    copy = part.to(device="cpu", dtype=dtype, copy=True).contiguous()
    low, high = copy.aminmax()
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise CheckpointError(
            f"{name} holds values that are not finite as {str(dtype).removeprefix('torch.')}",
            "export it as float32 or bfloat16; if they are not finite there either, the model is broken",
        )
    return copy


PIECE = 2**24


def weights_fingerprint(description: Description) -> str:
    """The hash of the weights in a Hugging Face folder."""
    stored = inventory(description)
    if description.config.tied and len(stored.keys() & {"lm_head.weight", *_EMBEDDINGS}) > 1:
        stored.pop("lm_head.weight", None)  # loading the model checks that both are equal
    with ExitStack() as stack:
        files = {path: stack.enter_context(_opened(path)) for path in {one.file for one in stored.values()}}
        return _hash_of((name, files[one.file].get_tensor(one.name)) for name, one in sorted(stored.items()))


def own_fingerprint(weights: Mapping[str, Tensor], config: ModelConfig, *, portable: bool) -> str:
    """The hash of a checkpoint's weights: equals `weights_fingerprint` of its fp32 export.

    A model that cannot be exported (`portable=False`) is hashed under our own names.
    """
    if not portable:
        return _hash_of(sorted(weights.items()))
    pieces, weights = sorted(pieces_of(config).items()), folded_weights(config, weights)
    return _hash_of((name, piece.of(weights[piece.name]).float()) for name, piece in pieces)


def _hash_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    total = hashlib.sha256()
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
        for name, tensor in tensors:
            described = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
            digests = threads.map(lambda piece: hashlib.sha256(piece).digest(), _pieces(tensor))
            total.update(hashlib.sha256(described.encode()).digest() + b"".join(digests))
    return total.hexdigest()


_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().data  # no copy: the file is mapped
    return (raw[start : start + PIECE] for start in range(0, len(raw), PIECE))


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
NOT_FETCHED = ["*/*", "consolidated*"]  # the same weights again in other formats
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@dataclasses.dataclass(frozen=True)
class FoundModel:
    """A folder on this machine, and whether it is a Hugging Face folder, a run of ours or one of its checkpoints.

    A GGUF file counts as a Hugging Face folder: it is read as if it were one.
    """

    path: Path
    kind: Literal["huggingface", "run", "checkpoint"]


def find_model(name: str) -> FoundModel:
    """The folder of a model by its name, fetched from the hub if necessary."""
    path = Path(name)
    if name and os.path.isdir(path):  # unlike Path.is_dir, it returns False for a name that is too long
        return _found(path)
    if name and is_gguf(path):
        return FoundModel(path, "huggingface")
    if name and os.path.exists(path):
        raise CheckpointError(f"{shorten(name)} is a file", "name the folder that the model is in")
    if not _HUB_NAME.fullmatch(name):
        raise CheckpointError(
            f"there is no folder {shorten(name)}", "name a folder that is there, or a model of the hub as org/name"
        )
    if path.parent.is_dir():  # a missing local folder rather than an organisation on the hub
        raise CheckpointError(f"there is no folder {name}", f"name one of the folders in {path.parent}")
    return FoundModel(_from_hub(name), "huggingface")


def is_within_reach(name: str) -> bool:
    """Whether `find_model` needs no network: the folder exists, the cache has the whole model, or the name is bad."""
    if os.path.exists(name) or not _HUB_NAME.fullmatch(name) or Path(name).parent.is_dir():
        return True
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return True  # find_model raises the error
    return _cached(snapshot_download, name) is not None


def _found(path: Path) -> FoundModel:
    if (path / "manifest.json").is_file():
        return FoundModel(path, "checkpoint")
    if any((path / "checkpoints").glob("step-*")):
        return FoundModel(path, "run")
    if (path / CONFIG_FILE).is_file():
        return FoundModel(path, "huggingface")
    if (gguf := gguf_at(path)) is not None:
        return FoundModel(gguf, "huggingface")
    if (path / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{path} holds an adapter, not a model",
            "name the model that the adapter was made for; to train it on, set lora.init_from to it",
        )
    check_seal(path)  # names config.json if our folder has lost it
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
    except Exception as error:  # any failure of the network or the hub
        raise _hub_error(name, error) from error
    folder = Path(fetched)
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"{name} has no config.json on the hub", "name a model, not a dataset or an adapter")
    try:
        weight_files(folder)
    except CheckpointError as error:  # without a network the library may return an incomplete folder
        raise CheckpointError(
            f"{name}: {error.message}",
            "check the network and HF_HUB_OFFLINE; a model that has no safetensors on the hub cannot be used",
        ) from error
    return folder


def _cached(snapshot_download: Callable[..., Any], name: str) -> Path | None:
    """The folder in the cache if it is complete, or None."""
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
        weight_files(folder)
    except Exception:  # noqa: BLE001 - the library raises many kinds of errors if a file is not cached
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
