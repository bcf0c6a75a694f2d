"""Masks token by token, against expectations written by hand and against the transformers library."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.corpus.document import Problem
from flatout.data.chat_template import ChatTemplate, load_template
from flatout.data.conversations import Conversation
from flatout.data.library_tokenizers import ModelTokenizer
from flatout.data.masking import Rendered, TrainOn, preview, render, tokenize
from flatout.data.tokenizer_files import read_model_tokenizer
from tests.chat_models import FAMILIES, LLAMA3, MARKED, QWEN3, THINKING, ZEPHYR, Family, chat, write_model

pytestmark = pytest.mark.usefixtures("children_stay")

Model = tuple[ModelTokenizer, ChatTemplate]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    """A family's tokenizer and template, or another template with its tokenizer."""
    made: dict[object, Model] = {}

    def load(name: str, template: str | None = None) -> Model:
        if (name, template) not in made:
            folder = tmp_path_factory.mktemp(name)
            write_model(folder, FAMILIES[name], ... if template is None else template)
            tokenizer = read_model_tokenizer(folder)
            loaded = load_template("model", folder, tokenizer)
            assert loaded is not None
            made[name, template] = tokenizer, loaded
        return made[name, template]

    return load


def conversation(messages: list[dict], train: tuple[bool | None, ...] | None = None, **more) -> Conversation:
    return Conversation("rows.jsonl", "line 1", tuple(messages), train or (None,) * len(messages), **more)


def samples_of(
    model: Model, messages: list[dict], train_on: TrainOn = "assistant", train=None, **more
) -> tuple[list[str], Counter[str]]:
    """Each sample as its tokens, with a star at those that are labelled."""
    tokenizer, template = model
    counts: Counter[str] = Counter()
    rendered = render(conversation(messages, train, **more), template, train_on, tokenizer.special_texts, counts)
    assert not isinstance(rendered, Problem), rendered
    return [starred(tokenizer, *pair) for pair in tokenize(rendered, tokenizer, counts)], counts


def starred(tokenizer: ModelTokenizer, ids: np.ndarray, labelled: np.ndarray) -> str:
    names = {number: text for text, number in tokenizer._tokenizer.get_vocab().items()}
    pairs = zip(ids.tolist(), labelled.tolist(), strict=True)
    return " ".join(names[number] + ("*" if label else "") for number, label in pairs)


def problem_of(model: Model, messages: list[dict], train_on: TrainOn = "assistant", train=None) -> Problem:
    tokenizer, template = model
    result = render(conversation(messages, train), template, train_on, tokenizer.special_texts, Counter())
    assert isinstance(result, Problem)
    return result


# Hand-made expectations.

