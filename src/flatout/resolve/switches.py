"""Decides every switch of the `speed` section for this device: what was asked for, what is used, and why.

A value that the device cannot have is an error where the user wrote it, and a fallback with a reason where it came from
a preset or a default. Every answer becomes a `Feature` of the run's first record. What only a trial can show (whether
an attention kernel takes these shapes, whether the compiler works) is tried through `Probes`.

`ROWS` lists the switches in the order in which they depend on each other. The function of a row gets a `SwitchContext`
and returns an `Answer`: the value, and the reason where it is not the one asked for. For switches that exclude each
other the order decides: what the user wrote wins over what is automatic, and of two that the user wrote the later row
gives way. To add a switch, add its field to `SpeedConfig` and `Speed`, and a row.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from flatout.config.schema import ModelConfig, RunConfig, SpeedConfig, micro_batch_of
from flatout.config.source import Source
from flatout.device import Device, allocator_words
from flatout.errors import HardwareError
from flatout.host import thread_words, usable_cores, whole_cores
from flatout.model.adapted import kernels_missing as adapter_kernels_missing
from flatout.model.compiling import graphs_of_its_own
from flatout.model.count import outline
from flatout.model.layers import Block, mlp_width_of
from flatout.ops.attention import FA4
from flatout.records import Feature
from flatout.resolve.case import NOT_CUDA, Answer, Probes, Speed, SwitchContext, no_triton, shape_of


def attention(case: SwitchContext) -> Answer:
    """The kernel for rows of one document each."""
    used, why = _backend(case)
    return Answer(used, why, _with_torchs_choice(used, case))


def _backend(case: SwitchContext) -> tuple[str, str]:
    asked, device, precision = case.asked.attention, case.device, case.used.precision
    if case.model.attention_cap is not None:
        return "reference", "" if asked == "reference" else "no other kernel has a cap (model.attention_cap)"
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


def _failure(backend: str, case: SwitchContext) -> str | None:
    return case.probes.attention(backend, case.device.torch_device, **_shape(case))


def _faster_with_fa4(model: ModelConfig) -> str | None:
    """What beats cuDNN where flash-attn-4 is installed, as measured on an H200 (attention.jsonl, throughput.jsonl)."""
    if model.size not in (64, 128):
        return None
    forward_by_cudnn = model.size == 64 and model.context < 2048
    return "cudnn+fa4" if forward_by_cudnn else "fa4"


def _with_torchs_choice(used: str, case: SwitchContext) -> str | None:
    """The backend with the kernel that torch picks, where the choice is torch's."""
    if used != "sdpa" or not case.model.attends:
        return None
    picked = case.probes.picked(case.device.torch_device, **_shape(case))
    return None if picked is None else f"sdpa ({picked})"


def _shape(case: SwitchContext) -> dict[str, Any]:
    model, rows = case.model, {"context": case.model.context, "dropout": case.model.dropout}
    return {**_heads(model), **rows, "precision": case.used.precision, "deterministic": case.config.train.deterministic}


def _heads(model: ModelConfig) -> dict[str, Any]:
    return {"heads": model.heads, "groups": model.kv_heads or model.heads, "size": model.size}


def document_attention(case: SwitchContext) -> Answer:
    """The kernel for rows of several documents: by bounds where FlashAttention runs, or else with a mask."""
    used, why = _document_backend(case)
    return Answer(used, why, listed=case.attends_inside)


def _document_backend(case: SwitchContext) -> tuple[str, str]:
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


def scan(case: SwitchContext) -> Answer:
    """How the states of E blocks are computed; `auto` where there are none."""
    if "E" not in case.model.kinds:
        return Answer("auto", f"no block of model.pattern={case.model.pattern} is E", "none")
    if case.no_triton is None:
        return Answer("triton")
    return Answer("chunked", "" if case.asked.scan == "auto" else case.no_triton)


def scan_for(device: Device) -> str:
    """The scan of a model that was loaded to read or write text, where no config asks."""
    return "chunked" if no_triton(device, Probes()) else "triton"


DEVICE_LOADER_BYTES = 2**31  # a corpus up to this size lives on the GPU by default
# Per layer, forward and backward, measured beside an H200: GPT-2 takes 50 ms with 12 layers and 105 with 24, whatever
# the micro-batch, as long as that keeps the card waiting. FlashAttention-4 comes on top.
LAUNCH_SECONDS, FA4_LAUNCH_SECONDS = 4e-3, 1e-3
# Other hosts and models take longer: `record` 7e-3, and its steps of 49,152 tokens at 60m came at 876,000 tokens/s
# instead of 1,150,000. One recording costs little, so it is made wherever the host may be the slower one.
SLOWER_HOST = 2.0
COMPILED = 2.0  # times `SwitchContext.running_seconds` is what compiled steps with dropout took: 1.9 at 60m, 3.4 at 15m
FROM_PYTHON = "they do not know a model from Python (model=)"
TORCHS_OWN = "optimizer= has a form of its own"


