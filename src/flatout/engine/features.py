"""Asked, used, why: each switch of the `speed` section meets the device here.

A switch this machine cannot serve is an error when the user wrote it, and a fallback with a reason when a preset or a
default did. Nothing falls back in silence: every answer becomes a `Feature` of the run's first record.

Switches that exclude each other are settled here as well, in this order: what the user wrote beats what is automatic;
of two that were both written, the one named in the error gives way. What only a trial can show (does this attention
kernel take these shapes, does the compiler work) is tried through `Probes`.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flatout.config.schema import ModelConfig, RunConfig, SpeedConfig, micro_batch_of
from flatout.device import Device, allocator_words, arithmetic
from flatout.engine.compiling import compile_failure, graphs_of_its_own
from flatout.errors import HardwareError
from flatout.model.adapted import kernels_missing as adapter_kernels_missing
from flatout.model.count import flops_per_token
from flatout.model.execution import Execution
from flatout.model.layers import mlp_width_of
from flatout.ops.attention import FA4, attention_failure, picked_kernel
from flatout.ops.documents import document_failure
from flatout.ops.kernels.cublaslt import missing as cublaslt_missing
from flatout.records import Feature

DEVICE_LOADER_BYTES = 2**31  # a corpus up to this size lives on the GPU by default
# Per layer, forward and backward, measured beside an H200: GPT-2 takes 50 ms with 12 layers and 105 with 24, whatever
# the micro-batch, as long as that keeps the card waiting. FlashAttention-4 comes on top.
LAUNCH_SECONDS, FA4_LAUNCH_SECONDS = 4e-3, 1e-3
BUSY = 0.5  # of a device's peak rate is what a step makes of it
UNKNOWN_PEAK = 1e14
COMMON_VOCAB = 50257  # where nobody has said how large the vocabulary is


def try_attention(
    backend: str, device: torch.device, *, precision: str, deterministic: bool, **shape: Any
) -> str | None:
    """Why this attention kernel cannot train these shapes under these switches, or None."""
    with arithmetic(precision, deterministic, device):
        return attention_failure(backend, device, _product_type(precision), **shape)


def try_documents(backend: str, device: torch.device, *, precision: str, **shape: Any) -> str | None:
    """Why this kernel cannot train packed documents, or None."""
    return document_failure(backend, device, _product_type(precision), **shape)


def ask_sdpa(device: torch.device, *, precision: str, deterministic: bool, **shape: Any) -> str | None:
    """Which kernel torch takes for these shapes under these switches, or None where it does not tell."""
    with arithmetic(precision, deterministic, device):
        return picked_kernel(device, _product_type(precision), **shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probes:
    """What is tried out on the device; tests without one put their own answers here."""

    attention: Callable[..., str | None] = try_attention
    picked: Callable[..., str | None] = ask_sdpa
    documents: Callable[..., str | None] = try_documents
    compiler: Callable[[torch.device], str | None] = compile_failure
    products: Callable[[], str | None] = cublaslt_missing
    triton: Callable[[], bool] = lambda: importlib.util.find_spec("triton") is not None


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
    expandable_segments: bool
    features: tuple[Feature, ...]


def resolve_speed(
    config: RunConfig,
    device: Device,
    corpus_bytes: int | None,
    written: Callable[[str], str | None],
    *,
    vocab: int | None = None,
    step_tokens: float | None = None,
    probes: Probes | None = None,
) -> Speed:
    """`written(path)` tells where the user wrote a field, "" where that is not known; None for what no user wrote.

    `corpus_bytes` is the size of the tokens, None where they are streamed. `vocab` is the model's vocabulary,
    `step_tokens` what the samples of a step hold on average.
    """
    asked, model = config.speed, config.model
    probes = probes or Probes()
    features: list[Feature] = []

    def settle(name: str, wanted: str, used: str, why: str = "", shown: str | None = None) -> str:
        where = written(f"speed.{name}")
        if why and wanted not in ("auto", used) and where is not None:
            ways = dict.fromkeys([used] if SpeedConfig.model_fields[name].default != "auto" else ["auto", used])
            place = f"{where}: " if where else ""
            raise HardwareError(f"{place}speed.{name} is {wanted}, but {why}", f"set speed.{name}={', or '.join(ways)}")
        features.append(Feature(name=name, asked=wanted, used=shown or used, why=why))
        return used

    def switch(name: str, wanted: bool, reason: str | None) -> bool:
        """A plain true or false that some machines or models cannot have."""
        used = wanted and reason is None
        return settle(name, _word(wanted), _word(used), "" if used == wanted else reason or "") == "true"

    settle("device", asked.device, str(device.torch_device))
    precision = settle("precision", asked.precision, *_precision(asked.precision, device))
    packed, quantized = config.chat.source is not None, config.lora.quantize != "none"
    apart = config.documents_apart
    kernels, why = _kernels(asked, device, config, precision, probes)
    if quantized and asked.kernels != "torch":
        kernels, why = "torch", "they know no 4-bit weights"
    settle("kernels", asked.kernels, kernels, why)
    frozen = config.lora.rank > 0
    residual = settle("residual", asked.residual, *_residual(asked.residual, precision, kernels, frozen=frozen))
    deterministic = config.train.deterministic
    how = {"deterministic": deterministic, "packed": packed}
    products = settle("products", asked.products, *_products(asked.products, precision, kernels, probes, **how))
    fp8 = settle("fp8", _words(asked.fp8), *_fp8(asked, device, kernels, model, adapters=frozen))
    attention, why = _attention(asked.attention, device, precision, kernels, config, probes)
    settle("attention", asked.attention, attention, why, _shown_attention(attention, device, precision, config, probes))
    scan, why = _scan(asked.scan, device, model, probes)
    settle("scan", asked.scan, scan, why, "none" if scan == "auto" else None)
    why = "our kernels take one product" if kernels == "triton" and not asked.fused_qkv else ""
    fused_qkv = settle("fused_qkv", _word(asked.fused_qkv), _word(asked.fused_qkv or bool(why)), why) == "true"
    documents, why = _document_attention(attention, device, precision, config, probes)
    if packed or (apart and model.attends):  # of rows with more than one; `attention` is for those with one
        features.append(Feature(name="document_attention", asked=attention, used=documents, why=why))
    compiled, why = _compile(asked, device, kernels, attention, probes, packed=packed or apart)
    if quantized and compiled != "off":
        compiled, why = "off", "it cannot look into 4-bit weights"
    settle("compile", asked.compile, compiled, why)
    loss = settle("loss", asked.loss, *_loss(asked.loss, kernels))
    why = "the plain loss takes all tokens at once" if loss == "plain" else ""
    used_chunk = "none" if why else str(asked.loss_chunk)  # harmless, so it is told and not refused, as with workers
    features.append(Feature(name="loss_chunk", asked=str(asked.loss_chunk), used=used_chunk, why=why))
    fused = settle("fused_optimizer", asked.fused_optimizer, *_fused(asked, device))
    offload = switch("optimizer_offload", asked.optimizer_offload, _no_offload(device))
    state = settle("optimizer_state", asked.optimizer_state, *_optimizer_state(asked.optimizer_state, device, offload))
    how = {"packed": packed, "apart": apart}
    loader = settle("loader", asked.loader, *_loader(asked.loader, device, corpus_bytes, **how))
    size, count = micro_batch_of(config)
    wanted = "null" if asked.micro_batch is None else str(asked.micro_batch)
    why = "the largest divisor of the batch" if asked.micro_batch not in (None, size) else ""
    features.append(Feature(name="micro_batch", asked=wanted, used=str(size), why=why))
    settle("accumulation", "null" if asked.accumulation is None else str(asked.accumulation), str(count))
    settle("pad_vocab", str(asked.pad_vocab), str(asked.pad_vocab))
    settle("checkpointing", asked.checkpointing, asked.checkpointing)
    reason = _no_offload(device) or (None if compiled == "off" else "compiled code keeps its activations to itself")
    reason = reason or ("4-bit weights would leave in full width" if quantized else None)
    activation_offload = switch("activation_offload", asked.activation_offload, reason)
    tokens = size * model.context if step_tokens is None else min(step_tokens, size * model.context)
    # A token of packed rows attends inside its own sample, and frozen weights get no gradients.
    length = None if step_tokens is None else min(model.context, step_tokens / config.chat.batch_samples)
    each = flops_per_token(model, vocab or model.vocab or COMMON_VOCAB, length, adapters=0 if frozen else None)
    flops = each * tokens
    graphs = settle(
        "cuda_graphs",
        asked.cuda_graphs,
        *_cuda_graphs(asked, device, compiled, activation_offload, config, attention, flops),
    )
    used_workers = asked.workers if loader == "host" else 0
    why = "tokens already live on the device" if loader == "device" else ""
    features.append(Feature(name="workers", asked=str(asked.workers), used=str(used_workers), why=why))
    expandable = settle(
        "expandable_segments", asked.expandable_segments, *_expandable(asked.expandable_segments, device)
    )
    limit = "null" if asked.memory_limit is None else f"{asked.memory_limit:g}"
    settle("memory_limit", limit, *((limit, "") if device.kind == "cuda" or limit == "null" else ("null", _NOT_CUDA)))
    return Speed(
        device=device,
        precision=precision,
        execution=Execution(
            attention=attention,
            document_attention=documents,
            scan="chunked" if scan == "auto" else scan,
            kernels=kernels,
            products=products,
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
        optimizer_state=state,
        optimizer_offload=offload,
        loader=loader,
        workers=used_workers,
        micro_batch=size,
        accumulation=count,
        expandable_segments=expandable == "on",
        features=tuple(features),
    )


_NOT_CUDA = "only CUDA devices have it"


def _word(value: bool) -> str:
    return "true" if value else "false"


def _words(values: Sequence[str]) -> str:
    return f"[{', '.join(values)}]"


def _kernels(asked: SpeedConfig, device: Device, config: RunConfig, precision: str, probes: Probes) -> tuple[str, str]:
    if asked.kernels == "torch":
        return "torch", ""
    lora, reason = config.lora, _no_triton(device, probes)
    if reason is None and lora.rank > 0:
        offload = asked.activation_offload
        reason = adapter_kernels_missing(dora=lora.dora, dropout=lora.dropout, offload=offload, fp8=())
        if config.model.residual_scale is not None:
            reason = "under adapters they have no residual scales"
    if reason is None and asked.kernels == "auto":
        if asked.compile not in ("auto", "off"):
            reason = "compile was asked for"
        elif not asked.fused_qkv:
            reason = "fused_qkv is off"
        elif config.model.dropout > 0:
            reason = "steps with dropout are not recorded, and compiled code launches fewer kernels"
        elif _has_layout(config) and (precision not in ("bf16", "fp16") or config.train.deterministic):
            # They join rows to one, and attention with a mask then looks from every row into every other.
            what = "documents" if config.chat.source is None else "samples"
            reason = f"{what} have attention with a mask here, which takes rows one by one"
    return ("triton", "") if reason is None else ("torch", reason)


def _has_layout(config: RunConfig) -> bool:
    """Whether attention stays inside documents or samples of a row."""
    return config.chat.source is not None or (config.documents_apart and config.model.attends)


def _no_triton(device: Device, probes: Probes) -> str | None:
    """Why none of our Triton kernels can run here, or None."""
    if device.kind != "cuda":
        return "our kernels run on CUDA devices only"
    if not probes.triton():
        return "triton is not installed"
    if device.capability is not None and device.capability < (8, 0):
        return f"{device.name} is older than Ampere"
    return None


def _residual(asked: str, precision: str, kernels: str, *, frozen: bool) -> tuple[str, str]:
    if kernels == "torch" and frozen and precision == "bf16":
        return "bf16", "" if asked in ("auto", "bf16") else "it has the type of the frozen embedding"
    if kernels == "torch":
        return "fp32", "" if asked == "fp32" else "torch's operations keep it in fp32"
    if precision != "bf16":
        return "fp32", "" if asked == "fp32" else f"precision is {precision}"
    return ("bf16" if asked == "auto" else asked), ""


def _products(
    asked: str, precision: str, kernels: str, probes: Probes, *, deterministic: bool, packed: bool
) -> tuple[str, str]:
    reason = (
        "kernels is torch" if kernels == "torch"
        else f"precision is {precision}" if precision not in ("bf16", "fp16")
        else "the kernel that wins can differ from run to run" if deterministic
        else "samples make other shapes at every step" if packed and asked == "auto"
        else probes.products()
    )  # fmt: skip
    if asked == "torch":
        return "torch", ""
    return ("tuned", "") if reason is None else ("torch", reason)


def _fp8(asked: SpeedConfig, device: Device, kernels: str, model: ModelConfig, *, adapters: bool) -> tuple[str, str]:
    if not asked.fp8:
        return "[]", ""
    if device.capability is None or device.capability < (8, 9):
        return "[]", f"{device.name} has no 8-bit matrix units"
    if kernels == "torch":
        return "[]", "kernels is torch"
    if adapters:
        return "[]", "adapters have no 8-bit products"
    loss = _loss(asked.loss, kernels)[0]
    if "head" in asked.fp8 and loss != "fused":
        return "[]", f"the head in 8 bits needs the fused loss, and loss is {loss}"
    groups, hidden = model.kv_heads or model.heads, mlp_width_of(model)
    sizes = {"width": model.width, "mlp": hidden}
    if model.attends:
        sizes |= {"qkv": model.size * (model.heads + 2 * groups), "heads": model.queries}
    if "E" in model.kinds:
        sizes["states"] = 2 * model.states
    for name, size in sizes.items():
        if size % 16:
            return "[]", f"8-bit products need sizes that are multiples of 16, and {name} has {size}"
    return _words(asked.fp8), ""


def _attention(
    asked: str, device: Device, precision: str, kernels: str, config: RunConfig, probes: Probes
) -> tuple[str, str]:
    if asked in ("reference", "sdpa"):
        return asked, ""
    if not config.model.attends:
        return "sdpa", "no block has attention"
    if device.kind != "cuda":
        return "sdpa", "" if asked == "auto" else _NOT_CUDA
    hopper = device.capability is not None and device.capability >= (9, 0)
    if asked == "auto" and not (hopper and precision in ("bf16", "fp16")):
        return "sdpa", ""
    wanted = "cudnn" if asked == "auto" else asked
    owner = {"cudnn": "cuDNN", **dict.fromkeys(FA4, "FlashAttention-4")}.get(wanted)
    if owner is not None and config.train.deterministic:
        return "sdpa", f"{owner}'s backward is not deterministic, and train.deterministic is set"

    def failure(backend: str) -> str | None:
        return probes.attention(
            backend,
            device.torch_device,
            precision=precision,
            deterministic=config.train.deterministic,
            **_attention_shape(config.model),
        )

    # Beside torch's own operations the compiler is worth more, and it cannot look into FlashAttention-4.
    if asked == "auto" and device.capability == (9, 0) and kernels == "triton":
        faster = _faster_with_fa4(config.model)
        if faster is not None and failure(faster) is None:
            return faster, ""
    reason = failure(wanted)
    return (wanted, "") if reason is None else ("sdpa", reason)


def _document_attention(
    attention: str, device: Device, precision: str, config: RunConfig, probes: Probes
) -> tuple[str, str]:
    """What works inside packed documents: by bounds where FlashAttention runs, or else with a mask."""
    if attention == "reference":
        return "reference", ""
    if device.kind != "cuda":
        return "sdpa", "" if attention == "sdpa" else _NOT_CUDA
    if device.capability is None or device.capability < (8, 0):
        return "sdpa", f"{device.name} is older than Ampere"
    if precision not in ("bf16", "fp16"):
        return "sdpa", f"precision is {precision}"
    if config.train.deterministic:
        return "sdpa", "by bounds backward is not deterministic, and train.deterministic is set"
    if attention == "flash":
        return "flash", ""
    if attention in FA4 and _has_layout(config):
        model = config.model
        shape = {"heads": model.heads, "groups": model.kv_heads or model.heads, "size": model.size}
        reason = probes.documents("fa4", device.torch_device, precision=precision, **shape)
        return ("fa4", "") if reason is None else ("flash", reason)
    return "flash", f"{attention} knows no bounds"


def scan_for(device: Device) -> str:
    """What serves eigenstates where no config asks: in a model that was loaded to read or write text."""
    return "chunked" if _no_triton(device, Probes()) else "triton"


def _scan(asked: str, device: Device, model: ModelConfig, probes: Probes) -> tuple[str, str]:
    if asked in ("reference", "chunked"):  # also where there is nothing to do, as what a rung says of its ground
        return asked, ""
    if "E" not in model.kinds:
        return "auto", f"no block of model.pattern={model.pattern} is E"
    reason = _no_triton(device, probes)
    return ("triton", "") if reason is None else ("chunked", "" if asked == "auto" else reason)


def _faster_with_fa4(model: ModelConfig) -> str | None:
    """What beats cuDNN where flash-attn-4 is installed, as measured on an H200 (attention.jsonl, throughput.jsonl)."""
    size = model.size
    if size not in (64, 128):
        return None
    forward_by_cudnn = size == 64 and model.context < 2048
    return "cudnn+fa4" if forward_by_cudnn else "fa4"


def _shown_attention(used: str, device: Device, precision: str, config: RunConfig, probes: Probes) -> str:
    """With the kernel that torch picks, where the choice is torch's."""
    if used != "sdpa" or not config.model.attends:
        return used
    picked = probes.picked(
        device.torch_device,
        precision=precision,
        deterministic=config.train.deterministic,
        **_attention_shape(config.model),
    )
    return used if picked is None else f"sdpa ({picked})"


