"""What a fine-tuning run stands on and leaves behind: bases, adapters, merged folders, and where answers end."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flatout
from flatout import api, folders
from flatout.checkpoints import checkpoint
from flatout.checkpoints.base_and_adapter import step_of
from flatout.checkpoints.checkpoint import list_checkpoints, read_checkpoint
from flatout.cli import main
from flatout.config.load import load_config
from flatout.config.schema import ModelConfig
from flatout.data import pack
from flatout.data.tokenizer import CharTokenizer
from flatout.data.tokenizer_files import train_bpe
from flatout.diagnose.examine import examine
from flatout.errors import UserError
from flatout.front import exporting
from flatout.generation.engine import generate_tokens
from flatout.generation.sampling import Sampling
from flatout.model.adapter_files import read_origin
from flatout.model.gpt import GPT, build_model
from flatout.model.hub import read_description
from flatout.model.hub_folder import export_huggingface, weights_fingerprint
from flatout.records import EndRecord, NoticeRecord, StepRecord
from tests.chat_models import write_chat_model
from tests.unit.test_hub import KINDS, SHAPE

pytestmark = pytest.mark.usefixtures("children_stay")

QUIET = ["eval.sample_tokens=4", "speed.device=cpu", "model.context=64"]
TOKENS = torch.arange(3, 40)[None]


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    monkeypatch.chdir(tmp_path)
    write_chat_model(tmp_path / "base")
    rows = [{"instruction": f"What is {n} and one?", "output": f"It is {n + 1}."} for n in range(20)]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")

    def make(*more: str) -> list[str]:
        named = ["model.init_from=base", "chat.source=rows.json", "optim.learning_rate=1e-2", "train.steps=3"]
        place = ["output.name=lora"] if "lora.rank=0" in more else []  # as with adapters, whatever is trained
        return [*named, "train.epochs=null", *QUIET, *place, *more]

    return make


def run(words: list[str]) -> list:
    return list(api.train(load_config("lora", words)))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(TOKENS) if hasattr(model, "logits") else model(TOKENS).logits


def exchange() -> None:
    """Another model of the same shape, with the same tokenizer, in the same place."""
    shutil.rmtree("base")
    write_chat_model(Path("base"), seed=2)


# --- the base ---------------------------------------------------------------------------------------------------------


def test_the_hash_is_of_names_types_and_every_byte_and_not_of_files(words):
    from safetensors.torch import load_file, save_file

    before = weights_fingerprint(read_description(Path("base")))
    tensors = load_file("base/model.safetensors")
    shutil.copytree("base", "split")
    names = sorted(tensors)
    places = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, f"split/{file}")
    Path("split/model.safetensors").unlink()
    Path("split/model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert weights_fingerprint(read_description(Path("split"))) == before
    last = tensors[names[-1]].view(-1)
    last[-1] = torch.nextafter(last[-1], torch.tensor(9.0))
    save_file(tensors, "base/model.safetensors")
    assert weights_fingerprint(read_description(Path("base"))) != before


def test_an_exchanged_base_is_refused(words, capsys):
    run(words())
    exchange()
    calls = [
        ["finetune", *words("train.steps=5"), "--resume", "auto"],
        ["chat", "runs/lora", "--message", "Hello"],
        ["export", "runs/lora", "out"],
        ["export", "runs/lora", "out", "--adapter"],
        ["chat", "runs/lora/adapter", "--message", "Hello"],
    ]
    before = sorted(Path("runs").rglob("*"))
    for call in calls:
        assert main(call) == 3, call
        error, hint = capsys.readouterr().err.strip().splitlines()
        assert "base holds other weights" in error, call
        assert hint.startswith("hint: put the model")
        assert not Path("out").exists()
        assert [path for path in before if not path.exists()] == []


def test_a_run_is_used_from_elsewhere_with_its_base_named(words, tmp_path, monkeypatch, capsys):
    run(words())
    before = logits(api.load_model("runs/lora", device="cpu").model)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done, base = str(tmp_path / "runs/lora"), str(tmp_path / "base")
    assert main(["chat", done, "--message", "Hello"]) == 3
    assert "hint: name it with --base MODEL" in capsys.readouterr().err
    loaded = api.load_model(done, device="cpu", base=base)
    assert torch.equal(logits(loaded.model), before)
    api.export(loaded, "apart", adapter=True)
    assert read_origin(Path("apart")).base == base
    assert main(["train", "--resume", done]) == 3
    error, hint = capsys.readouterr().err.strip().splitlines()
    assert error == "error: the base of the run cannot be loaded: there is no folder 'base'"
    assert "model.init_from=MODEL" in hint


@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_is_measured_from_elsewhere_with_its_samples_named(words, rank, tmp_path, monkeypatch, capsys):
    run(words("train.steps=1", f"lora.rank={rank}"))
    before = api.evaluate("runs/lora")
    run(words("train.steps=1", "chat.validation=0.5", "data.folder=others"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    call = ["eval", "../runs/lora", *(["--base", "../base"] if rank else [])]
    capsys.readouterr()
    assert main(call) == 3
    error, hint = capsys.readouterr().err.strip().splitlines()
    assert "cannot be made here" in error
    assert hint.endswith("with --data FOLDER: they are in data/rows-samples there")
    assert main([*call, "--data", "../others"]) == 3
    assert "does not hold the samples" in capsys.readouterr().err
    assert main([*call, "--data", "../data/rows-samples", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == before.loss
    assert list(Path().iterdir()) == [], "nothing is made here"


def test_a_context_of_the_presets_is_cut_to_what_the_base_has_and_a_users_is_not(words, capsys):
    own = [word for word in words("train.steps=1") if not word.startswith("model.context")]
    records = run(own)
    told = [r.message for r in records if isinstance(r, NoticeRecord) and "model.context" in r.message]
    assert told == ["model.context is cut from 2,048 to 256: base has no more positions"]
    assert api.stored_config(Path("runs/lora")).config.model.context == 256
    assert main(["finetune", *own, "model.context=257"]) == 2
    assert "hint: set model.context to at most 256" in capsys.readouterr().err
    found = {finding.name: finding for finding in examine("lora", own, quick=True)}
    assert found["context"].status == "note"
    assert found["a step"].status == "ok"


@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_with_less_context_than_learned_positions_goes_on_with_its_samples(words, rank):
    shape = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=96", "data.tokenizer=bytes"]
    steps = ["train.tokens=null", "train.steps=1", "train.batch_tokens=96", "speed.micro_batch=1", "eval.tokens=96"]
    list(api.train(load_config("gpt2-124m", [*shape, *steps, "data.source=shakespeare", "output.folder=mine"])))
    # The samples have about 60 tokens, and are cut.
    less = words("model.init_from=mine", "model.context=56", f"lora.rank={rank}", "checkpoint.every=2")
    whole = [record.loss for record in run([*less, "output.folder=whole"]) if isinstance(record, StepRecord)]
    rest = list(api.train(resume="whole/checkpoints/step-00000002"))
    assert [record.loss for record in rest if isinstance(record, StepRecord)] == whole[2:]
    assert not [r for r in rest if isinstance(r, NoticeRecord) and "made" in r.message], "the samples were there"


def test_a_run_with_less_context_than_its_base_leaves_eigenstates_as_they_were(words, text):
    shape = ["model.pattern=EA", "model.states=8", "optim.learning_rate=0.1"]
    list(api.train(load_config(None, [*PRETRAIN, *shape, f"data.source={text}", "data.tokenizer=bytes"])))
    run(words("model.init_from=runs/mine", "lora.rank=0", "train.steps=1", "optim.learning_rate=1e-12"))
    base, tuned = (api.load_model(name, device="cpu").model for name in ("runs/mine", "runs/lora"))
    assert isinstance(base, GPT)
    assert any(mixer.detuning_K.abs().max() > 0.01 for mixer in base.eigenstates), "learned at all"
    torch.testing.assert_close(logits(tuned), logits(base))
    stored = api.stored_config(Path("runs/lora")).config
    assert (stored.model.context, stored.chat.max_tokens) == (64, None)


def test_a_checkpoint_from_before_there_was_a_hash_still_loads(words, monkeypatch):
    from flatout.engine import saving

    capture = saving.capture

    def without(*arguments):
        checkpoint = capture(*arguments)
        checkpoint.state.pop("base")
        checkpoint.state.pop("stops")
        return checkpoint

    monkeypatch.setattr(saving, "capture", without)
    run(words())
    assert api.load_model("runs/lora", device="cpu").adapters is not None
    assert isinstance(run(words("train.steps=4", "output.name=more"))[-1], EndRecord)


PRETRAIN = [
    "model.norm=rmsnorm", "model.positions=rope", "model.mlp=swiglu", "model.bias=false", "model.residual_scale=null",
    "model.layers=2", "model.width=32", "model.heads=2", "model.context=128", "train.batch_tokens=512",
    "speed.device=cpu", "eval.sample_tokens=0", "train.steps=2", "output.name=mine",
]  # fmt: skip


@pytest.fixture
def text(words) -> str:
    Path("text.txt").write_text("What is one and one? It is two. Hello there, what is it?\n" * 60, encoding="utf-8")
    return "text.txt"


def test_chat_with_a_model_that_knows_no_template_says_so(words, text, capsys):
    list(flatout.train(load_config(None, [*PRETRAIN, f"data.source={text}", "data.tokenizer=bytes"])))
    say = ["--message", "Hello", "--tokens", "2"]
    assert main(["chat", "runs/mine", *say]) == 0
    assert "was never taught a chat template" in capsys.readouterr().err
    assert main(["chat", "base", *say]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("tokenizer", "rank"), [("bytes", 0), ("bytes", 4), ("learned.json", 4)])
def test_a_run_of_ours_is_a_base(words, text, tokenizer, rank):
    Path("learned.json").write_text(json.dumps(train_bpe([Path(text).read_text()], 280)))
    list(flatout.train(load_config(None, [*PRETRAIN, f"data.source={text}", f"data.tokenizer={tokenizer}"])))
    records = run(words("model.init_from=runs/mine", f"lora.rank={rank}", "lora.alpha=null", "model.context=96"))
    said = [record.message for record in records if isinstance(record, NoticeRecord)]
    assert any("`plain` (chat.template)" in message for message in said)
    loaded = api.load_model("runs/lora", device="cpu")
    assert loaded.template is not None
    assert "### Response:" in api.chat_prompt(loaded, "Hello")
    assert loaded.stops == (loaded.tokenizer.end_of_text,)
    if rank:
        apart = api.load_model("runs/lora/adapter", device="cpu")
        assert torch.equal(logits(apart.model), logits(loaded.model))
        assert api.chat_prompt(apart, "Hello") == api.chat_prompt(loaded, "Hello")
    assert (
        "".join(api.generate(loaded, api.chat_prompt(loaded, "Hi"), bare=False, tokens=3, temperature=0.0)) is not None
    )
    api.export(loaded, "out", dtype="fp32")
    again = api.load_model("out", device="cpu")
    assert api.chat_prompt(again, "Hello") == api.chat_prompt(api.load_model("runs/lora", device="cpu"), "Hello")
    assert again.stops == loaded.stops
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoTokenizer.from_pretrained("out")
    prompt = theirs.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == api.chat_prompt(again, "Hello")
    assert theirs(prompt).input_ids == loaded.tokenizer.encode(prompt).tolist()
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained("out")), logits(again.model))


def test_a_base_that_trains_on_keeps_the_checkpoint_under_adapters(words, text, monkeypatch):
    mine = [*PRETRAIN, f"data.source={text}", "data.tokenizer=bytes"]
    list(flatout.train(load_config(None, mine)))
    records = run(words("model.init_from=runs/mine", "model.context=96"))
    assert not [r for r in records if isinstance(r, NoticeRecord) and "cannot be written to" in r.message]
    before = logits(api.load_model("runs/lora", device="cpu").model)
    more = ["train.steps=6", "checkpoint.every=1", "checkpoint.keep=1"]
    list(flatout.train(load_config(None, [*mine, *more]), resume="runs/mine"))
    assert sorted(path.name for path in Path("runs/mine/checkpoints").iterdir()) == ["step-00000002", "step-00000006"]
    assert torch.equal(logits(api.load_model("runs/lora", device="cpu").model), before)
    monkeypatch.setattr(checkpoint, "write_new", refuse(checkpoint.write_new, "base-of.txt"))
    records = run(words("model.init_from=runs/mine", "model.context=96", "output.name=other"))
    assert [r for r in records if isinstance(r, NoticeRecord) and "cannot be written to" in r.message]


def refuse(write: Callable, name: str) -> Callable:
    """What a disk that cannot be written to says of a file of this name."""

    def written(path: Path, *values, **named):
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return write(path, *values, **named)

    return written


@pytest.mark.parametrize("family", ["flatout", "gpt2", "tied", "fine-tuned"])
def test_a_base_of_ours_is_the_same_model_once_it_is_exported(words, text, family, capsys):
    shape = {
        "gpt2": ["model.family=gpt2", "model.layers=2", "model.width=32", "model.heads=2", *PRETRAIN[8:]],
        "tied": [
            *PRETRAIN,
            "model.tied=true",
            "model.embedding_norm=false",
            "model.norm=rmsnorm",
            "model.qk_norm=true",
        ],
    }.get(family, PRETRAIN)
    if family == "fine-tuned":
        run(words("lora.rank=0", "output.name=mine"))
    else:
        list(flatout.train(load_config(None, [*shape, f"data.source={text}", "data.tokenizer=bytes"])))
    records = run(words("model.init_from=runs/mine", "model.context=128"))
    ours = api.load_model("runs/lora", device="cpu")
    assert ours.config is not None
    told = [r.message for r in records if isinstance(r, NoticeRecord) and r.message.startswith("adapter")]
    hint = f"`flatout export {ours.config.model.init_from} FOLDER`"
    assert len(told) == 1
    assert hint in told[0]
    assert main(["export", "runs/lora", "apart", "--adapter"]) == 0
    assert hint in capsys.readouterr().out
    assert main([*hint.strip("`").split()[1:-1], "whole"]) == 0
    assert main(["chat", "apart", "--base", "whole", "--message", "Hello", "--tokens", "2"]) == 0
    apart = logits(api.load_model("apart", device="cpu", base="whole").model)
    if family == "flatout":  # its norms have no weights, so what is written computes the same in another way
        torch.testing.assert_close(apart, logits(ours.model))
    else:
        assert torch.equal(apart, logits(ours.model))
    more = ["model.init_from=whole", "model.context=128", "lora.init_from=apart", "output.name=more"]
    assert isinstance(run(words(*more, "chat.template=plain"))[-1], EndRecord)
    assert main(["chat", "apart", "--base", "base", "--message", "Hello"]) == 3
    assert "other weights" in capsys.readouterr().err


def test_a_run_of_ours_with_a_shape_of_its_own_is_a_base_too(words, text):
    own = ["model.mlp=relu2", "model.residual_scale=0.5", "data.tokenizer=bytes", f"data.source={text}"]
    list(flatout.train(load_config(None, [*PRETRAIN, *own])))
    records = run(words("model.init_from=runs/mine", "model.context=128"))
    assert any("only Flatout loads it" in r.message for r in records if isinstance(r, NoticeRecord))
    loaded = api.load_model("runs/lora", device="cpu")
    assert loaded.adapters is not None
    assert api.load_model("runs/lora/adapter", device="cpu").adapters is not None
    with pytest.raises(UserError, match=r"model\.mlp"):
        api.export(loaded, "out")
    assert not Path("out").exists()


def test_what_was_fine_tuned_whole_is_a_base_that_knows_its_template(words):
    run(words("lora.rank=0", "output.name=first"))
    records = run(words("model.init_from=runs/first", "model.context=100"))
    assert not any("chat.template" in r.message for r in records if isinstance(r, NoticeRecord))
    assert api.load_model("runs/lora", device="cpu").template is not None
    config = json.loads(Path(api.export("runs/first", "out") / "config.json").read_text())
    assert config["max_position_embeddings"] == 256  # that of its base, not the run's


def test_a_run_with_adapters_is_no_base(words):
    run(words())
    with pytest.raises(UserError, match="adapters beside a frozen model"):
        run(words("model.init_from=runs/lora"))


def test_characters_from_before_they_had_an_end_are_trained_resumed_and_written_but_not_taught(
    words, text, capsys, monkeypatch
):
    """Such datasets lie around: what can be done with them can still be done."""
    with monkeypatch.context() as patch:
        patch.setattr(pack, "CharTokenizer", functools.partial(CharTokenizer, ends=False))
        list(flatout.train(load_config(None, [*PRETRAIN, f"data.source={text}", "data.tokenizer=char"])))
    assert api.load_model("runs/mine", device="cpu").tokenizer.end_of_text is None
    assert main(["train", "--resume", "runs/mine", "train.steps=4"]) == 0
    assert len("".join(api.generate("runs/mine", "a", tokens=5))) == 5
    with pytest.raises(UserError, match="no end-of-text token"):
        run(words("model.init_from=runs/mine"))
    assert main(["export", "runs/mine", "out"]) == 0
    assert "has no end of text" in capsys.readouterr().out


# --- where answers end ------------------------------------------------------------------------------------------------


def test_answers_end_at_every_token_that_the_files_or_the_template_name(words):
    write_chat_model(Path("llama"), "llama3")
    settings = json.loads(Path("llama/tokenizer_config.json").read_text())
    Path("llama/tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|end_of_text|>"}))
    model = api.load_model("llama", device="cpu")
    ids = {name: model.tokenizer.token_id(name) for name in ("<|end_of_text|>", "<|eot_id|>")}
    assert set(model.stops) == set(ids.values())  # the second is the template's alone
    Path("llama/generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert set(api.load_model("llama", device="cpu").stops) == {*ids.values(), 7, 9}
    run(words("model.init_from=llama"))
    loaded = api.load_model("runs/lora", device="cpu")
    assert set(loaded.stops) == {*ids.values(), 7, 9}
    api.merge(loaded, "merged")
    assert sorted(json.loads(Path("merged/generation_config.json").read_text())["eos_token_id"]) == sorted(loaded.stops)


def test_generation_ends_at_each_stop(words):
    loaded = api.load_model("base", device="cpu")
    how = Sampling(temperature=1.0, seed=3)
    free = list(generate_tokens(loaded.model, [5], count=30, sampling=how))
    for stop in {free[4], free[9]}:
        cut = list(generate_tokens(loaded.model, [5], count=30, sampling=how, stops=(10**6, stop)))
        assert cut == free[: free.index(stop) + 1]


# --- adapters as folders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [[], ["lora.dora=true", "lora.rank_stabilised=true", "lora.targets=[q_proj, up_proj]"]]
)
def test_peft_loads_what_a_run_leaves_behind(words, kind):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    records = run(words(*kind))
    assert any("adapter for PEFT" in r.message for r in records if isinstance(r, NoticeRecord))
    named = json.loads(Path("runs/lora/adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(named), "runs/lora/adapter").eval()
    ours = api.load_model("runs/lora", device="cpu")
    torch.testing.assert_close(logits(theirs), logits(ours.model), rtol=1e-4, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained("runs/lora/adapter")
    assert tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, tokenize=False
    ) == api.chat_prompt(ours, "Hello")
    folder = api.load_model("runs/lora/adapter", device="cpu")
    assert torch.equal(logits(folder.model), logits(ours.model))
    assert folder.stops == ours.stops
    assert api.chat_prompt(folder, "Hello") == api.chat_prompt(ours, "Hello")


def test_the_adapter_is_that_of_the_best_checkpoint_and_of_no_other(words):
    more = ("train.steps=6", "eval.every=1", "checkpoint.every=1", "optim.learning_rate=0.5", "optim.clip=0")
    run(words(*more))
    best = api.load_model("runs/lora", device="cpu")
    assert step_of(Path("runs/lora/adapter")) == best.step
    assert torch.equal(logits(api.load_model("runs/lora/adapter", device="cpu").model), logits(best.model))


@pytest.mark.parametrize("rate", ["1e-2", "0.5"], ids=["the newest is best", "an older one is best"])
def test_an_adapter_that_a_kill_left_behind_is_written_again(words, rate):
    more = (
        "eval.every=1",
        "checkpoint.every=1",
        f"optim.learning_rate={rate}",
        "optim.clip=0",
        "output.folder=runs/lora",
    )
    run(words(*more))
    before = (Path("runs/lora/adapter/adapter_model.safetensors")).read_bytes()
    folders._rename_marked(Path("runs/lora/adapter"))  # as a kill while it was replaced leaves it
    folders._create(Path("runs/lora/adapter"))
    list(api.train(load_config("lora", words(*more)), resume="auto"))
    assert (Path("runs/lora/adapter/adapter_model.safetensors")).read_bytes() == before
    assert [path.name for path in Path("runs/lora").glob("adapter*")] == ["adapter"]


def test_a_run_goes_on_with_its_own_weights_after_its_adapter_was_written_again(words):
    more = ("eval.every=1", "checkpoint.every=1", "optim.clip=0", "output.folder=runs/lora")
    run(words(*more, "optim.learning_rate=0.5"))
    assert api.load_model("runs/lora", device="cpu").step != 3, "the best is older than the newest"
    shutil.copytree("runs", "kept")
    losses = []
    for left_behind in (False, True):
        shutil.rmtree("runs")
        shutil.copytree("kept", "runs")
        if left_behind:
            shutil.rmtree("runs/lora/adapter")
        config = load_config("lora", words(*more, "optim.learning_rate=1e-3", "train.steps=5"))
        records = list(api.train(config, resume="auto"))
        losses.append([record.loss for record in records if isinstance(record, StepRecord)])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2


def test_export_writes_either_the_adapter_or_the_merged_model(words, capsys):
    run(words())
    assert main(["export", "runs/lora", "apart", "--adapter"]) == 0
    assert main(["export", "runs/lora", "whole", "--dtype", "fp32"]) == 0
    ours = logits(api.load_model("runs/lora", device="cpu").model)
    assert torch.equal(logits(api.load_model("apart", device="cpu").model), ours)
    torch.testing.assert_close(logits(api.load_model("whole", device="cpu").model), ours, rtol=1e-4, atol=1e-5)
    assert main(["export", "base", "copy", "--adapter"]) == 2
    assert "no adapters to export" in capsys.readouterr().err
    assert main(["export", "apart", "merged"]) == 0  # an adapter folder is as good as the run


def test_adapters_are_written_into_fp16_weights(words):
    run(words())
    expected = logits(api.load_model("runs/lora", device="cpu").model)
    assert main(["export", "runs/lora", "half", "--dtype", "fp16"]) == 0
    assert read_description(Path("half")).dtype == "float16"
    torch.testing.assert_close(logits(api.load_model("half", device="cpu").model), expected, rtol=1e-2, atol=1e-2)


def test_what_is_said_of_a_tokenizer_is_said_of_a_merge_too(words, monkeypatch, capsys):
    run(words())
    monkeypatch.setattr(exporting, "files_beside", lambda *_, **__: ({}, ("a remark of its own",)))
    assert main(["export", "runs/lora", "out"]) == 0
    assert "note: a remark of its own" in capsys.readouterr().out


def peft_folder(**settings) -> torch.Tensor:
    """An adapter that PEFT itself made on `base`; its logits."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    values = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    config = peft.LoraConfig(task_type="CAUSAL_LM", **{**values, **settings})
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained("base"), config).eval()
    model.save_pretrained("theirs")
    return logits(model)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_dora": True},
        {"rank_pattern": {"1.self_attn.q_proj": 5}, "alpha_pattern": {"q_proj": 7.5}},
    ],
    ids=str,
)
def test_an_adapter_of_peft_is_chatted_with_and_trained_on(words, settings, capsys):
    expected = peft_folder(**settings)
    loaded = api.load_model("theirs", device="cpu")
    torch.testing.assert_close(logits(loaded.model), expected, rtol=1e-4, atol=1e-5)
    assert main(["chat", "theirs", "--message", "Hello", "--tokens", "3"]) == 0
    records = run(words("lora.init_from=theirs", "optim.learning_rate=1e-12"))
    assert isinstance(records[-1], EndRecord)
    again = api.load_model("runs/lora", device="cpu")
    assert again.config is not None
    assert (again.config.lora.rank, again.config.lora.alpha) == (3, 5.0)
    torch.testing.assert_close(logits(again.model), expected, rtol=1e-4, atol=1e-5)


