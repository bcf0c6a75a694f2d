"""The verbs about text and models: prepare, eval, generate, chat, serve and export.

Contract: as in `flatout.cli`. `prepare` needs no torch; input that could not be used is listed after the result,
and the exit code is 3.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flatout
from flatout.errors import DataError, UsageError, UserError, many, quoted
from flatout.files import disk_errors, write_whole
from flatout.front.configs import load_pretraining, print_notices
from flatout.front.output import Line, lines_target, picture_target
from flatout.front.words import one_line, tell

if TYPE_CHECKING:
    from flatout.config.schema import RunConfig
    from flatout.data.shards import Verify
    from flatout.front.models import LoadedModel


# --- data -------------------------------------------------------------------------------------------------------------


def prepare(parsed: argparse.Namespace) -> int:
    loaded = load_pretraining(parsed)
    from flatout.data.prepare import as_prepared, check_text, prepare_data
    from flatout.observe.terminal import PrepareBar

    check_text(loaded, "prepare")
    if not parsed.overwrite:
        before, loaded = len(loaded.notices), as_prepared(loaded)
        print_notices(loaded.notices[before:])
    config = loaded.config
    started = time.monotonic()
    how = {"overwrite": parsed.overwrite, "workers": parsed.workers}
    with PrepareBar() as bar:
        try:
            folder, fresh = prepare_data(config.data, config.clean, bar, **how)
        except KeyboardInterrupt:
            bar.close()
            print("interrupted; the same command continues where it stopped", file=sys.stderr)
            return 130
    seconds = time.monotonic() - started
    facts = _facts(folder, config, "sizes" if fresh else "full", parsed.context)
    if parsed.json:
        print(json.dumps({**facts, "seconds": round(seconds, 3), "made": fresh}))
    else:
        for line in _lines(facts, seconds if fresh else None):
            print(line)
    return _tell_problems(folder, config, facts["report"])


def _facts(folder: Path, config: "RunConfig", verify: "Verify", asked: int | None) -> dict[str, Any]:
    from flatout.data.inspect import read_report, tokens_in_long_documents
    from flatout.data.part import LIMITS
    from flatout.data.plan import how_to_read
    from flatout.data.sampler import remainder, window_count
    from flatout.data.shards import open_dataset

    dataset, report = open_dataset(folder, verify=verify), read_report(folder)
    context = asked or config.model.context
    stride = config.data.stride or context
    windows = window_count(dataset.train.tokens, context, stride)
    return {
        "folder": str(folder),
        "train_tokens": dataset.train.tokens,
        "val_tokens": dataset.val.tokens,
        "vocab": dataset.tokenizer.vocab,
        "tokenizer": dataset.tokenizer.kind,
        "fingerprint": dataset.manifest.fingerprint,
        "documents": {name: split.documents for name, split in dataset.manifest.splits.items()},
        "text_bytes": sum(split.text_bytes for split in dataset.manifest.splits.values()),
        "context": context,
        "packing": config.data.packing,
        "windows": windows,
        "remainder": remainder(dataset.train.tokens, context, stride) if windows else None,
        "long_documents": None if asked is None else tokens_in_long_documents(dataset.train, context),
        "report": report,
        "how_to_read": "" if report is None else how_to_read(config.data.source, report["passed_over"]),
        "limits": {name: value for name in LIMITS if (value := dataset.manifest.settings.get(name)) is not None},
    }


def _lines(facts: dict[str, Any], seconds: float | None) -> Iterator[str]:
    tokens = facts["train_tokens"] + facts["val_tokens"]
    yield (
        f"{facts['folder']}: {facts['train_tokens']:,} training and {facts['val_tokens']:,} validation tokens "
        f"({facts['tokenizer']}, {facts['vocab']} ids, {facts['text_bytes'] / tokens:.2f} bytes a token)"
    )
    report = facts["report"]
    if report is not None:
        kept = sum(report["kept"].values())
        rate = f", {report['input_bytes'] / 1e6:,.1f} MB in {seconds:.1f} s" if seconds is not None else ""
        dropped = dict(report["dropped"])
        read = report["records"] - dropped.pop("limit", 0)  # counted as dropped in older datasets
        yield f"kept {kept:,} of {many(read, 'record')} from {many(report['files'], 'file')}{rate}"
        if facts["limits"]:
            limits = " and ".join(f"data.{name}={value}" for name, value in facts["limits"].items())
            yield f"of each source its beginning was taken, up to {limits}; the rest is left out and not counted"
        if dropped:
            reasons = sorted(dropped.items(), key=lambda pair: (-pair[1], pair[0]))
            yield "dropped " + ", ".join(f"{count:,} {reason}" for reason, count in reasons)
        if report["replaced_characters"]:
            yield f"replaced {many(report['replaced_characters'], 'invalid byte sequence')} by U+FFFD"
        if report["passed_over"]:
            others = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(report["passed_over"].items()))
            yield f"passed over: {others}"
            if facts["how_to_read"]:
                yield facts["how_to_read"]
    if facts["packing"] == "best_fit":
        yield f"windows of {facts['context']:,} tokens are fitted to whole documents when training starts"
    elif facts["remainder"] is not None:
        yield (
            f"{many(facts['windows'], 'window')} of {facts['context']:,} tokens an epoch; "
            f"{many(facts['remainder'], 'token')} at the end {'fills' if facts['remainder'] == 1 else 'fill'} no window"
        )
    if (long := facts["long_documents"]) is not None:
        count, share = long["documents"], long["tokens"] / max(facts["train_tokens"], 1)
        documents = f"{count:,} of {facts['documents']['train']:,} training documents"
        yield (
            f"{documents} are as long as a window, with {share:.1%} of the tokens"
            + ("" if share == 1.0 else "; in the others, what is further away than their length is another document")
        )
    if facts["packing"] != "best_fit" and facts["remainder"] is None:
        yield f"too short for one window of {facts['context']:,} tokens: set a smaller model.context to train on it"


def _tell_problems(folder: Path, config: "RunConfig", report: dict[str, Any] | None) -> int:
    if report is None or not report["problem_count"]:
        return 0
    from flatout.data.inspect import lines_of
    from flatout.data.prepare import check_complete, read_causes

    for line in lines_of(read_causes(folder)):
        print(one_line(f"problem: {line}"), file=sys.stderr)
    check_complete(config.data, config.clean)
    return 0


# --- data -------------------------------------------------------------------------------------------------------------


def inspect(parsed: argparse.Namespace) -> int:
    _check_shards(parsed)
    from flatout.data.inspect import summarize
    from flatout.data.shards import verify_dataset
    from flatout.observe.dataset import data_sheet
    from flatout.observe.sheets import print_sheet
    from flatout.records import record_to_json

    folder = Path(parsed.folder)
    verify_dataset(folder)  # counts of damaged shards would mean nothing
    summary = summarize(folder, context=parsed.context)
    if parsed.json:
        print(record_to_json(summary))
    else:
        print_sheet(data_sheet(summary))
    return 0


def verify(parsed: argparse.Namespace) -> int:
    _check_shards(parsed)
    from flatout.data.shards import verify_dataset

    manifest = verify_dataset(parsed.folder)
    size = sum(file.bytes for file in manifest.files)
    if parsed.json:
        print(json.dumps({"folder": parsed.folder, "fingerprint": manifest.fingerprint, "bytes": size, "good": True}))
    else:
        files = many(len(manifest.files), "file")
        print(f"{parsed.folder}: {files}, {size / 1e6:,.1f} MB, every byte, id and offset is right")
    return 0


def _check_shards(parsed: argparse.Namespace) -> None:
    if not Path(parsed.folder).is_dir():
        raise UsageError(f"{quoted(parsed.folder)} is not a folder", "name a folder that `flatout prepare` made")


# --- models -----------------------------------------------------------------------------------------------------------


_OF_TASKS = ("shots", "limit", "task_folder", "log", "plot")


def evaluate(parsed: argparse.Namespace) -> int:
    if parsed.tasks is not None:
        return _score(parsed)
    given = [f"--{name.replace('_', '-')}" for name in _OF_TASKS if getattr(parsed, name)]
    if given:
        raise UsageError(f"{given[0]} is for tasks", f"name some with --tasks, or leave {given[0]} out")
    what = {"data": parsed.data, "split": parsed.split, "tokens": parsed.tokens, "stride": parsed.stride}
    for one in _each(parsed).values():
        result = flatout.evaluate(_model(one, weights="fp32"), **what)
        narrow = None if parsed.weights in (None, "fp32") else flatout.evaluate(_model(one), **what)
        if parsed.json:
            print(json.dumps(vars(result) | ({} if narrow is None else {f"{parsed.weights}_loss": narrow.loss})))
            continue
        bits = "" if result.bits_per_byte is None else f"  bits/byte {result.bits_per_byte:.4f}"
        windows = "" if result.stride is None else f", windows with a stride of {result.stride:,}"
        print(f"{result.origin} on {result.tokens:,} {result.split} tokens{windows}:")
        print(f"loss {result.loss:.4f}  perplexity {result.perplexity:.3f}{bits}")
        if narrow is not None:
            print(f"{parsed.weights} weights: loss {narrow.loss:.4f} ({narrow.loss - result.loss:+.4f})")
    return 0


def _score(parsed: argparse.Namespace) -> int:
    """Scores on tasks: a table, JSON lines, a picture, a log of every question, and records beside those of runs."""
    if parsed.data or parsed.stride or parsed.tokens:
        raise UsageError("--data, --stride and --tokens are for text, and --tasks for tasks", "leave one of them out")
    log = None if parsed.log is None else lines_target(Path(parsed.log), "--log", overwrite=parsed.overwrite)
    plot = None if parsed.plot is None else picture_target(Path(parsed.plot), "--plot", overwrite=parsed.overwrite)
    names = [name.strip() for name in parsed.tasks.split(",") if name.strip()]
    how = {"folder": parsed.task_folder, "shots": parsed.shots or 0, "limit": parsed.limit, "seed": parsed.seed}
    from flatout.checkpoints.run_folder import run_of
    from flatout.observe.sinks import add_task_records

    found: list[flatout.ModelScores] = []
    with contextlib.closing(Line()) as line:
        for name, one in _each(parsed).items():
            how["progress"] = lambda count, name=name: line.show(f"{name}: {count:,} answers")
            result = flatout.score(_model(one, weights=parsed.weights or "auto"), names, **how)
            found.append(dataclasses.replace(result, name=name or result.name))
            try:
                add_task_records(run_of(Path(result.origin)), [score.record(result.step) for score in result.scores])
            except UserError as error:
                line.notice(one_line(error.message))
    if parsed.json:
        print("".join(f"{json.dumps(result.plain(found[0]))}\n" for result in found), end="")
    else:
        from flatout.observe.sheets import print_sheet
        from flatout.tasks.scores import sheet_of

        print_sheet(sheet_of(found))
    if log is not None:
        rows = [{"model": result.name, **row} for result in found for row in result.samples]
        lines = (json.dumps(row, ensure_ascii=False, default=str) for row in rows)
        with disk_errors(str(log), safe=""):
            write_whole(log, "".join(f"{one}\n" for one in lines).encode("utf-8", "replace"))
    if plot is not None:
        from flatout.observe.sheets import draw_picture
        from flatout.tasks.scores import picture_of

        draw_picture(picture_of(found), plot, overwrite=parsed.overwrite)
    return 0


def _each(parsed: argparse.Namespace, text_option: str = "") -> dict[str, argparse.Namespace]:
    """The words for each of several models, by its name. Mistakes are refused before anything heavy is imported."""
    each = [argparse.Namespace(**vars(parsed) | {"run": run}) for run in parsed.runs or [None]]
    for one in each:
        _check_model(one, text_option)
    if len(each) == 1:
        return {"": each[0]}
    from flatout.observe.sinks import distinct_names

    return dict(zip(distinct_names([Path(one.run) for one in each]), each, strict=True))


def _model(parsed: argparse.Namespace, text_option: str = "", weights: str | None = None) -> "LoadedModel":
    """The model that words name."""
    how = {"device": _check_model(parsed, text_option), "best": not parsed.last, "base": parsed.base}
    gc.disable()  # what is imported stays, and looking through it takes a tenth of the time to a first token
    try:
        return flatout.load_model(parsed.run, **how, weights=weights or getattr(parsed, "weights", "fp32"))
    finally:
        gc.freeze()
        gc.enable()


def _check_model(parsed: argparse.Namespace, text_option: str = "") -> str:
    """Refuses what cannot be a model or a device before anything heavy is imported; returns the device."""
    if parsed.run is not None and not os.path.isdir(parsed.run):
        from flatout.gguf_file import is_gguf

        if not is_gguf(Path(parsed.run)):
            from flatout.config.suggest import run_hint

            hint = run_hint(parsed.run, "name a run folder, such as runs/NAME")
            more = f"; text goes after {text_option}" if text_option else ""
            raise UsageError(f"{quoted(parsed.run)} is not a folder, nor a GGUF file", hint + more)
    if getattr(parsed, "folder", None) == "":
        raise UsageError("the name of the folder to write is empty", "name a new folder to write into")
    device = getattr(parsed, "device", "cpu")
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,3})?", device):
        raise UsageError(f"--device {quoted(device)} is unknown", "use auto, cpu, mps, cuda or cuda:N")
    return device


# --- text -------------------------------------------------------------------------------------------------------------


def generate(parsed: argparse.Namespace) -> int:
    prompts = None if parsed.prompts is None else _prompts_in(Path(parsed.prompts))
    models = _each(parsed, "--prompt")
    if len(models) > 1:
        return _side_by_side(parsed, models, prompts)
    (only,) = models.values()
    model = _model(only, "--prompt")
    from flatout.shown import printable

    if prompts is not None:
        from rich.console import Console
        from rich.progress import track

        texts = flatout.generate(model, prompts, top_k=parsed.top_k, **_sampling(parsed))
        shown = Console(stderr=True)
        each = zip(prompts, texts, strict=True)
        for prompt, text in track(each, "texts", len(prompts), console=shown, disable=not shown.is_terminal):
            print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False), flush=True)
        return 0

    def answer(prompt: str) -> None:
        shown = prompt if prompt.strip() and not parsed.interactive else ""
        # the first piece shows that the prompt can be read
        for piece in flatout.generate(model, prompt, top_k=parsed.top_k, **_sampling(parsed)):
            print(shown + printable(piece), end="", flush=True)
            shown = ""
        print()

    if not parsed.interactive:
        answer(parsed.prompt)
        return 0
    return _converse("type a prompt, end with Ctrl-D", lambda prompt: answer(prompt or "\n"))


def _side_by_side(parsed: argparse.Namespace, each: dict[str, argparse.Namespace], prompts: list[str] | None) -> int:
    """Texts of several models by the same prompts and seeds, as JSON lines where prompts come from a file."""
    if parsed.interactive:
        raise UsageError("--interactive is for one model", "name one, or a file with --prompts")
    from flatout.shown import printable

    texts: dict[str, list[str]] = {}
    for name, one in each.items():
        asked = [parsed.prompt] if prompts is None else prompts
        texts[name] = list(flatout.generate(_model(one), asked, top_k=parsed.top_k, **_sampling(parsed)))
        if prompts is None:
            print(f"--- {name} ---\n{parsed.prompt.lstrip(chr(10))}{printable(texts[name][0])}", flush=True)
    for number, prompt in enumerate(prompts or ()):
        row = {"prompt": prompt, "texts": {name: own[number] for name, own in texts.items()}}
        print(json.dumps(row, ensure_ascii=False))
    return 0


def _prompts_in(path: Path) -> list[str]:
    """The lines of a text file that are not empty, or the prompts of one whose name ends in .jsonl."""
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "name a text file with --prompts") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix == ".jsonl":
            try:
                line = json.loads(line)["prompt"]
            except (ValueError, TypeError, KeyError):
                line = None
            if not isinstance(line, str):
                raise DataError(f"{path}, line {number}, has no prompt", 'write {"prompt": "a text"} in each line')
        found.append(line)
    if not found:
        raise DataError(f"{path} holds no prompts", "write one in each line")
    return found


def _sampling(parsed: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(parsed, name) for name in ("tokens", "temperature", "top_p", "seed")}


def _converse(invitation: str, answer: Callable[[str], None]) -> int:
    """Asks for lines and answers each, until end of input; a line that cannot be answered must not end it."""
    print(invitation, file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return 0
        try:
            answer(line)
        except UserError as error:
            tell(error)


def chat(parsed: argparse.Namespace) -> int:
    """Talks in the terminal, by the template that the model was taught with."""
    model = _model(parsed, "--message")
    from flatout.shown import printable

    if flatout.is_untaught(model):
        said = f"{model.origin} was never taught a chat template: it continues each message as bare text"
        print(f"note: {printable(said)}, without what was said before", file=sys.stderr)
    history = [] if parsed.system is None else [{"role": "system", "content": parsed.system}]

    def answer(message: str) -> None:
        if not message.strip():
            return
        said = ""
        asked = {"role": "user", "content": message}
        for piece in flatout.chat(model, [*history, asked], **_sampling(parsed)):
            print(printable(piece), end="", flush=True)
            said += piece
        print()
        history.extend([asked, {"role": "assistant", "content": said}])

    if parsed.message is not None:
        answer(parsed.message)
        return 0
    return _converse("type a message, end with Ctrl-D", answer)


def serve(parsed: argparse.Namespace) -> int:
    names = ("host", "port", "rows", "batch_invariant", "queue", "seconds", "drain")
    limits = {name: getattr(parsed, name) for name in names}
    which = {"device": _check_model(parsed), "best": not parsed.last, "base": parsed.base, "weights": parsed.weights}
    ready = "serving at {} (Ctrl-C ends it)"
    flatout.serve(parsed.run, **which, **limits, ready=lambda url: print(ready.format(url), flush=True))
    print("stopped", file=sys.stderr)
    return 0


# --- folders for others -----------------------------------------------------------------------------------------------


def export(parsed: argparse.Namespace) -> int:
    if (parsed.folder is None) == (parsed.check is None):
        what = "there is no new folder to write" if parsed.folder is None else "--check writes nothing"
        raise UsageError(what, "write `flatout export RUN FOLDER`, or `flatout export --check FOLDER RUN`")
    from flatout.front.exporting import check_export, push

    notes: list[str] = []
    target = Path(parsed.folder or parsed.check)
    if parsed.check is None:
        how = {"dtype": parsed.dtype, "adapter": parsed.adapter, "format": parsed.format, "notice": notes.append}
        flatout.export(_model(parsed), target, **how)
    else:
        notes.append(str(check_export(target, _model(parsed))))
    if parsed.push is not None:
        notes.append(f"sent to {push(target, parsed.push)}")
    if parsed.json:
        print(json.dumps({"folder": str(target), "notes": notes}))
    else:
        print(f"wrote {target}" if parsed.check is None else f"{target}: every byte is as it was written")
        print("".join(f"note: {note}\n" for note in notes), end="")
    return 0
