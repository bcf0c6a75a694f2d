"""Models out: folders for Hugging Face tools, GGUF for llama.cpp, adapters for PEFT, checkpoints in one piece.

Contract: a folder appears whole or not at all, and only after its files were proven (`front/proof.py`): read back, they
compute what the model does. It has a manifest with the hash of every file and of the weights that it was written from,
so `check_export` finds a changed byte, and a run that has other weights by now.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import flatout
from flatout.checkpoints.base_and_adapter import IN_4_BITS, files_beside, who_loads, write_adapter
from flatout.checkpoints.checkpoint import read_checkpoint, read_verdict, write_plain
from flatout.checkpoints.run_folder import checkpoint_to_load, is_checkpoint
from flatout.config.yaml_loader import format_value
from flatout.data.gguf_tokenizer import modelfile, tokenizer_values
from flatout.errors import CheckpointError, UsageError, quoted
from flatout.files import canonical_json, disk_errors, write_new
from flatout.front.models import LoadedModel, load_model, template_of
from flatout.front.proof import Held, Proof, held_text, prove
from flatout.gguf_file import gguf_at
from flatout.model.gguf_weights import file_values
from flatout.model.gguf_writer import TYPES, write_gguf
from flatout.model.gpt import GPT
from flatout.model.hub import DTYPES, Description, description_of, folded, model_type_of
from flatout.model.hub_folder import export_huggingface, own_fingerprint, sealed_folder
from flatout.model.merge import Retention
from flatout.model.merge import merge as merge_adapters
from flatout.model.seal import SEAL, check_seal, read_seal
from flatout.resolve.checks import way_to_export
from flatout.shown import Shown

MERGED_DTYPE = "bf16"  # what a base is mostly in, and what others load
FORMATS = {"huggingface": tuple(DTYPES), "gguf": tuple(TYPES)}
_CARD = "README.md"


def export(
    model: LoadedModel | str | Path | None,
    folder: str | Path,
    *,
    dtype: str | None = None,
    adapter: bool = False,
    format: str = "huggingface",
    notice: Callable[[str], None] = lambda _: None,
) -> Path:
    """Writes a trained model as a Hugging Face folder with its tokenizer, its weights in fp32, bf16 or fp16.

    With `format="gguf"` the folder holds a GGUF file for llama.cpp, Ollama and LM Studio, also in q8_0, and a
    Modelfile. Adapters are written into the weights, as `merge` does, or with `adapter` alone, as PEFT's folder.
    Without a dtype it is `merge`'s where there is something to merge, and else fp32, as it was trained. Refused where
    transformers or llama.cpp has no model that computes the same, and where the written files compute another. `notice`
    hears what cannot be said in files.
    """
    if adapter and (dtype is not None or format != "huggingface"):
        raise UsageError(
            "adapters alone are always written in fp32, as PEFT has them", "leave --dtype and --format out"
        )
    if format not in FORMATS:
        raise UsageError(f"models cannot be written as {quoted(format)}", f"use {' or '.join(FORMATS)}")
    if dtype not in (None, *FORMATS[format]):
        hint = "add --format gguf" if dtype in TYPES else f"use {', '.join(FORMATS[format])}"
        raise UsageError(f"weights cannot be written as {dtype!r}", hint)
    loaded = model if isinstance(model, LoadedModel) else load_model(model, device="cpu")
    _check_writable(loaded)
    adapted = loaded.adapters is not None and not loaded.adapters.detached
    if adapter and not adapted:
        raise UsageError(f"{loaded.origin} has no adapters to export", "leave --adapter out")
    target = _new_folder(folder)
    if adapted and adapter:
        _write_adapter(loaded, target, notice)
    elif adapted:
        more: list[str] = []
        kept = _write_merged(loaded, target, dtype or MERGED_DTYPE, more.append, format)
        notice(f"the adapters are merged into the weights, in {dtype or MERGED_DTYPE}; --dtype fp32 rounds nothing")
        notice(
            f"the update is {kept.relative_update:.2%} of the weights it changes; {kept.kept:.1%} of it survived the "
            f"rounding, {kept.unchanged:.1%} of those weights are as before"
        )
        for line in more:
            notice(line)
    else:
        _write_model(loaded, target, dtype or "fp32", notice, format)
    return target


def _check_writable(loaded: LoadedModel) -> None:
    if loaded.weights != "fp32":
        raise UsageError(f"the model was loaded with {loaded.weights} weights", "load it with weights='fp32'")
    if loaded.from_python:
        raise CheckpointError(
            f"{loaded.origin} was trained with a model from Python (model=), and no model of transformers computes it",
            "save its state_dict() in Python: flatout.load_model(RUN, model=...).model",
        )


def _check_exportable(loaded: LoadedModel) -> None:
    """Refuses a model that no other program has, with the settings or the command that train one which they have."""
    if loaded.config is None or _described(loaded) is not None:
        return
    try:
        model_type_of(loaded.model.config)
    except CheckpointError as error:
        raise CheckpointError(error.message, way_to_export(loaded.config)) from None


def _write_model(
    loaded: LoadedModel,
    target: Path,
    dtype: str,
    notice: Callable[[str], None],
    format: str = "huggingface",
    held: Held | None = None,
) -> None:
    assert isinstance(loaded.model, GPT), "checked by the caller"
    _check_exportable(loaded)
    held = held or held_text(loaded)
    facts = {"format": format, "dtype": dtype, "weights": _fingerprint(loaded)}

    def finish(work: Path) -> None:
        proof = prove(gguf_at(work) or work, held, dtype)
        write_new(work / _CARD, _card(loaded, target.name, facts, proof).encode())
        notice(str(proof))

    write = _write_huggingface if format == "huggingface" else _write_gguf
    with disk_errors(str(target), safe=""):
        for line in write(loaded, loaded.model, target, dtype, facts, finish):
            notice(line)


def _write_huggingface(
    loaded: LoadedModel, model: GPT, target: Path, dtype: str, facts: dict[str, Any], finish: Callable[[Path], None]
) -> tuple[str, ...]:
    files, notices = _files_beside(loaded)
    export_huggingface(
        model,
        target,
        dtype=getattr(torch, DTYPES[dtype]),
        end_of_text=loaded.tokenizer.end_of_text,
        source=_described(loaded),
        files=files,
        facts=facts,
        finish=finish,
    )
    return notices


def _write_gguf(
    loaded: LoadedModel, model: GPT, target: Path, dtype: str, facts: dict[str, Any], finish: Callable[[Path], None]
) -> tuple[str, ...]:
    described = description_of(model.config, model.vocab, dtype="float32")
    template = template_of(loaded)
    tokens = tokenizer_values(loaded.tokenizer, model.vocab, loaded.stops, template)
    values = {**file_values(folded(model.config), described), "general.type": "model"}
    values |= {"general.name": _name(loaded) or target.name, **tokens}
    texts = tokens["tokenizer.ggml.tokens"]
    begin = texts[tokens["tokenizer.ggml.bos_token_id"]] if tokens["tokenizer.ggml.add_bos_token"] else None
    name = f"model-{TYPES[dtype]}.gguf"
    content, notices = modelfile(name, model.config.context, [texts[stop] for stop in loaded.stops], template, begin)
    with sealed_folder(target, facts, finish) as (work, _):
        write_gguf(work / name, model, values, dtype)
        write_new(work / "Modelfile", content.encode())
    return notices


def _fingerprint(loaded: LoadedModel) -> str:
    """The hash of a model's weights in fp32, as `transformers` has them."""
    weights = {name: x.detach().cpu() for name, x in loaded.model.named_parameters()}
    return own_fingerprint(weights, loaded.model.config, portable=True)


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
    return Merged(target, _write_merged(loaded, target, dtype, notice))


