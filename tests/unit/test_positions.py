"""The table of positions: exact sums over stages, windows cut into rows, and what was read before a resume."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flatout.data.batch import Delivery, Schedule, Span, Stage
from flatout.data.shard_data import DeviceLoader, HostLoader, windows_of
from flatout.data.shards import TokenShards
from tests.handmade import write_dataset

STAGES = (Stage(0, 4, 4), Stage(3, 8, 4, attention_window=2), Stage(5, 4, 8))
TABLE = Schedule(STAGES, 8)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    documents = [bytes(range(start, start + 25)) for start in range(0, 200, 25)]
    return TokenShards(write_dataset(tmp_path_factory.mktemp("positions") / "data", documents), "train")


def test_positions_are_the_sum_of_what_was_read():
    windows = [2, 2, 2, 4, 4, 4, 4]
    for step, expected in enumerate(windows):
        reading = TABLE.at(step)
        assert (reading.start, reading.windows) == (sum(windows[:step]), expected)
    assert [TABLE.at(step).length for step in range(7)] == [4, 4, 4, 4, 4, 8, 8]
    assert [TABLE.at(step).attention_window for step in range(7)] == [None, None, None, 2, 2, None, None]
    assert TABLE.at(10**15).start == 14 + 4 * (10**15 - 5)


def test_steps_until_a_position():
    assert [TABLE.steps_until(position) for position in (0, 1, 2, 6, 7, 10, 14, 15, 18)] == [0, 1, 1, 3, 4, 4, 5, 6, 6]
    assert Schedule.constant(3, 8).steps_until(1.5 * 7) == 4


@pytest.mark.parametrize(
    "stages", [(), (Stage(1, 4, 8),), (Stage(0, 4, 8), Stage(0, 8, 8)), (Stage(0, 4, 3),), (Stage(0, 0, 8),),
               (Stage(0, 3, 4),)],
)  # fmt: skip
def test_tables_that_mean_nothing_are_refused(stages: tuple[Stage, ...]):
    with pytest.raises(ValueError, match=r"step 0|sequences"):
        Schedule(stages, 8)


def test_another_table_after_a_resume_leaves_what_was_read():
    other = Schedule((Stage(0, 16, 8), Stage(9, 2, 8)), 8)
    joined = other.after(TABLE, 4)
    assert [joined.at(step) for step in range(4)] == [TABLE.at(step) for step in range(4)]
    assert joined.at(4).start == TABLE.at(4).start
    assert (joined.at(5).start, joined.at(9).windows) == (TABLE.at(4).start + 16, 2)
    for step in range(8):
        assert TABLE.after(TABLE, step) == TABLE
    assert other.after(TABLE, 0) == other
    begun = other.after(TABLE, 9)  # at the first step of a stage that is that stage
    assert (begun.at(9).start, begun.at(9).windows) == (TABLE.at(9).start, 2)


@pytest.mark.parametrize(
    ("length", "firsts", "steps"),
    [
        ({"windows": 36}, [0, 6, 9], 11),
        ({"windows": 37}, [0, 7, 10], 12),
        ({"windows": 1}, [0], 1),
        ({"steps": 22}, [0, 12, 18], 22),
        ({"steps": 2}, [0, 1], 2),
        ({"steps": 0}, [0], 0),
    ],
)
def test_stages_have_equally_many_windows(length: dict[str, int], firsts: list[int], steps: int):
    kinds = [Stage(0, 4, 4), Stage(0, 4, 8, 3), Stage(0, 6, 8)]
    table = Schedule.in_stages(kinds, 8, **length)
    assert [stage.first_step for stage in table.stages] == firsts
    assert all(stage in [replace(kind, first_step=stage.first_step) for kind in kinds] for stage in table.stages)
    if "windows" in length:
        assert table.steps_until(length["windows"]) == steps


@pytest.mark.parametrize("apart", [False, True])
def test_shorter_stages_read_the_same_windows_in_rows(train: TokenShards, apart: bool):
    windows = windows_of(train, context=8, stride=8, seed=3, apart=apart)
    span = Span(schedule=TABLE, first_step=0, last_step=7)
    how = Delivery(device=torch.device("cpu"), workers=2, micro_batch=2), span
    batches = list(HostLoader(windows, *how))
    assert [tuple(batch.tokens.shape) for batch in batches] == [(4, 4)] * 3 + [(8, 4)] * 2 + [(4, 8)] * 2
    assert [batch.pieces for batch in batches] == [2] * 5 + [1] * 2
    assert [batch.attention_window for batch in batches] == [None] * 3 + [2, 2] + [None] * 2
    whole = torch.cat([batch.tokens.reshape(-1, 8) for batch in batches])
    numbers = windows.order.indices(0, TABLE.at(7).start)
    assert torch.equal(whole, torch.from_numpy(train.gather(numbers * 8, 8).astype(np.int64)))
    for batch in batches:
        if batch.packed is not None:
            kept = batch.targets >= 0
            assert kept.float().mean() > 0.5
            assert torch.equal(batch.targets[kept], batch.tokens[kept] + 1)
            assert (batch.packed.documents_BT[:, 0] == 0).all()
    if not apart:
        same = DeviceLoader(windows, *how)
        assert all(torch.equal(one.targets, other.targets) for one, other in zip(same, batches, strict=True))


def test_an_epoch_of_stages_has_every_window_once(train: TokenShards):
    windows = windows_of(train, context=8, stride=8, seed=3)
    order = windows.order
    span = Span(schedule=TABLE, first_step=0, last_step=TABLE.steps_until(order.windows))
    rows = [tuple(row) for batch in HostLoader(windows, Delivery(device=torch.device("cpu")), span)
            for row in batch.tokens.reshape(-1, 8).tolist()]  # fmt: skip
    assert len(set(rows[: order.windows])) == order.windows