def _parallel(case: SwitchContext) -> Answer:
    sharding = case.sharding
    return Answer(sharding.form, sharding.why, listed=sharding.form != "none")


def _precision(case: SwitchContext) -> Answer:
    asked, device = case.asked.precision, case.device
    if case.cuda:
        if device.bf16:
            return Answer("bf16" if asked == "auto" else asked)
        if asked in ("bf16", "tf32"):
            return Answer("fp16", f"{device.name} (capability {device.capability}) has no {asked} matrix units")
        return Answer("fp16" if asked == "auto" else asked)
    if asked in ("auto", "fp32"):
        return Answer("fp32")
    if device.kind == "mps":
        return Answer("fp32", f"{asked} is not tested on MPS")
    if asked == "bf16":  # right everywhere, fast where the CPU has matrix units for it
        return Answer("bf16")
    return Answer("fp32", f"a CPU has no {asked} products")


def _kernels(case: SwitchContext) -> Answer:
    asked = case.asked
    if case.quantized:
        return Answer("torch", "they know no 4-bit weights")
    if case.own_model:
        return Answer("torch", FROM_PYTHON)
    if case.model.beyond_kernels:
        return Answer("torch", f"they do not know {', '.join(case.model.beyond_kernels)}")
    reason = case.no_triton or _adapters_beyond_kernels(case)
    if reason is None and asked.kernels == "auto":
        if asked.compile not in ("auto", "off"):
            reason = "compile was asked for"
        elif not asked.fused_qkv:
            reason = "fused_qkv is off"
        elif case.model.dropout > 0 and case.model.layers * LAUNCH_SECONDS > COMPILED * case.running_seconds:
            reason = "steps with dropout are not recorded, and compiled code launches fewer kernels"
        elif case.attends_inside and (_wide(case) or case.config.train.deterministic):
            # They join rows to one, and attention with a mask then looks from every row into every other.
            what = "samples" if case.packed else "documents"
            reason = f"{what} have attention with a mask here, which takes rows one by one"
    return Answer("triton") if reason is None else Answer("torch", reason)


def _adapters_beyond_kernels(case: SwitchContext) -> str | None:
    """What of these adapters our Triton kernels do not have, or None."""
    lora = case.config.lora
    if not case.adapters:
        return None
    blocks = [block for block in outline(case.model)[0].blocks if isinstance(block, Block)]
    beside = sorted({name for block in blocks for name in block.beside})
    if beside:
        return f"under adapters they have no {' and no '.join(beside)}"
    return adapter_kernels_missing(dora=lora.dora, dropout=lora.dropout, fp8=())


def _wide(case: SwitchContext) -> bool:
    """Whether products have wider operands than 16 bits."""
    return case.used.precision not in ("bf16", "fp16")


def _residual(case: SwitchContext) -> Answer:
    asked, precision = case.asked.residual, case.used.precision
    if case.used.kernels == "torch" and case.adapters and precision == "bf16":
        return Answer("bf16", "" if asked in ("auto", "bf16") else "it has the type of the frozen weights")
    if case.used.kernels == "torch":
        return Answer("fp32", "" if asked == "fp32" else "torch's operations keep it in fp32")
    if precision != "bf16":
        return Answer("fp32", "" if asked == "fp32" else f"precision is {precision}")
    return Answer("bf16" if asked == "auto" else asked)


def _products(case: SwitchContext) -> Answer:
    asked = case.asked.products
    if case.used.kernels == "torch":
        return Answer("torch", "kernels is torch")
    if _wide(case):
        return Answer("torch", f"precision is {case.used.precision}")
    if case.config.train.deterministic:
        return Answer("torch", "the kernel that wins can differ from run to run")
    if case.packed and asked == "auto":
        return Answer("torch", "samples make other shapes at every step")
    reason = case.probes.products()
    return Answer("tuned") if reason is None else Answer("torch", reason)


def _fp8(case: SwitchContext) -> Answer:
    reason = _no_fp8(case) if case.asked.fp8 else None
    return Answer(tuple(case.asked.fp8)) if reason is None else Answer((), reason)


