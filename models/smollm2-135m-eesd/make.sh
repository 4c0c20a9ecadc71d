#!/usr/bin/env bash
# Make this exit head from nothing: the target asks itself, answers, a head learns its answers and is calibrated.
#
#   models/smollm2-135m-eesd/make.sh                       the public target, into build/smollm2-135m-eesd
#   MODEL=DIR OUT=DIR MINUTES=60 .../make.sh               another chat model (a directory or a Hub id)
#
# Started again it goes on where it stopped. MINUTES is training alone; questions and answers come before it: TURNS
# questions of about 40 tokens, and answers of up to ANSWER_TOKENS tokens.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONSAFEPATH=1 HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
PATH="$PWD/.venv/bin:$PATH"

MODEL=${MODEL:-$(eesd model smollm2)}
OUT=${OUT:-build/smollm2-135m-eesd}
WORK=${WORK:-$OUT.work}
TURNS=${TURNS:-6000}
# A row of training holds a question and its answer.
ANSWER_TOKENS=${ANSWER_TOKENS:-448}
SEQ_LEN=${SEQ_LEN:-512}
MINUTES=${MINUTES:-120}
EXIT_LAYER=${EXIT_LAYER:-1}
HEAD_LAYERS=${HEAD_LAYERS:-2}
DRAFT_VOCAB=${DRAFT_VOCAB:-auto}

eesd distill "$MODEL" --exit-layer "$EXIT_LAYER" --head-layers "$HEAD_LAYERS" --draft-vocab "$DRAFT_VOCAB" \
    --turns "$TURNS" --answer-tokens "$ANSWER_TOKENS" --temperature 0.7 1.0 \
    --seq-len "$SEQ_LEN" --minutes "$MINUTES" --compile --work "$WORK" -o "$OUT"
eesd calibrate "$MODEL" "$OUT" --data models/smollm2-135m-eesd/held_out_turns.jsonl
