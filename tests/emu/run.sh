#!/bin/sh
# Tests of the emulation itself, in its three builds: tests/emu/run.sh [plain] [checker] [asan]
# CXX names the compiler, EMU_BUILD the build folder (default build/emu of the repository).
here=$(cd "$(dirname "$0")" && pwd)
build=${EMU_BUILD:-$here/../../build/emu}
cxx=${CXX:-g++}
[ $# -gt 0 ] || set -- plain checker asan
passed=0 failed=0 skipped=0

# Several objects and one program, below the folder of this build.
build_tests() {
    out=$build/$1
    sh "$here/build.sh" "$1" "$out" && . "$out/flags.sh" && mkdir -p "$out/tests" || return 1
    for source in test_emu test_streams test_nccl test_ptx test_ptx_values test_ptx_flight; do
        $cxx $EMU_HOST -Wall -Wextra -Wshadow -I"$here" -c "$here/$source.cpp" -o "$out/tests/$source.o" || return 1
    done
    $cxx $EMU_CU -Wall -Wextra -Wshadow -I"$here" -c "$here/test_kernels.cu" -o "$out/tests/test_kernels.o" || return 1
    $cxx "$out"/tests/*.o "$out/libemu.a" $EMU_LINK -o "$out/test_emu"
}

for mode in "$@"; do
    echo "emu, $mode:"
    if ! build_tests "$mode"; then
        echo "cannot build $mode"
        failed=$((failed + 1))
        continue
    fi
    # Reports that tests provoke go to stderr; they matter only when something fails.
    "$out/test_emu" > "$out/log" 2> "$out/reports"
    status=$?
    grep -v ' passed, ' "$out/log"
    counts=$(grep ' passed, ' "$out/log")
    set_counts=$(echo "$counts" | sed -n 's/\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped/p=\1 f=\2 s=\3/p')
    p=0 f=0 s=0
    eval "$set_counts"
    if [ -z "$counts" ] || { [ $status -ne 0 ] && [ "$f" -eq 0 ]; }; then
        echo "ended with status $status:"
        tail -n 20 "$out/reports"
        f=$((f + 1))
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
