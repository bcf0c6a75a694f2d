"""Chat templates: where they come from, what they are given, and what they must not reach."""

import json
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from flatout.confined import ChildLimits
from flatout.data.chat_template import (
    ChatTemplate,
    TemplateRefusal,
    child,
    load_template,
    read_templates,
    template_from_json,
)
from flatout.data.library_tokenizers import ModelTokenizer
from flatout.data.tokenizer import tokenizer_from_json
from flatout.data.tokenizer_files import read_model_tokenizer
from flatout.errors import DataError
from tests.chat_models import FAMILIES, LLAMA3, MARKED, SMOLLM2, chat, write_model

MESSAGES = chat("Hi", "Hello")


def template(text: str, **variables: str) -> ChatTemplate:
    return ChatTemplate("test", {"default": text}, variables)


# The surroundings.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}{{ unk_token }}", "<s></s>"),
        ("{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}", "Hi\n"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}", "Hello"),
        ("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", "Hi"),
        ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ {'b': [1, 2]} | tojson(separators=(',', ':')) }}", '{"b":[1,2]}'),
        ("{% set n = namespace(x=1) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}", "3"),
        ("{{ dict(a=1).a }}", "1"),
        ("{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}", "True True False"),
        ("{% generation %}x{% endgeneration %}y", "xy"),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
        ("{{ '<b>' }}", "<b>"),
    ],
)
def test_what_templates_are_given(text: str, expected: str):
    assert template(text, bos_token="<s>", eos_token="</s>").render(MESSAGES) == expected


def test_surroundings_are_those_of_transformers(tmp_path: Path):
    import transformers

    text = (
        "{{ bos_token }}{% for m in messages %}{% set x = m | tojson %}\n"
        "  {% if m.role == 'user' %}\n    {{ x | upper }} {{ loop.index }}\n  {% endif %}\n"
        "{{ m.content | trim }}{{ ' ' * 2 }}{{ m.reasoning_content }}|{{ m.thinking }}\n{% endfor %}{{ eos_token }}"
    )
    folder = write_model(tmp_path / "m", FAMILIES["llama3"], text)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours = load_template("model", folder, read_model_tokenizer(folder))
    assert ours is not None
    messages = [{"role": "user", "content": " é<'&\">\n"}, {"role": "assistant", "content": "a", "reasoning": "hm"}]
    assert ours.render(messages) == theirs.apply_chat_template(messages, tokenize=False)


def test_marks_are_left_alone_where_a_template_looks_at_its_own_output():
    looking = template("{% set x %}{% generation %}ab{% endgeneration %}{% endset %}{{ x | length }}{{ x }}")
    assert looking.render([]) == "2ab"
    assert looking.has_marks()
    assert looking.marked_spans([], "2ab") is None
    marked = template(MARKED)
    text = marked.render(MESSAGES)
    assert [text[a:b] for a, b in marked.marked_spans(MESSAGES, text) or []] == ["Hello<|im_end|>"]
    odd = chat("\ufdd0", "Hello")
    assert marked.marked_spans(odd, marked.render(odd)) is None


def test_time_stands_still():
    clock = template("{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}")
    assert clock.render([]) == clock.render([])


# The sandbox.


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__self__.__class__ }}",
        "{{ tojson.__globals__.x }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id') }}",
        "{{ joiner.__init__.__globals__.os }}",
        "{{ self.__init__.__globals__ }}",
        "{{ dict.__class__.__mro__ }}",
        "{{ ('' | attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{% set f = '{0.__class__.__init__}'.format %}{{ f(messages) }}",
        "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages.clear() }}",
        "{{ lipsum.__globals__.os }}",
        "{{ loop.__init__.__globals__ }}",
        "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.system('id') }}",
        "{{ range(10 ** 9) | length }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(text: str):
    before = json.dumps(MESSAGES)
    try:
        written = template(text).render(MESSAGES)
    except (DataError, TemplateRefusal):
        written = ""
    # What cannot be reached is undefined, which is written as nothing.
    assert written == ""
    assert json.dumps(MESSAGES) == before


