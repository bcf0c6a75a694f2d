"""Ways to go on where a step fails: out of memory, a compiler that fails.

Out of memory. A step's memory grows with its micro-batch, and its result does not depend on it. So where a step does
not fit, the micro-batch is halved, the same batch is taken again, and a notice says so. The config stays as it is: the
next run tries anew. A compiler that fails in a step or an evaluation is handled in the same way: both are done again
without it.

Contract: nothing that is learned changes. The update comes last, so weights and moments are those of before the failed
step; its gradients are dropped, and the random stream is put back. Where the failure came in the middle of an update,
or a single sequence does not fit, it is an error as before. Packed samples come in many shapes, and one that was not
recorded yet needs its memory beside that of the recordings: there CUDA graphs are given up first.
Trap: the failed step's tensors hang on its error through the frames of its traceback. No memory is free before the
`except` block is left, so each attempt is a function of its own that returns a sentence.
"""

import itertools

import torch

from flatout.data.batch import Batch
from flatout.device import first_sentence, free_memory, is_out_of_memory, memory_error
from flatout.engine.evaluate import evaluate
from flatout.engine.run import Run
from flatout.errors import HardwareError, ResourceError, UserError, many
from flatout.launch import OtherProcessError
from flatout.model.compiling import is_compile_error, is_compiled, use_uncompiled
from flatout.pulse import State


class CompileFailure(str):
    """The error of a compiler that failed in a step or an evaluation."""

    __slots__ = ()


def attempt_step(run: Run, batch: Batch) -> torch.Tensor | str:
    """Takes one step and returns its report; or, where memory ran out and less would do, a sentence about that.

    A compiler that failed gives a `CompileFailure`.

    Nothing has changed then: the update comes last, and the random stream is put back to before the step. The failed
    step's tensors hang on its error, so this function must have returned before memory is asked for again.
    """
    before = run.random.tensors()
    try:
        return run.take_step(batch)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            sentence = _compile_failure(run, error)
            run.random.assign(before)
            return sentence
        rows = min(run.step.micro_batch, _windows_in(batch))  # packed samples may have fewer than a micro-batch
        recording = _rows_vary(run) and run.step.graph is not None
        if needs_a_restart(run):
            raise for_all_ranks(run, batch, error) from error
        # Nothing left to halve or to give up, or the weights may have moved.
        if (rows == 1 and not recording) or run.step.updating:
            raise memory_error(error) from error
        sentence = first_sentence(error)
    run.random.assign(before)
    return sentence


def _compile_failure(run: Run, error: RuntimeError) -> CompileFailure:
    """The error as a sentence where it is the compiler's and one can go on without it; raised otherwise."""
    if not is_compiled(run.model) or not is_compile_error(error) or run.step.updating:
        raise error
    cause = getattr(error, "inner_exception", error)  # of the backend, where that failed
    sentence = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0][:120]}"
    if needs_a_restart(run):  # other ranks may have compiled it, and are in the middle of the pass
        raise HardwareError(f"torch.compile failed: {sentence}", "set speed.compile=off") from error
    return CompileFailure(sentence)


def use_no_compiler(run: Run, failure: CompileFailure) -> str:
    """Goes on in eager mode; returns a notice."""
    use_uncompiled(run.model)
    run.step.use_micro_batch(run.step.micro_batch)  # drops gradients, recordings, and the compiler's state
    free_memory(run.speed.device.torch_device)
    return (
        f"compile became off: torch.compile failed in this step, and training goes on without it ({failure}); batch "
        "and loss stay the same (next time: speed.compile=off)"
    )


