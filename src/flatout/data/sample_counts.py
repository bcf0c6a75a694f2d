"""What is counted while rows become samples, in words, and what to do about it.

Idea: a template may leave out, change or split what a row says, and so may the context. Each of it is counted in
`masking` and `make_samples`, kept in the manifest of the samples, and told at the start of a run and by the doctor.
"""

from collections.abc import Mapping

# What is counted, in the order in which it is of interest.
COUNTS: Mapping[str, str] = {
    "rows": "rows that were read",
    "rows_not_used": "rows that could not be used, with the reason of each in problems.jsonl beside the samples",
    "turns": "assistant turns that are learned",
    "turns_apart": "turns in samples of their own, since the template writes them differently later on",
    "prompts_apart": "turns that do not begin as the template's prompt does",
    "turns_without_end_token": "turns that end without a special token, so that only text tells a model to stop",
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


# What to do about those that need not be what was meant.
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


def count_told(name: str, count: int) -> str:
    """A count with the words that say what it is of."""
    what, comma, more = COUNTS[name].partition(",")
    if count == 1:
        what = " ".join(_OF_ONE.get(word, word) for word in what.split())
    return f"{count:,} {what}{comma}{more}"


_OF_ONE = {
    "rows": "row", "turns": "turn", "samples": "sample", "messages": "message", "tokens": "token",
    "were": "was", "are": "is", "end": "ends", "do": "does", "their": "its", "them": "it",
}  # fmt: skip
