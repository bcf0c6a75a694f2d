"""The verbs. Each parses its words, calls one function of `flatout.api`, and prints what comes back.

Contract: nothing heavy is imported before the words are understood, so help and every mistake answer at once; a
mistake is one `error:` line and one `hint:` line on stderr and an exit code (see `flatout.errors`).
"""

import argparse
import contextlib
import difflib
import errno
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flatout
from flatout import records
from flatout.errors import UsageError, UserError
from flatout.launch import SeveralProcessesError, check_one_process, is_first
from flatout.streams import go_nowhere, output_that_may_go_away, usable_streams
from flatout.tuning.signals import handled
from flatout.verbs import bench, chat, data, doctor, estimate, finders, plot, profile, report, tune, watch
from flatout.words import (
    Parser,
    add_base,
    add_config,
    add_model,
    check_model,
    choose_action,
    converse,
    load,
    number_between,
    one_line,
    quoted,
    sentence,
)

if TYPE_CHECKING:
    from flatout.config.load import LoadedConfig

HELP = """\
Flatout trains GPTs as fast as your machine allows.

usage: flatout VERB [CONFIG] [SECTION.FIELD=VALUE ...] [options]

verbs:
  train      train a model; without a CONFIG, a small Shakespeare model
  finetune   LoRA or full fine-tuning of a chat model on conversations
  prepare    turn text into token shards (train does this when needed)
  data       inspect or verify prepared shards
  tokenizer  train a byte-pair encoding, or compare tokenizers
  eval       loss, perplexity and bits per byte of a trained model
  generate   continue a prompt with a trained model
  doctor     check machine, data and config, and say what to do
  estimate   time, memory, energy and cost of a run, from a few real steps
  tune       find the fastest micro-batch, checkpointing and loss for this machine;
             `tune lr` finds a learning rate, `tune search` searches any settings
  bench      what each speed switch is worth on this machine, proven first
  profile    what holds a step on this machine: arithmetic, memory, launches or data
  watch      follow a run from another terminal, or in the browser
  plot       curves of one run or several, as pictures and CSV
  report     one run or several as a page; serve-report shows it live
  chat       talk to a fine-tuned model
  merge      write a fine-tuned model as one folder, its adapters inside the weights
  export     write a trained model as a Hugging Face folder
  config     explain, show, schema, presets, copy

CONFIG is a preset's name (see `flatout config presets`) or a YAML file.
`flatout VERB --help` tells more about a verb; `flatout --version` prints the version.

exit codes: 0 done, 2 usage or config, 3 bad data or checkpoint, 4 training diverged,
            5 out of memory or disk, 129, 130 and 143 stopped by a signal; watch: 1 if the run died
"""