def _attention_shape(model: ModelConfig) -> dict[str, Any]:
    return {
        "heads": model.heads,
        "groups": model.kv_heads or model.heads,
        "size": model.size,
        "context": model.context,
        "dropout": model.dropout,
    }


def _product_type(precision: str) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


def _loss(asked: str, kernels: str) -> tuple[str, str]:
    if asked != "auto":
        return asked, ""
    return ("fused" if kernels == "triton" else "plain"), ""


def _no_offload(device: Device) -> str | None:
    return None if device.kind == "cuda" else _NOT_CUDA


def _optimizer_state(asked: str, device: Device, offload: bool) -> tuple[str, str]:
    if asked == "8bit" and offload:
        return "fp32", "offloaded moments stay in fp32"
    if asked == "8bit" and device.kind == "mps":
        return "fp32", "8-bit moments are not tested on MPS"
    return asked, ""


def _cuda_graphs(
    asked: SpeedConfig,
    device: Device,
    compiled: str,
    offload: bool,
    config: RunConfig,
    attention: str,
    flops: float,
) -> tuple[str, str]:
    wanted, model = asked.cuda_graphs, config.model
    if wanted == "off":
        return "off", ""
    if device.kind != "cuda":
        return "off", "" if wanted == "auto" else _NOT_CUDA
    if model.dropout > 0 or config.lora.dropout > 0:
        return "off", "a recording would not draw dropout from the run's own random stream"
    if offload:
        return "off", "activation_offload waits for the host's memory, which a recording cannot"
    if graphs_of_its_own(compiled, our_graphs=wanted == "on"):
        return "off", f"compile {compiled} records graphs of its own"
    if config.documents_apart:
        return "off", "rows hold other documents at every step"
    if wanted == "on":
        return "on", ""
    if compiled != "off":
        return "off", "compiled code launches few kernels"
    launching = model.layers * (LAUNCH_SECONDS + (FA4_LAUNCH_SECONDS if attention in FA4 else 0.0))
    running = flops / (BUSY * (device.peak_flops or UNKNOWN_PEAK))
    size = f"{flops:.1g} FLOPs in a micro-batch"
    if running < launching:
        return "on", f"{size}: launching kernels takes longer than running them"
    return "off", f"{size} keep the device busy without"


