"""Which tokens of a conversation are learned: by rendering its beginnings, never by looking for words in its text.

Idea: what an assistant turn adds to the text is what the model has to write. The template renders the conversation up
to the turn, with the prompt that makes a model answer, and up to the turn's end; if both are beginnings of the whole
text, the turn is what lies between. Its end-of-turn token is learned, the line end that some templates put after it is
not. The whole text is tokenized once, and a token is learned if it begins inside a turn.

Contract: a label is a matter of place, never of a token's id, so that a padding token which is the end-of-text token
cannot unlearn it. No token boundary is made up: the ids are those of the text as a model will see it. A token that lies
across the border of a turn is counted, and learned only if it begins inside.

Trap: some templates write earlier turns differently once later ones are there, such as without their reasoning. Then
no one text shows every turn as the model would write it, and each such turn becomes a sample of its own, which ends
with it. And some prompts hold more than a finished turn begins with; there the turn begins where the two part.
Nothing comes before a first message of the assistant, so no prompt can be rendered for it, and some templates write no
prompt after every role. The turn then begins behind the header that the template writes before any answer, the last
one in the text that does not depend on what the assistant says.
"""

import bisect
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt

from flatout.corpus.document import Problem
from flatout.data.chat_template import (
    DIFFERENT,
    ChatTemplate,
    TemplateRefusal,
    answer_of,
    common_beginning,
    reasoning_of,
)
from flatout.data.conversations import Conversation, RowError
from flatout.data.library_tokenizers import ModelTokenizer
from flatout.data.tokenizer import Ids, Tokenizer, token_dtype

TrainOn = Literal["assistant", "last", "all"]
Span = tuple[int, int]
_MOST_RENDERED = 2**29  # characters of all texts that one row is rendered to


@dataclass(frozen=True)
class Rendered:
    """A text and the characters of it that are learned. `bare`: no template wrote it, and BOS and EOS are missing."""

    text: str
    spans: tuple[Span, ...]
    bare: bool = False


def render(
    conversation: Conversation,
    template: ChatTemplate | None,
    train_on: TrainOn,
    special_texts: tuple[str, ...],
    counts: Counter[str],
) -> list[Rendered] | Problem:
    """The samples of a conversation: mostly one, of which the last is the whole text. `counts` has what is unusual."""
    try:
        if template is None or not conversation.messages:
            rendered = [_bare(conversation)]
        elif template.prompts_always(conversation.tools):
            raise RowError(
                "template",
                "the template writes an assistant's header after every conversation, asked for or not, so that the end "
                "of a turn cannot be found",
            )
        elif train_on == "all":
            rendered = [_everything(conversation, template, counts)]
        else:
            rendered = _turns(conversation, template, train_on, special_texts, counts)
        for sample in rendered:
            _check_unicode(sample.text)
    except RowError as error:
        return Problem(conversation.file, conversation.place, error.kind, error.message, records=1)
    except TemplateRefusal as error:
        message = f"the chat template refuses it: {' '.join(str(error).split())[:300]}"
        return Problem(conversation.file, conversation.place, "template", message, records=1)
    return rendered


def _bare(conversation: Conversation) -> Rendered:
    prompt, completion = conversation.prompt, conversation.completion
    if prompt is None or completion is None or conversation.tools:
        raise RowError("template", "it has turns, a system text or tools, and there is no chat template to write them")
    return Rendered(prompt + completion, ((len(prompt), len(prompt) + len(completion)),), bare=True)


def _everything(conversation: Conversation, template: ChatTemplate, counts: Counter[str]) -> Rendered:
    """The whole text, less the messages that are marked as not to be learned."""
    count = len(conversation.messages)
    left_out = [number for number, flag in enumerate(conversation.train) if flag is False]
    asks = [(end, False) for number in left_out for end in (number, number + 1)]
    texts = _Texts(template, conversation, [(count, False), *asks])
    text = texts(count)
    spans: list[Span] = []
    begin = 0
    for number, flag in enumerate(conversation.train):
        if flag is False:
            before = texts(number) if number else ""
            upto = texts(number + 1)
            if not (text.startswith(before) and text.startswith(upto)):
                raise RowError("template", "a message is not to be learned, and the template does not show where it is")
            spans.append((begin, len(before)))
            begin = len(upto)
    spans.append((begin, len(text)))
    for message in conversation.messages:
        counts["reasoning_left_out"] += _lacks_reasoning(message, text)
    _count_left_out(conversation, template, range(count), text, counts)
    return Rendered(text, tuple(span for span in spans if span[0] < span[1]))


