"""Scores of one model three ways: our evaluator of files, our `LM` class in lm-evaluation-harness, and the harness's
own class for Hugging Face models, on the same weights and questions.

    python lab/tasks.py MODEL DATA --tasks arc_easy,piqa,lambada_openai --limit 200 >> lab/tasks.jsonl

MODEL is a Hugging Face folder, DATA a folder of task files. The harness gets the rows by templates that are written
here, not by ours. A row has the scores of all three ways, and the largest difference of a log-likelihood from the
Hugging Face class. Needs no network.
"""

import argparse
import dataclasses
import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

import flatout
from flatout.front.scoring import subject_of
from flatout.tasks.harness import harness_model

AGGREGATIONS = {"acc": "mean", "acc_norm": "mean", "perplexity": "perplexity"}


class Rows(list):
    """What the harness asks of a data set."""

    @property
    def features(self) -> dict[str, Any]:
        return self[0]


def harness_task(path: Path) -> dict[str, Any]:
    """A task of the harness with the rows of a file."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        rows = Rows(json.loads(line) for line in file)
    task: dict[str, Any] = {"task": path.name.partition(".")[0], "custom_dataset": lambda **_: {"test": rows}}
    task |= {"test_split": "test", "output_type": "multiple_choice", "doc_to_target": "gold", "num_fewshot": 0}
    metrics = ["acc", "acc_norm"]
    if "query" in rows[0]:
        asks = "\nAnswer:" if rows[0]["query"].rstrip().rpartition("\n")[2].startswith("Question:") else ""
        task |= {"doc_to_text": lambda row: row["query"].rstrip() + asks, "doc_to_choice": "choices"}
    elif "context" in rows[0]:
        task |= {"output_type": "loglikelihood", "doc_to_text": "{{context}}", "target_delimiter": ""}
        task |= {"doc_to_target": lambda row: " " + row["continuation"].strip()}
        metrics = ["acc", "perplexity"]
    else:
        task |= {"doc_to_text": "gold", "doc_to_choice": "context_options"}
        task |= {"doc_to_target": lambda row: row["continuation"]}
        metrics = ["acc"]
    listed = [{"metric": name, "aggregation": AGGREGATIONS[name], "higher_is_better": True} for name in metrics]
    return task | {"metric_list": listed}


@dataclasses.dataclass
class Found:
    scores: dict[str, float]
    log_likelihoods: list[float]


def through_harness(lm: Any, tasks: list[dict[str, Any]], limit: int | None) -> dict[str, Found]:
    found: Any = simple_evaluate(lm, tasks=list(tasks), limit=limit, bootstrap_iters=0)
    each = {}
    for name, samples in found["samples"].items():
        scores = {key: found["results"][name][f"{key},none"] for key in AGGREGATIONS if key in samples[0]["metrics"]}
        ordered = sorted(samples, key=lambda sample: sample["doc_id"])
        each[name] = Found(scores, [one[0][0] for sample in ordered for one in sample["resps"]])
    return each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("--commit", default="", help="of Flatout's sources, for the row")
    parser.add_argument("--tasks", default="arc_easy,piqa,lambada_openai")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=16, help="of the Hugging Face class")
    asked = parser.parse_args()
    files = [next(asked.data.glob(f"{name}.jsonl*")) for name in asked.tasks.split(",")]
    tasks = [harness_task(path) for path in files]
    loaded = flatout.load_model(asked.model, device=asked.device)
    own = flatout.score(loaded, files, limit=asked.limit)
    began = time.perf_counter()
    ours = through_harness(harness_model(subject_of(loaded)), tasks, asked.limit)
    middle = time.perf_counter()
    # In fp32, torch's log-softmax on a CPU is off by 7e-6 for each token of a vocabulary of 49,152.
    how = {"dtype": "float32", "softmax_dtype": "float64", "batch_size": asked.batch}
    hf = HFLM(pretrained=asked.model, device=asked.device, **how)  # pyright: ignore[reportCallIssue]
    theirs = through_harness(hf, tasks, asked.limit)
    seconds = {"files": own.seconds, "our_lm": middle - began, "hf": time.perf_counter() - middle}
    for name, reference in theirs.items():
        scores = {score.metric: score for score in own.scores if score.task == name}
        values = [value for row in own.samples if row["task"] == name for value in row["log_likelihoods"]]
        row = {
            "model": Path(asked.model).name, "task": name, "rows": scores["acc"].rows, "device": loaded.device.name,
            "files": {metric: score.value for metric, score in scores.items()},
            "errors": {metric: score.error for metric, score in scores.items()},
            "our_lm": ours[name].scores, "hf": reference.scores,
            "largest_difference": {
                "files": largest(values, reference.log_likelihoods),
                "our_lm": largest(ours[name].log_likelihoods, reference.log_likelihoods),
            },
            "seconds_of_all_tasks": seconds, "torch": torch.__version__,
            "commit": asked.commit,
        }  # fmt: skip
        print(json.dumps(row), flush=True)


def largest(values: list[float], reference: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(values, reference, strict=True))


if __name__ == "__main__":
    main()
