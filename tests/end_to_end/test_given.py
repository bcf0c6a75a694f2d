"""A model, data and an optimizer from Python: they train, resume bit-identically, and are refused by name."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import flatout
from flatout.checkpoints.checkpoint import Checkpoint, list_checkpoints, read_checkpoint
from flatout.config.load import LoadedConfig
from flatout.errors import CheckpointError, ConfigError, HardwareError, UserError
from flatout.model.gpt import GPT

Tiny = Callable[..., LoadedConfig]
SIZE = ("model.layers=2", "model.width=16", "model.heads=2", "model.context=16", "train.batch_tokens=64",
        "checkpoint.every=3", "eval.every=3", "eval.tokens=64", "eval.sample_every=6", "eval.sample_tokens=4",
        "optim.warmup=2")  # fmt: skip


class Squared(nn.Module):
    """An MLP with dropout and with something that it remembers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return self.dropout(self.down(torch.relu(self.up(h)).square()))


class Mixing(nn.Module):
    """A block without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), Squared(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.cumsum(x, 1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.mlp(self.norm(before))


def other_mlp(model: GPT) -> None:
    for block in model.blocks:
        block.mlp = Squared(model.config.width)


def other_block(model: GPT) -> GPT:
    model.blocks[1] = Mixing(model.config.width)
    return model


class Recurrent(nn.Module):
    """A whole model of the user's."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.table, self.cell, self.head = (
            nn.Embedding(vocab, 16),
            nn.GRU(16, 16, batch_first=True),
            nn.Linear(16, vocab),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(self.table(ids))[0])


def two_groups(kind: type[torch.optim.Optimizer], **more: Any) -> Callable[..., torch.optim.Optimizer]:
    def build(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        others = [one for name, one in named.items() if "embedding" in name]
        most = [one for name, one in named.items() if "embedding" not in name]
        return kind([{"params": most, "lr": 0.02}, {"params": others, "lr": 0.05}], **more)

    return build


def checkpoint(folder: Path, step: int) -> Checkpoint:
    return read_checkpoint(dict(list_checkpoints(folder / "checkpoints"))[step])


def same(one: Checkpoint, other: Checkpoint) -> bool:
    parts = [(one.model, other.model), (one.optimizer, other.optimizer), (one.run, other.run)]
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in parts)


def interrupted(steps: int) -> Callable[[], bool]:
    answers = iter([False] * (steps - 1) + [True] * 10)
    return lambda: next(answers)


CASES = {
    "an MLP": {"model": other_mlp, "optimizer": two_groups(torch.optim.SGD, momentum=0.9)},
    "a module": {"model": lambda built: Recurrent(built.vocab)},
    "NAdam": {"optimizer": two_groups(torch.optim.NAdam)},
}


@pytest.mark.parametrize("name", CASES)
def test_given_parts_train_and_resume_bit_identically(tiny: Tiny, tmp_path: Path, name: str):
    given = CASES[name]
    words = (*SIZE, "train.steps=6")
    whole = flatout.train(tiny(*words, "output.folder=whole"), on_record=lambda _: None, **given)
    cut = flatout.train(tiny(*words, "output.folder=cut"), on_record=lambda _: None, stop=interrupted(4), **given)
    assert cut.end is not None
    assert cut.end.reason == "interrupted"
    rest = flatout.train(resume=tmp_path / "cut", on_record=lambda _: None, **given)
    assert rest.info.start_step == 4
    assert rest.loss == whole.loss
    assert same(checkpoint(tmp_path / "whole", 6), checkpoint(tmp_path / "cut", 6))
    assert flatout.train(resume=tmp_path / "cut", on_record=lambda _: None, **given).info.nothing_left
    for missing in given:
        fewer = {key: value for key, value in given.items() if key != missing}
        with pytest.raises(
            CheckpointError, match=f"{missing}= from Python.*none was given|was trained with {missing}="
        ):
            list(flatout.train(tiny(*words, "train.steps=8"), resume=tmp_path / "cut", **fewer))


def test_a_dataset_a_changed_block_and_an_optimizer_together(tmp_path: Path, tiny: Tiny):
    class Numbers(Dataset):
        def __len__(self) -> int:
            return 60

        def __getitem__(self, index: int) -> torch.Tensor:
            return (torch.arange(20 + index) * (index % 3 + 1)) % 13

    words = [
        "model.vocab=16",
        *SIZE,
        "data.validation=0.1",
        "train.steps=6",
        "speed.device=cpu",
    ]

    def config(folder: str) -> LoadedConfig:
        return flatout.load_config("shakespeare-char", [*words, f"output.folder={tmp_path / folder}"])

    given = {"data": Numbers(), "model": other_block, "optimizer": two_groups(torch.optim.Adam)}
    seen: list[flatout.Record] = []
    whole = flatout.train(config("whole"), on_record=seen.append, **given)
    assert [type(record) for record in seen[-1:]] == [flatout.EndRecord]
    assert whole.info.parameters == sum(one.numel() for one in flatout.load_model(
        tmp_path / "whole", model=other_block).model.parameters())  # fmt: skip
    told = " ".join(record.message for record in seen if isinstance(record, flatout.NoticeRecord))
    assert "model= is our decoder, changed" in told
    assert "optimizer= is torch's" in told
    flatout.train(config("cut"), on_record=seen.append, stop=interrupted(3), **given)
    flatout.train(config("cut"), on_record=seen.append, resume=tmp_path / "cut", **given)
    assert same(checkpoint(tmp_path / "whole", 6), checkpoint(tmp_path / "cut", 6))


