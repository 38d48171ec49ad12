#!/bin/sh
# What a GPU has to show, in at most eight minutes: the bench, the comparison with other libraries,
# and 200 steps of the GPU recipe in eager, compiled, and with --recompute. From the repository:
#
#   sh experiments/gpu_check.sh
#
# Everything that it prints is also in out/gpu_check/. To try the script where there is no GPU, or with
# less to do: DEVICE=cpu BENCH="--n_layer=1 --rounds=1" RECIPE="--n_layer=1 --batch_size=2" \
#   STEPS=4 PEERS=no sh experiments/gpu_check.sh

set -u
PYTHON=${PYTHON:-python}
DEVICE=${DEVICE:-cuda}
STEPS=${STEPS:-200}
BENCH=${BENCH:---n_layer=6 --n_head=6 --n_embd=384 --block_size=256 --batch_size=64}
RECIPE=${RECIPE:-}
PEERS=${PEERS:-yes}
OUT=${OUT:-out/gpu_check}
LIMIT=${LIMIT:-480} # seconds in all; a part that would begin later is left out
# A laptop reads the text it has; elsewhere any text will do, since speed is what is measured.
TEXT=${TEXT:-}
BEGAN=$(date +%s)
FAILED=0
mkdir -p "$OUT"

# part NAME COMMAND...: runs it within what is left of the limit; a failure is told and counted.
part() {
    name=$1
    shift
    left=$((LIMIT - $(date +%s) + BEGAN))
    if [ "$left" -lt 15 ]; then
        echo "== $name: left out, the time is up"
        FAILED=$((FAILED + 1))
        return
    fi
    echo "== $name"
    timeout "$left" "$@" >"$OUT/$name.txt" 2>&1
    status=$?
    # A progress bar rewrites its line: only what it ended with is shown.
    tr '\r' '\n' <"$OUT/$name.txt" | tail -n 60
    if [ "$status" -ne 0 ]; then
        echo "== $name: exit code $status"
        FAILED=$((FAILED + 1))
    fi
}

if [ "$DEVICE" = cuda ]; then
    part machine nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv
fi
if [ -z "$TEXT" ]; then
    TEXT=$OUT/text.txt
    "$PYTHON" -c "print('\n'.join(f'{n} times {n} is {n * n}' for n in range(60000)))" >"$TEXT"
fi
part prepare "$PYTHON" prepare.py --input="$TEXT" --name=gpu_check --data_dir="$OUT/data"

train() {
    name=$1
    shift
    # Half of the steps take one pass, then two and three: each number of passes is seen.
    part "train_$name" "$PYTHON" train.py config/shakespeare_gpu.toml --dataset=gpu_check \
        --data_dir="$OUT/data" --out_dir="$OUT/$name" --overwrite --max_iters="$STEPS" \
        --pass_mix=0.5,0.25,0.25 --eval_interval=0 --log_interval=20 --device="$DEVICE" \
        $RECIPE "$@"
    if [ -f "$OUT/$name/log.jsonl" ]; then
        "$PYTHON" - "$OUT/$name/log.jsonl" <<'EOF'
import json
import statistics
import sys

rates = {}
with open(sys.argv[1]) as file:
    for line in file:
        entry = json.loads(line)
        if "passes" in entry:
            rates.setdefault(entry["passes"], []).append(entry["tokens_per_second"])
for passes, values in sorted(rates.items()):
    typical = statistics.median(values)
    print(f"passes={passes}: {typical:,.0f} tokens/s, median of {len(values)} logged steps")
EOF
    fi
}

# shellcheck disable=SC2086
part bench "$PYTHON" -m experiments.bench --device="$DEVICE" --rounds=5 \
    --json="$OUT/bench.json" $BENCH
train eager
train compiled --compile=true
train recompute --recompute=true
if [ "$PEERS" = yes ]; then
    part peers "$PYTHON" -m experiments.bench --peers --device="$DEVICE" --rounds=5 \
        --json="$OUT/peers.json"
fi
part sample "$PYTHON" sample.py "$OUT/eager" --mode=all --max_new_tokens=100 --device="$DEVICE"
echo "== $FAILED parts failed or were left out; $(($(date +%s) - BEGAN)) seconds"
test "$FAILED" -eq 0