TWO_TURNS = chat("Hi there", "Hello", "What is it", "one two")
EXPECTED = {
    "smollm2": "<|im_start|> system Ċ Hel p f u l Ġone <|im_end|> Ċ <|im_start|> user Ċ Hi Ġthere <|im_end|> Ċ "
    "<|im_start|> assistant Ċ Hello* <|im_end|>* Ċ <|im_start|> user Ċ What Ġis Ġit <|im_end|> Ċ "
    "<|im_start|> assistant Ċ one* Ġtwo* <|im_end|>* Ċ",
    "qwen": "<|im_start|> system Ċ Hel p f u l Ġtwo <|im_end|> Ċ <|im_start|> user Ċ Hi Ġthere <|im_end|> Ċ "
    "<|im_start|> assistant Ċ Hello* <|im_end|>* Ċ <|im_start|> user Ċ What Ġis Ġit <|im_end|> Ċ "
    "<|im_start|> assistant Ċ one* Ġtwo* <|im_end|>* Ċ",
    "llama3": "<|begin_of_text|> <|start_header_id|> user <|end_header_id|> Ċ Ċ Hi Ġthere <|eot_id|> "
    "<|start_header_id|> assistant <|end_header_id|> Ċ Ċ Hello* <|eot_id|>* "
    "<|start_header_id|> user <|end_header_id|> Ċ Ċ What Ġis Ġit <|eot_id|> "
    "<|start_header_id|> assistant <|end_header_id|> Ċ Ċ one* Ġtwo* <|eot_id|>*",
    "mistral": "<s> [INST] ▁ ▁ Hi ▁there ▁ [/INST] ▁* ▁* Hello* </s>* "
    "[INST] ▁ ▁ What ▁is ▁it ▁ [/INST] ▁* ▁one* ▁two* </s>*",
    "zephyr": "▁ <0x3C> <0x7C> user <0x7C> <0x3E> <0x0A> Hi ▁there </s> ▁ <0x0A> "
    "<0x3C> <0x7C> assistant <0x7C> <0x3E> <0x0A> Hello* </s>* ▁ <0x0A> "
    "<0x3C> <0x7C> user <0x7C> <0x3E> <0x0A> What ▁is ▁it </s> ▁ <0x0A> "
    "<0x3C> <0x7C> assistant <0x7C> <0x3E> <0x0A> one* ▁two* </s>* ▁ <0x0A>",
    "marked": "<|im_start|> user Ċ Hi Ġthere <|im_end|> Ċ <|im_start|> assistant Ċ Hello* <|im_end|>* Ċ "
    "<|im_start|> user Ċ What Ġis Ġit <|im_end|> Ċ <|im_start|> assistant Ċ one* Ġtwo* <|im_end|>* Ċ",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_two_turns_token_by_token(model, name: str):
    samples, counts = samples_of(model(name), TWO_TURNS)
    assert samples == [EXPECTED[name]]
    assert (counts["turns"], counts["straddling"], counts["turns_apart"], counts["turns_without_end_token"]) == (
        2,
        0,
        0,
        0,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_last_turn(model, name: str):
    samples, _ = samples_of(model(name), TWO_TURNS, "last")
    words = EXPECTED[name].split(" ")
    ends = [place for place, word in enumerate(words) if word.endswith("*") and not words[place - 1].endswith("*")]
    assert samples == [" ".join(word.rstrip("*") if place < ends[1] else word for place, word in enumerate(words))]


@pytest.mark.parametrize("name", FAMILIES)
def test_all_labels_everything_but_the_first_token(model, name: str):
    words = EXPECTED[name].replace("*", "").split(" ")
    samples, _ = samples_of(model(name), TWO_TURNS, "all")
    assert samples == [" ".join([words[0], *(f"{word}*" for word in words[1:])])]


def test_a_system_message(model):
    samples, _ = samples_of(model("llama3"), chat("Hi", "Hello", system="one"))
    assert samples == [
        "<|begin_of_text|> <|start_header_id|> system <|end_header_id|> Ċ Ċ one <|eot_id|> "
        "<|start_header_id|> user <|end_header_id|> Ċ Ċ Hi <|eot_id|> "
        "<|start_header_id|> assistant <|end_header_id|> Ċ Ċ Hello* <|eot_id|>*"
    ]
    samples, _ = samples_of(model("zephyr"), chat("Hi", "Hello", system="one"))
    assert samples == [
        "▁ <0x3C> <0x7C> system <0x7C> <0x3E> <0x0A> one </s> ▁ <0x0A> "
        "<0x3C> <0x7C> user <0x7C> <0x3E> <0x0A> Hi </s> ▁ <0x0A> "
        "<0x3C> <0x7C> assistant <0x7C> <0x3E> <0x0A> Hello* </s>* ▁ <0x0A>"
    ]


def test_tool_calls_are_learned_and_tool_results_are_not(model):
    messages = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"é": 1}}}],
        },
        {"role": "tool", "content": "two"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "one"},
    ]
    tools = ({"type": "function", "function": {"name": "f", "parameters": {}}},)
    tokenizer, template = model("qwen")
    rendered = render(conversation(messages, tools=tools), template, "assistant", tokenizer.special_texts, Counter())
    assert isinstance(rendered, list)
    assert len(rendered) == 1
    text = rendered[0].text
    assert [text[start:end] for start, end in rendered[0].spans] == [
        '<tool_call>\n{"name": "f", "arguments": {"é": 1}}\n</tool_call><|im_end|>',
        "one<|im_end|>",
    ]
    assert '{"type": "function", "function": {"name": "f", "parameters": {}}}\n</tools>' in text
    ids, labelled = tokenize(rendered, tokenizer, Counter())[0]
    assert tokenizer.decode(ids[labelled]) == "".join(text[start:end] for start, end in rendered[0].spans)


