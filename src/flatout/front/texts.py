"""Text from models: continuations of one prompt or many, and answers of chat models."""

import dataclasses
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout.data.chat_template import TemplateRefusal
from flatout.data.library_tokenizers import ModelTokenizer
from flatout.data.tokenizer import Tokenizer
from flatout.device import out_of_memory
from flatout.errors import DataError, UsageError
from flatout.front.models import LoadedModel, load_model, template_of
from flatout.generation.engine import Engine, TextRequest, fitting_rows, generate_tokens, no_probabilities
from flatout.generation.pieces import TextPieces
from flatout.generation.sampling import Sampling
from flatout.model.gpt import GPT


def generate(
    model: LoadedModel | str | Path | None = None,
    prompt: str | Sequence[str] = "\n",
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    cached: bool = True,
    bare: bool = True,
) -> Generator[str]:
    """Yields the continuation of `prompt` in pieces, as soon as each is whole text.

    Of several prompts, which are continued together, the whole texts come in their order; each has the next seed. A
    `bare` prompt was written by no template: BOS comes before it where the model expects that.
    """
    loaded = model if isinstance(model, LoadedModel) else load_model(model, weights="auto")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    how = {"count": tokens, "stops": loaded.stops}
    if not isinstance(prompt, str):
        yield from _together(loaded, [_ids_of(loaded, one, bare) for one in prompt], sampling, how)
        return
    made = generate_tokens(
        loaded.model,
        _ids_of(loaded, prompt, bare),
        sampling=sampling,
        vocab=loaded.tokenizer.vocab,
        kernels=loaded.kernels,
        scope=loaded.scope,
        cached=cached,
        **how,
    )
    yield from _in_pieces(loaded.tokenizer, made, loaded.stops)


def _ids_of(loaded: LoadedModel, prompt: str, bare: bool) -> list[int]:
    tokenizer = loaded.tokenizer
    encode = tokenizer.encode_prompt if bare and isinstance(tokenizer, ModelTokenizer) else tokenizer.encode
    ids = encode(prompt).tolist()
    if not ids:
        if tokenizer.end_of_text is None:
            raise DataError("the prompt is empty", "give at least one character to continue")
        ids = [tokenizer.end_of_text]
    return ids


def _together(
    loaded: LoadedModel, prompts: list[list[int]], sampling: Sampling, how: Mapping[str, Any]
) -> Iterator[str]:
    if loaded.from_python:
        raise UsageError("a model from Python continues one prompt at a time", "give one prompt")
    assert isinstance(loaded.model, GPT)
    with out_of_memory():
        rows = min(len(prompts), fitting_rows(loaded.model, loaded.device))
        where = {"vocab": loaded.tokenizer.vocab, "kernels": loaded.kernels, "scope": loaded.scope}
        engine = Engine(loaded.model, rows=max(1, rows), **where)
    try:
        requests = [
            engine.add(TextRequest(ids=ids, sampling=dataclasses.replace(sampling, seed=sampling.seed + place), **how))
            for place, ids in enumerate(prompts)
        ]
        for request in requests:
            with out_of_memory():
                while not request.ended:
                    engine.step()
            if request.ended == "broken":
                raise no_probabilities()
            yield "".join(_in_pieces(loaded.tokenizer, request.made, loaded.stops))
    finally:
        engine.close()


def chat(
    model: LoadedModel | str | Path | None,
    messages: str | Sequence[Mapping[str, Any]],
    *,
    tokens: int = 500,
    temperature: float = 0.7,
    top_k: int | None = None,
    top_p: float | None = 0.95,
    seed: int = 0,
) -> Generator[str]:
    """Yields the answer of a chat model to a message, or to a conversation that ends with one, in pieces.

    `messages` are mappings with `role` and `content`, as templates have them; a `system` one may come first. Without a
    template the last message is continued as bare text.
    """
    loaded = model if isinstance(model, LoadedModel) else load_model(model, weights="auto")
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    if not said or not isinstance(said[-1].get("content"), str):
        raise DataError("the conversation does not end with a message", "give a text, or mappings of role and content")
    prompt = chat_prompt(loaded, said[-1]["content"], said[:-1])
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    yield from generate(loaded, prompt, tokens=tokens, bare=False, **how)


def _in_pieces(tokenizer: Tokenizer, tokens: Iterable[int], stops: Collection[int]) -> Iterator[str]:
    """Text as it becomes whole."""
    pieces = TextPieces(tokenizer)
    for token in tokens:
        if token in stops:
            break
        if piece := pieces.add(token):
            yield piece
    if rest := pieces.rest():
        yield rest


def chat_prompt(model: LoadedModel, message: str, history: Sequence[Mapping[str, Any]] = ()) -> str:
    """The text after which the model answers `message`, by the template it was taught with.

    Without one it is the message, after BOS where the model expects it.
    """
    template = template_of(model)
    if template is None:
        return (model.tokenizer.begin or "") + message if isinstance(model.tokenizer, ModelTokenizer) else message
    try:
        return template.render([*history, {"role": "user", "content": message}], add_generation_prompt=True)
    except TemplateRefusal as error:
        raise DataError(
            f"the chat template refuses the conversation: {error}",
            "leave --system out if it has no place for it, or continue a bare text with `flatout generate`",
        ) from error


def is_untaught(model: LoadedModel) -> bool:
    """Whether a model has no template to chat by and was not taught to do without one either."""
    return not model.taught and template_of(model) is None
