"""A whole model written out: one text at a time, position by position, head by head, in float64.

It knows the weights by their names in a checkpoint and the config by its fields, and shares no code with the model: not
a norm, not a rotation, not a mask. Slow, and nothing here may be made faster. Options of eigenstates are written out in
unit/test_eigenstate.py; here are the three formulas.
"""

import math

import torch
from torch import Tensor

from flatout.config.schema import ModelConfig

Weights = dict[str, Tensor]  # in float64


def naive_logits(config: ModelConfig, weights: Weights, tokens: list[int]) -> Tensor:
    """[T, V] of one text."""
    stream = [weights["embedding.weight"][token] for token in tokens]
    if config.positions == "learned":
        stream = [x + weights["positions.weight"][place] for place, x in enumerate(stream)]
    if config.bigram_rows:
        stream = [x + weights["bigram.weight"][_pair(config, tokens, place)] for place, x in enumerate(stream)]
    if config.embedding_norm:
        stream = [_rms(config, None, x) for x in stream]
    if config.embedding_scale is not None:
        stream = [x * config.embedding_scale for x in stream]
    first = stream
    for layer, kind in enumerate(config.kinds):
        own = {name.removeprefix(f"blocks.{layer}."): x for name, x in weights.items() if _inside(name, layer)}
        if config.first_mix:
            stream = [own["mix"][0] * x + own["mix"][1] * x0 for x, x0 in zip(stream, first, strict=True)]
        h = [_before(config, own, "attention_norm", x) for x in stream]
        rows = _value_rows(config, weights, layer, tokens)
        mixed = _eigenstates(config, own, layer, h) if kind == "E" else _attention(config, own, kind, h, rows)
        mixed = [_after(config, own, "attention_out_norm", y) for y in mixed]
        stream = [x + _scaled(own, "attention_scale", y) for x, y in zip(stream, mixed, strict=True)]
        h = [_before(config, own, "mlp_norm", x) for x in stream]
        made = [_after(config, own, "mlp_out_norm", _mlp(config, own, y)) for y in h]
        stream = [x + _scaled(own, "mlp_scale", y) for x, y in zip(stream, made, strict=True)]
    head = weights["embedding.weight"] if config.tied else weights["head.weight"]
    logits = torch.stack([head @ _norm(config, weights, "norm", x) for x in stream])
    cap = config.logit_cap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def naive_loss(config: ModelConfig, weights: Weights, tokens: list[int], targets: list[int]) -> Tensor:
    """The sum of -log p over targets that are not negative."""
    total = torch.zeros((), dtype=torch.float64)
    for logits, target in zip(naive_logits(config, weights, tokens), targets, strict=True):
        if target >= 0:
            total = total + torch.log(torch.exp(logits).sum()) - logits[target]
    return total


def _inside(name: str, layer: int) -> bool:
    return name.startswith(f"blocks.{layer}.")


def _scaled(own: Weights, name: str, x: Tensor) -> Tensor:
    return x * own[name] if name in own else x


def _linear(own: Weights, name: str, x: Tensor) -> Tensor:
    y = own[f"{name}.weight"] @ x
    return y + own[f"{name}.bias"] if f"{name}.bias" in own else y


def _before(config: ModelConfig, own: Weights, name: str, x: Tensor) -> Tensor:
    return x if config.norm_place == "after" else _norm(config, own, name, x)


def _after(config: ModelConfig, own: Weights, name: str, x: Tensor) -> Tensor:
    return x if config.norm_place == "before" else _norm(config, own, name, x)


def _norm(config: ModelConfig, own: Weights, name: str, x: Tensor) -> Tensor:
    if config.norm != "layernorm":
        return _rms(config, own.get(f"{name}.weight"), x)
    apart = x - x.sum() / len(x)
    y = apart / torch.sqrt((apart * apart).sum() / len(x) + config.norm_eps)
    y = y * own[f"{name}.weight"]
    return y + own[f"{name}.bias"] if f"{name}.bias" in own else y


def _rms(config: ModelConfig, weight: Tensor | None, x: Tensor) -> Tensor:
    y = x / torch.sqrt((x * x).sum() / len(x) + config.norm_eps)
    if config.norm == "offset-rmsnorm" and weight is not None:
        weight = 1 + weight
    return y if weight is None else y * weight


def _pair(config: ModelConfig, tokens: list[int], place: int) -> int:
    """The row of a token and the one before it; the last row is for the first token."""
    if place == 0:
        return config.bigram_rows - 1
    return ((tokens[place] * 36313) ^ (tokens[place - 1] * 27191)) % (config.bigram_rows - 1)


def _value_rows(config: ModelConfig, weights: Weights, layer: int, tokens: list[int]) -> list[Tensor] | None:
    """What comes to the values of attention: of the first blocks a table each, and of the last ones the same again."""
    for table in range(config.value_tables):
        if layer in (table, config.layers - config.value_tables + table):
            return [weights[f"value_tables.{table}.weight"][token] for token in tokens]
    return None


def _gate(own: Weights, number: int, x: Tensor) -> Tensor:
    """The gate of this number in a block: between 0 and 2."""
    weight = own["attention.gates"][12 * number : 12 * number + 12]
    return 2 / (1 + torch.exp(-(weight * x[:12]).sum()))


