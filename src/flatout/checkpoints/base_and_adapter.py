"""What a run starts from (a Hugging Face folder, or a checkpoint of ours), and adapters in PEFT's format.

For fine-tuning both kinds of model become one `Base`: a description, a tokenizer for chat templates, and the template
that comes with it. A checkpoint of ours is described as if it lay in a folder of theirs; whether transformers has the
same model does not matter here.

Contract: a run of ours is pinned to the checkpoint that it means today, the best or else the newest. A run that was
itself trained with adapters is no base until it is merged. Adapters keep a hash of the weights they were trained on,
and another model in their place is refused.

Pretraining starts from the weights of GPT-2, or of a run of ours, which may get a longer context. Everything is
checked before a model is built, and weights are copied, so the base may go afterwards. The shape is the config's own
and must be the base's, but for settings without weights: context, rotary frequencies, windows, dropout. Nothing
else of the base's run is taken over: optimizer, schedule and data begin anew.
Trap: a longer context. Rotary positions beyond those of the base turn by angles it has never seen. That is allowed, and
a notice says so. Slowing the frequencies down keeps angles in the range it knows, but changes those of near tokens as
well, so it is for the user to measure (docs/guides/long-context.md).

Adapters: `RUN/adapter` always holds the adapter that `flatout chat RUN` would load: the best checkpoint so far, or else
the newest. Beside the adapter lie the tokenizer and the chat template that it was taught with, so PEFT and vLLM need
nothing else but the base model, whose name is in adapter_config.json.

Contract: the folder is replaced as a whole, and only if we wrote everything in it (`OccupiedError`). flatout.json keeps
the hash of the base and whether it was in 4 bits, so that an adapter of ours is never put on another base, and the base
is rounded again. Other programs ignore that file.
`lora.init_from` takes over ranks, alphas, targets and kind from the folder; a setting of the user's that differs is
refused. A run that began so and is resumed has them from its checkpoint.
"""

import dataclasses
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatout.checkpoints.checkpoint import check_files_alone, read_model, read_part, verify_checkpoint, vocab_in
from flatout.checkpoints.run_folder import checkpoint_to_load, checkpoints_of, is_checkpoint
from flatout.config.load import resolve_from_mapping
from flatout.config.schema import LoraConfig, ModelConfig
from flatout.config.source import Source
from flatout.config.yaml_loader import format_value, shorten
from flatout.data.chat_template import (
    BUILT_IN,
    MODEL,
    ChatTemplate,
    is_there,
    load_template,
    read_templates,
    template_from_json,
)
from flatout.data.gguf_files import gguf_files
from flatout.data.library_tokenizers import ModelTokenizer
from flatout.data.tokenizer import Tokenizer, tokenizer_from_json
from flatout.data.tokenizer_files import (
    TOKENIZER,
    as_model_tokenizer,
    read_model_tokenizer,
    tokenizer_files,
    with_stops,
    with_template,
)
from flatout.errors import CheckpointError, ConfigError, DataError
from flatout.gguf_file import is_gguf
from flatout.model.adapter_files import CONFIG, AdapterOrigin, check_stored, load_into, read_origin, save_adapter
from flatout.model.adapter_targets import ALL_LINEAR, AdapterPlan, choose, ends_with, targets_of
from flatout.model.adapters import Adapters
from flatout.model.execution import Execution
from flatout.model.gpt import GPT, empty_model
from flatout.model.hub import Description, check_same_model, describe, description_of, fitting_context, read_description
from flatout.model.hub_folder import (
    companions,
    find_model,
    load_described,
    load_huggingface,
    own_fingerprint,
    weights_fingerprint,
)
from flatout.model.quantize import check_quantizing, round_linears
from flatout.model.seal import SEAL, check_seal, read_seal
from flatout.model.weights import assign_weights, check_tensors

_ROPE = ("rope_base", "rope_scaling", "rope_factor", "rope_low", "rope_high", "rope_original_context")
_ROPE += ("rope_local_base", "rope_factors", "rope_gain")
_FREE = {"init_from", "context", "vocab", "dropout", "window", *_ROPE}
ADAPTER = "adapter"
# Settings of an adapter that have the same names in PEFT's plan.
_SETTINGS = ("rank", "alpha", "rank_stabilised", "dora")
_LISTS = ("targets", "ranks", "alphas")