def test_tools_that_a_template_leaves_out_are_noticed(model):
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert "leaves out the tool call of message 2" in problem_of(model("marked"), messages).message
    tools = ({"type": "function", "function": {"name": "f"}},)
    for name, left_out in (("marked", 1), ("qwen", 0)):
        _, counts = samples_of(model(name), chat("Hi", "one"), tools=tools)
        assert counts["tools_left_out"] == left_out


def test_content_that_a_template_changes_is_counted(model):
    _, counts = samples_of(model("marked", MARKED.replace("message.content +", "message.content | upper +")), TWO_TURNS)
    assert counts["contents_changed"] == 2
    assert samples_of(model("llama3"), chat("Hi", " one "))[1]["contents_changed"] == 0


def test_messages_may_ask_not_to_be_learned(model):
    samples, _ = samples_of(model("marked"), TWO_TURNS, train=(None, False, None, True))
    assert samples == [EXPECTED["marked"].replace("Hello* <|im_end|>*", "Hello <|im_end|>")]
    problem = problem_of(model("marked"), TWO_TURNS, train=(None, False, None, False))
    assert problem.kind == "turns"
    assert problem_of(model("marked"), TWO_TURNS, "last", train=(None, None, None, False)).kind == "turns"
    samples, _ = samples_of(model("marked"), chat("Hi", "Hello"), "all", train=(False, None))
    assert samples == ["<|im_start|> user Ċ Hi <|im_end|> Ċ <|im_start|>* assistant* Ċ* Hello* <|im_end|>* Ċ*"]


def test_what_comes_after_the_last_learned_turn_is_left_out(model):
    samples, _ = samples_of(model("marked"), [*chat("Hi", "Hello"), {"role": "user", "content": "one"}])
    assert samples == ["<|im_start|> user Ċ Hi <|im_end|> Ċ <|im_start|> assistant Ċ Hello* <|im_end|>* Ċ"]


def test_an_empty_answer_teaches_its_end(model):
    samples, counts = samples_of(model("smollm2"), chat("Hi", "", "Hi", "one", system=""))
    assert samples == [
        "<|im_start|> system Ċ <|im_end|> Ċ <|im_start|> user Ċ Hi <|im_end|> Ċ "
        "<|im_start|> assistant Ċ <|im_end|>* Ċ <|im_start|> user Ċ Hi <|im_end|> Ċ "
        "<|im_start|> assistant Ċ one* <|im_end|>* Ċ"
    ]
    assert counts["empty_answers"] == 1
    assert problem_of(model("smollm2"), chat("Hi", " \n")).kind == "empty"


def test_a_token_across_the_border_is_counted_and_not_learned(model):
    samples, counts = samples_of(model("marked"), chat("Hi", "\n", "Hi", "one"))
    # The prompt's line end and the answer's are one token, which begins before the answer.
    assert samples[0].startswith("<|im_start|> user Ċ Hi <|im_end|> Ċ <|im_start|> assistant ĊĊ <|im_end|>* Ċ")
    assert counts["straddling"] == 1


def test_white_space_at_the_borders_stays_with_its_side(model):
    samples, counts = samples_of(model("marked"), chat(" Hi ", " one "))
    assert samples == ["<|im_start|> user Ċ Ġ Hi Ġ <|im_end|> Ċ <|im_start|> assistant Ċ Ġone* Ġ* <|im_end|>* Ċ"]
    assert counts["straddling"] == 0


