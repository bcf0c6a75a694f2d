"""Models in and out, text from them, and their loss: runs, checkpoints, Hugging Face folders and PEFT adapters."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatout.checkpoints.base_and_adapter import (
    IN_4_BITS,
    adapter_plan,
    base_of,
    build_base,
    check_base,
    check_own_weights,
    describe_base,
    described_checkpoint,
    files_beside,
    open_base,
    stored_base,
    stored_quantize,
    who_loads,
    write_adapter,
)
from flatout.checkpoints.checkpoint import check_files_alone, read_checkpoint, vocab_in, write_plain
from flatout.checkpoints.run_folder import checkpoint_to_load, is_checkpoint, newest_run
from flatout.config.load import LoadedConfig, load_stored, with_values
from flatout.config.source import Source
from flatout.data.chat_template import ChatTemplate, load_template, read_templates, stops_of, template_from_json
from flatout.data.library_tokenizers import ModelTokenizer
from flatout.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_json
from flatout.data.tokenizer_files import own_tokenizer, read_model_tokenizer
from flatout.device import Device, arithmetic, detect_device, out_of_memory
from flatout.errors import CheckpointError, DataError, UsageError, quoted
from flatout.files import disk_errors
from flatout.model.adapter_files import CONFIG as ADAPTER_CONFIG
from flatout.model.adapter_files import load_adapter, read_origin
from flatout.model.adapters import Adapters, attach
from flatout.model.gpt import GPT, build_model, empty_model
from flatout.model.hub import DTYPES, Description, description_of, model_type_of, read_description
from flatout.model.hub_folder import export_huggingface, find_model, load_described
from flatout.model.merge import Retention
from flatout.model.merge import merge as merge_adapters
from flatout.model.quantize import narrow_linears
from flatout.model.seal import check_seal
from flatout.model.weights import assign_weights
from flatout.shown import ShortlyShown, Shown

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
    """A model from a run folder (its best checkpoint), a checkpoint folder, a Hugging Face folder or a PEFT adapter.

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
    theirs = adapter or ((origin / "config.json").is_file() and not is_checkpoint(origin))
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
        return _load_folder(origin, found)
    check_seal(origin)  # of a folder that lost its config.json
    return _load_checkpoint(checkpoint_to_load(origin, best=best), found, base, model)


def _load_folder(folder: Path, device: Device) -> LoadedModel:
    """A Hugging Face folder."""
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
    if (description.folder / "tokenizer_config.json").is_file() and path.is_file():
        tokenizer = own_tokenizer(description.folder) or read_model_tokenizer(description.folder)
    else:
        tokenizer = load_tokenizer(str(path) if path.is_file() else "gpt2", None)
    fits = tokenizer.vocab <= description.vocab if path.is_file() else tokenizer.vocab == description.vocab
    if not fits:
        what = "its tokenizer.json" if path.is_file() else "it has no tokenizer.json, and GPT-2's tokenizer"
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


# --- models out -------------------------------------------------------------------------------------------------------


MERGED_DTYPE = "bf16"  # what a base is mostly in, and what others load


def export(
    model: LoadedModel | str | Path | None,
    folder: str | Path,
    *,
    dtype: str | None = None,
    adapter: bool = False,
    notice: Callable[[str], None] = lambda _: None,
) -> Path:
    """Writes a trained model as a Hugging Face folder with its tokenizer, its weights in fp32, bf16 or fp16.

    Adapters are written into the weights, as `merge` does, or with `adapter` alone, as PEFT's folder. Without a dtype
    it is `merge`'s where there is something to merge, and else fp32, as it was trained. Refused where transformers has
    no model that computes the same. `notice` hears what cannot be said in files.
    """
    if dtype is not None and adapter:
        raise UsageError("adapters alone are always written in fp32, as PEFT has them", "leave --dtype out")
    if dtype not in (None, *DTYPES):
        raise UsageError(f"weights cannot be written as {dtype!r}", f"use {', '.join(DTYPES)}")
    loaded = model if isinstance(model, LoadedModel) else load_model(model, device="cpu")
    if loaded.weights != "fp32":
        raise UsageError(f"the model was loaded with {loaded.weights} weights", "load it with weights='fp32'")
    if loaded.from_python:
        raise CheckpointError(
            f"{loaded.origin} was trained with a model from Python (model=), and no model of transformers computes it",
            "save its state_dict() in Python: flatout.load_model(RUN, model=...).model",
        )
    adapted = loaded.adapters is not None and not loaded.adapters.detached
    if adapter and not adapted:
        raise UsageError(f"{loaded.origin} has no adapters to export", "leave --adapter out")
    if adapted and not adapter:
        merged = merge(loaded, folder, dtype=dtype or MERGED_DTYPE, notice=notice)
        kept = merged.report
        notice(f"the adapters are merged into the weights, in {dtype or MERGED_DTYPE}; --dtype fp32 rounds nothing")
        notice(
            f"the update is {kept.relative_update:.2%} of the weights it changes; {kept.kept:.1%} of it survived the "
            f"rounding, {kept.unchanged:.1%} of those weights are as before"
        )
        return merged.folder
    target = _new_folder(folder)
    if adapted:
        _write_adapter(loaded, target, notice)
    else:
        _write_model(loaded, target, dtype or "fp32", notice)
    return target