@dataclasses.dataclass(frozen=True)
class Base:
    """A model before its weights are read. `name` finds it again."""

    name: str
    description: Description
    tokenizer: ModelTokenizer
    template: ChatTemplate | None  # of a run that was fine-tuned; that of a Hugging Face folder is read where asked for

    def template_for(self, spec: str) -> tuple[ChatTemplate | None, str]:
        """The chat template that a config asks for, and a notice on it.

        A model of ours that was never taught to chat has none: it gets chatml if it has its tokens, else plain.
        """
        folder = self.description.folder
        if spec != MODEL or not is_checkpoint(folder):
            return load_template(spec, folder, self.tokenizer), ""
        if self.template is not None:
            return self.template, ""
        tokens = BUILT_IN["chatml"][1]
        chosen = "plain" if any(self.tokenizer.token_id(token) is None for token in tokens) else "chatml"
        said = f"{self.name} was never taught a chat template: samples are written by `{chosen}` (chat.template)"
        return load_template(chosen, None, self.tokenizer), said

    def fit(self, asked: int, written: Source) -> tuple[int, str]:
        """A context with no more tokens than there are positions, and a notice on it.

        `written` is where the context was asked for: a value of the user's is refused instead of cut.
        """
        has = self.description.config.context
        if asked <= has:
            return asked, ""
        if written.by_user:
            raise ConfigError(
                f"model.context is {asked:,}, but {self.name} has {has:,} positions",
                f"set model.context to at most {has}, or leave it out",
                where=written.where,
                setting="model.context",
            )
        return has, f"model.context is cut from {asked:,} to {has:,}: {self.name} has no more positions"


def open_base(name: str, context: int | None) -> Base:
    """The model of this name, with as much context as a sample may have, or with all it has where that is less."""
    found = find_model(name)
    if found.kind != "huggingface":
        return _own(name, checkpoint_to_load(found.path, best=True), context)
    description = read_description(found.path, context=context, cut=True)
    tokenizer = read_model_tokenizer(found.path)
    if tokenizer.vocab > description.vocab:
        raise CheckpointError(
            f"the tokenizer of {name} has {tokenizer.vocab:,} ids, the model {description.vocab:,}",
            "fetch the folder again: its files do not belong together",
        )
    return Base(name, description, tokenizer, None)


def describe_base(name: str, context: int | None) -> Description:
    """The description alone: who has a tokenizer already needs none of the model's."""
    found = find_model(name)
    if found.kind == "huggingface":
        return read_description(found.path, context=context)
    checkpoint = checkpoint_to_load(found.path, best=True)
    config, state, language = read_own(name, checkpoint, training=False)
    return described_checkpoint(config, state, checkpoint, tokenizer_from_json(language).end_of_text, context)


def _own(name: str, checkpoint: Path, context: int | None) -> Base:
    config, state, language = read_own(name, checkpoint, training=True)
    try:
        tokenizer = as_model_tokenizer(tokenizer_from_json(language))
    except DataError as error:
        raise DataError(f"{name}: {error.message}", error.hint) from error
    template = state.get("template")
    return Base(
        str(checkpoint),
        described_checkpoint(config, state, checkpoint, tokenizer.end_of_text, context, cut=True),
        tokenizer,
        None if template is None else template_from_json(template),
    )


def read_own(name: str, checkpoint: Path, *, training: bool) -> tuple[ModelConfig, dict[str, Any], dict[str, Any]]:
    """(model section, state, tokenizer) of a checkpoint of ours that can be a base."""
    verify_checkpoint(checkpoint)
    values, state, language = (read_part(checkpoint, part) for part in ("config", "state", "tokenizer"))
    config = resolve_from_mapping(values, str(checkpoint))
    check_files_alone(state, name)
    if config.lora.rank:
        other = "or continue with its adapters: lora.init_from"
        if not training:
            other = f"or name the model under its adapters: {config.model.init_from}"
        raise CheckpointError(
            f"{name} has adapters beside a frozen model, and cannot be the base of others",
            f"write it as one model with `flatout export {name} FOLDER`, {other}",
        )
    return config.model, state, language