def test_letters_of_several_tokens(model):
    samples, _ = samples_of(model("marked"), chat("é", "é😀"))
    assert samples == ["<|im_start|> user Ċ Ã © <|im_end|> Ċ <|im_start|> assistant Ċ Ã* ©* ð* Ł* ĺ* Ģ* <|im_end|>* Ċ"]


# Templates with habits of their own.


def test_turns_that_are_rewritten_later_become_samples_of_their_own(model):
    messages = chat("Hi", "one</think>Hello", "What", "two</think>one")
    samples, counts = samples_of(model("marked", THINKING), messages)
    assert samples == [
        "<|im_start|> user Ċ Hi <|im_end|> Ċ "
        "<|im_start|> assistant Ċ one* <* /* t* h* i* n* k* >* Hello* <|im_end|>* Ċ",
        "<|im_start|> user Ċ Hi <|im_end|> Ċ <|im_start|> assistant Ċ Hello <|im_end|> Ċ "
        "<|im_start|> user Ċ What <|im_end|> Ċ "
        "<|im_start|> assistant Ċ t* w* o* <* /* t* h* i* n* k* >* one* <|im_end|>* Ċ",
    ]
    assert (counts["turns"], counts["turns_apart"]) == (2, 1)


def test_a_prompt_that_holds_more_than_a_turn_begins_with(model):
    # Such as a model that is made to think, and whose finished turns are kept without.
    template = (
        MARKED.replace("{% generation %}", "")
        .replace("{% endgeneration %}", "")
        .replace("'<|im_start|>assistant\n' }}{% endif %}", "'<|im_start|>assistant\n<think>' }}{% endif %}")
    )
    samples, counts = samples_of(model("marked", template), chat("Hi", "Hello"))
    assert samples == ["<|im_start|> user Ċ Hi <|im_end|> Ċ <|im_start|> assistant Ċ Hello* <|im_end|>* Ċ"]
    assert counts["prompts_apart"] == 1


def test_marks_without_the_end_token_are_widened(model):
    template = MARKED.replace(
        "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}",
        "{% generation %}{{ message.content }}{% endgeneration %}{{ '<|im_end|>' }}",
    )
    samples, _ = samples_of(model("marked", template), TWO_TURNS)
    assert samples == [EXPECTED["marked"]]


def test_marks_and_prefixes_agree(model):
    plain = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert not model("marked", plain)[1].has_marks()
    assert model("marked")[1].has_marks()
    for messages in (TWO_TURNS, chat("Hi", " one ", system="two"), chat("Hi", "\n\none\n", "é", "Hello")):
        for train_on in ("assistant", "last"):
            assert (
                samples_of(model("marked"), messages, train_on)[0]
                == samples_of(model("marked", plain), messages, train_on)[0]
            )


def test_marks_and_prefixes_agree_where_history_is_rewritten(model):
    marked = THINKING.replace(
        "{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}",
        "{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
        "{% generation %}{{ content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ content + '<|im_end|>\n' }}{% endif %}",
    )
    messages = chat("Hi", "one</think>Hello", "What", "two", "Hi", "two</think>one")
    samples, counts = samples_of(model("marked", marked), messages)
    assert model("marked", marked)[1].has_marks()
    assert samples == samples_of(model("marked", THINKING), messages)[0]
    # The second turn has no reasoning, and the first is written the same ever after: they share a text.
    assert (len(samples), counts["turns_apart"]) == (2, 1)


