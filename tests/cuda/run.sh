#!/bin/sh
# Tests of the CUDA unit: tests/cuda/test_*.cpp, and the golden vectors through the unit's table.
#
#   sh tests/cuda/run.sh plain checker asan    on the emulation (tests/emu), in these builds; all three by default
#   sh tests/cuda/run.sh coverage              once each on the plain emulation; fails when less than 95 % of the unit's
#                                              device code ran. COVERAGE_LIST=1 prints what did not. Needs g++ and gcov
#   sh tests/cuda/run.sh ptx                   once each on the plain emulation, with kernels that nvcc made: its PTX is interpreted.
#                                              Needs nvcc; skipped, in words, without it
#   sh tests/cuda/run.sh cost                  each operation once in the same way, and its cost: counts and what a model makes of them
#                                              (tools/gpu_cost.py), under the budgets of bench/gpu_budget.txt. CUDA_ARCH: 90, 80 or 100
#   sh tests/cuda/run.sh host                  the time of a call with a thousand arrays on this host, which ends where a kernel would
#                                              be launched. HOST_OPERATIONS: a part of an operation's name, _list
#   sh tests/cuda/run.sh gpu                   compiled by nvcc and run on a GPU, by tools/gpu_check.sh --tests; skipped, in
#                                              words, without one
#
# The plain build runs every program twice: in plain order, and in a comparison of all orders of the threads, on streams that
# work in reverse and only when the program waits. The coverage has streams that work in order, and only when the program waits.
#
#   CUDA_TESTS         the programs (default: all)
#   CUDA_PLAIN_ORDER   0 leaves the run in plain order out, for callers that run the other builds too
#   CUDA_COMPARE       compare:N compares the first N launches of a kernel by each shape, and every 16th (default: all)
#   GOLDEN             the folder of vectors
#   CUDA_BUILD         the folder for what is built
#   EMU_BUILD          that for the emulation, where its own tests have it (default: beside the other)
#   CUDA_HEADER        where xdistill.h and xdistill_cuda.cu are: src, or . for the generated files; programs include src in both cases
#   CUDA_PTX           the unit's PTX for the mode ptx (default: made by nvcc)
#   CUDA_BUDGET        another file of budgets
#   COST_OPERATIONS    a part of an operation's name: only those
#   CUDA_LIBRARY       the library with private functions visible, for builds that do not sanitize it (default: compiled for each)
#   CUDA_OBJECTS       a folder for the programs' objects, which all builds share; asan then watches the unit alone (default: one for
#                      each build)
cd "$(dirname "$0")/../.." || exit 1
build=${CUDA_BUILD:-build/cuda}
emu=${EMU_BUILD:-$(dirname "$build")/emu}
header=${CUDA_HEADER:-src}
cxx=${CXX:-g++} cc=${CC:-cc}
compare=${CUDA_COMPARE:-compare}
tests=${CUDA_TESTS:-$(ls tests/cuda/test_*.cpp)}
golden=${GOLDEN:-../shared/golden}
[ -d "$golden" ] || golden=
warn="-Wall -Wextra"
passed=0 failed=0 skipped=0 tag= arch=

fail() {
    echo "$1"
    failed=$((failed + 1))
}

# Runs a program under a name, with settings of the emulation before it, and adds up what it says.
run() {
    title=$1
    shift
    env "$@" >"$out/log" 2>"$out/reports"
    status=$?
    counts=$(grep ' passed, ' "$out/log" | tail -n 1)
    p=0 f=0 s=0
    eval "$(echo "$counts" | sed -n 's/\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped/p=\1 f=\2 s=\3/p')"
    echo "  $title: ${counts:-no result}"
    grep -v ' passed, \|^skipped [0-9]' "$out/log"
    if [ $status -ne 0 ] && [ "$f" -eq 0 ]; then
        tail -n 20 "$out/reports"
        fail "  $title ended with status $status"
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

# The golden vectors under settings and with an option; tests/golden/golden.c lists what a GPU has no form of.
run_golden() {
    [ -n "$golden" ] || return
    left_out=$skipped
    run "golden$1" $2 "$out/golden" ${3:+"$3"} "$golden"
    skipped=$left_out
    [ -n "$1" ] || sed -n 's/^skipped/    left out/p' "$out/log"
}

run_golden_emulated() {
    # Host code that touches device memory dies here, so nothing of a case can fall back to the CPU.
    [ "$1" = asan ] && { run_golden ""; return; }
    run_golden "" EMU_HOST_FAULTS=1
    run_golden ", INVARIANT" "" --invariant
    [ "$1" = plain ] || return
    run_golden ", compared, lazy streams reversed" "EMU_ORDER=$compare EMU_STREAMS=lazy-reverse"
}

# An object by the compiler and flags given, unless there is one that is newer than what it may include. Another step may be at it.
object() {
    source=$1 object=$2
    shift 2
    [ -e "$object" ] && [ -z "$(find "$source" src tests/helpers tests/cuda tests/golden tests/emu/include -newer "$object" -type f | head -n 1)" ] && return
    case "$*" in
    *--coverage*) "$@" -c "$source" -o "$object" ;; # gcov finds its notes by the object's name
    *) "$@" -c "$source" -o "$object.$$" && mv "$object.$$" "$object" ;;
    esac
}