def test_going_on_from_a_run_and_resuming_that_without_it(words):
    run(words("lora.rank=4", "lora.alpha=8.0", "output.name=first"))
    run(words("lora.init_from=runs/first", "output.name=second", "train.steps=2"))
    assert read_origin(Path("runs/second/adapter")).plan.rank == 4
    shutil.rmtree("runs/first")
    list(api.train(None, resume="runs/second"))
    loaded = api.load_model("runs/second", device="cpu")
    assert loaded.adapters is not None


@pytest.mark.parametrize("how", ["without a config", "with the same words"])
def test_a_run_goes_on_with_its_own_adapter_whatever_lies_in_the_folder_it_began_in(words, how):
    run(words("lora.rank=4", "lora.alpha=6.0", "lora.targets=[q_proj]", "lora.dora=true", "output.name=first"))
    begun = ["lora.init_from=runs/first", "output.folder=runs/second"]
    run(words(*begun, "train.steps=2"))
    shutil.rmtree("runs/first")
    run(words("lora.rank=2", "lora.alpha=9.0", "output.name=first"))
    if how == "without a config":
        list(api.train(api.stored_config(Path("runs/second"), ["train.steps=3"]), resume="runs/second"))
    else:
        list(api.train(load_config("lora", words(*begun, "lora.rank=4")), resume="auto"))
        with pytest.raises(UserError, match=r"lora\.rank is 2, but the run has 4"):
            list(api.train(load_config("lora", words(*begun, "lora.rank=2")), resume="auto"))
    loaded = api.load_model("runs/second", device="cpu", best=False)
    assert loaded.step == 3
    assert loaded.config is not None
    lora = loaded.config.lora
    assert (lora.rank, lora.alpha, lora.targets, lora.dora) == (4, 6.0, ["q_proj"], True)