def _attention(
    config: ModelConfig, own: Weights, kind: str, h: list[Tensor], rows: list[Tensor] | None
) -> list[Tensor]:
    size, heads = config.size, config.heads
    groups = config.kv_heads or heads
    queries, keys, values = [], [], []
    for place, x in enumerate(h):
        made = _linear(own, "attention.qkv", x)
        if config.qk_norm_whole:
            q, k, v = made.split([heads * size, groups * size, groups * size])
            q, k = (
                config.qk_scale * _rms(config, own.get(f"attention.{name}_norm.weight"), part)
                for name, part in (("q", q), ("k", k))
            )
            made = torch.cat([q, k, v])
        parts = made.split(size)
        ready = []
        for number, part in enumerate(parts[: heads + groups]):
            if config.qk_norm and not config.qk_norm_whole:
                part = _rms(config, own.get(f"attention.{'q' if number < heads else 'k'}_norm.weight"), part)
                part = config.qk_scale * part
            ready.append(_turned(config, kind, part, place) if config.positions == "rope" and kind != "N" else part)
        queries.append(ready[:heads])
        keys.append(ready[heads:])
        parts = parts[heads + groups :]
        if rows is not None:
            added = rows[place].split(size)
            parts = [parts[group] + _gate(own, group, x) * added[group] for group in range(groups)]
        values.append(parts)
    results = []
    for place in range(len(h)):
        first = max(0, place - config.window + 1) if kind == "W" else 0
        result = []
        for head in range(heads):
            group = head // (heads // groups)
            divisor = math.sqrt(config.score_divisor or size)
            scores = [queries[place][head] @ keys[s][group] / divisor for s in range(first, place + 1)]
            if config.attention_cap is not None:
                scores = [config.attention_cap * torch.tanh(score / config.attention_cap) for score in scores]
            shares = torch.exp(torch.stack(scores))
            shares = shares / shares.sum()
            result.append(sum(share * values[first + s][group] for s, share in enumerate(shares)))
            if config.head_gate:
                result[-1] = result[-1] * _gate(own, head + (groups if rows is not None else 0), h[place])
        results.append(_linear(own, "attention.out", torch.cat(result)))
    return results


def _turned(config: ModelConfig, kind: str, x: Tensor, place: int) -> Tensor:
    base, local = config.rope_base, kind == "W" and config.rope_local_base is not None
    if kind == "W" and config.rope_local_base is not None:
        base = config.rope_local_base
    turned = int(config.size * config.rope_share)
    half, angles = turned // 2, []
    for i in range(half):
        rate = base ** (-2 * i / turned)
        if local or config.rope_scaling is None:
            pass
        elif config.rope_scaling == "longrope":
            rate = rate / config.rope_factors[i]
        elif config.rope_scaling == "linear":
            rate = rate / config.rope_factor
        elif config.rope_scaling == "llama3":
            turns = config.rope_original_context * rate / (2 * math.pi)
            kept = min(1.0, max(0.0, (turns - config.rope_low) / (config.rope_high - config.rope_low)))
            rate = (1 - kept) * rate / config.rope_factor + kept * rate
        angles.append(place * rate)
    turn = torch.polar(torch.ones(half, dtype=torch.float64), torch.tensor(angles, dtype=torch.float64))
    y = torch.complex(x[:half], x[half:turned]) * turn
    if config.rope_scaling == "longrope" and not local:
        y = y * config.rope_gain
    return torch.cat([y.real, y.imag, x[turned:]])


def _eigenstates(config: ModelConfig, own: Weights, layer: int, h: list[Tensor]) -> list[Tensor]:
    count = config.states
    rate = torch.exp(own["attention.decay_K"])
    golden = (math.sqrt(5.0) - 1.0) / 2.0
    fixed = [math.pi * (((layer * count + k + 0.5) * golden) % 1.0) for k in range(count)]
    angle = torch.tensor(fixed, dtype=torch.float64) + own["attention.detuning_K"] * rate
    real, imaginary = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    results = []
    for x in h:
        both = own["attention.inward.weight"] @ x
        gain = torch.sqrt(1 - torch.exp(-rate) ** 2)
        by_real, by_imaginary = torch.exp(-rate) * torch.cos(angle), torch.exp(-rate) * torch.sin(angle)
        real, imaginary = (
            by_real * real - by_imaginary * imaginary + gain * both[:count],
            by_real * imaginary + by_imaginary * real + gain * both[count : 2 * count],
        )
        gate = both[2 * count :]
        open_gate = gate / (1 + torch.exp(-gate))
        results.append(_linear(own, "attention.out", open_gate * torch.cat([real, imaginary])))
    return results


def _mlp(config: ModelConfig, own: Weights, h: Tensor) -> Tensor:
    pre = _linear(own, "mlp.up", h)
    if config.mlp == "swiglu":
        gate, value = pre[: len(pre) // 2], pre[len(pre) // 2 :]
        active = gate / (1 + torch.exp(-gate)) * value
    elif config.mlp == "geglu":
        active = _gelu(pre[: len(pre) // 2]) * pre[len(pre) // 2 :]
    elif config.mlp == "relu2":
        active = torch.where(pre > 0, pre * pre, torch.zeros_like(pre))
    else:
        active = _gelu(pre)
    return _linear(own, "mlp.out", active)


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
