#!/usr/bin/env bash
# Everything that wants an NVIDIA GPU, in one command; needs no network.
#
#   benchmarks/gpu/run_all.sh                run what has not been done yet
#   benchmarks/gpu/run_all.sh --list         name the stages, their limits and what is done
#   benchmarks/gpu/run_all.sh STAGE...       these stages only, done or not
#
# PYTHON names the interpreter (default .venv/bin/python, else python3). Each stage has a limit of its own; its log is
# build/gpu/STAGE.log, and build/gpu/STAGE.done says it passed: remove that to run it again (WORK names another folder
# than build/gpu). Figures go to benchmarks/results/gpu_*.{csv,json} and benchmarks/results/kernels_cuda.csv, of which
# `benchmarks/pages.py gpu` makes docs/tables/gpu.md. A stage that fails does not stop the others; the exit status is the number
# of failed stages.
set -uo pipefail
cd "$(dirname "$0")/../.."

# Scripts find each other by PYTHONPATH: with a safe path Python does not look into a script's own folder.
export PYTHONPATH=$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}
export PYTHONSAFEPATH=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
work=${WORK:-build/gpu} results=benchmarks/results model=models/eesd-code-10m
prompts=models/prompts/held_out_code.jsonl
# Besides what vLLM does by itself: nothing compiled and no CUDA graph, full graphs of decode batches over uncompiled
# code, and graphs of what lies between attention layers.
eager='{"gpu_memory_utilization": 0.3, "enforce_eager": true}'
graphs_alone='{"gpu_memory_utilization": 0.3, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}'
piecewise='{"gpu_memory_utilization": 0.3, "compilation_config": {"cudagraph_mode": "PIECEWISE"}}'
lossless="$python benchmarks/gpu/lossless.py --max-tokens 96"
lossless_few="$lossless --dtype float32 --num-prompts 8"

# name|minutes|command; correctness before speed.
stages=(
    "doctor|3|$python -m vllm_eesd.cli doctor --model $model --json $work/doctor.json"
    "smoke|5|$python benchmarks/gpu/lossless.py --dtype float32 --num-prompts 2 --max-tokens 32"
    "tests|15|$python -m pytest -q -m gpu || [ \$? = 5 ]" # 5: no test is marked
    "kernels|10|$python -m pytest -q tests/kernels"
    "v2|15|$python -m pytest -q tests/engine_v2"
    "graphs_alone|10|$lossless_few --engine '$graphs_alone' --json $results/gpu_lossless_graphs_alone.json"
    "float32|10|$lossless_few --json $results/gpu_lossless_float32.json"
    "lossless|10|$lossless --json $results/gpu_lossless.json"
    "piecewise|10|$lossless --engine '$piecewise' --json $results/gpu_lossless_piecewise.json"
    "eager|10|$lossless --engine '$eager' --json $results/gpu_lossless_eager.json"
    "control|10|$lossless --control --json $results/gpu_lossless_control.json"
    "rounds|10|$python benchmarks/gpu/trace_rounds.py 8b --json $results/gpu_rounds.json"
    "bench_kernels|20|$python benchmarks/bench_kernels.py"
    "embedded|15|$python -m vllm_eesd.cli bench latency --model $model --prompts $prompts --methods plain,eesd,ngram --batch 1,8,32 --dtype bfloat16 --json $results/gpu_embedded.json"
    "end_to_end_1b|20|$python benchmarks/gpu/end_to_end.py 1b --csv $results/gpu_end_to_end.csv"
    "end_to_end_8b|30|$python benchmarks/gpu/end_to_end.py 8b --csv $results/gpu_end_to_end.csv"
)

list() {
    for stage in "${stages[@]}"; do
        IFS='|' read -r name minutes command <<<"$stage"
        printf '%-14s %3s min  %-4s  %s\n' "$name" "$minutes" "$([ -e "$work/$name.done" ] && echo done)" "$command"
    done
}

run() {
    local name=$1 minutes=$2 command=$3 status
    printf '== %s (at most %s minutes)\n' "$name" "$minutes"
    rm -f "$work/$name.done"
    timeout --kill-after=30 "${minutes}m" bash -c "$command" >"$work/$name.log" 2>&1
    status=$?
    if [ $status = 0 ]; then
        touch "$work/$name.done"
        return 0
    fi
    printf '   failed with status %s (124: out of time); the end of %s:\n' $status "$work/$name.log"
    tail -n 15 "$work/$name.log"
    return 1
}

case ${1:-} in
--list) list && exit 0 ;;
-*) sed -n '2,12s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac

for wanted in "$@"; do
    [[ " $(printf '%s ' "${stages[@]%%|*}")" == *" $wanted "* ]] || {
        echo "error: there is no stage $wanted; --list names them" >&2
        exit 2
    }
done
command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 || {
    echo "error: no NVIDIA driver answers here (nvidia-smi -L); nothing was run" >&2
    exit 3
}

mkdir -p "$work"
failed=0
for stage in "${stages[@]}"; do
    IFS='|' read -r name minutes command <<<"$stage"
    if [ $# -gt 0 ]; then
        [[ " $* " == *" $name "* ]] || continue
    elif [ -e "$work/$name.done" ]; then
        continue
    fi
    run "$name" "$minutes" "$command" || failed=$((failed + 1))
done
list
exit $failed
