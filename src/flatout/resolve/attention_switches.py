"""Which attention kernel and which scan serve a model: the switches that depend on its shapes."""

from typing import Any

from flatout.config.schema import ModelConfig
from flatout.device import Device
from flatout.ops.attention import FA4
from flatout.resolve.case import NOT_CUDA, Answer, Case, Probes, no_triton


def attention(case: Case) -> Answer:
    """The kernel for rows of one document each."""
    used, why = _backend(case)
    return Answer(used, why, _with_torchs_choice(used, case))


def _backend(case: Case) -> tuple[str, str]:
    asked, device, precision = case.asked.attention, case.device, case.used.precision
    if asked in ("reference", "sdpa"):
        return asked, ""
    if not case.model.attends:
        return "sdpa", "no block has attention"
    if not case.cuda:
        return "sdpa", "" if asked == "auto" else NOT_CUDA
    hopper = device.capability is not None and device.capability >= (9, 0)
    if asked == "auto" and not (hopper and precision in ("bf16", "fp16")):
        return "sdpa", ""
    wanted = "cudnn" if asked == "auto" else asked
    owner = {"cudnn": "cuDNN", **dict.fromkeys(FA4, "FlashAttention-4")}.get(wanted)
    if owner is not None and case.config.train.deterministic:
        return "sdpa", f"{owner}'s backward is not deterministic, and train.deterministic is set"
    # Beside torch's own operations the compiler is worth more, and it cannot look into FlashAttention-4.
    if asked == "auto" and device.capability == (9, 0) and case.used.kernels == "triton":
        faster = _faster_with_fa4(case.model)
        if faster is not None and _failure(faster, case) is None:
            return faster, ""
    reason = _failure(wanted, case)
    return (wanted, "") if reason is None else ("sdpa", reason)


def _failure(backend: str, case: Case) -> str | None:
    return case.probes.attention(backend, case.device.torch_device, **_shape(case))


def _faster_with_fa4(model: ModelConfig) -> str | None:
    """What beats cuDNN where flash-attn-4 is installed, as measured on an H200 (attention.jsonl, throughput.jsonl)."""
    if model.size not in (64, 128):
        return None
    forward_by_cudnn = model.size == 64 and model.context < 2048
    return "cudnn+fa4" if forward_by_cudnn else "fa4"


def _with_torchs_choice(used: str, case: Case) -> str | None:
    """The backend with the kernel that torch picks, where the choice is torch's."""
    if used != "sdpa" or not case.model.attends:
        return None
    picked = case.probes.picked(case.device.torch_device, **_shape(case))
    return None if picked is None else f"sdpa ({picked})"


def _shape(case: Case) -> dict[str, Any]:
    model, rows = case.model, {"context": case.model.context, "dropout": case.model.dropout}
    return {**_heads(model), **rows, "precision": case.used.precision, "deterministic": case.config.train.deterministic}


def _heads(model: ModelConfig) -> dict[str, Any]:
    return {"heads": model.heads, "groups": model.kv_heads or model.heads, "size": model.size}


def document_attention(case: Case) -> Answer:
    """The kernel for rows of several documents: by bounds where FlashAttention runs, or else with a mask."""
    used, why = _document_backend(case)
    return Answer(used, why, listed=case.attends_inside)


def _document_backend(case: Case) -> tuple[str, str]:
    attention, device, precision = case.used.attention, case.device, case.used.precision
    if attention == "reference":
        return "reference", ""
    if not case.cuda:
        return "sdpa", "" if attention == "sdpa" else NOT_CUDA
    if device.capability is None or device.capability < (8, 0):
        return "sdpa", f"{device.name} is older than Ampere"
    if precision not in ("bf16", "fp16"):
        return "sdpa", f"precision is {precision}"
    if case.config.train.deterministic:
        return "sdpa", "by bounds backward is not deterministic, and train.deterministic is set"
    if attention == "flash":
        return "flash", ""
    if attention in FA4 and case.attends_inside:
        reason = case.probes.documents("fa4", device.torch_device, precision=precision, **_heads(case.model))
        return ("fa4", "") if reason is None else ("flash", reason)
    return "flash", f"{attention} knows no bounds"


def scan(case: Case) -> Answer:
    """How the states of E blocks are computed; `auto` where there are none."""
    if "E" not in case.model.kinds:
        return Answer("auto", f"no block of model.pattern={case.model.pattern} is E", "none")
    if case.no_triton is None:
        return Answer("triton")
    return Answer("chunked", "" if case.asked.scan == "auto" else case.no_triton)


def scan_for(device: Device) -> str:
    """The scan of a model that was loaded to read or write text, where no config asks."""
    return "chunked" if no_triton(device, Probes()) else "triton"
