"""torch.compile and its modes, and statistics of the compiler: graphs, breaks, recompilations, cache hits.

    default           the whole model as one graph
    reduce-overhead   the same, replayed as CUDA graphs by torch
    max-autotune      the same, with every product's kernel chosen by timing; CUDA graphs by torch unless ours are on
    regional          a block is compiled once and used for all blocks, head and loss are a second graph: starts sooner

Compilation is lazy: it happens in the first step, again in the first evaluation, and again whenever a shape changes,
except for code compiled for all shapes (packed samples). `CompileWatch` counts all of it. Inductor's disk cache is on
by default, so a second run of the same model reads its code there.
Trap: the next replay of torch's CUDA graphs overwrites their outputs. So gradients must exist before the first backward
pass and be accumulated in place (`TrainStep.keep_gradients`).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from flatout.model.gpt import GPT
from flatout.model.protocol import LanguageModel


def graphs_of_its_own(mode: str, *, our_graphs: bool) -> bool:
    """Whether code compiled in this mode uses CUDA graphs of torch."""
    return mode == "reduce-overhead" or (mode == "max-autotune" and not our_graphs)


def compile_model(
    model: torch.nn.Module, mode: str, *, our_graphs: bool = False, any_shape: bool = False, stages: int = 1
) -> None:
    """Compiles in place: parameter names and checkpoints stay the same. `any_shape`: one code for all shapes.

    Each of several `stages` is compiled separately.
    """
    if mode == "off":
        return
    if stages > 1:  # beyond this limit, which all blocks share, torch silently runs uncompiled
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, 8 * stages)
    if mode == "regional":
        assert isinstance(model, GPT), "custom models have no blocks; `model=` refuses this mode"
        for part in (*model.blocks, model.head):
            part.compile(fullgraph=True, dynamic=any_shape)
        return
    if mode == "max-autotune" and our_graphs:
        mode = "max-autotune-no-cudagraphs"
    model.compile(dynamic=any_shape, **({} if mode == "default" else {"mode": mode}))


def use_uncompiled(model: LanguageModel) -> None:
    """Undoes `compile_model`."""
    for part in model.modules():
        part._compiled_call_impl = None  # set by nn.Module.compile; torch has no function to undo it


def is_compiled(model: LanguageModel) -> bool:
    """Whether `compile_model` has been applied and not undone."""
    return any(part._compiled_call_impl is not None for part in model.modules())


def is_compile_error(error: BaseException) -> bool:
    """Whether an error comes from torch's compiler. Its classes have no common parent, so their module decides."""
    homes = [cls.__module__ for cls in type(error).__mro__]
    return any(home.startswith(("torch._dynamo", "torch._inductor")) for home in homes)


def compile_failure(device: torch.device) -> str | None:
    """Why torch.compile does not work here, or None. Compilation is lazy, so it compiles and calls a function."""
    try:
        doubled = torch.compile(lambda x: (x * 2).sum())(torch.ones(4, device=device))
        return None if float(doubled) == 8.0 else "torch.compile gave a wrong result"
    except Exception as error:  # noqa: BLE001 - after any failure of the compiler run without it, and report the reason
        first_line = str(error).strip().partition("\n")[0][:120]
        return f"torch.compile failed: {type(error).__name__}: {first_line}"


class CompileCounts(NamedTuple):
    """Counts of the compiler's work in this process."""

    graphs: int = 0
    breaks: int = 0
    cached: int = 0  # pieces of code read from the cache on disk
    built: int = 0  # pieces of code not found in it
    reasons: tuple[str, ...] = ()  # of graph breaks

    def since(self, before: "CompileCounts") -> "CompileCounts":
        graphs, breaks = self.graphs - before.graphs, self.breaks - before.breaks
        cached, built = self.cached - before.cached, self.built - before.built
        return CompileCounts(graphs, breaks, cached, built, self.reasons[len(before.reasons) :])


def compile_counts() -> CompileCounts:
    from torch._dynamo.utils import counters  # imports the compiler: only where something is compiled

    breaks, inductor = counters["graph_break"], counters["inductor"]
    return CompileCounts(
        graphs=counters["stats"]["unique_graphs"],
        breaks=sum(breaks.values()),
        cached=inductor["fxgraph_cache_hit"],
        built=inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"],
        reasons=tuple(reason.partition("\n")[0].strip() for reason in breaks),
    )


class CompileWatch:
    """Notices of what was compiled since the last call. Create it before anything of the run is compiled."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.reported = compile_counts()
        self.first = True

    def notices(self) -> list[str]:
        now = compile_counts()
        fresh = now.since(self.reported)
        if fresh.graphs == 0 and fresh.breaks == 0:
            return []
        first, self.first, self.reported = self.first, False, now
        return ["; ".join(self._words(fresh, first))]

    def _words(self, fresh: CompileCounts, first: bool) -> Iterator[str]:
        graphs = "1 graph" if fresh.graphs == 1 else f"{fresh.graphs} graphs"
        yield f"compile {self.mode}: {graphs}" + ("" if first else " more")
        breaks = "1 graph break" if fresh.breaks == 1 else f"{fresh.breaks} graph breaks"
        yield "no graph breaks" if fresh.breaks == 0 else f"{breaks} ({_shortened(fresh.reasons)})"
        pieces = fresh.cached + fresh.built
        if pieces:
            yield f"{fresh.cached} of {pieces} pieces of code from the cache"


def _shortened(reasons: tuple[str, ...]) -> str:
    return ", ".join(reason[:80] for reason in reasons[:2]) + (", …" if len(reasons) > 2 else "")
