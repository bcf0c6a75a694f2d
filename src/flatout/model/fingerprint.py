"""A hash of a model's weights, so that adapters are never put on another model of the same shape.

Idea: every tensor counts with its name, type, shape and all of its bytes, in the order of names. In how many files they
lie does not matter, nor does a prefix before a name, nor a second copy of a tied head. Pieces of 16 MiB are hashed side
by side: 2.2 GB of a model with 1.1 billion weights take 2 s on one core with SHA instructions, less on several.

Contract: the files are read as they lie on disk, before any change of type, so the hash is the same on every machine.
A checkpoint of ours has the hash of the folder that exporting it in fp32 gives: they are one model in two forms.
Trap: a model that was saved again in another type is another model. Adapters were trained on the rounded weights.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch
from torch import Tensor

from flatout.config.schema import ModelConfig
from flatout.model.hub import Description
from flatout.model.hub_weights import folded_weights, inventory, pieces_of
from flatout.model.weights import opened

PIECE = 2**24


def weights_fingerprint(description: Description) -> str:
    """The hash of the weights in a Hugging Face folder."""
    stored = inventory(description)
    if description.config.tied and len(stored.keys() & {"lm_head.weight", *_EMBEDDINGS}) > 1:
        stored.pop("lm_head.weight", None)  # reading the model checks that both are the same
    with ExitStack() as stack:
        files = {path: stack.enter_context(opened(path)) for path in {one.file for one in stored.values()}}
        return _hash((name, files[one.file].get_tensor(one.name)) for name, one in sorted(stored.items()))


def own_fingerprint(weights: Mapping[str, Tensor], config: ModelConfig, *, portable: bool) -> str:
    """The hash of the weights of a checkpoint: what `weights_fingerprint` makes of it once it is exported, in fp32.

    What cannot be exported (not `portable`) is hashed under our own names.
    """
    if not portable:
        return _hash(sorted(weights.items()))
    pieces, weights = sorted(pieces_of(config).items()), folded_weights(config, weights)
    return _hash((name, piece.of(weights[piece.name]).float()) for name, piece in pieces)


def _hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    total = hashlib.sha256()
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
        for name, tensor in tensors:
            described = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
            digests = threads.map(lambda piece: hashlib.sha256(piece).digest(), _pieces(tensor))
            total.update(hashlib.sha256(described.encode()).digest() + b"".join(digests))
    return total.hexdigest()


_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().data  # no copy: the file is mapped
    return (raw[start : start + PIECE] for start in range(0, len(raw), PIECE))
