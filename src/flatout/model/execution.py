"""How a model is executed: kernels, precision, checkpointing. It does not change results beyond rounding."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """The settings of `speed` that concern the model, resolved for a device. The defaults run on any device."""

    attention: str = "sdpa"
    document_attention: str = "sdpa"  # in packed rows: reference, sdpa, flash, fa4
    scan: str = "chunked"  # of eigenstates; or reference, triton
    kernels: str = "torch"  # or triton
    products: str = "torch"  # or tuned
    residual: str = "fp32"  # or bf16
    fused_qkv: bool = True
    loss: str = "plain"  # or chunked, fused
    loss_chunk: int = 8192
    pad_vocab: int = 1
    checkpointing: str = "none"  # or selective, full
    fp8: tuple[str, ...] = ()  # of qkv, out, up, down, head
    sharded: bool = False  # FSDP2: weights are whole only while their block runs, so no copies of them may be kept


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How a block is executed, as far as memory is concerned. `frozen` weights have the type of products."""

    half: bool
    compiled: bool
    execution: Execution
    frozen: bool = False

    @property
    def triton(self) -> bool:
        return self.execution.kernels == "triton"

    @property
    def eager(self) -> bool:
        """Whether the model runs as single operations of torch, each of which saves its own inputs."""
        return not self.triton and not self.compiled

    @property
    def cell(self) -> int:
        """Bytes of a value in matrix products."""
        return 2 if self.half else 4

    @property
    def stream(self) -> int:
        """Bytes of a value in the residual stream."""
        if self.triton:
            return 2 if self.execution.residual == "bf16" else 4
        return self.cell if self.frozen else 4