def _no_fp8(case: SwitchContext) -> str | None:
    device, model = case.device, case.model
    if device.capability is None or device.capability < (8, 9):
        return f"{device.name} has no 8-bit matrix units"
    if case.used.kernels == "torch":
        return "kernels is torch"
    if case.sharded:
        return f"it keeps copies of all weights, which parallel.form {case.used.parallel} has no room for"
    if case.adapters:
        return "adapters have no 8-bit products"
    loss = _loss(case).used
    if "head" in case.asked.fp8 and loss != "fused":
        return f"the head in 8 bits needs the fused loss, and loss is {loss}"
    sizes = {"width": model.width, "mlp": mlp_width_of(model)}
    if model.attends:
        groups = model.kv_heads or model.heads
        sizes |= {"qkv": model.size * (model.heads + 2 * groups), "heads": model.queries}
    if "E" in model.kinds:
        sizes["states"] = 2 * model.states
    for name, size in sizes.items():
        if size % 16:
            return f"8-bit products need sizes that are multiples of 16, and {name} has {size}"
    return None


def _fused_qkv(case: SwitchContext) -> Answer:
    if case.used.kernels == "triton" and not case.asked.fused_qkv:
        return Answer(True, "our kernels take one product")
    return Answer(case.asked.fused_qkv)


def _compile(case: SwitchContext) -> Answer:
    asked, wanted, device = case.asked, case.asked.compile, case.device
    if case.sharded:
        return Answer("off", f"it is not for parallel.form {case.used.parallel}")
    if case.several_documents and wanted == "auto":
        return Answer("off", "not worth its start-up where rows hold other documents at every step")
    if wanted == "auto" and not case.cuda:
        return Answer("off", f"not worth its start-up on {device.kind}")
    if case.own_model and wanted == "auto":
        return Answer("off", "a model from Python (model=) may not be made for it")
    if case.used.kernels == "triton":  # they are one step of autograd each, which a compiler cannot look into
        return Answer("off", "the Triton kernels leave it nothing to fuse")
    if case.used.attention in FA4:
        return Answer("off", "it cannot look into FlashAttention-4")
    if case.quantized:
        return Answer("off", "it cannot look into 4-bit weights")
    if reason := _no_compiler(case):  # last of what turns it off: a trial takes seconds
        return Answer("off", reason)
    if case.several_documents and wanted in ("reduce-overhead", "max-autotune"):
        return Answer("default", "it wants one shape, and samples make several")
    if wanted == "reduce-overhead" and not case.cuda:
        return Answer("default", f"CUDA graphs are what it is about, and {NOT_CUDA}")
    if wanted == "regional" and asked.checkpointing == "selective":
        return Answer("default", "selective checkpointing cannot look into a block that is compiled alone")
    return Answer("default" if wanted == "auto" else wanted)


def _no_compiler(case: SwitchContext) -> str | None:
    """Why torch.compile does not work here, or None."""
    if case.cuda:
        if not case.probes.triton():
            return "triton is not installed"
        if case.device.capability is not None and case.device.capability < (7, 0):
            return f"{case.device.name} is older than the compiler supports"
    return case.probes.compiler(case.device.torch_device)


def _loss(case: SwitchContext) -> Answer:
    if case.asked.loss != "auto":
        return Answer(case.asked.loss)
    return Answer("fused" if case.used.kernels == "triton" else "plain")


def _loss_chunk(case: SwitchContext) -> Answer:
    if case.used.loss == "plain":
        return Answer(case.asked.loss_chunk, "the plain loss takes all tokens at once", "none")
    return Answer(case.asked.loss_chunk)


def _no_adamw(case: SwitchContext) -> str | None:
    """Why a form of AdamW is nothing to this run, or None."""
    if case.own_optimizer:
        return TORCHS_OWN
    optim = case.config.optim
    return None if optim.kind.adamw else f"optim.optimizer is {optim.optimizer}, which has one form"


def _fused_optimizer(case: SwitchContext) -> Answer:
    if reason := _no_adamw(case):
        return Answer(False, reason)
    return Answer(case.asked.fused_optimizer != "off")  # torch has it on every kind of device that we know


def _optimizer_offload(case: SwitchContext) -> Answer:
    reason = _no_adamw(case) or (None if case.cuda else NOT_CUDA)
    return _unless(case.asked.optimizer_offload, reason)


def _optimizer_state(case: SwitchContext) -> Answer:
    asked = case.asked.optimizer_state
    if asked == "8bit" and (reason := _no_adamw(case)):
        return Answer("fp32", reason)
    if asked == "8bit" and case.used.optimizer_offload:
        return Answer("fp32", "offloaded moments stay in fp32")
    if asked == "8bit" and case.device.kind == "mps":
        return Answer("fp32", "8-bit moments are not tested on MPS")
    if asked == "8bit" and case.sharded:
        return Answer("fp32", "blocks of 8-bit moments do not go by the slices of weights")
    return Answer(asked)


