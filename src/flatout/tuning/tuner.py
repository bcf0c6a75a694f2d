"""One call of `tune`: which settings are tried, for how long, a row for each, and the choice at the end.

`search.py` says what to try next and what is best, `probe.py` tries it; here are the clock, the rows and the order of
things: the config's own kernels, then moments on the host where nothing fits.
"""

import dataclasses
import time
from collections.abc import Callable, Generator, Mapping, Sequence

import torch

import flatout
from flatout.config.load import LoadedConfig, with_values
from flatout.config.source import Source
from flatout.config.yaml_loader import format_value
from flatout.errors import ConfigError, DoesNotFitError, ResourceError, many
from flatout.host import candidates, core_clock, core_use, thread_words, usable_cores, whole_cores
from flatout.records import TuneProgress, TuneResult, TuneRow
from flatout.rows import FAINT, OWN, Block, ResultRow, Sentence, Sheet, Table, human_seconds, or_dash
from flatout.tuning.changes import fragment_of, kept_settings, tuned_settings, words_of
from flatout.tuning.practice_data import practice_config, practice_samples, scratch_folder
from flatout.tuning.probe import Probe, SampleProbe
from flatout.tuning.search import (
    Candidate,
    Memory,
    Search,
    SwitchSpace,
    Trial,
    Trials,
    choose,
    exhaustive,
    other_threads,
    quick,
)

SECONDS, COMPILED_SECONDS, EXHAUSTIVE_SECONDS = 120.0, 1200.0, 3600.0  # of a config that compiles; of all trials
SEARCHING = 0.8  # of the time; the rest is for confirming
# The best confirmed speed must be so much above the search's figure of the next one, or that is confirmed as well.
SURE = 1.05
MOST_CONFIRMED = 3
BUSY = 0.5  # cores
SMALL_CHUNK = 2048


def tune(
    loaded: LoadedConfig,
    *,
    memory: float | None = None,
    thorough: bool = False,
    seconds: float | None = None,
    progress: Callable[[TuneProgress], None] = lambda _: None,
) -> Generator[TuneRow | TuneResult]:
    """Tries settings for a config on this device and yields a row for each; the last record is the `TuneResult`.

    `memory` is a cap in GiB that emulates a smaller card, `thorough` tries everything. After `seconds` the best so far
    is taken. A switch that the user wrote stays as written.
    """
    _refuse_accumulation(loaded)
    budget = seconds or (EXHAUSTIVE_SECONDS if thorough else SECONDS)

    def say(text: str) -> None:
        progress(TuneProgress(number=1, text=text, seconds=0.0, budget=budget))

    with scratch_folder("flatout-tune-") as scratch:
        if not loaded.config.fine_tunes:
            limit = {} if memory is None else {"speed.memory_limit": memory}
            practice, described = practice_config(with_values(loaded, limit, Source("preset", "tune")), scratch, say)
            probe = Probe(practice, practice.config.data.model_dump(), memory)
            probe.corpus_bytes = None if loaded.config.data_kind == "stream" else 0  # of the run, which is checked
        else:
            samples = practice_samples(loaded, scratch, say)
            described = samples.described
            probe = SampleProbe(loaded, samples, memory)
        probe.check()
        try:
            yield from _Tuning(loaded, probe, described, seconds, progress).run(thorough)
        finally:
            probe.close()


def _refuse_accumulation(loaded: LoadedConfig) -> None:
    accumulation = kept_settings(loaded).get("accumulation")
    if accumulation is not None:
        raise ConfigError(
            f"{loaded.sources['speed.accumulation'].where}: speed.accumulation is {accumulation}, "
            "but tune chooses micro-batch and accumulation itself",
            "leave it out, or take it back with speed.accumulation=null",
        )


