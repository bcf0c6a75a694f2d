"""Preparing on a Ray cluster of two nodes gives the bytes that one process gives."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from flatout.config.schema import CleanConfig, DataConfig
from flatout.data import plan
from flatout.data.pack import pack_corpus
from flatout.data.plan import request_of

ray = pytest.importorskip("ray")


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    small = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, connect=False, head_node_args=small)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        cluster.wait_for_nodes()
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.filterwarnings("ignore")  # Ray warns about its own use of Python and of the machine
def test_two_nodes_give_the_bytes_of_one_process(
    tmp_path: Path, two_nodes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len([node for node in ray.nodes() if node["Alive"]]) == 2
    monkeypatch.setattr(plan, "PART_BYTES", 4096)
    texts = [f"text {number}: " + "some words here and there " * (number % 40) for number in range(400)]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in [*texts, *texts[:30]]) + "broken\n", encoding="utf-8"
    )
    data = DataConfig(source=str(tmp_path / "rows.jsonl"), tokenizer="gpt2", split="document", validation=0.2)
    request = request_of(data, CleanConfig(drop=["exact_duplicates"]))
    made = {}
    for engine in ("local", "ray"):
        pack_corpus(request, tmp_path / engine, engine=engine, workers=0)
        made[engine] = {path.name: path.read_bytes() for path in (tmp_path / engine).iterdir()}
    assert made["ray"] == made["local"]
    assert json.loads(made["ray"]["report.json"])["problem_count"] == 1