# Llama 3.1's asks its first message for a role before it writes; Zephyr's writes its prompt inside the loop.
FIRST = {
    **{name: (name, None) for name in FAMILIES if name != "mistral"},
    "llama3.1": ("llama3", "{% if messages[0]['role'] == 'system' %}{% endif %}" + LLAMA3),
    "qwen3": ("qwen", QWEN3),
    "after users only": ("zephyr", ZEPHYR.replace("loop.last and", "loop.last and message['role'] == 'user' and")),
}


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("system", [None, "one"])
def test_a_row_may_begin_with_the_assistant(model, name: str, system: str | None):
    family, text = FIRST[name]
    tokenizer, template = model(family, text)
    messages = [answer("Hello"), *chat("Hi", "one"), answer("two")]
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    for upto in (1, 3) if name == "qwen3" else (1, 3, 4):  # qwen3 writes an answer differently once another follows
        turns = conversation(messages[: upto + (system is not None)])
        rendered = render(turns, template, "assistant", tokenizer.special_texts, Counter())
        assert isinstance(rendered, list), rendered
        said = ["Hello", "one", "two"][: upto // 2 + 1]
        learned = [sample.text[start:end] for sample in rendered for start, end in sample.spans]
        empty = "<think>\n\n</think>\n\n"
        assert sorted(part.replace(empty, "") for part in learned) == sorted(
            said_ + FAMILIES[family].after for said_ in said
        )
        assert not any(part.startswith(empty) for part in learned) or name == "qwen3"


def answer(content: str, **more: str) -> dict[str, str]:
    return {"role": "assistant", "content": content, **more}


def test_a_first_turn_in_a_text_that_spells_its_header(model):
    template = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    shouting = "{{ '<|im_start|>assistant\n' }}" + template
    _, loaded = model("marked", shouting)
    rendered = render(conversation([answer("<|im_start|>assistant\none")]), loaded, "assistant", (), Counter())
    assert isinstance(rendered, list)
    start, end = rendered[0].spans[0]
    assert rendered[0].text[start:end] == "<|im_start|>assistant\none<|im_end|>\n"


def test_a_first_turn_that_cannot_be_found_is_refused(model):
    template = (
        "{{ messages | map(attribute='content') | join | length }}{% for message in messages %}{{ message.content }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'one' }}{% endif %}"
    )
    problem = problem_of(model("marked", template), [answer("Hello")])
    assert "does not show where that begins" in problem.message


def test_what_a_template_leaves_out_is_counted(model):
    told = {"role": "developer", "content": "Be kind"}
    messages = [told, {"role": "user", "content": "Hi"}, answer("one", reasoning_content="two two")]
    for train_on in ("assistant", "last", "all"):
        _, counts = samples_of(model("zephyr"), messages, train_on)
        assert (counts["contents_left_out"], counts["reasoning_left_out"]) == (1, 1), train_on
        _, counts = samples_of(model("qwen", QWEN3), messages[1:], train_on)
        assert (counts["contents_left_out"], counts["reasoning_left_out"]) == (0, 0), train_on
    # Changed is not left out, and what is said elsewhere, too, is there.
    quoting = MARKED.replace("{% else %}{{ message.content", "{% else %}{{ (message.content | tojson)")
    _, counts = samples_of(model("marked", quoting), [{"role": "user", "content": 'a "b"'}, answer("one")])
    assert counts["contents_left_out"] == 0


def test_a_template_without_a_prompt_or_end_token_teaches_what_it_writes(model):
    template = "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    samples, counts = samples_of(model("marked", template), chat("Hi", "one"))
    assert samples == ["user : Ġ Hi Ċ assistant* :* Ġone* Ċ*"]
    assert counts["turns_without_end_token"] == 1


@pytest.mark.parametrize(
    ("name", "messages", "words"),
    [
        ("mistral", [*chat("Hi", "one"), {"role": "assistant", "content": "two"}], "alternate"),
        ("mistral", chat("Hi", "one", system="two"), "alternate"),
        ("marked", [{"role": "user", "content": "Hi"}], "no assistant turn"),
        ("marked", chat("Hi", "\ud83d"), "half of a surrogate pair"),
    ],
)
def test_rows_that_cannot_be_used(model, name: str, messages: list[dict], words: str):
    problem = problem_of(model(name), messages)
    assert words in problem.message
    assert (problem.file, problem.place, problem.records) == ("rows.jsonl", "line 1", 1)


def test_a_template_that_always_prompts_is_refused(model):
    template = LLAMA3.replace("{% if add_generation_prompt %}", "").replace("\n\n' }}{% endif %}", "\n\n' }}")
    assert template != LLAMA3
    loaded = model("llama3", template)
    assert loaded[1].prompts_always()
    assert not any(model(name)[1].prompts_always() for name in FAMILIES)
    assert "asked for or not" in problem_of(loaded, chat("Hi", "one")).message


def test_a_template_that_hides_where_answers_begin_is_refused(model):
    template = "{{ messages | length }}{% for message in messages %}{{ message.content }}{% endfor %}"
    assert "differently" in problem_of(model("marked", template), chat("Hi", "one")).message


def test_a_template_that_leaves_the_answer_out_is_refused(model):
    template = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
    assert "nothing for message 2" in problem_of(model("marked", template), chat("Hi", "one")).message


# Without a template.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3", "<|begin_of_text|> Hi Ġthere* Ġone* <|eot_id|>*"),
        ("mistral", "<s> ▁ Hi ▁there* ▁one* </s>*"),
        ("zephyr", "<s> ▁ Hi ▁there* ▁one* </s>*"),
        ("qwen", "Hi Ġthere* Ġone* <|im_end|>*"),
    ],
)
def test_bare_prompts_get_bos_and_eos_once(model, name: str, expected: str):
    tokenizer, _ = model(name)
    bare = conversation([], prompt="Hi", completion=" there one")
    rendered = render(bare, None, "assistant", tokenizer.special_texts, Counter())
    assert rendered == [Rendered("Hi there one", ((2, 12),), bare=True)]
    assert starred(tokenizer, *tokenize(rendered, tokenizer, Counter())[0]) == expected
    begin = tokenizer.begin or ""
    spelled = f"{begin}Hi there one{tokenizer.special['eos_token']}"
    written = [Rendered(spelled, ((len(begin) + 2, len(spelled)),), bare=True)]
    again = starred(tokenizer, *tokenize(written, tokenizer, Counter())[0])
    assert again.count("<s>") + again.count("<|begin_of_text|>") == bool(begin)
    assert again.split(" ")[-1] == expected.split(" ")[-1]
    assert again.count(tokenizer.special["eos_token"]) == 1


