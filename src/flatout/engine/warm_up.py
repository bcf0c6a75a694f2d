"""A run in stages meets every shape of its micro-batches before the first step, so that no later step pays for it.

What goes by shape is compiled (torch.compile, Triton), tuned (products of `ops/kernels/cublaslt.py`) or recorded
(`engine/graphs.py`) when it is first met, which takes seconds. So each stage's micro-batch, with its length and its
attention window, goes through forward and backward as often as a recording takes.

Contract: nothing that is learned changes. There is no update; gradients are let go, the random stream and the scales of
8-bit tensors are put back, and the tokens are made up, so no loader is asked. A run without stages is not
warmed up, unless its length is told in minutes: its clock begins with the first step.
What fails for lack of memory, or in the compiler, is left to the step itself, which knows what to do about it.
8-bit scales that are not known yet are measured here for the length of the warm-up, so that 8-bit products are tuned
and recorded too; the first step measures them itself, and recordings wait for the second.
"""

import time

import numpy as np
import torch

from flatout.data.batch import Batch
from flatout.data.positions import Reading
from flatout.device import free_memory, is_out_of_memory
from flatout.engine.graphs import WARM_UPS
from flatout.engine.recovery import for_all_ranks, needs_a_restart
from flatout.engine.run import Run
from flatout.model.compiling import is_compile_error
from flatout.ops.documents import PackedRows


def shapes_of(run: Run, first_step: int) -> list[Reading]:
    """One step of each form of micro-batch that is still to come; nothing where no other stage follows.

    A run whose length is told in minutes is warmed up in any case.
    """
    later = [stage.first_step for stage in run.schedule.stages if first_step < stage.first_step < run.steps]
    met = bool(later) or run.deadline is not None  # a run that ends on time pays for no first step either
    readings = [run.schedule.at(step) for step in (first_step, *later)] if met else []
    return list({(reading.pieces, reading.attention_window): reading for reading in readings}.values())


def warm_up(run: Run, first_step: int) -> str | None:
    """Warms a run up before `first_step`, where that is worth it; returns a notice."""
    made_for_shapes = run.step.graph is not None or run.speed.compile != "off"
    shapes = shapes_of(run, first_step)
    if not shapes or run.given.model is not None or not (made_for_shapes or run.speed.device.kind == "cuda"):
        return None
    began, scales = time.perf_counter(), run.model.narrow.scales
    measuring = scales is not None and not scales.rounding
    random = run.random.tensors()
    known = {name: tensor.clone() for name, tensor in run.model.narrow.tensors().items()}
    failure = _attempt(run, shapes)
    if measuring and failure is None:
        run.model.narrow.settle()
        failure = _attempt(run, shapes)
    run.random.assign(random)
    run.model.narrow.assign(known)
    if failure is not None:  # it may have left anything half done
        run.step.use_micro_batch(run.step.micro_batch)
        free_memory(run.speed.device.torch_device)
        return f"the warm-up of stages ended early: {failure}"
    forms = "1 form" if len(shapes) == 1 else f"{len(shapes)} forms"
    name = "stages" if len(run.schedule.stages) > 1 else "minutes"
    return f"{name}: {forms} of micro-batches warmed up in {time.perf_counter() - began:.1f} s"


def _attempt(run: Run, shapes: list[Reading]) -> str | None:
    """Takes the passes; what went wrong, where a step can go on from it."""
    try:
        with run.random.active():
            for reading in shapes:
                batch = _made_up(run, reading)
                run.step.rehearse(batch.tokens, batch.targets, batch.packed, batch.pieces, batch.attention_window)
    except RuntimeError as error:
        lacking = is_out_of_memory(error)
        if not lacking and not is_compile_error(error):
            raise
        if needs_a_restart(run):
            raise (for_all_ranks(run, None, error) if lacking else error) from error
        return str(error).strip().partition("\n")[0][:160]
    return None


def _made_up(run: Run, reading: Reading) -> Batch:
    """Micro-batches of any tokens: one more than a recording waits for."""
    rows, device = run.step.micro_batch * reading.pieces * (WARM_UPS + 1), run.speed.device.torch_device
    ids = torch.arange(rows * reading.length + 1) % run.data.tokenizer.vocab
    tokens_BT, targets_BT = ids[:-1].view(rows, -1), ids[1:].view(rows, -1)
    how = {"pieces": reading.pieces, "attention_window": reading.attention_window}
    if not run.data.apart:
        return Batch(tokens_BT, targets_BT, 0, **how).on(device)
    documents = np.zeros(tokens_BT.shape, dtype=np.int32)
    documents[:, reading.length // 2 :] = 1
    packed = PackedRows(tokens_BT.numpy(), documents, targets_BT.numpy())
    return Batch.of_rows(packed, 0, device, **how).on(device)
