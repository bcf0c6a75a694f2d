"""Asked, used, why: each switch of the `speed` section meets the device here.

A switch this machine cannot serve is an error when the user wrote it, and a fallback with a reason when a preset or a
default did. Nothing falls back in silence: every answer becomes a `Feature` of the run's first record.
"""

import dataclasses
import importlib.util
from collections.abc import Callable

import torch

from flatout.config.schema import ModelConfig, RunConfig, SpeedConfig, micro_batch_of
from flatout.device import Device
from flatout.errors import HardwareError
from flatout.model.execution import Execution
from flatout.records import Feature

DEVICE_LOADER_BYTES = 2**31  # a corpus up to this size lives on the GPU by default


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """What really runs."""

    device: Device
    precision: str
    execution: Execution
    compile: str
    cuda_graphs: bool
    fused_optimizer: bool
    optimizer_state: str
    optimizer_offload: bool
    loader: str
    workers: int
    micro_batch: int
    accumulation: int
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

    def switch(name: str, wanted: bool, reason: str | None) -> bool:
        """A plain true or false that some machines or models cannot have."""
        used = wanted and reason is None
        return settle(name, _word(wanted), _word(used), "" if used == wanted else reason or "") == "true"

    settle("device", asked.device, str(device.torch_device))
    precision = settle("precision", asked.precision, *_precision(asked.precision, device))
    kernels = settle("kernels", asked.kernels, *_kernels(asked.kernels, device, config.model))
    residual = settle("residual", asked.residual, *_residual(asked.residual, precision, kernels))
    fp8 = settle("fp8", _words(asked.fp8), *_fp8(asked.fp8, device, kernels))
    attention = settle("attention", asked.attention, *_attention(asked.attention, device, precision, config))
    fused_qkv = switch("fused_qkv", asked.fused_qkv, None)
    compiled = settle("compile", asked.compile, *_compile(asked.compile, device, kernels))
    loss = settle("loss", asked.loss, *_loss(asked.loss, device, kernels))
    settle("loss_chunk", str(asked.loss_chunk), str(asked.loss_chunk))
    fused = settle("fused_optimizer", asked.fused_optimizer, *_fused(asked, device))
    settle("optimizer_state", asked.optimizer_state, asked.optimizer_state)
    offload = switch("optimizer_offload", asked.optimizer_offload, _no_offload(device))
    loader = settle("loader", asked.loader, *_loader(asked.loader, device, corpus_bytes))
    size, count = micro_batch_of(config)
    wanted = "null" if asked.micro_batch is None else str(asked.micro_batch)
    why = "the largest divisor of the batch" if asked.micro_batch not in (None, size) else ""
    features.append(Feature(name="micro_batch", asked=wanted, used=str(size), why=why))
    settle("accumulation", "null" if asked.accumulation is None else str(asked.accumulation), str(count))
    settle("pad_vocab", str(asked.pad_vocab), str(asked.pad_vocab))
    settle("checkpointing", asked.checkpointing, asked.checkpointing)
    activation_offload = switch("activation_offload", asked.activation_offload, _no_offload(device))
    graphs = settle("cuda_graphs", asked.cuda_graphs, *_cuda_graphs(asked.cuda_graphs, device, compiled))
    used_workers = asked.workers if loader == "host" else 0
    why = "tokens already live on the device" if loader == "device" else ""
    features.append(Feature(name="workers", asked=str(asked.workers), used=str(used_workers), why=why))
    settle("expandable_segments", asked.expandable_segments, *_expandable(asked.expandable_segments, device))
    limit = "null" if asked.memory_limit is None else f"{asked.memory_limit:g}"
    settle("memory_limit", limit, *((limit, "") if device.kind == "cuda" or limit == "null" else ("null", _NOT_CUDA)))
    return Speed(
        device=device,
        precision=precision,
        execution=Execution(
            attention=attention,
            kernels=kernels,
            residual=residual,
            fused_qkv=fused_qkv,
            loss=loss,
            loss_chunk=asked.loss_chunk,
            pad_vocab=asked.pad_vocab,
            checkpointing=asked.checkpointing,
            activation_offload=activation_offload,
            fp8=tuple(asked.fp8) if fp8 != "[]" else (),
        ),
        compile=compiled,
        cuda_graphs=graphs == "on",
        fused_optimizer=fused == "on",
        optimizer_state=asked.optimizer_state,
        optimizer_offload=offload,
        loader=loader,
        workers=used_workers,
        micro_batch=size,
        accumulation=count,
        features=tuple(features),
    )