def _expandable(asked: str, device: Device) -> tuple[str, str]:
    if device.kind != "cuda":
        return "off", "" if asked in ("auto", "off") else _NOT_CUDA
    words = allocator_words()
    if words is not None:  # whoever speaks to the allocator through the environment knows better than a default
        return ("on" if "expandable_segments:true" in words.lower() else "off"), f"{words} is set"
    return ("off" if asked == "off" else "on"), ""


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


def _compile(
    asked: SpeedConfig, device: Device, kernels: str, attention: str, probes: Probes, *, packed: bool
) -> tuple[str, str]:
    wanted = asked.compile
    if wanted == "off":
        return "off", ""
    if packed and wanted == "auto":
        return "off", "not worth its start-up where rows hold other documents at every step"
    if wanted == "auto" and device.kind != "cuda":
        return "off", f"not worth its start-up on {device.kind}"
    if kernels == "triton":  # they are one step of autograd each, which a compiler cannot look into
        return "off", "the Triton kernels leave it nothing to fuse"
    if wanted == "auto" and asked.activation_offload:
        return "off", "activation_offload was asked for"
    if attention in FA4:
        return "off", "it cannot look into FlashAttention-4"
    if device.kind == "cuda":
        if not probes.triton():
            return "off", "triton is not installed"
        if device.capability is not None and device.capability < (7, 0):
            return "off", f"{device.name} is older than the compiler supports"
    reason = probes.compiler(device.torch_device)
    if reason is not None:
        return "off", reason
    if packed and wanted in ("reduce-overhead", "max-autotune"):
        return "default", "it wants one shape, and samples make several"
    if wanted == "reduce-overhead" and device.kind != "cuda":
        return "default", f"CUDA graphs are what it is about, and {_NOT_CUDA}"
    if wanted == "regional" and asked.checkpointing == "selective":
        return "default", "selective checkpointing cannot look into a block that is compiled alone"
    return ("default" if wanted == "auto" else wanted), ""


def _fused(speed: SpeedConfig, device: Device) -> tuple[str, str]:
    if speed.fused_optimizer == "off":
        return "off", ""
    return ("on", "") if device.fused_optimizer else ("off", f"torch has no fused AdamW on {device.kind}")


def _loader(asked: str, device: Device, corpus_bytes: int | None, *, packed: bool, apart: bool) -> tuple[str, str]:
    if apart:
        return "host", "" if asked == "host" else "documents are laid out there"
    if corpus_bytes is None:
        return "host", "" if asked == "host" else "samples are packed there" if packed else "the text is streamed"
    if asked != "auto":
        return asked, ""
    if device.kind != "cuda":
        return "host", ""
    if corpus_bytes > DEVICE_LOADER_BYTES:
        return "host", f"the corpus has {corpus_bytes / 2**30:.1f} GiB"
    return "device", ""
