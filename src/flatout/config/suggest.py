"""Which known key a mistyped or foreign one was meant to be.

Settings found by a word: in their names, their sentences, what they allow, and what other trainers call them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.config.facts import choices, field_facts, names_in, section_paths
from flatout.config.former import refusal
from flatout.config.optimizers import OPTIMIZERS
from flatout.config.yaml_loader import format_value, shorten
from flatout.errors import ConfigError, page


def _by_foreign_name(table: dict[str, str]) -> dict[str, str]:
    return {foreign: ours for ours, names in table.items() for foreign in names.split()}


# Words other trainers use, so that a config written from habit gets a useful answer: ours, and what others call it.
FIELD_ELSEWHERE_CALLED = _by_foreign_name(
    {
        "chat.template": "chat_template conversation_template",
        "chat.train_on": "assistant_only_loss completion_only_loss mask_prompt train_on_inputs",
        "checkpoint.every": "always_save_checkpoint checkpoint_interval ckpt_interval save_every save_interval "
        "save_steps save_strategy",
        "checkpoint.keep": "keep_last keep_last_n max_checkpoints save_total_limit",
        "clean.drop": "dedup deduplicate exact_dedup fuzzy_dedup min_chars min_length minhash minhash_dedup near_dedup",
        "clean.languages": "lang langs language",
        "data.document_start": "document_separator separator",
        "data.field": "content_field content_key dataset_text_field json_keys text_column text_field text_key",
        "data.format": "dataset_format dataset_type file_format file_type",
        "data.invalid_utf8": "encoding_errors",
        "data.max_bytes": "max_chars",
        "data.max_documents": "max_docs max_examples max_samples num_examples num_samples",
        "data.packing": "pack_sequences sample_packing sequence_packing",
        "data.source": "data data_dir data_files data_path dataset dataset_name dataset_path "
        "datasets input_file mixture train_data train_file train_files",
        "data.streaming": "stream",
        "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_type",
        "data.validation": "eval_data eval_dataset test_size val_data val_file val_set_size val_split validation_data "
        "validation_file validation_split validation_split_percentage",
        "eval.every": "eval_freq eval_interval eval_steps eval_strategy evaluation_strategy val_check_interval "
        "val_interval",
        "eval.patience": "early_stop early_stopping early_stopping_patience",
        "eval.sample_every": "generate_every sample_interval",
        "eval.tokens": "eval_iters eval_samples max_eval_samples val_steps",
        "lora.alpha": "lora_alpha",
        "lora.dora": "use_dora",
        "lora.dropout": "lora_dropout",
        "lora.quantize": "load_in_4bit qlora quantization use_4bit",
        "lora.rank": "lora_r lora_rank",
        "lora.rank_stabilised": "rslora use_rslora",
        "lora.targets": "lora_target_modules target_modules",
        "model.bias": "attention_bias mlp_bias use_bias",
        "model.context": "block_size context_length max_length max_position_embeddings max_seq_len max_seq_length "
        "n_ctx n_positions seq_len seq_length sequence_len sequence_length",
        "model.dropout": "attention_dropout attn_pdrop dropout_rate embd_pdrop hidden_dropout resid_pdrop",
        "model.head_size": "head_dim",
        "model.heads": "n_head n_heads num_attention_heads num_heads",
        "model.init_from": "base_model base_model_name_or_path model_name model_name_or_path model_path "
        "pretrained_model_name_or_path",
        "model.kv_heads": "n_kv_head n_kv_heads num_key_value_heads num_kv_heads num_query_groups",
        "model.layers": "depth n_layer n_layers num_hidden_layers num_layers",
        "model.logit_cap": "final_logit_softcapping logit_softcap softcap",
        "model.mlp": "activation activation_function hidden_act",
        "model.mlp_width": "d_ff ffn_dim ffn_hidden_size intermediate_size n_inner",
        "model.norm_eps": "layer_norm_eps layer_norm_epsilon norm_epsilon rms_norm_eps",
        "model.pattern": "layer_pattern layer_types",
        "model.positions": "position_embedding_type positional_encoding",
        "model.rope_base": "rope_theta",
        "model.states": "eigenstates k_eigenstates num_eigenstates",
        "model.tied": "tie_embeddings tie_weights tie_word_embeddings weight_tying",
        "model.vocab": "vocab_size",
        "model.width": "d_model dim embed_dim hidden_dim hidden_size n_embd",
        "model.window": "sliding_window",
        "optim.betas": "adam_beta1 adam_beta2 adam_betas beta1 beta2",
        "optim.clip": "clip_grad clip_grad_norm grad_clip gradient_clip gradient_clip_val gradient_clipping "
        "max_grad_norm",
        "optim.ema": "average_weights ema_decay ema_weight use_ema weight_averaging",
        "optim.learning_rate": "base_lr lr max_lr peak_lr",
        "optim.embedding_rate": "embed_lr embedding_lr",
        "optim.head_rate": "lm_head_lr unembedding_lr",
        "optim.muon_rate": "matrix_lr muon_lr",
        "optim.min_ratio": "final_lr_frac min_lr min_lr_ratio",
        "optim.schedule": "decay_lr lr_decay_iters lr_decay_style lr_schedule lr_scheduler lr_scheduler_type scheduler",
        "optim.warmup": "lr_warmup_iters lr_warmup_steps warmup_epochs warmup_fraction warmup_iters warmup_ratio "
        "warmup_steps",
        "optim.weight_decay": "wd",
        "output.folder": "log_dir logging_dir out_dir output output_dir save_dir",
        "output.log_every": "log_freq log_interval logging_steps",
        "output.name": "experiment_name run_name wandb_name wandb_run_name",
        "output.trackers": "report_to use_wandb wandb wandb_log wandb_project",
        "parallel.form": "distributed_strategy fsdp sharding_strategy strategy zero_stage",
        "parallel.timeout": "ddp_timeout nccl_timeout",
        "speed.accumulation": "accum_steps accumulate_grad_batches grad_accum_steps gradient_accumulation_iters "
        "gradient_accumulation_steps",
        "speed.attention": "attention_backend attn_implementation flash flash_attention flash_attn sdpa "
        "use_flash_attention use_flash_attn",
        "speed.checkpointing": "activation_checkpoint activation_checkpointing enable_gradient_checkpointing "
        "gradient_checkpointing recompute",
        "speed.compile": "torch_compile torch_compile_backend torch_compile_mode use_compile",
        "speed.micro_batch": "device_batch_size micro_batch_size per_device_eval_batch_size "
        "per_device_train_batch_size",
        "speed.optimizer_offload": "cpu_offload offload_optimizer optimizer_cpu_offload",
        "speed.precision": "amp bf16 dtype fp16 mixed_precision tf32 torch_dtype use_amp",
        "speed.workers": "dataloader_num_workers num_workers",
        "train.batch_stages": "batch_size_schedule batch_size_warmup rampup_batch_size",
        "train.batch_tokens": "batch_size global_batch_size total_batch_size train_batch_size",
        "train.epochs": "max_epochs n_epochs num_epochs num_train_epochs",
        "train.label_smoothing": "label_smoothing_factor",
        "train.seed": "data_seed manual_seed random_seed",
        "train.steps": "iters max_iters max_steps n_steps num_iterations num_steps total_steps train_iters",
        "train.tokens": "max_train_tokens num_tokens total_tokens train_tokens",
    }
)
_OPTIMIZER = (
    f"optim.optimizer is {' or '.join(OPTIMIZERS)} (from Python, flatout.train takes others as optimizer=); AdamW's "
    "fields are optim.betas, optim.clip, ..."
)
# What others have a setting for and we do not: the way to it here.
WAY_ELSEWHERE_CALLED = _by_foreign_name(
    {
        _OPTIMIZER: "adafactor adam adamw adamw_8bit lion muon optim.name optim.type "
        "optim_type optimizer_type sgd shampoo soap sophia",
        "start it with `--gpus N`, one process for each GPU": "devices gpus local_rank n_gpu nproc_per_node num_gpus "
        "num_processes world_size",
        "resume with `--resume auto`, or `--resume RUN`": "resume resume_from resume_from_checkpoint",
        "use `flatout eval RUN`": "eval_only",
        "leave it out: eval.patience counts evaluations without a lower loss": "early_stopping_threshold",
        "leave it out: the checkpoint with the lowest validation loss is kept": "load_best_model_at_end save_best",
        "leave it out: `flatout train` trains, evaluates and saves": "do_eval do_train overwrite_output_dir",
        "use `flatout export RUN FOLDER --push ORG/NAME`, after the run": "hub_model_id push_to_hub",
        f"several GPUs share a model by parallel.form=fsdp; see {page('guides/many-gpus.md')}": "deepspeed",
    }
)
VALUE_ELSEWHERE_CALLED = _by_foreign_name(
    {"bf16": "bfloat16", "fp16": "float16 half", "fp32": "float32", "off": "false no", "on": "true yes"}
)


def unknown_key(path: str, where: str, *, top_level_extras: tuple[str, ...] = ()) -> ConfigError:
    """The error for a dotted path that is no field, with the nearest one."""
    if path in section_paths() and path not in FIELD_ELSEWHERE_CALLED:
        hint = f"give one of its fields: {', '.join(names_in(path))}"
        return ConfigError(f"{where}: {path} is a section, not a value", hint)
    if (former := refusal(path, where)) is not None:
        return former
    close = nearest_paths(path, top_level_extras)
    if (way := way_elsewhere(path)) is not None:
        hint = way
    elif close:
        hint = f"did you mean {' or '.join(close)}?{meaning(close[0])}"
    else:
        parent = path.rpartition(".")[0]
        hint = known_below(parent if parent in section_paths() else "", top_level_extras)
    return ConfigError(f"{where}: {shorten_path(path)} is not a known key", hint)


def field_hint(name: str) -> str | None:
    """What somebody may have meant who wrote the name of a setting otherwise than SECTION.FIELD=VALUE."""
    close = [path for path in nearest_paths(name) if path in field_facts()]
    return way_elsewhere(name) or (f"did you mean {close[0]}=VALUE?{meaning(close[0])}" if close else None)


def meaning(path: str) -> str:
    """The sentence of a field, to follow another one: other trainers may count its value in other units."""
    return f" {field_facts()[path].description}" if path in field_facts() else ""


def known_below(section: str, extras: tuple[str, ...]) -> str:
    if section:
        return f"the keys of {section} are {', '.join(names_in(section))}"
    return f"the keys at the top level are {', '.join([*section_paths(), *extras])}"


def nearest_paths(path: str, top_level_extras: tuple[str, ...] = ()) -> list[str]:
    """At most two known paths that `path` was probably meant to be, the likeliest first."""
    path = _plain(path).lstrip("_")
    known = [*field_facts(), *section_paths(), *top_level_extras]
    parent, _, name = path.rpartition(".")
    if name in FIELD_ELSEWHERE_CALLED:
        return [FIELD_ELSEWHERE_CALLED[name]]
    by_name: dict[str, list[str]] = {}
    for other in known:
        by_name.setdefault(other.rpartition(".")[2], []).append(other)
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == parent}
    found = [siblings[match] for match in close_matches(name, list(siblings), 0.6)]
    found += by_name.get(name, []) or close_matches(path, known, 0.75)
    found += [by_name[match][0] for match in close_matches(name, list(by_name), 0.7)]
    if not found:
        found = [FIELD_ELSEWHERE_CALLED[match] for match in close_matches(name, list(FIELD_ELSEWHERE_CALLED), 0.85)]
    return list(dict.fromkeys(found))[:2]


def run_hint(name: str, otherwise: str, runs: Path = Path("runs")) -> str:
    """What to do about a name that is no run's: a run with a similar name, or else what `otherwise` says."""
    try:
        there = [path.name for path in runs.iterdir() if path.is_dir()]
    except OSError:
        return otherwise
    word = Path(name.rstrip("/")).name[:100]
    near = close_matches(word, there, 0.6) or [known for known in sorted(there) if word and word in known][:1]
    if near:
        return f"did you mean {runs / near[0]}? `flatout runs` lists them"
    return f"{otherwise}; `flatout runs` lists yours" if there else otherwise


