"""Proof that written files are the model they were written from: logits on a held text, read back and by others.

Two comparisons. The files, read by Flatout, against the model itself: in fp32 nothing may be lost but the order of
sums, in narrower types this is what their rounding costs. And another library on the same files, where it is installed:
transformers for a Hugging Face folder, llama.cpp (the package xllamacpp) for GGUF. Both have the same weights, so they
differ by arithmetic alone. llama.cpp rounds activations as well, to bf16 or to 8 bits, and looks GPT-2's GELU up in a
table of fp16.
"""

import dataclasses
import importlib.util
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from flatout.data.library_tokenizers import ModelTokenizer
from flatout.device import out_of_memory
from flatout.errors import CheckpointError, DataError
from flatout.front.models import LoadedModel
from flatout.gguf_file import is_gguf
from flatout.model import llama_cpp
from flatout.model.hub import read_description
from flatout.model.hub_folder import load_described

TOKENS = 64
_TEXT = (
    "The ship left at 7:45 with 12 sailors and a dog.\n\n\"Won't it rain?\" asked Anna; they'd seen 3,000 gulls, "
    "all flying   inland. A café stood open - naïve, he thought.\nThat was 1984."
)
_LIKELIEST = 100  # tokens of a position that are compared in llama.cpp
# What logits may differ by, as a share of their spread. Rounding is small beside it; another model is not.
_MOST = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1, "q8_0": 0.2}
_REPORT = "report it with the settings of model, and do not use the files"


@dataclasses.dataclass(frozen=True)
class Held:
    """A text's ids, and the model's logits [T, V] on them. No text: the tokenizer cannot hold it."""

    ids: tuple[int, ...]
    text: str | None
    plain: int  # a token of whole characters
    logits: Tensor


def held_text(loaded: LoadedModel) -> Held:
    """The model on the held text. Where its tokenizer does not know the text, on any ids."""
    tokenizer, most = loaded.tokenizer, max(1, min(TOKENS, loaded.model.config.context - 1))  # llama.cpp wants room
    try:
        encode = tokenizer.encode_prompt if isinstance(tokenizer, ModelTokenizer) else tokenizer.encode
        ids, plain = encode(_TEXT).tolist(), int(tokenizer.encode("a")[-1])
        text = _TEXT if len(ids) <= most else None
    except DataError:
        ids = torch.randint(tokenizer.vocab, (most,), generator=torch.Generator().manual_seed(0)).tolist()
        text, plain = None, 0
    ids = ids[:most]
    return Held(tuple(ids), text, plain, loaded(ids).cpu().float())


@dataclasses.dataclass(frozen=True)
class Proof:
    """The largest differences of logits; `library` is None where none is installed."""

    tokens: int
    dtype: str
    read_back: float
    library: str | None = None
    other: float | None = None

    def __str__(self) -> str:
        cost = "" if self.dtype == "fp32" else f", which is the rounding to {self.dtype}"
        said = f"checked on {self.tokens} tokens: logits of the written files differ from the model's by at most "
        said += f"{self.read_back:.2g}{cost}"
        if self.library is None:
            return f"{said}; no other library that reads them is installed here"
        return f"{said}; those of {self.library} differ from that by at most {self.other:.2g}"


def prove(path: Path, held: Held, dtype: str) -> Proof:
    """Compares the model in a folder or a GGUF file with the one that it was written from; refuses another."""
    description = read_description(path)
    with torch.no_grad(), out_of_memory():
        ours = load_described(description).eval().logits(torch.tensor([held.ids]))[0].float()
    proof = Proof(len(held.ids), dtype, _difference(ours, held.logits, _MOST[dtype], f"{path}, as Flatout reads it,"))
    library = _library(path)
    if library is None:
        return proof
    if is_gguf(path):
        other = _llama_cpp(path, held, ours, _MOST[dtype], library)
    else:
        other = _difference(_transformers(path, held.ids), ours, _MOST["fp32"], library)
    return dataclasses.replace(proof, library=library, other=other)


def _library(path: Path) -> str | None:
    """The other library for a model's format, with its version, if it is installed."""
    name, package = ("llama.cpp (xllamacpp", "xllamacpp") if is_gguf(path) else ("transformers", "transformers")
    if importlib.util.find_spec(package) is None:
        return None
    return f"{name} {version(package)}" + ")" * name.count("(")


def _difference(found: Tensor, expected: Tensor, most: float, who: str) -> float:
    """The largest difference of two tensors of logits."""
    difference = float((found - expected).abs().max())
    spread = float(expected.max() - expected.min())
    if not difference <= most * max(1.0, spread):  # also if it is no number
        raise CheckpointError(
            f"{who} computes other logits than the model that was written: they differ by {difference:.3g}", _REPORT
        )
    return difference


def _transformers(folder: Path, ids: Sequence[int]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        loud = logging.get_verbosity()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, attn_implementation="eager")
            with torch.no_grad():
                return model.float().eval()(torch.tensor([list(ids)])).logits[0]
        except Exception as error:  # the library raises many kinds
            raise CheckpointError(f"transformers cannot load what was written: {error!s:.300}", _REPORT) from error
        finally:
            logging.set_verbosity(loud)


def _llama_cpp(path: Path, held: Held, ours: Tensor, most: float, who: str) -> float:
    """As `_difference`, of log-probabilities of the likeliest tokens; also that it cuts the text into the same ids."""
    found, count = llama_cpp.log_probabilities(
        path, held.ids, plain=held.plain, most=min(_LIKELIEST, ours.shape[1]), text=held.text
    )
    if count not in (None, len(held.ids)):
        raise CheckpointError(f"{who} makes {count} tokens of the held text, Flatout {len(held.ids)}", _REPORT)
    rows = ours.log_softmax(-1)
    if held.text is not None:
        rows = torch.cat([rows, rows[-1:]])  # its last answer is to the text itself
    theirs = rows.clone()
    for place, likeliest in enumerate(found):
        theirs[place, list(likeliest)] = torch.tensor(list(likeliest.values()))
    return _difference(theirs, rows, most, who)
