"""The default run goes on: its model generates, is fine-tuned, chats, and transformers loads what is exported."""

import json
import re
from pathlib import Path

import pytest
import torch

from flatout import api
from flatout.cli import main
from flatout.data.tokenizer import CharTokenizer

pytestmark = pytest.mark.usefixtures("children_stay")

TEXT = "ROMEO:\nWhat, ho! apothecary!\n\nSay 3: & $ -'.;?, ZzQX"
ANSWERS = {
    "Who art thou?": "A poor player.",
    "Whither goest thou?": "To Rome, my lord.",
    "What news?": "None good, my liege.",
    "What is it o'clock?": "It hath struck 12.",
}
SHORT = ["model.width=32", "model.layers=2", "train.steps=12", "train.batch_tokens=256", "eval.tokens=4096"]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"prompt": ask, "completion": say}) for ask, say in ANSWERS.items()]
    Path("rows.jsonl").write_text("\n".join(lines * 4), encoding="utf-8")
    return "rows.jsonl"


def goes_on(rows: str, settings: list[str], steps: int) -> None:
    """The way of a user, from the first command on."""
    device = "speed.device=cpu"
    assert main(["train", device, *settings]) == 0
    run = "runs/shakespeare-char"
    assert main(["generate", run, "--prompt", "ROMEO:", "--tokens", "20"]) == 0
    length = ["train.epochs=null", f"train.steps={steps}", "eval.sample_tokens=8", "output.plots=false", device]
    base = ["finetune", f"model.init_from={run}", f"chat.source={rows}", *length]
    assert main([*base, "lora.rank=4", "output.name=adapters"]) == 0
    assert main([*base, "lora.rank=0", "optim.learning_rate=1e-3", "output.name=whole"]) == 0
    for name in ("adapters", "whole"):
        assert main(["chat", f"runs/{name}", "--message", "What news, 2?", "--tokens", "10"]) == 0
    assert main(["export", run, "exported"]) == 0
    assert main(["export", "runs/whole", "taught"]) == 0
    assert main(["merge", "runs/adapters", "merged", "--dtype", "fp32"]) == 0
    for name, folder in ((run, "exported"), ("runs/whole", "taught"), ("runs/adapters", "merged")):
        transformers_agrees(name, Path(folder))


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


def test_the_default_model_goes_on(rows: str, capsys: pytest.CaptureFixture[str]):
    goes_on(rows, [*SHORT, "output.plots=false", "eval.sample_tokens=8"], steps=2)
    said = capsys.readouterr().out
    assert "(char, 67 ids)" in said
    assert "samples are written by `plain`" in said
    assert "<|endoftext|>" in said, "in the sample that is shown"
    tokenizer = api.load_model("runs/shakespeare-char", device="cpu").tokenizer
    assert isinstance(tokenizer, CharTokenizer)
    assert tokenizer.encode("3#4").tolist()[1:] == [65, 65], "what Shakespeare never wrote"


@pytest.mark.slow  # minutes on a CPU
def test_the_default_run_learns_what_it_says_and_answers(rows: str, capsys: pytest.CaptureFixture[str]):
    goes_on(rows, [], steps=150)
    said = capsys.readouterr().out
    assert float(re.findall(r"best val loss ([0-9.]+)", said)[0]) < 1.6
    right = 0
    for ask, say in ANSWERS.items():
        answer = "".join(api.chat("runs/whole", ask, tokens=60, temperature=0.0))
        right += answer.strip() == re.sub(r"\d", lambda digit: digit[0] if digit[0] == "3" else "\ufffd", say)
    assert right == len(ANSWERS), "learned by heart, to the end"
