"""Records of an imagined run, for tests of what reads them."""

from typing import Any

from flatout.records import EndRecord, Feature, MachineRecord, RunInfo, StepRecord


def info(**changes: Any) -> RunInfo:
    values: dict[str, Any] = {
        "flatout": "0.1.0",
        "torch": "2.13.0",
        "device": "NVIDIA H200",
        "folder": "runs/imagined",
        "family": "gpt",
        "parameters": 124_000_000,
        "flops_per_token": 8e8,
        "memory_estimate_bytes": 2**34,
        "steps": 1000,
        "batch_tokens": 1000,
        "micro_batch": 8,
        "accumulation": 1,
        "context": 125,
        "vocab": 65,
        "train_tokens": 10**6,
        "val_tokens": 10**5,
        "windows": 8000,
        "dataset": "0123",
        "tokenizer": "char",
        "start_step": 0,
        "resumed_from": None,
        "features": (Feature(name="workers", asked="1", used="1"),),
        "config": {"optim": {"clip": 1.0}, "data": {"streaming": False}, "output": {"log_every": 10}},
    }
    return RunInfo(**{**values, **changes})


def step(number: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": number,
        "epoch": None,
        "loss": 3.0,
        "learning_rate": 1e-3,
        "grad_norm": 0.5,
        "applied": True,
        "tokens": number * 1000,
        "seconds": 0.5,
        "tokens_per_second": 2000.0,
        "mfu": None,
        "memory_bytes": None,
        "loss_scale": None,
        "micro_batch": 8,
    }
    return StepRecord(**{**values, **changes})


def machine(number: int, **changes: Any) -> MachineRecord:
    values: dict[str, Any] = {
        "step": number,
        "elapsed": 1.0,
        "utilisation": 0.97,
        "memory_bytes": 2**34,
        "memory_total_bytes": 2**35,
        "power_watts": 650.0,
        "power_limit_watts": 700.0,
        "temperature": 66.0,
        "clock_mhz": 1755.0,
        "throttled": "",
    }
    return MachineRecord(**{**values, **changes})


def end(number: int, reason: str = "finished") -> EndRecord:
    return EndRecord(
        step=number, reason=reason, seconds=9.0, val_loss=2.0, best_loss=2.0, best_step=number, checkpoint=None
    )
