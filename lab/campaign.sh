#!/usr/bin/env bash
# Everything that wants a GPU, part by part: tests first, then the rows of this folder.
#
#   lab/campaign.sh OUT DATA [PART ...]
#
# OUT gets a file of rows and one of messages for each part; what is good is added to lab/*.jsonl by hand. DATA is
# a corpus prepared with GPT-2's tokenizer. A part that fails or takes too long does not stop the next one. Without names
# all parts run: tests speed finetune peers estimate long recall generate.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 data=$2
shift 2
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD/src"
python=${PYTHON:-python3}

part() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2
  shift 2
  local began=$SECONDS
  timeout "$limit" "$@" >"$out/$name.jsonl" 2>"$out/$name.txt"
  echo "$name: exit $? after $((SECONDS - began)) s, $(wc -l <"$out/$name.jsonl") lines"
}

for name in "${@:-tests speed finetune peers estimate long recall generate}"; do
  for one in $name; do
    case $one in
      tests) part tests 900 "$python" -m pytest -q -m "gpu and not slow" -p no:cacheprovider tests ;;
      speed) part speed 400 "$python" lab/throughput.py "$data" "$commit" 124m 124m-selective 350m hf-124m ;;
      finetune) part finetune 300 "$python" lab/finetune.py "$commit" ours ours-full ours-full-4 mixed peft ;;
      peers) part peers 500 "$python" lab/finetune.py "$commit" ours ours-full-4 trl unsloth unsloth-checkpoint ;;
      estimate) part estimate 900 "$python" lab/estimate_truth.py --steps 24 --seconds 3 ;;
      long)
        part long 250 "$python" lab/throughput.py "$data" "$commit" small-32k small-32k-windows small-32k-hybrid \
          small-32k-eigenstate small-128k-hybrid small-128k-eigenstate
        ;;
      recall)
        part copy 900 "$python" lab/recall.py "$commit" --task copy
        part recall 900 "$python" lab/recall.py "$commit"
        ;;
      generate) part generate 200 "$python" lab/long_generation.py "$commit" ;;
      *) echo "there is no part $one" >&2 ;;
    esac
  done
done
