"""A model's weights and metadata as a GGUF file, by the `gguf` package.

Matrices are stored in the type that is asked for; vectors and learned positions are F32, as llama.cpp needs them. A
matrix whose rows are no multiple of 32 cannot be Q8_0 and is F16. Tensors are converted one at a time, and large ones
some rows at a time.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.errors import CheckpointError, UsageError
from flatout.gguf_file import KINDS
from flatout.model.gguf_weights import ROPE_FREQS, file_name, head_count, is_transposed, rope_factors, turned
from flatout.model.gpt import GPT
from flatout.model.hub import folded
from flatout.model.hub_folder import folded_weights, pieces_of

TYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "q8_0": "Q8_0"}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
_ROWS_AT_ONCE = 2**24  # values


def write_gguf(path: Path, model: GPT, values: Mapping[str, Any], dtype: str) -> None:
    """Writes a new file with this metadata; it is not synced to disk yet."""
    try:
        import gguf
    except ImportError as error:
        raise UsageError("GGUF files are written by the package gguf", "pip install 'flatout[gguf]'") from error
    writer = gguf.GGUFWriter(path, values["general.architecture"])
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    more = {"general.file_type": _FILE_TYPES[TYPES[dtype]], "general.quantization_version": 2}
    for key, value in {**values, **more}.items():
        if key != "general.architecture":
            writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])
    tensors = dict(_tensors(model, values["general.architecture"]))
    types = {name: _type_of(name, x, TYPES[dtype]) for name, x in tensors.items()}
    sizes = {name: (block, size) for name, block, size in KINDS.values()}
    for name, x in tensors.items():
        block, size = sizes[types[name]]
        raw_dtype = gguf.GGMLQuantizationType[types[name]]
        writer.add_tensor_info(name, x.shape, np.dtype(np.float32), x.numel() // block * size, raw_dtype)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, x in tensors.items():
            kind = gguf.GGMLQuantizationType[types[name]]
            rows = x.detach().split(max(1, _ROWS_AT_ONCE // x[0].numel()))
            parts = [gguf.quants.quantize(_finite(name, part.float().cpu(), kind.name), kind) for part in rows]
            writer.write_tensor_data(np.concatenate(parts))
    finally:
        writer.close()


def _tensors(model: GPT, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, as views where that is possible."""
    config = model.config
    weights = folded_weights(config, {name: x.detach() for name, x in model.named_parameters()})
    for name, piece in pieces_of(folded(config)).items():
        x = piece.of(weights[piece.name])
        if architecture == "llama" and (heads := head_count(name, config.heads, config.kv_heads)):
            x = turned(x, heads)
        yield file_name(name), x.T if is_transposed(name) else x
    if config.rope_scaling == "llama3":
        yield ROPE_FREQS, rope_factors(config)


def _type_of(name: str, x: Tensor, kind: str) -> str:
    if x.ndim == 1 or name.startswith("position_embd"):
        return "F32"
    return "F16" if kind == "Q8_0" and x.shape[-1] % 32 else kind


def _finite(name: str, part: Tensor, kind: str) -> np.ndarray:
    low, high = (part.half() if kind in ("F16", "Q8_0") else part).aminmax()
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise CheckpointError(
            f"{name} holds values that are not finite as {kind}",
            "export it as fp32 or bf16; if they are not finite there either, the model is broken",
        )
    return part.contiguous().numpy()