def described_checkpoint(
    own: ModelConfig,
    state: Mapping[str, Any],
    folder: Path,
    end_of_text: int | None,
    context: int | None = None,
    *,
    cut: bool = False,
) -> Description:
    """A checkpoint of ours as config.json would describe it: as it was when it came from one, or as it can be now."""
    source = describe(state["described"], folder) if state.get("described") else None
    made_for, vocab = (own if source is None else source.config).context, vocab_in(state)
    model = own.model_copy(update={"init_from": None, "dropout": 0.0})
    context = fitting_context(context, made_for, folder, cut=cut)
    if context is not None and model.positions != "learned":  # learned positions are weights: their number stays
        model = model.model_copy(update={"context": context})
    stops = tuple(state.get("stops", () if end_of_text is None else (end_of_text,)))
    if source is not None:
        return dataclasses.replace(source, config=model, vocab=vocab, end_of_text=stops)
    try:
        values = description_of(own, vocab, dtype="float32", end_of_text=end_of_text)
    except CheckpointError:  # a shape that transformers has not: ours alone, and it cannot be exported
        values = {}
    return Description(
        folder=folder,
        model_type=values.get("model_type", "flatout"),
        config=model,
        vocab=vocab,
        dtype="float32",
        begin_of_text=None,
        end_of_text=stops,
        padding=None,
        values=values,
    )


def build_base(
    description: Description,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    execution: Execution | None = None,
    quantize: str = "none",
    weights: bool = True,
) -> GPT:
    """The model with its weights, wherever they lie, or without. What was quantized is wide again, with the values it
    had then."""
    config, vocab = description.config, description.vocab
    if not weights:
        return empty_model(config, vocab, execution=execution, dtype=dtype, device=device)
    if not is_checkpoint(description.folder):
        model = load_described(description, dtype=dtype, device=device, execution=execution)
    else:
        tensors = read_model(description.folder)
        check_own_weights(config, vocab, tensors, str(description.folder))
        model = empty_model(config, vocab, execution=execution, dtype=dtype, device=device)
        assign_weights(model, tensors, str(description.folder))
    if quantize != "none":  # adapters know the base as it was beside them
        check_quantizing(torch.device(device))
        round_linears(model)
    return model


def check_own_weights(config: ModelConfig, vocab: int, tensors: Mapping[str, Tensor], origin: str) -> None:
    """Refuses weights of another shape than the model's, before memory is taken for it."""
    model = empty_model(config, vocab, device="meta")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    check_tensors(shapes, tensors, origin, "model section")


def base_fingerprint(description: Description) -> str:
    """A hash of the weights, by which adapters know their base.

    A checkpoint of ours and the folder that `flatout export` makes of it have the same.
    """
    if not is_checkpoint(description.folder):
        return weights_fingerprint(description)
    return own_fingerprint(read_model(description.folder), description.config, portable=bool(description.values))


def check_base(name: str, description: Description, expected: str | None) -> None:
    """Refuses a model that adapters were not trained on. Checkpoints from before there was a hash say nothing."""
    if expected is not None and base_fingerprint(description) != expected:
        raise CheckpointError(
            f"{name} holds other weights than those that the adapters were trained on",
            "put the model that they were trained on back in its place; on another one they mean nothing",
        )


def base_of(
    config: ModelConfig, quantize: str, expected: str | None = None, *, named: bool = False
) -> tuple[GPT, Description]:
    """The frozen model under a run's adapters, read again from where it came from. `expected` is the hash it had.

    `named`: the user named its place, so errors speak of that place alone.
    """
    name = config.init_from
    assert name is not None, "checked by the config"
    try:
        description = describe_base(name, config.context)
    except CheckpointError as error:
        if named:
            raise
        raise CheckpointError(
            f"the model that the adapters were trained on cannot be loaded: {error.message}",
            f"name it with --base MODEL, or put {name} back and call this from the folder that the run was trained in",
        ) from error
    check_same_model(config, description, "put the model that the adapters were trained on back in its place")
    check_base(name, description, expected)
    description = dataclasses.replace(description, config=config)
    return build_base(description, quantize=quantize), description