def _turns(
    conversation: Conversation,
    template: ChatTemplate,
    train_on: TrainOn,
    special_texts: tuple[str, ...],
    counts: Counter[str],
) -> list[Rendered]:
    messages = conversation.messages
    spoken = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not spoken:
        raise RowError("turns", "it has no assistant turn, so there is nothing to learn")
    learned = [
        number for number in (spoken[-1:] if train_on == "last" else spoken) if conversation.train[number] is not False
    ]
    if not learned:
        raise RowError("turns", "its assistant turns are all marked as not to be learned")
    empty = [number for number in learned if _is_empty(messages[number])]
    if len(empty) == len(learned):
        raise RowError("empty", "what its assistant says is empty")
    counts["empty_answers"] += len(empty)
    # The text up to each turn is rendered, so this grows with the square of the number of turns.
    size = len(learned) * sum(len(message["content"]) for message in messages)
    if size > _MOST_RENDERED:
        raise RowError("too-long", f"its {len(learned):,} turns would be rendered as {size:,} characters")
    last = learned[-1]
    asks = [(number + 1, False) for number in learned]
    if not template.has_marks(conversation.tools):
        asks += [(number, True) for number in learned if number]
    texts = _Texts(template, conversation, asks)
    whole = texts(last + 1)
    marks = _marks(template, conversation, last, whole, spoken)
    spans: list[Span] = []
    apart: list[Rendered] = []
    for number in learned:
        upto = whole if number == last else texts(number + 1)
        within = whole.startswith(upto)
        here = marks if within else _marks(template, conversation, number, upto, spoken)
        if here is None:
            start, end = _start(texts, number, upto, counts), len(upto)
        else:
            start, end = here[spoken.index(number)]
            end = _with_end_token(upto, end, special_texts)
        end, ends = _without_trailing_space(upto, start, end, special_texts)
        counts["turns"] += 1
        counts["turns_without_end_token"] += not ends
        if start >= end:
            raise RowError("template", f"the template writes nothing for message {number + 1}, which is to be learned")
        _check_written(messages[number], number, upto[start:end], counts)
        if within:
            spans.append((start, end))
        else:
            apart.append(Rendered(upto, ((start, end),)))
    counts["turns_apart"] += len(apart)
    about = dataclasses.replace(conversation, messages=messages[: last + 1])
    _count_left_out(about, template, [number for number in range(last) if number not in spoken], whole, counts)
    return [*apart, Rendered(whole, tuple(spans))]


def _count_left_out(
    conversation: Conversation, template: ChatTemplate, numbers: Iterable[int], whole: str, counts: Counter[str]
) -> None:
    """Counts tools, and messages of these numbers, that the template leaves out of the text without an error."""
    if conversation.tools:
        counts["tools_left_out"] += _text_of(template, conversation, tools=None) == whole
    for number in numbers:
        message = conversation.messages[number]
        if (said := message["content"].strip()) and said not in whole:
            other = {**message, "content": message["content"] + DIFFERENT[0]}
            messages = (*conversation.messages[:number], other, *conversation.messages[number + 1 :])
            counts["contents_left_out"] += _text_of(template, conversation, messages=messages) == whole


def _check_written(message: dict[str, Any], number: int, turn: str, counts: Counter[str]) -> None:
    """Counts what the template leaves out of a turn, and refuses it without its tool calls."""
    for call in message.get("tool_calls", ()):
        if call["function"]["name"] not in turn:
            raise RowError("template", f"the template leaves out the tool call of message {number + 1}")
    counts["contents_changed"] += message["content"].strip() not in turn
    counts["reasoning_left_out"] += _lacks_reasoning(message, turn)


def _lacks_reasoning(message: dict[str, Any], text: str) -> bool:
    reasoning = reasoning_of(message)
    return isinstance(reasoning, str) and reasoning.strip() not in text


def _is_empty(message: dict[str, Any]) -> bool:
    return not message["content"].strip() and not message.get("tool_calls") and not reasoning_of(message)


def _start(texts: "_Texts", number: int, upto: str, counts: Counter[str]) -> int:
    """Where in `upto` the turn begins that ends it: after the prompt that makes a model answer."""
    header = texts.template.header(texts.conversation.tools)
    prompt = texts(number, prompt=True) if number or not header else ""
    if upto.startswith(prompt):
        if prompt.endswith(header) or (number and prompt != texts(number)):
            return len(prompt)
        found = _after_header(texts, number, upto, header, len(prompt))
        if found is not None or number:
            return len(prompt) if found is None else found
    if not number:
        raise RowError("turns", "it begins with an assistant turn, and the template does not show where that begins")
    before = texts(number)
    if not (upto.startswith(before) and prompt.startswith(before)):
        raise RowError(
            "template",
            f"the template writes what comes before message {number + 1} differently once that is there, "
            "so that its beginning cannot be found",
        )
    counts["prompts_apart"] += 1
    return next(place for place, (one, other) in enumerate(zip(prompt, upto, strict=False)) if one != other)


