"""Models in: runs, checkpoints, Hugging Face folders, GGUF files and PEFT adapters."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatout.checkpoints.base_and_adapter import (
    adapter_plan,
    base_of,
    build_base,
    check_base,
    check_own_weights,
    describe_base,
    described_checkpoint,
    open_base,
    stored_base,
    stored_quantize,
)
from flatout.checkpoints.checkpoint import check_files_alone, read_checkpoint, vocab_in
from flatout.checkpoints.run_folder import checkpoint_to_load, is_checkpoint, newest_run
from flatout.config.load import LoadedConfig, load_stored, with_values
from flatout.config.source import Source
from flatout.data.chat_template import (
    ChatTemplate,
    is_there,
    load_template,
    read_templates,
    stops_of,
    template_from_json,
)
from flatout.data.library_tokenizers import ModelTokenizer
from flatout.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_json
from flatout.data.tokenizer_files import own_tokenizer, read_model_tokenizer
from flatout.device import Device, arithmetic, detect_device, out_of_memory
from flatout.errors import CheckpointError, DataError, UsageError, quoted
from flatout.gguf_file import gguf_at
from flatout.model.adapter_files import CONFIG as ADAPTER_CONFIG
from flatout.model.adapter_files import load_adapter, read_origin
from flatout.model.adapters import Adapters, attach
from flatout.model.gpt import GPT, build_model, empty_model
from flatout.model.hub import Description, read_description
from flatout.model.hub_folder import find_model, load_described
from flatout.model.quantize import narrow_linears
from flatout.model.seal import check_seal
from flatout.model.weights import assign_weights
from flatout.shown import ShortlyShown

# The rooms of training are imported where they are needed: a first token need not wait for them.
if TYPE_CHECKING:
    from flatout.engine.custom import CustomModel, ModelFromPython

WEIGHTS = ("auto", "fp32", "bf16", "int8")

# --- models -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LoadedModel(ShortlyShown):
    """A trained model ready to use, in evaluation mode on its device."""

    model: "GPT | CustomModel"
    tokenizer: Tokenizer
    device: Device
    origin: Path
    step: int | None = None
    settings: LoadedConfig | None = None  # of the run it comes from
    dataset: str | None = None  # fingerprint of what it was trained on
    description: Description | None = None  # of the Hugging Face folder it came from
    adapters: Adapters | None = None  # that it carries
    template: ChatTemplate | None = None  # that it was taught to chat by
    stops: tuple[int, ...] = ()  # tokens at which an answer ends
    base: str | None = None  # hash of the weights under its adapters
    base_name: str | None = None  # where an adapter's folder found them
    bare: bool = False  # an adapter of ours that was taught without a template
    quantize: str = "none"  # how the base under its adapters was held while they were trained, and is rounded here
    weights: str = "fp32"  # of its linear layers

    def _shown_rows(self) -> dict[str, Any]:
        size = sum(parameter.numel() for parameter in self.model.parameters())
        rows = {"origin": self.origin, "step": self.step, "parameters": f"{size:,}", "device": self.device.name}
        return rows | {"context": self.model.config.context, "vocabulary": self.model.vocab}

    @torch.no_grad()
    def __call__(self, ids: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """The logits of token ids, [T, V] of one row and [B, T, V] of several, in fp32 on the model's device.

        Position t predicts the token after it. At most the model's context of ids.
        """
        context, vocab = self.model.config.context, self.model.vocab
        way = f"give one row of 1 to {context:,} ids, or several of one length"
        try:
            tokens = torch.as_tensor(ids, device=self.device.torch_device)
        except (TypeError, ValueError, RuntimeError) as error:  # a text, or rows of different lengths
            raise DataError(f"a {type(ids).__name__} that holds no ids was given to the model", way) from error
        if tokens.ndim not in (1, 2) or not tokens.numel() or tokens.shape[-1] > context:
            raise DataError(f"ids of shape {tuple(tokens.shape)} were given to the model", way)
        if tokens.is_floating_point():
            raise DataError(f"ids of type {tokens.dtype} were given to the model", "give token ids as integers")
        tokens = tokens.to(torch.int64)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= vocab:
            raise DataError(f"ids from {low} to {high} were given to the model", f"its ids are 0 to {vocab - 1:,}")
        with out_of_memory():
            logits = self.model.logits(tokens if tokens.ndim == 2 else tokens[None])
        return logits if tokens.ndim == 2 else logits[0]

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """The arithmetic of every pass."""
        narrow = self.weights == "bf16" or (self.weights == "int8" and self.device.kind == "cuda")
        return arithmetic("bf16" if narrow else "fp32", False, self.device.torch_device)

    @property
    def kernels(self) -> bool:
        """Whether text is decoded by kernels of ours in recorded graphs."""
        if self.device.kind != "cuda":
            return False
        from flatout.resolve.case import Probes, no_triton

        return no_triton(self.device, Probes()) is None

    @property
    def config(self):  # of the type of `LoadedConfig.config`
        """The `RunConfig` of the run that it comes from, or None."""
        return None if self.settings is None else self.settings.config

    @property
    def from_python(self) -> bool:
        """Whether its model was given to `train` as `model=`, so that files alone do not make it."""
        return not (isinstance(self.model, GPT) and self.model.cacheable)

    @property
    def taught(self) -> bool:
        """Whether it was taught to chat, by a template or without one."""
        return self.bare or (self.config is not None and self.config.fine_tunes)


def load_model(
    path: str | Path | None = None,
    *,
    device: str = "auto",
    best: bool = True,
    base: str | None = None,
    model: "ModelFromPython | None" = None,
    weights: str = "fp32",
) -> LoadedModel:
    """A model from a run folder (its best checkpoint), a checkpoint, a Hugging Face folder, a GGUF file or an adapter.

    Without a path, the newest run under runs/. `base` is the model that adapters were trained on, where their own files
    do not name it, or name a place where it is not. `model` is what `train` was given as `model=`, which no file holds.
    `weights` are those of linear layers: fp32, bf16 or int8, or auto for bf16 on a GPU and fp32 elsewhere. Models of
    others than fp32 are for text and `evaluate`, not for `export`.
    """
    if weights not in WEIGHTS:
        raise UsageError(f"weights={quoted(weights)} is unknown", f"use one of {', '.join(WEIGHTS)}")
    loaded = _load(path, device=device, best=best, base=base, model=model)
    if weights == "auto":
        weights = "bf16" if loaded.device.kind == "cuda" else "fp32"
    if weights == "fp32" or not isinstance(loaded.model, GPT):
        return loaded
    narrow_linears(loaded.model, weights)
    return dataclasses.replace(loaded, weights=weights)


def _load(
    path: str | Path | None, *, device: str, best: bool, base: str | None, model: "ModelFromPython | None"
) -> LoadedModel:
    origin = newest_run() if path is None else Path(path)
    found = detect_device(device)
    adapter = (origin / ADAPTER_CONFIG).is_file()
    others = (ADAPTER_CONFIG, "config.json", "manifest.json", "checkpoints")
    gguf = None if any((origin / name).exists() for name in others) else gguf_at(origin)
    theirs = adapter or gguf is not None or ((origin / "config.json").is_file() and not is_checkpoint(origin))
    if theirs and model is not None:
        raise UsageError(f"model= is for runs, and {origin} was not trained with it", "leave model= out")
    if theirs and not best:
        raise UsageError(
            f"--last is for runs, and {origin} holds {'one adapter' if adapter else 'one model'}, no checkpoints",
            "leave --last out, or name the run",
        )
    if adapter:
        return _load_adapter_folder(origin, found, base)
    if base is not None and theirs:
        raise _no_adapters(origin)
    if theirs:
        return _load_folder(gguf or origin, found)
    check_seal(origin)  # of a folder that lost its config.json
    return _load_checkpoint(checkpoint_to_load(origin, best=best), found, base, model)


def _load_folder(folder: Path, device: Device) -> LoadedModel:
    """A Hugging Face folder, or a GGUF file."""
    description = read_description(folder)
    tokenizer = _tokenizer_of(description)
    return LoadedModel(
        model=_ready(load_described(description), device),
        tokenizer=tokenizer,
        device=device,
        origin=folder,
        description=description,
        stops=_stops_in(folder, tokenizer, description),
    )


def _load_checkpoint(folder: Path, device: Device, base: str | None, given: "ModelFromPython | None") -> LoadedModel:
    checkpoint = read_checkpoint(folder)
    settings, state = load_stored(checkpoint.config), checkpoint.state
    if given is None:
        check_files_alone(state, str(folder))
    tokenizer = tokenizer_from_json(checkpoint.tokenizer)
    description = adapters = None
    if base is not None:
        if not settings.config.lora.rank:
            raise _no_adapters(folder)
        settings = with_values(settings, {"model.init_from": base}, Source("python", "base"))
    config = settings.config
    if config.lora.rank:
        from flatout.engine.setup import only_adapters

        model, description = base_of(config.model, config.lora.quantize, state.get("base"), named=base is not None)
        adapters = attach(model, adapter_plan(config.lora), seed=0)
        only_adapters(adapters).assign(checkpoint.model, str(folder))
    else:
        vocab = vocab_in(state)
        if given is None:
            check_own_weights(config.model, vocab, checkpoint.model, str(folder))
            model = empty_model(config.model, vocab)
            assign_weights(model, checkpoint.model, str(folder))
        else:
            from flatout.engine.custom import CustomParts, check_same_parts, customize, structure_of

            model = customize(build_model(config.model, vocab), given, seed=config.train.seed)
            check_same_parts({**state, "given_model": structure_of(model)}, state)
            assign_weights(model, checkpoint.model, str(folder))
            CustomParts(given).restore_buffers(model, checkpoint.run)
        if state.get("described"):
            description = described_checkpoint(config.model, state, folder, tokenizer.end_of_text)
    template = None if state.get("template") is None else template_from_json(state["template"])
    stops = state.get("stops")
    if stops is None:
        stops = _stops(tokenizer, template, () if description is None else description.end_of_text)
    return LoadedModel(
        model=_ready(model, device),
        tokenizer=tokenizer,
        device=device,
        origin=folder,
        step=checkpoint.step,
        settings=settings,
        dataset=checkpoint.dataset,
        description=description,
        adapters=adapters,
        template=template,
        stops=tuple(stops),
        base=state.get("base"),
        quantize=config.lora.quantize,
    )


def _no_adapters(origin: Path) -> UsageError:
    return UsageError(f"--base is for adapters, and {origin} has none", "leave --base out")


def _load_adapter_folder(folder: Path, device: Device, base: str | None) -> LoadedModel:
    """An adapter that PEFT or we wrote, on its base. Its own tokenizer and template come before the base's."""
    name = base or read_origin(folder).base
    if name is None:
        raise CheckpointError(f"{folder / ADAPTER_CONFIG} does not name its base model", "name it with --base FOLDER")
    expected = stored_base(folder)
    found = None
    try:
        found = find_model(name)
        description = describe_base(name, None)
    except CheckpointError as error:
        if base is not None:
            raise
        raise CheckpointError(
            f"the base model of {folder} cannot be loaded: {error.message}",
            f"{error.hint}, or name another with --base FOLDER" if found is not None else "name it with --base FOLDER",
        ) from error
    check_base(name, description, expected)
    quantize = stored_quantize(folder)
    model = build_base(description, quantize=quantize)
    adapters, _ = load_adapter(model, folder, dropout=0.0)
    own = (folder / "tokenizer.json").is_file()
    home = folder if own else description.folder
    tokenizer = read_model_tokenizer(home) if own else open_base(name, None).tokenizer
    template = load_template("model", home, tokenizer) if own and read_templates(home) else None
    bare = own and template is None and expected is not None
    if tokenizer.vocab > description.vocab:
        raise CheckpointError(
            f"the tokenizer in {home} has {tokenizer.vocab:,} ids, {name} {description.vocab:,}",
            "name the model that the adapter was trained on with --base FOLDER",
        )
    if bare:
        stops = _stops(tokenizer, None, description.end_of_text)
    else:
        stops = _stops_in(home if template is not None else description.folder, tokenizer, description)
    return LoadedModel(
        model=_ready(model, device),
        tokenizer=tokenizer,
        device=device,
        origin=folder,
        description=description,
        adapters=adapters,
        template=template,
        stops=stops,
        base=expected,
        base_name=name,
        bare=bare,
        quantize=quantize,
    )


