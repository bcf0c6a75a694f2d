"""A described machine as `resolve` sees one: its device, answers of trials, ranks, and text that is not prepared yet.

So a run is decided for a machine that is elsewhere, and nothing is prepared for it. This module imports torch: only
where `Machine.torch.status` is ok.
"""

import dataclasses
from typing import final

import torch

from flatout.config.load import LoadedConfig
from flatout.config.sizes import Known, usual_vocab
from flatout.data.batch import BatchLoader, Delivery, Span
from flatout.data.loader import check_evaluable, check_length
from flatout.data.sampler import window_count
from flatout.data.tokenizer import Ids, IdTokenizer
from flatout.data.training_data import DataFacts, TrainingData
from flatout.device import Device, limit_memory
from flatout.diagnose.doctor import Machine, TokenFacts, Trials
from flatout.finding import Finding
from flatout.host import ThreadTrial
from flatout.resolve.case import Probes
from flatout.resolve.length import asked_schedule
from flatout.resolve.opening import DataSource, Opened


def device_of(machine: Machine, kind: str, index: int, memory_limit: float | None) -> Device:
    """torch's view of a described machine."""
    if kind != "cuda":
        memory = machine.memory_bytes if kind == "cpu" else None
        return Device(torch_device=torch.device(kind), name=kind, memory_bytes=memory, capability=None)
    card = machine.cards[index]
    device = Device(
        torch_device=torch.device("cuda", index),
        name=card.name,
        memory_bytes=card.memory_bytes,
        capability=card.capability,
    )
    return limit_memory(device, memory_limit)


def probes_of(machine: Machine, trials: Trials) -> Probes:
    """The trials' answers; what was not tried counts as working, unless its package is missing."""

    def attention(backend: str, _device: object, **_: object) -> str | None:
        if "fa4" in backend and machine.packages.get("flash_attn.cute") is None:
            return "flash-attn-4 is not installed (the extra flatout[fa4])"
        if backend == "fa3" and machine.packages.get("flash_attn_interface") is None:
            return "flash_attn_3 is not installed"
        return trials.failure(f"attention {backend}")

    cores = max(1, int(machine.usable_cores))
    return Probes(
        attention=attention,
        picked=lambda *_, **__: trials.picked,
        documents=attention,
        compiler=lambda _: trials.failure("torch.compile"),
        products=lambda: trials.failure("cuBLASLt"),
        threads=lambda *_: trials.threads or ThreadTrial(seconds={cores: 0.0}, cores=cores),
        triton=lambda: machine.triton.status == "ok" and trials.failure("triton kernels") is None,
    )


@final
@dataclasses.dataclass(eq=False)
class ExpectedSplit:
    """A split that nobody has made yet."""

    split: str
    tokens: int
    folder: str
    text_bytes: int = 0

    def read(self, start: int, length: int) -> Ids:
        raise NotImplementedError("there are no tokens yet")


@final
class ExpectedText(TrainingData):
    """Text as it will be once it is prepared, by what is known of its tokens. It has facts, and no batches."""

    def __init__(self, settings: LoadedConfig, known: TokenFacts, vocab: int) -> None:
        config, data, context = settings.config, settings.config.data, settings.config.model.context
        place = str(data.folder if data.source is None else data.source)
        train, windows = ExpectedSplit("train", known.train_tokens or 0, place), None
        self.val = ExpectedSplit("val", known.val_tokens or 0, place)
        if known.train_tokens is not None and config.data_kind == "text":
            if data.packing == "best_fit":  # about: padding is small
                windows = train.tokens // (context + 1)
            else:
                check_length(train, context)
                windows = window_count(train.tokens, context, data.stride or context)
        if known.val_tokens is not None:
            check_evaluable(self.val)
        self.tokenizer = IdTokenizer(vocab)
        self.schedule = asked_schedule(config, windows)
        self.facts = DataFacts(
            fingerprint="",
            place=place,
            train_tokens=known.train_tokens,
            windows=windows,
            corpus_bytes=None if config.data_kind == "stream" else train.tokens * known.token_bytes,
        )

    def batches(self, delivery: Delivery, span: Span) -> BatchLoader:
        raise NotImplementedError("there are no tokens yet")

    def notices(self, delivery: Delivery) -> tuple[Finding, ...]:
        return ()


@final
class ExpectedSource(DataSource):
    """The text of settings, which stays as it is."""

    def __init__(self, asked: LoadedConfig, device: Device, known: TokenFacts) -> None:
        super().__init__(asked, device)
        self.tokens = known

    @property
    def vocab(self) -> int:
        config = self.asked.config
        return self.tokens.vocab or config.model.vocab or usual_vocab(config.data.tokenizer)

    def known(self) -> Known:
        config = self.asked.config
        unique = None if config.data_kind == "stream" else self.tokens.train_tokens
        return Known(vocab=config.model.vocab or self.vocab, unique=unique)

    def open(self, settings: LoadedConfig) -> Opened:
        return Opened(settings, ExpectedText(settings, self.tokens, self.vocab))

    def start(self, opened: Opened, vocab: int) -> None:
        """Without the text's tokenizer it cannot be compared: `check_start` looks at the rest."""