def _loader(case: SwitchContext) -> Answer:
    asked, size = case.asked.loader, case.corpus_bytes
    if case.config.documents_apart:
        return Answer("host", "" if asked == "host" else "documents are laid out there")
    if size is None:
        reasons = {"samples": "samples are packed there", "stream": "the text is streamed"}
        reason = reasons.get(case.config.data_kind, "the data is read there")
        return Answer("host", "" if asked == "host" else reason)
    if asked != "auto":
        return Answer(asked)
    if not case.cuda:
        return Answer("host")
    if size > DEVICE_LOADER_BYTES:
        return Answer("host", f"the corpus has {size / 2**30:.1f} GiB")
    return Answer("device")


def _micro_batch(case: SwitchContext) -> Answer:
    size, _ = micro_batch_of(case.config, case.ranks)
    whole = "the batch" if case.ranks == 1 else "a process's share of the batch"
    return Answer(size, f"the largest divisor of {whole}" if case.asked.micro_batch not in (None, size) else "")


def _unless(wanted: bool, reason: str | None) -> Answer:
    """A plain true or false that some machines or models cannot have."""
    return Answer(False, reason) if wanted and reason is not None else Answer(wanted)


def _cuda_graphs(case: SwitchContext) -> Answer:
    wanted, compiled = case.asked.cuda_graphs, case.used.compile
    if wanted == "off":
        return Answer(False)
    if not case.cuda:
        return Answer(False, "" if wanted == "auto" else NOT_CUDA)
    if case.own_model:
        return Answer(False, "a model from Python (model=) may wait for the host, which a recording cannot")
    if case.sharded:
        return Answer(False, "weights are gathered anew for every pass, which a recording cannot")
    if case.model.dropout > 0 or case.config.lora.dropout > 0:
        return Answer(False, "a recording would not draw dropout from the run's own random stream")
    if graphs_of_its_own(compiled, our_graphs=wanted == "on"):
        return Answer(False, f"compile {compiled} records graphs of its own")
    if case.config.documents_apart:
        return Answer(False, "rows hold other documents at every step")
    if wanted == "on":
        return Answer(True)
    if compiled != "off":
        return Answer(False, "compiled code launches few kernels")
    fa4 = FA4_LAUNCH_SECONDS if case.used.attention in FA4 else 0.0
    size = f"{case.micro_batch_flops:.1g} FLOPs in a micro-batch"
    slower = 1.0 if case.packed else SLOWER_HOST  # samples have many shapes, each with a recording of its own
    if case.running_seconds < slower * case.model.layers * (LAUNCH_SECONDS + fa4):
        return Answer(True, f"{size}: launching kernels may take longer than running them")
    return Answer(False, f"{size} keep the device busy without")


def _workers(case: SwitchContext) -> Answer:
    if case.used.loader == "device":
        return Answer(0, "tokens already live on the device")
    return Answer(case.asked.workers)