CONFIG_ACTIONS = {
    "explain": "every value, where it came from and what it means",
    "show": "the resolved config as YAML",
    "schema": "the JSON schema of a config file",
    "presets": "the presets and hardware overlays that ship with Flatout",
    "copy": "copy a preset to a file to edit",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    with usable_streams():
        code = _answer(words)
        try:
            sys.stdout.flush()  # what was said before an error is still in the buffer
        except OSError:
            go_nowhere(sys.stdout)
    return code


def _answer(words: list[str]) -> int:
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except UserError as error:
        if is_first() or not isinstance(error, SeveralProcessesError):
            print(f"error: {one_line(error.message)}\nhint: {one_line(error.hint)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        go_nowhere(sys.stdout)
        return 141
    except OSError as error:
        if "No usable temporary directory" in str(error):  # ours, or torch's when its compiler is imported
            print("error: no folder for temporary files can be written", file=sys.stderr)
            print("hint: free some space, or set TMPDIR to a folder with some", file=sys.stderr)
            return 5
        if error.errno in (errno.EACCES, errno.EPERM):
            print(f"error: {one_line(str(error.filename or 'a file'))}: {error.strerror}", file=sys.stderr)
            print("hint: check who may read and write it, and the folders that it lies in", file=sys.stderr)
            return 3
        if error.errno in (errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EROFS):
            print(f"error: {quoted(str(error.filename or 'a file')[:200])}: {error.strerror}", file=sys.stderr)
            print("hint: name another file or folder", file=sys.stderr)
            return 2
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        go_nowhere(sys.stdout)
        print(f"error: could not write: {error.strerror}\nhint: free some space, then try again", file=sys.stderr)
        return 5


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if words[0] in ("-V", "--version"):
        print(f"flatout {flatout.__version__}")
        return 0
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1, cutoff=0.6)
        near = [f"config {verb}"] if verb in CONFIG_ACTIONS else near
        hint = f"did you mean `flatout {near[0]}`?" if near else "see `flatout --help` for the verbs"
        raise UsageError(f"unknown verb {quoted(verb)}", hint)
    if verb in ("train", "finetune", "bench", "tune", "estimate", "profile"):
        check_one_process()
    try:
        return VERBS[verb](rest)
    except SystemExit as stop:  # argparse leaves this way after printing help
        return int(stop.code or 0)


# --- train ------------------------------------------------------------------------------------------------------------


def _train(words: list[str]) -> int:
    parser = Parser(
        "train",
        "Train a model. SIGINT, SIGTERM and SIGHUP save a checkpoint and end the run, a second Ctrl-C quits at once; "
        "SIGUSR1 saves and goes on.",
    )
    add_config(parser)
    return _run_training(parser, words)


def _finetune(words: list[str]) -> int:
    parser = Parser("finetune", "Fine-tune a model on conversations or instructions, by LoRA unless lora.rank=0.")
    add_config(parser, default="lora")
    return _run_training(parser, words)


def _run_training(parser: Parser, words: list[str]) -> int:
    parser.add_argument(
        "--resume", metavar="auto|PATH", help="go on with a run: auto (if there is one), a run folder or a checkpoint"
    )
    parser.add_argument("--json", action="store_true", help="print records as JSON lines and nothing else")
    parser.add_argument("--view", action="store_true", help="a panel with curve, speed, card and warnings")
    parsed = parser.parse_words(words)
    if parsed.view and parsed.json:
        raise UsageError("--view and --json exclude each other", "leave one of them out")
    resume: str | None = parsed.resume
    if resume == "":
        raise UsageError("--resume needs auto or a folder", "for example --resume auto")
    place = None if resume in (None, "auto") or parsed.config_given else Path(resume)
    if place is not None and not place.is_dir():
        raise UsageError(
            f"--resume {quoted(str(place))} is not a folder", "name a run folder, a checkpoint folder, or auto"
        )
    loaded = None if place is not None else load(parsed, tell=False)
    if loaded is not None and parser.verb == "finetune" and loaded.config.chat.source is None:
        raise UsageError("this config has nothing to fine-tune on", "set chat.source, or use `flatout train`")
    if loaded is not None and parser.verb == "finetune":
        _check_rows_named(loaded, resume)
    with output_that_may_go_away():  # the terminal is not the run
        return _follow_training(parsed, loaded, resume, place)


def _follow_training(
    parsed: argparse.Namespace, loaded: "LoadedConfig | None", resume: str | None, place: Path | None
) -> int:
    from flatout import api
    from flatout.observe.live.console import JsonReader, TerminalReader
    from flatout.observe.live.prepare_bar import PrepareBar
    from flatout.observe.live.view import ViewReader

    if loaded is None or place is not None:
        loaded = api.stored_config(place or Path(), parsed.overrides)
    terminal = ViewReader if parsed.view else TerminalReader
    reader = JsonReader() if parsed.json else terminal(loaded.config.output.log_every)
    preparing = PrepareBar()
    stop = StopOnSignal(at_once=reader.leave_at_once if isinstance(reader, ViewReader) else lambda: None)
    folder = checkpoint = None
    interrupted = nothing_left = False
    with stop:
        try:
            for record in api.train(loaded, resume=resume, stop=stop.requested, save=stop.save, progress=preparing):
                if isinstance(record, records.RunInfo):
                    stop.training = True
                    preparing.close()
                    folder, nothing_left = record.folder, record.nothing_left
                elif isinstance(record, records.EndRecord):
                    checkpoint, interrupted = record.checkpoint, record.reason == "interrupted"
                reader.show(record)
        finally:
            preparing.close()
            reader.close()
    if nothing_left:
        return 0
    if folder is not None and loaded.config.output.plots:
        _draw(Path(folder))
    if interrupted and stop.number is not None:
        if checkpoint is not None:
            verb = "finetune" if loaded.config.chat.source is not None else "train"
            print(
                f"saved {checkpoint}; go on with: {_program()} {verb} --resume {shlex.quote(str(folder))}",
                file=sys.stderr,
            )
        return 128 + stop.number
    if not parsed.json:
        verb = "chat" if loaded.config.chat.source is not None else "generate"
        print(f"try it: {_program()} {verb} {shlex.quote(str(folder))}")
    return 0


def _check_rows_named(loaded: "LoadedConfig", resume: str | None) -> None:
    """Presets name rows and a model for example's sake: where they are not there, the user has to name some."""
    source, origin = loaded.config.chat.source, loaded.sources["chat.source"]
    if source is None or origin.written is not None or Path(source).exists():
        return
    written = loaded.sources["model.init_from"].written is not None
    model = f"model.init_from={loaded.config.model.init_from if written else 'FOLDER-OR-HUB-NAME'}"
    hint = f"name your rows and a model: flatout finetune {model} chat.source=ROWS.jsonl"
    if resume == "auto":
        from flatout.engine.run_folder import choose_folder

        run = choose_folder(loaded.config.output, resume)
        if run.exists():  # by its own name it brings its settings along
            hint = f"go on with what {run} was trained on: flatout finetune --resume {shlex.quote(str(run))}"
    raise UsageError(f"nothing was named to fine-tune on, and {source}, which {origin.where} has, is not there", hint)


def _draw(folder: Path) -> None:
    """The run's pictures and tables. Training is done: what goes wrong here is told and costs nothing."""
    from flatout.observe.plot.plots import write_run_plots

    try:
        write_run_plots(folder)
    except UserError as error:
        print(
            f"note: no plots: {one_line(error.message)}; with `flatout plot`: {one_line(error.hint)}", file=sys.stderr
        )


def _program() -> str:
    """How to call us again: by name where the shell finds it, else by the path we were called with."""
    called = sys.argv[0]
    return called if Path(called).name == "flatout" and shutil.which("flatout") is None else "flatout"


class StopOnSignal:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a request to save and stop; the second SIGINT quits at once.

    SIGUSR1 is a request to save and go on. Before training has begun there is nothing to save: SIGUSR1 waits for the
    first step, and any other signal ends the process. A signal that the process was started to ignore (nohup, a
    shell's `trap ''`) stays ignored.
    """

    def __init__(self, at_once: Callable[[], None] = lambda: None) -> None:
        """`at_once` is the last thing done before the process quits without a word to anybody else."""
        self.at_once = at_once
        self.number: int | None = None
        self.training = False
        self.asked_to_save = False
        self.before: dict[int, Any] = {}

    def requested(self) -> bool:
        return self.number is not None

    def save(self) -> bool:
        """Whether a save was asked for since the last call."""
        asked, self.asked_to_save = self.asked_to_save, False
        return asked

    def __enter__(self) -> "StopOnSignal":
        handlers = {"SIGINT": self._handle, "SIGTERM": self._handle, "SIGHUP": self._handle, "SIGUSR1": self._ask}
        for name, handler in handlers.items():
            self.before |= handled(name, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, _number: int, _frame: object) -> None:
        self.asked_to_save = True

    def _handle(self, number: int, _frame: object) -> None:
        if not self.training:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        if self.number is not None and number == signal.SIGINT:
            self.at_once()
            _cry("quitting at once; the last finished checkpoint is intact")
            os._exit(130)
        self.number = number
        _cry("stopping: saving after this step (Ctrl-C again quits at once)")


def _cry(text: str) -> None:
    """A line on standard error from a signal handler, where Python's own streams may be in use."""
    with contextlib.suppress(OSError):  # the terminal may be gone, which is what SIGHUP says
        os.write(2, f"\n{text}\n".encode("ascii"))


# --- the other verbs --------------------------------------------------------------------------------------------------


def _eval(words: list[str]) -> int:
    parser = Parser("eval", "Measure a trained model on its validation text: loss, perplexity, bits per byte.")
    add_model(parser)
    parser.add_argument(
        "--data",
        metavar="FOLDER",
        help="prepared shards of text to use instead of the run's own data; of a fine-tuned run also the folder of "
        "its own samples, where that is not found from here",
    )
    parser.add_argument("--split", choices=("val", "train"), default="val", help="which split to measure")
    parser.add_argument("--tokens", type=number_between(int, 1, 2**40), help="measure this many tokens from the start")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parsed = parser.parse_words(words)
    check_model(parsed)
    from flatout import api

    model = api.load_model(parsed.run, device=parsed.device, best=not parsed.last, base=parsed.base)
    result = api.evaluate(model, data=parsed.data, split=parsed.split, tokens=parsed.tokens)
    if parsed.json:
        print(json.dumps(vars(result)))
    else:
        bits = "" if result.bits_per_byte is None else f"  bits/byte {result.bits_per_byte:.4f}"
        print(f"{result.origin} on {result.tokens:,} {result.split} tokens:")
        print(f"loss {result.loss:.4f}  perplexity {result.perplexity:.3f}{bits}")
    return 0


def _generate(words: list[str]) -> int:
    parser = Parser("generate", "Continue a prompt with a trained model, printed as it comes.")
    add_model(parser)
    parser.add_argument("--prompt", default="\n", help="text to continue; default: a new line")
    parser.add_argument(
        "--tokens", type=number_between(int, 1, 10_000_000), default=300, help="how many tokens; default 300"
    )
    parser.add_argument(
        "--temperature", type=number_between(float, 0, 100), default=0.8, help="0 is greedy; default 0.8"
    )
    parser.add_argument("--top-k", type=number_between(int, 1, 2**31), help="sample among the K likeliest tokens")
    parser.add_argument(
        "--top-p", type=number_between(float, 0, 1), help="sample among the likeliest tokens of this mass"
    )
    parser.add_argument(
        "--seed", type=number_between(int, 0, 2**63 - 1), default=0, help="the same seed repeats; default 0"
    )
    parser.add_argument("--interactive", action="store_true", help="ask for prompts until end of input")
    parsed = parser.parse_words(words)
    check_model(parsed)
    from flatout import api
    from flatout.observe.human import printable

    model = api.load_model(parsed.run, device=parsed.device, best=not parsed.last, base=parsed.base)

    def answer(prompt: str) -> None:
        settings = {name: getattr(parsed, name) for name in ("tokens", "temperature", "top_k", "top_p", "seed")}
        shown = prompt if prompt.strip() and not parsed.interactive else ""
        for piece in api.generate(model, prompt, **settings):  # the first piece shows that the prompt can be read
            print(shown + printable(piece), end="", flush=True)
            shown = ""
        print()

    if not parsed.interactive:
        answer(parsed.prompt)
        return 0
    return converse("type a prompt, end with Ctrl-D", lambda prompt: answer(prompt or "\n"))


def _export(words: list[str]) -> int:
    parser = Parser("export", "Write a trained model as a folder for Hugging Face tools, with its tokenizer.")
    parser.add_argument("run", help="a run, checkpoint or adapter folder")
    parser.add_argument("folder", help="new folder to write")
    parser.add_argument("--last", action="store_true", help="use the newest checkpoint instead of the best")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="of the weights; default: fp32, but bf16 where adapters are merged into them, as `flatout merge` has it",
    )
    parser.add_argument(
        "--adapter", action="store_true", help="adapters alone, as PEFT's folder; default: inside the weights"
    )
    add_base(parser)
    parser.set_defaults(device="cpu")
    parsed = parser.parse_words(words)
    check_model(parsed)
    from flatout import api

    model = api.load_model(parsed.run, device="cpu", best=not parsed.last, base=parsed.base)
    told: list[str] = []
    target = api.export(model, parsed.folder, dtype=parsed.dtype, adapter=parsed.adapter, notice=told.append)
    print(f"wrote {target}")
    for message in told:
        print(f"note: {message}")
    return 0


def _config(words: list[str]) -> int:
    action, rest = choose_action("config", words, CONFIG_ACTIONS)
    if action is None:
        return 0
    parser = Parser(f"config {action}", sentence(CONFIG_ACTIONS[action]))
    if action == "copy":
        parser.add_argument("preset", help="name of the preset")
        parser.add_argument("file", nargs="?", help="file to write; default: PRESET.yaml")
    elif action in ("explain", "show"):
        add_config(parser)
    if action == "explain":
        parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parsed = parser.parse_words(rest)
    return _config_action(action, parsed)


def _config_action(action: str, parsed: argparse.Namespace) -> int:
    from flatout.config import load as configs

    if action == "schema":
        print(json.dumps(configs.schema_json(), indent=2))
    elif action == "presets":
        for title, rows in (("presets", configs.list_presets()), ("hardware overlays", configs.list_hardware())):
            print(f"{title}:")
            width = max(len(row.name) for row in rows) + 2
            for row in rows:
                print(f"  {row.name:<{width}}{row.summary}")
    elif action == "copy":
        if parsed.file == "":
            raise UsageError("the name of the file to write is empty", "leave it out, or name a .yaml file")
        print(f"wrote {configs.copy_preset(parsed.preset, Path(parsed.file or f'{parsed.preset}.yaml'))}")
    elif action == "show":
        print(configs.show(load(parsed).config), end="")
    else:
        rows = configs.explain(load(parsed))
        if parsed.json:
            print(json.dumps([vars(row) for row in rows], ensure_ascii=False))
            return 0
        widths = [max(len(row.path) for row in rows), max(len(configs.format_value(row.value)) for row in rows)]
        sources = max(len(row.source) for row in rows)
        for row in rows:
            value = configs.format_value(row.value)
            print(f"{row.path:<{widths[0]}}  {value:<{widths[1]}}  {row.source:<{sources}}  {row.description}")
    return 0


def _tune(words: list[str]) -> int:
    kinds = {"lr": finders.tune_lr, "search": finders.tune_search}
    return kinds[words[0]](words[1:]) if words and words[0] in kinds else tune.tune(words)


VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "finetune": _finetune,
    "lora": _finetune,
    "prepare": data.prepare,
    "data": data.data,
    "tokenizer": data.tokenizer,
    "eval": _eval,
    "generate": _generate,
    "doctor": doctor.doctor,
    "estimate": estimate.estimate,
    "tune": _tune,
    "bench": bench.bench,
    "profile": profile.profile,
    "watch": watch.watch,
    "plot": plot.plot,
    "report": report.report,
    "serve-report": report.serve_report,
    "chat": chat.chat,
    "merge": chat.merge,
    "export": _export,
    "config": _config,
}

if __name__ == "__main__":
    sys.exit(main())