class _Tuning:
    """One call of `tune`: its clock, its rows, its trials."""

    def __init__(
        self,
        loaded: LoadedConfig,
        probe: Probe,
        data: str,
        seconds: float | None,
        progress: Callable[[TuneProgress], None],
    ) -> None:
        self.loaded, self.probe, self.data, self.progress = loaded, probe, data, progress
        self.began, self.cores = time.monotonic(), core_clock()
        self.seconds = seconds
        self.budget = SECONDS if seconds is None else seconds
        self.rows: dict[Candidate, TuneRow] = {}
        self.trials: dict[Candidate, Trial] = {}
        self.ended = "everything worth trying was tried"
        self.usable: int | None = None
        self.samples = loaded.config.chat.batch_samples if loaded.config.fine_tunes else None

    def run(self, thorough: bool) -> Generator[TuneRow | TuneResult]:
        probe = self.probe
        space = self._space()
        if self.seconds is None and (thorough or space.compile != "off"):
            self.budget = EXHAUSTIVE_SECONDS if thorough else COMPILED_SECONDS
        self._say("building the model")
        smallest = dataclasses.replace(
            space.candidate(1, space.checkpointings[-1], space.losses[0], space.loss_chunks[-1]),
            optimizer_offload=space.optimizer_offload or self._may_offload(),
        )
        try:
            probe.open(smallest)
        except DoesNotFitError as error:
            raise DoesNotFitError(
                f"even one {'sequence' if self.samples is None else 'row of samples'} with everything recomputed and "
                f"offloaded does not fit: {error.message}",
                self._smaller(),
            ) from error
        capacity = probe.capacity()
        method = exhaustive if thorough else quick
        found = Trials(Memory(probe.estimate, capacity))
        self.usable = found.memory.usable if probe.device.kind == "cuda" else None
        yield from self._drive(method(space, found), found)
        if found.best() is None and not space.optimizer_offload and self._may_offload():
            # Nothing fits with the moments on the card: keep them in the host's memory.
            yield from self._drive(method(dataclasses.replace(space, optimizer_offload=True), found), found)
        best = found.best()
        if best is not None and self._may_choose_threads():
            counts = [count for count in candidates(whole_cores()) if count != space.threads]
            yield from self._drive(other_threads(found, best.candidate, counts), found)
        yield self._result(capacity)

    def _may_choose_threads(self) -> bool:
        """On a CPU, unless the user has written a number, there or in the environment."""
        return self.probe.device.kind == "cpu" and "threads" not in self.probe.kept and thread_words() is None

    def _may_offload(self) -> bool:
        """Moments in 8 bits were asked for, and stay on the card: offloaded ones would be in fp32."""
        if "optimizer_offload" in self.probe.kept or not self.probe.settings.config.optim.kind.adamw:
            return False
        return self.probe.device.kind == "cuda" and self.probe.settings.config.speed.optimizer_state == "fp32"

    def _space(self) -> SwitchSpace:
        probe = self.probe
        asked = probe.settings.config.speed
        speed = probe.resolve(probe.settings)
        paths = ["plain"] if speed.compile != "off" else ["fused", "chunked", "plain"]
        losses = [speed.execution.loss, *(loss for loss in paths if loss != speed.execution.loss)]
        checkpointings: tuple[str, ...] = ("none", "selective", "full")
        if probe.device.kind != "cuda":  # there memory is not what limits, and both only cost time
            losses, checkpointings = losses[:1], (speed.execution.checkpointing,)
        chunks = (asked.loss_chunk, SMALL_CHUNK) if asked.loss_chunk > SMALL_CHUNK else (asked.loss_chunk,)
        losses = [asked.loss] if "loss" in probe.kept else losses
        checkpointings = (asked.checkpointing,) if "checkpointing" in probe.kept else checkpointings
        chunks = chunks[:1] if "loss_chunk" in probe.kept else chunks
        most = probe.kept.get("micro_batch", probe.sequences)
        return SwitchSpace(
            micro_batches=tuple(size for size in probe.micro_batches() if size <= most),
            checkpointings=checkpointings,
            losses=tuple(losses),
            loss_chunks=chunks if probe.device.kind == "cuda" else chunks[:1],
            kernels=speed.execution.kernels,
            compile=speed.compile,
            optimizer_offload=speed.optimizer_offload,
            context=probe.settings.config.model.context,
            threads=speed.threads if self._may_choose_threads() else asked.threads,
        )

    def _drive(self, search: Search, found: Trials) -> Generator[TuneRow]:
        """Runs a search to its end, or to the end of the time."""
        try:
            candidate = next(search)
            while True:
                if time.monotonic() - self.began > SEARCHING * self.budget and found.best() is not None:
                    self.ended = f"the {self.budget:.0f} seconds were over; --seconds gives more"
                    search.close()
                    return
                trial = self._try(candidate)
                yield self.rows[candidate]
                candidate = search.send(trial)
        except StopIteration:
            return

    def _try(self, candidate: Candidate) -> Trial:
        self._say(_text(candidate))
        began = time.monotonic()
        trial, timing, graphs = self.probe.attempt(candidate)
        if trial.status == "fits" and self.usable is not None and (trial.peak_bytes or 0) > self.usable:
            trial = dataclasses.replace(trial, status="over", reason="it runs, but leaves no margin")
        self.trials[candidate] = trial
        self.rows[candidate] = TuneRow(
            number=len(self.rows) + 1,
            status=trial.status,
            reason=trial.reason,
            accumulation=self.probe.accumulation(candidate),
            cuda_graphs=graphs,
            tokens_per_second=trial.tokens_per_second,
            milliseconds=None if timing is None else 1000 * timing.seconds,
            peak_bytes=trial.peak_bytes,
            estimate_bytes=self.probe.estimate(candidate),
            seconds=time.monotonic() - began,
            **dataclasses.asdict(candidate),
        )
        return trial

    def _confirmed(self) -> dict[Candidate, TuneRow]:
        """Rows by whole steps: of the choice, and of the next ones as long as they could be better and there is time.

        What fails then is out, and the next one is the choice. Nothing where time is too short for whole steps.
        """
        found: dict[Candidate, TuneRow] = {}
        tokens = self.probe.batch_tokens
        slower = 1.0  # how much longer than the search had thought whole steps turned out to be
        while len(found) < MOST_CONFIRMED:
            trial = choose(trial for candidate, trial in self.trials.items() if candidate not in found)
            if trial is None:
                break
            candidate, row = trial.candidate, self.rows[trial.candidate]
            left = self.budget - (time.monotonic() - self.began)
            if found:
                best = max(other.tokens_per_second or 0.0 for other in found.values())
                # A confirmation is three steps at least, and where it compiles again, about what the trial took.
                need = 3 * slower * tokens / max(trial.rate, 1e-9) + (row.seconds if candidate.compile != "off" else 0)
                if best >= SURE * trial.rate or need > left:
                    break
            self._say(f"confirming {_text(candidate)}")
            timing = self.probe.confirm(candidate, min(20.0, left) if found else max(2.0, min(20.0, left)))
            if timing is None:
                break
            if isinstance(timing, str):
                self.trials[candidate] = dataclasses.replace(trial, status="out_of_memory", reason=timing)
                continue
            slower = max(slower, timing.seconds * trial.rate / tokens)
            found[candidate] = dataclasses.replace(
                row,
                tokens_per_second=tokens / timing.seconds,
                milliseconds=1000 * timing.seconds,
                peak_bytes=None if row.peak_bytes is None else max(row.peak_bytes, timing.peak_bytes or 0),
            )
        return found

    def _result(self, capacity: int | None) -> TuneResult:
        """The choice: the best of those confirmed by whole steps, or of all where there was no time for that."""
        probe, confirmed = self.probe, self._confirmed()
        chosen = choose(
            dataclasses.replace(self.trials[one], tokens_per_second=row.tokens_per_second, peak_bytes=row.peak_bytes)
            for one, row in confirmed.items()
        )
        chosen = chosen or choose(self.trials.values())
        if chosen is None:
            raise ResourceError(
                f"nothing that was tried fits {probe.device.name}"
                + ("" if capacity is None else f" with {capacity / 2**30:.1f} GiB"),
                f"{self._smaller()}, or set speed.optimizer_state=8bit",
            )
        candidate = chosen.candidate
        row = confirmed.get(candidate, self.rows[candidate])
        others = [f"{_text(one)}: {confirmed[one].tokens_per_second:,.0f}" for one in confirmed if one != candidate]
        measured = "of whole steps" if self.samples is None else "measured again"
        beside = f"; tokens/s {measured} with {'; with '.join(others)}" if others else ""
        settings = tuned_settings(candidate, self.loaded)
        return TuneResult(
            chosen=row,
            words=words_of(settings),
            fragment=fragment_of(self.loaded, settings, row, probe.device.name, capacity),
            device=probe.device.name,
            capacity_bytes=capacity,
            batch_tokens=probe.batch_tokens,
            data=self.data,
            tried=len(self.rows),
            ended=self.ended + beside + _kept(probe),
            note=self._busy(),
            confirmed=candidate in confirmed,
            seconds=time.monotonic() - self.began,
            flatout=flatout.__version__,
            torch=torch.__version__,
            batch_samples=self.samples,
        )

    def _busy(self) -> str:
        """Whether others had a good part of the cores of a CPU meanwhile: without them, something else may be best."""
        used = core_use(self.cores, core_clock())
        if self.probe.device.kind != "cpu" or used is None or (used.others or 0.0) < BUSY:
            return ""
        return (
            f"others used {used.others:.1f} of {usable_cores():g} cores meanwhile; tune again when they are done, as "
            "another setting may then be faster"
        )

    def _smaller(self) -> str:
        """What to do where nothing fits."""
        lora = self.probe.settings.config.lora
        if self.samples is not None and lora.rank and lora.quantize == "none":
            return "take a smaller model or model.context, or lora.quantize=nf4"
        return "take a smaller model or model.context"

    def _say(self, text: str) -> None:
        seconds = time.monotonic() - self.began
        self.progress(TuneProgress(number=len(self.rows) + 1, text=text, seconds=seconds, budget=self.budget))


