"""What a program gives `train` in the place of parts that a config describes: a model, an optimizer.

What cannot be had together with them is refused by name. A checkpoint says that they were given, since its files alone
do not make such a run again.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from flatout.config.schema import RunConfig
from flatout.engine.case import Speed
from flatout.engine.randomness import ONE_AT_A_TIME
from flatout.errors import CheckpointError, ConfigError
from flatout.model.count import parameter_count
from flatout.model.given import GivenModel, ModelGiven, adopt, check_model_given, persistent_buffers, structure_of
from flatout.model.gpt import GPT
from flatout.optim.given import OptimizerGiven, check_optimizer_given, is_function
from flatout.world import World

BUFFER = "buffer."  # before the names of buffers in a checkpoint


@dataclasses.dataclass(frozen=True)
class Given:
    """`model` is a module, or a function that changes the built one; `optimizer` is rules, or builds one of torch's."""

    model: ModelGiven | None = None
    optimizer: OptimizerGiven | None = None

    @property
    def own_optimizer(self) -> bool:
        """Whether none of ours is left: rules stand beside the config's, a torch optimizer in their place."""
        return is_function(self.optimizer)

    @property
    def names(self) -> list[str]:
        return [f"{name}=" for name in ("model", "optimizer") if getattr(self, name) is not None]

    def check(self, config: RunConfig) -> None:
        """Refuses what is neither a model nor an optimizer, and what a model from Python cannot be part of."""
        if self.optimizer is not None:
            check_optimizer_given(self.optimizer)
        if self.model is None:
            return
        check_model_given(self.model)
        what = "model= was given"
        if config.chat.source is not None:
            raise ConfigError(f"{what}, and chat.source fine-tunes a model from elsewhere", "leave one of them out")
        if config.documents_apart:
            raise ConfigError(
                f"{what}, and data.documents=apart needs attention that knows where documents end",
                "set data.documents=joined",
            )

    def not_in_slices(self) -> str | None:
        if self.model is not None:
            return "a model from Python (model=) is not sharded"
        return "an optimizer from Python (optimizer=) is not sharded" if self.own_optimizer else None

    def adopted(self, built: GPT, speed: Speed, seed: int) -> GPT:
        """The model to train, on the host."""
        if self.model is None:
            return built
        with ONE_AT_A_TIME:  # it draws from the generators of the process
            model = adopt(built, self.model, seed=seed)
        if isinstance(model, GivenModel):
            _check_whole(speed)
        return model

    def notices(self, model: GPT) -> Iterator[str]:
        if self.model is not None:
            kind = "a module of your own" if isinstance(model, GivenModel) else "our decoder, changed"
            yield (
                f"model= is {kind}: our kernels and recorded graphs do not know it, so it runs by torch's operations, "
                "samples are written without a cache, FLOPs are counted by parameters, and the memory estimate is that "
                "of the config's model"
            )
        if self.own_optimizer:
            yield (
                "optimizer= is torch's: the schedule of optim scales its own rates, learning_rate, betas, eps and "
                "weight_decay of optim are not used, and each update waits for the device"
            )

    def flops(self, model: GPT, described: float) -> float:
        """FLOPs per token, by six for each parameter where the model is not the one that the config describes."""
        if self.model is None:
            return described
        count = count_of(model)
        more = count - parameter_count(model.config, model.vocab)
        return 6.0 * count if isinstance(model, GivenModel) else described + 6.0 * more

    def saved(self, model: GPT, rules: str | None) -> dict[str, str]:
        """What a checkpoint's state says of it."""
        structure = {} if self.model is None else {"given_model": structure_of(model)}
        return structure | ({} if self.optimizer is None or rules is None else {"given_optimizer": rules})

    def buffers(self, model: GPT) -> dict[str, Tensor]:
        """What a model from Python remembers besides its weights, for a checkpoint."""
        if self.model is None:
            return {}
        # Copies: a forward pass may change them while a checkpoint is still being written.
        return {f"{BUFFER}{name}": tensor.clone() for name, tensor in persistent_buffers(model).items()}

    def share_buffers(self, model: GPT, world: World) -> None:
        """Gives all ranks what the first one's model remembers: each has seen its own share, and one is saved."""
        if self.model is not None and world.size > 1:
            for tensor in persistent_buffers(model).values():
                world.follow_first(tensor)

    def restore_buffers(self, model: GPT, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in ({} if self.model is None else persistent_buffers(model)).items():
            tensor.copy_(tensors[f"{BUFFER}{name}"])


def count_of(model: GPT) -> int:
    """Parameters that a model really has."""
    return sum(parameter.numel() for parameter in model.parameters())


def _check_whole(speed: Speed) -> None:
    """Refuses switches that are about the blocks and the head of our own models."""
    for name, plain in (("checkpointing", "none"), ("loss", "plain"), ("activation_offload", False)):
        if getattr(speed, name) != plain:
            raise ConfigError(
                f"model= is a module of your own, and speed.{name} is about the parts of our models",
                f"set speed.{name}={str(plain).lower()}",
            )
    if speed.compile == "regional":
        raise ConfigError("model= is a module of your own, and has no blocks to compile", "set speed.compile=default")


def check_given(given: Mapping[str, str], stored: Mapping[str, Any]) -> None:
    """Refuses to resume a run with another model or optimizer from Python than it was trained with.

    `given` is what the run now would say of them, `stored` the state of the checkpoint.
    """
    for key, word in (("given_model", "model="), ("given_optimizer", "optimizer=")):
        before, now = stored.get(key), given.get(key)
        if before == now:
            continue
        if now is None:
            told = f"the run was trained with {word} from Python{'' if word == 'model=' else f' ({before})'}"
            raise CheckpointError(f"{told}, and none was given", f"resume it with flatout.train and the same {word}")
        if before is None:
            raise CheckpointError(f"{word} was given, and the run was trained without", f"leave {word} out")
        if key == "given_optimizer":
            told = f"the run was trained with the optimizer {before}, and {now} was given"
        else:
            told = "the model given as model= is made of other parts than the run's"
        raise CheckpointError(told, f"give the same {word} as before, or start a new run")


def check_files_alone(state: Mapping[str, Any], origin: str) -> None:
    """Refuses a checkpoint whose model its files cannot make."""
    if state.get("given_model") is not None:
        raise CheckpointError(
            f"{origin} was trained with a model from Python (model=), which its files alone do not make",
            "use it in Python: flatout.load_model(RUN, model=...) with the same model=",
        )
