#!/usr/bin/env bash
# GSM8K on one GPU against the clock: bash speedrun.sh [MODEL] [--seed=1 ...]
# The last line is a row for the table of records.
#
# MODEL is a folder or a hub name. The flags are for starter.py. The clock counts all of starter.py,
# until the model is saved, but not the download of the model. Then sample.py answers every test
# problem.
set -euo pipefail
model=Qwen/Qwen2.5-Coder-1.5B-Instruct here=$(dirname "$0")
if [[ ${1:---} != --* ]]; then model=$1; shift; fi
[[ -d $model ]] || hf download "$model" > /dev/null || { echo "no model $model" >&2; exit 2; }
SECONDS=0
python "$here/starter.py" --model_id="$model" --task=gsm8k --max_minutes=7 --n_grpo_steps=1000 \
    --eval_every=30 --n_eval=300 --save_every=0 --rollout_batch_size=512 --group_size=8 \
    --max_tokens=400 --max_prompt_tokens=400 --gpu_mem_util=0.3 --tokens_per_microbatch=10240 \
    --lr=3e-6 --warmup_steps=5 --n_minibatches=2 --loss_type=dr_grpo --advantage_scale=none \
    --gradient_checkpointing=False --compile=False "$@" --out_dir=out
minutes=$(awk "BEGIN { printf \"%.1f\", $SECONDS / 60 }")
python "$here/sample.py" --eval_task=gsm8k/test.jsonl --n_eval=1319 --n_samples=4 \
    --max_tokens=512 | tee out/latest/test.txt
accuracy=$(sed -En 's/^accuracy, (pass@1|greedy) +//p' out/latest/test.txt | paste -sd '|')
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null || echo CPU)
commit=$(git -C "$here" rev-parse --short HEAD 2> /dev/null || echo unknown)
flags=${*:---seed=42}
echo "| GSM8K | $(basename "$model") | $gpu | $minutes | ${accuracy/|/ | } | $commit | $flags |"
