"""Scores of one model three ways: our evaluator of files, our `LM` class in lm-evaluation-harness, and the harness's
own class for Hugging Face models, on the same weights and questions.

    python lab/tasks.py MODEL --data FOLDER --tasks arc_easy,piqa,lambada_openai --limit 200 --out lab/tasks.jsonl

MODEL is a Hugging Face folder that transformers reads too. The harness gets the rows of the files by templates that are
written here, not by ours. A row has the accuracies of all three, and the largest difference of a log-likelihood from
the Hugging Face class. Needs no network.
"""

import argparse
import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import datasets
import torch
from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

import flatout
from flatout.tasks.harness import harness_model
from flatout.tasks.likelihood import Subject

METRICS = {"acc": "mean", "acc_norm": "mean", "perplexity": "perplexity"}


def harness_task(name: str, path: Path) -> dict[str, Any]:
    """A task of the harness that has the rows of a file."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    task: dict[str, Any] = {
        "task": name,
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_target": "gold",
        "num_fewshot": 0,
    }
    metrics = ["acc", "acc_norm"]
    if "query" in rows[0]:
        asks = "\nAnswer:" if rows[0]["query"].rstrip().rpartition("\n")[2].startswith("Question:") else ""
        task |= {"doc_to_text": lambda row: row["query"].rstrip() + asks, "doc_to_choice": "choices"}
    elif "context" in rows[0]:
        task |= {"output_type": "loglikelihood", "doc_to_text": "{{context}}"}
        task |= {"doc_to_target": lambda row: " " + row["continuation"].strip()}
        metrics = ["acc", "perplexity"]
    else:
        task |= {"doc_to_text": "gold", "doc_to_choice": "context_options"}
        task |= {"doc_to_target": lambda row: row["continuation"]}
        metrics = ["acc"]
    listed = [{"metric": one, "aggregation": METRICS[one], "higher_is_better": one != "perplexity"} for one in metrics]
    return task | {"metric_list": listed}


def through_harness(lm: Any, tasks: list[dict[str, Any]], limit: int | None) -> tuple[dict[str, Any], float]:
    began = time.perf_counter()
    found = simple_evaluate(lm, tasks=list(tasks), limit=limit, bootstrap_iters=0)
    assert found is not None
    return found, time.perf_counter() - began


def log_likelihoods(found: dict[str, Any], name: str) -> list[float]:
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    return [answers[0][0] for sample in samples for answers in sample["resps"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tasks", default="arc_easy,piqa,lambada_openai")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=16, help="of the Hugging Face class")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    names = asked.tasks.split(",")
    files = [next(asked.data.glob(f"{name}.jsonl*")) for name in names]
    loaded = flatout.load_model(asked.model, device=asked.device, weights="fp32")
    own = flatout.score(loaded, files, limit=asked.limit)
    tasks = [harness_task(name, path) for name, path in zip(names, files, strict=True)]
    subject = Subject(model=loaded.model, tokenizer=loaded.tokenizer, scope=loaded.scope, stops=loaded.stops)
    ours, ours_seconds = through_harness(harness_model(subject), tasks, asked.limit)
    hf = HFLM(pretrained=asked.model, device=asked.device, dtype="float32", batch_size=asked.batch)
    theirs, their_seconds = through_harness(hf, tasks, asked.limit)
    seconds = {"files": own.seconds, "our_lm": ours_seconds, "hf": their_seconds}  # of all tasks
    for name in names:
        reference = log_likelihoods(theirs, name)
        values = [value for row in own.samples if row["task"] == name for value in row["log_likelihoods"]]
        row: dict[str, Any] = {
            "model": Path(asked.model).name,
            "task": name,
            "rows": len(theirs["samples"][name]),
            "device": loaded.device.name,
            "files": {score.metric: round(score.value, 6) for score in own.scores if score.task == name},
            "files_errors": {score.metric: round(score.error or 0.0, 6) for score in own.scores if score.task == name},
            "our_lm": metrics_of(ours, name),
            "hf": metrics_of(theirs, name),
            "largest_difference_files": largest(values, reference),
            "largest_difference_our_lm": largest(log_likelihoods(ours, name), reference),
            "seconds_of_all_tasks": {way: round(value, 1) for way, value in seconds.items()},
        }
        print(json.dumps(row), flush=True)
        if asked.out is not None:
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def metrics_of(found: dict[str, Any], name: str) -> dict[str, float]:
    return {metric: round(found["results"][name][f"{metric},none"], 6) for metric in METRICS
            if f"{metric},none" in found["results"][name]}  # fmt: skip


def largest(values: list[float], reference: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(values, reference, strict=True))


if __name__ == "__main__":
    main()
