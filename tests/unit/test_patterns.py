"""Models whose blocks differ: full attention and sliding windows, by a pattern."""

import importlib.util

import numpy as np
import pytest
import torch

from flatout.config.schema import ModelConfig
from flatout.model.count import estimate_memory, flops_per_token
from flatout.model.execution import Execution
from flatout.model.gpt import build_model
from flatout.ops.documents import lay_out

VOCAB = 50
SHAPE = {"layers": 2, "width": 32, "heads": 2, "context": 24}
TRITON = pytest.param(
    Execution(kernels="triton", loss="fused"),
    marks=[
        pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
        pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels do not take tensors of the host"),
        pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of infinities in masked lanes, which it computes too
    ],
    id="triton",
)


def tokens(batch: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(3))


def test_a_pattern_repeats_over_the_blocks():
    config = ModelConfig(**{**SHAPE, "layers": 5}, pattern="WWA", window=7)
    assert config.windows == (7, 7, None, 7, 7)
    assert ModelConfig(**SHAPE).windows == (None, None)
    model = build_model(config, VOCAB)
    assert [block.attention.window for block in model.blocks] == [7, 7, None, 7, 7]


def test_windows_reach_as_far_as_their_blocks_add_up_to():
    model = build_model(ModelConfig(**SHAPE, pattern="W", window=4), VOCAB, seed=1).double()
    first = tokens()
    second = first.clone()
    second[:, 5] = (second[:, 5] + 1) % VOCAB
    changed = (model.logits(first) != model.logits(second)).any(dim=-1).any(dim=0)
    assert changed.nonzero().flatten().tolist() == list(range(5, 5 + 2 * (4 - 1) + 1))
    mixed = build_model(ModelConfig(**SHAPE, pattern="WA", window=4), VOCAB, seed=1).double()
    changed = (mixed.logits(first) != mixed.logits(second)).any(dim=-1).any(dim=0)
    assert changed.nonzero().flatten().tolist() == list(range(5, 24))


def test_a_window_over_the_context_is_full_attention():
    whole = build_model(ModelConfig(**SHAPE), VOCAB, seed=1)
    wide = build_model(ModelConfig(**SHAPE, pattern="W", window=24), VOCAB, seed=1)
    assert torch.equal(whole(tokens(), tokens()), wide(tokens(), tokens()))


@pytest.mark.parametrize("prompt", [1, 3, 9])
def test_decoding_equals_one_pass(prompt):
    model = build_model(ModelConfig(**SHAPE, pattern="WA", window=4), VOCAB, seed=1).double().eval()
    row = tokens(1)
    with torch.inference_mode():
        whole = model.logits(row)
        cache = model.empty_cache()
        pieces = [model.logits(row[:, :prompt], cache)]
        pieces += [model.logits(row[:, place : place + 1], cache) for place in range(prompt, 24)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)


@pytest.mark.grid
@pytest.mark.parametrize("how", [pytest.param(Execution(attention="reference"), id="reference"), TRITON])
@pytest.mark.parametrize("packed", [False, True])
def test_every_way_gives_the_same_loss_and_gradients(how, packed):
    config = ModelConfig(**SHAPE, pattern="WA", window=5)
    documents = np.repeat(np.array([[0, 1, 2], [0, 1, 1]], dtype=np.int32), 8, axis=1)
    layout = lay_out(documents, None, torch.device("cpu")) if packed else None
    results = []
    for execution in (Execution(), how):
        model = build_model(config, VOCAB, seed=1, execution=execution)
        loss = model(tokens(), tokens().flip(1), 0.0, layout)
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-4)


def test_documents_are_apart_within_windows():
    model = build_model(ModelConfig(**SHAPE, pattern="W", window=5), VOCAB, seed=1).double()
    layout = lay_out(np.repeat(np.array([[0, 1]], dtype=np.int32), 12, axis=1), None, torch.device("cpu"))
    row = tokens(1)
    other = row.clone()
    other[:, :12] = (other[:, :12] + 1) % VOCAB
    before, after = (model.logits(x, layout=layout) for x in (row, other))
    assert torch.equal(before[:, 12:], after[:, 12:])
    assert not torch.equal(before[:, :12], after[:, :12])


@pytest.mark.parametrize(("pattern", "masks"), [("A", 1), ("W", 1), ("WA", 2), ("E", 0)])
def test_blocks_of_a_kind_share_the_mask_of_documents(pattern, masks):
    """And the estimate knows of each: a mask is as large as all pairs of tokens."""
    config = ModelConfig(**{**SHAPE, "layers": 4, "states": 8}, pattern=pattern, window=5)
    layout = lay_out(np.repeat(np.array([[0, 1]], dtype=np.int32), 12, axis=1), None, torch.device("cpu"))
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == (1, 1, 24, 24):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        build_model(config, VOCAB)(tokens(1), tokens(1), 0.0, layout)
    assert len(kept) == masks
    how = {"micro_batch": 1, "half": False, "compiled": False, "execution": Execution()}
    packed, plain = (estimate_memory(config, VOCAB, row_tokens=rows, **how) for rows in (24, None))
    assert packed.activations - plain.activations == (1 + 4 * masks if masks else 0) * 24 * 24


def test_flops_count_what_a_window_reaches():
    full, windowed = (ModelConfig(**{**SHAPE, "context": 1024}, pattern=p, window=128) for p in ("A", "WA"))
    seen = [sum(min(position + 1, window) for position in range(1024)) / 1024 for window in (1024, 128)]
    difference = flops_per_token(full, VOCAB) - flops_per_token(windowed, VOCAB)
    assert difference == pytest.approx(12 * 32 * (seen[0] - seen[1]))


@pytest.mark.parametrize("more", [{"family": "gpt2"}, {"dropout": 0.1}, {"pattern": "AX"}, {"pattern": ""}])
def test_what_windows_do_not_go_with(more):
    with pytest.raises(ValueError, match=r"pattern|window"):
        ModelConfig(**{**SHAPE, "pattern": "W", **more})
