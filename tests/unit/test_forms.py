"""How processes share a model: which form is taken, what it needs, and what slices of a checkpoint must say."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from flatout.checkpoints.checkpoint import entry_of, joined_entries, slice_file, well_formed
from flatout.config.load import load_config
from flatout.config.schema import ModelConfig, RunConfig
from flatout.config.source import DEFAULT
from flatout.errors import ConfigError
from flatout.model.count import estimate_memory, parameter_count
from flatout.model.execution import Execution
from flatout.optim.optimizers import Rule, StateBytes, check_slices
from flatout.parallel.ranks import Ranks
from flatout.resolve.case import ShardingChoice
from flatout.resolve.fit_check import fits_well
from flatout.resolve.form import sharding_choices
from flatout.resolve.memory import memory_of
from flatout.resolve.plan import Custom
from flatout.resolve.switches import resolve_speed
from flatout.world import World
from tests.unit.test_features import HOPPER, probes


def ranks(*hosts: str) -> Ranks:
    store: Any = None
    return Ranks(0, len(hosts), 0, store=store, hosts=hosts)


def config(*words: str) -> RunConfig:
    return load_config("gpt-124m", list(words)).config


def forms(world: World, *words: str) -> list[tuple[str, int]]:
    return [(one.form, one.shards) for one in sharding_choices(config(*words), world, Custom())]


def test_data_parallel_comes_first_and_slices_where_it_does_not_fit():
    assert forms(World(), "parallel.form=fsdp") == [("none", 1)], "one process has the whole model"
    assert forms(ranks("a"), "parallel.form=auto") == [("data", 1)]
    assert forms(ranks("a", "a")) == [("data", 1), ("fsdp", 2)]
    assert forms(ranks("a", "a", "b", "b")) == [("data", 1), ("hybrid", 2), ("fsdp", 4)]
    assert forms(ranks("a", "a", "b")) == [("data", 1), ("fsdp", 3)], "hosts that differ share no rows"
    assert forms(ranks("a", "b")) == [("data", 1), ("fsdp", 2)], "one process a host has nothing to slice between"
    assert forms(ranks("a", "b", "a", "b")) == [("data", 1), ("fsdp", 4)]
    assert forms(ranks("a", "a"), "parallel.form=fsdp") == [("fsdp", 2)]


def test_what_cannot_be_sliced_stays_whole_or_is_refused():
    assert forms(ranks("a", "a"), "parallel.reduce=bf16") == [("data", 1)]
    with pytest.raises(ConfigError, match=r"parallel\.reduce=bf16"):
        forms(ranks("a", "a"), "parallel.form=fsdp", "parallel.reduce=bf16")
    with pytest.raises(ConfigError, match="blocks of kind E"):
        forms(ranks("a", "a"), "parallel.form=fsdp", "model.pattern=AE")
    with pytest.raises(ConfigError, match="2 on a, 1 on b"):
        forms(ranks("a", "a", "b"), "parallel.form=hybrid")


def test_switches_that_slices_exclude_fall_back_and_say_so():
    dealt = ShardingChoice("fsdp", 4, "with data a step needs more than is there")
    words = ["speed.fp8=[up,down]", "speed.optimizer_state=8bit", "speed.cuda_graphs=on", "speed.compile=default"]
    how = {"vocab": 50257, "ranks": 4, "sharding": dealt, "probes": probes()}
    speed = resolve_speed(config(*words), HOPPER, 10**6, lambda _: DEFAULT, **how)
    assert (speed.parallel, speed.shards, speed.sharded) == ("fsdp", 4, True)
    assert (speed.fp8, speed.optimizer_state, speed.cuda_graphs, speed.compile) == ((), "fp32", False, "off")
    rows = {feature.name: feature for feature in speed.features}
    assert rows["parallel"].why == dealt.why
    for name in ("fp8", "optimizer_state", "cuda_graphs"):
        assert rows[name].why, name
    alone = resolve_speed(config(), HOPPER, 10**6, lambda _: DEFAULT, vocab=50257, probes=probes())
    assert "parallel" not in {feature.name for feature in alone.features}


def test_slices_need_less_memory_the_more_there_are():
    needs = {}
    for form, shards in (("data", 1), ("fsdp", 2), ("fsdp", 8), ("fsdp", 64)):
        how = {"vocab": 50257, "sharding": ShardingChoice(form, shards), "probes": probes()}
        large = config("model.layers=48", "model.width=4096", "model.heads=32", "speed.micro_batch=1")
        speed = resolve_speed(large, HOPPER, 10**6, lambda _: DEFAULT, **how)
        memory = memory_of(large, 50257, dataclasses.replace(speed, accumulation=1))
        needs[form, shards] = memory.total
        device = dataclasses.replace(speed.device, memory_bytes=80 * 2**30)
        assert fits_well(memory, device) == (memory.total < 0.92 * 80 * 2**30)
    assert all(more > less for more, less in itertools.pairwise(needs.values()))
    assert needs["fsdp", 8] < 0.4 * needs["data", 1]


def test_slices_never_hold_all_gradients():
    model = ModelConfig(layers=4, width=64, heads=4, context=32)
    how = {"micro_batch": 1, "half": True, "compiled": False, "execution": Execution(sharded=True), "shards": 8}
    alone, added = (estimate_memory(model, 500, accumulated=more, **how) for more in (False, True))
    assert added.gradients == alone.gradients < 4 * parameter_count(model, 500)
    assert (added.later, alone.later > 0) == (0, True)


def test_a_rule_for_whole_matrices_is_refused_by_name():
    common: dict[str, Any] = {"takes": lambda _: True, "optimizer": lambda _: None, "rate": [1.0]}
    rules = [Rule(name=name, bytes=StateBytes(8, 0, 8), whole=name == "turned", **common) for name in ("a", "turned")]
    check_slices(rules[:1])
    with pytest.raises(ConfigError, match="the optimizer of turned takes whole matrices"):
        check_slices(rules)


# --- the manifest of slices -------------------------------------------------------------------------------------------


def manifest() -> dict[str, Any]:
    """Of two processes: a matrix of five rows, and a count that is whole."""
    parts: list[dict[str, Any]] = []
    for number, (start, rows) in enumerate(((0, 3), (3, 2))):
        file = slice_file("model", number, 2)
        parts.append({"w": entry_of(file, (5, 4), start, torch.zeros(rows, 4))})
    count = entry_of(slice_file("optimizer", 0, 2), (), 0, torch.zeros(()))
    names = [slice_file("model", 0, 2), slice_file("model", 1, 2), slice_file("optimizer", 0, 2)]
    names += ["run.safetensors", "state.json", "config.json", "tokenizer.json"]
    slices = {"model": joined_entries(parts), "optimizer": {"w.step": count}}
    return {"format": 2, "step": 1, "files": {name: {} for name in names}, "slices": slices}


def test_slices_that_make_up_every_tensor_are_well_formed():
    assert well_formed(manifest())
    assert manifest()["slices"]["model"]["w"]["slices"][1] == {
        "file": "model-00002-of-00002.safetensors",
        "offset": [3, 0],
        "shape": [2, 4],
    }


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("files", "../model.safetensors"), {}),
        (("slices", "model", "w", "slices", 1, "offset"), [2, 0]),
        (("slices", "model", "w", "slices", 1, "shape"), [1, 4]),
        (("slices", "model", "w", "slices", 0, "shape"), [3, 3]),
        (("slices", "model", "w", "slices", 0, "file"), "run.safetensors"),
        (("slices", "model", "w", "slices", 0, "file"), "model-00003-of-00002.safetensors"),
        (("slices", "model", "w", "slices", 0, "file"), "optimizer-00001-of-00002.safetensors"),
        (("slices", "model", "w", "slices"), []),
        (("slices", "model", "w", "shape"), [5, True]),
        (("slices", "model", "w", "dtype"), "nn"),
        (("slices", "model", "w"), 7),
        (("slices", "run"), {}),
        (("slices", "optimizer"), []),
    ],
)
def test_slices_that_do_not_are_refused(where: tuple[Any, ...], value: Any):
    made = manifest()
    place: Any = made
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    assert not well_formed(made)