@pytest.mark.parametrize(
    "word", ["lora.alpha=null", "lora.dora=false", "lora.targets=[all-linear]", "lora.rank_stabilised=false"]
)
def test_what_a_user_writes_against_an_adapter_is_refused_even_if_it_is_the_default(words, word):
    kind = ["lora.rank=4", "lora.alpha=6.0", "lora.dora=true", "lora.rank_stabilised=true", "lora.targets=[q_proj]"]
    run(words(*kind, "output.name=first"))
    with pytest.raises(UserError, match=r"command line: lora\.\w+ is .*, but the adapter in runs/first/adapter has"):
        run(words("lora.init_from=runs/first", word))


def test_ranks_and_alphas_by_name_are_written_as_patterns_and_kept_on_resume(words):
    begun = ["lora.rank=4", "lora.ranks=[q_proj=2, 1.mlp.up_proj=6]", "lora.alphas=[v_proj=3.5]", "output.name=first"]
    said = [record.message for record in run(words(*begun)) if isinstance(record, NoticeRecord)]
    assert any(message.startswith("adapter for PEFT: ") for message in said), "vLLM has one rank and alpha for all"
    plan = read_origin(Path("runs/first/adapter")).plan
    assert (plan.ranks, plan.alphas) == ((("1.mlp.up_proj", 6), ("q_proj", 2)), (("v_proj", 3.5),))
    same = ["lora.ranks=[1.mlp.up_proj=6, q_proj=2]", "lora.alphas=[v_proj=3.5]"]
    run(words("lora.init_from=runs/first", "output.folder=runs/second", "train.steps=2", *same))
    list(api.train(api.stored_config(Path("runs/second"), ["train.steps=3"]), resume="runs/second"))
    assert read_origin(Path("runs/second/adapter")).plan == plan
    again = api.load_model("runs/second", device="cpu")
    assert again.adapters is not None
    assert sorted({choice.rank for choice in again.adapters.choices}) == [2, 4, 6]
    for word, says in (
        ("lora.ranks=[q_proj]", "no name with a number"),
        ("lora.ranks=[q_proj=0]", "no name with a number above 0"),
        ("lora.alphas=[q_proj=nan]", "no name with a number above 0"),
        ("lora.ranks=[q_proj=2, q_proj=3]", "ranks has 'q_proj' twice"),
        ("lora.ranks=[nope=2]", r"lora\.ranks: there is no projection nope"),
        ("lora.alphas=[lm_head=2]", r"lora\.alphas: lm_head cannot have an adapter"),
    ):
        with pytest.raises(UserError, match=says):
            run(words("lora.rank=4", word, "output.name=bad"))


