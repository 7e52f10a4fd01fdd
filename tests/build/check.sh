#!/bin/sh
# make check: every step below, two at a time, each with its log in build/check/.
#
#   sh tests/build/check.sh                      all steps, then `N passed, N failed, N skipped`
#   sh tests/build/check.sh compile:gcc:c99:O3   one step, its output on the terminal
#
# A step is a function step_<kind> with the words after the colons as arguments. It passes with status 0; with
# status 77 this machine lacks something, and the last line it printed says what.
set -u
out=build/check
strict="-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wundef -Wvla -Werror"
hostile="-O3 -march=native -ffp-contract=fast"
sanitize="-O1 -g -fno-omit-frame-pointer -fno-sanitize-recover=all"

steps() {
    echo amalgamate tools docs format layout test
    for cc in gcc clang; do
        for std in c99 c11 gnu11 c++11 c++17; do
            for level in O0 O3; do echo "compile:$cc:$std:$level"; done
        done
        for std in c99 c++11; do echo "headers:$cc:$std" "units:$cc:$std"; done
    done
    echo parts symbols self fastmath
    echo tests:generated tests:clang tests:address tests:hostile_c tests:hostile_cxx tests:thread levels
    echo fuzz projection_pt examples demo demo_mpi transformers golden mpi nvcc cuda cuda_emu:plain cuda_emu:checker cuda_emu:asan coverage_cuda install cmake pkgconfig
}

main() {
    rm -rf "$out"
    mkdir -p "$out"
    steps | xargs -n 1 -P "${CHECK_JOBS:-2}" sh "$0" --report
    passed=$(ls "$out" | grep -c '\.ok$')
    failed=$(ls "$out" | grep -c '\.FAILED$')
    skipped=$(ls "$out" | grep -c '\.skipped$')
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ] && [ $((passed + failed + skipped)) -eq "$(steps | wc -w)" ]
}

file_name() { echo "$1" | tr :/ --; }

# Run one step with its output in a log, print how it went, and leave a file that says so.
report() {
    file=$out/$(file_name "$1")
    sh "$0" "$1" >"$file.log" 2>&1 </dev/null
    case $? in
    0) verdict=ok line="ok      $1" ;;
    77) verdict=skipped line="skipped $1: $(tail -n 1 "$file.log")" ;;
    *) verdict=FAILED line="FAILED  $1 ($file.log)
$(tail -n 40 "$file.log" | sed 's/^/    /')" ;;
    esac
    echo "$line"
    : >"$file.$verdict"
}

need() {
    for tool; do
        command -v "$tool" >/dev/null 2>&1 || { echo "needs $tool"; exit 77; }
    done
}

# A compiler with its language, standard and warnings: `driver gcc c++11` -> g++ -x c++ -std=c++11 -Wall ...
driver() {
    case $1:$2 in
    gcc:c++*) echo "g++ -x c++ -std=$2 $strict" ;;
    clang:c++*) echo "clang++ -x c++ -std=$2 $strict" ;;
    *) echo "$1 -std=$2 $strict -Wmissing-prototypes" ;;
    esac
}

step_amalgamate() { need python3; python3 tools/amalgamate.py --check; }

step_tools() { need python3; python3 tests/build/test_amalgamate.py; }

# Projections to PyTorch's files and back; TORCH_PYTHON is a python that has it.
step_projection_pt() {
    need gcc "${TORCH_PYTHON:-python3}"
    "${TORCH_PYTHON:-python3}" -c 'import torch' 2>/dev/null || { echo "needs PyTorch"; exit 77; }
    gcc -std=c99 -I. tests/build/load_projection.c -o "$dir/load_projection" -lm -lpthread || return 1
    "${TORCH_PYTHON:-python3}" tests/build/test_projection_pt.py "$dir/load_projection"
}

step_docs() { need python3; python3 tools/check_docs.py; }

step_format() {
    version=$(sed -n 's/^# clang-format \([0-9]*\)$/\1/p' .clang-format)
    clang-format --version 2>/dev/null | grep -q "version $version\." || { echo "needs clang-format $version"; exit 77; }
    make --no-print-directory check-format
}

