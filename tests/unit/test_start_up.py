"""What is imported, and what not: torch's compiler takes seconds, and shards one more."""

import subprocess
import sys

BUILD_AND_RUN = """
import sys
import torch
from flatout.config.schema import ModelConfig
from flatout.device import arithmetic
from flatout.model.gpt import build_model

model = build_model(ModelConfig(layers=1, width=8, heads=2, context=4, positions="learned"), 11)
with arithmetic("fp32", False, torch.device("cpu")), torch.inference_mode():
    model.hidden(torch.zeros(1, 4, dtype=torch.int64))
import flatout.front.texts
print(sorted({"flatout.data.batch", "flatout.records", "flatout.engine.custom", "flatout.resolve"} & set(sys.modules)))
import flatout.engine.loop
print(sorted({"torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "sympy"} & set(sys.modules)))
"""


def test_text_needs_no_room_of_training_and_a_run_of_one_process_no_compiler():
    result = subprocess.run([sys.executable, "-c", BUILD_AND_RUN], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n[]\n"