def test_raw_text_is_learned_from_its_first_token_on(model):
    tokenizer, template = model("llama3")
    rendered = render(conversation([], prompt="", completion="Hi there"), template, "last", (), Counter())
    assert isinstance(rendered, list)
    expected = "<|begin_of_text|> Hi* Ġthere* <|eot_id|>*"
    assert starred(tokenizer, *tokenize(rendered, tokenizer, Counter())[0]) == expected


def test_conversations_need_a_template(model):
    tokenizer, _ = model("qwen")
    problem = render(conversation(TWO_TURNS), None, "assistant", tokenizer.special_texts, Counter())
    assert isinstance(problem, Problem)
    assert "no chat template" in problem.message


# Against the transformers library.

CONVERSATIONS = [
    TWO_TURNS,
    chat("Hi", "é😀 one\n"),
    chat(" Hi\n", "\tone ", "", "two"),
    chat("Hi <b>&'\"", "Hello", "\u2028\u0085", "one"),
]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory):
    import transformers

    def load(name: str):
        folder = write_model(tmp_path_factory.mktemp(name), FAMILIES[name])
        return transformers.PreTrainedTokenizerFast.from_pretrained(folder)

    return load


@pytest.mark.parametrize("name", FAMILIES)
def test_text_and_ids_are_those_of_transformers(model, oracle, name: str):
    theirs, (tokenizer, template) = oracle(name), model(name)
    assert tokenizer.vocab == len(theirs)
    for messages in CONVERSATIONS:
        for prompt in (False, True):
            text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert template.render(messages, add_generation_prompt=prompt) == text
        ids = theirs.apply_chat_template(messages, return_dict=False)
        rendered = render(conversation(messages), template, "assistant", tokenizer.special_texts, Counter())
        assert isinstance(rendered, list)
        assert tokenize(rendered, tokenizer, Counter())[0][0].tolist() == ids
        assert tokenizer.encode(text).tolist() == theirs(text, add_special_tokens=False).input_ids
        assert ids.count(theirs.bos_token_id) <= 1 or name == "smollm2"
    for text in ("Hi there", "", "é one"):
        assert tokenizer.encode_prompt(text).tolist() == theirs(text).input_ids


