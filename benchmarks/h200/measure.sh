#!/usr/bin/env bash
# Make the rows of this folder again, a piece at a time:
#
#     benchmarks/h200/measure.sh PIECE...         from the repository's root, on the machine with the GPU
#
# Rows go to $OUT (default: this folder). A piece that finds its file there, or in $RESUME, runs only what is missing.
set -euo pipefail
root=$PWD PYTHONPATH=${PYTHONPATH:-}
out=$(realpath -m "${OUT:-benchmarks/h200}")
resume=$(realpath -m "${RESUME:-scratch/resume}")
paths=$root/src
for path in ${PYTHONPATH//:/ }; do paths+=:$(realpath -m "$path"); done
export PYTHONPATH=$paths PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1
mkdir -p "$out"
cd "$out"  # so that the command in each environment row names its file and no folder

logs=${TMPDIR:-/tmp}

logged() { # FILE COMMAND...: how long it took and how many rows there are; its last words if it failed
  local log=$logs/${1%.jsonl}.log
  "${@:2}" >"$log" 2>&1 || { echo "$1: failed"; tail -n 5 "$log"; }
  echo "$1: $(cat "$1" 2>/dev/null | wc -l) lines after $SECONDS s"
}

run() { # FILE ARGUMENTS...: flyweight, appending to FILE
  if [ -f "$resume/$1" ] && [ ! -f "$1" ]; then cp "$resume/$1" "$1"; fi
  logged "$1" python3 -m flyweight "${@:2}" -o "$1"
}

script() { # FILE SCRIPT ARGUMENTS...: one of benchmarks/*.py, appending to FILE
  logged "$1" python3 "$root/benchmarks/$2" "$1" "${@:3}"
}

grid() { for k in 1024 2048 4096 8192 16384; do for n in 1024 4096 8192 14336 28672 53248; do printf '%s' "${k}x$n,"; done; done; }

qwen2() { # SIZE FILE OPTIONS...: the four schemes of the document on one model
  local preset=preset:qwen2-$1
  run "004-qwen2-$2.jsonl" bench speed "BF16=$preset:bf16" "GPTQ-Int8=$preset:w8a16" "GPTQ-Int4=$preset:int4-sym" \
    "AWQ=$preset:int4" --repeats 1 "${@:3}"
}

piece() {
  local q4=preset:qwen3-4b q8=preset:qwen3-8b
  # vLLM with CUDA graphs and without its compiler, which takes minutes to start
  local graphs='compilation_config={"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[1,8]}'
  case $1 in
    000) run 000-vptq.jsonl bench kernel --shapes seed-000 --layout seed ;;
    001) run 001-vptq.jsonl bench kernel --shapes seed-001 --layout seed ;;
    vptq-large) run vptq-65536.jsonl bench kernel --format vptq --codebooks 65536+256 --shapes "$(grid)" ;;
    002) run 002-qwen3-4b.jsonl bench latency original=$q4:bf16 w8a16_awq=$q4:w8a16 w8a16_smooth_awq=$q4:w8a16 \
      w8a16_sparse_awq=$q4:sparse-w8a16 w8a8_smooth_ptq=$q4:w8a8 w8a8_smooth_gptq=$q4:w8a8 \
      w8a8_sparse_smooth_gptq=$q4:sparse-w8a8 --repeats 3 ;;
    8b) run latency-qwen3-8b.jsonl bench latency $q8:bf16 $q8:int4 $q8:w8a8 $q8:vptq --repeats 3 ;;
    steps) run steps.jsonl bench step $q8:bf16 $q8:int4 $q8:w8a8 $q4:bf16 $q4:w8a8 $q4:w8a16 ;;
    8b-fp16) run latency-qwen3-8b-fp16.jsonl bench latency $q8:int4 --dtype float16 --workload decode_bound --repeats 3 ;;
    003) run 003-native.jsonl bench serve awq=$q8:int4 --model-name Qwen3-8B-AWQ --concurrency 1 --requests 20 --input 128 \
      --output 64 ;;
    003-transformers) run 003-transformers.jsonl bench serve awq=$q8:int4 bf16=$q8:bf16 --model-name Qwen3-8B-AWQ \
      --backend transformers --concurrency 1 --requests 5 --warm-up 2 --input 128 --output 64 ;;
    003-vllm) for name in awq awq_marlin; do run 003-vllm.jsonl bench serve awq=$q8:int4 --model-name Qwen3-8B-AWQ \
      --backend vllm --quantization $name --concurrency 1 --requests 5 --warm-up 2 --input 128 --output 64 \
      --option gpu_memory_utilization=0.6 --option "$graphs"; done ;;
    cross-check) script cross-check-vllm.jsonl cross_check.py --option gpu_memory_utilization=0.6 \
      "$graphs" ;;
    004-7b) qwen2 7b 7b ;;
    004-7b-long) qwen2 7b-yarn 7b-long --model-name qwen2-7b --input 63488 --input 129024 ;;
    004-small) qwen2 0.5b 0.5b; qwen2 1.5b 1.5b ;;
    004-transformers) for size in 0.5b 1.5b 7b; do
      qwen2 $size $size-transformers --backend transformers --output 128 --no-check; done ;;
    startup) script startup.jsonl startup.py --folder "${SHM:-/dev/shm}/qwen3-8b-awq" ;;
    prefill) script prefill.jsonl prefill_passes.py ;;
    real-model) script real-model.jsonl real_model.py --model "${MODEL:-smollm2-135m}" --text "$TEXT" \
      --work "${TMPDIR:-/tmp}/real-model" ;;
    profile) logged 003-profile.jsonl python3 -m flyweight profile $q8:int4 --input 1024 --output 64 -o "$logs/003-profile"
      cp "$logs/003-profile/result.jsonl" 003-profile.jsonl ;;
    chain) run chain.jsonl bench kernel --chain qwen3-8b --format w4a16,w8a16,w8a8,bf16 --rows 1 ;;
    attention) run attention.jsonl bench kernel --format attention --rows 1,16 ;;
    rows) run rows.jsonl bench kernel --format w4a16,w8a16,w8a8 --symmetric --shapes 4096x24576,12288x4096 --rows 1,8,32,64,2048 ;;
    *) echo "no piece $1"; return 1 ;;
  esac
}

for name in "$@"; do piece "$name"; done