def test_a_trained_model_from_python_is_loaded_with_it_and_never_exported(tiny: Tiny, tmp_path: Path):
    flatout.train(tiny(*SIZE, "train.steps=3", "output.folder=run"), model=other_mlp, on_record=lambda _: None)
    with pytest.raises(CheckpointError, match=r"trained with a model from Python \(model=\)"):
        flatout.load_model(tmp_path / "run")
    with pytest.raises(CheckpointError, match="other parts than the run's"):
        flatout.load_model(tmp_path / "run", model=other_block)
    model = flatout.load_model(tmp_path / "run", model=other_mlp)
    assert int(model.model.get_buffer("blocks.0.mlp.module.seen")) == 3
    assert "".join(flatout.generate(model, "the ", tokens=3))
    assert flatout.evaluate(model).loss > 0
    with pytest.raises(CheckpointError, match="no model of transformers computes it"):
        flatout.export(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=r"trained with a model from Python \(model=\)"):
        list(flatout.train(tiny(*SIZE, "train.steps=3", f"model.init_from={tmp_path / 'run'}")))


def test_the_start_follows_from_the_seed_and_leaves_the_random_state_alone(tiny: Tiny):
    before = torch.get_rng_state()
    words = (*SIZE, "train.steps=1")
    first, again = (
        next(record for record in flatout.train(tiny(*words, f"output.folder={name}"), model=other_mlp)
             if isinstance(record, flatout.StepRecord)).loss for name in ("one", "two"))  # fmt: skip
    assert first == again
    assert torch.equal(before, torch.get_rng_state())


def test_runs_in_two_threads_take_turns_and_learn_what_they_learn_alone(tiny: Tiny, tmp_path: Path):
    words = (*SIZE, "train.steps=6", "model.dropout=0.2", "speed.threads=1")

    def train(name: str) -> None:
        flatout.train(tiny(*words, f"output.folder={name}"), model=other_mlp, on_record=lambda _: None)

    train("alone")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, ("one", "two")))
    for name in ("one", "two"):
        assert same(checkpoint(tmp_path / "alone", 6), checkpoint(tmp_path / name, 6))


def swapped(name: str, module: nn.Module) -> Callable[[GPT], None]:
    def change(model: GPT) -> None:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, module)

    return change