def _check_exportable(loaded: LoadedModel) -> None:
    """Refuses a model that no other program has, with the settings or the command that train one which they have."""
    if loaded.config is None or _described(loaded) is not None:
        return
    try:
        model_type_of(loaded.model.config)
    except CheckpointError as error:
        from flatout.resolve.checks import way_to_export

        raise CheckpointError(error.message, way_to_export(loaded.config)) from None


def _write_model(loaded: LoadedModel, target: Path, dtype: str, notice: Callable[[str], None]) -> None:
    assert isinstance(loaded.model, GPT), "checked by the caller"
    _check_exportable(loaded)
    files, notices = _files_beside(loaded)
    with disk_errors(str(target), safe=""):
        export_huggingface(
            loaded.model,
            target,
            dtype=getattr(torch, DTYPES[dtype]),
            end_of_text=loaded.tokenizer.end_of_text,
            source=_described(loaded),
            files=files,
        )
    for line in notices:
        notice(line)


def _write_adapter(loaded: LoadedModel, target: Path, notice: Callable[[str], None]) -> None:
    assert loaded.adapters is not None, "checked by the caller"
    assert loaded.description is not None, "adapters have a base"
    name = loaded.base_name if loaded.config is None else loaded.config.model.init_from
    name = name or str(loaded.description.folder)
    facts = {"base": loaded.base, "quantize": loaded.quantize, "step": loaded.step}
    with disk_errors(str(target), safe=""):
        write_adapter(loaded.adapters, target, name, _files_beside(loaded)[0], facts)
    if (limit := who_loads(name, loaded.description)) is not None:
        notice(limit)
    if loaded.quantize != "none":
        notice(IN_4_BITS)


def _files_beside(loaded: LoadedModel) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Tokenizer, template and stops of a model, as files for others; what there is to say of them."""
    description = loaded.description
    return files_beside(
        loaded.tokenizer,
        context=loaded.model.config.context if description is None else description.config.context,
        description=description,
        chat=loaded.taught or loaded.template is not None,
        template=loaded.template,
        stops=loaded.stops,
    )


def _described(loaded: LoadedModel) -> Description | None:
    """What config.json is to keep of the model's origin; nothing where that was a shape of ours alone."""
    return loaded.description if loaded.description is not None and loaded.description.values else None


def _new_folder(folder: str | Path) -> Path:
    if folder == "":  # which a path would take for the folder that we are in
        raise UsageError("the name of the folder to write is empty", "name a new folder to write into")
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is a file or not empty", "name a new folder to write into")
    return target


def consolidate(model: str | Path, folder: str | Path) -> Path:
    """Writes a checkpoint, or the newest of a run, in the plain form: one file for all weights, whoever wrote it.

    The files are byte for byte those that one process would have written of the same values.
    """
    checkpoint = read_checkpoint(checkpoint_to_load(Path(model)))
    target = _new_folder(folder)
    with disk_errors(str(target), safe=""):
        write_plain(target, checkpoint)
    return target


@dataclasses.dataclass(frozen=True)
class Merged(Shown):
    """A merge: where it lies, and how much of the adapters' update survived."""

    folder: Path
    report: Retention


def merge(
    model: LoadedModel | str | Path | None,
    folder: str | Path,
    *,
    dtype: str = MERGED_DTYPE,
    notice: Callable[[str], None] = lambda _: None,
) -> Merged:
    """Writes a fine-tuned model as one Hugging Face folder, its adapters inside the weights.

    The sum is made in fp32 and rounded once; a model that is handed over has it in its own weights afterwards.
    `notice` gets what cannot be written to files.
    """
    if dtype not in DTYPES:
        raise UsageError(f"weights cannot be written as {dtype!r}", f"use {', '.join(DTYPES)}")
    loaded = model if isinstance(model, LoadedModel) else load_model(model, device="cpu")
    if loaded.adapters is None or loaded.adapters.detached:
        raise UsageError(f"{loaded.origin} has no adapters to merge", _instead_of_merging(loaded))
    target = _new_folder(folder)
    report = merge_adapters(loaded.adapters, getattr(torch, DTYPES[dtype]))
    _write_model(loaded, target, dtype, notice)
    return Merged(target, report)


def _instead_of_merging(loaded: LoadedModel) -> str:
    try:
        description_of(loaded.model.config, loaded.model.vocab, dtype="float32", source=_described(loaded))
    except CheckpointError:  # which export would say, too
        return "there is nothing to merge: `flatout generate` and `flatout eval` take it as it is"
    return "write it as it is with `flatout export`"
