#!/bin/sh
# Writes the folders that fixtures/ holds, and what the same commit computes from them.
#
# Run it once, with `flatout` and `python` of a checkout of f6fcf4d first in PATH, in a new folder:
#
#     mkdir /tmp/flatout-f6fcf4d && cd /tmp/flatout-f6fcf4d
#     PATH=$OLD/.venv/bin:$PATH sh $NEW/tests/recordings/make_fixtures.sh
#     cd $NEW && python -m tests.recordings.fixtures --pack /tmp/flatout-f6fcf4d
#
# Paths are relative wherever flatout keeps them so. An adapter names its base by an absolute path.
set -eu
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

python - <<'PYTHON'
import json
from pathlib import Path

import flatout

text = Path(flatout.__file__).parent / "data/bundled/tiny_shakespeare.txt"
Path("text.txt").write_bytes(text.read_bytes()[:6000])
rows = [{"instruction": f"Say {n % 5}.", "output": "Aye, my lord. " * (1 + n % 3)} for n in range(24)]
Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
PYTHON

# Datasets.
char="data.source=text.txt data.folder=data/char"
bpe="data.source=text.txt data.folder=data/bpe data.tokenizer=bpe-300"
flatout prepare shakespeare-char $char --workers 0
flatout prepare shakespeare-bpe $bpe --workers 0

# Runs of eight steps with checkpoints of steps 4 and 8. Muon, AdamW with dropout, Muon in slices on two ranks, LoRA.
often="train.steps=8 checkpoint.every=4 checkpoint.keep=9 eval.every=4 eval.tokens=512 eval.sample_tokens=8"
quick="$often optim.warmup=2 speed.device=cpu output.plots=false"
small="model.width=16 model.heads=2"
letters="$char $small $quick model.layers=2 model.context=16 train.batch_tokens=64"
flatout train shakespeare-char $letters output.name=muon
flatout train shakespeare-bpe $bpe $small $quick model.layers=1 model.context=96 train.batch_tokens=384 \
    optim.learning_rate=3e-2 output.name=adamw
flatout train shakespeare-char $letters model.norm_weights=true parallel.form=fsdp output.name=sharded --gpus 2
flatout export runs/adamw base
flatout finetune model.init_from=base chat.source=rows.jsonl chat.template=plain chat.batch_samples=4 $quick \
    model.context=96 train.epochs=null lora.rank=2 lora.alpha=4 optim.learning_rate=5e-2 output.name=lora

# Files for people. Each carries a mark by which a later flatout replaces it without --overwrite.
flatout report runs/muon
flatout bundle runs/muon --no-doctor --out muon-bundle.zip

# What this commit computes from these runs.
mkdir expected
for run in muon adamw sharded lora; do
    flatout eval runs/$run --json >expected/$run-eval.json
    flatout generate runs/$run --temperature 0 --tokens 12 --prompt "First " >expected/$run-text.txt
    flatout export runs/$run expected/$run-export
done
flatout export runs/lora expected/lora-adapter --adapter
flatout merge runs/lora expected/lora-merged --dtype fp32

# Resumes from step 4, each in a copy. The resumed run writes the rest of metrics.jsonl and checkpoint 8 again.
for run in muon adamw lora; do
    mkdir -p resumed/$run && cp -r data base text.txt rows.jsonl runs resumed/$run
    (cd resumed/$run && flatout train --resume runs/$run/checkpoints/step-00000004 >/dev/null)
done
for ranks in 1 2; do
    mkdir -p resumed/sharded-$ranks && cp -r data text.txt runs resumed/sharded-$ranks
done
(cd resumed/sharded-1 && flatout train --resume runs/sharded/checkpoints/step-00000004 >/dev/null)
(cd resumed/sharded-2 && flatout train --resume runs/sharded/checkpoints/step-00000004 --gpus 2 >/dev/null)
