"""What blocks keep for backward: recomputed, the gradients stay the same."""

import pytest
import torch

from flatout.config.schema import ModelConfig
from flatout.model.execution import Execution
from flatout.model.gpt import GPT, build_model

VOCAB = 50


def run(execution: Execution, family: str = "gpt", dropout: float = 0.0) -> tuple[torch.Tensor, GPT]:
    config = ModelConfig(family=family, layers=3, width=32, heads=4, context=16, dropout=dropout)
    model = build_model(config, VOCAB, execution=execution)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(VOCAB, (2, 4, 16), generator=generator)
    torch.manual_seed(3)
    loss = model(tokens, targets)
    loss.backward()
    return loss.detach(), model


@pytest.mark.grid
@pytest.mark.parametrize("family", ["gpt", "gpt2"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_gradients_do_not_depend_on_what_is_kept(family, dropout, checkpointing):
    expected_loss, expected = run(Execution(), family, dropout)
    loss, model = run(Execution(checkpointing=checkpointing), family, dropout)
    assert torch.equal(loss, expected_loss)
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)


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
