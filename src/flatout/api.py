"""Everything a verb does, as a function. The command line is a thin reader of this file.

No global state: a run's random stream, arithmetic switches and files are its own, so several can live in one notebook.
"""

import contextlib
import dataclasses
import shlex
import traceback
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flatout.config.load import (
    LoadedConfig,
    Source,
    format_value,
    load_config,
    load_stored,
    resolve_from_mapping,
    show,
)
from flatout.config.schema import RunConfig
from flatout.data.array_data import Arrays
from flatout.data.chat_template import ChatTemplate, TemplateRefusal, load_template, template_from_json
from flatout.data.loader import evaluation_batches
from flatout.data.masking import stops_of
from flatout.data.model_folder import read_model_tokenizer, read_templates
from flatout.data.pack import Progress
from flatout.data.portable import own_tokenizer
from flatout.data.prepare import data_folder, prepare_data
from flatout.data.sample_data import first_samples
from flatout.data.sample_loader import sample_batches
from flatout.data.samples import SampleSet, holds_samples, open_samples
from flatout.data.shards import Tokens, open_dataset
from flatout.data.stream import open_stream
from flatout.data.tokenizer import ModelTokenizer, Tokenizer, load_tokenizer, tokenizer_from_json
from flatout.data.training_data import tokens_per_byte
from flatout.data.workers import EngineName
from flatout.device import Device, arithmetic, detect_device, free_memory
from flatout.engine.adapter_folder import (
    IN_4_BITS,
    files_beside,
    stored_base,
    stored_quantize,
    who_loads,
    write_adapter,
)
from flatout.engine.base_model import base_of, build_base, check_base, describe_base, described_checkpoint, open_base
from flatout.engine.checkpoint import Checkpoint, mark_as_base, read_checkpoint
from flatout.engine.diverged import with_way_back
from flatout.engine.evaluate import bits_per_byte, perplexity
from flatout.engine.evaluate import evaluate as evaluate_model
from flatout.engine.features import scan_for
from flatout.engine.fine_tuning import adapter_plan, open_sample_data, samples_folder
from flatout.engine.fit_check import check_disk, out_of_memory
from flatout.engine.loop import train_loop
from flatout.engine.opening import steps_of
from flatout.engine.run import Run
from flatout.engine.run_files import check_own
from flatout.engine.run_folder import (
    checkpoint_to_load,
    choose_folder,
    find_resume_point,
    is_checkpoint,
    newest_run,
    run_lock,
    set_later_aside,
    set_unusable_aside,
)
from flatout.engine.saving import lacks_verdict, recorded_again
from flatout.engine.setup import setup_run
from flatout.engine.trained import only_adapters
from flatout.errors import CheckpointError, ConfigError, DataError, DivergedError, UsageError
from flatout.files import disk_errors, write_whole
from flatout.generation.decode import generate_tokens
from flatout.launch import check_one_process
from flatout.model.adapter_files import CONFIG as ADAPTER_CONFIG
from flatout.model.adapter_files import load_adapter, read_origin
from flatout.model.adapters import Adapters, attach
from flatout.model.gpt import GPT, build_model
from flatout.model.hub import DTYPES, Description, read_description
from flatout.model.hub_describe import description_of
from flatout.model.hub_find import find_model
from flatout.model.hub_weights import export_huggingface, load_described
from flatout.model.merge import LogitDifference, MergeReport, logit_difference, quiet_narrow_products
from flatout.model.merge import merge as merge_adapters
from flatout.model.seal import check_seal
from flatout.model.weights import assign_weights
from flatout.observe.measured.bench_rows import read_bench
from flatout.observe.sinks import MetricsFile, ends_at, read_metrics
from flatout.observe.track.trackers import Trackers, check_trackers, open_trackers
from flatout.optim.schedule import rate_factors
from flatout.records import (
    BenchProgress,
    BenchRow,
    NoticeRecord,
    Record,
    RunInfo,
    TuneProgress,
    TuneResult,
    TuneRow,
    record_to_json,
)
from flatout.tuning.ladder import bench as climb_ladder
from flatout.tuning.tuner import tune as search_settings

Config = LoadedConfig | RunConfig
MERGED_DTYPE = "bf16"  # what a base is mostly in, and what others load
_MOST_WORDS = 8  # of a hint, which is one line


def prepare(
    config: Config | None = None,
    *,
    progress: Progress | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    engine: EngineName = "local",
) -> Path:
    """Tokenizes the config's text into shards and returns their folder; does nothing when they are there.

    Input that cannot be used is left out and listed in problems.jsonl there.
    """
    plain = _plain(config or load_config())
    return prepare_data(plain.data, plain.clean, progress, overwrite=overwrite, workers=workers, engine=engine)[0]