def _text(candidate: Candidate) -> str:
    parts = [f"micro-batch {candidate.micro_batch}", f"checkpointing {candidate.checkpointing}"]
    parts += [f"loss {candidate.loss}", f"kernels {candidate.kernels}"]
    parts += [f"compile {candidate.compile}"] if candidate.compile != "off" else []
    parts += [f"threads {candidate.threads}"] if candidate.threads != "auto" else []
    parts += ["optimizer on the host"] if candidate.optimizer_offload else []
    return ", ".join(parts)


def _kept(probe: Probe) -> str:
    words = [f"{name} {'at most ' if name == 'micro_batch' else ''}{format_value(v)}" for name, v in probe.kept.items()]
    return f"; kept as written: {', '.join(words)}" if words else ""


# --- what is shown ----------------------------------------------------------------------------------------------------

_STATUS = {"fits": "", "over": "no margin", "out_of_memory": "out of memory", "absent": "not here"}


def sheet_of(rows: Sequence[TuneRow], result: TuneResult | None) -> Sheet:
    """All rows, the fastest first, with the chosen one marked; then in a sentence the choice and the reason for it.

    All figures are the search's, so that they compare; the confirmed one of the chosen row stands behind it.
    """
    if not rows:
        return Sheet(blocks=[])
    best = max((row.tokens_per_second or 0.0 for row in rows if row.status == "fits"), default=0.0)
    varied = {
        "kernels": len({(row.kernels, row.compile) for row in rows}) > 1,
        "compile": len({(row.kernels, row.compile) for row in rows}) > 1,
        "threads": len({row.threads for row in rows}) > 1,
        "optimizer": any(row.optimizer_offload for row in rows),
    }
    ordered = sorted(rows, key=lambda row: (row.status != "fits", -(row.tokens_per_second or 0.0)))
    shown = [_shown(row, best, varied, result) for row in ordered]
    left = ("checkpointing", "loss", "kernels", "compile", "optimizer", " ")
    blocks: list[Block] = [Table(rows=shown, names="micro-batch", left=left, marks=True, numbers=True)]
    if result is not None:
        blocks += [Sentence(_sentence(result)), *([Sentence(f"note: {result.note}")] if result.note else [])]
    return Sheet(blocks=blocks)


