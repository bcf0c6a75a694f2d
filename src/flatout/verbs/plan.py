"""The verb plan: words in, what a run is like on many GPUs out. Nothing is measured, and no GPU is needed.

Contract: as in `flatout.cli`. Nothing is written but the picture that --plot names.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.config.sizes import SIZED
from flatout.errors import UsageError
from flatout.tuning.cluster import CARDS, FAILURE_HOURS, GB, LLAMAS, Card, card_here, card_named, llama_words
from flatout.verbs.measuring import add_overwrite, picture_target
from flatout.words import Parser, add_config, load_pretraining, one_line, quoted

if TYPE_CHECKING:
    from flatout.records import BenchRow
    from flatout.tuning.many_gpus import Rate

MOST = 2**20  # GPUs
LLAMAS_STAND_ON, SMALL = "gpt-124m", "modern"  # presets for a --size without a config


def plan(words: list[str]) -> int:
    parsed = _parser().parse_words(words)
    counts = _counts(parsed.gpus)
    picture = None if parsed.plot is None else picture_target(Path(parsed.plot), "--plot", overwrite=parsed.overwrite)
    named = None if parsed.gpu is None else (parsed.gpu, card_named(parsed.gpu))
    size: str | None = parsed.size
    llama = None if size is None or size.lower() not in LLAMAS else size.lower()
    if llama and parsed.config not in SIZED:
        parsed.size = None
        parsed.overrides = llama_words(llama, parsed.overrides, batch=not parsed.config_given) + parsed.overrides
        parsed.config = parsed.config if parsed.config_given else LLAMAS_STAND_ON
    elif size is not None:
        parsed.config = parsed.config if parsed.config_given else SMALL
        size = f"{parsed.config} {size}"
    loaded = load_pretraining(parsed, "plan")
    if llama and loaded.size is not None:
        raise UsageError(f"--size {size} is a Llama's, and {parsed.config} has its own sizes", "leave the config out")
    name, card = named or card_here() or ("h100", CARDS["h100"])
    from flatout.observe.measured.plan import print_plan
    from flatout.tuning.cluster import Cluster
    from flatout.tuning.many_gpus import on_card, planned_parameters
    from flatout.tuning.many_gpus import plan as look

    before, loaded = len(loaded.notices), on_card(loaded, card)
    for notice in loaded.notices[before:]:
        print(f"note: {one_line(notice)}", file=sys.stderr)

    cluster = Cluster(
        card=card,
        per_host=parsed.per_host,
        inside=card.inside if parsed.intra is None else parsed.intra * GB,
        across=card.across if parsed.inter is None else parsed.inter * GB,
    )
    rate = _rate(parsed, name, card, planned_parameters(loaded))
    told = {"disk": parsed.disk * GB, "restart": parsed.restart, "failure_hours": parsed.failure_hours}
    body = {"size": size, **look(loaded, cluster, rate, counts, **told).to_json()}
    if parsed.json:
        print(json.dumps(body, ensure_ascii=False, allow_nan=False), flush=True)
    else:
        print_plan(body)
    if picture is not None:
        from flatout.observe.measured.plan import draw_plan

        draw_plan(body, picture, overwrite=parsed.overwrite)
        if not parsed.json:
            print(f"drew {picture}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        "plan",
        "Memory, communication, step time, checkpoints and interruptions of a run on many GPUs, for data parallel, "
        "FSDP2 and hybrid sharding. Measures nothing and needs no GPU.",
    )
    add_config(parser, size=f"; a Llama of {', '.join(LLAMAS)}")
    parser.add_argument(
        "--gpus", default="1..8", metavar="A..B", help="8..64 (doubling), or a list: 8,24; default 1..8"
    )
    parser.add_argument("--gpu", metavar="NAME", help=f"the card: {', '.join(CARDS)}; default this machine's, or h100")
    parser.number("--per-host", 1, 1024, default=8, help="GPUs of a host; default 8")
    parser.number("--intra", 0.01, 1e5, metavar="GB/S", help="what a collective reaches inside a host, for each GPU")
    parser.number("--inter", 0.001, 1e5, metavar="GB/S", help="what it reaches between hosts, for each GPU")
    parser.number("--rate", 1.0, 1e9, metavar="TOKENS/S", help="of one GPU with this model; default: from --mfu")
    parser.number("--mfu", 0.01, 1.0, help="share of the peak rate; default: rows of `flatout bench` here, else known")
    parser.number("--disk", 0.001, 1e4, default=2.0, metavar="GB/S", help="what each host writes; default 2")
    parser.number("--restart", 0.0, 1e6, default=300.0, metavar="SECONDS", help="after an interruption; default 300")
    hours = f"GPU-hours between interruptions; default {FAILURE_HOURS:,.0f} (Llama 3 405B)"
    parser.number("--failure-hours", 1.0, 1e12, default=FAILURE_HOURS, metavar="HOURS", help=hours)
    parser.add_argument("--plot", metavar="FILE", help="draw it to this PNG or SVG file")
    add_overwrite(parser)
    parser.flag("--json", "print one JSON line instead of the tables")
    return parser


def _counts(text: str) -> list[int]:
    """8..64 is 8, 16, 32, 64; a list is what it says."""
    if found := re.fullmatch(r"(\d{1,7})\.\.(\d{1,7})", text, re.ASCII):
        low, high = int(found[1]), int(found[2])
        counts = [low * 2**power for power in range(21) if 0 < low * 2**power <= high]
    elif re.fullmatch(r"\d{1,7}(,\d{1,7}){0,31}", text, re.ASCII):
        counts = sorted({int(word) for word in text.split(",")})
    else:
        counts = []
    if not counts or not 1 <= counts[0] <= counts[-1] <= MOST:
        raise UsageError(f"--gpus {quoted(text)} names no numbers of GPUs", "write 8..64, or a list such as 8,16,24")
    return counts


def _rate(parsed: argparse.Namespace, name: str, card: Card, parameters: int) -> "Rate":
    """How fast one GPU is: as told, as measured here, or as known of the card."""
    from flatout.tuning.many_gpus import Rate

    if parsed.rate is not None and parsed.mfu is not None:
        raise UsageError("--rate and --mfu say the same thing twice", "leave one of them out")
    if parsed.rate is not None:
        return Rate(tokens_per_second=parsed.rate, source="as told by --rate")
    if parsed.mfu is not None:
        return Rate(mfu=parsed.mfu, source="as told by --mfu")
    measured = max(_measured(name, parameters), key=lambda found: found[1].mfu or 0.0, default=None)
    if measured is not None:
        path, row = measured
        return Rate(mfu=row.mfu, source=f"measured here: rung {row.rung} of {row.config} in {path}")
    if card.mfu is None:
        raise UsageError(
            f"nobody has told us what share of its peak rate {card.name} reaches in training",
            "give --rate, tokens/s of one GPU with this model, or --mfu such as 0.4; `flatout bench` there measures it",
        )
    return Rate(mfu=card.mfu, source=card.mfu_source)


def _measured(name: str, parameters: int) -> "Iterator[tuple[Path, BenchRow]]":
    """Rows of `flatout bench` in its usual place, of this card and a model that is not much smaller.

    A small model keeps a card less busy, up to some hundred million parameters.
    """
    from flatout.records import bench_row_from_json

    for path in sorted(Path("bench").glob("*/bench.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = bench_row_from_json(line)
            except ValueError:  # another version's, or torn: `flatout bench` tells of it
                continue
            large = row.parameters >= min(parameters / 4, 1e8)
            if row.status == "green" and row.mfu and large and name.upper() in row.device.upper():
                yield path, row
