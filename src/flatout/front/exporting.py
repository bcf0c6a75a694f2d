"""Models out: as a Hugging Face folder, merged with their adapters, or the adapters alone."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from flatout.checkpoints.base_and_adapter import IN_4_BITS, files_beside, who_loads, write_adapter
from flatout.checkpoints.checkpoint import read_checkpoint, write_plain
from flatout.checkpoints.run_folder import checkpoint_to_load
from flatout.errors import CheckpointError, UsageError
from flatout.files import disk_errors
from flatout.front.models import LoadedModel, chat_prompt, load_model
from flatout.model.gpt import GPT
from flatout.model.hub import DTYPES, Description, description_of, model_type_of
from flatout.model.hub_folder import export_huggingface
from flatout.model.merge import LogitDifference, MergeReport, logit_difference, quiet_narrow_products
from flatout.model.merge import merge as merge_adapters
from flatout.resolve.checks import way_to_export

MERGED_DTYPE = "bf16"  # what a base is mostly in, and what others load
MERGE_PROMPT = "Name three things that fly, and say in one sentence how they do it."


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
    if loaded.from_python:
        raise CheckpointError(
            f"{loaded.origin} was trained with a model from Python (model=), and no model of transformers computes it",
            "save its state_dict() in Python: flatout.load_model(RUN, model=...).model",
        )
    adapted = loaded.adapters is not None and not loaded.adapters.detached
    if adapter and not adapted:
        raise UsageError(f"{loaded.origin} has no adapters to export", "leave --adapter out")
    if adapted and not adapter:
        folder = merge(loaded, folder, dtype=dtype or MERGED_DTYPE, notice=notice).folder
        if dtype is None:
            notice(f"adapters are merged into the weights, which are in {MERGED_DTYPE}; --dtype fp32 rounds nothing")
        return folder
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
class Merged:
    """A merge: where it lies, how much of the adapters' update survived, how far its logits are from the adapters'."""

    folder: Path
    report: MergeReport
    difference: LogitDifference


def merge(
    model: LoadedModel | str | Path | None,
    folder: str | Path,
    *,
    dtype: str = MERGED_DTYPE,
    prompt: str | None = None,
    notice: Callable[[str], None] = lambda _: None,
) -> Merged:
    """Writes a fine-tuned model as one Hugging Face folder, its adapters inside the weights.

    The sum is made in fp32 and rounded once; a model that is handed over has it in its own weights afterwards. Logits
    are compared on `prompt`, or on a short text of our own. `notice` hears what cannot be said in files.
    """
    if dtype not in DTYPES:
        raise UsageError(f"weights cannot be written as {dtype!r}", f"use {', '.join(DTYPES)}")
    loaded = model if isinstance(model, LoadedModel) else load_model(model, device="cpu")
    if loaded.adapters is None or loaded.adapters.detached:
        raise UsageError(f"{loaded.origin} has no adapters to merge", _instead_of_merging(loaded))
    target = _new_folder(folder)
    ids = loaded.tokenizer.encode(prompt or chat_prompt(loaded, MERGE_PROMPT))[: loaded.model.config.context]
    tokens = torch.tensor([ids.tolist()], device=loaded.device.torch_device)
    with torch.no_grad(), quiet_narrow_products():
        before = loaded.model.logits(tokens).double().cpu()
        report = merge_adapters(loaded.adapters, getattr(torch, DTYPES[dtype]))
        after = loaded.model.logits(tokens).double().cpu()
    _write_model(loaded, target, dtype, notice)
    return Merged(target, report, logit_difference(before, after))


def _instead_of_merging(loaded: LoadedModel) -> str:
    try:
        description_of(loaded.model.config, loaded.model.vocab, dtype="float32", source=_described(loaded))
    except CheckpointError:  # which export would say, too
        return "there is nothing to merge: `flatout generate` and `flatout eval` take it as it is"
    return "write it as it is with `flatout export`"