def _shown(row: TuneRow, best: float, varied: Mapping[str, bool], result: TuneResult | None) -> ResultRow:
    own, rate = result is not None and row.number == result.chosen.number, row.tokens_per_second
    notes = [_STATUS[row.status], "graphs" if row.cuda_graphs else "", row.reason if row.status == "absent" else ""]
    if result is not None and own and result.confirmed:
        how = "whole steps" if result.batch_samples is None else "measured again"
        notes.insert(0, f"{how}: {result.chosen.tokens_per_second or 0.0:,.0f}")
    some = {"kernels": row.kernels, "compile": row.compile, "threads": str(row.threads)}
    some["optimizer"] = "host" if row.optimizer_offload else "device"
    cells = {
        "checkpointing": row.checkpointing,
        "loss": row.loss if row.loss == "plain" else f"{row.loss} {row.loss_chunk}",
        **{name: text for name, text in some.items() if varied[name]},
        "tokens/s": or_dash(rate, "{:,.0f}"),
        "of best": "-" if rate is None or not best else f"{rate / best:.1%}",
        "ms": or_dash(row.milliseconds, "{:,.1f}"),
        "peak GiB": or_dash(row.peak_bytes, _gib),
        "estimate": _gib(row.estimate_bytes),
        " ": ", ".join(note for note in notes if note),
    }
    tone = OWN if own else FAINT if row.status != "fits" else ""
    return ResultRow(name=f"{row.micro_batch} x {row.accumulation}", cells=cells, value=rate, tone=tone)


def _gib(value: int) -> str:
    return f"{value / 2**30:.2f}"


def _sentence(result: TuneResult) -> str:
    row = result.chosen
    threads = "" if row.threads == "auto" else f", threads {row.threads}"
    memory = ""
    if result.capacity_bytes is not None and row.peak_bytes is not None:
        memory = f", {_gib(row.peak_bytes)} of {result.capacity_bytes / 2**30:.1f} GiB"
    if result.batch_samples is not None:
        how = "of whole steps, measured again" if result.confirmed else "of whole steps"
    elif result.confirmed:
        how = "of whole steps; the table's are put together from shorter ones"
    else:
        how = "put together from shorter steps"
    return (
        f"chose micro-batch {row.micro_batch} x {row.accumulation}, checkpointing {row.checkpointing}, "
        f"loss {row.loss}{threads}: {row.tokens_per_second or 0.0:,.0f} tokens/s ({how}){memory}, "
        f"on {result.device}; {many(result.tried, 'trial')} in {human_seconds(result.seconds)} on {result.data}; "
        f"{result.ended}"
    )


def progress_line(progress: TuneProgress) -> str:
    used = f"{human_seconds(progress.seconds)} of at most {human_seconds(progress.budget)}"
    return f"trial {progress.number}: {progress.text} ({used})"
