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

    Activations are what backward needs, added up part by part from the layers; tested against the bytes autograd
    really keeps, and on a GPU against the measured peak.
    """
    parameters = parameter_count(config, vocab)
    tokens = micro_batch * config.context
    stream, cell = 4 * config.width, 2 if half else 4
    block = _block_bytes_per_token(config, half=half, compiled=compiled)
    ends = stream + cell * config.width + (stream if config.norm == "rmsnorm" else 0)  # final norm and head input
    # Eager code holds logits, log-softmax and its gradient at once, twelve bytes in either precision; compiled code
    # writes the gradient over the logits.
    padded = vocab + -vocab % pad_vocab
    loss = padded * (cell if compiled else 12)
    if checkpointing:  # one block at a time lives in full, after the loss is gone
        kept_blocks = config.layers * stream + max(0, block - loss)
    else:
        kept_blocks = config.layers * block
    return MemoryEstimate(
        weights=4 * parameters + (2 * parameters if half else 0),  # autocast's narrow copies live until backward
        gradients=4 * parameters,
        optimizer=8 * parameters,
        activations=tokens * (kept_blocks + ends),
        loss=tokens * loss,
    )


def _block_bytes_per_token(config: ModelConfig, *, half: bool, compiled: bool) -> int:
    """Bytes that one block keeps per token until its backward."""
    width, stream, cell = config.width, 4 * config.width, 2 if half else 4
    size = width // config.heads
    queries_keys = width + (config.kv_heads or config.heads) * size
    values = (config.kv_heads or config.heads) * size
    up, hidden = _mlp_widths(config)
    parts = [
        2 * stream,  # inputs of both norms
        2 * cell * width,  # inputs of qkv and up
        cell * (queries_keys + values),  # output of qkv
        cell * width + 4 * config.heads,  # output of attention, log-sum-exp
        cell * (up + hidden),  # input and output of the non-linearity
    ]
    if config.positions == "rope":
        parts += [cell * queries_keys, cell * width]  # turned queries and keys; attention's output in out's layout
    if compiled:  # the rest is recomputed in backward
        return sum(parts)
    if config.norm == "rmsnorm":
        parts.append(2 * stream)  # the normalised input, before its weight
    if config.qk_norm:
        parts.append((8 if half else 4) * queries_keys)  # normalised in fp32, and widened first
    if config.mlp == "swiglu":
        parts.append(cell * hidden)  # silu(gate)
    if config.residual_scale is not None:
        parts.append(2 * cell * width)
    return sum(parts)


def _mlp_widths(config: ModelConfig) -> tuple[int, int]:
    hidden = mlp_width_of(config)
    return (2 * hidden if config.mlp == "swiglu" else hidden), hidden