# --- weights that pretraining starts from -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Start:
    """Where the weights are, and a notice on them."""

    folder: Path
    ours: bool
    notice: str

    def fill(self, model: GPT) -> None:
        if self.ours:
            assign_weights(model, read_model(self.folder), str(self.folder))
        else:
            load_huggingface(model, self.folder)


def open_start(config: ModelConfig, vocab: int | None, tokenizer: Tokenizer | None = None) -> Start | None:
    """The start that `model.init_from` names, if any; refused unless a model of this config can take its weights.

    Vocabulary and tokenizer are compared if they are known already.
    """
    name = config.init_from
    if name is None:
        return None
    found = find_model(name)
    if found.kind == "huggingface":
        return _gpt2(config, vocab, found.path)
    folder = checkpoint_to_load(found.path, best=True)
    base, state, language = read_own(name, folder, training=False)
    _check_shape(config, base, name)
    if tokenizer is not None and tokenizer_from_json(language).fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{name} was trained with another tokenizer than the data here",
            f"prepare the data in a data.folder of its own, with {_tokenizer_of(language, folder)}",
        )
    if vocab is not None and vocab != (own := vocab_in(state)):
        raise CheckpointError(f"{name} has {own:,} ids, and here there are {vocab:,}", f"set model.vocab={own}")
    return Start(folder, True, f"starts from {folder}{_longer(config, base)}")


def _tokenizer_of(description: Mapping[str, Any], checkpoint: Path) -> str:
    named = description["kind"] in ("bytes", "gpt2")  # others are made from the data, and are not the same twice
    return f"data.tokenizer={description['kind'] if named else checkpoint / 'tokenizer.json'}"


def _check_shape(config: ModelConfig, base: ModelConfig, name: str) -> None:
    free = _FREE - {"context"} if config.positions == "learned" else _FREE
    for field in sorted(ModelConfig.model_fields.keys() - free):
        here, there = (format_value(getattr(model, field)) for model in (config, base))
        if here != there:
            raise CheckpointError(
                f"{name} has model.{field} {there}, and here it is {here}",
                f"set {shlex.quote(f'model.{field}={there}')}, and begin with the preset that it was trained by",
            )


def _longer(config: ModelConfig, base: ModelConfig) -> str:
    if config.context <= base.context:
        return ""
    sentence = f", which has learned contexts of {base.context:,} tokens; here they have {config.context:,}"
    if "A" in config.kinds and all(getattr(config, field) == getattr(base, field) for field in _ROPE):
        sentence += ". Rotary positions beyond are new to it; model.rope_base and model.rope_scaling slow them down"
    return sentence


def _gpt2(config: ModelConfig, vocab: int | None, folder: Path) -> Start:
    description = read_description(folder)
    found = description.config
    if found.family != "gpt2":
        raise CheckpointError(
            f"{folder} holds a {description.model_type} model; pretraining starts from GPT-2 or from a run of ours",
            f"train it on rows of text with `flatout finetune model.init_from={folder} chat.source=FILE`",
        )
    if config.family != "gpt2":
        raise CheckpointError(f"{folder} holds a GPT-2, and the model is of another family", "set model.family=gpt2")
    asked = (config.layers, config.width, config.heads, config.context, vocab or description.vocab)
    stored = (found.layers, found.width, found.heads, found.context, description.vocab)
    if asked != stored:
        raise CheckpointError(
            f"{folder} has (layers, width, heads, context, vocab) {stored}, the model section says {asked}",
            "make the model section equal to the weights",
        )
    return Start(folder, False, f"starts from the GPT-2 of {folder}")


# --- adapters in PEFT's folder ----------------------------------------------------------------------------------------


