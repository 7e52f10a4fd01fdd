#!/bin/sh
# One script for a machine with a GPU: builds the CUDA unit for it, runs its tests and compute-sanitizer, the golden
# vectors when there are some, and the benchmarks; ends with one line. Needs the CUDA toolkit and a C compiler; minutes.
#
#   sh tools/gpu_check.sh            or: make gpu-check
#   GOLDEN=dir                       folder of golden vectors, for the GPU (within the tests) and for the CPU
#   GPU_CHECK_LOG=file               keeps everything that is printed
#   TORCH_PYTHON=file                a python with PyTorch, and Liger if it is to be compared; python3
cd "$(dirname "$0")/.." || exit 1
nvcc=${NVCC:-nvcc}
log=${GPU_CHECK_LOG:-build/gpu_check.log}
mkdir -p "$(dirname "$log")"
: >"$log"
failures=

if ! command -v "$nvcc" >/dev/null 2>&1 || ! nvidia-smi -L >/dev/null 2>&1; then
    echo "skipped: needs nvcc and a GPU"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi

# Runs a step with its seconds; a failure is remembered and the rest goes on.
step() {
    name=$1
    shift
    begin=$(date +%s)
    "$@" >"$log.step" 2>&1
    status=$?
    cat "$log.step" >>"$log"
    echo "$name: $([ $status -eq 0 ] && echo ok || echo FAILED), $(($(date +%s) - begin)) s; $(tail -n 1 "$log.step")"
    [ $status -eq 0 ] || { failures="$failures $name"; tail -n 20 "$log.step"; }
}

# What every result carries.
{
    date -u
    git rev-parse HEAD 2>/dev/null
    nvidia-smi --query-gpu=name,driver_version,compute_cap,memory.total,clocks.sm,clocks.mem,power.limit --format=csv
    "$nvcc" --version | tail -n 2
} | tee -a "$log"

capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
step build env CUDA_ARCHS="$capability" NVCC="$nvcc" sh tools/cuda_build.sh . build/xdistill_cuda.o
step tests env CUDA_HEADER=. CUDA_SANITIZE=1 NVCC="$nvcc" sh tests/cuda/run.sh gpu
[ -d "${GOLDEN:-../shared/golden}" ] && step golden make --no-print-directory golden
for source in bench/*.cu; do
    [ -e "$source" ] || continue
    program=build/$(basename "$source" .cu)
    libraries=$(sed -n 's/^ \*  *nvcc .*xdistill_cuda.cu \(-l.*\) -o .*/\1/p' "$source")
    step "build $source" "$nvcc" -O3 -arch="sm_$capability" -I. "$source" xdistill_cuda.cu $libraries -o "$program"
    step "$source" "$program" -J "$log.jsonl"
done

if "${TORCH_PYTHON:-python3}" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
    step "beside PyTorch" make --no-print-directory bench-torch-gpu ARGS="--rounds 3 -J $log.jsonl"
else
    echo "beside PyTorch: skipped, no PyTorch that can use the GPU"
fi

if [ -n "$failures" ]; then
    echo "failed:$failures; everything is in $log"
    exit 1
fi
echo "the GPU passes; everything is in $log"
