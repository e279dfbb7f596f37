#!/bin/bash
# The quality run in parts of a few minutes, on a GPU that is rented by the minute: each call starts it where it is not running, waits, and leaves
# all rows so far in $OUT/quality.jsonl. Put that file in the place of benchmarks/h200/quality.jsonl before a call on another
# machine; finished jobs are not done again, and on the same machine a run goes on between calls.
#
#   OUT=/tmp/out bash benchmarks/workshop/in_parts.sh PIECES SECONDS [more options of run.py]
#
# PIECES: a folder of `pieces.py cut` with smollm2-135m.gguf, valid.txt, train.txt, install.py and the peers' wheels.
set -u
pieces=$1 seconds=$2; shift 2
here=$(dirname "$(readlink -f "$0")") place=${PLACE:-/tmp/quality}
rows=$place/rows.jsonl
mkdir -p "$place"
[ -d "$place/input" ] || python3 "$here/pieces.py" join "$pieces" "$place/input" || exit 1
[ -d "$place/site" ] || python3 "$place/input/install.py" "$place/input/wheels" "$place/site" > "$place/install.log" || exit 1
[ -e "$rows" ] || cp "$here/../h200/quality.jsonl" "$rows"
export PYTHONPATH="$place/code/src:$place/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1

known=${FLYWEIGHT_COMMIT:-$(git -C "$here" describe --always --dirty --abbrev=12 2> /dev/null)}
[ -z "$known" ] || export FLYWEIGHT_COMMIT=$known  # the copy below has no repository

running() { [ -e "$place/pid" ] && kill -0 "$(cat "$place/pid")" 2> /dev/null; }

if ! running; then
    rm -rf "$place/code"; mkdir "$place/code"  # a copy: the next call may bring another checkout
    cp -r "$here/../../src" "$here/../../benchmarks" "$place/code/"
    # Multi-process service: small kernels of several workers run side by side. Without it they take turns.
    if [ ! -e "$place/mps" ] && command -v nvidia-cuda-mps-control > /dev/null; then
        nvidia-cuda-mps-control -d; sleep 1
        timeout 60 python3 -c "import torch; torch.zeros(1, device='cuda')" || echo quit | nvidia-cuda-mps-control
        touch "$place/mps"
    fi
    setsid python3 "$place/code/benchmarks/quality/run.py" --model "$place/input/smollm2-135m.gguf" --text "$place/input/valid.txt" \
        --calibration "$place/input/train.txt" --peers llm-compressor auto-round --seeds 0 1 2 --jobs 6 --work "$place/work" \
        --out "$rows" "$@" >> "$place/log.txt" 2>&1 < /dev/null &
    echo $! > "$place/pid"
fi
for ((left = seconds; left > 0; left -= 2)); do running || break; sleep 2; done
cp "$rows" "$OUT/quality.jsonl"; cp "$place/log.txt" "$OUT/log.txt"
running && echo "still running" || echo "finished"
grep '^\[' "$place/log.txt" | tail -25 | cut -c1-160
grep -q '^\[' "$place/log.txt" || tail -5 "$place/log.txt"