def _write_merged(
    loaded: LoadedModel, target: Path, dtype: str, notice: Callable[[str], None], format: str = "huggingface"
) -> Retention:
    held, report = held_text(loaded), _merge(loaded, dtype)
    _write_model(loaded, target, dtype, notice, format, held)
    return report


def _merge(loaded: LoadedModel, dtype: str) -> Retention:
    """Puts the adapters into the weights; those of GGUF's own types are rounded later."""
    assert loaded.adapters is not None, "checked by the caller"
    return merge_adapters(loaded.adapters, getattr(torch, DTYPES.get(dtype, "float32")))


def _instead_of_merging(loaded: LoadedModel) -> str:
    try:
        description_of(loaded.model.config, loaded.model.vocab, dtype="float32", source=_described(loaded))
    except CheckpointError:  # which export would say, too
        return "there is nothing to merge: `flatout generate` and `flatout eval` take it as it is"
    return "write it as it is with `flatout export`"


# --- what was written, later ------------------------------------------------------------------------------------------


def check_export(folder: str | Path, model: LoadedModel | str | Path | None) -> Proof:
    """Checks an exported folder again: every byte of it, and that it is the model that it was written from."""
    folder = Path(folder)
    content = read_seal(folder)
    if content is None or "weights" not in content.get("facts", {}):
        raise CheckpointError(
            f"{folder} has no {SEAL} that names the weights it was written from",
            "name a folder that this version's `flatout export` wrote",
        )
    facts = check_seal(folder, cards=True)
    loaded = model if isinstance(model, LoadedModel) else load_model(model, device="cpu")
    _check_writable(loaded)
    held = held_text(loaded)
    if loaded.adapters is not None and not loaded.adapters.detached:
        _merge(loaded, facts["dtype"])
    if _fingerprint(loaded) != facts["weights"]:
        raise CheckpointError(
            f"{folder} was written from other weights than those of {loaded.origin}",
            "name the run or the checkpoint that it was written from, or export it again",
        )
    return prove(gguf_at(folder) or folder, held, facts["dtype"])


