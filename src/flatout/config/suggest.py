"""Which known key a mistyped or foreign one was meant to be."""

import re

from flatout.config.facts import field_facts, names_in, section_paths
from flatout.config.yaml_loader import shorten
from flatout.errors import ConfigError


def _by_foreign_name(table: dict[str, str]) -> dict[str, str]:
    return {foreign: ours for ours, names in table.items() for foreign in names.split()}


# Words other trainers use, so that a config written from habit gets a useful answer: ours, and what others call it.
FIELD_ELSEWHERE_CALLED = _by_foreign_name(
    {
        "checkpoint.every": "save_interval",
        "clean.blocked_urls": "block_list blocklist url_blocklist",
        "clean.exact_duplicates": "dedup deduplicate exact_dedup",
        "clean.languages": "lang langs language",
        "clean.min_characters": "min_chars min_length",
        "clean.near_duplicates": "fuzzy_dedup minhash minhash_dedup minhash_threshold near_dedup",
        "data.document_start": "document_separator separator",
        "data.field": "content_field content_key json_keys text_column text_field text_key",
        "data.format": "dataset_format dataset_type file_format file_type",
        "data.invalid_utf8": "encoding_errors",
        "data.max_bytes": "max_chars",
        "data.max_documents": "max_docs max_examples max_samples num_examples num_samples",
        "data.packing": "pack_sequences sample_packing sequence_packing",
        "data.shard_tokens": "shard_size tokens_per_shard",
        "data.source": "data_dir data_files data_path dataset dataset_name dataset_path "
        "datasets input_file mixture train_data train_file train_files",
        "data.streaming": "stream",
        "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_type",
        "data.val_fraction": "test_size val_split validation_split validation_split_percentage",
        "data.val_source": "eval_data eval_dataset val_data val_file validation_data validation_file",
        "eval.every": "eval_interval",
        "model.context": "block_size max_length seq_len sequence_length",
        "model.head_size": "head_dim",
        "model.heads": "n_head n_heads",
        "model.layers": "n_layer n_layers",
        "model.mlp_width": "d_ff",
        "model.norm_eps": "rms_norm_eps",
        "model.pattern": "layer_pattern layer_types",
        "model.rope_base": "rope_theta",
        "model.states": "eigenstates k_eigenstates num_eigenstates",
        "model.vocab": "vocab_size",
        "model.width": "d_model hidden_size n_embd",
        "model.window": "sliding_window",
        "optim.clip": "grad_clip gradient_clip max_grad_norm",
        "optim.learning_rate": "lr",
        "optim.min_ratio": "min_lr_ratio",
        "optim.warmup": "warmup_epochs warmup_fraction warmup_ratio",
        "optim.warmup_steps": "warmup_iters",
        "output.folder": "output_dir",
        "output.log_every": "log_interval",
        "speed.accumulation": "accum_steps grad_accum_steps gradient_accumulation_steps",
        "speed.attention": "attn_implementation flash flash_attention flash_attn",
        "speed.checkpointing": "gradient_checkpointing",
        "speed.compile": "torch_compile use_compile",
        "speed.micro_batch": "micro_batch_size",
        "speed.precision": "amp bf16 dtype fp16 tf32 use_amp",
        "speed.workers": "num_workers",
        "train.batch_tokens": "batch_size",
        "train.epochs": "num_epochs",
        "train.steps": "max_iters max_steps",
    }
)
VALUE_ELSEWHERE_CALLED = _by_foreign_name(
    {"bf16": "bfloat16", "fp16": "float16 half", "fp32": "float32", "off": "false no", "on": "true yes"}
)
ITEM_ELSEWHERE_CALLED = _by_foreign_name(
    {"format": "type", "path": "file name source", "weight": "probability proportion ratio upsample"}
)


def unknown_key(path: str, where: str, *, top_level_extras: tuple[str, ...] = ()) -> ConfigError:
    """The error for a dotted path that is no field, with the nearest known one."""
    if path in section_paths():
        hint = f"give one of its fields: {', '.join(names_in(path))}"
        return ConfigError(f"{where}: {path} is a section, not a value", hint)
    close = nearest_paths(path, top_level_extras)
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        parent = path.rpartition(".")[0]
        hint = known_below(parent if parent in section_paths() else "", top_level_extras)
    return ConfigError(f"{where}: {shorten_path(path)} is not a known key", hint)


def known_below(section: str, extras: tuple[str, ...]) -> str:
    if section:
        return f"the keys of {section} are {', '.join(names_in(section))}"
    return f"the keys at the top level are {', '.join([*section_paths(), *extras])}"


def nearest_paths(path: str, top_level_extras: tuple[str, ...] = ()) -> list[str]:
    """At most two known paths that `path` was probably meant to be, the likeliest first."""
    # difflib takes quadratic time, and no field's name is this long.
    path = path[:100].strip().lower().replace("-", "_").lstrip("_")
    parent, _, name = path.rpartition(".")
    if name in FIELD_ELSEWHERE_CALLED:
        return [FIELD_ELSEWHERE_CALLED[name]]
    known = [*field_facts(), *section_paths(), *top_level_extras]
    same_name = [other for other in known if other.rpartition(".")[2] == name]
    if same_name:
        return same_name[:2]
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == parent}
    found = [siblings[match] for match in close_matches(name, list(siblings), 0.6)]
    found += close_matches(path, known, 0.75)
    if not found:
        names = {other.rpartition(".")[2]: other for other in known}
        found = [names[match] for match in close_matches(name, list(names), 0.7)]
    return list(dict.fromkeys(found))[:2]


def nearest_fields(name: str) -> list[str]:
    """The same for a word without a section: fields only, whichever section's name it resembles too."""
    found = [path for path in nearest_paths(name) if path in field_facts()]
    if found:
        return found
    names = {path.rpartition(".")[2]: path for path in reversed(field_facts())}
    return [names[match] for match in close_matches(name[:100].lower(), list(names), 0.7)]


def is_called_elsewhere(name: str) -> bool:
    """Whether a word is another trainer's for a field of ours, whose values may be in other units."""
    return name.lower() in FIELD_ELSEWHERE_CALLED


def shorten_path(path: str) -> str:
    """A key as it is shown in a message: as written where it is a plain word, quoted and escaped otherwise."""
    return path if re.fullmatch(r"[\w.-]{1,80}", path) and path.isprintable() else shorten(path)


def close_matches(word: str, known: list[str], cutoff: float) -> list[str]:
    from difflib import get_close_matches  # here: only a mistake pays for the import

    return get_close_matches(word, known, n=1, cutoff=cutoff)
