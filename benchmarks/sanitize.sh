#!/bin/bash
# compute-sanitizer over one small shape of each hand-written kernel: memcheck, then racecheck (shared memory).
# Prints one line a run; the whole output goes to the folder named first (default: sanitizer/).
# Tests allocate every tensor by itself, so that a read beyond one is a read beyond an allocation.
out=${1:-sanitizer}
tool=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer /usr/local/cuda*/compute-sanitizer/compute-sanitizer 2>/dev/null | head -1)
if [ -z "$tool" ]; then
  echo "compute-sanitizer is not here: it comes with the CUDA toolkit (package cuda-sanitizer)"
  exit 1
fi
mkdir -p "$out"
declare -A tests=(
  [gemv]="test_gemv_gpu.py::test_norm_bias_residual_and_silu_are_fused[int4:128-dtype1]"
  [gemv-sparse]="test_gemv_gpu.py::test_norm_bias_residual_and_silu_are_fused[sparse-w8a8-dtype1]"
  [gemv-fp8]="test_gemv_gpu.py::test_norm_bias_residual_and_silu_are_fused[fp8-dtype1]"
  [gemm]="test_gemm_gpu.py::test_norm_bias_residual_and_silu_are_fused[w8a8]"
  [gemm-sparse]="test_gemm_gpu.py::test_norm_bias_residual_and_silu_are_fused[sparse-int4:128]"
  [vptq]="test_vptq_gpu.py::test_rows[4]"
  [qkv_attention]="test_qkv_attention_gpu.py::test_a_mailbox_that_longer_sequences_have_used_serves_others"
)
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=src
for check in memcheck racecheck; do
  for name in gemv gemv-sparse gemv-fp8 gemm gemm-sparse vptq qkv_attention; do
    log=$out/$check-$name.txt
    timeout 120 "$tool" --tool $check --target-processes all python -m pytest -q -m gpu "tests/kernels/${tests[$name]}" >"$log" 2>&1
    echo "$check $name: $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -1) $(grep -E '[0-9]+ (passed|failed|error)' "$log" | tail -1)"
  done
done
