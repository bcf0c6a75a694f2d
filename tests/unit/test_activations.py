"""What blocks keep for backward: recomputed or moved away, the gradients stay."""

import pytest
import torch

from flatout.config.schema import ModelConfig
from flatout.model.execution import Execution
from flatout.model.gpt import AT_ONCE, GPT, ActivationOffload, _Moved, build_model

VOCAB = 50


def run(execution: Execution, family: str = "gpt", dropout: float = 0.0) -> tuple[torch.Tensor, GPT]:
    config = ModelConfig(family=family, layers=3, width=32, heads=4, context=16, dropout=dropout)
    model = build_model(config, VOCAB, execution=execution)
    model.offload.least_bytes = 1
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(VOCAB, (2, 4, 16), generator=generator)
    torch.manual_seed(3)
    loss = model(tokens, targets)
    loss.backward()
    return loss.detach(), model


@pytest.mark.grid
@pytest.mark.parametrize("family", ["gpt", "gpt2"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_gradients_do_not_depend_on_what_is_kept(family, dropout, offload, checkpointing):
    expected_loss, expected = run(Execution(), family, dropout)
    loss, model = run(Execution(checkpointing=checkpointing, activation_offload=offload), family, dropout)
    assert torch.equal(loss, expected_loss)
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert mine.grad is not None
        # a moved tensor has no gaps any more, and a product over it may add up in another order
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert (model.offload.moved_bytes > 0) == offload


def saved_bytes(execution: Execution) -> int:
    """Bytes that autograd keeps for backward, parameters left out."""
    config = ModelConfig(family="gpt2", layers=2, width=32, heads=2, context=16)
    model = build_model(config, VOCAB, execution=execution)
    kept: dict[int, int] = {}
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in owned:
            kept[pointer] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.hidden(torch.zeros(8, 16, dtype=torch.int64))
    return sum(kept.values())


def test_full_checkpointing_keeps_the_inputs_of_blocks_only():
    assert saved_bytes(Execution(checkpointing="full")) < 0.2 * saved_bytes(Execution())


def test_selective_checkpointing_computes_no_product_twice():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.products = self.others = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            product = name in ("mm", "addmm", "bmm") or name.startswith("_scaled_dot_product")
            self.products += product
            self.others += not product
            return function(*args, **(kwargs or {}))

    counts = {}
    for what in ("none", "selective", "full"):
        with Count() as count:
            run(Execution(checkpointing=what), "gpt2")
        counts[what] = (count.products, count.others)
    assert counts["selective"][0] == counts["none"][0] < counts["full"][0]
    assert counts["selective"][1] > counts["none"][1]


def test_small_tensors_parameters_and_casts_of_them_stay():
    model = build_model(ModelConfig(layers=1, width=32, heads=2, context=8), VOCAB)
    offload = ActivationOffload(model, least_bytes=4096)
    offload.hooks()
    weight = model.blocks[0].mlp.up.weight
    assert isinstance(offload._pack(weight), torch.Tensor)
    assert isinstance(offload._pack(weight.t()), torch.Tensor)
    assert isinstance(offload._pack(weight.detach()), torch.Tensor)
    assert isinstance(offload._pack(weight.to(torch.bfloat16).t()), torch.Tensor)
    assert isinstance(offload._pack(torch.zeros(8, 8)), torch.Tensor)
    assert isinstance(offload._pack(torch.zeros(64, 64)), _Moved)


def test_at_most_two_tensors_wait_on_the_device_and_one_saved_twice_moves_once():
    model = build_model(ModelConfig(layers=1, width=32, heads=2, context=8), VOCAB)
    offload = ActivationOffload(model, least_bytes=1)
    offload.hooks()
    tensors = [torch.full((4, 4), float(i)) for i in range(6)]
    moved = [offload._pack(tensor) for tensor in tensors]
    assert offload._pack(tensors[-1]) is moved[-1]
    assert offload.moved_bytes == 6 * 64
    assert sum(m.device is not None for m in moved) == AT_ONCE
    for m, tensor in zip(reversed(moved), reversed(tensors), strict=True):
        assert torch.equal(offload._unpack(m), tensor)
        assert sum(other.device is not None for other in moved) <= AT_ONCE + 1
    assert torch.equal(offload._unpack(moved[-1]), tensors[-1]), "its second user"
    gapped = torch.arange(64.0).view(4, 4, 4).transpose(0, 1)[:, :2]
    assert torch.equal(offload._unpack(offload._pack(gapped)), gapped)


def test_nothing_is_fetched_that_nobody_will_use(monkeypatch):
    """Tensors saved by one operation come back in the order they went: the first is done when the second comes."""
    offload = ActivationOffload(build_model(ModelConfig(layers=1, width=32, heads=2, context=8), VOCAB), least_bytes=1)
    offload.hooks()
    moved = [offload._pack(torch.full((4, 4), float(i))) for i in range(6)]
    fetched = []
    real = offload._copy
    monkeypatch.setattr(
        offload, "_copy", lambda target, source: (fetched.append(float(source[0, 0])), real(target, source))[1]
    )
    for first in (4, 2, 0):
        assert float(offload._unpack(moved[first])[0, 0]) == first
        assert float(offload._unpack(moved[first + 1])[0, 0]) == first + 1
    assert sorted(fetched) == sorted(set(fetched))
    assert all(m.device is None for m in moved)


def test_a_failed_pass_leaves_nothing_on_the_device():
    offload = ActivationOffload(build_model(ModelConfig(layers=1, width=32, heads=2, context=8), VOCAB), least_bytes=1)
    offload.hooks()
    for number in range(3):
        offload._pack(torch.full((4, 4), float(number)))
    assert offload.leaving
    offload.drop()
    assert not offload.leaving
    again = offload._pack(torch.ones(4, 4))
    assert isinstance(again, _Moved)
    assert again.previous is None, "the next pass does not reach back into the failed one"