# Tests compiled against src/ must find the header there: a copy beside them would hide it.
step_layout() { ! ls tests/xdistill.h tests/*/xdistill.h 2>/dev/null; }

step_test() { make --no-print-directory test; }

# The generated header, as declarations and as implementation, without one warning.
step_compile() {
    need "$1"
    $(driver "$1" "$2") "-$3" -I. -c tests/build/declarations.c -o "$dir/declarations.o" &&
    $(driver "$1" "$2") "-$3" -I. -c tests/build/implementation.c -o "$dir/implementation.o"
}

# Each declaration header of src/ stands on its own.
step_headers() {
    need "$1"
    status=0
    for header in $(sed '/---- implementation/,$d; /^#include ".*\.h"/!d; s/.*"\(.*\)"/\1/' src/xdistill.h); do
        echo "#include \"$header\"" >"$dir/alone.c"
        $(driver "$1" "$2") -Isrc -fsyntax-only "$dir/alone.c" || status=1
    done
    return $status
}

# Each part compiles by itself, as it stands, and the objects link: what a part takes from another is declared in a
# header that it includes.
step_parts() {
    need gcc
    objects= status=0
    for part in $(find src -name '*.c'); do
        object=$dir/$(file_name "${part#src/}").o
        $(driver gcc c99) -O1 -Isrc -DXDISTILL_IMPLEMENTATION -DXD_PRIVATE=extern -c "$part" -o "$object" || status=1
        objects="$objects $object"
    done
    [ $status -eq 0 ] || return 1
    gcc -std=c99 -Isrc tests/build/declarations.c $objects -o "$dir/all" -lm -lpthread && "$dir/all"
}

# One program of an implementing and a using unit, and one of two units with a private library each.
step_units() {
    need "$1"
    cc="$(driver "$1" "$2") -O1 -I."
    $cc tests/build/implementation.c tests/build/declarations.c -o "$dir/two" -lm -lpthread && "$dir/two" &&
    $cc -c tests/build/static_unit.c -o "$dir/first.o" &&
    $cc -DXD_UNIT_SECOND -c tests/build/static_unit.c -o "$dir/second.o" &&
    $cc -x none "$dir/first.o" "$dir/second.o" -o "$dir/static" -lm -lpthread && "$dir/static"
}

# The object exports xd_ names only, keeps no data that changes, and never prints or leaves the process.
step_symbols() {
    need gcc nm
    gcc -std=c99 -O1 -fno-pie -I. -c tests/build/implementation.c -o "$dir/all.o" || return 1
    nm "$dir/all.o" | awk '
        $2 ~ /^[A-TV-Z]$/ && $3 !~ /^xd_/ { print "exported without xd_: " $3; bad = 1 }
        $2 ~ /^[bBdDC]$/ { print "data that can change: " $3; bad = 1 }
        $1 == "U" && $2 ~ /^(_?exit|abort|printf|puts|putchar|__assert_fail)$/ { print "calls " $2; bad = 1 }
        END { exit bad }'
}

# The header includes itself by its own name, however the compiler is told to call files, or by the name it is given.
step_self() {
    need gcc
    gcc -std=c99 -O0 -ffile-prefix-map="$PWD"=/elsewhere -fdebug-prefix-map=.=/elsewhere -I. -c tests/build/implementation.c \
        -o "$dir/mapped.o" || return 1
    cp xdistill.h "$dir/renamed.h"
    printf '%s\n' '#define XDISTILL_IMPLEMENTATION' '#define XDISTILL_SELF "renamed.h"' '#include "renamed.h"' >"$dir/renamed.c"
    gcc -std=c99 -O0 -c "$dir/renamed.c" -o "$dir/renamed.o"
}

# Fast math breaks infinities and promised bits: it must be refused in words.
step_fastmath() {
    need gcc
    gcc -std=c99 -O2 -ffast-math -I. -c tests/build/implementation.c -o "$dir/fast.o" 2>"$dir/errors"
    grep 'error: #error.*fast-math' "$dir/errors"
}

# Run the suites on the generated header: the tests by $build, the shared implementation by $implement.
step_tests() {
    sources=$(ls tests/test_*.c) more=
    case $1 in
    generated) implement="gcc -std=c99 -O3" build=$implement ;;
    clang) implement="clang -std=c11 -O3" build=$implement ;;
    address) implement="clang -std=c99 $sanitize -fsanitize=address,undefined" build=$implement ;;
    thread) implement="clang -std=c99 $sanitize -fsanitize=thread" build=$implement
            sources=$(ls tests/test_comm*.c tests/test_faults*.c tests/test_parallel*.c 2>/dev/null) ;;
    hostile_c) implement="gcc -std=gnu11 $hostile" build=$implement ;;
    hostile_cxx) implement="g++ -x c++ -std=gnu++17 $hostile" build="gcc -std=gnu11 -O1" more=-lstdc++ ;;
    esac
    need "${implement%% *}"
    [ -n "$sources" ] || { echo "there are no such tests"; exit 77; }
    TEST_SECONDS=300 make --no-print-directory test test_dir="$dir" test_sources="$(echo $sources)" \
        test_header=. test_cc="$build" test_implementation_cc="$implement" test_libs="-lm -lpthread $more"
}

# Twenty seconds of new inputs for each fuzzer; without libFuzzer the seeds alone, once.
step_fuzz() {
    for source in fuzz/fuzz_*.c; do
        name=$(basename "$source" .c)
        seeds=fuzz/seeds/${name#fuzz_}
        mkdir -p "$dir/$name.corpus"
        if clang -std=c99 $sanitize -fsanitize=fuzzer,address,undefined -I. "$source" -o "$dir/$name" \
            -lm -lpthread 2>"$dir/$name.log"; then
            "$dir/$name" -max_total_time=20 -verbosity=0 -print_final_stats=1 -artifact_prefix="$dir/" \
                "$dir/$name.corpus" "$seeds" || return 1
        else
            cc -std=c99 -g -O1 -I. -DFUZZ_FILES "$source" -o "$dir/$name" -lm -lpthread || return 1
            "$dir/$name" "$seeds"/* || return 1
        fi
    done
}

# The losses' suites, and the golden vectors where there are some, on each CPU level that this machine has.
step_levels() {
    vectors=${GOLDEN:-../shared/golden}
    suites="tests/test_loss.c tests/test_topk.c tests/test_equivalence.c"
    [ -d "$vectors" ] || { vectors=$dir/none; mkdir -p "$vectors"; }
    flags=-DXDISTILL_PORTABLE # the level that ARM and old x86 run
    cc -std=c99 -O2 $flags -Isrc -Itests tests/golden/*.c -o "$dir/golden" -lm -lpthread || return 1
    for level in plain portable avx2 avx512 avx512_bf16; do
        echo "== $level"
        "$dir/golden" --cpu=$level "$vectors"
        case $? in 0) ;; 77) continue ;; *) return 1 ;; esac
        "$dir/golden" --cpu=$level --invariant "$vectors" || return 1
        XDISTILL_CPU=$level make --no-print-directory test test_dir="$dir" test_sources="$suites" \
            test_cc="cc -std=c99 -O1 -g $flags" || return 1
    done
    make --no-print-directory test test_dir="$dir" test_sources="$(echo tests/test_simd_*.c tests/test_exact.c)" \
        test_cc="cc -std=c99 -O1 -g $flags"
}

step_examples() {
    ls examples/*.c >/dev/null 2>&1 || { echo "there is no examples/*.c"; exit 77; }
    make --no-print-directory examples
}

step_demo() {
    sh tests/demo/test_demo.sh
}

step_demo_mpi() {
    need mpicc mpirun
    sh tests/demo/test_demo_mpi.sh
}

step_transformers() {
    need python3
    sh tests/demo/test_transformers.sh
}

step_golden() {
    [ -d "${GOLDEN:-../shared/golden}" ] || { echo "there are no golden vectors"; exit 77; }
    make --no-print-directory golden
}

step_mpi() {
    need mpicc mpirun
    ls tests/mpi/*.c >/dev/null 2>&1 || { echo "there is no tests/mpi"; exit 77; }
    make --no-print-directory mpi
}

step_nvcc() {
    need nvcc
    nvcc -O2 -I. -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror -c tests/build/include.cu \
        -o "$dir/include.o"
}

step_cuda() {
    need nvcc
    make --no-print-directory cuda || return 1
    for source in examples/*.cu; do # by the line each of them gives, with the unit compiled once
        line=$(sed -n '/^ \*  *nvcc /{s/^ \* *//;s#xdistill_cuda.cu#build/xdistill_cuda.o#;s# -o .*##;p;q;}' "$source")
        echo "$line"
        $line -lpthread -o "$dir/$(basename "$source" .cu)" || return 1
    done
}