def test_tools_are_written_as_transformers_writes_them(model, oracle):
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"b": 1, "a": [None]}}}]
    theirs = oracle("qwen").apply_chat_template(TWO_TURNS, tools=tools, tokenize=False)
    assert model("qwen")[1].render(TWO_TURNS, tools=tools) == theirs
    assert "<é>" in theirs


def test_marks_are_found_where_transformers_finds_them(model, oracle):
    for messages in CONVERSATIONS[:2]:
        theirs = oracle("marked").apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        tokenizer, template = model("marked")
        rendered = render(conversation(messages), template, "assistant", tokenizer.special_texts, Counter())
        assert isinstance(rendered, list)
        assert tokenize(rendered, tokenizer, Counter())[0][1].tolist() == [bool(m) for m in theirs["assistant_masks"]]


# Any conversation.

WORDS = st.one_of(
    st.text(max_size=12),
    st.text(alphabet=" \n\tHiaé😀\u2028\u00a0", max_size=8),
    st.sampled_from(["Hello", " one", "two\n", "\n\n", "What is it"]),
).filter(lambda text: "<" not in text and "[" not in text)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_labelled_text_is_what_the_assistant_says(model, family: Family, data: st.DataObject):
    contents = data.draw(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4))
    system = data.draw(st.none() | WORDS) if family.systems else None
    messages = chat(*(text for pair in contents for text in pair), system=system)
    tokenizer, template = model(family.name)
    counts: Counter[str] = Counter()
    rendered = render(conversation(messages), template, "assistant", tokenizer.special_texts, counts)
    if not any(answer.strip() for _, answer in contents):
        assert isinstance(rendered, Problem)
        return
    assert isinstance(rendered, list)
    assert len(rendered) == 1
    said = [family.learned(answer) for _, answer in contents]
    assert [rendered[0].text[start:end] for start, end in rendered[0].spans] == said
    ids, labelled = tokenize(rendered, tokenizer, counts)[0]
    ends = [tokenizer.token_id(family.after)]
    # Every turn's end is learned, whatever else happens at its borders.
    assert int(np.isin(ids[labelled], ends).sum()) == len(contents)
    if not counts["straddling"] and family.tokenizer != "pieces":
        assert tokenizer.decode(ids[labelled]) == "".join(said)
        shown = preview(ids, labelled, tokenizer)
        assert "".join(text for text, _ in shown) == rendered[0].text
        assert "".join(text for text, learned in shown if learned) == "".join(said)


@given(contents=st.lists(WORDS, min_size=2, max_size=4))
@settings(max_examples=60, deadline=None)
def test_ids_never_depend_on_the_labels(model, contents: list[str]):
    tokenizer, template = model("llama3", LLAMA3)
    messages = chat(*contents[: len(contents) // 2 * 2])
    rendered = render(conversation(messages), template, "all", tokenizer.special_texts, Counter())
    assert isinstance(rendered, list)
    whole = tokenize(rendered, tokenizer, Counter())[0][0]
    assert whole.tolist() == tokenizer.encode(rendered[0].text).tolist()


def test_preview_keeps_spaces_of_pieces(model, tmp_path: Path):
    tokenizer, template = model("mistral")
    rendered = render(conversation(TWO_TURNS), template, "assistant", tokenizer.special_texts, Counter())
    assert isinstance(rendered, list)
    pieces = preview(*tokenize(rendered, tokenizer, Counter())[0], tokenizer)
    assert [learned for _, learned in pieces] == [False, True, False, True]
    assert pieces[1][0].strip() == "Hello</s>"
    assert pieces[3][0].strip() == "one two</s>"
