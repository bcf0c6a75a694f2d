"""`speed`: the switches that may not change what is learned."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from flatout.config.section import Positive, Section, Switch


class SpeedConfig(Section):
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda|cuda:\d{1,3})$")] = Field(
        default="auto", description="auto, cpu, mps, cuda or cuda:N; auto takes the fastest there is."
    )
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = Field(
        default="auto",
        description="Arithmetic of matrix products over fp32 weights; auto is bf16 where the GPU has it.",
    )
    residual: Literal["auto", "fp32", "bf16"] = Field(
        default="auto",
        description="Storage of the residual stream between blocks; auto is bf16 beside bf16 products in our kernels.",
    )
    fp8: list[Literal["qkv", "out", "up", "down", "head"]] = Field(
        default=[], description="Linear layers whose products run in 8-bit floats, such as [up, down]; needs Triton."
    )
    kernels: Literal["auto", "torch", "triton"] = Field(
        default="auto",
        description="Norms, activations and residual adds: torch's operations or our Triton kernels; auto on CUDA.",
    )
    products: Literal["auto", "torch", "tuned"] = Field(
        default="auto",
        description="Matrix products by torch's choice of kernel, or by the fastest tried; auto beside our kernels.",
    )
    attention: Literal[
        "auto", "sdpa", "flash", "cudnn", "efficient", "flex", "fa3", "fa4", "cudnn+fa4", "reference"
    ] = Field(
        default="auto",
        description="Attention kernel; sdpa lets torch pick, auto is cudnn from Hopper on (with fa4, if installed).",
    )
    scan: Literal["auto", "reference", "chunked", "triton"] = Field(
        default="auto",
        description="States of E blocks: token by token, in chunks, or in our Triton kernels; auto is those on CUDA.",
    )
    fused_qkv: bool = Field(
        default=True, description="Queries, keys and values in one matrix product instead of three."
    )
    compile: Literal["auto", "off", "default", "reduce-overhead", "max-autotune", "regional"] = Field(
        default="auto",
        description="torch.compile and its mode; regional compiles one block for all; auto only where it is faster.",
    )
    cuda_graphs: Switch = Field(
        default="auto",
        description="Replay each micro-batch as one CUDA graph; auto where launching kernels would be the bottleneck.",
    )
    loss: Literal["auto", "plain", "chunked", "fused"] = Field(
        default="auto",
        description="Head and loss: all logits at once, chunks computed again in backward, or differentiated at once.",
    )
    loss_chunk: Annotated[int, Field(ge=16, le=2**20)] = Field(
        default=8192, description="Tokens whose logits exist at once in the chunked and fused losses."
    )
    fused_optimizer: Switch = Field(
        default="auto", description="One kernel for the AdamW update; auto where torch has it."
    )
    optimizer_state: Literal["fp32", "8bit"] = Field(
        default="fp32", description="Storage of AdamW's moments; 8bit quantises them in blocks of 256."
    )
    optimizer_offload: bool = Field(
        default=False, description="Keep AdamW's moments in the host's memory and update there."
    )
    pad_vocab: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=64,
        description="Round the vocabulary up to this multiple inside the head's product only; 1 is off.",
    )
    micro_batch: Positive | None = Field(
        default=None,
        description="Most sequences at once, rounded down to a divisor of the batch; null is the whole batch.",
    )
    accumulation: Positive | None = Field(
        default=None,
        description="Micro-batches per optimizer step; null follows from batch_tokens, context and micro_batch.",
    )
    checkpointing: Literal["none", "selective", "full"] = Field(
        default="none",
        description="What backward recomputes instead of keeping: nothing, the cheap parts of a block, or all of it.",
    )
    activation_offload: bool = Field(
        default=False, description="Keep what backward needs in the host's pinned memory instead of the GPU's."
    )
    loader: Literal["auto", "host", "device"] = Field(
        default="auto",
        description="Where tokens live; auto is the device for corpora up to 2 GiB on CUDA, else the host.",
    )
    workers: Annotated[int, Field(ge=0, le=64)] = Field(
        default=1,
        description="Threads that read batches ahead on the host; 0 reads in the loop, and the batches are the same.",
    )
    expandable_segments: Switch = Field(
        default="auto", description="Let torch grow its memory blocks instead of fragmenting; auto on CUDA."
    )
    memory_limit: Annotated[float, Field(gt=0.0, le=10000.0)] | None = Field(
        default=None, description="GiB of the GPU that this run may use, to emulate a smaller card; null is all of it."
    )

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
