"""Whether `flatout tune lr` finds a good rate for adapters: whole runs with its choice against a grid of rates.

    python benchmarks/lora_rate.py [SECTION.FIELD=VALUE ...] [--base WORDS] [--rows KIND] >> benchmarks/lora_rate.jsonl

A small GPT first learns the bytes of Shakespeare. Then adapters on it learn rows of speeches, of which a user says one
and the assistant the next: `speeches` as the base knows them, `shouted` in capitals, which it has to learn. WORDS are
settings of the base in one argument, such as "model.width=512 train.steps=2000"; the other settings are of the
fine-tuning. `--model` is a base that is there already: a folder, or a run of ours. `--seeds 0` runs the grid alone,
`--grid ""` the range tests alone.

Rows: `base` (its validation loss), `choice` (one range test: seed, rates, losses, every suggestion), `run` (a whole
fine-tuning run: rate, validation loss), and `summary`: the loss with the first seed's choice less the lowest of the
grid. On the error output the summary in words. All runs have the first seed, so they see the same data.
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

GRID = "1e-5,3.2e-5,1e-4,3.2e-4,1e-3,3.2e-3,1e-2"
CLOSE = 0.01
QUIET = ["eval.every=0", "eval.sample_tokens=0", "checkpoint.every=0"]
BASE = ["data.tokenizer=bytes", "model.layers=2", "model.width=64", "model.heads=2", "model.context=256"]
BASE += ["optim.learning_rate=8e-3", "train.steps=300"]
TUNING = ["chat.template=plain", "model.context=256", "train.epochs=2.0"]
LONGEST = 70  # characters of a speech: two of them and the template fit the context


def write_rows(file: Path, kind: str, count: int) -> None:
    """Pairs of speeches that follow each other, always the same ones."""
    from flatout.corpus.shipped import shakespeare

    speeches = [speech.strip() for speech in shakespeare().read_text(encoding="utf-8").split("\n\n")]
    pairs = [pair for pair in itertools.pairwise(speeches) if max(map(len, pair)) <= LONGEST]
    with file.open("w", encoding="utf-8") as out:
        for asked, said in random.Random(1).sample(pairs, min(count, len(pairs))):
            said = said.upper() if kind == "shouted" else said
            print(json.dumps({"prompt": asked, "completion": said}), file=out)


def last_loss(config: str, words: Iterable[str], folder: Path) -> float | None:
    """The validation loss at the end of a run; None if it diverged."""
    from flatout import api
    from flatout.config.load import load_config
    from flatout.errors import DivergedError
    from flatout.records import EvalRecord

    loss = None
    try:
        for record in api.train(load_config(config, [*words, *QUIET, f"output.folder={folder}"])):
            loss = record.loss if isinstance(record, EvalRecord) else loss
    except DivergedError as error:
        print(error.message, file=sys.stderr)
        return None
    return loss


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--base", default="")
    parser.add_argument("--model", default=None)
    parser.add_argument("--rows", choices=("speeches", "shouted"), default="speeches")
    parser.add_argument("--count", type=int, default=440, help="rows")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="of a range test")
    parser.add_argument("--grid", default=GRID)
    return parser.parse_args()


def main() -> None:
    from flatout.config.load import load_config
    from flatout.device import detect_device
    from flatout.tuning.lr_range import find_rate
    from flatout.tuning.plan import machine_of

    parsed = arguments()
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    facts = {"rows": parsed.rows, "base": parsed.model or parsed.base, "words": parsed.words, "commit": commit}

    def say(row: dict) -> None:
        print(json.dumps({**row, **facts}), flush=True)

    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        if parsed.model is None:
            words = [*BASE, *parsed.base.split(), f"data.folder={scratch / 'text'}"]
            say({"type": "base", "loss": last_loss("shakespeare-char", words, scratch / "base")})
        write_rows(scratch / "rows.jsonl", parsed.rows, parsed.count)
        words = [f"model.init_from={parsed.model or scratch / 'base'}", f"chat.source={scratch / 'rows.jsonl'}"]
        words += [f"data.folder={scratch / 'samples'}", *TUNING, *parsed.words]
        config, choices = load_config("lora", words).config, []
        facts["machine"] = machine_of(detect_device(config.speed.device))
        first = config.train.seed
        for seed in range(first, first + parsed.seeds):
            found = find_rate(load_config("lora", [*words, f"train.seed={seed}"]), steps=parsed.steps)
            choices.append(found.rate)
            row = {"type": "choice", "seed": seed, "rate": found.rate, "seconds": found.seconds, "ended": found.ended}
            row |= {"suggestions": {one.name: one.rate for one in found.reading.suggestions}}
            say({**row, "points": [[point.rate, round(point.loss, 4)] for point in found.points]})
        losses: list[float | None] = []
        rates = [*choices[:1], *map(float, parsed.grid.split(",") if parsed.grid else [])]
        for number, rate in enumerate(rates):
            began = time.perf_counter()
            losses.append(last_loss("lora", [*words, f"optim.learning_rate={rate!r}"], scratch / f"run-{number}"))
            row = {"type": "run", "rate": rate, "loss": losses[-1], "chosen": bool(choices) and number == 0}
            say({**row, "seconds": time.perf_counter() - began})
    if not choices or not parsed.grid:
        return
    finite = [loss for loss in losses[1:] if loss is not None]
    over = losses[0] - min(finite) if losses[0] is not None and finite else None
    say({"type": "summary", "choices": choices, "loss": losses[0], "best_of_grid": min(finite), "over_best": over})
    close = over is not None and over <= CLOSE
    told = "it diverged" if over is None else f"{over:+.4f} over the best of the grid"
    print(f"choices {choices}: {told}, {'within' if close else 'NOT within'} {CLOSE}", file=sys.stderr)


if __name__ == "__main__":
    main()
