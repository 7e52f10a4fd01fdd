#!/bin/sh
# Compiles the CUDA unit for every architecture of CUDA_ARCHS with warnings as errors, and prints what each kernel uses:
# registers, shared memory and stack per thread. A kernel that spills registers fails the build. First, cuda_ptx.sh
# looks for products that nvcc fuses with sums.
#
#   sh tools/cuda_build.sh [FOLDER OF xdistill_cuda.cu] [OBJECT]      CUDA_FLAGS: more flags for nvcc
header=${1:-.} object=${2:-build/xdistill_cuda.o}
gencode=
for arch in ${CUDA_ARCHS:-80 90 100}; do gencode="$gencode -gencode arch=compute_$arch,code=sm_$arch"; done
mkdir -p "$(dirname "$object")"

sh "$(dirname "$0")/cuda_ptx.sh" "$header" "${object%.o}.ptx" || exit 1
"${NVCC:-nvcc}" -O2 ${CUDA_FLAGS:-} $gencode -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror -Xptxas -v -I"$header" \
    -c "$header/xdistill_cuda.cu" -o "$object" >"$object.log" 2>&1
status=$?
if [ $status -ne 0 ]; then
    grep -v 'ptxas info\|bytes stack frame' "$object.log"
    exit $status
fi

awk '
    /Compiling entry function/ { split($0, word, "\047"); kernel = word[2]; arch = word[4] }
    /Function properties for/ { of = $NF }
    /bytes stack frame/ && of == kernel { stack = $1; spills = $5 + $9 }
    /Used [0-9]+ registers/ {
        registers = $5; shared = 0
        for (i = 6; i <= NF; i++) if ($i ~ /^smem/) shared = $(i - 2)
        print arch, registers, shared, stack, spills, kernel
    }' "$object.log" | sort -k6 -k1,1V | { command -v c++filt >/dev/null 2>&1 && c++filt -p || cat; } |
awk '
    BEGIN { printf "%-8s %9s %7s %6s %7s  %s\n", "arch", "registers", "shared", "stack", "spilled", "kernel" }
    {
        name = $6
        for (i = 7; i <= NF; i++) name = name " " $i
        printf "%-8s %9d %7d %6d %7d  %s\n", $1, $2, $3, $4, $5, name
        spilled += $5 > 0
        kernels++
    }
    END {
        if (spilled) { print spilled " kernels spill registers"; exit 1 }
        print kernels " kernels, none spills registers"
        exit !kernels
    }'