def _threads(case: SwitchContext) -> Answer:
    """The number that was asked for, or for `auto` that of the environment, of the run so far, or of a trial."""
    asked, words = case.asked.threads, thread_words()
    if asked != "auto":
        return Answer(asked)
    now = torch.get_num_threads()
    if case.device.kind != "cpu":
        return Answer(now)
    if words is not None:
        return Answer(now, f"{words} is set")
    cores, before = whole_cores(), case.threads_before
    if isinstance(before, int) and 1 <= before * case.ranks_here <= usable_cores():
        most = cores // case.ranks_here
        more = f"; speed.threads={most} takes all cores" if before < most else ""
        return Answer(before, f"as before the resume{more}")
    if case.ranks_here > 1:
        return Answer(max(1, cores // case.ranks_here), f"{cores} cores for {case.ranks_here} ranks")
    if cores == 1 or case.config.train.deterministic:
        return Answer(cores, "" if cores == 1 else "a trial could choose another number each time")
    trial = case.probes.threads(*shape_of(case.model))
    return Answer(trial.chosen, trial.why)


def _expandable_segments(case: SwitchContext) -> Answer:
    asked = case.asked.expandable_segments
    if not case.cuda:
        return Answer(False, NOT_CUDA if asked == "on" else "")
    settings = allocator_words()
    if settings is not None:  # whoever sets the allocator in the environment knows better than a default
        return Answer("expandable_segments:true" in settings.lower(), f"{settings} is set")
    return Answer(asked != "off")


def _memory_limit(case: SwitchContext) -> Answer:
    limit = case.asked.memory_limit
    return Answer(limit) if case.cuda or limit is None else Answer(None, NOT_CUDA)


@dataclasses.dataclass(frozen=True)
class SwitchRow:
    """A switch and the function that decides it. `asked` reads what was asked for; by default, its field of `speed`.

    A value that the user wrote and the device cannot have is an error, unless the fallback is `harmless`. Values in
    `works` need no decision: they are available everywhere.
    """

    name: str
    resolve: Callable[[SwitchContext], Answer]
    works: tuple[str, ...] = ()
    harmless: bool = False
    asked: Callable[[SwitchContext], object] | None = None


ROWS = (
    SwitchRow("device", lambda case: Answer(str(case.device.torch_device))),
    SwitchRow("parallel", _parallel, harmless=True, asked=lambda case: case.config.parallel.form),
    SwitchRow("precision", _precision),
    SwitchRow("kernels", _kernels, works=("torch",)),
    SwitchRow("residual", _residual),
    SwitchRow("products", _products, works=("torch",)),
    SwitchRow("fp8", _fp8),
    SwitchRow("attention", attention),
    # Also without E blocks: rungs of the ladder set it for all models.
    SwitchRow("scan", scan, works=("reference", "chunked")),
    SwitchRow("fused_qkv", _fused_qkv),
    SwitchRow("document_attention", document_attention, harmless=True, asked=lambda case: case.used.attention),
    SwitchRow("compile", _compile, works=("off",)),
    SwitchRow("loss", _loss),
    SwitchRow("loss_chunk", _loss_chunk, harmless=True),
    SwitchRow("fused_optimizer", _fused_optimizer),
    SwitchRow("optimizer_offload", _optimizer_offload),
    SwitchRow("optimizer_state", _optimizer_state),
    SwitchRow("loader", _loader),
    SwitchRow("micro_batch", _micro_batch, harmless=True),
    SwitchRow("accumulation", lambda case: Answer(micro_batch_of(case.config, case.ranks)[1])),
    SwitchRow("pad_vocab", lambda case: Answer(case.asked.pad_vocab)),
    SwitchRow("checkpointing", lambda case: Answer(case.asked.checkpointing)),
    SwitchRow("cuda_graphs", _cuda_graphs),
    SwitchRow("workers", _workers, harmless=True),
    SwitchRow("threads", _threads),
    SwitchRow("expandable_segments", _expandable_segments),
    SwitchRow("memory_limit", _memory_limit),
)


def resolve_speed(
    config: RunConfig,
    device: Device,
    corpus_bytes: int | None,
    source: Callable[[str], Source],
    **facts: Any,
) -> Speed:
    """Decides every switch in the order of the table; `source(path)` returns where a field's value comes from.

    `corpus_bytes` is the size of the tokens, None where they stay on the host; `facts` are further fields of
    `SwitchContext`.
    """
    case = SwitchContext(config=config, device=device, corpus_bytes=corpus_bytes, **facts)
    features: list[Feature] = []
    for row in ROWS:
        asked = getattr(config.speed, row.name) if row.asked is None else row.asked(case)
        answer = Answer(asked) if asked in row.works else row.resolve(case)
        feature = Feature(name=row.name, asked=_text(asked), used=_text(answer.used, asked), why=answer.why)
        if not row.harmless:
            _check_wanted(feature, source(f"speed.{row.name}"))
        if answer.listed:
            features.append(feature if answer.shown is None else dataclasses.replace(feature, used=answer.shown))
        vars(case.used)[row.name] = answer.used
    used = vars(case.used)
    scan = "chunked" if used["scan"] == "auto" else used["scan"]
    shared = {"sharded": case.sharded, "shards": case.sharding.shards}
    return Speed(**{**used, **shared, "device": device, "scan": scan, "features": tuple(features)})


def _check_wanted(feature: Feature, source: Source) -> None:
    """Refuses a fallback from what the user wrote."""
    name, used = feature.name, feature.used
    if feature.why and feature.asked not in ("auto", used) and source.by_user:
        ways = dict.fromkeys([used] if SpeedConfig.model_fields[name].default != "auto" else ["auto", used])
        raise HardwareError(
            f"speed.{name} is {feature.asked}, but {feature.why}",
            f"set speed.{name}={', or '.join(ways)}",
            where=source.where,
            setting=f"speed.{name}",
        )


def _text(value: object, asked: object = None) -> str:
    """A value as a config file has it; a yes or no of a switch that also has `auto` is on or off."""
    if isinstance(value, bool):
        words = ("off", "on") if isinstance(asked, str) else ("false", "true")
        return words[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(value)}]"
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value)
