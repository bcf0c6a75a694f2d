"""The weights that pretraining starts from: whether a model of this config can take them. torch is needed."""

from collections.abc import Iterator

from flatout.config.schema import ModelConfig
from flatout.diagnose.doctor import Finding, finding_of
from flatout.engine.base_model import open_start
from flatout.errors import UserError
from flatout.model.hub_find import is_within_reach


def check_start(model: ModelConfig, vocab: int | None) -> Iterator[Finding]:
    """`vocab` is that of the data, if known; tokenizers are compared when training starts."""
    name = model.init_from
    if name is not None and not is_within_reach(name):
        advice = "It is fetched from the hub when training starts; the hub is not asked now."
        yield Finding(area="config", name="start", status="warn", found=f"{name} is not on this machine", advice=advice)
        return
    try:
        start = open_start(model, model.vocab or vocab)
    except UserError as error:
        yield finding_of(error, "config", "start")
        return
    if start is not None:
        yield Finding(area="config", name="start", status="ok", found=start.notice)