def push(folder: str | Path, name: str) -> str:
    """Sends an exported folder to the Hub, as the repository `name`, which is made private if it is new."""
    check_seal(Path(folder))
    try:
        from huggingface_hub import HfApi

        api = HfApi()
        place = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=place.repo_id, folder_path=str(folder), commit_message="Written by Flatout")
    except ImportError as error:
        raise UsageError("the Hub needs the package huggingface_hub", "pip install huggingface_hub") from error
    except Exception as error:  # any failure of the network or the Hub
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{folder} could not be sent to the Hub as {quoted(name)}: {reason:.300}",
            "check the name and the network, and run `hf auth login`; the folder itself is complete",
        ) from error
    return str(place)


def _name(loaded: LoadedModel) -> str | None:
    """The name of the run that a model comes from."""
    return loaded.origin.parent.parent.name if loaded.settings is not None and is_checkpoint(loaded.origin) else None


_RECIPE = ("model", "optim", "train", "lora", "speed")


def _card(loaded: LoadedModel, title: str, facts: dict[str, Any], proof: Proof) -> str:
    """The model card: what the weights are, where they come from, and how they were checked."""
    config, model = loaded.config, loaded.model
    base = None if config is None else config.model.init_from
    gguf = facts["format"] == "gguf"
    head = ["---", f"library_name: {'gguf' if gguf else 'transformers'}", "pipeline_tag: text-generation"]
    named = base is not None and base.count("/") == 1 and not Path(base).exists()
    head += ["tags: [flatout]"] + [f"base_model: {base}"] * named
    size = sum(x.numel() for x in model.parameters())
    shape = f"{size:,} parameters, {model.config.context:,} tokens of context, {model.vocab:,} token ids"
    rows = {"model": shape, "weights": f"{facts['dtype']}, written from SHA-256 {facts['weights']}"}
    if config is not None:
        settings = hashlib.sha256(canonical_json(config.model_dump(mode="json"))).hexdigest()
        rows["run"] = f"{_name(loaded)}, step {loaded.step}, settings of SHA-256 {settings}"
        rows["data"] = f"fingerprint {loaded.dataset}"
    verdict = read_verdict(loaded.origin)
    if verdict is not None:
        rows["validation loss"] = f"{verdict.loss:.4f}"
    rows["tokenizer"] = f"{loaded.tokenizer.kind}, fingerprint {loaded.tokenizer.fingerprint}"
    lines = [*head, "---", "", f"# {_name(loaded) or title}", "", f"Written by Flatout {flatout.__version__}.", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items()), "", f"{proof}."]
    if config is not None:
        lines += ["", "## Recipe", "Settings that are not defaults.", "", "```yaml", *_recipe(config), "```"]
    if gguf:
        use = ["llama-cli -m model-*.gguf", "ollama create NAME -f Modelfile"]
    else:
        use = ["from transformers import pipeline", 'pipeline("text-generation", "FOLDER")("Once")']
    return "\n".join([*lines, "", "## Use", "```", *use, "```", ""])


def _recipe(config: Any) -> list[str]:
    """Settings of a run that are not defaults, without names of files and folders."""
    lines: list[str] = []
    for section in _RECIPE:
        values = getattr(config, section)
        usual = {
            name: field.get_default(call_default_factory=True) for name, field in type(values).model_fields.items()
        }
        changed = {name: value for name, value in values if value != usual[name] and name != "init_from"}
        lines += [f"{section}:"] * bool(changed)
        lines += [f"  {name}: {format_value(value)}" for name, value in changed.items()]
    return lines