@pytest.fixture(scope="module")
def impatient():
    """The child that renders, with less time and memory than it has otherwise."""
    usual = child().limits
    child().limits = ChildLimits(seconds=0.1, memory=2**28)
    child().close()
    yield
    child().limits = usual
    child().close()


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GREEDY = {
    "loops": (LOOPS, "takes more than 0.1 s of processor time"),
    "a long text": ("{{ 'a' * 10 ** 10 }}", "memory"),
    "a long text of a value": ("{{ messages[0].content * 10 ** 10 }}", "memory"),
    "text doubled": (
        "{% set n = namespace(t='ab') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
        "memory",
    ),
    "text in the middle": ("{{ messages[0].role | center(10 ** 9) }}", "memory"),
    "a width in a format": ("{{ '%1000000000s' % messages[0].role }}", "memory"),
    "a list": ("{{ ([messages] * 10 ** 9) | length }}", "memory"),
    "much output": ("{{ messages[0].role * 1000000 }}", "writes more than"),
}


@pytest.mark.skipif(sys.platform == "win32", reason="limits are those of POSIX")
@pytest.mark.parametrize("kind", GREEDY)
def test_templates_cannot_take_all_time_or_memory(impatient, kind):
    text, says = GREEDY[kind]
    with pytest.raises(DataError, match=says) as caught:
        template(text).render(MESSAGES)
    assert (caught.value.exit_code, "chat.template" in caught.value.hint) == (3, True)
    assert template("{{ messages[0].role }}").render(MESSAGES) == "user"


def test_what_passes_a_first_look_is_held_to_the_limits_later_on(impatient):
    text = "{% if messages | length > 1 %}" + LOOPS + "{% endif %}ok"
    sly = template(text)
    assert sly.render(MESSAGES[:1]) == "ok"
    with pytest.raises(DataError, match="processor time"):
        sly.render(MESSAGES)


def test_our_own_templates_need_no_child(monkeypatch, tmp_path: Path):
    tokenizer = read_model_tokenizer(write_model(tmp_path, FAMILIES["llama3"]))
    monkeypatch.setattr("flatout.data.chat_template.child", None)
    ours = load_template("plain", None, tokenizer)
    assert ours is not None
    assert tokenizer.begin is not None
    assert ours.render(MESSAGES).startswith(tokenizer.begin)
    assert template_from_json(ours.to_json()).render(MESSAGES) == ours.render(MESSAGES)
    with pytest.raises(TemplateRefusal, match="NoneType"):  # there is none to ask
        ChatTemplate("plain", {"default": ours.text + "{{ 1 }}"}, tokenizer.special)


@pytest.mark.parametrize("name", ["../../evil", "a/b", "..", "", "a\\b", "x" * 200])
def test_forms_with_names_that_lead_elsewhere(name: str):
    with pytest.raises(DataError, match="has a form named"):
        ChatTemplate("test", {"default": "x", name: "y"}, {})


def test_values_that_are_no_json_are_refused():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TemplateRefusal, match="not plain JSON"):
        template("{{ 1 }}").render([{"role": "user", "content": deep}])


def test_an_escape_is_an_error_that_names_the_template():
    with pytest.raises(DataError, match="test tries to leave its sandbox") as caught:
        template("{{ ''.__class__.__mro__ }}").render(MESSAGES)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ raise_exception('only two turns') }}", "only two turns"),
        ("{{ messages[5].role.x }}", "has no element 5"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "concatenate"),
        ("{{ messages | tojson(indent={}) }}", "TypeError"),
    ],
)
def test_refusals_keep_their_words(text: str, words: str):
    with pytest.raises(TemplateRefusal, match=words):
        template(text).render(MESSAGES)


@pytest.mark.parametrize("text", ["{% for %}", "{{ messages", "{% if x %}", "{% unknown %}", "{% generation %}x"])
def test_what_is_no_template(text: str):
    with pytest.raises(DataError, match="test is no Jinja template"):
        template(text)


# Where templates come from.