# Its objects: C, for the emulation by the flags given.
compile_golden() {
    [ -n "$golden" ] || return 0
    mkdir -p "$objects/golden.o" || return 1
    for source in tests/golden/*.c; do
        object "$source" "$objects/golden.o/$(basename "$source" .c).o" $cc -std=c99 -O1 -g "$@" $warn -DXDISTILL_IMPLEMENTED \
            -DXD_TEST_LAYERS -DXD_PRIVATE=extern -DGOLDEN_CUDA -Isrc -Itests/helpers || return 1
    done
}

# The library, the unit and the programs for a build of the emulation, the unit and the links with more flags; the
# library is C, and plain unless the whole build is sanitized.
build_emulated() {
    sh tests/emu/build.sh "$1" "$emu/$1" && . "$emu/$1/flags.sh" || return 1
    EMU_CU="$EMU_CU ${2:-}" EMU_LINK="$EMU_LINK ${2:-}" host= objects=${CUDA_OBJECTS:-$out}
    if [ "$1" = asan ] && [ -n "${CUDA_OBJECTS:-}" ]; then
        EMU_HOST=$(echo "$EMU_HOST" | sed 's/ -f[a-z-]*sanitize[^ ]*//g')
    elif [ "$1" = asan ]; then
        host="-fsanitize=address -fno-omit-frame-pointer" # of memory: whose it is
    fi
    mkdir -p "$out" "$objects" || return 1
    if [ -n "${CUDA_LIBRARY:-}" ] && [ -z "$host" ]; then
        cp "$CUDA_LIBRARY" "$out/library.o" || return 1
    else
        $cc -std=c99 -O1 -g $host -DXD_TEST_UNIT -I"$header" -c tests/build/implementation.c -o "$out/library.o" || return 1
    fi
    [ "$(cat "$out/header" 2>/dev/null)" = "$header" ] || rm -f "$out/unit.o" "$out"/unit*.ptx
    echo "$header" >"$out/header"
    object "$header/xdistill_cuda.cu" "$out/unit.o" $cxx $EMU_CU $warn -I"$header" || return 1
    for test in $tests; do
        name=$(basename "$test" .cpp)
        object "$test" "$objects/$name.o" $cxx $EMU_HOST -O1 $warn -Isrc -DXD_TEST_LAYERS -Itests/helpers || return 1
        $cxx "$objects/$name.o" "$out/unit.o" "$out/library.o" "$emu/$1/libemu.a" $EMU_LINK -lm -o "$out/$name" ||
            return 1
    done
    compile_golden $host -DXD_EMU -Itests/emu/include || return 1
    [ -z "$golden" ] || $cxx "$objects"/golden.o/*.o "$out/unit.o" "$out/library.o" "$emu/$1/libemu.a" $EMU_LINK \
        -lm -o "$out/golden"
}

# The examples use the generated files, so they run where those are tested. The first one is compiled as its own line
# says, with the library in it; the others share the library's object. Warnings are looked for elsewhere.
run_examples() {
    implemented= library=
    for source in examples/cuda/*.cu; do
        name=$(basename "$source" .cu)
        $cxx $EMU_HOST -O0 -w $implemented -x c++ -c "$source" -o "$out/$name.o" &&
            $cxx "$out/$name.o" "$out/unit.o" $library "$emu/$1/libemu.a" $EMU_LINK -lm -o "$out/$name" &&
            "$out/$name" || { fail "  $source failed"; continue; }
        passed=$((passed + 1))
        implemented=-DXDISTILL_IMPLEMENTED library=$out/library.o
    done
}

run_emulated() {
    out=$build/$1
    echo "cuda, $1:"
    build_emulated "$1" || { fail "cannot build $1"; return; }
    for test in $tests; do
        program=$out/$(basename "$test" .cpp)
        name=$(basename "$test" .cpp)
        [ "$1${CUDA_PLAIN_ORDER:-}" = plain0 ] || run "$name" "$program"
        [ "$1" = plain ] || continue
        run "$name, compared, lazy streams reversed" EMU_ORDER="$compare" EMU_STREAMS=lazy-reverse "$program"
    done
    run_golden_emulated "$1"
    [ "$1$header" != plain. ] || run_examples "$1"
}

# The unit's PTX for `arch`, unless there is one that is newer than its sources.
make_ptx() {
    [ -z "${CUDA_PTX:-}" ] || return 0
    ptx=$out/unit$tag.ptx
    [ -e "$ptx" ] && [ -z "$(find src "$header/xdistill_cuda.cu" "$header/xdistill.h" -newer "$ptx" -type f | head -n 1)" ] && return
    "${NVCC:-nvcc}" -O2 -arch="compute_$arch" -ptx -I"$header" "$header/xdistill_cuda.cu" -o "$ptx.$$" >"$out/nvcc.log" 2>&1 ||
        { cat "$out/nvcc.log"; return 1; }
    mv "$ptx.$$" "$ptx"
}

lacks_nvcc() {
    [ -z "${CUDA_PTX:-}" ] && ! command -v "${NVCC:-nvcc}" >/dev/null 2>&1 || return 1
    echo "skipped: needs nvcc"
    skipped=$((skipped + 1))
}

run_ptx() {
    lacks_nvcc && return
    out=$build/ptx ptx=${CUDA_PTX:-} arch=90 tag=
    echo "cuda, ptx:"
    build_emulated plain && make_ptx || { fail "cannot build for ptx"; return; }
    for test in $tests; do
        name=$(basename "$test" .cpp)
        run "$name" EMU_PTX="$ptx" EMU_PTX_REQUIRE=1 "$out/$name"
    done
    run_golden "" "EMU_PTX=$ptx EMU_PTX_REQUIRE=1"
}

# What ptxas says of the PTX, unless there is a log that is newer.
make_log() {
    log=$out/unit$tag.log
    [ "$log" -nt "$ptx" ] && return
    "${NVCC:-nvcc}" -arch="sm_$arch" -Xptxas -v -cubin "$ptx" -o "$out/unit.cubin" >"$log.$$" 2>&1 || { cat "$log.$$"; return 1; }
    mv "$log.$$" "$log"
    rm -f "$out/unit.cubin"
}

wrap_launch="-Wl,--wrap=_Z10emu_launchPK18cudaLaunchConfig_tRK15emu_kernel_call" # see cost.h

run_cost() {
    lacks_nvcc && return
    out=$build/ptx ptx=${CUDA_PTX:-} arch=${CUDA_ARCH:-90}
    [ "$arch" = 90 ] && tag= || tag=.$arch
    echo "cuda, cost:"
    golden= tests=tests/cuda/cost.cpp
    build_emulated plain "$wrap_launch" && make_ptx && make_log || { fail "cannot build for cost"; return; }
    report=$out/report$tag operations=$out/operations$tag
    rm -f "$report"
    env EMU_ARCH="$arch" EMU_PTX="$ptx" EMU_PTX_REQUIRE=1 EMU_PTX_REPORT="$report" "$out/cost" ${COST_OPERATIONS:-} >"$operations" ||
        { fail "  cost failed"; return; }
    ARCH=$arch python3 tools/gpu_cost.py "$report" "$operations" "$log" ${CUDA_BUDGET:-} || { fail "  over budget"; return; }
    passed=$((passed + 1))
}

run_host() {
    out=$build/plain golden= tests=tests/cuda/cost.cpp
    echo "cuda, host:"
    build_emulated plain "$wrap_launch" && "$out/cost" --host "${HOST_OPERATIONS:-_list}" || { fail "  host failed"; return; }
    passed=$((passed + 1))
}

# gcov counts for each place of the source, the awk script adds up and judges. Lines, so without optimisation.
run_coverage() {
    out=$build/coverage relative=$header
    header=$(cd "$header" && pwd) # gcov looks for the sources from another folder
    echo "cuda, coverage:"
    build_emulated plain "-O0 --coverage" || { fail "cannot build for coverage"; return; }
    rm -f "$out"/*.gcda "$out"/*.gcov
    for test in $tests; do run "$(basename "$test" .cpp)" EMU_STREAMS=lazy "$out/$(basename "$test" .cpp)"; done
    run_golden "" EMU_STREAMS=lazy
    run_golden ", INVARIANT" "" --invariant
    script=$PWD/tests/cuda/coverage.awk
    (cd "$out" && ${GCOV:-gcov} -m unit.gcda >gcov.log 2>&1 &&
        awk -v least=95 -v list="${COVERAGE_LIST:-0}" -f "$script" $(ls *.cu.gcov *.cuh.gcov 2>/dev/null)) ||
        fail "less than 95 % of the device code ran"
    header=$relative
}

[ $# -gt 0 ] || set -- plain checker asan
for mode in "$@"; do
    case $mode in
    gpu) exec sh tools/gpu_check.sh --tests ;;
    coverage) run_coverage ;;
    ptx) run_ptx ;;
    cost) run_cost ;;
    host) run_host ;;
    *) run_emulated "$mode" ;;
    esac
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
