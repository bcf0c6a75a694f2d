"""Text from a trained model: continuing a prompt, and the prompt of a chat."""

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout.api.models import LoadedModel, load_model
from flatout.data.chat_template import ChatTemplate, TemplateRefusal, load_template
from flatout.data.model_folder import read_templates
from flatout.data.tokenizer import ModelTokenizer, Tokenizer
from flatout.errors import DataError
from flatout.generation import generate_tokens


def generate(
    model: LoadedModel | str | Path | None = None,
    prompt: str = "\n",
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

    A `bare` one was written by no template: BOS comes before it where the model expects that.
    """
    loaded = model if isinstance(model, LoadedModel) else load_model(model)
    tokenizer = loaded.tokenizer
    if bare and isinstance(tokenizer, ModelTokenizer):
        ids = tokenizer.encode_prompt(prompt).tolist()
    else:
        ids = tokenizer.encode(prompt).tolist()
    if not ids:
        if tokenizer.end_of_text is None:
            raise DataError("the prompt is empty", "give at least one character to continue")
        ids = [tokenizer.end_of_text]
    tokens_out = generate_tokens(
        loaded.model,
        ids,
        count=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stops=loaded.stops,
        vocab=tokenizer.vocab,
        cached=cached,
    )
    yield from _in_pieces(tokenizer, tokens_out, loaded.stops)


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
    loaded = model if isinstance(model, LoadedModel) else load_model(model)
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    if not said or not isinstance(said[-1].get("content"), str):
        raise DataError("the conversation does not end with a message", "give a text, or mappings of role and content")
    prompt = chat_prompt(loaded, said[-1]["content"], said[:-1])
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    yield from generate(loaded, prompt, tokens=tokens, bare=False, **how)


def _in_pieces(tokenizer: Tokenizer, tokens: Iterable[int], stops: Collection[int]) -> Iterator[str]:
    """Text as it becomes whole. A character of several tokens waits for its last one.

    Only the tokens since the piece before the last are decoded again, so long outputs cost no more per token than
    short ones; the piece before is kept for tokenizers that write a space differently at the start of a text.
    """
    ids: list[int] = []
    piece, fresh = 0, 0  # where the last piece began, and where it ended
    for token in tokens:
        if token in stops:
            break
        ids.append(token)
        before, now = tokenizer.decode(ids[piece:fresh]), tokenizer.decode(ids[piece:])
        if len(now) > len(before) and not now.endswith("\ufffd"):
            yield now[len(before) :]
            piece, fresh = fresh, len(ids)
    rest = tokenizer.decode(ids[piece:])[len(tokenizer.decode(ids[piece:fresh])) :]
    if rest:
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


def template_of(model: LoadedModel) -> ChatTemplate | None:
    folder = None if model.description is None else model.description.folder
    # A run that was taught without a template must not be asked with that of its base, nor must its adapter.
    others = model.config is None and not model.bare
    if model.template is None and folder is not None and others and isinstance(model.tokenizer, ModelTokenizer):
        return load_template("model", folder, model.tokenizer) if read_templates(folder) else None
    return model.template
