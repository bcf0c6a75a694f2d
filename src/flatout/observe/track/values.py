"""What a tracker is told of a record: numbers and texts by tag. One list for all of them, so that they agree.

Contract: a scalar is a finite float; values that are not finite are named apart, since trackers draw them as gaps,
zeros or not at all. Text is stripped of control characters. Settings that look like secrets are masked: a tracker may
live on somebody else's machine.
"""

import dataclasses
import math
import re
from typing import Any

from flatout import records
from flatout.observe.human import exposed_share, human_parameters, human_seconds, printable
from flatout.records import EndRecord, Record, RunInfo, slowest_over_median

GIB = 2**30
_OF_LAYERS = {"horizon_tokens": "horizon", "magnitude": "magnitude", "period_tokens": "period"}
_SECRET = re.compile(r"(^|_)(api_?key|secret|password|passwd|credentials?|(access|auth|hf|bearer)_?token)(_|$)", re.I)
_IN_ADDRESS = re.compile(r"(\w+://)[^/@\s]+@")


@dataclasses.dataclass(frozen=True)
class Values:
    """`odd` are the values that are not finite, by tag."""

    step: int
    scalars: dict[str, float]
    texts: dict[str, str]
    odd: dict[str, float]

    def odd_notes(self, told: set[str]) -> list[str]:
        """What is not finite has no place on a curve; the first of each tag, which then is `told`, is put in words."""
        notes = [f"{tag} is {value} at step {self.step}" for tag, value in self.odd.items() if tag not in told]
        told.update(self.odd)
        return notes


def code_block(text: str) -> str:
    """Markdown that shows text as it is: no link, picture or tag in it comes to life."""
    return "\n".join(f"    {line}" for line in text.split("\n"))


def values_of(record: Record) -> Values:
    step = record.start_step if isinstance(record, RunInfo) else record.step
    numbers = {tag: float(value) for tag, value in _numbers(record).items() if value is not None}
    return Values(
        step=step,
        scalars={tag: value for tag, value in numbers.items() if math.isfinite(value)},
        texts={tag: printable(text) for tag, text in _texts(record).items()},
        odd={tag: value for tag, value in numbers.items() if not math.isfinite(value)},
    )


def safe_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config without secrets: by the name of the field, and passwords in addresses."""
    return {
        name: "(hidden)" if isinstance(value, str) and _SECRET.search(name) else _safe(value)
        for name, value in config.items()
    }


def _safe(value: Any) -> Any:
    if isinstance(value, dict):
        return safe_config(value)
    if isinstance(value, list):
        return [_safe(item) for item in value]
    return _IN_ADDRESS.sub(r"\1(hidden)@", printable(value)) if isinstance(value, str) else value


def _numbers(record: Record) -> dict[str, float | None]:
    match record:
        case records.StepRecord():
            waited = None if record.data_seconds is None or not record.seconds else record.data_seconds / record.seconds
            return {
                "loss/train": record.loss,
                "optimizer/learning_rate": record.learning_rate,
                "optimizer/gradient_norm": record.grad_norm,
                "optimizer/parameter_norm": record.parameter_norm,
                **{f"optimizer/update_ratio/{rule}": ratio for rule, ratio in (record.update_ratio or {}).items()},
                "optimizer/loss_scale": record.loss_scale,
                "optimizer/skipped": None if record.applied else 1.0,
                "throughput/tokens_per_second": record.tokens_per_second,
                "throughput/mfu": record.mfu,
                "throughput/step_seconds": record.seconds,
                "throughput/data_wait_share": waited,
                "memory/peak_gib": _gib(record.memory_bytes),
                "memory/reserved_gib": _gib(record.reserved_bytes),
                "progress/tokens": float(record.tokens),
                "progress/epoch": record.epoch,
            }
        case records.EvalRecord():
            return {
                "loss/validation": record.loss,
                "loss/validation_perplexity": record.perplexity,
                "loss/validation_bits_per_byte": record.bits_per_byte,
            }
        case records.EpochRecord():
            return {"loss/epoch_mean": record.mean_loss}
        case records.SpanRecord():
            steps = max(record.steps, 1)
            spans = {f"spans/{_tag(name)}_seconds_per_step": value / steps for name, value in record.seconds.items()}
            return spans | _of_ranks(record)
        case records.MachineRecord():
            return {
                "machine/utilisation": record.utilisation,
                "machine/memory_gib": _gib(record.memory_bytes),
                "machine/power_watts": record.power_watts,
                "machine/temperature": record.temperature,
                "machine/clock_mhz": record.clock_mhz,
                "machine/throttled": None if record.utilisation is None else float(bool(record.throttled)),
                "host/cores_busy": record.cores_busy,
                "host/cores_others": record.cores_others,
                "host/threads_waiting": record.threads_waiting,
                "host/load": record.load,
                "host/process_gib": _gib(record.process_bytes),
                "host/memory_gib": _gib(record.host_bytes),
                "host/swap_gib": _gib(record.swap_bytes),
            }
        case records.EigenstateRecord():
            return {
                f"eigenstates/{tag}_layer_{layer.layer:02d}": getattr(layer, quantity).get("50%")
                for layer in record.layers
                for tag, quantity in _OF_LAYERS.items()
            }
        case records.CheckpointRecord():
            return {"checkpoint/seconds": record.seconds, "checkpoint/gib": _gib(record.bytes)}
        case EndRecord():
            return {"loss/best_validation": record.best_loss}
        case _:
            return {}


def _of_ranks(record: records.SpanRecord) -> dict[str, float | None]:
    seconds = record.rank_seconds
    if len(seconds) < 2:
        return {}
    return {
        "ranks/slowest_over_median": slowest_over_median(seconds)[1],
        "ranks/waiting_share": exposed_share(record.seconds.get("reduction", 0.0), seconds[0]),
    }


def _texts(record: Record) -> dict[str, str]:
    match record:
        case RunInfo():
            size = human_parameters(record.parameters, record.trained_parameters, record.table_parameters)
            lines = [f"flatout {record.flatout}, torch {record.torch}", f"{record.family}, {size}, on {record.device}"]
            used = "\n".join(f"{item.name}: {item.used}" for item in record.features)
            return {"run": "\n".join([*lines, used])}
        case records.SampleRecord():
            return {"samples": record.prompt + record.text}
        case records.NoticeRecord():
            return {"notices": record.message}
        case EndRecord():
            return {"notices": f"{record.reason} at step {record.step} after {human_seconds(record.seconds)}"}
        case _:
            return {}


def _gib(value: int | None) -> float | None:
    return None if value is None else value / GIB


def _tag(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)[:60] or "unnamed"
