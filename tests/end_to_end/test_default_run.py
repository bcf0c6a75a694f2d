"""The first run goes on: its model generates, is fine-tuned, chats, and transformers loads what is exported."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from flatout import api
from flatout.cli import main
from flatout.data.tokenizer import CharTokenizer

pytestmark = pytest.mark.usefixtures("children_stay")

FIRST = "shakespeare"  # what `make train` trains
TEXT = "ROMEO:\nWhat, ho! apothecary!\n\nSay 3: & $ -'.;?, ZzQX"
ANSWERS = {
    "Who art thou?": "A poor player.",
    "Whither goest thou?": "To Rome, my lord.",
    "What news?": "None good, my liege.",
    "What is it o'clock?": "It hath struck 12.",
}
QUIET = ["eval.sample_tokens=8", "speed.device=cpu"]
SHORT = ["model.width=32", "model.layers=2", "train.steps=4", "train.batch_tokens=256", "eval.tokens=1024", *QUIET]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"prompt": ask, "completion": say}) for ask, say in ANSWERS.items()]
    Path("rows.jsonl").write_text("\n".join(lines * 4), encoding="utf-8")
    return "rows.jsonl"


def train(preset: str, *settings: str) -> str:
    assert main(["train", preset, *settings]) == 0
    assert main(["generate", f"runs/{preset}", "--prompt", "ROMEO:", "--tokens", "20"]) == 0
    return f"runs/{preset}"


def finetune(run: str, rows: str, name: str, steps: int, *settings: str) -> str:
    length = ["train.epochs=null", f"train.steps={steps}", f"output.name={name}", *QUIET]
    assert main(["finetune", f"model.init_from={run}", f"chat.source={rows}", *length, *settings]) == 0
    assert main(["chat", f"runs/{name}", "--message", "What news, 2?", "--tokens", "10"]) == 0
    return f"runs/{name}"


def transformers_agrees(run: str, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours, theirs = api.load_model(run, device="cpu"), transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = ours.tokenizer.encode(TEXT).tolist()
    assert tokenizer(TEXT, add_special_tokens=False).input_ids == ids
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.eos_token_id == ours.tokenizer.end_of_text == theirs.generation_config.eos_token_id
    with torch.no_grad():
        difference = ours.model.logits(torch.tensor([ids])) - theirs(torch.tensor([ids])).logits
    assert difference.abs().max() < 1e-4


@pytest.mark.usefixtures("short_shakespeare")
def test_the_first_model_goes_on(rows: str, capsys: pytest.CaptureFixture[str]):
    assert f"flatout train {FIRST}\n" in Path(__file__).parents[2].joinpath("Makefile").read_text(encoding="utf-8")
    run = train(FIRST, *SHORT)
    whole = finetune(run, rows, "whole", 2, "lora.rank=0", "optim.learning_rate=1e-3")
    adapters = finetune(run, rows, "adapters", 2, "lora.rank=4")
    assert main(["export", run, "exported"]) == 0
    assert main(["export", whole, "taught"]) == 0
    assert main(["export", adapters, "merged", "--dtype", "fp32"]) == 0
    for name, folder in ((run, "exported"), (whole, "taught"), (adapters, "merged")):
        transformers_agrees(name, Path(folder))
    said = capsys.readouterr().out
    assert "(huggingface, 1,024 ids)" in said
    assert "samples are written by `plain`" in said
    assert "### Response:" in said
    assert "<|endoftext|>" in said, "in the sample that is shown"


def test_a_model_of_characters_goes_on(rows: str, capsys: pytest.CaptureFixture[str]):
    run = train("shakespeare-char", *SHORT)
    whole = finetune(run, rows, "whole", 2, "lora.rank=0", "optim.learning_rate=1e-3")
    assert main(["export", whole, "taught"]) == 0
    transformers_agrees(whole, Path("taught"))
    assert "(char, 67 ids)" in capsys.readouterr().out
    tokenizer = api.load_model(run, device="cpu").tokenizer
    assert isinstance(tokenizer, CharTokenizer)
    assert tokenizer.encode("3#4").tolist()[1:] == [65, 65], "what Shakespeare never wrote"


@pytest.mark.slow  # minutes on a CPU
def test_the_first_run_learns_what_it_says_and_answers(rows: str, capsys: pytest.CaptureFixture[str]):
    run = train(FIRST)
    bits = re.findall(r"val loss [0-9.]+  ([0-9.]+) bits/byte", capsys.readouterr().out)
    assert float(bits[-1]) * math.log(2) < 1.6, "nats per character: the text is ASCII"
    whole = finetune(run, rows, "whole", 150, "lora.rank=0", "optim.learning_rate=1e-3", "chat.validation=0")
    adapters = finetune(run, rows, "adapters", 150, "lora.rank=16", "optim.learning_rate=3e-3", "chat.validation=0")
    for name in (whole, adapters):
        answers = ["".join(api.chat(name, ask, tokens=60, temperature=0.0)).strip() for ask in ANSWERS]
        assert answers == list(ANSWERS.values()), "learned by heart, to the end"
