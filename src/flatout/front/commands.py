"""The table of commands, from which the command line, help, completion and the reference are made.

A new verb is a row here and the function that the row names, which takes the parsed words, calls the public function
of Python and prints what it returns.
"""

import argparse
import difflib
import shlex
import shutil
import textwrap
from collections.abc import Sequence

from flatout.errors import UsageError, page, quoted
from flatout.front import verbs_ahead, verbs_looking, verbs_measuring, verbs_models, verbs_training
from flatout.front.completion import SHELLS, script
from flatout.front.configs import config_options
from flatout.front.words import Command, Option, Parser, choice, flag, number, option, word
from flatout.tuning.cluster import CARDS, LLAMAS
from flatout.tuning.rungs import every_name


def _print_completion(parsed: argparse.Namespace) -> int:
    print(completion(parsed.shell), end="")
    return 0


# --- options of several commands --------------------------------------------------------------------------------------

CONFIG = config_options()
JSON = flag("--json", "print the result as JSON")
ROWS_AS_JSON = flag("--json", "print rows as JSON")
OVERWRITE = flag("--overwrite", "also replace files that flatout did not write")
RUNS = word("runs", "a run folder, or a name under runs/; default: the newest run there", metavar="RUN", nargs="*")
BASE = option("--base", "MODEL", "the model under adapters, where it is not where they say")
LAST = flag("--last", "use the newest checkpoint instead of the best")
MODEL = (
    word(
        "run", "a run, checkpoint, Hugging Face or adapter folder, or a GGUF file; default: the newest run", nargs="?"
    ),
    BASE,
    LAST,
    Option(("--device",), {"default": "auto", "help": "auto, cpu, mps, cuda or cuda:N"}),
)
MODELS = (
    word(
        "runs",
        "a run, checkpoint, Hugging Face or adapter folder or GGUF file, or several; default: the newest run",
        metavar="RUN",
        nargs="*",
    ),
    *MODEL[1:],
)
WEIGHTS = choice("--weights", ("auto", "fp32", "bf16", "int8"), "of linear layers; auto: bf16 on a GPU", default="auto")
_HOSTS = verbs_training.MOST_PROCESSES
TRAINING = (
    option("--resume", "auto|PATH", "resume a run: auto (if there is one), a run folder or a checkpoint"),
    flag("--json", "print records as JSON lines and nothing else"),
    flag("--view", "a panel with curve, speed, card and warnings"),
    number("--gpus", 1, _HOSTS, "train with N processes, one for each GPU; without GPUs, on the CPU", metavar="N"),
    number("--nodes", 1, _HOSTS, "hosts that train together; give the same command on each", metavar="M"),
    number("--node-rank", 0, _HOSTS - 1, "number of this host, from 0", metavar="R"),
    option("--meet", "HOST:PORT", "where hosts meet: an address of host 0 and a free port"),
    number("--restarts", 0, 1000, "restarts after crashes, kills and hangs (default 3)", metavar="K", default=3),
)
WRITTEN_CONFIG = option("--out", "FILE", "write the config found to this YAML file, to train with")


def _sampling(tokens: int, temperature: float, top_p: float | None = None) -> tuple[Option, ...]:
    mass = "sample among the likeliest tokens of this mass" + ("" if top_p is None else f"; default {top_p}")
    return (
        number("--tokens", 1, 10_000_000, f"most tokens to write; default {tokens}", default=tokens),
        number("--temperature", 0, 100.0, f"0 is greedy; default {temperature}", default=temperature),
        number("--top-p", 0, 1.0, mass, default=top_p),
        number("--seed", 0, 2**63 - 1, "the same seed repeats; default 0", default=0),
    )


# --- training, data and models ----------------------------------------------------------------------------------------

