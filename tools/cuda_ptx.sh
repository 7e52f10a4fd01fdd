#!/bin/sh
# Looks for products that nvcc fuses with sums where bits are promised, which no emulation sees: compiles the CUDA unit to PTX,
# for the first of CUDA_ARCHS, and fails when a kernel of the list in cuda_ptx.txt, or a function that the header marks
# XD_SCALAR, has a fused multiply-add that the source does not have, or a product or sum that may become part of one.
#
#   sh tools/cuda_ptx.sh [FOLDER OF xdistill_cuda.cu] [PTX]
header=${1:-.} ptx=${2:-build/xdistill_cuda.ptx} tools=$(dirname "$0")
command -v c++filt >/dev/null 2>&1 || { echo "skipped: products joined to sums are looked for with c++filt"; exit 0; }
mkdir -p "$(dirname "$ptx")"

# The PTX of the unit and of every function that the header marks XD_SCALAR, as kernels use them: inlined, and alone.
compile_ptx() {
    scalars=$(sed -n 's/^XD_SCALAR [^(]*[ *]\(xd_[a-z0-9_]*\)(.*/\1/p' "$header/xdistill.h")
    {
        echo '#include "cuda_ptx.h"'
        echo '#include "xdistill_cuda.cu"'
        echo 'extern "C" __device__ void *ptx_scalars[];'
        echo 'void *ptx_scalars[] = {'
        for name in $scalars; do echo "    (void *)$name,"; done
        echo '};'
    } >"$ptx.cu"
    "${NVCC:-nvcc}" -O2 -arch="compute_$1" -rdc=true -ptx -I"$header" -I"$tools" "$ptx.cu" -o "$ptx" >"$ptx.log" 2>&1 ||
        { cat "$ptx.log"; return 1; }
    awk -f "$tools/cuda_ptx.awk" "$ptx" | { c++filt -p || cat; } | sed 's/^_INTERNAL_[^:]*:://; s/^(anonymous namespace):://' >"$ptx.sums"
    for name in $scalars; do grep -q "^$name	" "$ptx.sums" || { echo "$name is not in $ptx"; return 1; }; done
}

# Compares them with the list: a function that may be fused fails, and a line of the list that names no function fails too.
check_ptx() {
    { grep -v '^#' "$tools/cuda_ptx.txt"; sed -n 's/^\(xd_[a-z0-9_]*\)	.*/\1/p' "$ptx.sums"; } | awk -F '\t' '
        NR == FNR { name[FNR] = $1; fused[FNR] = $2; loose[FNR] = $3; functions = FNR; next }
        {
            pattern = $0
            gsub(/\*/, ".*", pattern)
            found = 0
            for (i = 1; i <= functions; i++) {
                if (name[i] !~ "^" pattern "$") continue
                found++
                if (fused[i] + loose[i] == 0) continue
                print name[i] ": " fused[i] + 0 " fused multiply-adds that nobody wrote, " loose[i] + 0 " products and sums without .rn"
                bad++
            }
            if (!found) { print $0 ": no such kernel"; bad++ }
            checked += found
        }
        END {
            if (bad) exit 1
            print checked " kernels and functions join no product to a sum"
        }' "$ptx.sums" -
}

set -- ${CUDA_ARCHS:-80 90 100}
compile_ptx "$1" && check_ptx
