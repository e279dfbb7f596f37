#!/usr/bin/env bash
# Make the rows of this folder again, a piece at a time:
#
#     benchmarks/h200/measure.sh PIECE...         from the repository's root, on the machine with the GPU
#     TRY=1 OUT=/tmp/try benchmarks/h200/measure.sh all       does every piece run? tiny models and short work, on a CPU too
#
# Rows go to $OUT (default: this folder), one file for each document. A piece that finds its file there, or in $RESUME, runs
# only what is missing, so a run that was cut off is started again as it was; of rows that have no check, the check alone.
set -euo pipefail
root=$PWD
out=$(realpath -m "${OUT:-benchmarks/h200}")
resume=$(realpath -m "${RESUME:-scratch/resume}")
paths=$root/src
for path in $(tr : ' ' <<<"${PYTHONPATH:-}"); do paths+=:$(realpath -m "$path"); done
export PYTHONPATH=$paths PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1
mkdir -p "$out"/{options,families}
arrivals=$(realpath -m "${TRACE:-trace.csv}")
cd "$out"  # so that the command in each environment row names its file and no folder
plan=$(mktemp) traces=$(mktemp -d)
trap 'mv "$traces/result.jsonl" 003-profile.jsonl 2>/dev/null || true; rm -rf "$plan" "$traces" trace.csv' EXIT

add() { # NAME SECONDS COMMAND...: one line of the plan, with what must have ended by then
  printf '%q ' "$@" >>"$plan"
  echo >>"$plan"
}

take() { # FILE: what an earlier run left of it
  if [ -f "$resume/$1" ] && [ ! -f "$1" ]; then cp "$resume/$1" "$1"; fi
}

flyweight() { # NAME SECONDS FILE ARGUMENTS...: rows of `flyweight ARGUMENTS` to FILE
  take "$3"
  add "$1" "$2" flyweight "${@:4}" -o "$3"
}

script() { # NAME SECONDS FILE SCRIPT ARGUMENTS...: one of benchmarks/*.py
  take "$3"
  add "$1" "$2" "$root/benchmarks/$4" "$3" "${@:5}"
}

grid=$(for k in 1024 2048 4096 8192 16384; do for n in 1024 4096 8192 14336 28672 53248; do printf '%s' "${k}x$n,"; done; done)
q2=preset:qwen2 q4=preset:qwen3-4b q8=preset:qwen3-8b moe=preset:qwen2-57b-a14b q72=preset:qwen2-72b q32=preset:qwen1.5-32b
long=preset:qwen3-8b-yarn
first=seed-000 second=seed-001 chain=qwen3-8b shapes=qwen3-8b rows=1,8,16,32,64,256,2048,4096,16384
older=1,2,4,8,16,32,64,2048,8192
checked=--no-check; if [ -n "${CHECK:-}" ]; then checked=--check; fi
latency=() lengths=() fewer=(--output 128) serve=(--requests 20 --input 128 --output 64) attention=()
profile=(--input 1024 --output 64) real=() startup=()
read -ra prompts <<<"${PROMPTS:---prompts 100}"  # 1,000 take minutes
read -ra sizes <<<"${SIZES:-7b 1.5b 0.5b}"  # of document 004, in this order
sampled=options/sampled.jsonl drawn=(--sampling temperature=0.7,top_p=0.9 --no-check)
speeds=(gemma-3-12b:int4 gpt-oss-20b:mxfp4 qwen3-next-80b-a3b:int4 glm-4.5-air:int4 deepseek-v2-lite:bf16)
batches=(--workload decode_bound --workload high_concurrency)
contexts=(--workload long_4k_x32 --workload long_16k_x8 --workload long_64k)
arrive=(--time-scale 4.93 --requests 200)
if [ -n "${TRY:-}" ]; then
  batches=(--workload interactive) contexts=(--workload interactive) arrive=(--requests 2)
  q2=preset:tiny q4=preset:tiny q8=preset:tiny moe=preset:tiny-moe q72=preset:tiny q32=preset:tiny long=preset:tiny speeds=(tiny:int4)
  first=256x512 second=512x256 grid=256x256 chain=tiny shapes=256x512 rows=1,8 older=1,8
  latency=(--workload interactive --workload medium_batch) lengths=(--input 1 --input 40 --output 24) fewer=("${lengths[@]}")
  serve=(--requests 3 --input 16 --output 8) prompts=(--prompts 4 --input 20 --output 8) profile=(--input 64 --output 8)
  attention=(--shapes tiny --contexts 64) startup=(--model preset:tiny:int4)
  real=(--requests 5 --checks storm logits --formats bf16 awq-int4) sizes=("")
