"""Model families beyond Llama's: a step of LoRA is that of PEFT, adapters and merges go both ways, text is that of
transformers. `test_hub_models.py` compares logits, gradients and exports of the same models."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.generation.engine import generate_tokens
from flatout.generation.sampling import Sampling
from flatout.model.adapter_files import load_adapter, save_adapter
from flatout.model.hub import read_description
from flatout.model.hub_folder import export_huggingface
from flatout.model.merge import merge
from tests.hub_folders import from_huggingface
from tests.parity.test_hub_models import build_theirs, distance, load_theirs, tokens

FAMILIES = ["smollm3", "olmo2", "phi3", "phi4-mini", "gemma2", "gemma2-uncapped", "gemma3", "gemma3-wide-window"]
every_family = pytest.mark.parametrize("name", FAMILIES)


def quietly(function: Any, *values: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*values, **options)


def loss_of(logits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


@every_family
def test_a_step_of_lora_its_files_and_its_merge_are_those_of_peft(name: str, tmp_path: Path):
    import peft

    base = build_theirs(name)
    base.save_pretrained(tmp_path / "base")
    ours, x = from_huggingface(tmp_path / "base"), tokens(base.config.vocab_size)
    options = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    theirs = quietly(peft.get_peft_model, base, options)
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.02 * torch.randn_like(parameter))
    quietly(theirs.save_pretrained, tmp_path / "before")
    adapters, _ = load_adapter(ours, tmp_path / "before")
    assert adapters.count == sum(parameter.numel() for parameter in trained)
    for parameters in (trained, [adapters.flat]):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        logits = ours.train().logits(x) if parameters is not trained else theirs(x).logits
        loss_of(logits, x).backward()
        optimizer.step()
    adapters.forget()
    with torch.no_grad():
        expected, found = theirs(x).logits, ours.eval().logits(x)
    assert distance(found, expected) < 2e-6
    save_adapter(adapters, tmp_path / "after")
    again = quietly(peft.PeftModel.from_pretrained, load_theirs(tmp_path / "base"), tmp_path / "after")
    with torch.no_grad():
        assert distance(again(x).logits, expected) < 2e-6
    merge(adapters, torch.float32)
    export_huggingface(ours, tmp_path / "merged", source=read_description(tmp_path / "base"))
    with torch.no_grad():
        assert distance(load_theirs(tmp_path / "merged")(x).logits, theirs.merge_and_unload()(x).logits) < 5e-6


@every_family
def test_greedy_text_is_that_of_transformers(name: str, tmp_path: Path):
    theirs = build_theirs(name)
    with torch.no_grad():  # with a weak stream, a tied head would repeat the last token
        theirs.model.embed_tokens.weight.mul_(0.1)
    theirs.save_pretrained(tmp_path)
    prompt = tokens(theirs.config.vocab_size)[:1, :6]
    expected = theirs.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    how: Any = {"count": 40, "sampling": Sampling(temperature=0.0)}
    made = list(generate_tokens(from_huggingface(tmp_path), prompt[0].tolist(), **how))
    assert made == expected[0, 6:].tolist()
    assert len(set(made)) > 1, "the text must wander for this to mean anything"
