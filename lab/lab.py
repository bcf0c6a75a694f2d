"""A lab for the recipe: candidates of the time-to-loss recipe trained on enwik8 in plain torch, as JSON lines.

    python lab/lab.py prepare enwik8.gz TOKENIZER OUT
    python lab/lab.py run COMMIT --data OUT [--size 60m] [--tokens 26e6] [--seeds 0,1] [CANDIDATE ...]
    python lab/lab.py table
    python lab/lab.py list

`prepare` wants enwik8.gz as the source package minGRU-pytorch 0.2.1 has it, and GPT-2's `r50k_base.tiktoken`. Any other
folder with GPT-2's tokens in train.bin and val.bin, as uint16, can be given to --data as well.

Protocol: training text is bytes 0 to 90M of enwik8, validation text bytes 90M to 95M, one document per `<page>` with
`<|endoftext|>` before each, GPT-2 BPE. Rows of 1,024 tokens are drawn in a random order that depends on the seed only,
each once per pass. The loss is over the first 1,048,576 validation tokens in separate rows of 1,024. All candidates of
a seed see the same micro-batches in the same order and start from the same draws, parameter by parameter. Compilation,
warm-up and evaluation are not timed.

A candidate is the name of one that has a row (`list` prints them), or `NAME=FIELD:VALUE,FIELD:VALUE`, which changes the
default recipe, or with `from:OTHER` as its first pair the recipe of OTHER. Each finished row is appended to
lab/lab.jsonl, and to $OUT/lab.jsonl where OUT is set. A row that is there already is not run again.

Sizes are counted without embedding tables: matrices of the blocks plus the head, 51M for `60m`. Each row has the whole
account. Blocks, embedding and head are compiled one by one: all layers of one form share one graph, and candidates that
differ only in optimizer, rates, schedule or batch compile nothing new.
"""

import argparse
import dataclasses
import functools
import gc
import gzip
import hashlib
import json
import math
import os
import re
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = Path(__file__).with_name("lab.jsonl")
ENWIK8 = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
PARTS = {"train": (0, 90_000_000, 26_102_763), "val": (90_000_000, 95_000_000, 1_442_253)}
EVALUATED = 1_048_576
CONTEXT = 1024
VOCAB, END_OF_TEXT = 50_304, 50_256
GATE_INPUTS = 12
PROTOCOL = "enwik8 bytes 0-90M, loss on 1,048,576 tokens of bytes 90M-95M, separate rows of 1,024"


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    vocab: int = VOCAB
    context: int = CONTEXT


SIZES = {
    "15m": Size(4, 256, 4),
    "60m": Size(8, 512, 8),
    "124m": Size(12, 768, 12),
    "350m": Size(24, 1024, 16),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything about a run that is not its size, its data or its seed."""

    # The step: tokens of an update, and what fraction of them in each of several stages of equal tokens.
    batch: int = 65_536
    ramp: str = "1"
    ramp_power: float = 0.5  # rates of a stage are multiplied by its fraction to this power

    # Rates of the groups, all multiplied by `rate`. The matrices of the blocks go to Muon or AdamW, the rest to AdamW.
    optimizer: str = "muon"
    rate: float = 1.0
    muon_rate: float = 0.02
    adam_rate: float = 2e-3  # the matrices, with optimizer adamw
    embedding_rate: float = 0.1
    head_rate: float = 0.02
    table_rate: float = 0.1  # value and bigram tables
    table_decay: float = 0.0  # of those tables, times their rate
    embedding_decay: float = 0.0
    head_decay: float = 0.0
    scalar_rate: float = 0.02  # learned scalars, gates and norm weights
    beta1: float = 0.8
    beta2: float = 0.95
    clip: float = 0.0  # gradient norm over all parameters, 0: none

    # Muon.
    iteration: str = "polar"  # polar: Polar Express; newton: the quintic of the first Muon
    scale: str = "aspect"  # aspect: max(1, rows / columns)^0.5; rms: 0.2 max(rows, columns)^0.5, for AdamW's rates
    momentum: float = 0.95
    momentum_start: float = 0.85
    momentum_warmup: int = 100
    momentum_cooldown: int = 0
    normuon: bool = False
    normuon_beta: float = 0.9
    decay_form: str = "none"  # none, plain, or cautious: only where update and weight have the same sign
    decay: float = 0.1  # times the rate

    # Schedule.
    schedule: str = "wsd"  # wsd, cosine
    warmup: int = 10
    cooldown: float = 0.6
    floor: float = 0.0

    # The model.
    tied: bool = False
    activation: str = "relu2"  # relu2, gelu, swiglu
    qk_norm: bool = True
    qk_scale: float = 1.0  # times queries and times keys, after their norm
    zero_init: bool = True
    cap: float = 15.0
    cap_form: str = "tanh"  # tanh: cap tanh(z / cap); sigmoid: cap sigmoid((z + 5) / 7.5)
    norm_weights: bool = False
    embedding_norm: bool = True
    embedding_std: float = 1.0  # of an untied embedding
    rope_base: float = 10_000.0
    half_rotary: bool = False
    x0_mix: bool = False
    skips: bool = False
    value_tables: int = 0  # each serves one layer from the front and one from the back
    attention_gates: bool = False
    smear: bool = False
    bigram_rows: int = 0
    mtp: float = 0.0  # weight of the second next token at the beginning
    mtp_end: float = 0.67  # share of the run after which that weight is 0

    # For text that is read more than once.
    dropout: float = 0.0  # on both branches of a layer
    table_dropout: float = 0.0  # on rows of value tables
    shift: bool = False  # windows of each pass begin elsewhere


# What the compiled functions depend on. Other fields must not reach them, or every candidate would compile anew.
MODEL_FIELDS = (
    "tied",
    "activation",
    "qk_norm",
    "qk_scale",
    "cap",
    "cap_form",
    "norm_weights",
    "embedding_norm",
    "half_rotary",
    "x0_mix",
    "skips",
    "value_tables",
    "attention_gates",
    "smear",
    "bigram_rows",
    "mtp",
    "dropout",
    "table_dropout",
)
MUON_FIELDS = ("iteration", "scale", "normuon", "normuon_beta", "decay_form", "decay")

# Candidates


def parsed(field: str, text: str) -> Any:
    kind = type(getattr(Recipe(), field))
    if kind is bool:
        return {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}[text.lower()]
    return int(float(text)) if kind is int else kind(text)


def named() -> dict[str, Recipe]:
    """The recipes of the rows that are there, by the names of their candidates."""
    return {row["candidate"]: Recipe(**row["recipe"]) for row in rows_before()}


def recipe_of(text: str) -> Recipe:
    """The recipe that `field:value,field:value` asks for."""
    recipe = Recipe()
    fields = {field.name for field in dataclasses.fields(Recipe)}
    for pair in filter(None, text.split(",")):
        name, _, value = pair.partition(":")
        if name == "from":
            recipe = named()[value]
        elif name in fields:
            recipe = dataclasses.replace(recipe, **{name: parsed(name, value)})
        else:
            raise ValueError(f"no field {name!r}; there are: {', '.join(sorted(fields))}")
    return recipe


def candidate_of(word: str) -> tuple[str, Recipe]:
    name, equals, text = word.partition("=")
    if not equals and name not in named():
        raise ValueError(f"no candidate {name!r}; `lab.py list` names them, or write NAME=FIELD:VALUE")
    return name, recipe_of(text) if equals else named()[name]


# The model: functions of tensors, so that nothing is compiled for one model only.


def norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    normed = F.rms_norm(x, (x.shape[-1],))
    return normed if weight is None else normed * weight.to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`weight` is [parts, rows, columns]; the parts come out side by side."""
    return F.linear(x, weight.flatten(0, 1).to(x.dtype))


def gate(x: Tensor, weight: Tensor) -> Tensor:
    """Between 0 and 2, from a few channels; 1 at zero weights."""
    return 2 * torch.sigmoid(F.linear(x[..., :GATE_INPUTS], weight.to(x.dtype)))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1).to(x.dtype)