_ALL = (
    Command(
        "train",
        verbs_training.train,
        "train a model; without a CONFIG, a small Shakespeare model",
        (
            *CONFIG,
            number("--minutes", 0.01, 1e6, "train this long, by the clock; with --resume RUN, this much longer"),
            *TRAINING,
        ),
        "Train a model. SIGINT, SIGTERM and SIGHUP save a checkpoint and end the run, a second Ctrl-C quits at once; "
        "SIGUSR1 saves and goes on. With --minutes, this machine's speed decides size, batch and steps.",
        processes="ranks",
    ),
    Command(
        "finetune",
        verbs_training.train,
        "LoRA or full fine-tuning of a chat model on conversations",
        (*config_options("lora"), *TRAINING),
        "Fine-tune a model on conversations or instructions, by LoRA unless lora.rank=0.",
        preset="lora",
        processes="ranks",
    ),
    Command(
        "prepare",
        verbs_models.prepare,
        "turn text into token shards (train does this when needed); inspect shards",
        (
            *CONFIG,
            number("--workers", 0, 1024, "worker processes; default: one per core; 0: none"),
            flag("--overwrite", "replace shards that are already there"),
            number("--context", 1, 2**24, "count windows and documents of this many tokens; default: model.context"),
            JSON,
        ),
        "Turn the config's text into token shards with a manifest. Continues after a kill.",
    ),
    Command(
        "prepare inspect",
        verbs_models.inspect,
        "what a prepared dataset holds, what was dropped and why",
        (
            word("folder", "folder of prepared shards"),
            number("--context", 1, 2**24, "count windows of this many tokens"),
            JSON,
        ),
    ),
    Command(
        "prepare verify",
        verbs_models.verify,
        "check every byte of a prepared dataset",
        (word("folder", "folder of prepared shards"), JSON),
    ),
    Command(
        "eval",
        verbs_models.evaluate,
        "loss, perplexity and bits per byte of a trained model; with --tasks, its scores on tasks",
        (
            *MODELS,
            option(
                "--data", "PATH", "measure on these shards, on a fine-tuned run's folder of samples, or a text file"
            ),
            choice("--split", ("val", "train"), "which split to measure", default="val"),
            number("--tokens", 1, 2**40, "measure this many tokens from the start"),
            number(
                "--stride", 1, 2**24, "let windows of the whole context overlap, each N tokens further", metavar="N"
            ),
            choice("--weights", ("fp32", "bf16", "int8"), "measure with narrower weights, too, and what they cost"),
            option("--tasks", "A,B,C", "files of tasks, folders of them, or tasks of lm-evaluation-harness"),
            option("--task-folder", "FOLDER", "where tasks that are named without a path lie, also the harness's YAML"),
            number("--shots", 0, 1000, "solved questions before each; default 0", metavar="N"),
            number("--limit", 1, 2**40, "ask the first N questions of each task", metavar="N"),
            number("--seed", 0, 2**63 - 1, "draws the solved questions; default 0", default=0),
            option("--log", "FILE.jsonl", "write every question with the answers to this file"),
            option("--plot", "FILE", "draw the scores to this PNG or SVG file"),
            OVERWRITE,
            JSON,
        ),
        "Measure a trained model on its validation text: loss, perplexity, bits per byte. With --tasks, ask it the "
        "questions of tasks and print scores with standard errors; of several models, also the differences to the "
        f"first. {page('guides/after-training.md')} has the forms of task files.",
        python="evaluate",
    ),
    Command(
        "generate",
        verbs_models.generate,
        "continue a prompt with a trained model, or with several to compare",
        (
            *MODELS,
            WEIGHTS,
            Option(("--prompt",), {"default": "\n", "help": "text to continue; default: a new line"}),
            option("--prompts", "FILE", "continue each line, of .jsonl files its prompt; prints JSON lines"),
            number("--top-k", 1, 2**31, "sample among the K likeliest tokens"),
            *_sampling(300, 0.8),
            flag("--interactive", "ask for prompts until end of input"),
        ),
        "Continue a prompt with a trained model, printed as it comes.",
        text="--prompt",
    ),
    Command(
        "chat",
        verbs_models.chat,
        "talk to a fine-tuned model",
        (
            *MODEL,
            WEIGHTS,
            Option(("--message",), {"help": "say this, print the answer and leave; default: ask until end of input"}),
            Option(("--system",), {"help": "what the conversation begins with, for models that take it"}),
            *_sampling(500, 0.7, 0.95),
        ),
        "Talk to a chat model: a fine-tuned run, a Hugging Face folder or a GGUF file.",
        text="--message",
    ),
    Command(
        "serve",
        verbs_models.serve,
        "serve a model by an OpenAI-compatible interface, with a chat page",
        (
            *MODEL,
            WEIGHTS,
            option("--host", "ADDRESS", "listen here; default 127.0.0.1, this machine only", default="127.0.0.1"),
            number("--port", 0, 65535, "0: any free one; default 8000", default=8000),
            number("--rows", 1, 4096, "texts decoded together; default: as many as fit, 64 on a GPU and 8 on a CPU"),
            flag("--batch-invariant", "texts are the same to the bit whatever runs beside them; slower"),
            number("--queue", 0, 1_000_000, "texts that may wait for a row; default 100", default=100),
            number("--seconds", 0.1, 1e6, "most time for one request; default 600", default=600.0),
            number("--drain", 0.0, 1e6, "time for live requests to finish at the end; default 30", default=30.0),
        ),
        "Serve a model on this machine: /v1/chat/completions and /v1/completions as OpenAI has them, /metrics for "
        "Prometheus, and a chat page at /. SIGINT and SIGTERM let live requests finish first. With --host, other "
        "machines may ask, with the API key in FLATOUT_API_KEY.",
        processes="one",
    ),
    Command(
        "export",
        verbs_models.export,
        "write a trained model for other programs: a Hugging Face folder or GGUF, its adapters inside the weights",
        (
            word("run", "a run, checkpoint or adapter folder, or a GGUF file"),
            word("folder", "new folder to write", nargs="?"),
            LAST,
            BASE,
            choice(
                "--format", ("huggingface", "gguf"), "gguf: for llama.cpp, Ollama, LM Studio", default="huggingface"
            ),
            choice("--dtype", ("fp32", "bf16", "fp16", "q8_0"), "default: fp32, but bf16 where adapters are merged"),
            flag("--adapter", "adapters alone, as PEFT's folder; default: inside the weights"),
            option("--check", "FOLDER", "write nothing: check a folder written before against the run"),
            option("--push", "NAME", "send the folder to the Hugging Face Hub, as the repository org/name"),
            JSON,
        ),
        "Write a trained model as a folder for Hugging Face tools, or for llama.cpp with --format gguf, with its "
        "tokenizer. Adapters are written into the weights, and what the rounding left of their update is printed. "
        "Before the folder appears, its files are loaded again and compared with the model on a held text.",
    ),
    # --- before a run -------------------------------------------------------------------------------------------------
    Command(
        "doctor",
        verbs_ahead.doctor,
        "check machine, data and config, and say what to do",
        (
            *CONFIG,
            number("--gpus", 1, 4096, "check for N ranks on this host"),
            flag("--quick", "leave out what takes seconds, such as compiling"),
            flag("--json", "print findings as JSON lines"),
        ),
        "Check machine, data and config before training: what was found, whether it is fine, and what to do about it.",
        processes="one",
    ),
    Command(
        "estimate",
        verbs_ahead.estimate,
        "time, memory and cost of a run, from a few real steps; with --gpus, on many GPUs before you rent them",
        (
            *config_options(more_sizes=f"; with --gpus, a Llama of {', '.join(LLAMAS)}"),
            number("--price", 0, 1e6, "per hour of the machine, or with --gpus of one GPU", metavar="PER_HOUR"),
            number("--seconds", 0.1, 3600.0, "time steps this long; default 15; evaluation, sample and save on top"),
            flag("--no-probe", "build and time nothing: sizes and counts only"),
            flag("--json", "print one JSON line instead of the sheet"),
            option("--gpus", "A..B", "numbers of GPUs to look at: 8..64 (doubling), or a list such as 8,24"),
            option("--gpu", "NAME", f"the card: {', '.join(CARDS)}; default this machine's, or h100"),
            number("--per-host", 1, 1024, "GPUs of a host; default 8"),
            number("--intra", 0.01, 1e5, "what a collective reaches inside a host, for each GPU", metavar="GB/S"),
            number("--inter", 0.001, 1e5, "what it reaches between hosts, for each GPU", metavar="GB/S"),
            number("--rate", 1.0, 1e9, "of one GPU with this model; default: from --mfu", metavar="TOKENS/S"),
            number("--mfu", 0.01, 1.0, "share of the peak rate; default: rows of `flatout bench` here, else known"),
            option("--plot", "FILE", "with --gpus: draw it to this PNG or SVG file"),
            OVERWRITE,
        ),
        "Time, memory, disk and cost of a run, from a short timed piece of it. Trains nothing that is kept. "
        "With --gpus nothing is measured and no GPU is needed: memory, communication and step time of a run on many "
        "GPUs, for data parallel, FSDP2 and hybrid sharding.",
        processes="one",
    ),
    # --- measurements -------------------------------------------------------------------------------------------------
    Command(
        "tune",
        verbs_measuring.tune,
        "find the fastest micro-batch, checkpointing and loss for this machine; "
        "`tune lr` finds a learning rate, `tune search` searches any settings",
        (
            *CONFIG,
            number("--memory", 0.1, 10_000.0, "emulate a GPU with this much memory", metavar="GIB"),
            WRITTEN_CONFIG,
            OVERWRITE,
            flag("--exhaustive", "try every micro-batch with everything else"),
            number("--seconds", 1, 1e6, "take the best after this long; default 120, 1200 compiled, 3600 exhaustive"),
            flag("--json", "print rows as JSON lines instead of the table"),
        ),
        "Find the micro-batch, checkpointing and loss with the most tokens per second for the config's global batch, "
        "in pretraining or fine-tuning, by real training steps on this device. What is learned does not change.",
        processes="one",
    ),
    Command(
        "tune lr",
        verbs_measuring.tune_lr,
        "find a learning rate by a range test",
        (
            *CONFIG,
            WRITTEN_CONFIG,
            option("--plot", "FILE", "draw the curve to this PNG or SVG file"),
            number("--from", 1e-12, 100.0, "first rate; default 1e-7", dest="start", metavar="RATE", default=1e-7),
            number("--to", 1e-12, 100.0, "last rate; default 1", dest="end", metavar="RATE", default=1.0),
            number("--steps", 20, 100_000, "steps between them, 20 to 100,000; default 100", default=100),
            OVERWRITE,
            flag("--json", "print one JSON line instead of the table"),
        ),
        "Find a learning rate by a range test: real training steps whose rate rises from far too small to too large.",
        python="tune_lr",
        processes="one",
    ),
    Command(
        "tune search",
        verbs_measuring.tune_search,
        "search any settings by short real runs",
        (
            word("space", "a file with the fields to search over and their ranges", metavar="SPACE.yaml", nargs="?"),
            *CONFIG,
            number("--trials", 1, 100_000, "finished trials in all; default 20", default=20),
            option("--study", "FILE.jsonl", "keep the trials in this file, to continue with later"),
            option("--out", "FILE", "write the best config to this YAML file, to train with"),
            option("--plot", "FILE", "draw all trials to this PNG or SVG file"),
            OVERWRITE,
            flag("--json", "print a JSON line per trial and one for the result"),
        ),
        "Search hyperparameters by short real runs. Fields and ranges stand in SPACE.yaml; bad trials are cut short.",
        python="search",
        processes="one",
    ),
    Command(
        "bench",
        verbs_measuring.bench,
        "what each speed switch is worth on this machine, proven first",
        (
            *CONFIG,
            number("--steps", 3, 10_000, "most steps to time per rung; default 800", default=800),
            number("--parity-steps", 2, 10_000, "steps whose losses must be the reference's; default 20", default=20),
            number("--batch-tokens", 1, 2**40, "tokens per step; default: the config's, at most 64 sequences"),
            number("--seconds", 10, 1e6, "begin no rung after about this many seconds"),
            option("--rungs", "A,B,C", "only these rungs, and what they are compared with; the names are below"),
            choice("--only", verbs_measuring.GROUPS, "only this part of the ladder"),
            option("--out", "FOLDER", "for rows and picture; default: bench/NAME, numbered when taken"),
            flag("--json", "print rows as JSON lines instead of the table"),
        ),
        "Measure every speed switch on this machine: from a naive baseline up, one at a time, then each one out of the "
        "full set, then the rest. A rung whose losses are not the reference's prints no speed. The others are timed in "
        "turns with the rung they are compared with, and called faster or slower only where the error allows it.",
        processes="one",
        more_help="The ladder sets the switches of `speed` itself; speed.micro_batch is the most it tries.\n\n"
        f"rungs ({page('guides/speed.md')} has each one): {', '.join(every_name())}",
    ),
    Command(
        "ablate",
        verbs_measuring.ablate,
        "what each field of a config is worth to the loss, by pairs of runs and their noise",
        (
            *CONFIG,
            option(
                "--fields",
                "A.B,C.D=X",
                "fields to change, one at a time: true or false is flipped, others are written with their other value; "
                "default: whatever model, optim and train set differently from the default, back to it",
            ),
            number("--seeds", 1, 100, "pairs of runs per field; default 2, one gives no verdict", default=2),
            number("--minutes", 0, 1e6, "begin no run that would end later; 0 shows what is there"),
            option("--out", "FOLDER", "for rows and picture, and where rows are looked for; default: ablate/NAME"),
            flag("--json", "print runs and the result as JSON lines instead of the table"),
        ),
        "Find what each field of a config is worth: whole runs with and without it, with the same seeds and "
        "as many tokens. A field helps or hurts only where the noise between seeds allows to say so.",
        processes="one",
    ),
    Command(
        "profile",
        verbs_measuring.profile,
        "what holds a step on this machine: arithmetic, memory, launches or data",
        (
            *CONFIG,
            number("--steps", 1, 1000, "steps under the profiler; default 4, fewer if a step has many micro-batches"),
            option("--out", "FOLDER", "where the files go; default: profile/NAME, numbered when that is taken"),
            flag("--json", "print the figures as one JSON object instead of the page"),
        ),
        "Take some real training steps under torch's profiler and say what holds them: arithmetic, memory, launches or "
        "data, and which switch to try. Writes a trace, the kernels and a page to read.",
        processes="ranks",
    ),
    # --- runs and settings --------------------------------------------------------------------------------------------
    Command(
        "runs",
        verbs_looking.runs,
        "list runs: state, step, loss, size, age",
        (
            word("folder", "folder that the runs lie in; default: runs", nargs="?", default="runs"),
            choice(
                "--sort", ("age", "name", "state", "step", "loss", "size"), "newest first by default", default="age"
            ),
            flag("--reverse", "the other way round"),
            flag("--json", "print a JSON line for each run"),
        ),
        "List runs: how each stands, its step, its best validation loss, its size and its age.",
    ),
    Command(
        "watch",
        verbs_looking.watch,
        "follow a run from another terminal",
        (
            word("run", "a run folder, or a name under runs/; default: the newest run there", nargs="?"),
            flag("--json", "print the run's records as JSON lines and nothing else"),
        ),
        "Follow a run that another process trains: how far it is, how it goes, what goes wrong.",
        more_help="Ends with the run: code 0, or 1 if the run's process is gone without having finished.",
    ),
    Command(
        "plot",
        verbs_looking.plot,
        "curves of one run or several, as pictures and CSV",
        (
            word("runs", "a run folder, such as runs/shakespeare", nargs="+", metavar="RUN"),
            option("--out", "FOLDER", "default: plots in the run's folder or here; of several runs, also a picture"),
            flag("--svg", "write SVG pictures instead of PNG"),
            flag("--no-csv", "write pictures only"),
            OVERWRITE,
            flag("--json", "print the files written as JSON"),
        ),
        "Draw a run: what it learned and how it ran, as two pictures, with the numbers as CSV beside them; a run with "
        "eigenstate blocks has a third. Several runs are drawn into one picture, to compare them. A run that still "
        "goes on can be drawn too.",
    ),
    Command(
        "report",
        verbs_looking.report,
        "one run or several as a page; --serve shows it live, --zip packs a run for a bug report",
        (
            RUNS,
            option(
                "--out", "FILE", "default: report.html beside the run, for several here; with --zip, RUN-bundle.zip"
            ),
            number("--price", 0, 1e6, "what an hour of the machine costs, in any currency", metavar="PER_HOUR"),
            flag("--overwrite", "also replace a file that is no report, or no bundle, of flatout"),
            flag("--json", "print what the page would show as JSON, and write no page"),
            flag("--serve", "show the page in the browser, on this machine only, refreshed while runs go on"),
            number("--port", 1, 65535, "port of --serve; default: a free one from 8484 on"),
            flag("--zip", "write a zip file for a bug report"),
            flag("--no-doctor", "with --zip: leave out the machine and the doctor's findings"),
        ),
        "Write one HTML page that shows a run, or several side by side: curves, speed, samples, switches, config. The "
        "page needs no network and no other file. With --zip, write one zip file with config, environment, doctor's "
        "findings, metrics and list of files of a run, for a bug report; data, samples, weights and keys stay out.",
    ),
    Command("config", None, "explain, show, search, schema, presets, copy", python="load_config"),
    Command(
        "config explain",
        verbs_looking.explain,
        "every value, where it came from and what it means; of one FIELD, why, and what it may be",
        (word("field", "a setting, such as optim.learning_rate", metavar="[FIELD]", nargs="?"), *CONFIG, ROWS_AS_JSON),
        "Every value, where it came from and what it means. With FIELD, such as optim.learning_rate, that setting "
        "alone: its value, where it came from and why, what it may be, and where it is documented.",
    ),
    Command("config show", verbs_looking.show, "the resolved config as YAML", CONFIG),
    Command(
        "config search",
        verbs_looking.search,
        "settings by a word: names, sentences, and what other trainers call them",
        (word("words", "settings that hold all of these words", nargs="+", metavar="WORD"), ROWS_AS_JSON),
    ),
    Command("config schema", verbs_looking.schema, "the JSON schema of a config file"),
    Command("config presets", verbs_looking.presets, "the presets and hardware overlays that ship with Flatout"),
    Command(
        "config copy",
        verbs_looking.copy,
        "copy a preset to a file to edit",
        (word("preset", "name of the preset"), word("file", "file to write; default: PRESET.yaml", nargs="?")),
    ),
    Command(
        "completion",
        _print_completion,
        "a script that completes commands in bash or zsh",
        (word("shell", "for which shell", choices=SHELLS),),
        "Print a script that completes verbs, options, presets, settings and runs.",
        more_help="Once: flatout completion bash > ~/.local/share/bash-completion/completions/flatout, or in ~/.bashrc "
        "or ~/.zshrc: source <(flatout completion bash), or zsh.",
    ),
)

