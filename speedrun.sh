#!/usr/bin/env bash
# GSM8K on one GPU against the clock. The last line is the result.
#
#     bash speedrun.sh MODEL DATA [--seed=1 ...]
#
# MODEL is a folder or a hub name, such as Qwen/Qwen2.5-Coder-1.5B-Instruct. DATA is a folder with GSM8K's
# train.jsonl and test.jsonl (github.com/openai/grade-school-math). Whatever follows is for starter.py.
#
# The clock counts everything from the start of starter.py to the saved model. While it trains, it is
# measured on 300 rows held out of train.jsonl. Only then sample.py answers all test problems, four
# times at temperature 1 and once greedily, with up to 512 tokens, unless --max_tokens is given.
set -euo pipefail
usage() {
    sed -n '2,7s/^# \{0,1\}//p' "$0"
    exit 2
}
case " $* " in *" --help "* | *" -h "*) usage ;; esac
[ $# -ge 2 ] || usage
flag() {    # flag NAME DEFAULT WORDS: the value of --NAME=value or --NAME value among the words
    local name=$1 value=$2
    shift 2
    while [ $# -gt 0 ]; do
        case $1 in
            --"$name"=*) value=${1#*=} ;;
            --"$name") value=${2-} ;;
        esac
        shift
    done
    echo "$value"
}
here=$(dirname "$0") model=$1 data=$2
shift 2
out=$(flag out_dir out "$@")
run=$(flag resume "$out/latest" "$@")
case $run in latest | "" | --*) run=$out/latest ;; esac    # also for a bare --resume
run=${run/#\~\//$HOME/}
test_tokens=$(flag max_tokens 512 "$@")
python=${PYTHON:-python3}
if ! n_problems=$(grep -c . "$data/test.jsonl"); then
    echo "error: no test problems in $data/test.jsonl" >&2
    exit 2
fi

SECONDS=0
$python "$here/starter.py" --model_id="$model" --task="$data/train.jsonl" \
    --max_minutes=7 --n_grpo_steps=1000 --eval_every=30 --n_eval=300 --save_every=0 \
    --rollout_batch_size=512 --group_size=8 --max_tokens=400 --max_prompt_tokens=400 --gpu_mem_util=0.3 \
    --tokens_per_microbatch=10240 --lr=3e-6 --warmup_steps=5 --n_minibatches=2 \
    --loss_type=dr_grpo --use_std_normalization=False --gradient_checkpointing=False --compile=False "$@"
minutes=$(awk "BEGIN { printf \"%.1f\", $SECONDS / 60 }")

$python "$here/sample.py" --model_id="$run/model" --eval_task="$data/test.jsonl" --n_eval="$n_problems" \
    --max_tokens="$test_tokens" --n_samples=4 | tee "$run/test.txt"
accuracy() {
    sed -n "s/^accuracy, $1 *//p" "$run/test.txt"
}
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null || echo CPU)
commit=$(git -C "$here" rev-parse --short HEAD 2> /dev/null || echo unknown)
echo "| GSM8K | $(basename "$model") | $gpu | $minutes | $(accuracy pass@1) | $(accuracy greedy) | $commit | ${*:---seed=42} |"