def embed(look: Recipe, tokens: Tensor, tables: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """The first residual stream, and the looked-up value tables."""
    x = F.embedding(tokens, tables["head" if look.tied else "embedding"])
    if look.bigram_rows:
        before = F.pad(tokens[:, :-1], (1, 0))
        pair = torch.bitwise_xor(tokens * 36_313, before * 27_191) % (look.bigram_rows - 1)
        pair = torch.cat([torch.full_like(pair[:, :1], look.bigram_rows - 1), pair[:, 1:]], dim=1)
        x = x + F.embedding(pair, tables["bigram"])
    if look.smear:
        share = tables["smear_scale"] * torch.sigmoid(F.linear(x[:, 1:, :GATE_INPUTS], tables["smear_gate"]))
        x = torch.cat([x[:, :1], x[:, 1:] + share * x[:, :-1]], dim=1)
    if look.embedding_norm:
        x = norm(x)
    return x.to(dtype), [F.embedding(tokens, tables[f"value{i}"]).to(dtype) for i in range(look.value_tables)]


def block(
    look: Recipe,
    heads: int,
    x: Tensor,
    x0: Tensor,
    skip: Tensor | None,
    values: Tensor | None,
    turns: tuple[Tensor, Tensor],
    w: dict[str, Tensor],
    training: bool,
) -> Tensor:
    """One layer: attention and MLP, each added to the residual stream."""
    if look.x0_mix:
        x = w["mix"][0].to(x.dtype) * x + w["mix"][1].to(x.dtype) * x0
    if skip is not None:
        x = x + w["skip"].to(x.dtype) * skip
    h = norm(x, w.get("norm1"))
    batch, length, width = h.shape
    q, k, v = linear(h, w["qkv"]).view(batch, length, 3, heads, width // heads).unbind(2)
    if look.qk_norm:
        q, k = norm(q) * look.qk_scale, norm(k) * look.qk_scale
    q, k = rotated(q, *turns), rotated(k, *turns)
    if values is not None:
        values = F.dropout(values, look.table_dropout, training)
        v = v + gate(h, w["value_gate"])[..., None] * values.view_as(v)
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    if look.attention_gates:
        y = y * gate(h, w["attention_gate"])[..., None]
    x = x + F.dropout(linear(y.reshape(batch, length, width), w["out"]), look.dropout, training)
    h = linear(norm(x, w.get("norm2")), w["up"])
    if look.activation == "swiglu":
        first, second = h.chunk(2, dim=-1)
        h = F.silu(first) * second
    else:
        h = F.relu(h).square() if look.activation == "relu2" else F.gelu(h, approximate="tanh")
    return x + F.dropout(linear(h, w["down"]), look.dropout, training)


def head(
    look: Recipe, x: Tensor, weight: Tensor, norm_weight: Tensor | None, targets: Tensor, second: Tensor
) -> tuple[Tensor, Tensor]:
    """(training loss, next-token cross entropy); `targets` is one token longer than `x`, for the second next token."""
    length = x.shape[1]
    logits = F.linear(norm(x, norm_weight), weight.to(x.dtype)).float()
    if look.cap and look.cap_form == "sigmoid":
        logits = look.cap * torch.sigmoid((logits + 5) / 7.5)
    elif look.cap:
        logits = look.cap * torch.tanh(logits / look.cap)
    logits = logits.flatten(0, 1)
    following = F.cross_entropy(logits, targets[:, :length].flatten())
    if not look.mtp:
        return following, following.detach()
    after = F.cross_entropy(logits, targets[:, 1 : length + 1].flatten())
    return following + second * after, following.detach()


@functools.cache
def compiled(function: Callable[..., Any], on: bool) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=True) if on else function


@functools.cache
def only(fields: tuple[str, ...], recipe: Recipe) -> Recipe:
    """The default recipe with these fields of `recipe`: equal for all candidates that can share a graph."""
    kept = {field: getattr(recipe, field) for field in fields}
    if "mtp" in kept:
        kept["mtp"] = float(recipe.mtp > 0)  # its weight is a tensor
    return dataclasses.replace(Recipe(), **kept)


class Place(NamedTuple):
    """Where a model is computed, and how."""

    device: torch.device
    dtype: torch.dtype
    compile: bool


class Model:
    """Parameters by name, with the group whose rate they have."""

    def __init__(self, recipe: Recipe, size: Size, place: Place, seed: int) -> None:
        self.look, self.size, self.place, self.seed = only(MODEL_FIELDS, recipe), size, place, seed
        self.parameters: dict[str, Tensor] = {}
        self.groups: dict[str, str] = {}
        self.tables = self._tables(recipe)
        self.layers = [self._layer(i, recipe) for i in range(size.layers)]
        self.turns = self._turns(recipe)
        self.no_second = torch.zeros((), device=place.device)

    def _add(self, name: str, group: str, shape: tuple[int, ...], std: float, fill: float = 0.0) -> Tensor:
        # A generator for each name: one field more does not change what the other parameters start from.
        generator = torch.Generator(self.place.device).manual_seed(zlib.crc32(name.encode()) + self.seed * 2**32)
        tensor = torch.full(shape, fill, device=self.place.device)
        if std:
            tensor.normal_(0.0, std, generator=generator)
        self.parameters[name], self.groups[name] = tensor.requires_grad_(), group
        return self.parameters[name]

    def _tables(self, recipe: Recipe) -> dict[str, Tensor]:
        size, width = self.size, self.size.width
        tables = {"head": self._add("head", "head", (size.vocab, width), 0.02 if recipe.tied else 0.005)}
        if not recipe.tied:
            tables["embedding"] = self._add("embedding", "embedding", (size.vocab, width), recipe.embedding_std)
        if recipe.norm_weights:
            tables["norm"] = self._add("norm", "scalar", (width,), 0.0, 1.0)
        if recipe.bigram_rows:
            tables["bigram"] = self._add("bigram", "table", (recipe.bigram_rows, width), 0.0)
        if recipe.smear:
            tables["smear_gate"] = self._add("smear_gate", "scalar", (1, min(GATE_INPUTS, width)), 0.0)
            tables["smear_scale"] = self._add("smear_scale", "scalar", (), 0.0)
        for i in range(recipe.value_tables):
            tables[f"value{i}"] = self._add(f"value{i}", "table", (size.vocab, width), 0.01)
        return tables

    def _layer(self, i: int, recipe: Recipe) -> dict[str, Tensor]:
        size, width = self.size, self.size.width
        swiglu = recipe.activation == "swiglu"
        hidden = max(64, round(width * 8 / 3 / 64) * 64) if swiglu else 4 * width
        std = 0.5 * width**-0.5
        last = 0.0 if recipe.zero_init else std / math.sqrt(2 * size.layers)

        def add(name: str, group: str, shape: tuple[int, ...], std: float = 0.0, fill: float = 0.0) -> Tensor:
            return self._add(f"{i}.{name}", group, shape, std, fill)

        w = {
            "qkv": add("qkv", "matrix", (3, width, width), std),
            "out": add("out", "matrix", (1, width, width), last),
            "up": add("up", "matrix", (2 if swiglu else 1, hidden, width), std),
            "down": add("down", "matrix", (1, width, hidden), last),
        }
        if recipe.norm_weights:
            w |= {name: add(name, "scalar", (width,), fill=1.0) for name in ("norm1", "norm2")}
        if recipe.x0_mix:
            w["mix"] = add("mix", "scalar", (2,))
            with torch.no_grad():
                w["mix"].copy_(torch.tensor([1.0, 0.1]))
        if recipe.skips and self._skip_from(i) is not None:
            w["skip"] = add("skip", "scalar", (), fill=0.2)
        if self._values_of(i, recipe.value_tables) is not None:
            w["value_gate"] = add("value_gate", "scalar", (size.heads, min(GATE_INPUTS, width)))
        if recipe.attention_gates:
            w["attention_gate"] = add("attention_gate", "scalar", (size.heads, min(GATE_INPUTS, width)))
        return w

    def _skip_from(self, i: int) -> int | None:
        """The layer whose input a layer of the second half gets: the innermost pair first, as in a U-Net."""
        other = self.size.layers - 1 - i
        return other if other < i else None

    def _values_of(self, i: int, tables: int) -> int | None:
        if 2 * tables > self.size.layers:
            raise ValueError(f"{tables} value tables want {2 * tables} layers, and there are {self.size.layers}")
        if i < tables:
            return i
        return i - (self.size.layers - tables) if i >= self.size.layers - tables else None

    def _turns(self, recipe: Recipe) -> tuple[Tensor, Tensor]:
        half = self.size.width // self.size.heads // 2
        device = self.place.device
        if recipe.half_rotary:  # the slower half of the frequencies stands still
            moving = (1 / 1024) ** torch.linspace(0, 1, half // 2, device=device)
            speeds = torch.cat([moving, moving.new_zeros(half - half // 2)])
        else:
            speeds = recipe.rope_base ** (-torch.arange(half, device=device) / half)
        angles = torch.arange(self.size.context, device=device)[:, None, None] * speeds
        return angles.cos(), angles.sin()

    def losses(self, rows: Tensor, second: Tensor | None = None, *, training: bool = True) -> tuple[Tensor, Tensor]:
        """(training loss, next-token cross entropy) of rows of `context + 2` tokens."""
        training = training and self.look.dropout + self.look.table_dropout > 0  # else one graph serves both
        place, look = self.place, self.look
        tokens, targets = rows[:, :-2].contiguous(), rows[:, 1:].contiguous()
        x, values = compiled(embed, place.compile)(look, tokens, self.tables, place.dtype)
        x0, inputs = x, []
        layer = compiled(block, place.compile)
        for i, w in enumerate(self.layers):
            inputs.append(x)
            other = self._skip_from(i) if look.skips else None
            table = self._values_of(i, look.value_tables)
            skip = None if other is None else inputs[other]
            looked_up = None if table is None else values[table]
            x = layer(look, self.size.heads, x, x0, skip, looked_up, self.turns, w, training)
        last = compiled(head, place.compile)
        second = self.no_second if second is None else second
        return last(look, x, self.tables["head"], self.tables.get("norm"), targets, second)

    def count(self) -> dict[str, int]:
        """Parameters by kind. `dense` is what every token passes: matrices and head."""
        kinds: dict[str, int] = dict.fromkeys(("matrix", "head", "embedding", "table", "scalar"), 0)
        for name, group in self.groups.items():
            kinds[group] += self.parameters[name].numel()
        return {"dense": kinds["matrix"] + kinds["head"], **kinds, "total": sum(kinds.values())}


# The optimizer

POLAR = (  # Polar Express, five iterations
    (8.1566, -22.4833, 15.8788),
    (4.0429, -2.8089, 0.5000),
    (3.8917, -2.7725, 0.5061),
    (3.2858, -2.3681, 0.4645),
    (2.3465, -1.7098, 0.4232),
)
NEWTON = ((3.4445, -4.7750, 2.0315),) * 5


def orthogonal(matrices: Tensor, iteration: str = "polar") -> Tensor:
    """U V' of each of the matrices [n, rows, columns], about; in bfloat16, on a CPU in float32."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices if matrices.device.type == "cpu" else matrices.bfloat16()
    x = x.mT if tall else x
    # Polar Express wants no singular value above 1, rounding included.
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7).to(x.dtype)
    for a, b, c in POLAR if iteration == "polar" else NEWTON:
        square = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def muon_change(
    look: Recipe,
    gradients: list[Tensor],
    weights: list[Tensor],
    moving: Tensor,
    second: Tensor | None,
    rate: Tensor,
    momentum: Tensor,
) -> Tensor:
    """What is to be subtracted from the weights of one shape; `moving` and `second` are updated."""
    gradient = torch.cat(gradients)
    moving.lerp_(gradient, 1 - momentum)
    update = orthogonal(gradient.lerp(moving, momentum), look.iteration).float()
    rows, columns = update.shape[-2:]
    if second is not None:
        axis = -1 if rows >= columns else -2
        before = update.norm(dim=(-2, -1), keepdim=True)
        second.lerp_(update.square().mean(dim=axis, keepdim=True), 1 - look.normuon_beta)
        update = update * second.clamp(min=1e-10).rsqrt()
        update = update * (before / update.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-10))
    update = update * (max(1, rows / columns) ** 0.5 if look.scale == "aspect" else 0.2 * max(rows, columns) ** 0.5)
    if look.decay_form != "none":
        weight = torch.cat(weights)
        kept = weight * (update * weight > 0) if look.decay_form == "cautious" else weight
        update = update + look.decay * kept
    return rate * update


class Shape(NamedTuple):
    """All matrices of one shape, and their state."""

    weights: list[Tensor]
    moving: Tensor
    second: Tensor | None


class Muon:
    """Muon over parameters of [parts, rows, columns], each part orthogonalised alone, equal shapes in one batch."""

    def __init__(self, weights: list[Tensor], recipe: Recipe, *, compile: bool) -> None:
        self.look, self.compile = only(MUON_FIELDS, recipe), compile
        self.shapes: list[Shape] = []
        for shape in dict.fromkeys(weight.shape[1:] for weight in weights):
            same = [weight for weight in weights if weight.shape[1:] == shape]
            moving = torch.zeros_like(torch.cat([weight.detach() for weight in same]))
            rows, columns = shape
            small = moving[..., :1] if rows >= columns else moving[:, :1, :]
            self.shapes.append(Shape(same, moving, torch.zeros_like(small) if recipe.normuon else None))

    @torch.no_grad()
    def step(self, rate: float, momentum: float) -> None:
        change = compiled(muon_change, self.compile)
        for shape in self.shapes:
            # Rates are tensors because a new number would be a new graph.
            numbers = [torch.full((), number, device=shape.moving.device) for number in (rate, momentum)]
            gradients = [weight.grad for weight in shape.weights]
            weights = [weight.detach() for weight in shape.weights]
            changes = change(self.look, gradients, weights, shape.moving, shape.second, *numbers)
            torch._foreach_sub_(  # pyright: ignore[reportPrivateImportUsage] - it has no public name
                weights, list(changes.split([len(weight) for weight in weights]))
            )


class Optimizer:
    """Muon for the matrices if the recipe asks for it, AdamW for everything else, one rate for each group."""

    def __init__(self, model: Model, recipe: Recipe) -> None:
        self.recipe, self.parameters = recipe, list(model.parameters.values())
        by_group: dict[str, list[Tensor]] = {}
        for name, group in model.groups.items():
            by_group.setdefault(group, []).append(model.parameters[name])
        matrices = by_group.pop("matrix") if recipe.optimizer == "muon" else []
        self.muon = Muon(matrices, recipe, compile=model.place.compile) if matrices else None
        rates = {name: getattr(recipe, f"{name}_rate") for name in ("embedding", "head", "table", "scalar")}
        rates["matrix"] = recipe.adam_rate
        decays = {name: getattr(recipe, f"{name}_decay") for name in ("embedding", "head", "table")}
        decays["matrix"] = recipe.decay if recipe.decay_form != "none" else 0.0
        groups = [
            {"params": tensors, "lr": rates[group], "base": rates[group], "weight_decay": decays.get(group, 0.0)}
            for group, tensors in by_group.items()
        ]
        self.adam = torch.optim.AdamW(groups, betas=(recipe.beta1, recipe.beta2), eps=1e-10, fused=True)

    def step(self, factor: float, momentum: float) -> None:
        factor *= self.recipe.rate
        if self.recipe.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip, foreach=True)
        for group in self.adam.param_groups:
            group["lr"] = group["base"] * factor
        self.adam.step()
        if self.muon is not None:
            self.muon.step(self.recipe.muon_rate * factor, momentum)
        for parameter in self.parameters:
            parameter.grad = None


# The plan of a run


class Step(NamedTuple):
    """One update: how many micro-batches, its rates' factor, Muon's momentum and the weight of the second token."""

    micro_batches: int
    factor: float
    momentum: float
    second: float


def planned(recipe: Recipe, micro_batches: int, micro_tokens: int) -> list[Step]:
    """The steps of a run of `micro_batches` in all, whatever the batch size; the last step may be smaller."""
    stages = [float(part) for part in recipe.ramp.split("/")]
    begun: list[tuple[int, int, float]] = []
    done = 0
    while done < micro_batches:
        fraction = stages[min(len(stages) - 1, done * len(stages) // micro_batches)]
        full = max(1, round(recipe.batch * fraction / micro_tokens))
        begun.append((done, min(full, micro_batches - done), full * micro_tokens / recipe.batch))
        done += full
    steps = []
    for step, (before, count, fraction) in enumerate(begun):
        progress = before / micro_batches
        factor = scheduled(recipe, progress) * fraction**recipe.ramp_power
        factor *= min(1.0, (step + 1) / (recipe.warmup + 1))
        risen = min(1.0, step / max(1, recipe.momentum_warmup))
        left = len(begun) - step
        if recipe.momentum_cooldown:
            risen = min(risen, left / recipe.momentum_cooldown)
        momentum = recipe.momentum_start + (recipe.momentum - recipe.momentum_start) * risen
        second = recipe.mtp * max(0.0, 1 - progress / recipe.mtp_end)
        steps.append(Step(count, factor, momentum, second))
    return steps


def scheduled(recipe: Recipe, progress: float) -> float:
    if recipe.schedule == "cosine":
        falling = 0.5 * (1 + math.cos(math.pi * progress))
    elif recipe.schedule == "wsd":
        falling = min(1.0, (1 - progress) / recipe.cooldown)
    else:
        raise ValueError(f"no schedule {recipe.schedule!r}; there are: wsd, cosine")
    return recipe.floor + (1 - recipe.floor) * falling


# Data


class Data(NamedTuple):
    train: Tensor
    val: Tensor


def prepare(source: Path, tokenizer: Path, out: Path) -> None:
    """Write train.bin and val.bin: tokens as uint16, of the validation text only what is evaluated."""
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    raw = gzip.decompress(source.read_bytes())
    if hashlib.sha256(raw).hexdigest() != ENWIK8:
        sys.exit(f"error: {source} is not enwik8")
    ranks = tokenizer / "r50k_base.tiktoken" if tokenizer.is_dir() else tokenizer
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
        mergeable_ranks=load_tiktoken_bpe(str(ranks)),
        special_tokens={"<|endoftext|>": END_OF_TEXT},
    )
    out.mkdir(parents=True, exist_ok=True)
    for name, (begin, end, expected) in PARTS.items():
        text = raw[begin:end].decode("utf-8", errors="replace")
        pages = [page for page in re.split(r"(?m)^(?=[ \t]*<page>)", text) if page]
        encoded = encoding.encode_ordinary_batch(pages, num_threads=os.cpu_count() or 1)
        tokens = np.concatenate([np.array([END_OF_TEXT, *page], dtype=np.uint16) for page in encoded])
        if len(tokens) != expected:
            sys.exit(f"error: {name} has {len(tokens):,} tokens instead of {expected:,}")
        (tokens[: EVALUATED + 1] if name == "val" else tokens).tofile(out / f"{name}.bin")
        print(f"{name}: {len(tokens):,} tokens, {(out / f'{name}.bin').stat().st_size:,} bytes", flush=True)


def loaded(folder: Path, device: torch.device, group: int) -> Data:
    """enwik8, or another text as GPT-2's tokens; of its validation text whole groups of `group` tokens."""

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(np.fromfile(folder / f"{name}.bin", dtype=np.uint16).astype(np.int32)).to(device)

    data = Data(tensor("train"), tensor("val"))
    return Data(data.train, data.val[: min(EVALUATED, (len(data.val) - 1) // group * group) + 1])


def protocol_of(data: Data) -> str:
    if len(data.train) == PARTS["train"][2]:
        return PROTOCOL
    return f"{len(data.train):,} tokens, loss on {len(data.val) - 1:,} others, separate rows of 1,024"


class Rows:
    """Micro-batches of rows, in an order that depends on the seed only."""

    def __init__(
        self, data: Tensor, context: int, micro_rows: int, count: int, seed: int, *, shift: bool = False
    ) -> None:
        windows = (len(data) - 2) // context - shift
        generator = torch.Generator().manual_seed(seed)
        passes = math.ceil(count * micro_rows / windows)
        drawn = [torch.randperm(windows, generator=generator) * context for _ in range(passes)]
        order = torch.cat([begins + (i * 389 % context if shift else 0) for i, begins in enumerate(drawn)])
        self.begins = order[: count * micro_rows].view(count, micro_rows).to(data.device)
        self.data, self.inside = data, torch.arange(context + 2, device=data.device)

    def __getitem__(self, i: int) -> Tensor:
        return self.data[self.begins[i][:, None] + self.inside].long()


def evaluate(model: Model, val: Tensor, micro_rows: int) -> float:
    """Mean loss over separate rows. Gradients stay on, so that the training graphs are used and none is compiled."""
    context = model.size.context
    begins = torch.arange(0, len(val) - context, context, device=val.device)
    inside = torch.arange(context + 2, device=val.device)
    total = torch.zeros((), dtype=torch.float64, device=val.device)
    for group in begins.split(micro_rows):
        # The last row has no second next token; nobody looks at it here.
        rows = val[(group[:, None] + inside).clamp(max=len(val) - 1)].long()
        total += model.losses(rows, training=False)[1].double() * len(group)
    return float(total) / len(begins)


# Runs


class Protocol(NamedTuple):
    """What all candidates of a call have in common."""

    size: Size
    place: Place
    data: Data
    tokens: int
    micro_rows: int
    evaluations: int
    told: Callable[[str], None]

    @property
    def micro_tokens(self) -> int:
        return self.micro_rows * self.size.context

    @property
    def micro_batches(self) -> int:
        return int(self.tokens) // self.micro_tokens


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def update(model: Model, optimizer: Optimizer, step: Step, micro_batches: Iterator[Tensor]) -> Tensor:
    """One step; the mean cross entropy of its micro-batches, on the device."""
    second = torch.full((), step.second, device=model.place.device)
    total = torch.zeros((), device=model.place.device)
    for _ in range(step.micro_batches):
        loss, following = model.losses(next(micro_batches), second)
        (loss / step.micro_batches).backward()
        total += following / step.micro_batches
    optimizer.step(step.factor, step.momentum)
    return total


def warmed(recipe: Recipe, protocol: Protocol) -> float:
    """Seconds to compile everything a candidate needs, with a model that is thrown away."""
    began = time.perf_counter()
    model = Model(recipe, protocol.size, protocol.place, 0)
    optimizer = Optimizer(model, recipe)
    rows = Rows(protocol.data.train, protocol.size.context, protocol.micro_rows, 3, 0)
    for count in (2, 1):  # gradients are accumulated in the first step only
        update(model, optimizer, Step(count, 0.1, 0.9, 0.1), iter([rows[0], rows[1]]))
    synchronize(protocol.place.device)
    return time.perf_counter() - began


def trained(model: Model, recipe: Recipe, protocol: Protocol) -> dict[str, Any]:
    """Train a fresh model: the measured part of its row."""
    device, size, told = protocol.place.device, protocol.size, protocol.told
    if recipe.batch % protocol.micro_tokens:
        raise ValueError(f"a batch of {recipe.batch:,} is no multiple of micro-batches of {protocol.micro_tokens:,}")
    optimizer = Optimizer(model, recipe)
    steps = planned(recipe, protocol.micro_batches, protocol.micro_tokens)
    counts = (size.context, protocol.micro_rows, protocol.micro_batches)
    rows = Rows(protocol.data.train, *counts, model.seed, shift=recipe.shift)
    micro_batches = (rows[i] for i in range(protocol.micro_batches))
    evaluated = {round(len(steps) * i / protocol.evaluations) for i in range(1, protocol.evaluations + 1)}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    curve: list[tuple[int, float, float]] = []
    seconds, tokens, loss = 0.0, 0, math.nan
    synchronize(device)
    began = time.perf_counter()
    for done, step in enumerate(steps, start=1):
        running = update(model, optimizer, step, micro_batches)
        tokens += step.micro_batches * protocol.micro_tokens
        if done in evaluated or done % max(1, len(steps) // 10) == 0:
            loss = float(running)
            now = seconds + time.perf_counter() - began
            told(f"step {done}/{len(steps)}, training loss {loss:.4f}, {now:.1f} s")
            if not math.isfinite(loss):
                seconds = now
                break
        if done in evaluated:
            synchronize(device)
            seconds += time.perf_counter() - began
            curve.append((tokens, round(seconds, 2), evaluate(model, protocol.data.val, protocol.micro_rows)))
            told(f"step {done}/{len(steps)}, validation loss {curve[-1][2]:.4f}, {seconds:.1f} s")
            synchronize(device)
            began = time.perf_counter()
    facts: dict[str, Any] = {"loss": curve[-1][2] if math.isfinite(loss) else None}
    facts |= {"seconds": round(seconds, 2), "tokens": tokens, "steps": len(steps), "curve": curve}
    facts |= {"tokens_per_second": round(tokens / seconds) if seconds else None}
    if device.type == "cuda":
        facts["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
    return facts | {"parameters": model.count()}


def rounded(facts: dict[str, Any]) -> dict[str, Any]:
    """Losses to four digits, as rows have them."""
    loss = None if facts["loss"] is None else round(facts["loss"], 4)
    return facts | {"loss": loss, "curve": [[*point[:2], round(point[2], 4)] for point in facts["curve"]]}


def changed(recipe: Recipe) -> dict[str, Any]:
    default = dataclasses.asdict(Recipe())
    return {name: value for name, value in dataclasses.asdict(recipe).items() if value != default[name]}


def identity(row: dict[str, Any]) -> str:
    # A field that a row does not have yet is one that was off when it was measured.
    facts = [row[name] for name in ("protocol", "size", "asked_tokens", "micro_rows", "seed")]
    return json.dumps([*facts, dataclasses.asdict(Recipe()) | row["recipe"]], sort_keys=True)


def written(row: dict[str, Any]) -> None:
    """Append the row at once: a call that is cut off keeps what it has finished."""
    places = [ROWS, *([Path(os.environ["OUT"]) / ROWS.name] if os.environ.get("OUT") else [])]
    for place in places:
        with place.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def rows_before() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text("utf-8").splitlines()] if ROWS.exists() else []


def summary(rows: list[dict[str, Any]], names: list[str]) -> str:
    """A line for each candidate: mean loss, difference to the first by pairs of seeds, seconds, throughput."""
    losses = {(row["candidate"], row["seed"]): row["loss"] for row in rows if row.get("loss") is not None}
    lines = []
    for name in dict.fromkeys(names):
        mine = [row for row in rows if row["candidate"] == name and row.get("loss") is not None]
        if not mine:
            lines.append(f"{name:24} -")
            continue
        pairs = [row["loss"] - losses[names[0], row["seed"]] for row in mine if (names[0], row["seed"]) in losses]
        spread = f" ({min(pairs):+.4f} to {max(pairs):+.4f})" if len(pairs) > 1 else ""
        mean = sum(row["loss"] for row in mine) / len(mine)
        difference = f"{sum(pairs) / len(pairs):+.4f}{spread}" if pairs else "-"
        speed = max(row["tokens_per_second"] for row in mine)
        lines.append(f"{name:24} {mean:.4f}  {difference:>8}  {mine[-1]['seconds']:6.1f} s  {speed:>9,} tokens/s")
    return "\n".join(lines)


def table() -> None:
    """Print what each field is worth, as lab/recipe.md has it: rows that differ from a base in one field."""
    rows = [row for row in rows_before() if row.get("loss") is not None]
    for base in ("muon", "best", "rec"):
        kinds = [tuple(row[name] for name in ABOUT) for row in rows if row["candidate"] == base]
        for kind in dict.fromkeys(kinds):
            print_table(base, [row for row in rows if tuple(row[name] for name in ABOUT) == kind])


ABOUT = ("protocol", "size", "asked_tokens")


def print_table(base: str, rows: list[dict[str, Any]]) -> None:
    """What each field changes of a base, over the same seeds, with the verdict of `flatout ablate`."""
    from flatout.tuning.ablation import ALIKE, HELPS, HURTS, effects

    own = {row["seed"]: row for row in rows if row["candidate"] == base}
    first = next(iter(own.values()))
    mean = statistics.mean(row["loss"] for row in own.values())
    told = f"{first['size']}, {first['asked_tokens'] / 1e6:.0f}M tokens of {first['protocol'].split(',')[0]}"
    print(f"\nAgainst `{base}` ({told}; {len(own)} seeds, {mean:.3f}):\n")
    print("| field | difference | could be seen | seeds | verdict | speed |\n|---|---|---|---|---|---|")
    recipe, kinds = dataclasses.asdict(Recipe()), dict[str, dict[int, dict[str, Any]]]()
    for row in rows:
        ours, theirs = recipe | row["recipe"], recipe | first["recipe"]
        fields = {name: ours[name] for name in recipe if ours[name] != theirs[name]}
        many = len(fields) > (2 if "batch" in fields or "cap_form" in fields or "bigram_rows" in fields else 1)
        if fields and not many and row["seed"] in own:
            kinds.setdefault(", ".join(f"{k} {v}" for k, v in fields.items()), {})[row["seed"]] = row
    pairs = {told: [same[seed]["loss"] - own[seed]["loss"] for seed in sorted(same)] for told, same in kinds.items()}
    of_the_change = {HELPS: "hurts", HURTS: "helps", ALIKE: ALIKE}
    for told, effect in sorted(effects(pairs).items(), key=lambda item: item[1].mean):
        same = kinds[told]
        speed = statistics.mean(same[seed]["tokens_per_second"] / own[seed]["tokens_per_second"] for seed in same)
        width = "-" if effect.half_width is None else f"{effect.half_width:.3f}"
        verdict = of_the_change.get(effect.verdict, "one seed")
        print(f"| {told} | {effect.mean:+.3f} | {width} | {effect.pairs} | {verdict} | {speed:.3f} |")


def run(asked: argparse.Namespace) -> None:
    began = time.perf_counter()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.set_float32_matmul_precision("high")
    # One function serves every form of block that a call tries, and eager must not stand in for one of them.
    config: Any = torch._dynamo.config
    config.recompile_limit, config.accumulated_recompile_limit = 1000, 10_000
    config.fail_on_recompile_limit_hit = True
    size = SIZES[asked.size]
    data = loaded(asked.data, device, asked.micro * CONTEXT)
    place = Place(device, torch.bfloat16 if cuda else torch.float32, not asked.eager)
    facts = {
        "commit": asked.commit,
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "protocol": protocol_of(data),
        "size": asked.size,
        "asked_tokens": int(asked.tokens),
        "micro_rows": asked.micro,
    }
    try:
        candidates = [candidate_of(word) for word in asked.candidates or ["muon"]]
    except (ValueError, KeyError) as error:
        sys.exit(f"error: {error.args[0]}")
    rows, before = [], {identity(row): row for row in rows_before() if "error" not in row and not asked.again}
    work = [(name, recipe, seed) for seed in asked.seeds for name, recipe in candidates]
    latest, compiled_for = 0.0, None
    for i, (name, recipe, seed) in enumerate(work):
        row = {"candidate": name, "seed": seed, **facts, "changed": changed(recipe)}
        row["recipe"] = dataclasses.asdict(recipe)
        if identity(row) in before:
            rows.append(before[identity(row)] | {"candidate": name})
            print(f"{name}, seed {seed}: measured before, {rows[-1]['loss']}", flush=True)
            continue
        if time.perf_counter() - began + latest > asked.seconds:
            left = ", ".join(f"{name} {seed}" for name, _, seed in work[i:])
            print(f"out of time after {time.perf_counter() - began:.0f} s; not run: {left}", flush=True)
            break

        def told(text: str, who: str = f"{name}, seed {seed}") -> None:
            print(f"{time.perf_counter() - began:5.0f} s  {who}: {text}", flush=True)

        protocol = Protocol(size, place, data, int(asked.tokens), asked.micro, asked.evaluations, told)
        started = time.perf_counter()
        # Guards of an old graph look for weights by name, and raise where another model has none of that name.
        if (look := only(MODEL_FIELDS, recipe)) != compiled_for:
            torch._dynamo.reset()
            compiled_for = look
        try:
            row["compile_seconds"] = round(warmed(recipe, protocol), 1)
            told(f"compiled and warmed up in {row['compile_seconds']} s")
            row |= rounded(trained(Model(recipe, size, place, seed), recipe, protocol))
        except (RuntimeError, ValueError, KeyError) as error:  # the other candidates still run
            row["error"] = f"{type(error).__name__}: {error}"[:300]
            told(row["error"])
        rows.append(row)
        written(row)
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        latest = time.perf_counter() - started
    print(summary(rows, [name for name, _ in candidates]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare", help="write the tokens of enwik8")
    preparing.add_argument("source", type=Path, help="enwik8.gz")
    preparing.add_argument("tokenizer", type=Path, help="r50k_base.tiktoken, or its folder")
    preparing.add_argument("out", type=Path)
    running = commands.add_parser("run", help="train candidates")
    running.add_argument("commit")
    running.add_argument("candidates", nargs="*", metavar="CANDIDATE")
    running.add_argument("--data", type=Path, default=Path(".lab-data"))
    running.add_argument("--size", choices=SIZES, default="60m")
    running.add_argument("--tokens", type=float, default=26e6, help="in all; more than 26.1M are a second pass")
    running.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0])
    running.add_argument("--micro", type=int, default=32, help="rows of a micro-batch")
    running.add_argument("--evaluations", type=int, default=4, help="of the whole validation set, evenly spaced")
    running.add_argument("--seconds", type=float, default=math.inf, help="start nothing that would end after these")
    running.add_argument("--eager", action="store_true", help="without torch.compile")
    running.add_argument("--again", action="store_true", help="run what lab.jsonl has already")
    commands.add_parser("table", help="what each field is worth, by lab.jsonl")
    commands.add_parser("list", help="candidates that have rows")
    # Candidates may stand behind options; argparse's own way of allowing that knows no subcommands.
    asked, rest = parser.parse_known_args()
    if any(word.startswith("-") for word in rest) or (rest and asked.command != "run"):
        parser.error(f"unknown: {' '.join(rest)}")
    if asked.command == "prepare":
        prepare(asked.source, asked.tokenizer, asked.out)
    elif asked.command == "run":
        asked.candidates += rest
        run(asked)
    elif asked.command == "table":
        table()
    else:
        for name, recipe in named().items():
            print(f"{name:20} {','.join(f'{field}:{value}' for field, value in changed(recipe).items())}")


if __name__ == "__main__":
    main()
