"""When a run looks at its eigenstate blocks, and what it tells of them."""

from pathlib import Path

import pytest

import flatout
from flatout.model.gpt import GPT
from flatout.observe.sinks import read_history
from flatout.records import EigenstateRecord, EvalRecord

MIXED = [
    "model.pattern=EWE", "model.layers=3", "model.window=4", "model.states=8", "train.steps=12",
    "eval.every=5", "optim.learning_rate=1e-2", "output.folder=seen",
]  # fmt: skip


def test_what_eigenstates_remember_is_told_at_the_start_at_evaluations_and_at_the_end(tiny):
    config = tiny(*MIXED)
    asked = iter(range(100))
    first = list(flatout.train(config, stop=lambda: next(asked) >= 6))  # between two evaluations
    looks = [record for record in first if isinstance(record, EigenstateRecord)]
    assert [look.step for look in looks] == [0, 5, 7]
    assert isinstance(first[-2], EigenstateRecord)
    second = list(flatout.train(config, resume="auto"))
    again = [record for record in second if isinstance(record, EigenstateRecord)]
    assert [look.step for look in again] == [7, 10, 12]
    assert again[0] == looks[-1]  # read from the very weights that were saved
    assert [record.step for record in second if isinstance(record, EvalRecord)] == [10, 12]
    assert [layer.layer for layer in again[-1].layers] == [1, 3]
    assert again[-1].layers[0].horizon != looks[0].layers[0].horizon  # decay is learned
    assert again[-1].layers[0].period != looks[0].layers[0].period
    assert sorted({row["step"] for row in read_history(Path("seen")).eigenstates}) == [0, 5, 7, 10, 12]
    model = flatout.load_model("seen", device="cpu").model
    assert isinstance(model, GPT)
    horizon = -1.0 / model.eigenstates[1].eigenvalues()[0]
    assert again[-1].layers[1].horizon["max"] == pytest.approx(horizon.max().item(), rel=1e-6)
    assert again[-1].layers[1].horizon["min"] == pytest.approx(horizon.min().item(), rel=1e-6)


def test_a_run_of_attention_alone_says_nothing_of_eigenstates(tiny):
    records = list(flatout.train(tiny("train.steps=3", "eval.every=1", "output.folder=plain")))
    assert not [record for record in records if isinstance(record, EigenstateRecord)]
