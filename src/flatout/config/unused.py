"""Settings that a user wrote and that this kind of run never reads: refused with file and line, not ignored.

What ships with Flatout may say more than a run needs; what a user wrote is meant. A value that equals the default asks
for nothing, so the config.yaml of a run, which holds every field, can be used again.
"""

from collections.abc import Iterator

from flatout.config.facts import field_facts, names_in, value_at
from flatout.config.load import LoadedConfig
from flatout.config.optimizers import OPTIMIZERS
from flatout.config.schema import ModelConfig, RunConfig
from flatout.config.source import DEFAULT
from flatout.config.yaml_loader import format_value
from flatout.errors import ConfigError

# Fine-tuning has fields of its own in the place of these.
_FINE_TUNING_HAS = {
    "data.field": "chat.fields",
    "data.format": "chat.fields",
    "data.packing": "chat.packing",
    "data.source": "chat.source",
    "data.validation": "chat.validation",
    "model.dropout": "lora.dropout",
    "train.batch_stages": "chat.batch_samples",
    "train.batch_tokens": "chat.batch_samples",
    "train.minutes": "train.epochs",
    "train.tokens": "train.epochs",
}
# It does not read these, nor the sections `data` (besides its folder) and `clean`.
_NOT_IN_FINE_TUNING = ("eval.sample_prompt", "train.length_stages", "train.window_stages")
_OF_SCALINGS = {
    "rope_factor": ("linear", "llama3"),
    **dict.fromkeys(("rope_low", "rope_high", "rope_original_context"), ("llama3",)),
    **dict.fromkeys(("rope_factors", "rope_gain"), ("longrope",)),
}
# What only blocks of one letter read.
_OF_BLOCKS = {
    **dict.fromkeys(("model.window", "model.rope_local_base"), "W"),
    "train.window_stages": "W",
    **dict.fromkeys(("model.states", "speed.scan"), "E"),
    **{
        f"model.{name}": letters
        for letters, names in {
            "ANW": ("kv_heads", "head_size", "qkv_bias", "qk_norm", "qk_norm_whole", "score_divisor",
                    "attention_cap", "head_gate"),
            "AW": ("rope_base", "rope_share", "rope_scaling", *_OF_SCALINGS),
        }.items()
        for name in names
    },
    "speed.attention": "ANW",
}  # fmt: skip


def check_used(loaded: LoadedConfig) -> None:
    """Refuses the first setting, in the schema's order, that a user wrote for another kind of run."""
    for path, why, hint in _unused(loaded.config):
        source = loaded.sources.get(path, DEFAULT)
        if source.by_user and source.where and not _is_default(loaded.config, path):  # a program may say more
            raise ConfigError(f"{path} is set, but {why}", hint, where=source.where, setting=path)


def unused_paths(config: RunConfig) -> set[str]:
    """The settings that a run of this config does not read, so that a command that names them is refused."""
    return {path for path, _, _ in _unused(config)}


def _unused(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """(path, why it is not read, what to do) of every field that this config's run does not look at."""
    if not config.fine_tunes:
        for path in _fields("chat", but="source"):
            yield path, "there is no chat.source", f"set chat.source, or leave {path} out"
        for name in ("max_documents", "max_tokens", "max_bytes") if config.data.source is None else ():
            why = "data.source is null, and shards that are prepared are taken whole"
            yield f"data.{name}", why, f"set data.source, or leave data.{name} out"
    else:
        for path in field_facts():
            of_text = path.partition(".")[0] in ("data", "clean") and path != "data.folder"
            if path in _FINE_TUNING_HAS:
                yield path, "fine-tuning on chat.source does not use it", f"set {_FINE_TUNING_HAS[path]} instead"
            elif of_text or path in _NOT_IN_FINE_TUNING:
                yield path, "fine-tuning on chat.source does not use it", f"leave {path} out"
    if config.model.init_from is None:
        # Of a model from elsewhere its own shape is what counts, and it is read later.
        for path, letters in _OF_BLOCKS.items():
            if not set(letters) & set(config.model.kinds):
                kinds = " or ".join(letters)
                why = f"no block of model.pattern={config.model.pattern} is {kinds}"
                if set(letters) & set(config.model.pattern):
                    why += f" where model.layers={config.model.layers}"
                pattern = {"W": "WWWA"}.get(letters, "EEEA")
                yield path, why, f"set a pattern with {kinds}, such as model.pattern={pattern}, or leave {path} out"
        yield from _unused_rotary(config.model)
    chosen = config.optim.optimizer
    for other, kind in OPTIMIZERS.items():
        for path in (f"optim.{name}" for name in kind.reads if name not in OPTIMIZERS[chosen].reads):
            yield path, f"optim.optimizer is {chosen}", f"set optim.optimizer={other}, or leave {path} out"
    if config.model.tied and config.model.init_from is None:
        why = "the head has the embedding's weights (model.tied)"
        for what in ("rate", "decay"):
            hint = f"set model.tied=false, or optim.embedding_{what}, or leave optim.head_{what} out"
            yield f"optim.head_{what}", why, hint
    for name in () if config.eval.tasks else ("tasks_every", "tasks_rows"):
        yield f"eval.{name}", "eval.tasks names no task", f"set eval.tasks=[FILE.jsonl], or leave eval.{name} out"
    if not config.lora.rank:
        for path in _fields("lora", but="rank"):
            yield path, "lora.rank is 0, which trains all weights", f"set lora.rank=16, or leave {path} out"


def _unused_rotary(model: ModelConfig) -> Iterator[tuple[str, str, str]]:
    """What these positions do not read of the settings of rotary ones."""
    for name in ("rope_base", "rope_local_base", "rope_share") if model.positions != "rope" else ():
        hint = f"set model.positions=rope, or leave model.{name} out"
        yield f"model.{name}", f"model.positions is {model.positions}", hint
    scaling = "null" if model.rope_scaling is None else model.rope_scaling
    for name, scalings in _OF_SCALINGS.items():
        if scaling not in scalings:
            hint = f"set model.rope_scaling={scalings[0]}, or leave model.{name} out"
            yield f"model.{name}", f"model.rope_scaling is {scaling}", hint


def _fields(section: str, but: str = "") -> list[str]:
    return [f"{section}.{name}" for name in names_in(section) if name != but]


_CALLED = {"A": "full attention (A)", "N": "no positions (N)", "W": "windows (W)", "E": "eigenstates (E)"}


def cut_pattern(model: ModelConfig) -> str | None:
    """What to say where a pattern is longer than the model, so that a kind of block that it names never comes."""
    never = [called for kind, called in _CALLED.items() if kind in set(model.pattern) - set(model.kinds)]
    if not never:
        return None
    blocks = f"the {model.layers} blocks are {model.kinds}" if model.layers > 1 else f"the only block is {model.kinds}"
    return (
        f"model.pattern is {model.pattern} and model.layers {model.layers}: {blocks}, and there is no block of "
        f"{' or '.join(never)}"
    )


def _is_default(config: RunConfig, path: str) -> bool:
    return format_value(value_at(config, path)) == format_value(field_facts()[path].default)
