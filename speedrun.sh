#!/usr/bin/env bash
# GSM8K on one GPU against the clock. The last line is a row for the table of records.
#
# MODEL is a folder or a hub name. DATA is a folder with GSM8K's train.jsonl and test.jsonl
# (github.com/openai/grade-school-math). Whatever follows is for starter.py. The clock counts all of
# starter.py, until the model is saved. Then sample.py answers every test problem.
set -euo pipefail
usage="bash speedrun.sh MODEL DATA [--seed=1 ...]"
model=${1:?$usage} data=${2:?$usage} here=$(dirname "$0")
shift 2
n_problems=$(grep -c . "$data/test.jsonl")
SECONDS=0
python "$here/starter.py" --model_id="$model" --task="$data/train.jsonl" --max_minutes=7 \
    --n_grpo_steps=1000 --eval_every=30 --n_eval=300 --save_every=0 --rollout_batch_size=512 \
    --group_size=8 --max_tokens=400 --max_prompt_tokens=400 --gpu_mem_util=0.3 \
    --tokens_per_microbatch=10240 --lr=3e-6 --warmup_steps=5 --n_minibatches=2 --loss_type=dr_grpo \
    --use_std_normalization=False --gradient_checkpointing=False --compile=False "$@" --out_dir=out
minutes=$(awk "BEGIN { printf \"%.1f\", $SECONDS / 60 }")
python "$here/sample.py" --eval_task="$data/test.jsonl" --n_eval="$n_problems" --n_samples=4 \
    --max_tokens=512 | tee out/latest/test.txt
accuracy=$(sed -En 's/^accuracy, (pass@1|greedy) +//p' out/latest/test.txt | paste -sd '|')
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null || echo CPU)
commit=$(git -C "$here" rev-parse --short HEAD 2> /dev/null || echo unknown)
flags=${*:---seed=42}
echo "| GSM8K | $(basename "$model") | $gpu | $minutes | ${accuracy/|/ | } | $commit | $flags |"