def use_less_memory(run: Run, batch: Batch, sentence: str) -> str:
    """Halves the micro-batch, to a divisor of the batch; returns a notice.

    Packed samples have other numbers of rows in other steps, which no size divides: there it is halved as it is, once
    there are no recordings of CUDA graphs to let go of.
    """
    sequences = _windows_in(batch)
    before = min(run.step.micro_batch, sequences)
    graph = run.step.graph
    if before == 1 or (_rows_vary(run) and graph is not None and graph.recordings):
        run.step.use_micro_batch(run.step.micro_batch)  # drops gradients and recordings
        run.step.graph = None
        free_memory(run.speed.device.torch_device)
        return (
            f"cuda_graphs became off: {sentence}: continuing without CUDA graphs, which hold memory of their own; "
            "batch and loss stay the same (next time: speed.cuda_graphs=off)"
        )
    size = _smaller(run, batch)
    run.step.use_micro_batch(size)
    device = run.speed.device.torch_device
    free_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # the peak shown is that of what runs now
    count = -(-sequences // size)
    return (
        f"{sentence}: continuing with micro-batches of {size} instead of {before}, {count} per step; batch "
        f"and loss stay the same (next time: speed.micro_batch={size}, or `flatout tune`)"
    )


def _smaller(run: Run, batch: Batch) -> int:
    """Half the micro-batch, or the next divisor of the batch below; 0 where it is a single sequence."""
    sequences = _windows_in(batch)
    before = min(run.step.micro_batch, sequences)
    return next((size for size in range(before // 2, 0, -1) if _rows_vary(run) or sequences % size == 0), 0)


def needs_a_restart(run: Run) -> bool:
    """Whether a failed pass cannot be taken again: by several ranks, or where torch's FSDP holds half of its work."""
    return run.world.size > 1 or run.speed.sharded


def for_all_ranks(run: Run, batch: Batch | None, error: RuntimeError) -> UserError:
    """Other ranks are in the middle of this step, so this one leaves: its agent starts all of them with less.

    Without an agent, or with nothing left to halve, it is an error as it is in one process.
    """
    size = run.step.micro_batch // 2 if batch is None else _smaller(run, batch)
    if not size or run.world.pulse.folder is None:
        return memory_error(error)
    run.world.pulse.note_micro_batch(size)
    run.world.pulse.set_state(State.OUT_OF_MEMORY)
    return OtherProcessError(ResourceError.exit_code)


def use_at_most(run: Run, size: int) -> list[str]:
    """Limits the micro-batch to that of an earlier attempt of the launcher; returns a notice if that is less."""
    before = run.step.micro_batch
    if before <= size:
        return []
    run.step.use_micro_batch(size)
    return [
        f"an earlier attempt ran out of memory: continuing with micro-batches of {size} instead of {before} on all "
        f"ranks; batch and loss stay the same (next time: speed.micro_batch={size}, or `flatout tune`)"
    ]


def _windows_in(batch: Batch) -> int:
    """The number of sequences: rows, or windows that a stage with shorter sequences cuts into rows."""
    return batch.tokens.shape[0] // batch.pieces


def _rows_vary(run: Run) -> bool:
    """Whether steps have different numbers of rows, in many shapes: those of samples."""
    return run.data.facts.batch_samples is not None


def fitting_evaluation(
    run: Run, batch_size: int, batches: int | None = None
) -> tuple[tuple[float, int], int, list[str]]:
    """`evaluate` on the validation set, or on its first `batches`, each halved until it fits; uncompiled, if need be.

    Returns the result, the batch size that fitted, and notices.
    """
    notices: list[str] = []
    while isinstance(result := _attempt_evaluation(run, batch_size, batches), str):
        if isinstance(result, CompileFailure):
            notices.append(use_no_compiler(run, result))
            continue
        free_memory(run.speed.device.torch_device)
        notices.append(f"{result}: evaluating {many(batch_size // 2, 'sequence')} at once instead of {batch_size}")
        batch_size //= 2
    return result, batch_size, notices


def _attempt_evaluation(run: Run, batch_size: int, batches: int | None) -> tuple[float, int] | str:
    try:
        with run.averaged():
            return evaluate(run.model, itertools.islice(run.evaluation(batch_size), batches), run.scope, run.world)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            return _compile_failure(run, error)
        if needs_a_restart(run):
            raise for_all_ranks(run, None, error) from error
        if batch_size == 1:
            raise memory_error(error) from error
        return first_sentence(error)
