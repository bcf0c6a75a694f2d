"""The peers of finetune.py that need a process to themselves: TRL, Liger and Unsloth. It calls this file; so may you.

    python lab/finetune_peers.py CASE ROW.json [--small]

`trl` is TRL's SFTTrainer with PEFT's LoRA on a bf16 model; what is not said here is its default. `trl-mixed` is its
padding-free mode on torch's attention, `trl-mixed-padded` pads to the longest. `liger` is the plain loop of `peft` on a
Llama patched by Liger, `liger-trainer` the same under Hugging Face's Trainer. `unsloth` is Unsloth's model, adapters
and trainer without checkpointing, `unsloth-checkpoint` with its own. Left to itself it joins the samples of a step into
one row, on a card it has no figures for; `unsloth-padded` and `unsloth-mixed-padded` keep one row a sample.

The tokens, their order and the samples a step are those of finetune.py. A trainer shifts labels by itself, so the last
target of a sample is lost: one token in a sample, which still counts. A step is timed from the end of one to the end of
the next, what the trainer does in between included.

Trap: Unsloth must come before transformers, TRL and PEFT. Nothing here may import those at the top, and the folder of
the model it loads is written by a process of its own: the case `base`, whose ROW is that folder.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from finetune import (
    APART,
    FULL,
    MIXED,
    SHAPE,
    TIMED,
    TOY,
    TOY_VOCAB,
    VOCAB,
    WARM_UP,
    between,
    figures,
    llama,
    mark,
    peft,
    samples_of,
)

from flatout.data.sample_data import SampleOrder

UNTIMED = 1 + WARM_UP  # the first step gives the first loss, as it does for ours
IDLE = 3  # steps on an idle device, for the host's time
STEPS = UNTIMED + TIMED + IDLE
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PACKAGES = {"trl": ("trl", "peft"), "liger": ("liger-kernel", "peft"), "unsloth": ("unsloth", "unsloth_zoo", "trl")}


class Clock:
    """Marks at the ends of steps. It waits for the device only around the timed ones."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.marks: list[Any] = []
        self.host: list[float] = []
        self.losses: list[torch.Tensor] = []
        self.peak: float | None = None
        self.ended = 0
        self.began = 0.0

    def step_ended(self) -> None:
        self.ended += 1
        done, cuda = self.ended - UNTIMED, torch.cuda.is_available()
        if done > TIMED:
            self.host.append(time.perf_counter() - self.began)
        if cuda and (done == 0 or done >= TIMED):
            torch.cuda.synchronize()
        if cuda and done == 0:
            torch.cuda.reset_peak_memory_stats()
        if 0 <= done <= TIMED:
            self.marks.append(mark())
        if done == TIMED and cuda:
            self.peak = torch.cuda.max_memory_allocated() / 2**30
        self.began = time.perf_counter()

    def watch(self, trainer: Any) -> Any:
        """Have `trainer` tell of its steps, and keep their losses on the device."""
        from transformers import TrainerCallback

        clock, inner = self, trainer.training_step

        class Steps(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                clock.step_ended()

        def training_step(*arguments: Any, **named: Any) -> torch.Tensor:
            loss = inner(*arguments, **named)
            clock.losses.append(loss.detach().clone())
            return loss

        trainer.training_step = training_step
        trainer.add_callback(Steps())
        return trainer

    def row(self) -> dict[str, Any]:
        if self.ended != STEPS:
            raise RuntimeError(f"the trainer took {self.ended} steps, not {STEPS}")
        seconds = [between(first, second) for first, second in itertools.pairwise(self.marks)]
        tokens = self.tokens[UNTIMED : UNTIMED + TIMED]
        return {
            **figures(tokens, seconds, self.host, self.peak),
            "losses": [round(float(loss), 4) for loss in (self.losses[0], self.losses[-1])],
        }


def rows_of(*, mixed: bool, small: bool) -> tuple[Any, list[int]]:
    """Every step's samples in ours' order as a dataset, and how many tokens each step learns from."""
    from datasets import Dataset

    samples, count = samples_of(mixed=mixed, small=small), MIXED if mixed else FULL
    order = SampleOrder(len(samples), count, 0)
    rows, tokens = [], []
    for step in range(STEPS):
        chosen = [samples.sample(int(number))[0][:-1].astype(np.int64) for number in order.indices(step)]
        rows += [one.tolist() for one in chosen]
        tokens.append(sum(len(one) for one in chosen))
    return Dataset.from_dict({"input_ids": rows, "labels": rows}), tokens


def tokenizer_of(vocab: int) -> Any:
    """Trainers ask for one. Nothing here is text, so it need only be as large as the model's."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"word{number}": number for number in range(4, vocab)}}
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "<unk>")), **special)


def settings_of(case: str) -> dict[str, Any]:
    """What every trainer is told: the work of a step, and to write and log nothing meanwhile."""
    return {
        "output_dir": "trainer",
        "per_device_train_batch_size": MIXED if "-mixed" in case else FULL,
        "gradient_accumulation_steps": 1,
        "max_steps": STEPS,
        "learning_rate": 2e-4,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "max_grad_norm": 1.0,
        "bf16": True,
        "use_cpu": not torch.cuda.is_available(),
        "train_sampling_strategy": "sequential",
        "logging_steps": STEPS,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }


def trl(case: str, *, small: bool) -> dict[str, Any]:
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer  # pyright: ignore

    rows, tokens = rows_of(mixed="-mixed" in case, small=small)
    clock = Clock(tokens)
    settings = SFTConfig(
        **settings_of(case),
        gradient_checkpointing=case == "trl-checkpoint",
        padding_free=case == "trl-mixed",
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = SFTTrainer(
        llama(small=small, device=here()),
        args=settings,
        train_dataset=rows,
        processing_class=tokenizer_of(TOY_VOCAB if small else VOCAB),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    clock.watch(trainer).train()
    return clock.row() | {"padding_free": settings.padding_free} | trained_by(trainer)


def liger(case: str, *, small: bool) -> dict[str, Any]:
    from liger_kernel.transformers import apply_liger_kernel_to_llama  # pyright: ignore

    apply_liger_kernel_to_llama()
    if case != "liger-trainer":
        return peft(case, small=small)
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments, default_data_collator

    rows, tokens = rows_of(mixed=False, small=small)
    clock = Clock(tokens)
    plan = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = Trainer(
        get_peft_model(llama(small=small, device=here()), plan),
        args=TrainingArguments(**settings_of(case)),
        train_dataset=rows,
        data_collator=default_data_collator,  # all rows are of one length
    )
    clock.watch(trainer).train()
    return clock.row() | trained_by(trainer)


def unsloth(case: str, *, small: bool) -> dict[str, Any]:
    folder = Path("base").absolute()  # it loads models from folders only
    again = [sys.executable, str(Path(__file__).absolute()), "base", str(folder), *(["--small"] if small else [])]
    subprocess.run(again, check=True)
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(Path("compiled").absolute()))
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    from unsloth import FastLanguageModel  # pyright: ignore # isort: skip
    from trl import SFTConfig, SFTTrainer  # pyright: ignore

    shape = TOY if small else SHAPE
    checkpointing = "unsloth" if case == "unsloth-checkpoint" else False
    base, tokenizer = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=shape["context"], dtype=torch.bfloat16, load_in_4bit=False,
        use_gradient_checkpointing=checkpointing,
    )  # fmt: skip
    model = FastLanguageModel.get_peft_model(
        base, r=16, lora_alpha=32, lora_dropout=0.0, bias="none", target_modules=LINEARS, random_state=0,
        use_gradient_checkpointing=checkpointing, max_seq_length=shape["context"],
    )  # fmt: skip
    rows, tokens = rows_of(mixed="-mixed" in case, small=small)
    clock = Clock(tokens)
    settings = SFTConfig(
        **settings_of(case),
        gradient_checkpointing=bool(checkpointing),
        padding_free=False if case.endswith("-padded") else None,  # None: its own choice
        max_length=shape["context"],
        dataset_num_proc=1,  # its look at the samples must not be skipped: it would then not join them
    )
    trainer = SFTTrainer(model, args=settings, train_dataset=rows, processing_class=tokenizer)
    clock.watch(trainer).train()
    attention = sys.modules.get("unsloth.utils.attention_dispatch")  # not there on a CPU, and not to be had
    xformers = bool(getattr(attention, "HAS_XFORMERS", False))
    how = {"padding_free": bool(trainer.args.padding_free), "xformers": xformers}
    return clock.row() | how | trained_by(trainer)


def write_base(folder: Path, *, small: bool) -> None:
    llama(small=small, device=here()).save_pretrained(folder)
    tokenizer_of(TOY_VOCAB if small else VOCAB).save_pretrained(folder)


def here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def trained_by(trainer: Any) -> dict[str, Any]:
    """What it trained, so that a row shows that everybody did the same."""
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    return {
        "trained": sum(parameter.numel() for parameter in trained),
        "adapter_dtype": str(trained[0].dtype).removeprefix("torch."),
        "optimizer": type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=(*APART, "base"))
    parser.add_argument("row", type=Path, help="where the row is written")
    parser.add_argument("--small", action="store_true", help="a toy shape")
    asked = parser.parse_args()
    if asked.case == "base":
        return write_base(asked.row, small=asked.small)
    who = asked.case.partition("-")[0]
    row = {"trl": trl, "liger": liger, "unsloth": unsloth}[who](asked.case, small=asked.small)
    row["versions"] = {name: importlib.metadata.version(name) for name in ("transformers", *PACKAGES[who])}
    asked.row.write_text(json.dumps(row), encoding="utf-8")


if __name__ == "__main__":
    main()
