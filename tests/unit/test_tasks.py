"""Log-likelihoods against a plain reference, task files, scores, and the `LM` class for lm-evaluation-harness."""

import gzip
import json
import math
import types

import pytest
import torch

import flatout
from flatout.errors import CheckpointError, DataError, UsageError
from flatout.tasks.files import find_tasks, read_questions
from flatout.tasks.harness import harness_model
from flatout.tasks.likelihood import Subject, known, log_likelihoods, windows
from flatout.tasks.scores import answered, scores_of, sheet_of
from tests.chat_models import write_chat_model
from tests.unit.test_generate import FAMILIES, lively_model

QUESTIONS = [
    {"query": "Question: what is one", "choices": ["two", "one is one"], "gold": 1},
    {"query": "Hello", "choices": ["there", "assistant", "user"], "gold": 0},
    {"query": "What is it\n\nQuestion: is it two\n", "choices": ["it is", "two"], "gold": 0},
]
CLOZES = [{"context": "one is one ", "continuation": "it"}, {"context": "Hello", "continuation": " there"}]
SCHEMAS = [{"context_options": ["Hello one", "Hello two"], "continuation": "is it", "gold": 1}] * 3


def write(path, rows):
    text = "".join(f"{json.dumps(row)}\n\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """A drawn model that has opinions, with a tokenizer that puts BOS before every text."""
    folder = write_chat_model(tmp_path_factory.mktemp("model") / "chatty", "llama3", context=64)
    loaded = flatout.load_model(folder, device="cpu")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return loaded


def subject_of(loaded) -> Subject:
    return Subject(model=loaded.model, tokenizer=loaded.tokenizer, stops=loaded.stops)


# --- log-likelihoods --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [*FAMILIES, {"pattern": "EA", "states": 8}, {"pattern": "WA", "window": 4}])
def test_batches_give_what_one_pass_for_each_pair_gives(variant):
    model = lively_model(variant).train()
    draw = torch.Generator().manual_seed(2)
    pairs = [
        tuple(torch.randint(61, (length,), generator=draw).tolist() for length in lengths)
        for lengths in [(1, 1), (3, 5), (20, 1), (7, 17), (30, 4), (2, 40), (5, 3)]
    ]
    pairs += [(pairs[1][0], [token]) for token in range(61)]  # choices of one token, one of which is greedy
    found = log_likelihoods(Subject(model=model, tokenizer=None), pairs)
    assert model.training
    for (before, after), (value, greedy) in zip(pairs, found, strict=True):
        ids = [*before, *after][-25:]
        count = min(len(after), 24)
        with torch.no_grad():
            log_TV = model.eval().logits(torch.tensor([ids[:-1]]))[0, -count:].log_softmax(-1)
        own = log_TV.gather(1, torch.tensor(ids[-count:])[:, None])[:, 0]
        assert value == pytest.approx(float(own.sum()), abs=1e-4)
        assert greedy == (log_TV.argmax(-1).tolist() == ids[-count:])
    assert sum(greedy for _, greedy in found[-61:]) == 1


def test_a_model_without_probabilities_is_an_error():
    model = lively_model({})
    torch.nn.init.constant_(model.embedding.weight, math.nan)
    with pytest.raises(CheckpointError, match="no probabilities"):
        known(log_likelihoods(Subject(model=model, tokenizer=None), [([1], [2])]))


@pytest.mark.parametrize(("count", "size", "stride"), [(50, 12, 5), (50, 12, 12), (7, 12, 3), (51, 13, 12), (40, 8, 1)])
def test_windows_score_every_token_but_the_first_once(count, size, stride):
    ids = list(range(count))
    pairs = list(windows(ids, size, stride))
    assert [id for _, after in pairs for id in after] == ids[1:]
    for before, after in pairs:
        assert [*before, *after] == ids[before[0] : after[-1] + 1]
        assert len(before) + len(after) in (min(size, count), size + (stride == size))
        assert len(after) <= stride or before == ids[:1]


def test_loss_by_sliding_windows(chatty, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Hello there, one is it. " * 40, encoding="utf-8")
    found = {stride: flatout.evaluate(chatty, data=text, stride=stride) for stride in (16, 64)}
    ids = chatty.tokenizer.encode_prompt(text.read_text()).tolist()
    total, done = 0.0, 1
    for begin in range(0, len(ids), 16):  # as in the documentation of transformers
        end = min(begin + 64, len(ids))
        begin, new = max(0, end - 64), end - done
        log_TV = chatty([ids[begin:end]])[0].log_softmax(-1)
        total -= float(log_TV[-new - 1 : -1].gather(1, torch.tensor(ids[done:end])[:, None]).sum()) if new else 0.0
        done = end
    assert found[16].loss == pytest.approx(total / (len(ids) - 1), abs=1e-5)
    assert found[16].tokens == found[64].tokens == len(ids) - 1
    assert found[16].bits_per_byte == pytest.approx(total / math.log(2) / text.stat().st_size, abs=1e-5)
    assert flatout.evaluate(chatty, data=text) == found[64]
    with pytest.raises(UsageError, match="not from 1 to the context"):
        flatout.evaluate(chatty, data=text, stride=65)


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_three_forms_of_a_line(tmp_path):
    choices = read_questions(write(tmp_path / "choices.jsonl", QUESTIONS))
    assert choices[0].pairs == (
        ("Question: what is one\nAnswer:", " two"), ("Question: what is one\nAnswer:", " one is one")
    )  # fmt: skip
    assert [question.pairs[0][0] for question in choices[1:]] == [
        "Hello", "What is it\n\nQuestion: is it two\nAnswer:"
    ]  # fmt: skip
    clozes = read_questions(write(tmp_path / "clozes.jsonl.gz", CLOZES))
    assert [question.pairs for question in clozes] == [(("one is one", " it"),), (("Hello", " there"),)]
    (schema, *_) = read_questions(write(tmp_path / "schemas.jsonl", SCHEMAS))
    assert (schema.pairs, schema.gold) == ((("Hello one", " is it"), ("Hello two", " is it")), 1)
    tasks, names = find_tasks([str(tmp_path), "hellaswag"], None, limit=2)
    assert [(task.name, len(task.asked)) for task in tasks] == [("choices", 2), ("clozes", 2), ("schemas", 2)]
    assert names == ["hellaswag"]
    assert [task.name for task in find_tasks(["clozes", "choices.jsonl"], tmp_path)[0]] == ["clozes", "choices"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "the line is no JSON"),
        ("[1]", "neither query, context nor context_options"),
        ('{"question": "a"}', "neither query, context nor context_options"),
        ('{"query": "a", "gold": 0}', "choices is missing"),
        ('{"query": "a", "choices": [], "gold": 0}', "not a list of two texts or more"),
        ('{"query": "a", "choices": ["b", ""], "gold": 0}', "not a list of two texts or more"),
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "not a number from 0 to 1"),
        ('{"query": "a", "choices": ["b", "c"], "gold": true}', "not a number from 0 to 1"),
        ('{"query": 3, "choices": ["b", "c"], "gold": 0}', "query is '3', which is no text"),
        ('{"context": "a"}', "continuation is missing"),
        ('{"context": " ", "continuation": "b"}', "context is ' ', which is no text"),
        ('{"context_options": "ab", "continuation": "b", "gold": 0}', "context_options is 'ab'"),
        ("[" * 100_000, "the line is no JSON"),
    ],
)
def test_a_broken_line_is_named(line, told, tmp_path):
    path = tmp_path / "task.jsonl"
    path.write_text(f"\n{json.dumps(CLOZES[0])}\n{line}\n", encoding="utf-8")
    with pytest.raises(DataError) as error:
        read_questions(path)
    assert f"{path}, line 3: " in error.value.message
    assert told in error.value.message


def test_files_that_are_no_tasks(tmp_path):
    torn = gzip.compress(json.dumps(CLOZES[0]).encode() + b"\n" * 99)[:-9]
    cases = [
        ("empty.jsonl", b"\n\n", "is empty"),
        ("torn.jsonl.gz", torn, "be read"),
        ("no.jsonl.gz", b"{}", "be read"),
    ]
    for name, content, told in cases:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=told):
            read_questions(tmp_path / name)
    (tmp_path / "folder").mkdir()
    for words, folder, told in [
        ([str(tmp_path / "folder")], None, "holds no tasks"), (["a"], tmp_path / "nowhere", "is not a folder"),
        ([str(tmp_path / "none.jsonl")], None, "cannot be read"),
        ([str(tmp_path / "none")], None, "neither a task file"),
    ]:  # fmt: skip
        with pytest.raises((DataError, UsageError), match=told):
            find_tasks(words, folder)
    with pytest.raises(UsageError, match="too few for 3 examples"):
        find_tasks([str(write(tmp_path / "few.jsonl", QUESTIONS))], shots=3)


def test_examples_are_drawn_for_each_question_and_repeat(tmp_path):
    path = str(write(tmp_path / "task.jsonl", QUESTIONS * 4))
    (task,), _ = find_tasks([path], shots=3, seed=1)
    (fewer,), _ = find_tasks([path], shots=3, seed=1, limit=2)
    assert task.pairs()[: len(fewer.pairs())] == fewer.pairs(), "a limit changes no question"
    assert task.pairs() != find_tasks([path], shots=3, seed=2)[0][0].pairs()
    numbered = [{"context": f"number {number} is", "continuation": "it"} for number in range(6)]
    (task,), _ = find_tasks([str(write(tmp_path / "numbered.jsonl", numbered))], shots=5)
    for number, (context, _) in enumerate(task.pairs()):
        *examples, last = context.split("\n\n")
        assert last == f"number {number} is"
        assert sorted(examples) == [f"number {other} is it" for other in range(6) if other != number]


# --- scores -----------------------------------------------------------------------------------------------------------


def test_accuracies_and_errors_by_hand(tmp_path):
    (choices, clozes), _ = find_tasks([str(write(tmp_path / f"{name}.jsonl", rows))
                                       for name, rows in (("choices", QUESTIONS), ("clozes", CLOZES))])  # fmt: skip
    # right by the sum alone, right by both, and by the characters alone
    values = [-3.0, -2.9, -1.0, -9.0, -9.0, -4.0, -3.5]
    rows = answered(choices, iter([(value, False) for value in values]))
    assert [(row["acc"], row["acc_norm"]) for row in rows] == [(1, 1), (1, 1), (0, 1)]
    acc, norm = scores_of(choices, rows)
    assert (acc.metric, acc.value, norm.metric, norm.value, norm.error) == ("acc", 2 / 3, "acc_norm", 1.0, 0.0)
    assert acc.error == pytest.approx(math.sqrt(2 / 9 * 3 / 2) / math.sqrt(3))
    acc, perplexity = scores_of(clozes, answered(clozes, iter([(-1.0, True), (-3.0, False)])))
    assert (acc.value, perplexity.value) == (0.5, pytest.approx(math.exp(2)))
    assert perplexity.error == pytest.approx(math.exp(2))
    better = scores_of(choices, answered(choices, iter([(value, False) for value in [*values[:5], -3.0, -3.5]])))
    difference, error = next(better).over(next(scores_of(choices, rows)))
    assert difference == pytest.approx(1 / 3)
    assert error == pytest.approx(1 / 3), "of the differences 0, 0 and 1"


def test_scores_of_a_model(chatty, tmp_path):
    for name, rows in (("choices", QUESTIONS), ("clozes", CLOZES), ("schemas", SCHEMAS)):
        write(tmp_path / f"{name}.jsonl", rows)
    counts = []
    found = flatout.score(chatty, [tmp_path], progress=counts.append)
    assert counts[-1] == 7 + 2 + 6
    assert [(score.task, score.metric) for score in found.scores] == [
        ("choices", "acc"), ("choices", "acc_norm"), ("clozes", "acc"), ("clozes", "perplexity"), ("schemas", "acc")
    ]  # fmt: skip
    ids = chatty.tokenizer.encode_prompt("Hello there").tolist()
    before = len(chatty.tokenizer.encode_prompt("Hello"))
    log_TV = chatty(ids[:-1]).log_softmax(-1)
    expected = sum(float(log_TV[place - 1, ids[place]]) for place in range(before, len(ids)))
    assert found.samples[1]["log_likelihoods"][0] == pytest.approx(expected, abs=1e-4)
    assert found.samples[1]["log_likelihoods"][0] == found.samples[4]["log_likelihoods"][0]
    assert len(sheet_of([found, found]).blocks[0].rows) == 5
    with pytest.raises(UsageError, match="no task was named"):
        flatout.score(chatty, [])


# --- the harness ------------------------------------------------------------------------------------------------------


@pytest.fixture
def stub(monkeypatch):
    """The harness's base class alone, which is all that the class of ours needs."""
    module = types.SimpleNamespace(LM=type("LM", (), {}))
    monkeypatch.setattr("flatout.tasks.harness._harness", lambda name: module)


def requests(*arguments):
    return [types.SimpleNamespace(args=args) for args in arguments]


def test_the_class_for_the_harness(chatty, stub):
    subject = subject_of(chatty)
    lm = harness_model(subject, rows=2)
    pairs = [("Hello", " there"), ("", "one is it"), ("Hello ", " there")]
    values = [value for value, _ in lm.loglikelihood(requests(*pairs))]
    assert values == [value for value, _ in log_likelihoods(subject, subject.encode_pairs(pairs))]
    assert lm.loglikelihood_rolling(requests(("one is it",)))[0] < 0
    long = "Hello there, one is it. " * 20
    ids = [subject.first, *chatty.tokenizer.encode_prompt(long).tolist()]
    each = [log_likelihoods(subject, [pair])[0][0] for pair in windows(ids, 65, 64)]
    assert len(each) > 2
    assert lm.loglikelihood_rolling(requests((long,))) == [pytest.approx(sum(each), abs=1e-3)]


def test_texts_for_the_harness_end_at_their_stops(chatty, stub):
    lm = harness_model(subject_of(chatty), rows=2)
    prompts = ["Hello", "one is", "What", "user"]
    whole = ["".join(flatout.generate(chatty, prompt, tokens=20, temperature=0)) for prompt in prompts]
    asked = [(prompt, {"until": [], "max_gen_toks": 20}) for prompt in prompts]
    assert lm.generate_until(requests(*asked)) == whole
    stops = [text[7:9] for text in whole]
    asked = [
        (prompt, {"until": ["\n\n\n", stop], "max_gen_toks": 20}) for prompt, stop in zip(prompts, stops, strict=True)
    ]
    assert lm.generate_until(requests(*asked)) == [
        text.partition(stop)[0] for text, stop in zip(whole, stops, strict=True)
    ]


def test_without_the_harness_its_tasks_are_refused(chatty, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(UsageError, match="is not installed"):
        flatout.score(chatty, ["hellaswag"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["smollm2", "llama3"])
def test_the_harness_gets_what_its_own_class_gives(family, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="needs the extra `tasks`")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    folder = write_chat_model(tmp_path / "model", family)
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=3)
    ours = harness_model(subject_of(flatout.load_model(folder, device="cpu")))
    pairs = [
        ("Hello", " there"),
        ("", "one is"),
        ("What is it", " two"),
        ("one " * 300, " one"),
        ("Hello ", "one is it"),
    ]
    asked = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    for mine, other in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert mine == (pytest.approx(other[0], abs=1e-4), other[1])
    texts = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in ("one is it", "one is it " * 100)]
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), abs=1e-3)
    how = {"until": ["is"], "max_gen_toks": 12, "do_sample": False}
    texts = [Instance("generate_until", {}, (prompt, how), 0) for prompt in ("Hello there", "one two")]
    assert ours.generate_until(texts) == theirs.generate_until(texts)
    (tmp_path / "mine.yaml").write_text(
        f"task: mine\ndataset_path: json\ndataset_kwargs:\n  data_files: {write(tmp_path / 'rows.jsonl', QUESTIONS)}\n"
        "test_split: train\noutput_type: multiple_choice\ndoc_to_text: '{{query}}'\ndoc_to_choice: choices\n"
        "doc_to_target: gold\nmetric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    found = flatout.score(folder, ["mine"], folder=tmp_path, limit=2)
    assert [(score.task, score.metric, score.rows) for score in found.scores] == [("mine", "acc", 2)]
    assert found.scores[0].values == tuple(row["acc"] for row in found.samples)
    with pytest.raises(UsageError, match="there is no task 'hellaswagg'"):
        flatout.score(folder, ["hellaswagg"])