# The tests of the CUDA unit on the emulation, from the generated files. The emulation's own tests come first.
step_cuda_emu() {
    need g++
    EMU_BUILD="$dir/emu" sh tests/emu/run.sh "$1" &&
    CUDA_BUILD="$dir/cuda" CUDA_HEADER=. sh tests/cuda/run.sh "$1"
}

step_coverage_cuda() {
    need g++ gcov
    CUDA_BUILD="$dir/cuda" sh tests/cuda/run.sh coverage
}

step_install() {
    root=$PWD/$dir
    make --no-print-directory install PREFIX=/usr DESTDIR="$root/stage" || return 1
    for file in include/xdistill.h share/pkgconfig/xdistill.pc share/cmake/xdistill/xdistill-config.cmake; do
        [ -s "$root/stage/usr/$file" ] || { echo "$file is missing"; return 1; }
    done
    make --no-print-directory uninstall PREFIX=/usr DESTDIR="$root/stage" || return 1
    [ -z "$(find "$root/stage" -type f)" ]
}

# Install by make and by CMake; each time a project of its own finds the package, builds and runs.
step_cmake() {
    need cmake
    root=$PWD/$dir
    make --no-print-directory install PREFIX="$root/make" || return 1
    cmake -S . -B "$root/own" -DCMAKE_INSTALL_PREFIX="$root/cmake" -DBUILD_TESTING=OFF || return 1
    cmake --build "$root/own" --target install || return 1
    for prefix in make cmake; do
        cmake -S tests/install -B "$root/use-$prefix" -DCMAKE_PREFIX_PATH="$root/$prefix" || return 1
        cmake --build "$root/use-$prefix" || return 1
        "$root/use-$prefix/app" || return 1
    done
}

step_pkgconfig() {
    need pkg-config cc
    root=$PWD/$dir
    make --no-print-directory install PREFIX="$root" || return 1
    flags=$(PKG_CONFIG_PATH=$root/share/pkgconfig pkg-config --cflags --libs xdistill) || return 1
    cc -std=c99 tests/install/app.c -o "$dir/app" $flags && "$dir/app"
}

cd "$(dirname "$0")/../.." || exit 1
case ${1:-} in
'') main ;;
--report) report "$2" ;;
*)
    dir=$out/$(file_name "$1").d
    mkdir -p "$dir"
    IFS=:
    set -- $1
    unset IFS
    "step_$@"
    ;;
esac