COMMANDS = {command.name: command for command in _ALL}
VERBS = {name: command for name, command in COMMANDS.items() if " " not in name}


def completion(shell: str = "bash") -> str:
    """The script that completes commands in bash or zsh, as `flatout completion` prints it."""
    if shell not in SHELLS:
        raise UsageError(f"there is no script for {shell!r}", f"use {' or '.join(SHELLS)}")
    return script(shell, list(COMMANDS.values()))


# What commands were called before.
FORMER_NAMES = {
    "lora": "finetune",
    "data": "prepare inspect",
    "data inspect": "prepare inspect",
    "data verify": "prepare verify",
    "tokenizer": "prepare data.tokenizer=bpe-8192",
    "plan": "estimate --gpus 1..8",
    "merge": "export",
    "bundle": "report --zip",
    "serve-report": "report --serve",
}

_HELP = """\
Flatout trains GPTs as fast as your machine allows.

usage: flatout VERB [CONFIG] [SECTION.FIELD=VALUE ...] [options]

verbs:
{verbs}

CONFIG is a preset's name (see `flatout config presets`) or a YAML file.
`flatout VERB --help` explains a verb; `flatout --version` prints the version.
Guides and reference: {pages}

exit codes: 0 done, 2 usage or config, 3 bad data or checkpoint, 4 training diverged,
            5 out of memory or disk, 129, 130 and 143 stopped by a signal; watch: 1 if the run died
"""