def test_templates_of_a_model(tmp_path: Path):
    folder = write_model(tmp_path / "m", FAMILIES["llama3"])
    assert read_templates(folder) == {"default": LLAMA3}
    write_model(
        folder, FAMILIES["llama3"], [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    )
    tokenizer = read_model_tokenizer(folder)
    both = load_template("model", folder, tokenizer)
    assert both is not None
    assert (both.render([]), both.render([], tools=[{"name": "f"}])) == ("a", "b")
    write_model(folder, FAMILIES["llama3"], None)
    assert read_templates(folder) == {}
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "old"}), encoding="utf-8")
    assert read_templates(folder) == {"default": "old"}
    (folder / "chat_template.jinja").write_text("new", encoding="utf-8")
    assert read_templates(folder) == {"default": "new"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools", encoding="utf-8")
    assert read_templates(folder) == {"default": "new", "tool_use": "tools"}


def test_a_model_without_a_template(tmp_path: Path):
    folder = write_model(tmp_path / "m", FAMILIES["llama3"], None)
    tokenizer = read_model_tokenizer(folder)
    with pytest.raises(DataError, match=r"has no chat template.*chatml, plain"):
        load_template("model", folder, tokenizer)
    assert load_template("none", folder, tokenizer) is None
    with pytest.raises(DataError, match=re.escape("chatml needs <|im_start|> and <|im_end|>")):
        load_template("chatml", folder, tokenizer)
    with pytest.raises(DataError, match="no chat template 'nothing'"):
        load_template("nothing", folder, tokenizer)
    (tmp_path / "own.jinja").write_text("{{ bos_token }}é", encoding="utf-8")
    own = load_template(str(tmp_path / "own.jinja"), folder, tokenizer)
    assert own is not None
    assert own.render([]) == "<|begin_of_text|>é"
    (tmp_path / "own.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match="cannot read the chat template"):
        load_template(str(tmp_path / "own.jinja"), folder, tokenizer)


def test_our_own_templates(tmp_path: Path):
    llama = read_model_tokenizer(write_model(tmp_path / "llama", FAMILIES["llama3"], None))
    plain = load_template("plain", None, llama)
    assert plain is not None
    text = plain.render(chat("Hi", "Hello", "one", "two", system="be short"))
    assert text == (
        "<|begin_of_text|>be short\n\n### Instruction:\nHi\n\n### Response:\nHello<|eot_id|>\n\n"
        "### Instruction:\none\n\n### Response:\ntwo<|eot_id|>\n\n"
    )
    prompt = plain.render(chat("Hi"), add_generation_prompt=True)
    assert prompt == "<|begin_of_text|>### Instruction:\nHi\n\n### Response:\n"
    qwen = read_model_tokenizer(write_model(tmp_path / "qwen", FAMILIES["qwen"], None))
    chatml = load_template("chatml", None, qwen)
    assert chatml is not None
    assert chatml.render(chat("Hi", "Hello"), add_generation_prompt=True) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    for ours in (plain, chatml):
        with pytest.raises(TemplateRefusal, match="no form for tools"):
            ours.render(MESSAGES, tools=[{"name": "f"}])
        with pytest.raises(TemplateRefusal, match="role tool"):
            ours.render([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("value", [3, ["a"], [{"name": "a"}], {"default": 1}])
def test_damaged_templates(tmp_path: Path, value: object):
    folder = write_model(tmp_path / "m", FAMILIES["llama3"], value)
    with pytest.raises(DataError, match="neither a text nor a list"):
        read_templates(folder)


def test_templates_are_values(tmp_path: Path):
    tokenizer = read_model_tokenizer(write_model(tmp_path / "m", FAMILIES["llama3"], None))
    for ours in (template(MARKED, bos_token="<s>"), load_template("plain", None, tokenizer)):
        assert ours is not None
        again = template_from_json(json.loads(json.dumps(ours.to_json())))
        assert again.fingerprint == ours.fingerprint
        assert again.render(MESSAGES) == ours.render(MESSAGES)
        # What other programs would read from chat_template.jinja.
        (tmp_path / "chat_template.jinja").write_text(ours.text, encoding="utf-8")
        file = load_template(str(tmp_path / "chat_template.jinja"), None, tokenizer)
        assert file is not None
        assert file.render(MESSAGES) == ours.render(MESSAGES)
    for damaged in ({}, {"name": "a", "texts": {}, "variables": {}}, {"name": "a", "texts": {"a": 1}, "variables": {}}):
        with pytest.raises(DataError, match="is damaged"):
            template_from_json(damaged)


def test_fingerprints_tell_templates_apart():
    assert template("a").fingerprint == template("a").fingerprint
    assert len({template(text, bos_token=bos).fingerprint for text in "ab" for bos in "xy"}) == 4


# The tokenizer of a model.


def test_a_model_tokenizer_is_a_value(tmp_path: Path):
    folder = write_model(tmp_path / "m", FAMILIES["mistral"])
    tokenizer = read_model_tokenizer(folder)
    again = tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))
    assert isinstance(again, ModelTokenizer)
    assert (again.fingerprint, again.vocab, again.end_of_text, again.begin_of_text, again.begin) == (
        tokenizer.fingerprint,
        tokenizer.vocab,
        tokenizer.token_id("</s>"),
        tokenizer.token_id("<s>"),
        "<s>",
    )
    for text in ("<s>[INST] Hi [/INST] one</s>", "é😀", ""):
        assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
    ids = tokenizer.encode("<s>[INST] Hi there")
    assert ids[0] == tokenizer.begin_of_text
    assert tokenizer.decode(ids).replace(" ", "") == "<s>[INST]Hithere"
    assert tokenizer.encode_prompt("<s>Hi").tolist().count(tokenizer.begin_of_text) == 1
    with pytest.raises(DataError, match="outside the tokenizer's vocabulary"):
        tokenizer.decode([tokenizer.vocab])


def test_truncation_padding_and_dropout_are_switched_off(tmp_path: Path):
    folder = write_model(tmp_path / "m", FAMILIES["qwen"])
    plain = read_model_tokenizer(folder)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["model"]["dropout"] = 0.9
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert read_model_tokenizer(folder).encode("Hello there Hi").tolist() == plain.encode("Hello there Hi").tolist()


def test_special_tokens_that_only_the_config_knows(tmp_path: Path):
    folder = write_model(tmp_path / "m", FAMILIES["qwen"], SMOLLM2)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    content["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["eos_token"] = {"content": "<|im_end|>", "special": True}
    highest = max(content["model"]["vocab"].values())
    entry = {"special": True, "lstrip": False}
    config["added_tokens_decoder"] = {
        str(ids["<|im_start|>"]): {"content": "<|im_start|>", **entry},
        str(highest + 1): {"content": "<new>", **entry},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = read_model_tokenizer(folder)
    assert tokenizer.encode("<|im_start|><|im_end|><new>").tolist() == [
        ids["<|im_start|>"],
        ids["<|im_end|>"],
        highest + 1,
    ]
    assert tokenizer.vocab == highest + 2


@pytest.mark.parametrize(
    ("change", "begin"),
    [
        ({}, "<s>"),
        ({"add_bos_token": False}, None),
        ({"add_bos_token": None}, "<s>"),
        ({"add_bos_token": None, "bos_token": None}, "<s>"),  # only the post-processor knows
        ({"add_bos_token": None, "bos_token": "[INST]"}, None),
    ],
)
def test_where_bos_is_expected(tmp_path: Path, change: dict, begin: str | None):
    folder = write_model(tmp_path / "m", FAMILIES["mistral"])
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **change}), encoding="utf-8")
    tokenizer = read_model_tokenizer(folder)
    assert tokenizer.begin == begin
    assert tokenizer.encode_prompt("Hi").tolist().count(tokenizer.token_id("<s>") or 0) == (begin is not None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"eos_token": "<nowhere>"}, "vocabulary lacks its eos_token '<nowhere>'"),
        ({"eos_token": 7}, "its eos_token is 7"),
        ({"added_tokens_decoder": {"x": {}}}, "no id with a token"),
        ({"added_tokens_decoder": {"77": {"content": "<|im_end|>"}}}, "has id 2 in tokenizer.json and 77"),
        ({"added_tokens_decoder": []}, None),
        ({"added_tokens_decoder": ["x"]}, "added_tokens_decoder is no object"),
    ],
)
def test_configs_that_contradict(tmp_path: Path, change: dict, words: str | None):
    folder = write_model(tmp_path / "m", FAMILIES["qwen"])
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **change}), encoding="utf-8")
    if words is None:
        assert read_model_tokenizer(folder).vocab
        return
    with pytest.raises(DataError) as caught:
        read_model_tokenizer(folder)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, "there is no tokenizer.json"),
        ("tokenizer.json", b"{", "is not JSON"),
        ("tokenizer.json", b"[]", "holds no JSON object"),
        ("tokenizer.json", b"{}", "is not usable"),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}', "is not usable"),
        ("tokenizer_config.json", b"\xff", "is not UTF-8"),
        ("tokenizer_config.json", b"{]", "is not JSON"),
        ("special_tokens_map.json", b"3", "holds no JSON object"),
    ],
)
def test_damaged_model_folders(tmp_path: Path, name: str, content: bytes | None, words: str):
    folder = write_model(tmp_path / "m", FAMILIES["qwen"])
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_model_tokenizer(folder)
    assert words in caught.value.message


def test_damaged_descriptions(tmp_path: Path):
    description = read_model_tokenizer(write_model(tmp_path / "m", FAMILIES["qwen"])).to_json()
    for change in ({"content": 3}, {"special": {"a": 1}}, {"begin": 1}, {"special": {"eos_token": "<x>"}}):
        with pytest.raises(DataError, match="description of a model tokenizer is not usable"):
            tokenizer_from_json({**description, **change})