@pytest.mark.parametrize(
    ("words", "given", "error", "told"),
    [
        (["speed.kernels=triton"], {"model": other_mlp}, HardwareError, "do not know a model from Python"),
        (["speed.checkpointing=full"], {"model": Recurrent(21)}, ConfigError, r"speed\.checkpointing is about"),
        (["data.documents=apart"], {"model": other_mlp}, ConfigError, r"data\.documents=apart"),
        ([], {"model": swapped("norm", nn.LayerNorm(16))}, ConfigError, "model= changes norm"),
        ([], {"model": swapped("blocks.0.attention.qkv", nn.Linear(16, 48).requires_grad_(False))}, None, ""),
        ([], {"model": swapped("blocks.0.attention.out", nn.Identity())}, ConfigError, r"blocks\.0\.attention\.out"),
        ([], {"model": swapped("blocks", nn.ModuleList())}, ConfigError, "has 0 blocks, and model.layers is 2"),
        ([], {"model": lambda _: 3}, ConfigError, "returned a int"),
        ([], {"model": nn.Embedding(28, 5)}, ConfigError, r"answers ids of shape \(1, 2\) with \(1, 2, 5\)"),
        ([], {"optimizer": lambda named: torch.optim.LBFGS(named.values())}, ConfigError, "by a closure"),
        ([], {"optimizer": lambda named: torch.optim.SGD(list(named.values())[1:])}, ConfigError, "does not take"),
        ([], {"optimizer": lambda named: list(named)}, ConfigError, "returned a list"),
        ([], {"optimizer": [3]}, ConfigError, "optimizer= is a list"),
        ([], {"optimizer": 3}, ConfigError, "optimizer= is a int"),
        ([], {"optimizer": "adam"}, ConfigError, "optimizer= is a str"),
        ([], {"optimizer": torch.optim.Adam}, ConfigError, "optimizer= is the class Adam"),
        ([], {"optimizer": torch.optim.SGD([torch.zeros(1)])}, ConfigError, "optimizer= is a SGD"),
        ([], {"model": "x"}, ConfigError, "model= is a str"),
        ([], {"model": nn.Identity()}, ConfigError, "nothing to train"),
        ([], {"model": lambda built: built.requires_grad_(False)}, ConfigError, "nothing to train"),
        (["speed.fused_optimizer=on"], {"optimizer": two_groups(torch.optim.SGD)}, HardwareError, "form of its own"),
        (["speed.optimizer_state=8bit"], {"optimizer": two_groups(torch.optim.SGD)}, HardwareError, "form of its own"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_by_name(
    tiny: Tiny, tmp_path: Path, words: list[str], given: dict[str, Any], error: type[UserError] | None, told: str
):
    config = tiny(*SIZE, "train.steps=1", "output.folder=run", *words)
    if error is None:
        list(flatout.train(config, **given))
        return
    with pytest.raises(error, match=told):
        list(flatout.train(config, **given))
    assert not (tmp_path / "run").exists()


def test_state_that_a_checkpoint_cannot_hold_is_refused_after_the_first_update(tiny: Tiny):
    class Remembering(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().step()
            for group in self.param_groups:
                for one in group["params"]:
                    self.state[one]["history"] = [1, 2]

    config = tiny(*SIZE, "train.steps=3", "output.folder=run")
    with pytest.raises(ConfigError, match="the state of Remembering has history, a list"):
        list(flatout.train(config, optimizer=two_groups(Remembering)))


def test_numbers_of_a_group_that_move_are_saved(tiny: Tiny, tmp_path: Path):
    class Counting(torch.optim.SGD):
        """Its rate falls with a count of its own."""

        def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
                group["lr"] /= group["k"]
            super().step()

    given, words = {"optimizer": two_groups(Counting, momentum=0.5)}, (*SIZE, "train.steps=6")
    flatout.train(tiny(*words, "output.folder=whole"), on_record=lambda _: None, **given)
    flatout.train(tiny(*words, "output.folder=cut"), on_record=lambda _: None, stop=interrupted(2), **given)
    flatout.train(resume=tmp_path / "cut", on_record=lambda _: None, **given)
    whole = checkpoint(tmp_path / "whole", 6)
    assert sorted(name.rpartition(".")[2] for name in whole.optimizer if "group:" in name) == ["group:k:int"] * 2
    assert same(whole, checkpoint(tmp_path / "cut", 6))


def test_a_rule_takes_some_parameters_and_the_config_the_rest(tiny: Tiny, tmp_path: Path):
    class Sign(flatout.Optimizer):
        """Moves every weight by its rate."""

        def fresh_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"moves": torch.zeros((), device=parameter.device)}

        @torch.no_grad()
        def update(self, divisor: torch.Tensor, finite: torch.Tensor) -> None:
            for group in self.groups:
                for one in group.updated():
                    assert one.grad is not None
                    one -= torch.where(finite, group.numbers["rate"] * one.grad.sign(), 0.0)
                    self.state[one]["moves"] += finite

    rule = flatout.Rule(
        name="signs",
        takes=lambda one: one.name.startswith("blocks.") and one.matrix,
        optimizer=Sign,
        bytes=flatout.StateBytes(device=0, host=0, checkpoint=0),
        rate=[1e-3],
    )
    words = (*SIZE, "train.steps=4")
    flatout.train(tiny(*words, "output.folder=whole"), optimizer=rule, on_record=lambda _: None)
    flatout.train(tiny(*words, "output.folder=cut"), optimizer=rule, on_record=lambda _: None, stop=interrupted(2))
    flatout.train(resume=tmp_path / "cut", optimizer=[rule], on_record=lambda _: None)
    whole = checkpoint(tmp_path / "whole", 4)
    assert {name.rpartition(".")[2] for name in whole.optimizer} == {"moves", "step", "exp_avg", "exp_avg_sq"}
    assert same(whole, checkpoint(tmp_path / "cut", 4))


TEXTS = [f"line {number} of a text that is short.\n" for number in range(80)]


class Streamed(IterableDataset):
    """With a length, as many have it, and no items."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        return ({"text": text, "source": "here"} for text in TEXTS)

    def __len__(self) -> int:
        return len(TEXTS)


@pytest.mark.parametrize("given", [lambda: TEXTS, Streamed], ids=["list", "rows"])
def test_texts_train_and_resume_bit_identically(tiny: Tiny, tmp_path: Path, given: Callable[[], Any]):
    words = [*SIZE, "train.steps=6", "data.tokenizer=bytes", "speed.device=cpu"]

    def config(folder: str) -> LoadedConfig:
        return flatout.load_config("shakespeare-char", [*words, f"output.folder={tmp_path / folder}"])

    whole = flatout.train(config("whole"), data=given(), on_record=lambda _: None)
    flatout.train(config("cut"), data=given(), on_record=lambda _: None, stop=interrupted(4))
    flatout.train(resume=tmp_path / "cut", data=given(), on_record=lambda _: None)
    assert same(checkpoint(tmp_path / "whole", 6), checkpoint(tmp_path / "cut", 6))
    assert whole.info.tokenizer == "bytes"
    assert "".join(flatout.generate(flatout.load_model(tmp_path / "whole"), "line", tokens=4))