def help_text(width: int | None = None) -> str:
    """What `flatout --help` prints, in lines of at most `width` characters, by default the terminal's."""
    return _HELP.format(verbs=_listing(VERBS, 12, width), pages=page("index.md"))


def actions_of(verb: str) -> dict[str, Command]:
    """The commands of a verb that has several, by the word after it."""
    return {name.partition(" ")[2]: one for name, one in COMMANDS.items() if name.startswith(f"{verb} ")}


def parser_of(command: Command) -> Parser:
    return Parser(command, list(actions_of(command.name).values()))


def actions_text(verb: str, width: int | None = None) -> str:
    """The help of a verb that has nothing but actions."""
    listing = _listing(actions_of(verb), 9, width)
    return f"usage: flatout {verb} ACTION ...\n\nactions:\n{listing}\n\n`flatout {verb} ACTION --help` explains it.\n"


def _listing(commands: dict[str, Command], indent: int, width: int | None) -> str:
    width = max(width or shutil.get_terminal_size().columns, indent + 22)
    lines = []
    for name, command in commands.items():
        filler = textwrap.TextWrapper(width, f"  {name:<{indent}}", " " * (indent + 2), break_on_hyphens=False)
        lines.append(filler.fill(command.summary))
    return "\n".join(lines)


def command_for(words: Sequence[str]) -> tuple[Command, list[str]]:
    """The command that words begin with, and the words after its name."""
    two = " ".join(words[:2])
    if two in COMMANDS:
        return COMMANDS[two], list(words[2:])
    verb, rest = words[0], list(words[1:])
    if verb not in VERBS:
        raise _unknown(verb, rest)
    command = VERBS[verb]
    if command.run is None and rest and rest[0] not in ("-h", "--help"):
        actions = actions_of(verb)
        near = difflib.get_close_matches(rest[0], actions, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(actions)}"
        raise UsageError(f"unknown action {quoted(rest[0])}", hint)
    return command, rest


def _unknown(verb: str, rest: list[str]) -> UsageError:
    if verb in FORMER_NAMES:
        action = f"{verb} {rest[0]}" if rest else ""
        former, left = (action, rest[1:]) if action in FORMER_NAMES else (verb, rest)
        now = FORMER_NAMES[former]
        words = "estimate" if "--gpus" in left else now
        return UsageError(
            f"`flatout {former}` is now `flatout {now.removesuffix(' 1..8')}`",
            f"write `flatout {shlex.join([*words.split(), *left])}`",
        )
    near = difflib.get_close_matches(verb, VERBS, n=1, cutoff=0.6)
    near = [f"config {verb}"] if verb in actions_of("config") else near
    hint = f"did you mean `flatout {near[0]}`?" if near else "see `flatout --help` for the verbs"
    return UsageError(f"unknown verb {quoted(verb)}", hint)
