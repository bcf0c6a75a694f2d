"""Runs of models with eigenstates and windows: trained, cut short and gone on with, loaded, sampled, sized up."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import flatout
from flatout import api
from flatout.checkpoints.checkpoint import read_checkpoint
from flatout.engine.evaluate import evaluate
from flatout.errors import CheckpointError, ConfigError, UsageError
from flatout.model.count import flops_per_token
from flatout.ops.reference import IGNORED
from flatout.records import EndRecord, EvalRecord, RunInfo, StepRecord, TuneResult
from tests.set_up import set_up

MIXED = ["model.pattern=EWA", "model.layers=3", "model.window=4", "model.states=8", "train.steps=12"]


@pytest.mark.parametrize("more", [[], ["speed.checkpointing=full", "speed.micro_batch=2"]], ids=["plain", "again"])
def test_a_run_with_eigenstates_goes_on_bit_for_bit(tiny, more):
    list(flatout.train(tiny(*MIXED, *more, "output.folder=whole")))
    asked = iter(range(100))
    config = tiny(*MIXED, *more, "output.folder=cut")
    *_, end = flatout.train(config, stop=lambda: next(asked) >= 4)
    assert isinstance(end, EndRecord)
    assert end.reason == "interrupted"
    list(flatout.train(config, resume="auto"))
    whole, cut = (read_checkpoint(Path(name) / "checkpoints" / "step-00000012") for name in ("whole", "cut"))
    for kind in ("model", "optimizer"):
        mine, theirs = getattr(whole, kind), getattr(cut, kind)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert "blocks.0.attention.decay_K" in whole.model


def test_a_run_with_eigenstates_learns_and_its_model_writes(tiny):
    first, *records = flatout.train(tiny(*MIXED, "train.steps=60", "output.folder=run"))
    assert isinstance(first, RunInfo)
    features = {feature.name: feature for feature in first.features}
    assert features["scan"].used == "chunked"
    losses = [record.loss for record in records if isinstance(record, StepRecord)]
    assert losses[-1] < 0.7 * losses[0]
    model = flatout.load_model("run", device="cpu")
    texts = [
        "".join(flatout.generate(model, "the old", tokens=30, temperature=0.0, cached=how)) for how in (True, False)
    ]
    assert texts[0] == texts[1]
    assert texts[0]
    with pytest.raises(CheckpointError, match=r"transformers has no such model with model\.pattern"):
        flatout.export("run", "exported")
    with pytest.raises(UsageError, match="nothing to merge: `flatout generate`"):
        api.merge(model, "merged")


@pytest.mark.parametrize(
    ("layers", "told"),
    [(1, ["full attention (A) or windows (W)", "the only block is E"]), (2, ["full attention (A)"]), (3, [])],
)
def test_a_run_says_which_blocks_of_its_pattern_never_come(tiny, layers, told):
    run = set_up(tiny("model.pattern=EWA", f"model.layers={layers}", "model.states=8"))
    said = [notice for notice in run.notices if notice.startswith("model.pattern is")]
    assert len(said) == bool(told)
    assert all(words in said[0] for words in told)


def test_tune_sizes_up_a_model_with_eigenstates(tiny):
    *_, result = flatout.tune(tiny(*MIXED), seconds=5.0)
    assert isinstance(result, TuneResult)
    assert result.fragment


# --- documents apart -------------------------------------------------------------------------------------------------


@pytest.fixture
def many(tiny, tmp_path):
    """A tiny config over many short documents."""
    rows = [json.dumps({"text": f"{number} is " + "so " * (number % 7 + 1)}) for number in range(300)]
    (tmp_path / "many.jsonl").write_text("\n".join(rows), encoding="utf-8")
    words = ["data.source=many.jsonl", "data.tokenizer=bytes", "data.split=document", "data.documents=apart"]
    return lambda *more: tiny(*MIXED, "train.steps=6", *words, *more)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_documents_apart_do_not_see_each_other(many, packing):
    run = set_up(many(f"data.packing={packing}", "model.context=64", "eval.tokens=400"))
    with run.batches(0) as batches:
        batch = next(batches)
    assert batch.packed is not None
    documents, targets = batch.packed.documents_BT, batch.packed.targets_BT
    crossing = np.zeros(documents.shape, dtype=bool)
    crossing[:, :-1] = documents[:, 1:] != documents[:, :-1]
    assert crossing.any()
    if packing == "concat":  # in fitted rows it stands as a target only
        assert (targets[crossing] == IGNORED).all(), "a document's last token has nothing to foretell"
    tokens, _, layout = batch.packed.part(slice(0, 1), torch.device("cpu"))
    model = run.model.double().eval()
    whole = model.logits(tokens, layout=layout)
    begin, end = (int(place) for place in np.flatnonzero(crossing[0])[:2] + 1)
    alone = model.logits(tokens[:, begin:end])
    torch.testing.assert_close(whole[:, begin:end], alone)
    model.float()
    loss, labelled = evaluate(model, run.evaluation(), run.scope)
    assert 0 < labelled < 400
    assert loss > 0


def test_batches_with_documents_apart_are_those_of_joined_ones(many):
    joined, parted = (set_up(many(f"data.documents={how}")) for how in ("joined", "apart"))
    with joined.batches(2) as plain, parted.batches(2) as packed:
        mine, theirs = next(plain), next(packed)
    assert torch.equal(mine.tokens, theirs.tokens)
    kept = theirs.targets != IGNORED
    assert torch.equal(mine.targets[kept], theirs.targets[kept])
    assert 0 < int((~kept).sum()) < kept.numel() / 2
    seen = [sum(int((b.targets != IGNORED).sum()) for b in run.evaluation()) for run in (joined, parted)]
    assert seen[1] < seen[0]
    assert parted.plan.flops_per_token < joined.plan.flops_per_token


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_bits_per_byte_are_those_of_the_tokens_that_are_foretold(many, tokenizer):
    """Every number counted by hand: targets of the evaluation, and bytes of the documents without their first token."""
    run = set_up(many(f"data.tokenizer={tokenizer}", "eval.tokens=null"))
    foretold = sum(int((batch.targets != IGNORED).sum()) for batch in run.evaluation())
    val, decode = run.data.val, run.data.tokenizer.decode
    starts = val.document_starts().astype(int).tolist()
    texts = [val.read(a, b - a)[1:-1] for a, b in zip(starts, [*starts[1:], val.tokens], strict=True)]
    size = sum(len(decode(ids).encode()) for ids in texts)
    assert run.data.tokens_per_byte == pytest.approx(foretold / size)
    joined = set_up(many(f"data.tokenizer={tokenizer}", "data.documents=joined"))
    assert joined.data.tokens_per_byte == pytest.approx(val.tokens / val.text_bytes)
    assert joined.data.tokens_per_byte != pytest.approx(run.data.tokens_per_byte, rel=1e-3)


def test_arithmetic_of_documents_that_are_longer_than_a_window(many):
    """A document of many windows weighs as many windows, and not as one."""
    run = set_up(many("model.context=16"))
    starts = run.data.train.document_starts().astype(np.int64)
    lengths = np.diff(starts, append=run.data.train.tokens)
    assert (lengths > 16).any()
    pieces = [min(16, length - begin) for length in lengths for begin in range(0, length, 16)]
    mean = sum(piece**2 for piece in pieces) / sum(pieces)
    assert run.plan.flops_per_token == pytest.approx(flops_per_token(run.plan.model, run.model.vocab, mean))


def test_a_run_with_documents_apart_trains_and_goes_on(many):
    first, *records = flatout.train(many("output.folder=whole", "speed.micro_batch=2"))
    assert isinstance(first, RunInfo)
    used = {feature.name: feature.used for feature in first.features}
    assert (used["loader"], used["cuda_graphs"], used["document_attention"]) == ("host", "off", "sdpa")
    asked = iter(range(100))
    list(flatout.train(many("output.folder=cut", "speed.workers=0"), stop=lambda: next(asked) >= 2))
    rest = list(flatout.train(many("output.folder=cut", "speed.micro_batch=2"), resume="auto"))
    losses, resumed = (
        {record.step: record.loss for record in some if isinstance(record, StepRecord)} for some in (records, rest)
    )
    assert len(losses) == 6
    assert 0 < len(resumed) < 6, "it began anew"
    assert resumed == pytest.approx({step: losses[step] for step in resumed}, rel=1e-4)
    *_, own = (record for record in records if isinstance(record, EvalRecord))
    found = flatout.evaluate("whole", tokens=512)  # as the run's own, of every number
    assert (found.loss, found.tokens) == pytest.approx((own.loss, own.tokens), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(own.bits_per_byte, rel=1e-4)


@pytest.mark.parametrize(
    "words", [["data.streaming=true"], ["model.pattern=A", "model.dropout=0.1"]], ids=["streaming", "dropout"]
)
def test_what_documents_apart_do_not_go_with(many, words):
    with pytest.raises(ConfigError, match=r"documents|dropout"):
        many(*words)
