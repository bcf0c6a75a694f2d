"""How a model's arithmetic is carried out. None of it changes the result beyond rounding."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """The model's share of the `speed` section, as it was resolved for a device. The defaults run everywhere."""

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
    activation_offload: bool = False
    fp8: tuple[str, ...] = ()  # of qkv, out, up, down, head
    sharded: bool = False  # weights are whole only while their block runs: nothing of them may be kept or handed on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How a block is carried out, as far as memory goes. `frozen` weights are held in the type of products."""

    half: bool
    compiled: bool
    execution: Execution
    frozen: bool = False

    @property
    def triton(self) -> bool:
        return self.execution.kernels == "triton"

    @property
    def eager(self) -> bool:
        """Whether each operation of torch keeps its own inputs for backward."""
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