def _after_header(texts: "_Texts", number: int, upto: str, header: str, least: int) -> int | None:
    """Where in `upto` the turn begins that ends it, for which there is no prompt: behind `least` characters after the
    last header that is there whatever the answer is. None if there is no header."""
    template, about = texts.template, texts.conversation
    before = about.messages[:number]
    others = [_text_of(template, about, messages=(*before, answer_of(said))) for said in DIFFERENT]
    alike = common_beginning([upto, *others])
    place = alike.rfind(header, least)
    return None if place < 0 else place + len(header)


def _text_of(template: ChatTemplate, conversation: Conversation, **other: Any) -> str:
    """The whole text of a changed conversation."""
    changed = dataclasses.replace(conversation, **other)
    return _Texts(template, changed)(len(changed.messages))


def _marks(
    template: ChatTemplate, conversation: Conversation, number: int, text: str, spoken: Sequence[int]
) -> list[Span] | None:
    """The template's own marks in the text up to message `number`, if it has one for every assistant turn."""
    if not template.has_marks(conversation.tools):
        return None
    messages = conversation.messages[: number + 1]
    spans = template.marked_spans(messages, text, conversation.tools, conversation.documents)
    turns = sum(1 for place in spoken if place <= number)
    return spans if spans is not None and len(spans) == turns else None


def _with_end_token(text: str, end: int, special_texts: tuple[str, ...]) -> int:
    """Marks may leave out the token that ends the turn; without it a model never learns to stop."""
    if text[:end].rstrip().endswith(special_texts):
        return end
    return next((end + len(token) for token in special_texts if text.startswith(token, end)), end)


def _without_trailing_space(text: str, start: int, end: int, special_texts: tuple[str, ...]) -> tuple[int, bool]:
    """The end of the turn without white space after its last special token, and whether it has such a token."""
    turn = text[start:end].rstrip()
    if turn.endswith(special_texts):
        return start + len(turn), True
    return end, False


@final
class _Texts:
    """Beginnings of a conversation as the template writes them. Those known in advance are rendered all at once."""

    def __init__(
        self, template: ChatTemplate, conversation: Conversation, asks: Sequence[tuple[int, bool]] = ()
    ) -> None:
        self.template, self.conversation = template, conversation
        self._found: dict[tuple[int, bool], str | TemplateRefusal] = {}
        self._render(list(dict.fromkeys(asks)))

    def __call__(self, count: int, *, prompt: bool = False) -> str:
        if (count, prompt) not in self._found:
            self._render([(count, prompt)])
        found = self._found[count, prompt]
        if isinstance(found, TemplateRefusal):
            raise found
        return found

    def _render(self, asks: list[tuple[int, bool]]) -> None:
        about = self.conversation
        # No more than is asked for: a refusal of what comes later is none of a turn before it.
        messages = about.messages[: max((count for count, _ in asks), default=0)]
        if asks:
            texts = self.template.beginnings(messages, asks, about.tools, about.documents)
            self._found |= dict(zip(asks, texts, strict=True))


