"""What a run is fine-tuned from and on: the base, its chat template, the rows.

The idea: what `flatout finetune` would do before its first step is done here, with the same functions, in a temporary
folder. So what is fine here is fine there, and an error there is a finding here, in the same words. Of a large source
only the first rows are read. Nothing is fetched from the hub: a base that is not here ends the visit, and that is said.
Needs a torch that works.
"""

import itertools
import json
from collections.abc import Generator, Iterator
from pathlib import Path

from flatout.checkpoints.base_model import Base, open_base
from flatout.checkpoints.run_folder import is_checkpoint
from flatout.config.load import LoadedConfig, with_values
from flatout.config.schema import ChatConfig, ModelConfig
from flatout.config.source import Source
from flatout.corpus.document import Row
from flatout.corpus.readers import read_rows
from flatout.corpus.sources import find_files
from flatout.data.make_samples import row_files
from flatout.data.sample_data import SampleData
from flatout.diagnose.check_run import FETCHED
from flatout.errors import UserError, many
from flatout.finding import Check, Finding, finding_of
from flatout.model.count import parameter_count
from flatout.model.hub_find import is_within_reach
from flatout.model.hub_weights import inventory
from flatout.model.quantize import check_quantizing
from flatout.resolve.opening import why_samples_are_made
from flatout.resolve.plan import RunPlan

_WHOLE, _WHOLE_QUICK = 32 * 2**20, 4 * 2**20  # bytes of a source that is read to its end
FIRST = 2000  # rows of a larger one


def look_at_chat(asked: LoadedConfig, temporary: Path, *, quick: bool) -> Generator[Finding, None, LoadedConfig | None]:
    """Yields what was found of the base, and returns the settings with samples that may be made in a temporary folder;
    None where there is no base to make them for."""
    base = yield from _check_base(asked.config.model)
    if base is None:
        yield from _check_sources(asked.config.chat)
        return None
    try:
        _, why = why_samples_are_made(asked.config, written=asked.sources["model.context"])
    except UserError:  # which opening them meets again, and tells
        return asked
    if not why:
        return asked
    chat, most = asked.config.chat, _WHOLE_QUICK if quick else _WHOLE
    found = {"source": chat.source, "val_source": chat.val_source}
    cut = {name: _head(name, source, temporary, most) for name, source in found.items() if source is not None}
    values = {f"chat.{name}": str(path) for name, path in cut.items() if path is not None}
    return with_values(asked, {**values, "data.folder": str(temporary / "samples")}, Source("preset", "the doctor"))


def check_samples(plan: RunPlan, asked: ChatConfig) -> Iterator[Finding]:
    """The rows, and what they are written by."""
    data = plan.data
    assert isinstance(data, SampleData), "there is a chat.source"
    counts, readings = data.sample_set.manifest["counts"], data.sample_set.manifest.get("reading") or [{}]
    rows = counts.get("rows", 0) - counts.get("rows_not_used", 0)
    part = "" if plan.chat.source == asked.source else f"; only the first {FIRST:,} rows were read"
    reading = readings[0].get("format", "conversations")
    yield Check("data", "rows").ok(f"{asked.source}: {many(rows, 'row')}, read as {reading}{part}")
    template = "none: samples are bare text" if data.template is None else data.template.name
    if not any(check.name == "template" for check in plan.checks):
        yield Check("data", "template").ok("the model's own" if template == "model" else template)
    if plan.lora.quantize != "none":
        try:
            check_quantizing(plan.speed.device.torch_device)
        except UserError as error:
            yield finding_of(error, "config", "lora.quantize")


def _check_base(model: ModelConfig) -> Generator[Finding, None, Base | None]:
    """The model that is trained, as far as it can be seen without reading all of its weights."""
    name = model.init_from
    assert name is not None, "checked by the config"
    if not is_within_reach(name):
        yield Check("data", "base").warn(
            f"{name} is not on this machine",
            f"{FETCHED} Without a network, name a folder with model.init_from.",
        )
        return None
    try:
        base = open_base(name, model.context)
        if not is_checkpoint(base.description.folder):  # those of ours have been hashed
            inventory(base.description)
    except UserError as error:
        yield finding_of(error, "data", "base")
        return None
    size = parameter_count(base.description.config, base.description.vocab)
    kind, dtype = base.description.model_type, base.description.dtype
    stored = "" if dtype is None else f", in {dtype}"
    yield Check("data", "base").ok(f"{base.name}: {kind} with {size:,} parameters{stored}")
    return base


def _check_sources(chat: ChatConfig) -> Iterator[Finding]:
    """Whether there is anything to read rows from; without a base that is all that can be said of it."""
    for field, source in {"chat.source": chat.source, "chat.validation": chat.val_source}.items():
        if source is not None:
            try:
                files = row_files(source, field)
            except UserError as error:
                yield finding_of(error, "data", "rows")
            else:
                size = sum(file.bytes for file in files) / 1e6
                yield Check("data", "rows").ok(f"{source}: {many(len(files), 'file')}, {size:,.1f} MB, not read")


def _head(name: str, source: str, temporary: Path, most: int) -> Path | None:
    """A file with the first rows of a source that is too large to be read whole; None for one that is not."""
    files = find_files(source).files
    if sum(file.bytes for file in files) <= most:
        return None
    path = temporary / f"{name}.jsonl"
    rows = itertools.chain.from_iterable(read_rows(file) for file in files)
    with path.open("w", encoding="utf-8") as target:
        for row in itertools.islice(rows, FIRST):
            if isinstance(row, Row):
                target.write(json.dumps(row.value, default=str) + "\n")
    return path
