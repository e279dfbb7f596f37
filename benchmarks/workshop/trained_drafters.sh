#!/bin/bash
# An EAGLE-3 head and a student of four layers for a model, trained in some 150 seconds, and what they are worth on real prompts (60
# more), on one GPU with nothing beside it: training is starved at once. The head and the student learn from the same answers, most of
# them to questions that the model asks itself: of few answers a head soon knows the words and no others.
#
#   bash benchmarks/workshop/trained_drafters.sh MODEL TEXTS OUT [DRAFTER …]
#
# Drafters that are judged: by default the head, alone and with `auto`, the student with `auto`, and n-grams. MINUTES, STUDENT_MINUTES and
# ANSWER_MINUTES are of training the head and the student and of answering.
#
# TEXTS: a folder with wikitext2-train-1mb.raw.txt, wikitext2-valid.raw.txt, sonnet.txt and mt-bench-questions.jsonl. OUT gets
# training.txt, rates.jsonl and memory.jsonl; the drafters are left in the folders `head` and `student` of the current one, since
# rows have their names. What is judged (valid, a tenth of the questions, two files of code) is not trained on. Where captured steps
# of training fail, they are launched one by one. Compile first: `flyweight compile MODEL --max-num-seqs 256`.
#
# TRY=1 runs all of it small, on a CPU too.
set -u
model=$1 texts=$2 out=$3
shift 3
[ $# -gt 0 ] || set -- auto:eagle3:head:3 eagle3:head:3 ngram:7 auto:model:student:3
here=$(dirname "$(readlink -f "$0")")/..
code=$here/../src/flyweight
mkdir -p "$out"
sizes="--prompts 1024 --asked 6144 --question-times 2 --answer 256 --answer-minutes ${ANSWER_MINUTES:-0.4} --student 4"
trained="--minutes ${MINUTES:-0.55} --student-minutes ${STUDENT_MINUTES:-0.12}"
again="--eager --minutes 0.4 --student-minutes 0.1"
judged="--tokens 192"
lines=1000
if [ -n "${TRY:-}" ]; then
    sizes="--prompts 2 --asked 2 --prompt 16 --question-times 1 --answer 8 --student 2 --batch 64 --vocabulary 256 --device cpu"
    trained="--minutes 0.02 --student-minutes 0.02"
    judged="--tokens 6 --prompts 1 --only chat --device cpu"
    lines=4
fi
head -n $lines "$texts/mt-bench-questions.jsonl" > "$out/questions.jsonl"
train() {
    python "$here/train_head.py" "$model" head --then-student student --chat --text "$texts/wikitext2-train-1mb.raw.txt" \
        --text "$texts/sonnet.txt" --text "$code/engine/scheduler.py" --text "$code/engine/core.py" --text "$code/engine/kv_cache.py" \
        --text "$code/models/layer.py" --text "$code/server/service.py" --text "$code/checkpoint/reader.py" \
        --text "$code/quant/quantize.py" --questions "$out/questions.jsonl" $sizes "$@" >> "$out/training.txt"
}
train $trained || { [ -f head/answers.json ] && [ ! -f head/model.safetensors ] && train $again; }
grep '"training"' "$out/training.txt"
drafters=()
for one; do drafters+=(--speculate "$one"); done
python "$here/speculation.py" "$model" "${drafters[@]}" --only chat --only code --only quoting \
    --text "$texts/wikitext2-valid.raw.txt" --chat "$texts/mt-bench-questions.jsonl" --code "$code/engine/runner.py" \
    --code "$code/engine/rows.py" $judged > "$out/rates.jsonl"
[ -n "${TRY:-}" ] || python "$here/speculation.py" "$model" --memory --speculate eagle3:head:3 --speculate model:student:3 \
    --speculate ngram > "$out/memory.jsonl"