def _stops(tokenizer: Tokenizer, template: ChatTemplate | None, named: Sequence[int]) -> tuple[int, ...]:
    if isinstance(tokenizer, ModelTokenizer):
        return stops_of(tokenizer, template, named)
    return () if tokenizer.end_of_text is None else (tokenizer.end_of_text,)


def _stops_in(folder: Path, tokenizer: Tokenizer, description: Description) -> tuple[int, ...]:
    """Where a model of others ends: what its files name, and what its template writes after an answer."""
    template = None
    with contextlib.suppress(DataError):  # `chat` reports a broken template
        if isinstance(tokenizer, ModelTokenizer) and read_templates(folder):
            template = load_template("model", folder, tokenizer)
    return _stops(tokenizer, template, description.end_of_text)


def _tokenizer_of(description: Description) -> Tokenizer:
    """The tokenizer beside the weights, or GPT-2's own. Models often have some more ids than it, which are not used."""
    path = description.folder / "tokenizer.json"
    if is_there(description.folder / "tokenizer_config.json") and is_there(path):
        tokenizer = own_tokenizer(description.folder) or read_model_tokenizer(description.folder)
    else:
        tokenizer = load_tokenizer(str(path) if path.is_file() else "gpt2", None)
    fits = tokenizer.vocab <= description.vocab if is_there(path) else tokenizer.vocab == description.vocab
    if not fits:
        what = "its tokenizer.json" if is_there(path) else "it has no tokenizer.json, and GPT-2's tokenizer"
        raise CheckpointError(
            f"{description.folder} has {description.vocab} token ids; {what} has {tokenizer.vocab}",
            "put the tokenizer.json of this model beside its weights",
        )
    return tokenizer


def _ready(model: "GPT | CustomModel", device: Device) -> "GPT | CustomModel":
    if isinstance(model, GPT) and model.eigenstates:
        from flatout.resolve.switches import scan_for

        model.use(dataclasses.replace(model.execution, scan=scan_for(device)))
    with out_of_memory():
        return model.to(device.torch_device).eval()


def template_of(model: LoadedModel) -> ChatTemplate | None:
    folder = None if model.description is None else model.description.folder
    # A run that was taught without a template must not be asked with that of its base, nor must its adapter.
    others = model.config is None and not model.bare
    if model.template is None and folder is not None and others and isinstance(model.tokenizer, ModelTokenizer):
        return load_template("model", folder, model.tokenizer) if read_templates(folder) else None
    return model.template
