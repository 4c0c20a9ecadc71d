#!/usr/bin/env bash
# Train exit heads of several shapes, and the peers, on the same tokens with the same loss: on a GPU all of them at once,
# on CPUs one after the other (AT_ONCE=1). How long it takes on a GPU is not yet measured.
#
#   python models/make/pack_text.py --work build/target --tokenizer models/eesd-code-10m     # the text, if it is not there
#   models/make/compare_heads.sh build/target build/heads
#
# Writes build/heads/nXmY/head with its record (head.json), and build/heads/peers-F/{draft_model,eagle} for each
# multiple F of the learning rate: a peer's best is what a head is compared with. Stopped, it goes on where it was.
set -euo pipefail

TEXT=$1 WORK=$2
MODEL=models/eesd-code-10m # the one train_peers.py knows
PYTHON=${PYTHON:-python3}
TOKENS=${TOKENS:-30300000}           # what each of them sees
OWN=${OWN:-2048}                     # windows of 512 tokens that the target writes, half of every batch
SHAPES=${SHAPES:-"2,1 1,2 0,3 2,2"}  # N,M: layers of the target and of the head in a draft step
LR_FACTORS=${LR_FACTORS:-"0.5 1 2"}  # of the peers
AT_ONCE=${AT_ONCE:-8}
export PYTHONSAFEPATH=1

steps() { echo $(($1 / 8192)); }

# N M STEPS WORK: the head, on the target's own text that stands in WORK, or that it then writes there.
distill() {
    "$PYTHON" -m vllm_eesd.cli distill "$MODEL" --exit-layer "$1" --head-layers "$2" --steps "$3" --batch 16 --seq-len 512 \
        --data "$TEXT/train.bin" --held-out "$TEXT/held_out.bin" --self-generate "$OWN" --temperature 1.0 0.7 \
        --generator transformers --work "$4" --json "$4/head.json" -o "$4/head"
}

# FACTOR WORK: both peers.
peers() {
    "$PYTHON" models/make/train_peers.py train --data "$TEXT/train.bin" --work "$2" --tokens "$TOKENS" --lr-factor "$1" \
        --self-generate "$OWN" --generator transformers
    "$PYTHON" models/make/train_peers.py export --work "$2" -o "$2"
}

# NAME COMMAND ...: run it on the shared text, its output in a file; waits where AT_ONCE run already.
running=""
begin() {
    mkdir -p "$WORK/$1"
    cp -n "$WORK"/own/generated.* "$WORK/$1"
    name=$1
    shift
    "$@" > "$WORK/$name/output.txt" 2>&1 &
    running="$running $!"
    while [ "$(jobs -rp | wc -l)" -ge "$AT_ONCE" ]; do sleep 1; done
}

mkdir -p "$WORK/own"
[ -f "$WORK/own/head.json" ] || distill 2 1 1 "$WORK/own"
for shape in $SHAPES; do
    n=${shape%,*} m=${shape#*,}
    begin "n${n}m$m" distill "$n" "$m" "$(steps "$TOKENS")" "$WORK/n${n}m$m"
done
for factor in $LR_FACTORS; do
    begin "peers-$factor" peers "$factor" "$WORK/peers-$factor"
done
failed=0
for process in $running; do wait "$process" || failed=1; done
for name in "$WORK"/n*m* "$WORK"/peers-*; do
    echo "== $name"
    tail -n 4 "$name/output.txt"
done
exit $failed
