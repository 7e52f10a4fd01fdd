#!/bin/sh
# Plants faults in copies of the unit's PTX, and shows which tests find each. Run `make test-cuda-ptx` first.
#
#   sh tests/emu/planted_ptx.sh [FOLDER OF THE PROGRAMS AND unit.ptx]      default: build/cuda/ptx
#
# The g++ emulation misses all five: it compiles the C++ twins of inline PTX, and never sees what nvcc makes of the rest.
folder=${1:-build/cuda/ptx}
faulty=$folder/planted.ptx missed=0

# Runs a program on a copy that sed has changed. The copy must differ, and the program must fail.
plant() {
    title=$1 program=$2
    shift 2
    sed -E "$@" "$folder/unit.ptx" >"$faulty"
    if cmp -s "$folder/unit.ptx" "$faulty"; then
        echo "$title: nothing to change"
        missed=$((missed + 1))
    elif EMU_PTX=$faulty EMU_PTX_REQUIRE=1 timeout 300 "$folder/$program" >"$folder/planted.log" \
        2>"$folder/planted.reports"; then
        echo "$title: $program misses it"
        missed=$((missed + 1))
    else
        echo "$title: $program finds it:"
        sed -n 's/^FAILED *\([^ ]*\).*/    \1/p' "$folder/planted.log"
        head -n 1 "$folder/planted.reports" | cut -c 1-150 | sed 's/^/    reported: /'
    fi
    rm -f "$faulty"
}

EMU_PTX=$folder/unit.ptx EMU_PTX_REQUIRE=1 "$folder/test_cuda_loss" >"$folder/planted.log" 2>&1 ||
    { echo "test_cuda_loss fails without a fault"; exit 1; }
plant "the operands of an inline cvt are swapped" test_cuda_loss \
    -e 's/(cvt\.rn\.bf16x2\.f32 [^,]*), ([^,]*), ([^;]*);/\1, \3, \2;/'
plant "bf16 is rounded toward zero" test_cuda_loss -e 's/cvt\.rn\.bf16x2\.f32/cvt.rz.bf16x2.f32/'
plant "the losses of long rows have no barriers" test_cuda_ring \
    -e '/\.entry .*xdi_cuda_loss_ring_kernel/,/^}/{/bar\.sync/d;}'
plant "a wait for bulk copies has the wrong phase" test_cuda_ring \
    -e 's/(mbarrier\.try_wait\.parity.*), [^,;]*;/\1, 1;/'
plant "nothing waits for copies of columns" test_cuda_loss -e '/cp\.async\.wait_group/d'
[ $missed -eq 0 ]