def test_a_setting_that_the_adapter_has_is_taken(words):
    peft_folder(target_modules="all-linear", r=4, lora_alpha=8)  # which PEFT writes as a list of names
    said = ["lora.alpha=8.0", "lora.dora=false", "lora.rank=4"]
    assert isinstance(run(words("lora.init_from=theirs", *said))[-1], EndRecord)


def test_an_adapter_without_a_base_is_given_one(words, capsys):
    peft_folder()
    path = Path("theirs/adapter_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "gone/model"}))
    assert main(["chat", "theirs", "--message", "Hello"]) == 3
    assert "--base FOLDER" in capsys.readouterr().err
    assert main(["chat", "theirs", "--base", "base", "--message", "Hello", "--tokens", "2"]) == 0


# --- the template of a merged folder ----------------------------------------------------------------------------------


@pytest.mark.grid
@pytest.mark.parametrize("template", ["model", "chatml", "plain", "mine.jinja", "none"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_folder_has_the_template_that_it_was_taught_with(words, template, rank):
    Path("mine.jinja").write_text(
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )
    if template == "none":
        pairs = [{"prompt": f"What is {n}", "completion": f" It is {n}"} for n in range(9)]
        Path("rows.json").write_text(json.dumps(pairs))
    run(words(f"chat.template={template}", f"lora.rank={rank}", "lora.alpha=null"))
    taught = api.load_model("runs/lora", device="cpu")
    expected = api.chat_prompt(taught, "Hello")
    api.export(taught, "out")
    found = api.load_model("out", device="cpu")
    assert api.chat_prompt(found, "Hello") == expected
    assert found.stops == taught.stops
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained("out")
    if template == "none":
        assert theirs.chat_template is None
    else:
        turns = [{"role": "user", "content": "Hello"}]
        assert theirs.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) == expected
    assert theirs(expected, add_special_tokens=False).input_ids == taught.tokenizer.encode(expected).tolist()


def test_a_checkpoint_holds_what_it_takes_to_talk(words):
    run(words())
    state = read_checkpoint(list_checkpoints(Path("runs/lora/checkpoints"))[-1][1]).state
    assert len(state["base"]) == 64
    assert state["stops"]
    assert state["described"]["model_type"] == "llama"


def test_a_run_says_whether_its_samples_were_made_or_used_again(words):
    def said(records: list) -> list[str]:
        return [r.message for r in records if isinstance(r, NoticeRecord) and r.message.startswith("samples: ")]

    first, again = said(run(words())), said(run(words("output.name=again")))
    assert any("made now, since there were none yet" in message for message in first)
    assert any("used again" in message for message in again)
    assert any("19 to train on" in message or "to train on and" in message for message in again)
    assert any("changed" in message for message in said(run(words("model.context=63", "output.name=third"))))


def test_the_config_of_a_run_without_adapters_can_be_used_again(words):
    run(words("lora.rank=0"))
    list(api.train(load_config("runs/lora/config.yaml", ["output.name=again"])))
    assert Path("runs/again/checkpoints").is_dir()


def test_an_adapter_that_was_taught_without_a_template_is_not_asked_with_its_base_s(words):
    rows = [{"text": f"What is {n} and one? It is {n + 1}."} for n in range(20)]
    Path("text.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    run(words("chat.source=text.jsonl", "chat.template=none"))
    whole, apart = (api.load_model(name, device="cpu") for name in ("runs/lora", "runs/lora/adapter"))
    assert api.chat_prompt(apart, "Hello") == api.chat_prompt(whole, "Hello")
    assert apart.stops == whole.stops
    api.merge(apart, "out")
    assert "chat_template" not in Path("out/tokenizer_config.json").read_text(encoding="utf-8")
    assert not Path("out/chat_template.jinja").exists()


def test_an_exported_adapter_names_the_base_that_it_was_loaded_on(words):
    run(words())
    Path("base").rename("moved")
    api.export(api.load_model("runs/lora/adapter", device="cpu", base="moved"), "out", adapter=True)
    assert read_origin(Path("out")).base == str(Path("moved").resolve())


# --- other families ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["smollm3", "olmo2", "phi3", "gemma2", "gemma3_text"])
def test_models_of_every_family_are_fine_tuned_spoken_with_and_exported(kind: str, words):
    from transformers import AutoModelForCausalLM

    vocab = read_description(Path("base")).vocab
    config = ModelConfig(**{**SHAPE, "context": 256}, **KINDS[kind])
    export_huggingface(build_model(config, vocab, seed=3), Path("made"))
    for name in ("config.json", "model.safetensors"):
        shutil.move(Path("made") / name, Path("base") / name)
    for more in (["lora.rank=4"], ["lora.rank=0", "output.name=whole"]):
        losses = [record.loss for record in run(words(*more, "train.steps=12")) if isinstance(record, StepRecord)]
        assert losses[-1] < losses[0] - 0.1
    for name in ("lora", "whole"):
        list(flatout.generate(f"runs/{name}", "What is", tokens=6))
        ours = flatout.load_model(f"runs/{name}", device="cpu").model.eval()
        flatout.export(f"runs/{name}", f"{name}-out", dtype="fp32")
        theirs = AutoModelForCausalLM.from_pretrained(f"{name}-out", attn_implementation="eager").eval()
        assert theirs.config.model_type == kind
        assert float((logits(ours) - logits(theirs)).norm() / logits(theirs).norm()) < 5e-6
