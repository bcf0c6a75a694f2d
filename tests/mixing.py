"""A mixer on its own, outside of any block."""

import torch
from torch import Tensor

from flatout.config.schema import ModelConfig
from flatout.model.cache import Decoding, EigenstateCache
from flatout.model.eigenstate import Eigenstate
from flatout.model.execution import Execution
from flatout.model.operations import Operations, Own, Shared
from flatout.ops.documents import DocumentLayout


def mixer_config(*, width: int, states: int, context: int, **more) -> ModelConfig:
    """A model whose blocks are such mixers."""
    return ModelConfig(pattern="E", heads=1, width=width, states=states, context=context, **more)


def mixed(
    mixer: Eigenstate,
    x_BTW: Tensor,
    cache: EigenstateCache | None = None,
    position: int = 0,
    layout: DocumentLayout | None = None,
    how: Execution | None = None,
) -> Tensor:
    """What it adds to the residual stream; `how.kernels` says in which form."""
    how = how or Execution()
    operations, decoding = Operations(how), None
    if cache is not None:
        steps_T = torch.arange(position, position + x_BTW.shape[1], device=x_BTW.device)
        decoding = Decoding(steps_T.expand(x_BTW.shape[:2]), fresh=position == 0, filled=None, reach=None)
    elif how.kernels == "triton":
        from flatout.model.kernel_operations import KernelOperations

        operations = KernelOperations(how)
    shared = Shared(operations, layout=layout, decoding=decoding)
    branch = mixer(x_BTW, shared, Own(cache=cache))
    return branch.value_BTW if branch.bias_W is None else branch.value_BTW + branch.bias_W