_NOT_CUDA = "only CUDA devices have it"


def _word(value: bool) -> str:
    return "true" if value else "false"


def _words(values: list[str]) -> str:
    return f"[{', '.join(values)}]"


def _kernels(asked: str, device: Device, model: ModelConfig) -> tuple[str, str]:
    if asked == "torch":
        return "torch", ""
    reason = kernels_missing(device, model)
    return ("triton", "") if reason is None else ("torch", reason)


def kernels_missing(device: Device, model: ModelConfig) -> str | None:
    """Why our Triton kernels cannot run this model here, or None."""
    if device.kind != "cuda":
        return _NOT_CUDA
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.capability is not None and device.capability < (8, 0):
        return f"{device.name} is older than Ampere"
    if model.dropout > 0:
        return "they have no dropout"
    if model.residual_scale is not None:
        return "they have no residual scales"
    return None


def _residual(asked: str, precision: str, kernels: str) -> tuple[str, str]:
    if kernels == "torch":
        return "fp32", "" if asked == "fp32" else "torch's operations keep it in fp32"
    if precision != "bf16":
        return "fp32", "" if asked == "fp32" else f"precision is {precision}"
    return ("bf16" if asked == "auto" else asked), ""


def _fp8(asked: list[str], device: Device, kernels: str) -> tuple[str, str]:
    if not asked:
        return "[]", ""
    if device.capability is None or device.capability < (8, 9):
        return "[]", f"{device.name} has no 8-bit matrix units"
    if kernels == "torch":
        return "[]", "kernels is torch"
    return _words(asked), ""


def _attention(asked: str, device: Device, precision: str, config: RunConfig) -> tuple[str, str]:
    if asked in ("reference", "sdpa"):
        return asked, ""
    if device.kind != "cuda":
        return "sdpa", "" if asked == "auto" else _NOT_CUDA
    if asked == "auto":
        hopper = device.capability is not None and device.capability >= (9, 0)
        return ("cudnn", "") if hopper and precision in ("bf16", "fp16") else ("sdpa", "")
    return asked, ""


def _loss(asked: str, device: Device, kernels: str) -> tuple[str, str]:
    if asked != "auto":
        return asked, ""
    return ("fused" if kernels == "triton" else "plain"), ""


def _no_offload(device: Device) -> str | None:
    return None if device.kind == "cuda" else _NOT_CUDA


def _cuda_graphs(asked: str, device: Device, compiled: str) -> tuple[str, str]:
    if asked == "off":
        return "off", ""
    if device.kind != "cuda":
        return "off", "" if asked == "auto" else _NOT_CUDA
    return "off", ""


def _expandable(asked: str, device: Device) -> tuple[str, str]:
    if asked == "off":
        return "off", ""
    return ("on", "") if device.kind == "cuda" else ("off", "" if asked == "auto" else _NOT_CUDA)


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


def _compile(asked: str, device: Device, kernels: str) -> tuple[str, str]:
    if asked == "off":
        return "off", ""
    if asked == "auto" and device.kind != "cuda":
        return "off", f"not worth its start-up on {device.kind}"
    if kernels == "triton":  # they are one step of autograd each, which a compiler cannot look into
        return "off", "the Triton kernels leave it nothing to fuse"
    if device.kind == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "off", "triton is not installed"
        if device.capability is not None and device.capability < (7, 0):
            return "off", f"{device.name} is older than the compiler supports"
    reason = compile_failure(device.torch_device)
    mode = "default" if asked == "auto" else asked
    return (mode, "") if reason is None else ("off", reason)


def compile_failure(device: torch.device) -> str | None:
    """Why torch.compile does not work here, or None. Compilation is lazy: only a call shows whether it works."""
    try:
        doubled = torch.compile(lambda x: (x * 2).sum())(torch.ones(4, device=device))
        return None if float(doubled) == 8.0 else "torch.compile gave a wrong result"
    except Exception as error:  # noqa: BLE001 - any failure of a foreign compiler means: run without it, and say why
        first_line = str(error).strip().partition("\n")[0][:120]
        return f"torch.compile failed: {type(error).__name__}: {first_line}"


def _fused(speed: SpeedConfig, device: Device) -> tuple[str, str]:
    if speed.fused_optimizer == "off":
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