fi

speed() { # NAME SECONDS PRESET OPTIONS...: the four schemes of document 004 on one model
  flyweight "$1" "$2" 004-qwen2.jsonl bench speed "BF16=$3:bf16" "GPTQ-Int8=$3:w8a16" "GPTQ-Int4=$3:int4-sym" "AWQ=$3:int4" \
    --repeats 1 "${@:4}"
}

piece() {
  local kernels=kernels.jsonl serving=003-qwen3-8b.jsonl few=(--requests 5 --warm-up 2)
  local awq=(awq=$q8:int4 --model-name Qwen3-8B-AWQ --concurrency 1)
  # vLLM with CUDA graphs and without its compiler, which takes minutes to start
  local graphs='compilation_config={"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[1,8]}'
  case $1 in
    000) flyweight 000 60 000-vptq.jsonl bench kernel --format vptq --shapes $first ;;
    001) flyweight 001 60 001-vptq.jsonl bench kernel --format vptq --shapes $second ;;
    002) flyweight 002 150 002-qwen3-4b.jsonl bench latency original=$q4:bf16 w8a16_awq=$q4:w8a16 w8a16_smooth_awq=$q4:w8a16 \
      w8a16_sparse_awq=$q4:sparse-w8a16 w8a8_smooth_ptq=$q4:w8a8 w8a8_smooth_gptq=$q4:w8a8 \
      w8a8_sparse_smooth_gptq=$q4:sparse-w8a8 --repeats 3 "${latency[@]}" ;;
    8b) flyweight 8b 150 latency-qwen3-8b.jsonl bench latency $q8:bf16 $q8:int4 $q8:w8a8 $q8:vptq --repeats 3 "${latency[@]}" ;;
    8b-fp16) flyweight 8b-fp16 60 latency-qwen3-8b.jsonl bench latency $q8:int4 --dtype float16 --workload decode_bound ;;
    steps)
      flyweight steps 120 steps.jsonl bench step $q8:bf16 $q8:int4 $q8:w8a8 $q4:bf16 $q4:w8a8 $q4:w8a16
      flyweight steps-vptq 40 steps.jsonl bench step $q8:vptq ;;
    003) flyweight 003 60 $serving bench serve "${awq[@]}" "${serve[@]}" ;;
    003-transformers) # AWQ becomes a row that says why not
      flyweight 003-transformers-awq 60 $serving bench serve "${awq[@]}" --backend transformers "${serve[@]}" "${few[@]}"
      flyweight 003-transformers-bf16 90 $serving bench serve bf16=$q8:bf16 --model-name Qwen3-8B --concurrency 1 \
        --backend transformers "${serve[@]}" "${few[@]}" ;;
    003-vllm) for name in awq awq_marlin; do flyweight 003-vllm-$name 200 $serving bench serve "${awq[@]}" --backend vllm \
      --quantization $name "${serve[@]}" "${few[@]}" --option gpu_memory_utilization=0.6 --option "$graphs"; done ;;
    vllm-prefill) for scheme in int4 w8a8 bf16; do flyweight vllm-prefill-$scheme 100 vllm-prefill.jsonl bench latency $q8:$scheme \
      --backend vllm --workload prefill_bound --workload long_context --option gpu_memory_utilization=0.6 \
      --option "$graphs"; done ;;
    cross-check) script cross-check 200 cross-check-vllm.jsonl workshop/cross_check.py --option gpu_memory_utilization=0.6 "$graphs" ;;
    profile) add profile 60 flyweight profile $q8:int4 "${profile[@]}" -o "$traces" ;;
    004) for size in "${sizes[@]}"; do speed 004-$size 200 $q2${size:+-}$size "${lengths[@]}"; done ;;
    004-transformers) for size in "${sizes[@]}"; do speed 004-transformers-$size 100 $q2${size:+-}$size --backend transformers \
      "${fewer[@]}"; done ;;
    004-vllm) for size in "${sizes[@]}"; do speed 004-vllm-$size 300 $q2${size:+-}$size --backend vllm "${lengths[@]}" \
      --option gpu_memory_utilization=0.6 --option "$graphs"; done ;;
    004-long) speed 004-long 250 $q2-7b-yarn --model-name qwen2-7b --input 63488 --input 129024 ;;
    57b) flyweight 57b 200 004-qwen2.jsonl bench speed GPTQ-Int4=$moe:int4-sym BF16=$moe:bf16 --repeats 1 "${fewer[@]}" ;;
    72b) flyweight 72b 390 004-qwen2.jsonl bench speed GPTQ-Int4=$q72:int4-sym GPTQ-Int8=$q72:w8a16 AWQ=$q72:int4 \
      --repeats 1 "${fewer[@]}" ;;
    72b-long) # the weights and kernels of 72b under the same name: one check is of both
      flyweight 72b-long 500 004-qwen2.jsonl bench speed GPTQ-Int4=$q72-yarn:int4-sym GPTQ-Int8=$q72-yarn:w8a16 \
      --model-name qwen2-72b --repeats 1 --input 63488 --input 129024 --output 128 ;;
    document-003) for name in 003 003-transformers 003-vllm profile; do piece $name; done ;;
    document-004) for name in 004 004-long 004-transformers 004-vllm 57b 72b 72b-long throughput; do piece $name; done ;;
    throughput) for model in $moe $q32; do flyweight throughput-${model#*:} 200 004-qwen2.jsonl bench throughput BF16=$model:bf16 \
      "${prompts[@]}" --repeats 1; done ;;
    chain)
      flyweight chain 90 $kernels bench kernel --chain $chain --format w4a16,w8a16,w8a8,bf16 --rows 1
      flyweight chain-fp16 60 $kernels bench kernel --chain $chain --format w4a16,w8a16 --dtype fp16 --rows 1 ;;
    attention) flyweight attention 60 $kernels bench kernel --format attention --rows 1,16 "${attention[@]}" ;;
    rows) flyweight rows 200 $kernels bench kernel --format w4a16,w8a16,w8a8,fp8 --symmetric --shapes $shapes --rows $rows ;;
    vptq-large) flyweight vptq-large 90 $kernels bench kernel --format vptq --codebooks 65536+256 --shapes "$grid" ;;
    startup) script startup 120 latency-qwen3-8b.jsonl startup.py --folder "${SHM:-/dev/shm}/qwen3-8b-awq" "${startup[@]}" ;;
    prefill) script prefill 120 prefill.jsonl prefill_passes.py --zeros ;;
    prefill-4b) script prefill-4b 120 prefill.jsonl prefill_passes.py --zeros --model $q4:w8a8 $q4:bf16 $q4:w8a16 --cases 2048 16384 ;;
    options) for name in vptq-bytes trellis trace sampled long; do piece $name; done ;;
    vptq-bytes) for head in int8 int4; do flyweight vptq-bytes-$head 60 options/vptq-bytes.jsonl bench latency $q8:vptq \
      --option vptq_books=int8 --option head=$head --workload decode_bound --repeats 3 --no-check --backend native; done ;;
    trellis) flyweight trellis 60 options/trellis.jsonl bench latency $q8:int4 $q8:trellis2 $q8:trellis3 \
      --batch 1 --input 256 --output 128 --repeats 2 --no-check --backend native ;;
    trace) # arrivals as in docs/serve.md; TRACE is the file
      ln -sf "$arrivals" trace.csv
      flyweight trace 60 options/serve-trace.jsonl bench serve $q8:int4 --trace trace.csv "${arrive[@]}" --warm-up 2 \
        --no-check --no-samples ;;
    sampled)
      flyweight sampled-latency 30 $sampled bench latency $q8:int4 "${drawn[@]}" "${batches[@]}" \
        --repeats 2 --backend native
      flyweight sampled-serve 30 $sampled bench serve $q8:int4 "${drawn[@]}" --rate 8 --requests 48 --input 256 --output 128 --warm-up 2 \
        --no-samples
      flyweight sampled-throughput 30 $sampled bench throughput $q8:int4 "${drawn[@]}" --prompts 100 --repeats 1 --backend native ;;
    long) for scheme in int4 w8a8 bf16; do for kind in model fp8 int8; do piece long-$scheme-$kind; done; done ;;
    long-*) # long-SCHEME-KIND; 45 s where warm-long has compiled, half as long again where not: 44 to 50 kernels. The dear
      # workload is 4k x 32, 15 s of it, then 16k x 8 and 64k x 1. A row is in the file as soon as it is measured;
      # CHECK=1 checks tokens too, also of rows that are there.
      [[ $1 =~ ^long-(int4|w8a8|bf16)-(model|fp8|int8)$ ]] || { echo "no piece $1"; return 1; }
      flyweight $1 100 options/long-contexts.jsonl bench latency $long:${BASH_REMATCH[1]} --kv-dtype ${BASH_REMATCH[2]} \
        "${contexts[@]}" --repeats 1 $checked --backend native ;;
    families) take families/speed.jsonl; add families 300 "$root/benchmarks/families.py" speed "${speeds[@]}" --out families/speed.jsonl ;;
    real-model) script real-model 300 real-model.jsonl real_model.py --model "${MODEL:-smollm2-135m}" --text "$TEXT" \
      --work "${TMPDIR:-/tmp}/real-model" "${real[@]}" ;;
    older) for name in steps latency experts chain rows vptq; do piece older-$name; done ;;
    older-*) # FLYWEIGHT_PRETEND=sm_80 or sm_89: the code and the limits of cards that are not here; their rows name the card
      : "${FLYWEIGHT_PRETEND:?name the GPU to imitate, such as sm_80}"
      local file=older-gpus${FLYWEIGHT_OVERLAP:+-overlap}.jsonl one=  # FLYWEIGHT_OVERLAP=1: launches overlap
      case ${1#older-} in
        steps) flyweight $1 60 $file bench step $q8:bf16 $q8:w8a16 $q8:int4 --batch 1 ;;
        latency) flyweight $1 60 $file bench latency $q8:int4 $q8:w8a16 $q8:bf16 --batch 1 --input 128 --output 64 --no-check ;;
        experts) flyweight $1 90 $file bench step $moe:int4 --batch 1 ;;
        chain) flyweight $1 60 $file bench kernel --chain $chain --format bf16,w8a16,w4a16 --rows 1 ;;
        rows) # sm_80:132 beside vLLM's Marlin, where it is installed
          flyweight $1 200 $file bench kernel --format bf16,w4a16,w8a16,w8a8 --symmetric --shapes $shapes --rows $older ;;
        vptq) for one in $first $second; do flyweight $1-$one 120 $file bench kernel --format vptq --shapes $one; done ;;
        *) echo "no piece $1"; return 1 ;;
      esac ;;
    warm-long) # for long-*, as `warm`
      for kind in model fp8 int8; do add warm-long-$kind 200 flyweight compile $long:{int4,w8a8,bf16} --kv-dtype $kind \
        --steps 1,8,32 --passes 8192,14592,15616,16640; done ;;
    warm) # compiles what the others run, on all cores and without the GPU: beside tests, never beside a measurement
      for model in $q8:{vptq,int4,bf16,w8a8} $q4:{w8a16,w8a8,bf16,sparse-w8a16,sparse-w8a8}; do
        add "warm-${model#*:}" 200 flyweight compile $model --steps 1,8,32,64 --passes 128,256,1024,2048,8192,16384; done
      for size in "${sizes[@]}"; do for scheme in int4-sym int4 w8a16 bf16; do
        add "warm-$size-$scheme" 200 flyweight compile $q2${size:+-}$size:$scheme --steps 1 --passes 1,6144,14080,14336,16640; done; done
      add warm-vptq 200 flyweight bench kernel --format vptq --shapes $first,$second --compile-only ;;
    all) for name in 000 001 002 8b 8b-fp16 steps 003 003-transformers profile 004 004-transformers 57b 72b throughput chain \
      attention rows vptq-large startup real-model; do piece $name; done ;;
    *) echo "no piece $1"; return 1 ;;
  esac
}

for name in "$@"; do piece "$name"; done
busy=$(nvidia-smi --query-gpu=utilization.gpu --format=csv,noheader,nounits 2>/dev/null | sort -n | tail -1 || true)
if [[ ${busy:-0} =~ ^[0-9]+$ && ${busy:-0} -gt 5 && -z "${BUSY:-}" ]]; then
  echo "other processes keep the GPU $busy % busy (nvidia-smi names them): end them, or set BUSY=1 if times do not matter" >&2
  exit 1
fi
python3 "$root/benchmarks/workshop/commands.py" "$plan"
