"""Asked, used, why: each switch of the `speed` section meets the device here.

A switch this machine cannot serve is an error when the user wrote it, and a fallback with a reason when a preset or a
default did. Nothing falls back in silence: every answer becomes a `Feature` of the run's first record.
"""

import dataclasses
import importlib.util
from collections.abc import Callable

import torch

from flatout.config.schema import RunConfig, micro_batch_of
from flatout.device import Device
from flatout.errors import HardwareError
from flatout.records import Feature

DEVICE_LOADER_BYTES = 2**31  # a corpus up to this size lives on the GPU by default


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """What really runs."""

    device: Device
    precision: str
    attention: str
    compile: bool
    fused_optimizer: bool
    loader: str
    workers: int
    micro_batch: int
    accumulation: int
    pad_vocab: int
    checkpointing: bool
    features: tuple[Feature, ...]


def resolve_speed(config: RunConfig, device: Device, corpus_bytes: int | None, written: Callable[[str], bool]) -> Speed:
    """`written(path)` tells whether the user wrote a field, in a file or on the command line.

    `corpus_bytes` is the size of the tokens, None where they are streamed.
    """
    asked = config.speed
    features: list[Feature] = []

    def settle(name: str, wanted: str, used: str, why: str = "") -> str:
        if why and wanted not in ("auto", used) and written(f"speed.{name}"):
            raise HardwareError(f"speed.{name} is {wanted}, but {why}", f"set speed.{name}=auto, or {used}")
        features.append(Feature(name=name, asked=wanted, used=used, why=why))
        return used

    settle("device", asked.device, str(device.torch_device))
    precision = settle("precision", asked.precision, *_precision(asked.precision, device))
    attention = settle("attention", asked.attention, "reference" if asked.attention == "reference" else "sdpa")
    compiled = settle("compile", asked.compile, *_compile(asked.compile, device))
    fused = settle("fused_optimizer", asked.fused_optimizer, *_fused(asked.fused_optimizer, device))
    loader = settle("loader", asked.loader, *_loader(asked.loader, device, corpus_bytes))
    size, count = micro_batch_of(config)
    wanted = "null" if asked.micro_batch is None else str(asked.micro_batch)
    why = "the largest divisor of the batch" if asked.micro_batch not in (None, size) else ""
    features.append(Feature(name="micro_batch", asked=wanted, used=str(size), why=why))
    settle("accumulation", "null" if asked.accumulation is None else str(asked.accumulation), str(count))
    settle("pad_vocab", str(asked.pad_vocab), str(asked.pad_vocab))
    settle("checkpointing", asked.checkpointing, asked.checkpointing)
    used_workers = asked.workers if loader == "host" else 0
    why = "tokens already live on the device" if loader == "device" else ""
    features.append(Feature(name="workers", asked=str(asked.workers), used=str(used_workers), why=why))
    return Speed(
        device=device,
        precision=precision,
        attention=attention,
        compile=compiled == "on",
        fused_optimizer=fused == "on",
        loader=loader,
        workers=used_workers,
        micro_batch=size,
        accumulation=count,
        pad_vocab=asked.pad_vocab,
        checkpointing=asked.checkpointing == "full",
        features=tuple(features),
    )


def _precision(asked: str, device: Device) -> tuple[str, str]:
    if device.kind == "cuda":
        if device.bf16:
            return ("bf16" if asked == "auto" else asked), ""
        if asked in ("bf16", "tf32"):
            return "fp16", f"{device.name} (capability {device.capability}) has no {asked} matrix units"
        return ("fp16", "") if asked == "auto" else (asked, "")
    if device.kind == "mps":
        return ("fp32", "") if asked in ("auto", "fp32") else ("fp32", f"{asked} is not tested on MPS")
    if asked in ("auto", "fp32"):
        return "fp32", ""
    if asked == "bf16":  # right everywhere, fast where the CPU has matrix units for it
        return "bf16", ""
    return "fp32", f"a CPU has no {asked} products"


def _compile(asked: str, device: Device) -> tuple[str, str]:
    if asked == "off":
        return "off", ""
    if asked == "auto" and device.kind != "cuda":
        return "off", f"not worth its start-up on {device.kind}"
    if device.kind == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "off", "triton is not installed"
        if device.capability is not None and device.capability < (7, 0):
            return "off", f"{device.name} is older than the compiler supports"
    reason = compile_failure(device.torch_device)
    return ("on", "") if reason is None else ("off", reason)


def compile_failure(device: torch.device) -> str | None:
    """Why torch.compile does not work here, or None. Compilation is lazy: only a call shows whether it works."""
    try:
        doubled = torch.compile(lambda x: (x * 2).sum())(torch.ones(4, device=device))
        return None if float(doubled) == 8.0 else "torch.compile gave a wrong result"
    except Exception as error:  # noqa: BLE001 - any failure of a foreign compiler means: run without it, and say why
        first_line = str(error).strip().partition("\n")[0][:120]
        return f"torch.compile failed: {type(error).__name__}: {first_line}"


def _fused(asked: str, device: Device) -> tuple[str, str]:
    if asked == "off":
        return "off", ""
    return ("on", "") if device.fused_optimizer else ("off", f"torch has no fused AdamW on {device.kind}")


def _loader(asked: str, device: Device, corpus_bytes: int | None) -> tuple[str, str]:
    if corpus_bytes is None:
        return "host", "" if asked == "host" else "the text is streamed"
    if asked != "auto":
        return asked, ""
    if device.kind != "cuda":
        return "host", ""
    if corpus_bytes > DEVICE_LOADER_BYTES:
        return "host", f"the corpus has {corpus_bytes / 2**30:.1f} GiB"
    return "device", ""