def _check_unicode(text: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            half = f"{text[error.start]!a}"
            raise RowError(
                "surrogate", f"it escapes half of a surrogate pair, {half}, which is not Unicode text"
            ) from error


def tokenize(
    rendered: Sequence[Rendered], tokenizer: ModelTokenizer, counts: Counter[str]
) -> list[tuple[Ids, npt.NDArray[np.bool_]]]:
    """Ids and labels of each text, many at once. The first token is never labelled: nothing comes before it."""
    results: list[tuple[Ids, npt.NDArray[np.bool_]]] = []
    dtype = token_dtype(tokenizer.vocab)
    for sample, encoding in zip(rendered, tokenizer.encodings([sample.text for sample in rendered]), strict=True):
        ids = np.array(encoding.ids, dtype=dtype)
        labelled = _labelled(encoding, len(ids), sample, counts)
        if sample.bare:
            ids, labelled = _with_ends(ids, labelled, tokenizer)
        labelled[:1] = False
        results.append((ids, labelled))
    return results


def _labelled(encoding: Any, length: int, sample: Rendered, counts: Counter[str]) -> npt.NDArray[np.bool_]:
    labelled = np.zeros(length, dtype=bool)
    tokens = range(length)

    def begin(token: int) -> int:
        return encoding.token_to_chars(token)[0]

    for start, end in sample.spans:
        first = bisect.bisect_left(tokens, start, key=begin) if start else 0
        after = length if end == len(sample.text) else bisect.bisect_left(tokens, end, lo=first, key=begin)
        labelled[first:after] = True
        counts["straddling"] += first > 0 and encoding.token_to_chars(first - 1)[1] > start
        counts["straddling"] += after > first and encoding.token_to_chars(after - 1)[1] > end
        counts["turns_unlabelled"] += after == first
    return labelled


def _with_ends(
    ids: Ids, labelled: npt.NDArray[np.bool_], tokenizer: ModelTokenizer
) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """BOS once, where the model expects it, and EOS once, which is learned."""
    if tokenizer.needs_begin(ids):
        ids = np.concatenate([np.array([tokenizer.begin_of_text], ids.dtype), ids])
        labelled = np.concatenate([[False], labelled])
    if tokenizer.end_of_text is not None and not (len(ids) and int(ids[-1]) == tokenizer.end_of_text):
        ids = np.concatenate([ids, np.array([tokenizer.end_of_text], ids.dtype)])
        labelled = np.concatenate([labelled, [True]])
    return ids, labelled


def preview(
    ids: npt.NDArray[Any], labelled: npt.NDArray[np.bool_], tokenizer: Tokenizer
) -> tuple[tuple[str, bool], ...]:
    """A sample as text, in pieces that are each learned as a whole, or not at all."""
    borders = [0, *(np.flatnonzero(labelled[1:] != labelled[:-1]) + 1).tolist(), len(ids)]
    pieces: list[tuple[str, bool]] = []
    before = ""
    for start, end in itertools.pairwise(borders):
        # By the difference of two beginnings: many decoders take the space away from what stands first.
        upto = tokenizer.decode(ids[:end])
        pieces.append((upto[len(before) :], bool(labelled[start])))
        before = upto
    return tuple(piece for piece in pieces if piece[0])


# The counts, in the order in which they are listed.
COUNTS: Mapping[str, str] = {
    "rows": "rows that were read",
    "rows_not_used": "rows that could not be used, with the reason of each in problems.jsonl beside the samples",
    "turns": "assistant turns that are learned",
    "turns_apart": "turns in samples of their own, since the template writes them differently later on",
    "prompts_apart": "turns that do not begin as the template's prompt does",
    "turns_without_end_token": "turns that end without a special token, so that plain text alone marks their end",
    "contents_changed": "turns that the template does not write as they stand in the file",
    "contents_left_out": "messages that the template leaves out",
    "reasoning_left_out": "turns whose reasoning the template leaves out",
    "tools_left_out": "rows with tools that the template does not mention",
    "turns_unlabelled": "turns of which no token begins inside",
    "straddling": "tokens across the border of a turn",
    "empty_answers": "empty assistant turns",
    "special_in_content": "rows whose own text spells a special token",
    "truncated": "samples cut to the context",
    "labels_cut": "labelled tokens that were cut away",
    "dropped_labels_cut": "samples dropped since all their labels were cut away",
    "dropped_unlabelled": "samples dropped since no token of them is labelled",
    "longest": "tokens of the longest sample before it was cut",
}
# What to do about counts that may not be intended.
ADVICE: Mapping[str, str] = {
    "turns_apart": "set chat.train_on=last if only last answers are to be learned",
    "prompts_apart": "chat ends its prompt differently from what is learned; set chat.template to change that",
    "contents_changed": "compare the preview with the rows; chat.template selects another template",
    "contents_left_out": "put their text into a system or user message, or set chat.template to one that writes them",
    "reasoning_left_out": "write it into the content, as the model should write it, or set chat.template",
    "tools_left_out": "set chat.template to one that writes tools, or leave them out of the rows",
    "straddling": "they are learned only if they begin inside; begin and end answers without white space",
    "empty_answers": "the model learns to end such a turn at once; leave them out, or mark them with train: false",
}


def count_text(name: str, count: int) -> str:
    """A count with its words."""
    what, comma, more = COUNTS[name].partition(",")
    if count == 1:
        what = " ".join(_OF_ONE.get(word, word) for word in what.split())
    return f"{count:,} {what}{comma}{more}"


_OF_ONE = {
    "rows": "row", "turns": "turn", "samples": "sample", "messages": "message", "tokens": "token",
    "were": "was", "are": "is", "end": "ends", "do": "does", "their": "its", "them": "it",
}  # fmt: skip
