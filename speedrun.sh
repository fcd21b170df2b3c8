#!/usr/bin/env bash
# GSM8K on one GPU against the clock: bash speedrun.sh [MODEL] [--seed=1 ...]
#
# MODEL is a folder or a hub name, the flags are for starter.py. The clock counts all of starter.py,
# until the model is saved, but not the download of the model. Then sample.py answers every test
# problem, and verify.py prints a row for the table of records.
set -euo pipefail
model=Qwen/Qwen2.5-Coder-1.5B-Instruct here=$(dirname "$0")
if [[ ${1:---} != --* ]]; then model=$1; shift; fi
[[ -d $model ]] || hf download "$model" > /dev/null || { echo "no model $model" >&2; exit 2; }
python "$here/starter.py" --model_id="$model" --task=gsm8k --n_grpo_steps=38 --eval_every=38 \
    --n_eval=300 --save_every=0 --rollout_batch_size=512 --group_size=8 --gpu_mem_util=0.3 \
    --tokens_per_microbatch=10240 --lr=3e-6 --warmup_steps=5 --n_minibatches=2 \
    --loss_type=dr_grpo --advantage_scale=none --gradient_checkpointing=False --compile=False \
    "$@" --out_dir=out
python "$here/sample.py" --eval_task=gsm8k/test.jsonl --n_eval=1319 --n_samples=4 \
    --max_tokens=512 --save=out/latest/record
# It also finds that this row is not in the table yet.
python "$here/verify.py" out/latest/record || true
