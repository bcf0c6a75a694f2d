"""Packed documents: each computes what it would compute alone, and nobody sees a neighbour."""

import numpy as np
import pytest
import torch

from flatout.config.schema import ModelConfig
from flatout.model.execution import Execution
from flatout.model.gpt import GPT, build_model
from flatout.ops.documents import Layout, document_attention, document_mask, lay_out
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


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Layout]:
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


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash", "fa4"])
def test_kernels_that_go_by_bounds_equal_the_mask(backend):
    from flatout.ops.flash_attention_4 import fa4_missing

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
            error = float((mine.float() - theirs.float()).norm() / theirs.float().norm())
            assert error < 1e-2, (heads, groups, size, error)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash", "fa4"])
def test_on_a_gpu_our_kernels_pack_as_the_plain_path_does(backend):
    from flatout.ops.flash_attention_4 import fa4_missing

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


def test_a_tight_row_has_the_same_documents_and_no_padding_to_speak_of():
    lengths = [[70, 1, 90], [100], [3, 3]]
    documents = packed(lengths, 200)
    targets = np.full((3, 200), IGNORED, dtype=np.int64)
    targets[:, 1:3] = 5
    layout = lay_out(documents, targets, CPU)
    assert layout.tight is not None
    tight = layout.tight.layout
    assert tight.documents_BT.shape == (1, 384)
    sizes = [length for row in lengths for length in row]
    assert tight.bounds_E.diff().tolist() == [*sizes, 384 - sum(sizes)]
    tokens = torch.arange(600).view(3, 200)
    real = torch.from_numpy(documents) >= 0
    assert torch.equal(layout.tight.take(tokens)[0, : sum(sizes)], tokens[real])
    assert torch.equal(tight.positions_BT[0, : sum(sizes)], layout.positions_BT[real])
    assert int((layout.tight.take(torch.from_numpy(targets)) != IGNORED).sum()) == 6
    assert tight.tight is None


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
