"""How big, how much arithmetic, how much memory: from the config alone, before anything is built.

FLOP convention, here and everywhere in Flatout: a training token costs 6 per weight of a matrix product (2 forward,
4 backward; the tied or untied head counts, embedding look-ups do not) plus 12·L·W·T for attention, not halved for
causality. It is the convention of the figures others publish, so that utilisation numbers compare.
"""

import dataclasses

from flatout.config.schema import ModelConfig
from flatout.model.layers import mlp_width_of


def parameter_count(config: ModelConfig, vocab: int) -> int:
    """Exactly the number of trained values; a tied head is counted once."""
    width, bias = config.width, 1 if config.bias else 0
    size = width // config.heads
    groups = config.kv_heads or config.heads
    qkv = (config.heads + 2 * groups) * size
    up, hidden = _mlp_widths(config)
    norm = width * (2 if config.norm == "layernorm" and config.bias else 1)
    block = 2 * norm
    block += width * qkv + bias * qkv + width * width + bias * width
    block += width * up + bias * up + hidden * width + bias * width
    block += 2 * size if config.qk_norm else 0
    block += 2 * width if config.residual_scale is not None else 0
    total = vocab * width + config.layers * block + norm
    total += config.context * width if config.positions == "learned" else 0
    total += 0 if config.tied else vocab * width
    return total


def flops_per_token(config: ModelConfig, vocab: int, context: int | None = None) -> float:
    """Forward and backward FLOPs of one training token, by the convention at the top of this file."""
    width = config.width
    groups = config.kv_heads or config.heads
    qkv = (config.heads + 2 * groups) * (width // config.heads)
    up, hidden = _mlp_widths(config)
    matrices = config.layers * (width * qkv + width * width + width * up + hidden * width) + vocab * width
    return 6.0 * matrices + 12.0 * config.layers * width * (context or config.context)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the device at the peak of a training step."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.loss


def estimate_memory(
    config: ModelConfig,
    vocab: int,
    *,
    micro_batch: int,
    half: bool,
    compiled: bool,
    checkpointing: bool,
    pad_vocab: int = 1,
) -> MemoryEstimate:
    """The memory of a training step with AdamW, fp32 weights and `half`- or single-precision matrix products.

    Activations are what backward needs, counted per token and block by hand from the layers (the residual stream stays
    fp32). Compiled code keeps fewer of them because it recomputes the cheap ones. Tested against the bytes autograd
    really keeps, and on a GPU against the measured peak.
    """
    parameters = parameter_count(config, vocab)
    tokens = micro_batch * config.context
    per_token = _activation_bytes_per_token(config, half=half, compiled=compiled)
    stream = 4 * config.width
    if checkpointing:
        activations = tokens * (config.layers * stream + per_token)
    else:
        activations = tokens * config.layers * per_token
    padded = vocab + -vocab % pad_vocab
    cell = 2 if half else 4
    # The logits in compute precision and, eager, their fp32 copy, its log-softmax and the gradients of both; compiled
    # code keeps the logits and writes their gradient.
    loss_cells = cell * 2 if compiled else cell * 2 + 4 * (2 if half else 1)
    weights_copy = parameters * 2 if half else 0  # autocast's half-precision copies live until backward
    return MemoryEstimate(
        weights=4 * parameters + weights_copy,
        gradients=4 * parameters,
        optimizer=8 * parameters,
        activations=activations + 2 * tokens * stream,
        loss=tokens * padded * loss_cells,
    )


def _activation_bytes_per_token(config: ModelConfig, *, half: bool, compiled: bool) -> int:
    """Bytes autograd keeps per token and block."""
    width, cell = config.width, 2 if half else 4
    groups = config.kv_heads or config.heads
    size = width // config.heads
    key_values = 2 * groups * size
    up, hidden = _mlp_widths(config)
    stream = 4 * width
    normed = 2 * (cell * width)  # inputs of qkv and of up
    attention = cell * (width + key_values) + cell * width  # q, k, v, and the output, which is also out's input
    activation = cell * (up + hidden)  # input of the non-linearity, and out's input
    if compiled:
        return 2 * stream + normed + attention + activation
    rotary = cell * (width + key_values // 2) if config.qk_norm else 0  # inputs of the norms, beside what rope returns
    turned = cell * (width + key_values // 2) if config.positions == "rope" else 0
    cast = 2 * stream if half else 0  # norm outputs in fp32 before autocast narrows them
    inner = cell * hidden if config.mlp in ("swiglu", "relu2") else 0
    return 2 * stream + normed + attention + activation + rotary + turned + cast + inner


def _mlp_widths(config: ModelConfig) -> tuple[int, int]:
    hidden = mlp_width_of(config)
    return (2 * hidden if config.mlp == "swiglu" else hidden), hidden