def train(
    config: Config | None = None,
    *,
    data: Any = None,
    val: Any = None,
    resume: str | Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    save: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> Generator[Record]:
    """Trains and yields records; also writes them to metrics.jsonl in the run folder.

    `data` takes the place of the config's text: an iterable of token arrays, a function that returns one, or a torch
    Dataset of them; `val` is the same to evaluate on (docs/data.md). Give them again to resume.

    `resume` is None (a new run), "auto" (go on if there is something, else start) or a run or checkpoint folder.
    `stop()` is asked after every step; when true, the run saves and ends with an `interrupted` EndRecord. So is
    `save()`; when true, the run saves and goes on. With a resume path and no config, the checkpoint's own config is
    used.
    """
    check_one_process()
    resume = None if resume is None else str(resume)
    if config is None:
        config = load_config() if resume in (None, "auto") else stored_config(Path(resume))
    messages: list[str] = []
    if val is not None and data is None:
        raise UsageError("train was given val= without data=", "give data= too, or set data.val_source in the config")
    arrays = None if data is None else Arrays(data, val)
    check_trackers(_plain(config).output.trackers)
    folder = choose_folder(_plain(config).output, resume)
    with run_lock(folder) as lock:
        check_own(folder)
        point, unusable = find_resume_point(folder, resume)
        # What a refusal tells to call: the folder would mean its newest checkpoint, damaged or not.
        place = point if point is not None and unusable else folder
        resumed = None if point is None else read_checkpoint(point, verified=True)
        begun = None if resumed is None else resolve_from_mapping(resumed.config).lora
        if resumed is not None and _plain(config).chat.source is None:  # else the shape is the base's, read later
            _check_shape(_plain(config), resumed, place)
        try:
            run = setup_run(config, progress, begun=begun, arrays=arrays)
        except DataError as error:
            way = None if resumed is None else _own_settings(_plain(config), resumed, place, ("data", "clean", "chat"))
            if way is None:
                raise
            raise DataError(error.message, f"{error.hint}; {way}") from error
        if resumed is not None:
            if run.steps < resumed.step:
                raise ConfigError(
                    f"the run is at step {resumed.step:,} already, and train.steps makes {run.steps:,}",
                    f"set train.steps above {resumed.step}, or start a new run without --resume",
                )
            messages += [
                *check_same_run(run, resumed, place),
                *_about_rate(run, resumed),
                *_about_threads(run, resumed),
            ]
            if resume == "auto" and any(_perhaps_forgotten(path) for path, _, _ in _differences(run.config, resumed)):
                messages.append(f"to go on with the settings that the run had: {_go_on(resumed, folder)}")
        start = 0 if resumed is None else resumed.step
        rows = folder / "metrics.jsonl"
        judged = resumed is not None and point is not None and not lacks_verdict(resumed, point)
        done = judged and start == run.steps and ends_at(rows, start)
        if done:
            messages.clear()  # settings that are other than the run's change nothing any more
        check_disk(folder, run.trained.count, run.config.checkpoint.keep + 2)
        # From here on nothing can be refused any more. A finished run is left as it is, like one that was refused.
        if not done or unusable:
            lock.accept()
        messages[:0] = set_unusable_aside(unusable)
        if point is not None and resume != "auto" and not done:
            set_later_aside(folder, point, messages.append)
        if run.adapters is not None and run.origin is not None:
            base = run.origin.description.folder
            if is_checkpoint(base) and not mark_as_base(base, folder):
                messages.append(f"{base} cannot be written to, so nothing says there that these adapters need it")
        origin = None if point is None else str(point)
        recorded = any(row["type"] == "checkpoint" and row.get("step") == start for row in read_metrics(rows))
        records = train_loop(run, folder, resumed=resumed, resumed_from=origin, stop=stop, save=save, recorded=recorded)
        if done:  # that is told, and the run's files stay as they are
            yield from (NoticeRecord(step=start, message=message) for message in messages)
            yield from records
            return
        with disk_errors(f"{folder / 'config.yaml'}"):
            write_whole(folder / "config.yaml", show(run.config).encode("utf-8"))
        again = () if resumed is None or point is None else recorded_again(resumed, point)
        with MetricsFile(rows, keep_to_step=start, again=again) as metrics:
            for message in messages:
                notice = NoticeRecord(step=start, message=message)
                metrics.write(notice)
                yield notice
            vocab = run.model.vocab
            try:
                yield from _tracked(records, run, metrics)
            except DivergedError as error:
                device = run.speed.device.torch_device
                del run, records
                traceback.clear_frames(error.__traceback__)  # they hold the run, which may have to be built again
                free_memory(device)
                raise with_way_back(error, config, folder, vocab, arrays) from error


def _tracked(records: Iterable[Record], run: Run, metrics: MetricsFile) -> Generator[Record]:
    """Passes records on, after they were written to metrics.jsonl and to the trackers."""
    trackers: Trackers | None = None
    step = 0
    try:
        for record in records:
            metrics.write(record)
            if isinstance(record, RunInfo):
                trackers = open_trackers(run.config.output.trackers, Path(record.folder), record)
                step = record.start_step
            else:
                step = record.step
            yield record
            for message in () if trackers is None else trackers.write(record):
                notice = NoticeRecord(step=step, message=message)
                metrics.write(notice)
                yield notice
    finally:
        for message in () if trackers is None else trackers.close():
            metrics.write(NoticeRecord(step=step, message=message))


def stored_config(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """The config a run was trained with, from its newest checkpoint, with changes on top."""
    checkpoint = read_checkpoint(checkpoint_to_load(path))
    return load_stored(checkpoint.config, overrides)


def check_same_run(run: Run, checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Refuses a checkpoint of another model or other data; returns a line for each other setting that changed."""
    facts = run.data.facts
    if checkpoint.fact("dataset", str) != facts.fingerprint:
        way = _own_settings(run.config, checkpoint, folder, ("data", "clean", "chat"))
        raise CheckpointError(
            f"the checkpoint was trained on data {checkpoint.fact('dataset', str)[:12]}, {facts.place} is "
            f"{facts.fingerprint[:12]}",
            f"{way or 'restore the data it was trained on'}, or start a new run",
        )
    if run.base is not None and checkpoint.state.get("base", run.base) != run.base:
        raise CheckpointError(
            f"{run.config.model.init_from} holds other weights than those that the run's adapters were trained on",
            "put the model that they were trained on back in its place, or start a new run",
        )
    _check_shape(run.config, checkpoint, folder)
    changed: list[str] = []
    if run.config.model.dropout > 0 and not run.random.tensors().keys() <= checkpoint.run.keys():
        changed.append(f"the checkpoint was not saved on {run.speed.device.kind}: dropout draws start anew there")
    for path, before, after in _differences(run.config, checkpoint):
        section, _, name = path.partition(".")
        if section == "lora" and name != "rank" and not run.config.lora.rank:
            continue  # without adapters nobody reads it
        if section == "lora" and name in ("rank", "alpha", "targets", "rank_stabilised", "dora"):
            raise CheckpointError(
                f"the checkpoint has {path} {format_value(before)}, the config says {format_value(after)}",
                f"set {path}={format_value(before)}, or go on without a config: {_go_on(checkpoint, folder)}",
            )
        changed.append(_told_change(path, before, after))
    base = checkpoint.config["model"].get("init_from")
    if run.config.chat.source is not None and base != run.config.model.init_from:
        changed.append(_told_change("model.init_from", base, run.config.model.init_from))
    return changed


def _told_change(path: str, before: Any, after: Any) -> str:
    return f"{path} was {format_value(before)}, is now {format_value(after)}"


def _check_shape(config: RunConfig, checkpoint: Checkpoint, folder: Path) -> None:
    """Refuses a checkpoint of another model, with the command that goes on with it."""
    for path, before, after in _differences(config, checkpoint):
        if path.startswith("model.") and path != "model.dropout":
            way = _own_settings(config, checkpoint, folder, ("model",))
            raise CheckpointError(
                f"the checkpoint has {path} {format_value(before)}, the config says {format_value(after)}",
                f"a trained model keeps its shape: {way}, or start a new run without --resume",
            )


def _differences(config: RunConfig, checkpoint: Checkpoint) -> Iterator[tuple[str, Any, Any]]:
    """(path, what the run had, what the config says) of every setting that is not the run's, but names of places."""
    now = config.model_dump()
    for section, values in checkpoint.config.items():
        for name, before in values.items():
            after = now.get(section, {}).get(name)
            path = f"{section}.{name}"
            if before != after and path not in ("output.folder", "output.name", "model.init_from"):
                yield path, before, after


def _perhaps_forgotten(path: str) -> bool:
    """Whether a setting that differs may be one that was not typed again: runs are made longer on purpose."""
    lengths = ("train.steps", "train.tokens", "train.epochs")
    return path.partition(".")[0] in ("data", "clean", "optim", "train", "model") and path not in lengths


def _go_on(checkpoint: Checkpoint, folder: Path) -> str:
    verb = "train" if resolve_from_mapping(checkpoint.config).chat.source is None else "finetune"
    return f"`flatout {verb} --resume {shlex.quote(str(folder))}`"


def _own_settings(config: RunConfig, checkpoint: Checkpoint, folder: Path, sections: Sequence[str]) -> str | None:
    """How to go on with a run as it was, where the config differs from it in these sections; None where it does not.

    The command without a config takes every setting from the checkpoint, so nothing has to be typed again.
    """
    words = [
        shlex.quote(f"{path}={before if isinstance(before, str) else format_value(before)}")
        for path, before, _ in _differences(config, checkpoint)
        if path.partition(".")[0] in sections and path != "model.dropout"
    ]
    if not words:
        return None
    shown = " ".join(words[:_MOST_WORDS])
    more = f" and {len(words) - _MOST_WORDS} more" if len(words) > _MOST_WORDS else ""
    return f"{_go_on(checkpoint, folder)} takes all settings from the run; with a config, add {shown}{more}"


def _about_rate(run: Run, checkpoint: Checkpoint) -> Iterator[str]:
    """A run that is made longer or shorter gets the schedule of its new length, which may be a jump from the old."""
    before = resolve_from_mapping(checkpoint.config)
    steps, done = steps_of(before, run.data.facts), int(checkpoint.run["updates"])
    if steps == run.steps or not 0 < done < min(steps + 1, run.steps):
        return
    last = before.optim.learning_rate * rate_factors(before.optim, steps)[done - 1]
    following = run.config.optim.learning_rate * rate_factors(run.config.optim, run.steps)[done]
    if abs(following - last) > 0.1 * last:
        yield (
            f"the schedule was over {steps:,} steps and is now over {run.steps:,}: the learning rate goes from "
            f"{last:.2e} in step {checkpoint.step:,} to {following:.2e} in the next"
        )


def _about_threads(run: Run, checkpoint: Checkpoint) -> Iterator[str]:
    """On a CPU, sums are split over threads: another number of threads changes the last bits."""
    before, now = checkpoint.state.get("threads"), torch.get_num_threads()
    if before is not None and before != now and run.speed.device.kind == "cpu":
        yield (
            f"the run had {before} CPU threads and now has {now}: results will differ in the last bits; set "
            f"OMP_NUM_THREADS={before} for a bit-identical resume"
        )


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A trained model ready to use, in evaluation mode on its device."""

    model: GPT
    tokenizer: Tokenizer
    device: Device
    origin: Path
    step: int | None
    config: RunConfig | None
    dataset: str | None
    description: Description | None = None  # of the Hugging Face folder it came from
    adapters: Adapters | None = None  # that it carries
    template: ChatTemplate | None = None  # that it was taught to chat by
    stops: tuple[int, ...] = ()  # tokens at which an answer ends
    base: str | None = None  # hash of the weights under its adapters
    base_name: str | None = None  # where an adapter's folder found them
    bare: bool = False  # an adapter of ours that was taught without a template
    quantize: str = "none"  # how the base under its adapters was held while they were trained, and is rounded here


def load_model(
    path: str | Path | None = None, *, device: str = "auto", best: bool = True, base: str | None = None
) -> LoadedModel:
    """A model from a run folder (its best checkpoint), a checkpoint folder, a Hugging Face folder or a PEFT adapter.

    Without a path, the newest run under runs/. `base` is the model that adapters were trained on, where their own files
    do not name it, or name a place where it is not.
    """
    origin = newest_run() if path is None else Path(path)
    found = detect_device(device)
    adapter = (origin / ADAPTER_CONFIG).is_file()
    theirs = adapter or ((origin / "config.json").is_file() and not is_checkpoint(origin))
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
        description = read_description(origin)
        tokenizer = _tokenizer_of(description)
        model = _ready(load_described(description), found)
        stops = _stops_in(origin, tokenizer, description)
        return LoadedModel(model, tokenizer, found, origin, None, None, None, description, stops=stops)
    check_seal(origin)  # of a folder that lost its config.json
    origin = checkpoint_to_load(origin, best=best)
    checkpoint = read_checkpoint(origin)
    config, state = resolve_from_mapping(checkpoint.config), checkpoint.state
    tokenizer = tokenizer_from_json(checkpoint.tokenizer)
    description = adapters = None
    if base is not None and not config.lora.rank:
        raise _no_adapters(origin)
    if config.lora.rank:
        if base is not None:
            config = config.model_copy(update={"model": config.model.model_copy(update={"init_from": base})})
        model, description = base_of(config, state.get("base"), named=base is not None)
        adapters = attach(model, adapter_plan(config.lora), seed=0)
        only_adapters(adapters).assign(checkpoint.model, str(origin))
    else:
        model = build_model(config.model, checkpoint.fact("vocab", int))
        assign_weights(model, checkpoint.model, str(origin))
        if state.get("described"):
            description = described_checkpoint(config, state, origin, tokenizer.end_of_text)
    template = None if state.get("template") is None else template_from_json(state["template"])
    stops = state.get("stops")
    if stops is None:
        named = () if description is None else description.end_of_text
        stops = _stops(tokenizer, template, named)
    return LoadedModel(
        _ready(model, found),
        tokenizer,
        found,
        origin,
        checkpoint.step,
        config,
        checkpoint.fact("dataset", str),
        description,
        adapters,
        template,
        tuple(stops),
        state.get("base"),
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
    # An adapter of ours was trained on these very weights without any code (model.ignore_auto_map); `check_base` looks.
    ignore_code = expected is not None
    found = None
    try:
        found = find_model(name)
        description = describe_base(name, None, ignore_code=ignore_code)
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
    place = folder if own else description.folder
    tokenizer = read_model_tokenizer(place) if own else open_base(name, None, ignore_code=ignore_code).tokenizer
    template = load_template("model", place, tokenizer) if own and read_templates(place) else None
    bare = own and template is None and expected is not None
    if tokenizer.vocab > description.vocab:
        raise CheckpointError(
            f"the tokenizer in {place} has {tokenizer.vocab:,} ids, {name} {description.vocab:,}",
            "name the model that the adapter was trained on with --base FOLDER",
        )
    if bare:
        stops = _stops(tokenizer, None, description.end_of_text)
    else:
        stops = _stops_in(place if template is not None else description.folder, tokenizer, description)
    return LoadedModel(
        _ready(model, device), tokenizer, device, folder, None, None, None, description, adapters, template, stops,
        expected, name, bare, quantize,
    )  # fmt: skip


def _stops(tokenizer: Tokenizer, template: ChatTemplate | None, named: Sequence[int]) -> tuple[int, ...]:
    if isinstance(tokenizer, ModelTokenizer):
        return stops_of(tokenizer, template, named)
    return () if tokenizer.end_of_text is None else (tokenizer.end_of_text,)


def _stops_in(folder: Path, tokenizer: Tokenizer, description: Description) -> tuple[int, ...]:
    """Where a model of others ends: what its files name, and what its template writes after an answer."""
    template = None
    with contextlib.suppress(DataError):  # a template that is broken is told of when somebody chats
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


def _ready(model: GPT, device: Device) -> GPT:
    if model.eigenstates:
        model.use(dataclasses.replace(model.execution, scan=scan_for(device)))
    with out_of_memory():
        return model.to(device.torch_device).eval()


def generate(
    model: LoadedModel | str | Path | None = None,
    prompt: str = "\n",
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    cached: bool = True,
    bare: bool = True,
) -> Generator[str]:
    """Yields the continuation of `prompt` in pieces, as soon as each is whole text.

    A `bare` one was written by no template: BOS comes before it where the model expects that.
    """
    loaded = model if isinstance(model, LoadedModel) else load_model(model)
    tokenizer = loaded.tokenizer
    if bare and isinstance(tokenizer, ModelTokenizer):
        ids = tokenizer.encode_prompt(prompt).tolist()
    else:
        ids = tokenizer.encode(prompt).tolist()
    if not ids:
        if tokenizer.end_of_text is None:
            raise DataError("the prompt is empty", "give at least one character to continue")
        ids = [tokenizer.end_of_text]
    tokens_out = generate_tokens(
        loaded.model,
        ids,
        count=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stops=loaded.stops,
        vocab=tokenizer.vocab,
        cached=cached,
    )
    yield from _in_pieces(tokenizer, tokens_out, loaded.stops)


def _in_pieces(tokenizer: Tokenizer, tokens: Iterable[int], stops: Collection[int]) -> Iterator[str]:
    """Text as it becomes whole. A character of several tokens waits for its last one.

    Only the tokens since the piece before the last are decoded again, so long outputs cost no more per token than
    short ones; the piece before is kept for tokenizers that write a space differently at the start of a text.
    """
    ids: list[int] = []
    piece, fresh = 0, 0  # where the last piece began, and where it ended
    for token in tokens:
        if token in stops:
            break
        ids.append(token)
        before, now = tokenizer.decode(ids[piece:fresh]), tokenizer.decode(ids[piece:])
        if len(now) > len(before) and not now.endswith("\ufffd"):
            yield now[len(before) :]
            piece, fresh = fresh, len(ids)
    rest = tokenizer.decode(ids[piece:])[len(tokenizer.decode(ids[piece:fresh])) :]
    if rest:
        yield rest


@dataclasses.dataclass(frozen=True)
class Evaluation:
    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    split: str
    origin: str


def evaluate(
    model: LoadedModel | str | Path | None = None,
    *,
    data: str | Path | None = None,
    split: str = "val",
    tokens: int | None = None,
    batch_size: int = 16,
) -> Evaluation:
    """Loss, perplexity and bits per byte of a trained model on its own validation split, or on other shards.

    Of a fine-tuned run `data` may also be the folder of its samples, where its source or its base is not to be found.
    """
    loaded = model if isinstance(model, LoadedModel) else load_model(model)
    if data is None and loaded.config is None:
        raise UsageError(
            f"{loaded.origin} does not say what it was trained on",
            "name prepared shards with --data, or measure the run that it was written from: `flatout eval RUN`",
        )
    tuned = loaded.config is not None and loaded.config.chat.source is not None
    if tuned and (data is None or holds_samples(Path(data))):
        samples = _samples_again(loaded) if data is None else _samples_in(Path(data), loaded)
        return _evaluate_samples(loaded, samples, split, tokens, batch_size)
    if data is None and _known(loaded.config).data.streaming:
        shards = _streamed_validation(loaded, split)
    else:
        shards = _shards(loaded, data, split)
    device = loaded.device.torch_device
    how = {"context": loaded.model.config.context, "batch_size": batch_size, "device": device}
    apart = loaded.config is not None and loaded.config.documents_apart
    batches = evaluation_batches(shards, most_tokens=tokens, apart=apart, **how)
    with out_of_memory():
        loss, count = evaluate_model(loaded.model, batches, lambda: arithmetic("fp32", False, device))
    return Evaluation(
        loss=loss,
        perplexity=perplexity(loss),
        bits_per_byte=bits_per_byte(loss, tokens_per_byte(shards, loaded.tokenizer, apart=apart)),
        tokens=count,
        split=split,
        origin=str(loaded.origin),
    )


def _samples_again(loaded: LoadedModel) -> SampleSet:
    """The samples of a fine-tuned run from its source, made now unless they are there."""
    config = _known(loaded.config)
    chat = config.chat
    try:
        samples = open_sample_data(config, None)[1].sample_set
    except (DataError, CheckpointError) as error:
        named = [name for name in (chat.source, chat.val_source) if name is not None]
        if isinstance(error, DataError) and all(Path(name).exists() for name in named):
            raise
        raise DataError(
            f"the samples of {loaded.origin} cannot be made here: {error.message}",
            "call this from the folder that the run was trained in, or name its samples with --data FOLDER: "
            f"they are in {samples_folder(config)} there",
        ) from error
    if samples.fingerprint != loaded.dataset:
        raise DataError(
            f"{chat.source} no longer gives the samples that {loaded.origin} was trained on",
            "put the file and the model's folder back as they were",
        )
    return samples


def _samples_in(folder: Path, loaded: LoadedModel) -> SampleSet:
    """The samples in a folder, which must be those of the run."""
    samples = open_samples(folder)
    if samples.fingerprint != loaded.dataset:
        raise DataError(
            f"{folder} does not hold the samples that {loaded.origin} was trained on",
            f"name the folder that the run made, {samples_folder(_known(loaded.config))} in the place where it began",
        )
    return samples


def _evaluate_samples(
    loaded: LoadedModel, samples: SampleSet, split: str, tokens: int | None, batch_size: int
) -> Evaluation:
    """Of a fine-tuned run: the mean over the learned tokens of its samples."""
    config, device = _known(loaded.config), loaded.device.torch_device
    part = samples.val if split == "val" else samples.train
    assert part is not None, "a run holds some out"
    batches = sample_batches(
        first_samples(part, tokens),
        row_tokens=config.model.context,
        batch_samples=batch_size,
        packing=config.chat.packing,
        device=device,
    )
    with out_of_memory():
        loss, count = evaluate_model(loaded.model, batches, lambda: arithmetic("fp32", False, device))
    return Evaluation(
        loss=loss,
        perplexity=perplexity(loss),
        bits_per_byte=None,
        tokens=count,
        split=split,
        origin=str(loaded.origin),
    )


def _shards(loaded: LoadedModel, data: str | Path | None, split: str) -> Tokens:
    folder = Path(data) if data is not None else data_folder(_known(loaded.config).data)
    if data is None and not folder.is_dir():
        raise DataError(
            f"the run's data folder {folder} is not here",
            "call this from the folder the run was trained in, or name the shards with --data",
        )
    dataset = open_dataset(folder, wanted=loaded.tokenizer, verify="full")
    if data is None and dataset.manifest.fingerprint != loaded.dataset:
        raise DataError(
            f"{folder} is no longer what {loaded.origin} was trained on",
            "prepare that text again, or name these shards with --data to measure on them all the same",
        )
    return dataset.val if split == "val" else dataset.train


def _streamed_validation(loaded: LoadedModel, split: str) -> Tokens:
    """The validation text of a run that streamed, read from its source again."""
    config = _known(loaded.config)
    if split != "val":
        raise UsageError(
            f"{loaded.origin} was trained on a stream, of which only validation text is held",
            "measure on --split val, or name prepared shards with --data",
        )
    dataset = open_stream(config.data, config.clean, val_tokens=config.eval.tokens)
    if dataset.manifest.fingerprint != loaded.dataset:
        raise DataError(
            f"{dataset.train.folder} is no longer what {loaded.origin} was trained on",
            "restore the source, or name prepared shards with --data",
        )
    return dataset.val


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
    adapted = loaded.adapters is not None and not loaded.adapters.detached
    if adapter and not adapted:
        raise UsageError(f"{loaded.origin} has no adapters to export", "leave --adapter out")
    if adapted and not adapter:
        folder = merge(loaded, folder, dtype=dtype or MERGED_DTYPE, notice=notice).folder
        if dtype is None:
            notice(f"adapters are merged into the weights, which are in {MERGED_DTYPE}; --dtype fp32 rounds nothing")
        return folder
    target = _new_folder(folder)
    files, remarks = _files_beside(loaded)
    with disk_errors(str(target), safe=""):
        if adapted:
            _export_adapter(loaded, target, files, notice)
            return target
        export_huggingface(
            loaded.model,
            target,
            dtype=getattr(torch, DTYPES[dtype or "fp32"]),
            end_of_text=loaded.tokenizer.end_of_text,
            source=_described(loaded),
            files=files,
        )
    for remark in remarks:
        notice(remark)
    return target


def _export_adapter(loaded: LoadedModel, target: Path, files: dict[str, bytes], notice: Callable[[str], None]) -> None:
    assert loaded.adapters is not None, "checked by the caller"
    assert loaded.description is not None, "adapters have a base"
    name = loaded.base_name if loaded.config is None else loaded.config.model.init_from
    name = name or str(loaded.description.folder)
    facts = {"fingerprint": loaded.base, "quantize": loaded.quantize, "step": loaded.step}
    write_adapter(loaded.adapters, target, base=name, files=files, **facts)
    if (remark := who_loads(name, loaded.description)) is not None:
        notice(remark)
    if loaded.quantize != "none":
        notice(IN_4_BITS)


def _files_beside(loaded: LoadedModel) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Tokenizer, template and stops of a model, as files for others; what there is to say of them."""
    description = loaded.description
    return files_beside(
        loaded.tokenizer,
        context=loaded.model.config.context if description is None else description.config.context,
        description=description,
        chat=(loaded.config is not None and loaded.config.chat.source is not None)
        or loaded.template is not None
        or loaded.bare,
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
    files, remarks = _files_beside(loaded)
    ids = loaded.tokenizer.encode(prompt or chat_prompt(loaded, MERGE_PROMPT))[: loaded.model.config.context]
    tokens = torch.tensor([ids.tolist()], device=loaded.device.torch_device)
    kind = getattr(torch, DTYPES[dtype])
    with torch.no_grad(), quiet_narrow_products():
        before = loaded.model.logits(tokens).double().cpu()
        report = merge_adapters(loaded.adapters, kind)
        after = loaded.model.logits(tokens).double().cpu()
    with disk_errors(str(target), safe=""):
        export_huggingface(
            loaded.model,
            target,
            dtype=kind,
            end_of_text=loaded.tokenizer.end_of_text,
            source=_described(loaded),
            files=files,
        )
    for remark in remarks:
        notice(remark)
    return Merged(target, report, logit_difference(before, after))


def _instead_of_merging(loaded: LoadedModel) -> str:
    try:
        description_of(loaded.model.config, loaded.model.vocab, dtype="float32", source=_described(loaded))
    except CheckpointError:  # which export would say, too
        return "there is nothing to merge: `flatout generate` and `flatout eval` take it as it is"
    return "write it as it is with `flatout export`"


MERGE_PROMPT = "Name three things that fly, and say in one sentence how they do it."


def chat_prompt(model: LoadedModel, message: str, history: Sequence[Mapping[str, Any]] = ()) -> str:
    """The text after which the model answers `message`, by the template it was taught with.

    Without one it is the message, after BOS where the model expects it.
    """
    template = _template_of(model)
    if template is None:
        return (model.tokenizer.begin or "") + message if isinstance(model.tokenizer, ModelTokenizer) else message
    try:
        return template.render([*history, {"role": "user", "content": message}], add_generation_prompt=True)
    except TemplateRefusal as error:
        raise DataError(
            f"the chat template refuses the conversation: {error}",
            "leave --system out if it has no place for it, or continue a bare text with `flatout generate`",
        ) from error


def is_untaught(model: LoadedModel) -> bool:
    """Whether a model has no template to chat by and was not taught to do without one either."""
    taught = model.bare or (model.config is not None and model.config.chat.source is not None)
    return not taught and _template_of(model) is None


def _template_of(model: LoadedModel) -> ChatTemplate | None:
    folder = None if model.description is None else model.description.folder
    # A run that was taught without a template must not be asked with that of its base, nor must its adapter.
    others = model.config is None and not model.bare
    if model.template is None and folder is not None and others and isinstance(model.tokenizer, ModelTokenizer):
        return load_template("model", folder, model.tokenizer) if read_templates(folder) else None
    return model.template


def bench(
    config: Config | None = None,
    *,
    steps: int = 12,
    parity_steps: int = 20,
    batch_tokens: int | None = None,
    rungs: Sequence[str] | None = None,
    only: str | None = None,
    folder: str | Path | None = None,
    go_on: bool = False,
    notice: Callable[[str], None] = lambda _: None,
    progress: Callable[[BenchProgress], None] = lambda _: None,
) -> Generator[BenchRow]:
    """Measures every speed switch that this machine has, from the naive baseline up, and yields a row for each.

    A rung first has to show the reference's losses over `parity_steps` steps; then at most `steps` steps are timed.
    `rungs` are names, `only` is ladder, without or extra. With a `folder`, rows are also written to bench.jsonl there,
    from the first measured one on; with `go_on`, rungs that are there already are not measured again.
    """
    config = _with_sources(config or load_config())
    path = None if folder is None else Path(folder) / "bench.jsonl"
    if path is not None and path.exists() and not go_on:
        raise UsageError(
            f"{path} holds the rows of an earlier ladder", "name a new folder, or measure what is missing with --go-on"
        )
    ladder = climb_ladder(
        config,
        steps=steps,
        parity_steps=parity_steps,
        batch_tokens=batch_tokens,
        names=rungs,
        only=only,
        earlier=[] if path is None or not path.exists() else read_bench(path, notice),
        notice=notice,
        progress=progress,
    )
    if path is None:
        yield from ladder
        return
    waiting: list[BenchRow] = []
    for row in ladder:
        waiting.append(row)
        if row.status != "absent" or path.exists():  # rows without a measurement alone would only block the folder
            with disk_errors(str(path), safe=""):
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a", encoding="utf-8") as file:
                    file.writelines(record_to_json(one) + "\n" for one in waiting)
            waiting = []
        yield row


def tune(
    config: Config | None = None,
    *,
    memory: float | None = None,
    exhaustive: bool = False,
    compile: bool = False,
    seconds: float | None = None,
    progress: Callable[[TuneProgress], None] = lambda _: None,
) -> Generator[TuneRow | TuneResult]:
    """Finds the fastest micro-batch, checkpointing and loss for a config's global batch on this device, in pretraining
    or, where it has `chat.source`, in fine-tuning.

    Yields a row for every setting tried, and a `TuneResult` last; its `fragment` is a config file. `memory` is a cap in
    GiB that emulates a smaller card, `exhaustive` tries everything, `compile` torch.compile's modes too (minutes).
    """
    yield from search_settings(
        _with_sources(config or load_config()),
        memory=memory,
        thorough=exhaustive,
        compiled=compile,
        seconds=seconds,
        progress=progress,
    )


def _with_sources(config: Config) -> LoadedConfig:
    """A config made in Python counts as written by the user in every field that was set."""
    if isinstance(config, LoadedConfig):
        return config
    set_or_not = {True: Source("file", "config"), False: Source("default", "default")}
    sources = {
        f"{section}.{name}": set_or_not[name in getattr(config, section).model_fields_set]
        for section, values in config.model_dump().items()
        for name in values
    }
    return LoadedConfig(config, sources)


def _plain(config: Config) -> RunConfig:
    return config.config if isinstance(config, LoadedConfig) else config


def _known(config: RunConfig | None) -> RunConfig:
    assert config is not None, "checked by the caller"
    return config


__all__ = [
    "Evaluation",
    "LoadedModel",
    "bench",
    "evaluate",
    "export",
    "generate",
    "load_model",
    "prepare",
    "train",
    "tune",
]
