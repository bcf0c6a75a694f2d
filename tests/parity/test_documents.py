"""Packed documents: each computes what it would compute alone, and nobody sees a neighbour."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.config.schema import ModelConfig
from flatout.model.execution import Execution
from flatout.model.gpt import GPT, build_model
from flatout.ops.documents import (
    DocumentLayout,
    PackedRows,
    Room,
    document_attention,
    document_mask,
    joined_length,
    lay_out,
)
from flatout.ops.reference import IGNORED, attention_reference

CPU = torch.device("cpu")
LENGTHS = [[5, 1, 7], [9, 3], [13]]  # of the documents in rows of 13; what is left of a row is padding
ROW = 13


def packed(lengths: list[list[int]], row: int = ROW) -> np.ndarray:
    documents = np.full((len(lengths), row), -1, dtype=np.int32)
    for line, parts in zip(documents, lengths, strict=True):
        start = 0
        for number, length in enumerate(parts):
            line[start : start + length] = number
            start += length
    return documents


def spans(lengths: list[list[int]]) -> list[tuple[int, slice]]:
    return [
        (row, slice(sum(parts[:number]), sum(parts[: number + 1])))
        for row, parts in enumerate(lengths)
        for number in range(len(parts))
    ]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_a_layout_says_where_documents_lie():
    targets = np.full((3, ROW), IGNORED, dtype=np.int64)
    targets[0, 2] = targets[2, 12] = 1
    layout = lay_out(packed(LENGTHS), targets, CPU)
    assert layout.bounds_E.tolist() == [0, 5, 6, 13, 22, 25, 26, 39]
    assert layout.positions_BT[0].tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6]
    assert layout.positions_BT[1].tolist() == [*range(9), *range(3), 0]
    assert layout.longest == ROW
    assert layout.labelled_L is None  # 128 places are more than there are tokens


def test_places_of_labels_are_all_labels_and_then_a_token_without_one():
    documents = np.zeros((2, 300), dtype=np.int32)
    targets = np.full((2, 300), IGNORED, dtype=np.int64)
    targets[0, 1::2] = 7
    layout = lay_out(documents, targets, CPU)
    assert layout.labelled_L is not None
    places = layout.labelled_L.tolist()
    assert len(places) == 256
    assert places[:150] == list(range(1, 300, 2))
    assert {int(targets.reshape(-1)[place]) for place in places[150:]} == {IGNORED}


def test_the_mask_is_causal_inside_documents_and_empty_between_them():
    visible = document_mask(torch.tensor([[0, 0, 1, 1, 1]]))[0]
    assert visible.tolist() == [
        [True, False, False, False, False],
        [True, True, False, False, False],
        [False, False, True, False, False],
        [False, False, True, True, False],
        [False, False, True, True, True],
    ]


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_of_packed_documents_is_that_of_each_alone(backend, groups):
    layout = lay_out(packed(LENGTHS), None, CPU)
    q, k, v = (draw(3, n, ROW, 8, seed=s).requires_grad_() for s, n in enumerate((4, groups, groups)))
    y = document_attention(q, k, v, layout, backend=backend)
    weight = draw(*y.shape, seed=9)
    real = torch.zeros(3, ROW, dtype=torch.bool)
    for row, span in spans(LENGTHS):
        real[row, span] = True
    mine = torch.autograd.grad((y * weight * real[:, None, :, None]).sum(), (q, k, v))
    alone = [torch.zeros_like(x) for x in (q, k, v)]
    for row, span in spans(LENGTHS):
        parts = [x[row : row + 1, :, span].detach().requires_grad_() for x in (q, k, v)]
        expected = attention_reference(*parts)
        torch.testing.assert_close(y[row : row + 1, :, span], expected, rtol=1e-10, atol=1e-12)
        loss = (expected * weight[row : row + 1, :, span]).sum()
        for into, gradient in zip(alone, torch.autograd.grad(loss, parts), strict=True):
            into[row : row + 1, :, span] = gradient
    for got, expected in zip(mine, alone, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def model_of(family: str, **execution) -> GPT:
    shape = {"layers": 2, "width": 32, "heads": 4, "context": ROW, "family": family}
    config = ModelConfig(**shape, **({"kv_heads": 2, "tied": False} if family == "gpt" else {}))
    return build_model(config, 50, seed=3, execution=Execution(**execution))


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, DocumentLayout]:
    generator = torch.Generator().manual_seed(seed)
    documents = packed(LENGTHS)
    tokens = torch.randint(0, 50, (3, ROW), generator=generator)
    targets = torch.full((3, ROW), IGNORED)
    for row, span in spans(LENGTHS):
        targets[row, span.start : span.stop - 1] = tokens[row, span.start + 1 : span.stop]
    return tokens, targets, lay_out(documents, targets.numpy(), CPU)


@pytest.mark.parametrize("family", ["gpt", "gpt2"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_packed_losses_and_gradients_are_the_sum_of_separate_ones(family, checkpointing):
    model = model_of(family, checkpointing=checkpointing).double()
    model.train()
    tokens, targets, layout = batch()
    model(tokens, targets, 0.0, layout).backward()
    mine = {name: gradient_of(parameter).clone() for name, parameter in model.named_parameters()}
    total = float(model(tokens, targets, 0.0, layout).detach())
    model.zero_grad()
    expected = 0.0
    for row, span in spans(LENGTHS):
        loss = model(tokens[row : row + 1, span], targets[row : row + 1, span])
        expected += float(loss.detach())
        loss.backward()
    assert total == pytest.approx(expected, rel=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(mine[name], parameter.grad, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("family", ["gpt", "gpt2"])
def test_another_document_changes_nobody_elses_logits(family):
    model = model_of(family).eval()
    tokens, _, layout = batch()
    before = model.logits(tokens, layout=layout)
    changed = tokens.clone()
    row, span = spans(LENGTHS)[1]
    changed[row, span] = (changed[row, span] + 1) % 50
    after = model.logits(changed, layout=layout)
    for other_row, other in spans(LENGTHS):
        if (other_row, other) != (row, span):
            assert torch.equal(before[other_row, other], after[other_row, other])
    assert not torch.equal(before[row, span], after[row, span])


def test_the_head_works_on_labelled_tokens_alone_and_the_loss_is_the_same():
    model = model_of("gpt").double()
    documents = np.zeros((20, ROW), dtype=np.int32)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 50, (20, ROW), generator=generator)
    targets = torch.full((20, ROW), IGNORED)
    targets[:, -3:] = tokens[:, -3:]
    layout = lay_out(documents, targets.numpy(), CPU)
    assert layout.labelled_L is not None
    few = model(tokens, targets, 0.0, layout)
    few.backward()
    gradients = [gradient_of(parameter).clone() for parameter in model.parameters()]
    model.zero_grad()
    every = model(tokens, targets)
    every.backward()
    torch.testing.assert_close(few, every, rtol=1e-12, atol=0.0)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-12)


def test_documents_that_do_not_fit_are_refused_and_long_rows_are_not():
    model = model_of("gpt")
    tokens = torch.zeros(1, 4 * ROW, dtype=torch.int64)
    layout = lay_out(np.repeat(np.arange(4, dtype=np.int32), ROW)[None], None, CPU)
    assert model.logits(tokens, layout=layout).shape == (1, 4 * ROW, 50)
    with pytest.raises(ValueError, match="do not fit the context"):
        model.logits(tokens, layout=lay_out(np.zeros((1, 4 * ROW), dtype=np.int32), None, CPU))


# --- fixed sizes ------------------------------------------------------------------------------------------------------


def rows_of(
    lengths: list[list[int]], row: int, seed: int = 0, room: Room | None = None, share: float = 0.4
) -> PackedRows:
    rng = np.random.default_rng(seed)
    documents = packed(lengths, row)
    tokens = np.where(documents >= 0, rng.integers(0, 50, documents.shape), 0)
    targets = np.where(
        (documents >= 0) & (rng.random(documents.shape) < share), rng.integers(0, 50, tokens.shape), IGNORED
    )
    return PackedRows(tokens, documents, targets, room)


def test_joined_rows_have_few_lengths_and_little_padding():
    lengths = sorted({joined_length(count) for count in range(1, 40_000)})
    assert lengths[:4] == [256, 512, 768, 1024]
    assert len(lengths) <= 16 + 16 * 4
    assert all(joined_length(length) == length for length in lengths)
    for before, after in itertools.pairwise(lengths):
        assert joined_length(before + 1) == after
        assert after - before <= max(256, before / 15)


@given(
    lengths=st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=6), min_size=1, max_size=6),
    micro_batch=st.integers(1, 6),
    joined=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_parts_hold_every_document_once_in_fixed_sizes(lengths, micro_batch, joined):
    row = max(map(sum, lengths)) + 3
    count = sum(map(len, lengths))
    rows = rows_of(lengths, row, room=Room(count, max(map(max, lengths)), joined))
    expected = [
        (rows.tokens_BT[line, span].tolist(), rows.targets_BT[line, span].tolist()) for line, span in spans(lengths)
    ]
    found, places = [], 0
    for cut in rows.cuts(micro_batch):
        assert 1 <= cut.stop - cut.start <= micro_batch
        tokens, targets, layout = rows.part(cut, CPU)
        places += tokens.numel()
        bounds = layout.bounds_E.tolist()
        assert bounds == sorted(bounds)
        assert bounds[-1] == tokens.numel()
        assert max(np.diff(bounds)) <= layout.longest
        if layout.labelled_L is not None:
            labels = targets.flatten()[layout.labelled_L]
            assert sorted(labels[labels != IGNORED].tolist()) == sorted(targets[targets != IGNORED].tolist())
        for start, end in itertools.pairwise(bounds):
            inside = slice(start, end)
            positions = layout.positions_BT.flatten()[inside].tolist()
            assert positions in (list(range(end - start)), [0] * (end - start)), "padding has position 0"
            assert layout.documents_BT.flatten()[inside].unique().numel() <= 1
            found.append((tokens.flatten()[inside].tolist(), targets.flatten()[inside].tolist()))
    assert places == rows.places(micro_batch)
    for document in expected:
        found.remove(document)
    assert all(set(tokens) <= {0} and set(targets) <= {IGNORED} for tokens, targets in found), "only padding is left"


def test_documents_of_any_kind_have_the_same_sizes():
    room = Room(12, 200, joined=True)
    one = rows_of([[200, 3, 40], [199, 1]], 250, room=room).part(slice(None), CPU)
    other = rows_of([[30] * 7, [100, 100], [33]], 250, seed=2, room=room).part(slice(None), CPU)
    assert one[0].shape == other[0].shape == (1, 512)
    assert one[2].sizes == other[2].sizes
    assert one[2].longest == 256


def test_rows_that_single_documents_fill_stay_rows():
    room = Room(4, 512, joined=True)
    full = rows_of([[512], [510], [500]], 512, room=room)
    assert full.part(slice(None), CPU)[0].shape == (3, 512)
    assert rows_of([[512], [200]], 512, room=room).part(slice(None), CPU)[0].shape == (1, 768)


def test_what_does_not_fit_the_room_is_refused():
    with pytest.raises(ValueError, match="where 40 are the most"):
        rows_of([[41]], 64, room=Room(4, 40, joined=False)).part(slice(None), CPU)
    with pytest.raises(ValueError, match="where a step has 2"):
        rows_of([[5] * 9], 64, room=Room(2, 40, joined=True)).part(slice(None), CPU)


@pytest.mark.parametrize("family", ["gpt", "gpt2"])
def test_fixed_sizes_change_neither_the_loss_nor_the_gradients(family):
    """Joined or in rows, in one piece or row by row: the sum over the documents is the same."""
    lengths = [[5, 1, 7], [9, 3], [13], [2, 2, 2, 2]]
    results = []
    for room in (None, Room(10, ROW, joined=False), Room(10, ROW, joined=True)):
        for micro_batch in (4, 1):
            model = model_of(family).double()
            rows = rows_of(lengths, ROW, room=room)
            total = torch.zeros((), dtype=torch.float64)
            for cut in rows.cuts(micro_batch):
                tokens, targets, layout = rows.part(cut, CPU)
                loss = model(tokens, targets, 0.0, layout)
                loss.backward()
                total += loss.detach()
            results.append((float(total), [gradient_of(parameter).clone() for parameter in model.parameters()]))
    for total, gradients in results[1:]:
        assert total == pytest.approx(results[0][0], rel=1e-11)
        for mine, theirs in zip(gradients, results[0][1], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-11)


def test_a_neighbour_in_a_joined_row_is_not_seen():
    lengths = [[5, 1, 7], [9, 3]]
    room = Room(8, ROW, joined=True)
    model = model_of("gpt").eval()
    rows = rows_of(lengths, ROW, room=room)
    tokens, _, layout = rows.part(slice(None), CPU)
    before = model.logits(tokens, layout=layout)
    changed = tokens.clone()
    changed[0, 6:13] = (changed[0, 6:13] + 1) % 50  # the third document
    after = model.logits(changed, layout=layout)
    assert torch.equal(before[0, :6], after[0, :6])
    assert torch.equal(before[0, 13:], after[0, 13:])
    assert not torch.equal(before[0, 6:13], after[0, 6:13])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash", "fa4"])
def test_kernels_that_go_by_bounds_equal_the_mask(backend):
    from flatout.ops.attention import fa4_missing

    if backend == "fa4" and fa4_missing():
        pytest.skip("flash-attn-4 is not installed")
    device = torch.device("cuda")
    lengths = [[700, 1, 129, 400], [2048], [64] * 30]
    documents = packed(lengths, 2048)
    layout = lay_out(documents, None, device)
    for heads, groups, size in [(32, 4, 64), (9, 3, 64), (8, 8, 128)]:
        values = [
            draw(3, n, 2048, size, seed=s, dtype=torch.bfloat16).to(device)
            for s, n in enumerate((heads, groups, groups))
        ]
        fast, slow = ([x.detach().clone().requires_grad_() for x in values] for _ in range(2))
        y = document_attention(*fast, layout, backend=backend)
        expected = document_attention(*[x.float() for x in slow], layout, backend="reference")
        real = (torch.from_numpy(documents) >= 0).to(device)[:, None, :, None]
        weight = draw(*y.shape, seed=5, dtype=torch.float32).to(device) * real
        got = torch.autograd.grad((y.float() * weight).sum(), fast)
        right = torch.autograd.grad((expected * weight).sum(), slow)
        for mine, theirs in [(y * real, expected * real), *zip(got, right, strict=True)]:
            mine, theirs = mine.detach().float(), theirs.detach().float()
            error = float((mine - theirs).norm() / theirs.norm())
            assert error < 1e-2, (heads, groups, size, error)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash", "fa4"])
def test_on_a_gpu_our_kernels_pack_as_the_plain_path_does(backend):
    from flatout.ops.attention import fa4_missing

    if backend == "fa4" and fa4_missing():
        pytest.skip("flash-attn-4 is not installed")
    device = torch.device("cuda")
    config = ModelConfig(layers=3, width=256, heads=4, kv_heads=2, context=512, qk_norm=False, tied=False)
    lengths = [[200, 100, 212], [512], [30] * 15]
    documents = packed(lengths, 512)
    tokens = torch.randint(0, 1000, (3, 512), generator=torch.Generator().manual_seed(2))
    targets = torch.full((3, 512), IGNORED)
    for row, span in spans(lengths):
        targets[row, span.start : span.stop - 1] = tokens[row, span.start + 1 : span.stop]
    layout = lay_out(documents, targets.numpy(), device)
    results = []
    fused = Execution(kernels="triton", products="tuned", loss="fused", document_attention=backend)
    for how in (Execution(document_attention="sdpa"), fused):
        model = build_model(config, 1000, seed=1, execution=how).to(device).train()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens.to(device), targets.to(device), 0.0, layout)
        loss.backward()
        results.append((float(loss.detach()), [gradient_of(parameter).float() for parameter in model.parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], rel=2e-3)
    for plain, ours in zip(results[0][1], results[1][1], strict=True):
        assert float((plain - ours).norm() / plain.norm().clamp(min=1e-6)) < 3e-2


@pytest.mark.parametrize(
    ("documents", "alone"),
    [
        ([[0, 0, 0], [4, 4, 4]], True),
        ([[0, 0, -1], [1, -1, -1]], True),
        ([[0, 0, 1], [2, 2, 2]], False),
        ([[0, -1, 0], [2, 2, 2]], False),
        ([[-1, 0, 0], [2, 2, 2]], False),
        ([[-1, -1, -1], [2, 2, 2]], False),
    ],
)
def test_whether_documents_have_their_rows_to_themselves(documents, alone):
    assert lay_out(np.array(documents, dtype=np.int32), None, CPU).alone is alone


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash", "fa4"])
def test_on_a_gpu_empty_documents_and_a_longer_longest_change_nothing(backend):
    """Joined rows with fixed sizes, as recordings need them, against the same documents with the sizes they have."""
    from flatout.ops.attention import fa4_missing

    if backend == "fa4" and fa4_missing():
        pytest.skip("flash-attn-4 is not installed")
    device = torch.device("cuda")
    lengths = [[700, 1, 129, 400], [1500, 20], [64] * 12]
    rows = rows_of(lengths, 2048, room=Room(40, 2048, joined=True))
    layout = rows.part(slice(None), device)[2]
    tight = rows_of(lengths, 2048, room=Room(18, 1500, joined=True)).part(slice(None), device)[2]
    assert len(layout.bounds_E) > len(tight.bounds_E)
    assert layout.longest > tight.longest
    length = layout.documents_BT.shape[1]
    values = [draw(1, n, length, 64, seed=s, dtype=torch.bfloat16).to(device) for s, n in enumerate((9, 3, 3))]
    results = []
    for how in (layout, tight):
        parts = [x.detach().clone().requires_grad_() for x in values]
        y = document_attention(*parts, how, backend=backend)
        y[:, :, : rows.tokens].float().square().sum().backward()
        results.append((y.detach(), [x.grad for x in parts]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.isfinite(results[0][0]).all(), "padding is computed, too, and must not poison sums over tokens"
    for mine, theirs in zip(results[0][1], results[1][1], strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-3  # their sums have no fixed order


def test_all_layers_keep_one_mask_for_backward():
    layout = lay_out(np.array([[0, 0, 1, 1, 1, 2, 2, -1]], dtype=np.int32), None, torch.device("cpu"))
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    masks: set[int] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == (8, 8):
            masks.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results = [document_attention(q, k, v, layout, backend="sdpa") for _ in range(3)]
    assert len(masks) == 1
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=layout.visible_B1TS)
    assert all(torch.equal(result, expected) for result in results)
