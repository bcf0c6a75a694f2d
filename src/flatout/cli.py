"""The command line: finds the verb, and turns what goes wrong in it into lines and an exit code.

Contract: each verb is a function in `flatout.front`: it parses its words, calls functions (of `flatout`, or of the
room that does the work) and prints what comes back. Nothing heavy is imported before the words are understood, so help
and every mistake answer at once; a mistake is one `error:` line and one `hint:` line on stderr and an exit code (see
`flatout.errors`).
"""

import difflib
import errno
import shlex
import sys
from collections.abc import Callable, Sequence

import flatout
from flatout.errors import DataError, ResourceError, UsageError, UserError
from flatout.front import completion, verbs_ahead, verbs_looking, verbs_measuring, verbs_models, verbs_training
from flatout.front.output import go_nowhere, usable_streams
from flatout.front.words import quoted, tell
from flatout.launch import OtherProcessError, check_one_process

HELP = """\
Flatout trains GPTs as fast as your machine allows.

usage: flatout VERB [CONFIG] [SECTION.FIELD=VALUE ...] [options]

verbs:
{verbs}

CONFIG is a preset's name (see `flatout config presets`) or a YAML file.
`flatout VERB --help` tells more about a verb; `flatout --version` prints the version.

exit codes: 0 done, 2 usage or config, 3 bad data or checkpoint, 4 training diverged,
            5 out of memory or disk, 129, 130 and 143 stopped by a signal; watch: 1 if the run died
"""


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
        code = dispatch(words)
        sys.stdout.flush()
        return code
    except UserError as error:
        if not isinstance(error, OtherProcessError):
            tell(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        go_nowhere(sys.stdout)
        return 141
    except OSError as error:
        error = _for_the_user(error)
        tell(error)
        return error.exit_code


def _for_the_user(error: OSError) -> UserError:
    """An error of the operating system that a user can mend, in words; any other is raised again."""
    name = str(error.filename or "a file")
    if "No usable temporary directory" in str(error):  # ours, or torch's when its compiler is imported
        hint = "free some space, or set TMPDIR to a folder with some"
        return ResourceError("no folder for temporary files can be written", hint)
    if error.errno in (errno.EACCES, errno.EPERM):
        hint = "check who may read and write it, and the folders that it lies in"
        return DataError(f"{name}: {error.strerror}", hint)
    if error.errno in (errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EROFS):
        return UsageError(f"{quoted(name[:200])}: {error.strerror}", "name another file or folder")
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        raise error
    go_nowhere(sys.stdout)
    return ResourceError(f"could not write: {error.strerror}", "free some space, then try again")


def dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        rows = [f"  {verb:<11}{text}".replace("\n", f"\n{' ' * 13}") for verb, (_, text) in VERBS.items() if text]
        print(HELP.format(verbs="\n".join(rows)), end="")
        return 0
    if words[0] in ("-V", "--version"):
        print(f"flatout {flatout.__version__}")
        return 0
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1, cutoff=0.6)
        near = [f"config {verb}"] if verb in verbs_looking.CONFIG_ACTIONS else near
        near = [ELSEWHERE_CALLED[verb].replace("RUN", _newest_run())] if verb in ELSEWHERE_CALLED else near
        hint = f"did you mean `flatout {near[0]}`?" if near else "see `flatout --help` for the verbs"
        hint = f"there is no server; {hint}" if verb in ("serve", "server") else hint
        raise UsageError(f"unknown verb {quoted(verb)}", hint)
    if verb in ("ablate", "bench", "tune", "estimate"):
        check_one_process(verb)
    try:
        return VERBS[verb][0](rest)
    except SystemExit as stop:  # argparse leaves this way after printing help
        return int(stop.code or 0)


def _newest_run() -> str:
    """The newest run as a word of a command; RUN where there is none."""
    from flatout.observe.runs import find_run  # here: other commands do without

    try:
        return shlex.quote(str(find_run(None)))
    except (UserError, OSError):
        return "RUN"


# Every verb: its function, and what `flatout --help` says of it. Those without words it leaves out.
VERBS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (verbs_training.train, "train a model; without a CONFIG, a small Shakespeare model"),
    "finetune": (verbs_training.finetune, "LoRA or full fine-tuning of a chat model on conversations"),
    "lora": (verbs_training.finetune, ""),
    "prepare": (verbs_models.prepare, "turn text into token shards (train does this when needed)"),
    "data": (verbs_models.data, "inspect or verify prepared shards"),
    "tokenizer": (verbs_models.tokenizer, "train a byte-pair encoding, or compare tokenizers"),
    "eval": (verbs_models.evaluate, "loss, perplexity and bits per byte of a trained model"),
    "generate": (verbs_models.generate, "continue a prompt with a trained model"),
    "doctor": (verbs_ahead.doctor, "check machine, data and config, and say what to do"),
    "estimate": (verbs_ahead.estimate, "time, memory, energy and cost of a run, from a few real steps"),
    "plan": (verbs_ahead.plan, "memory, communication and time of a run on many GPUs, before you rent them"),
    "tune": (
        verbs_measuring.tune,
        "find the fastest micro-batch, checkpointing and loss for this machine;\n"
        "`tune lr` finds a learning rate, `tune search` searches any settings",
    ),
    "bench": (verbs_measuring.bench, "what each speed switch is worth on this machine, proven first"),
    "ablate": (
        verbs_measuring.ablate,
        "what each field of a config is worth to the loss, by pairs of runs and their noise",
    ),
    "profile": (verbs_measuring.profile, "what holds a step on this machine: arithmetic, memory, launches or data"),
    "runs": (verbs_looking.runs, "list runs: state, step, loss, size, age"),
    "watch": (verbs_looking.watch, "follow a run from another terminal, or in the browser"),
    "plot": (verbs_looking.plot, "curves of one run or several, as pictures and CSV"),
    "report": (verbs_looking.report, "one run or several as a page; serve-report shows it live"),
    "serve-report": (verbs_looking.serve_report, ""),
    "bundle": (verbs_looking.bundle, "one zip file of a run for a bug report, without data, weights or keys"),
    "chat": (verbs_models.chat, "talk to a fine-tuned model"),
    "merge": (verbs_models.merge, "write a fine-tuned model as one folder, its adapters inside the weights"),
    "export": (verbs_models.export, "write a trained model as a Hugging Face folder"),
    "config": (verbs_looking.config, "explain, show, search, schema, presets, copy"),
    "completion": (
        lambda words: completion.completion(words, {verb: made for verb, (made, text) in VERBS.items() if text}),
        "a script that completes commands in bash or zsh",
    ),
}

# What other programs call a verb, where no spelling leads to ours.
ELSEWHERE_CALLED = {
    **dict.fromkeys(("serve", "server", "infer", "predict", "sample", "run"), "generate RUN --interactive"),
    **dict.fromkeys(("fit", "pretrain"), "train"),
    **dict.fromkeys(("sft", "qlora"), "finetune"),
    **dict.fromkeys(("test", "validate"), "eval RUN"),
    **dict.fromkeys(("convert", "save", "upload"), "export RUN FOLDER"),
    **dict.fromkeys(("ls", "list"), "runs"),
    "tokenize": "prepare",
}

if __name__ == "__main__":
    sys.exit(main())