def _plain(path: str) -> str:
    """A key as tables have it; cut, because difflib takes quadratic time and no field's name is this long."""
    return path[:100].strip().lower().replace("-", "_")


def way_elsewhere(path: str) -> str | None:
    """What to do here instead of a setting that others have and we do not."""
    path = _plain(path)
    return WAY_ELSEWHERE_CALLED.get(path) or WAY_ELSEWHERE_CALLED.get(path.rpartition(".")[2])


def shorten_path(path: str) -> str:
    """A key as it is shown in a message: as written where it is a plain word, quoted and escaped otherwise."""
    return path if re.fullmatch(r"[\w.-]{1,80}", path) and path.isprintable() else shorten(path)


def close_matches(word: str, known: list[str], cutoff: float) -> list[str]:
    from difflib import get_close_matches  # here: only a mistake pays for the import

    return get_close_matches(word, known, n=1, cutoff=cutoff)


@dataclass(frozen=True)
class Found:
    """A setting; `elsewhere` are other trainers' names for it that hold one of the words."""

    path: str
    default: str
    description: str
    elsewhere: tuple[str, ...] = ()


def search_fields(words: Sequence[str]) -> list[Found]:
    """The settings that hold all of the words, those that have them in their own name first."""
    wanted = [word.lower().strip("-").replace("-", "_") for word in words]
    named: list[Found] = []
    others: list[Found] = []
    for path, field in field_facts().items():
        description = f"{field.description} {choices(path)}".rstrip()
        foreign = [name for name, ours in FIELD_ELSEWHERE_CALLED.items() if ours == path]
        text = " ".join([path, description.lower(), *foreign])
        if all(word in text or word.replace("_", " ") in text for word in wanted):
            said = tuple(name for name in foreign if any(word in name for word in wanted))
            found = Found(path, format_value(field.get_default(call_default_factory=True)), description, said)
            (named if all(word in path for word in wanted) else others).append(found)
    return named + others