def files_beside(
    tokenizer: Tokenizer,
    *,
    context: int,
    description: Description | None,
    chat: bool,
    template: ChatTemplate | None,
    stops: tuple[int, ...],
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The files that go beside weights or adapters, and notices on them.

    The base's own files are taken where it has the same tokenizer: they say more than ours do. After `chat` training
    the template is the one it was taught with, whatever the base has; None means that it was taught without any.
    """
    folder = None if description is None or is_checkpoint(description.folder) else description.folder
    files = {} if folder is None else gguf_files(folder) if is_gguf(folder) else companions(folder)
    notices: tuple[str, ...] = ()
    if folder is None or not _same_tokenizer(folder, tokenizer):
        own, notices = tokenizer_files(tokenizer, context)
        files = {name: content for name, content in files.items() if name.startswith("generation_")} | own
        chat = chat or template is not None
    theirs = {} if folder is None else read_templates(folder)
    if chat and (template is None or template.texts != theirs):
        files = with_template(files, template)
    return with_stops(files, stops), notices


def _same_tokenizer(folder: Path, tokenizer: Tokenizer) -> bool:
    try:
        return is_there(folder / TOKENIZER) and read_model_tokenizer(folder).fingerprint == tokenizer.fingerprint
    except DataError:
        return False


def write_adapter(
    adapters: Adapters,
    folder: Path,
    base: str,
    files: Mapping[str, bytes],
    facts: Mapping[str, str | int | None],
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """PEFT's folder. A base on this machine is named by its whole path, so that it is found from everywhere.

    `facts` go into `flatout.json`: base (a hash of its weights), quantize and step. `tensors` are those of that
    step, where training has gone on since.
    """
    base = str(Path(base).resolve()) if os.path.exists(base) else base
    kept = {name: content for name, content in files.items() if not name.startswith("generation_")}
    save_adapter(adapters, folder, base=base, files=kept, facts=facts, tensors=tensors)


IN_4_BITS = "its base was in 4 bits (NF4), as Flatout loads it again; other programs need load_in_4bit"


def who_loads(name: str, description: Description) -> str | None:
    """A sentence on a base that others cannot load; None where they can. `name` is where it lies."""
    if is_gguf(description.folder):
        return "its base is a GGUF file: for PEFT, write that as a folder with `flatout export`"
    if not is_checkpoint(description.folder):
        return None
    if not description.values:
        return "its base is a checkpoint of ours, of a shape that transformers has not: only Flatout loads it"
    return f"its base is a checkpoint of ours: for PEFT, write that as a folder with `flatout export {name} FOLDER`"


def _facts(folder: Path) -> dict[str, Any]:
    """Our facts beside an adapter; empty where another program wrote it."""
    content = read_seal(folder) or {}
    return content.get("facts", content)


def step_of(folder: Path) -> int | None:
    """The step that an adapter's folder holds; None where it does not say."""
    try:
        step = _facts(folder).get("step")
    except CheckpointError:  # damaged: it is written anew, by who asks for the step
        return None
    return step if isinstance(step, int) else None


def stored_base(folder: Path) -> str | None:
    """The hash of the base that an adapter of ours was trained on; None for those of others."""
    base = _facts(folder).get("base")
    return base if isinstance(base, str) else None


def stored_quantize(folder: Path) -> str:
    """How the base of an adapter of ours was quantized; that of others counts as not."""
    quantize = _facts(folder).get("quantize", "none")
    if quantize not in ("none", "nf4"):
        raise CheckpointError(
            f"{folder / SEAL} says that the base was quantized as {shorten(quantize)}, which is not known here",
            "update Flatout to read it",
        )
    return quantize


# --- continuing from a folder -----------------------------------------------------------------------------------------


def adapter_at(name: str) -> Path:
    """The folder that `lora.init_from` means: one of PEFT's, or the run of ours that wrote one."""
    folder = Path(name)
    if os.path.isfile(folder / CONFIG):  # of os.path: a name that is too long is that of no file
        return folder
    if os.path.isfile(folder / ADAPTER / CONFIG):
        return folder / ADAPTER
    check_seal(folder)  # of a folder that lost its adapter_config.json
    if os.path.isdir(folder) and (is_checkpoint(folder) or checkpoints_of(folder).is_dir()):
        hint = f"write them with `flatout export {name} FOLDER --adapter`, if it has adapters"
    else:
        hint = "name a folder with adapter_config.json and adapter_model.safetensors, or a run that was trained by LoRA"
    if not os.path.exists(folder):
        raise CheckpointError(f"there is no folder {name:.200} (lora.init_from)", hint)
    raise CheckpointError(f"{name} holds no adapter", hint)


def continue_from(name: str, adapters: Adapters, base: str, base_name: str | None) -> None:
    """Gives adapters the values in the folder that `lora.init_from` means; `base` is the hash of the frozen weights."""
    folder = adapter_at(name)
    if stored_base(folder) not in (None, base):
        raise CheckpointError(
            f"the adapter in {folder} was trained on other weights than those of {base_name}",
            "set model.init_from to the model that it was trained on",
        )
    load_into(adapters, folder)


def with_adapter(
    lora: LoraConfig,
    description: Description,
    source: Callable[[str], Source],
    *,
    begun: LoraConfig | None = None,
) -> LoraConfig:
    """The settings of the adapter that a run continues from, where it does.

    `begun` is what the checkpoint of a resumed run says: it began with that folder as it was then, and what lies
    there today, if anything, does not matter any more.
    """
    name = lora.init_from
    if name is None:
        return lora
    if not lora.rank:
        raise ConfigError("lora.init_from is set, but lora.rank is 0", "leave one of the two out")
    if begun is not None and begun.rank and begun.init_from is not None and Path(begun.init_from) == Path(name):
        found = {field: getattr(begun, field) for field in (*_SETTINGS, *_LISTS)}
        whose, hint = "the run", "leave lora.{} out: a resumed run keeps the adapter that it has"
    elif begun is not None and not os.path.isdir(name):
        return lora
    else:
        origin = read_origin(adapter_at(name))
        found = {field: getattr(origin.plan, field) for field in _SETTINGS}
        found |= {"alpha": float(origin.plan.alpha), **_lists(origin, description)}
        whose = f"the adapter in {origin.folder}"
        hint = "leave lora.{} out, or begin a new adapter without lora.init_from"
    for field, value in found.items():
        ours, written = getattr(lora, field), source(f"lora.{field}")
        if written.by_user and written.where and ours != value:
            raise ConfigError(
                f"lora.{field} is {format_value(ours)}, but {whose} has {format_value(value)}",
                hint.format(field),
                where=written.where,
                setting=f"lora.{field}",
            )
    return lora.model_copy(update=found)


def adapter_plan(config: LoraConfig) -> AdapterPlan:
    return AdapterPlan(
        rank=config.rank,
        alpha=2.0 * config.rank if config.alpha is None else config.alpha,
        dropout=config.dropout,
        targets=tuple(config.targets),
        ranks=config.named_ranks,
        alphas=config.named_alphas,
        rank_stabilised=config.rank_stabilised,
        dora=config.dora,
    )


def _lists(origin: AdapterOrigin, description: Description) -> dict[str, list[str]]:
    """The adapter's targets, ranks and alphas as our config can say them: targets by their names.

    Refuses ranks that the adapter's file does not have, before a run takes memory for them.
    """
    plan, model = origin.plan, empty_model(description.config, description.vocab, device="meta")
    try:
        choices = choose(plan, targets_of(model), strict=False)
    except ConfigError as error:
        raise CheckpointError(f"{origin.folder / CONFIG}: {error.message}", error.hint) from error
    check_stored(origin, model, choices)
    paths = tuple(choice.target.path for choice in choices)
    # Those that fit nothing do nothing there, and would be refused here.
    numbers = {
        field: [f"{pattern}={number}" for pattern, number in pairs if any(ends_with(pattern, path) for path in paths)]
        for field, pairs in (("ranks", plan.ranks), ("alphas", plan.alphas))
    }
    fitting = [name for name in plan.targets if any(ends_with(name, path) for path in paths)]
    return {"targets": fitting or [ALL_LINEAR], **numbers}
