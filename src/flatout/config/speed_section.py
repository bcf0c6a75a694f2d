"""`speed`: the switches that may not change what is learned."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from flatout.config.section import Positive, Section, Switch


class SpeedConfig(Section):
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda|cuda:\d{1,3})$")] = "auto"
    """auto, cpu, mps, cuda or cuda:N; auto takes the fastest there is."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Arithmetic of matrix products over fp32 weights; auto is bf16 where the GPU has it."""
    residual: Literal["auto", "fp32", "bf16"] = "auto"
    """Storage of the residual stream between blocks; auto is bf16 beside bf16 products in our kernels."""
    fp8: list[Literal["qkv", "out", "up", "down", "head"]] = Field(default=[])
    """Linear layers whose products run in 8-bit floats, such as [up, down]; needs Triton."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """Norms, activations and residual adds: torch's operations or our Triton kernels; auto on CUDA."""
    products: Literal["auto", "torch", "tuned"] = "auto"
    """Matrix products by torch's choice of kernel, or by the fastest tried; auto beside our kernels."""
    attention: Literal[
        "auto", "sdpa", "flash", "cudnn", "efficient", "flex", "fa3", "fa4", "cudnn+fa4", "reference"
    ] = "auto"
    """Attention kernel; sdpa lets torch pick, auto is cudnn from Hopper on (with fa4, if installed)."""
    scan: Literal["auto", "reference", "chunked", "triton"] = "auto"
    """States of E blocks: token by token, in chunks, or in our Triton kernels; auto is those on CUDA."""
    fused_qkv: bool = True
    """Queries, keys and values in one matrix product instead of three."""
    compile: Literal["auto", "off", "default", "reduce-overhead", "max-autotune", "regional"] = "auto"
    """torch.compile and its mode; regional compiles one block for all; auto only where it is faster."""
    cuda_graphs: Switch = "auto"
    """Replay each micro-batch as one CUDA graph; auto where launching kernels would be the bottleneck."""
    loss: Literal["auto", "plain", "chunked", "fused"] = "auto"
    """Head and loss: all logits at once, chunks computed again in backward, or differentiated at once."""
    loss_chunk: Annotated[int, Field(ge=16, le=2**20)] = 8192
    """Tokens whose logits exist at once in the chunked and fused losses."""
    fused_optimizer: Switch = "auto"
    """One kernel for the AdamW update; auto where torch has it."""
    optimizer_state: Literal["fp32", "8bit"] = "fp32"
    """Storage of AdamW's moments; 8bit quantises them in blocks of 256."""
    optimizer_offload: bool = False
    """Keep AdamW's moments in the host's memory and update there."""
    pad_vocab: Annotated[int, Field(ge=1, le=4096)] = 64
    """Round the vocabulary up to this multiple inside the head's product only; 1 is off."""
    micro_batch: Positive | None = None
    """Most sequences at once, rounded down to a divisor of the batch; null is the whole batch."""
    accumulation: Positive | None = None
    """Micro-batches per optimizer step, fewer if packed samples need fewer; null follows from the other fields."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """What backward recomputes instead of keeping: nothing, the cheap parts of a block, or all of it."""
    activation_offload: bool = False
    """Keep what backward needs in the host's pinned memory instead of the GPU's."""
    loader: Literal["auto", "host", "device"] = "auto"
    """Where tokens live; auto is the device for corpora up to 2 GiB on CUDA, else the host."""
    workers: Annotated[int, Field(ge=0, le=64)] = 1
    """Threads that read batches ahead on the host; 0 reads in the loop, and the batches are the same."""
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """Threads of torch on a CPU; auto tries some at the start, unless OMP_NUM_THREADS is set."""
    expandable_segments: Switch = "auto"
    """Let torch grow its memory blocks instead of fragmenting; auto on CUDA."""
    memory_limit: Annotated[float, Field(gt=0.0, le=10000.0)] | None = None
    """GiB of the GPU that this run may use, to emulate a smaller card; null is all of it."""

    @model_validator(mode="before")
    @classmethod
    def _booleans_are_switches(cls, values: Any) -> Any:
        if isinstance(values, dict):
            words = {True: "on", False: "off"}
            switches = ("compile", "fused_optimizer", "cuda_graphs", "expandable_segments")
            values = {k: words[v] if k in switches and isinstance(v, bool) else v for k, v in values.items()}
            if values.get("compile") == "on":
                values["compile"] = "default"
        return values
