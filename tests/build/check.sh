#!/bin/sh
# make check: every step below, two at a time, each with its log in build/check/.
#
#   sh tests/build/check.sh                      all steps, then what each took, and `N passed, N failed, N skipped`
#   sh tests/build/check.sh compile:gcc:c99:O3   one step, its output on the terminal
#
# A step is a function step_<kind> with the words after the colons as arguments. It passes with status 0; with
# status 77 this machine lacks something, and the last line it printed says what.
set -u
out=build/check
strict="-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wundef -Wvla -Werror"
hostile="-march=native -ffp-contract=fast"
sanitize="-g1 -fno-omit-frame-pointer -fno-sanitize-recover=all"
memory="$sanitize -fsanitize=fuzzer-no-link,address,undefined" # the fuzzers link the object of the tests
private="xdi_|XDI_|XDISTILL_STATIC"                             # tests that name these need XD_TEST_UNIT, or carry their own implementation

# What several steps link is compiled once. `build` comes first and alone; the rest begins with what is quickly told and goes
# on with the longest, so that those that run at a time end together. CHECK_DONE=test leaves `test` out, for a caller that
# has just run `make test`: the programs would be the same.
steps() { all_steps | xargs -n 1 | grep -vx "${CHECK_DONE:-}"; }

all_steps() {
    echo build amalgamate format layout fastmath tools api fields nulls poison
    echo cuda_emu:plain cuda_emu:asan cuda_emu:checker coverage_cuda cuda_ptx transformers fuzz
    echo tests:address tests:generated tests:clang tests:hostile tests:thread undefined levels portable aarch64 options sections test
    # Every standard decides for itself what it accepts: it reads the whole unit, and declarations become code on both
    # levels. Code of the unit is made at the corners: the oldest C and the newest C++ for the warnings that only gcc's
    # optimizer sees, and C without it. These objects serve the tests; gcc's of C++ has the flags of tests:hostile.
    echo compile:gcc:c99:O3 compile:gcc:c99:O0:-fno-pie compile:clang:c99:O0
    for cc in gcc clang; do
        echo "compile:$cc:$(newest_cxx $cc | tr ' ' :)"
        for std in c99 c11 gnu11 c++11 c++17 c++20; do echo "declarations:$cc:$std"; done
        for std in c99 c++11; do echo "headers:$cc:$std"; done
        for std in c99 c++17; do echo "units:$cc:$std"; done
    done
    echo newest:clang-19 newest:zig
    echo parts saves programs compose equivalence equivalence_dmd bench demo demo_mpi demo_sharded demo_toys demo_images demo_real distil nvcc cuda golden golden_judge examples launch mpi mpich hosts gpu_check lib symbols self docs tutorial projection_pt saved dcp dcp_hf python python_torch python_cuda install dist cmake pkgconfig
}

main() {
    rm -rf "$out"
    mkdir -p "$out"
    begin=$(date +%s)
    [ -z "${CHECK_DONE:-}" ] || echo "done before: $CHECK_DONE"
    steps | {
        read -r first
        sh "$0" --report "$first" </dev/null
        xargs -n 1 -P "${CHECK_JOBS:-2}" sh "$0" --report
    }
    sort -rn "$out"/*.seconds >"$out/times"
    awk 'BEGIN { print "seconds: processors, clock" } { processors += $1; clock += $2; print }
        END { printf "%8.1f %6d  all steps\n", processors, clock }' "$out/times"
    echo "$(($(date +%s) - begin)) seconds of the clock"
    passed=$(ls "$out" | grep -c '\.ok$')
    failed=$(ls "$out" | grep -c '\.FAILED$')
    skipped=$(ls "$out" | grep -c '\.skipped$')
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ] && [ $((passed + failed + skipped)) -eq "$(steps | wc -w)" ]
}

# The object of C++ that a compiler makes for several steps, in words of `unit`.
newest_cxx() {
    case $1 in
    gcc) echo "gnu++17 O3 $hostile" ;;
    *) echo "c++17 O0" ;;
    esac
}

# The library at -O2 that golden vectors and random configurations share: its sections show private functions.
export golden_implementation=build/libxdistill.a equivalence_networks=build/networks.a
private_names="-Isrc -DXD_TEST_LAYERS -DXD_PRIVATE=extern" # for objects that call them

file_name() { echo "$1" | tr :/ --; }

# Of the log of a step that failed, the lines that say why, wherever they stand, and the end.
telling() {
    grep -aE '^ *FAILED|[^0-9][1-9][0-9]* failed|: CHECK\(|:[0-9]+: .* == .*: |error:|ERROR: |warning: |SUMMARY: |Killed|exit status|\*\*\* ' "$1" |
        head -n 24
    echo "... the end:"
    tail -n 8 "$1"
}

# Run one step with its output in a log, print how it went, and leave a file that says so and one with its seconds of all
# processors and of the clock.
report() {
    file=$out/$(file_name "$1") begin=$(date +%s)
    sh "$0" "$1" >"$file.log" 2>&1 </dev/null
    case $? in
    0) verdict=ok line="ok      $1" ;;
    77) verdict=skipped line="skipped $1: $(tail -n 1 "$file.log")" ;;
    *) verdict=FAILED line="FAILED  $1 ($file.log)
$(telling "$file.log" | sed 's/^/    /')" ;;
    esac
    echo "$line"
    : >"$file.$verdict"
    times >"$file.times" # of this shell, and of all that it waited for
    awk -v clock=$(($(date +%s) - begin)) -v step="$1" 'NR == 2 {
        for (i = 1; i <= 2; i++) { split($i, part, /[ms]/); seconds += 60 * part[1] + part[2] }
        printf "%8.1f %6d  %s\n", seconds, clock, step
    }' "$file.times" >"$file.seconds"
    rm "$file.times"
}

need() {
    for tool; do
        command -v "$tool" >/dev/null 2>&1 || { echo "needs $tool"; exit 77; }
    done
}

# A compiler with its language, standard and warnings: `driver gcc c++11` -> g++ -x c++ -std=c++11 -Wall ...
driver() {
    case $1:$2 in
    gcc:*++*) echo "g++ -x c++ -std=$2 $strict" ;;
    clang:*++*) echo "clang++ -x c++ -std=$2 $strict" ;;
    *) echo "$1 -std=$2 $strict -Wmissing-prototypes" ;;
    esac
}

# The implementation as an object, compiled from the generated header without a warning, once for all steps that ask for it
# in the same words: `unit gcc c99 O3 -march=native` leaves the object's name in $unit.
unit() {
    mkdir -p "$out/units"
    unit=$out/units/$(echo "$*" | tr ' /=:,' '-----').o
    until mkdir "$unit.lock" 2>/dev/null; do sleep 1; done # another step is at it
    compile="$(driver "$1" "$2") -$3"
    shift 3
    [ "$unit" -nt xdistill.h ] || $compile "$@" -I. -c tests/build/implementation.c -o "$unit" || rm -f "$unit"
    rmdir "$unit.lock"
    [ -f "$unit" ]
}

# The same, made of the six sections, so private functions are visible to what is linked with it: `joined clang c99 O3`. $kernels: other
# flags for the two sections of kernels.
joined() {
    mkdir -p "$out/units"
    unit=$out/units/joined-$(echo "$*" | tr ' /=:,' '-----').a
    until mkdir "$unit.lock" 2>/dev/null; do sleep 1; done
    if ! [ "$unit" -nt xdistill.h ]; then
        rm -f "$unit"
        sections "$unit" "$@" && ar -rc "$unit" $objects
        rm -f $objects
    fi
    rmdir "$unit.lock"
    [ -f "$unit" ]
}

# The six sections as objects NAME.1.o to NAME.6.o, their names in $objects: `sections NAME gcc c99 O2 -DXDISTILL_NO_ACROSS`.
sections() {
    base=$1 compile="$(driver "$2" "$3") -$4" objects=
    shift 4
    for section in 1 2 3 4 5 6; do
        flags=$*
        [ $section -gt 2 ] || flags=${kernels:-$flags}
        $compile $flags -DXDISTILL_SECTION=$section -I. -c tests/build/implementation.c -o "$base.$section.o" || return 1
        objects="$objects $base.$section.o"
    done
}

# What more than one step takes: the objects of the tests and of the golden vectors' program, and the library.
step_build() { make --no-print-directory -j"${CHECK_JOBS:-2}" build-tests lib build/golden build/networks.a; }

step_amalgamate() { need python3; python3 tools/amalgamate.py --check; }

step_tools() { need python3; python3 tests/build/test_amalgamate.py; }

# docs/api.txt is what the header declares; what the tool refuses; and its ctypes binding, used.
step_api() {
    need python3 cc
    python3 tools/api.py --check && python3 tests/build/test_api.py && python3 tests/build/test_ctypes.py &&
        python3 tests/build/check_sizes.py && python3 tests/build/check_allocations.py
}

# Every field that a public call takes is read, and set by a test or an example.
step_fields() {
    need python3 clang cc
    python3 tools/api.py --build "$dir" && python3 tests/build/check_fields.py "$dir/api.json"
}

# Each call of the users' part, as tests make it, with one pointer after the other NULL: refused by name, and the test goes on.
step_nulls() {
    need python3 gcc
    make --no-print-directory build/libxdistill.a || return 1
    python3 tools/api.py --build "$dir" && python3 tests/build/nulls.py --write "$dir/api.json" "$dir/nulls.c" &&
        python3 tests/build/nulls.py --flags "$dir/api.json" >"$dir/nulls.flags" &&
        gcc -std=gnu99 -O0 -I. -Itests/helpers -c "$dir/nulls.c" -o "$dir/nulls.o" || return 1
    for t in $(python3 tests/build/nulls.py --programs); do
        gcc -std=c99 -DXDISTILL_IMPLEMENTED $private_names -Itests/helpers "tests/$t.c" "$dir/nulls.o" build/libxdistill.a \
            "@$dir/nulls.flags" -lm -lpthread -o "$dir/$t" && NULLS_LOG="$dir/nulls.log" "$dir/$t" || return 1
    done
    python3 tests/build/nulls.py --judge "$dir/api.json" "$dir/nulls.log"
}

# Every third case of tests/test_poison.c (CHECK_POISON=all: every one), and that every call which takes numbers is in its table.
# A sample of them on the loops for any processor, whose integers gcc watches in vectors too: no number makes one overflow.
# Static, so that what it does not call is not compiled.
step_poison() {
    need gcc python3
    gcc -std=c99 -O1 -DXDISTILL_PORTABLE $sanitize -fsanitize=undefined -I. -Itests/helpers -DXDISTILL_IMPLEMENTATION -DXDISTILL_STATIC \
        tests/test_poison.c -o "$dir/test_poison_undefined" -lm -lpthread &&
    XDISTILL_POISON=23 "$dir/test_poison_undefined" || return 1
    make --no-print-directory build/libxdistill.a &&
    gcc -std=c99 -O2 $private_names -Itests/helpers -DXDISTILL_IMPLEMENTED tests/test_poison.c build/libxdistill.a -o "$dir/test_poison" \
        -lm -lpthread && XDISTILL_POISON=${CHECK_POISON:-3} "$dir/test_poison" && python3 tools/api.py --build "$dir" &&
    python3 tests/build/test_poison_table.py "$dir/api.json"
}

# Projections to PyTorch's files and back; TORCH_PYTHON is a python that has it.
step_projection_pt() {
    need gcc "${TORCH_PYTHON:-python3}"
    "${TORCH_PYTHON:-python3}" -c 'import torch' 2>/dev/null || { echo "needs PyTorch"; exit 77; }
    make --no-print-directory build/libxdistill.a &&
    gcc -std=c99 -I. -DXDISTILL_IMPLEMENTED tests/build/load_projection.c build/libxdistill.a -o "$dir/load_projection" \
        -lm -lpthread || return 1
    "${TORCH_PYTHON:-python3}" tests/build/test_projection_pt.py "$dir/load_projection"
}

# Files of torch.save, made without PyTorch.
step_saved() {
    need gcc python3
    make --no-print-directory build/xdistill &&
    python3 tests/build/test_saved.py build/xdistill
}

# Checkpoints of PyTorch, with pickles and as pieces in safetensors files, and ours in PyTorch.
step_dcp() {
    need gcc "${TORCH_PYTHON:-python3}"
    "${TORCH_PYTHON:-python3}" -c 'import torch' 2>/dev/null || { echo "needs PyTorch"; exit 77; }
    make --no-print-directory build/xdistill &&
    "${TORCH_PYTHON:-python3}" tests/build/test_dcp.py build/xdistill
}

step_dcp_hf() {
    need gcc "${TORCH_PYTHON:-python3}"
    "${TORCH_PYTHON:-python3}" -c 'import torch, safetensors' 2>/dev/null || { echo "needs PyTorch and safetensors"; exit 77; }
    make --no-print-directory build/xdistill &&
    gcc -std=c99 -I. -DXDISTILL_IMPLEMENTED tests/build/dcp_ranks.c build/libxdistill.a -o "$dir/dcp_ranks" -lm -lpthread &&
    "${TORCH_PYTHON:-python3}" tests/build/test_dcp.py --hf build/xdistill "$dir/dcp_ranks"
}

# The Python package: installed by pip and cc into an empty environment, and its tests without PyTorch.
step_python() {
    need "${PYTHON:-python3}" "${CC:-cc}"
    sh tests/python/install.sh "$dir"
}

# The same package over the library that exists: losses against PyTorch's autograd, the page's code and the examples.
step_python_torch() {
    python=${TORCH_PYTHON:-python3}
    [ -n "${TORCH_PYTHON:-}" ] || ! [ -x build/transformers/bin/python ] || python=$PWD/build/transformers/bin/python
    need "$python" "${CC:-cc}"
    "$python" -c 'import torch' 2>/dev/null || { echo "needs PyTorch"; exit 77; }
    make --no-print-directory build/libxdistill.a &&
    "$python" -B python/build_xdistill.py build/libxdistill.a "$dir" || return 1
    PYTHONPATH=$dir OMP_NUM_THREADS=2 "$python" -B -W ignore -m unittest tests/python/test_torch_*.py
}

# The same with the CUDA unit: through the emulation, and where nvcc is, compiled and imported.
step_python_cuda() {
    python=${TORCH_PYTHON:-${PYTHON:-python3}}
    need "$python" g++
    make --no-print-directory build/libxdistill.a && PYTHON=$python sh tests/python/cuda.sh "$dir"
}

# What prose names exists, snippets compile, and the reference that `make docs` writes has no dead link.
step_docs() {
    need python3 cc
    python3 tests/build/test_docs.py && python3 tools/check_docs.py && python3 tools/docs.py --check
}

# The programs and commands of docs/tutorial.md and docs/diffusion.md, with what they print.
step_tutorial() {
    need python3 cc gcc
    unit gcc c99 O3 || return 1
    venv=${VENV:-$PWD/build/transformers} # of the step transformers, if it could be made: the page opens its student there
    PATH="$venv/bin:$PATH" HF_HUB_OFFLINE=1 python3 tools/tutorial.py --check --object "$unit"
}

step_format() {
    version=$(sed -n 's/^# clang-format \([0-9]*\)$/\1/p' .clang-format)
    clang-format --version 2>/dev/null | grep -q "version $version\." || { echo "needs clang-format $version"; exit 77; }
    make --no-print-directory check-format
}

# Tests compiled against src/ must find the header there: a copy beside them would hide it. `make help` lists every target that has
# a description, within 80 columns.
step_layout() {
    ! ls tests/xdistill.h tests/*/xdistill.h 2>/dev/null || return 1
    make --no-print-directory help >"$dir/help" && ! grep '.\{81\}' "$dir/help" &&
        [ "$(grep -c '^  make ' "$dir/help")" -eq "$(grep -c '^[a-z-]*:.*## ' Makefile)" ]
}

step_test() { make --no-print-directory test; }

# Saves that are killed 500 times at random, while others read; `make test` has a sample.
step_saves() {
    make --no-print-directory build/test/test_saves && XD_TEST_KILLS=500 build/test/test_saves at_random
}

# Random programs of collectives, 100,000 collectives in one world, and processes that are killed or stopped at random;
# `make test` has a sample of each.
step_programs() {
    make --no-print-directory build/test/test_comm_programs build/test/test_comm_endurance build/test/test_process_signals &&
    build/test/test_comm_programs --seed 20000 --count "${CHECK_PROGRAMS:-500}" &&
    build/test/test_comm_endurance --calls 100000 && XD_TEST_KILLS=100 build/test/test_process_signals
}

# Random configurations of wrapped training, each against one rank; that more of them have each pair of features often; and errors
# that composed frameworks are known for, each of which must be found by them.
step_compose() {
    need gcc patch
    make --no-print-directory build/compose && build/compose --seed 1000 --count "${CHECK_COMPOSE:-200}" &&
    build/compose --draw --count 10000 &&
    sh tests/mutants/run.sh "$dir"
}

# The transformer under every wrapper on meshes of up to 8 ranks, bit for bit; 22 s on two quiet cores.
step_equivalence() { make --no-print-directory build/equivalence && build/equivalence; }

# A distillation of three networks likewise, and runs that go on on other meshes after SIGKILL; 6 s.
step_equivalence_dmd() { make --no-print-directory build/equivalence_dmd && build/equivalence_dmd; }

# The generated header as declarations, and the implementation as far as the compiler's front end, without one warning.
step_declarations() {
    need "$1"
    for level in O0 O3; do
        $(driver "$1" "$2") "-$level" -I. -c tests/build/declarations.c -o "$dir/declarations.o" || return 1
    done
    $(driver "$1" "$2") -I. -fsyntax-only tests/build/implementation.c
}

# The newest compilers that are here: a name like clang-19, or zig from the package ziglang of ZIG_PYTHON.
step_newest() {
    compiler=$1
    [ "$1" != zig ] || compiler="${ZIG_PYTHON:-python3} -m ziglang cc"
    $compiler --version >/dev/null 2>&1 || { echo "needs $1"; exit 77; }
    $compiler -std=c99 $strict -O0 -I. -c tests/build/implementation.c -o "$dir/unit.o"
}

# The implementation as an object.
step_compile() {
    need "$1"
    unit "$@"
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
    status=0
    mkdir -p "$dir/objects"
    for part in $(find src -name '*.c' | grep -v '^src/mpi/\|^src/nccl/'); do # those stand in one unit, as src/cuda's
        $(driver gcc c99) -O0 -Isrc -DXDISTILL_IMPLEMENTATION -DXD_PRIVATE=extern -c "$part" \
            -o "$dir/objects/$(file_name "${part#src/}").o" || status=1
    done
    [ $status -eq 0 ] || return 1
    gcc -std=c99 -Isrc tests/build/declarations.c "$dir"/objects/*.o -o "$dir/all" -lm -lpthread && "$dir/all"
}

# One program of an implementing and a using unit, and one of two units with a private library each.
step_units() {
    need "$1"
    case $2 in
    *++*) unit "$1" $(newest_cxx "$1") ;;
    *) unit "$1" "$2" "$([ "$1" = gcc ] && echo O3 || echo O0)" ;;
    esac || return 1
    cc="$(driver "$1" "$2") -O1 -I." # at O0 gcc keeps what nothing uses
    $cc tests/build/declarations.c -x none "$unit" -o "$dir/two" -lm -lpthread && "$dir/two" &&
    $cc -c tests/build/static_unit.c -o "$dir/first.o" &&
    $cc -DXD_UNIT_SECOND -c tests/build/static_unit.c -o "$dir/second.o" &&
    $cc -x none "$dir/first.o" "$dir/second.o" -o "$dir/static" -lm -lpthread && "$dir/static"
}

# The object exports xd_ names only, keeps no data that changes, and never prints or leaves the process.
step_symbols() {
    need gcc nm
    unit gcc c99 O0 -fno-pie || return 1
    nm "$unit" | awk '
        $2 ~ /^[A-TV-Z]$/ && $3 !~ /^xd_/ { print "exported without xd_: " $3; bad = 1 }
        $2 ~ /^[bBdDC]$/ { print "data that can change: " $3; bad = 1 }
        $1 == "U" && $2 ~ /^(_?exit|abort|printf|puts|putchar|__assert_fail)$/ { print "calls " $2; bad = 1 }
        END { exit bad }'
}

# `make lib`: both files link with a program of another unit, and the shared one offers xd_ names only.
step_lib() {
    need cc nm
    make --no-print-directory lib || return 1
    nm -D --defined-only build/libxdistill.so | awk '$3 !~ /^xd_/ { print "exported without xd_: " $3; bad = 1 }
        END { print NR " names"; exit bad || NR < 100 }' || return 1
    for library in build/libxdistill.a "-Lbuild -lxdistill -Wl,-rpath,$PWD/build"; do
        cc -std=c99 -I. tests/build/declarations.c $library -o "$dir/linked" -lm -lpthread && "$dir/linked" || return 1
    done
}

# The header asks for no other file of its own: it may have any name, and the compiler may call files as it is told. In a program
# that has it for itself, where gcc looks from the caller into every function, it says nothing.
step_self() {
    need gcc
    ! grep '^# *include *[^ <]' xdistill.h || return 1
    cp xdistill.h "$dir/renamed.h"
    printf '%s\n' '#define XDISTILL_IMPLEMENTATION' '#include "renamed.h"' >"$dir/renamed.c"
    gcc -std=c99 -ffile-prefix-map="$PWD"=/elsewhere -fdebug-prefix-map=.=/elsewhere -fsyntax-only "$dir/renamed.c" &&
    gcc -std=c99 -O3 -Wall -Wextra -Werror -DXDISTILL_STATIC -I. -c examples/03_sharded_ema.c -o "$dir/static.o"
}

# Suites of what counts, plans and saves, with gcc's sanitizer of arithmetic, which looks into intrinsics that clang's does not. The
# kernels are those of `make test`, and so are the tests' objects: their loops are of floats, and step_poison watches the integers.
step_undefined() {
    need gcc
    layers=$(make --no-print-directory print-layers)
    kernels=$(echo "$layers" | grep '/kernel-') watched=$(echo "$layers" | grep -v '/kernel-' | sed 's|^build/test/|build/test-undefined/|')
    make --no-print-directory SANITIZE=undefined CC=gcc $watched && make --no-print-directory $kernels || return 1
    sources=
    for name in sizes sizes_bytes sizes_calls sizes_counts sizes_dmd sizes_files sizes_xtoken buckets checkpoint \
        checkpoint_files clip crc crossing experts halo json mesh model pipeline_table plan projection projection_build saves \
        safetensors safetensors_plan state_inherit times tokenizer topk xtoken_route gather route_process; do
        sources="$sources tests/test_$name.c"
    done
    suites "$dir" "$sources" test_implementation="$(echo $watched $kernels)" test_libs="-lm -lpthread -lubsan"
}

# Fast math breaks infinities and promised bits: it must be refused in words.
step_fastmath() {
    need gcc
    gcc -std=c99 -O2 -ffast-math -I. -c tests/build/implementation.c -o "$dir/fast.o" 2>"$dir/errors"
    grep 'error: #error.*fast-math' "$dir/errors" || return 1
    ! gcc -std=c99 -D_WIN32 -I. -fsyntax-only tests/build/implementation.c 2>"$dir/errors" && grep 'error: #error.*WSL' "$dir/errors"
}

# The archive of `make dist`, unpacked in a folder of its own: a project gets it by CMake's FetchContent, another by meson.
step_dist() {
    need git cmake
    root=$PWD/$dir
    rm -rf "$root" && mkdir -p "$root/use" || return 1
    make --no-print-directory dist DIST="$root" || return 1
    (cd "$root" && sha256sum -c ./*.sha256) || return 1
    cp tests/install/app.c tests/install/fetch.cmake "$root/use" && mv "$root/use/fetch.cmake" "$root/use/CMakeLists.txt"
    cmake -S "$root/use" -B "$root/built" -DARCHIVE="$(ls "$root"/*.tar.gz)" && cmake --build "$root/built" && "$root/built/app" || return 1
    tar -xzf "$root"/*.tar.gz -C "$root" && mv "$root"/xdistill-*/ "$root/tree" || return 1
    cmake -DPORT="$root/tree/cmake/vcpkg/xdistill" -DPREFIX="$root/port" -P tests/install/vcpkg.cmake &&
        cmake -S tests/install -B "$root/ported" -DCMAKE_PREFIX_PATH="$root/port" && cmake --build "$root/ported" --target linked &&
        "$root/ported/linked" || return 1
    command -v meson >/dev/null 2>&1 || { echo "without meson"; return 0; }
    mkdir -p "$root/mesons/subprojects" &&
    mv "$root/tree" "$root/mesons/subprojects/xdistill" && cp tests/install/app.c "$root/mesons" &&
    cp tests/install/app.meson "$root/mesons/meson.build" || return 1
    meson setup "$root/mesons/build" "$root/mesons" && meson compile -C "$root/mesons/build" && "$root/mesons/build/app"
}

# Run the suites with the implementation from the generated header, compiled as each of these says: all of them over the header as
# one unit (generated) and over its sections (clang). Tests hold nothing of it, so those of `make test` are linked again where not
# they, but what they call, is to be another; address and thread have clang compile the tests. Users' private functions are static,
# and so are those of the unit that most tests have; tests that call some have another one, XD_TEST_UNIT, or the sections. One carries
# its own implementation, compiled as $whole says. The hostile flags make of C++ the functions that they make of C: there the unit
# is C++, and the sections of the private functions C, kernels by the same flags, with a test of optimizers, whose bits are promised. address leaves to others what runs
# long: networks of the examples, whole trainings, losses of diffusion, and calls on several threads, which thread runs; arithmetic of its
# kernels is watched by poison.
step_tests() {
    sources=$(ls tests/test_*.c) own= more= also= kernels= made=unit inner=unit
    [ "$1" != hostile ] || sources=$(of_arithmetic)
    need gcc clang
    case $1 in
    generated) users="gcc c99 O3" inside="gcc c99 O1 -DXD_TEST_UNIT" whole="$(driver gcc c99) -O3" ;;
    clang) made=joined users="clang c99 O3" inside=$users whole="clang -std=c11 -O3" ;;
    address) made=joined users="clang c99 O1 $memory" inside=$users kernels="$sanitize -fsanitize=address" whole="clang -std=c99 -O1 $memory"
             own="clang -std=c99 -O0 $sanitize -fsanitize=address,undefined"
             sources=$(ls tests/test_*.c | grep -v 'test_nn\|test_toys\|test_images\|test_parallel.c\|test_poison\|test_dmd_losses\|test_equivalence_\|test_exact_terms') ;;
    thread) users="clang c99 O1 -DXD_TEST_UNIT $sanitize -fsanitize=thread" inside=$users own="clang -std=c99 -O0 $sanitize -fsanitize=thread" whole="clang -std=c99 -O1 $sanitize -fsanitize=thread"
            sources=$(ls tests/test_comm*.c tests/test_faults*.c tests/test_parallel*.c tests/test_tokenizer_batch.c tests/test_wrap*.c 2>/dev/null) ;;
    hostile) users="gcc $(newest_cxx gcc)" inner=joined inside="gcc gnu11 O1" kernels="-O3 $hostile" whole="gcc -std=gnu11 -O3 $hostile" more=-lstdc++
             also=tests/test_simd_optimizer.c ;;
    esac
    [ -n "$sources" ] || { echo "there are no such tests"; exit 77; }
    few=$(echo "$sources" | grep -xF "$(grep -lE "\\<($private)" tests/test_*.c; echo "$also")")
    [ "$inside" != "$users" ] || few=
    $made $users || return 1
    suites "$dir" "$(echo "$sources" | grep -vxF "${few:-none}")" whole_test_cc="$whole -I. -Itests/helpers" \
        test_implementation="$unit" test_libs="-lm -lpthread $more" ${own:+test_objects="$dir" test_cc="$own" test_header=.} || return 1
    [ -z "$few" ] || $inner $inside || return 1
    [ -z "$few" ] || suites "$dir" "$few" whole_test_cc="$whole -I. -Itests/helpers" test_implementation="$unit"
}

# Tests that compute. What files, ranks and refusals do does not depend on a compiler's arithmetic: `generated` and `address` run
# their tests, with both compilers.
of_numbers() {
    ls tests/test_*.c | grep -v $(for name in allocations buckets build_buckets build_errors build_list build_places checkpoint comm \
        convert dcp debug dmd_failures dmd_record_failures escapes experts_errors fake_score_errors faults files fork full_state gguf help \
        images_png images_watch interval json launch lfs memory mesh messages model name_maps nccl_exchange node nulls paths pattern pipeline_errors \
        pipeline_table plan plot process queue refusals safetensors saves shapes sizes state_inherit teacher_cache threads_shrink tokenizer \
        weight_map weight_pieces wrap_errors; do echo "-e tests/test_$name"; done)
}

# Those of them without ranks that train: their arithmetic is that of the calls that the others test.
of_arithmetic() { of_numbers | grep -v 'test_wrap\|test_pipeline\|test_experts\|test_equivalence_\|test_build\|test_thaw\|test_offload\|test_recompute\|test_halo\|test_crossing\|test_comm\|test_nn\|test_toys\|test_images'; }

# Run the tests of these sources in a folder, with more words for make.
suites() {
    folder=$1 chosen=$(echo $2)
    shift 2
    TEST_SECONDS=300 make --no-print-directory test test_dir="$folder" test_objects=build/test test_sources="$chosen" "$@"
}

# FUZZ_SECONDS of new inputs for each fuzzer: libFuzzer's, or where there is none those that fuzz/fuzz_mutate.h makes of the seeds,
# with clang or gcc. Before that, what it makes must find a planted error, and keep the input that shows it.
step_fuzz() {
    compiler=gcc flags="$sanitize -fsanitize=address,undefined"
    command -v clang >/dev/null 2>&1 && compiler=clang flags=$memory
    need $compiler
    kernels="$sanitize -fsanitize=address" # the same as those of tests:address
    joined $compiler c99 O1 $flags && planted || return 1
    export TMPDIR="$PWD/$dir"
    for source in fuzz/fuzz_*.c; do
        name=$(basename "$source" .c)
        seeds=fuzz/seeds/${name#fuzz_}
        mkdir -p "$dir/$name.corpus"
        names=-I.
        ! grep -q xdi_ "$source" || names=$private_names
        build="$compiler -std=c99 -O1 -DXDISTILL_IMPLEMENTED $names $source $unit -o $dir/$name -lm -lpthread $flags"
        if [ $compiler = clang ] && $build -fsanitize=fuzzer 2>"$dir/$name.log"; then
            "$dir/$name" -max_total_time="${FUZZ_SECONDS:-3}" -verbosity=0 -print_final_stats=1 -artifact_prefix="$dir/" \
                "$dir/$name.corpus" "$seeds" || return 1
        else
            $build -DFUZZ_FILES && FUZZ_SECONDS=${FUZZ_SECONDS:-3} "$dir/$name" "$seeds"/* || return 1
        fi
    done
}

planted() {
    make --no-print-directory build/libxdistill.a &&
    gcc -std=c99 -O1 -DXDISTILL_IMPLEMENTED -DFUZZ_FILES -I. tests/build/planted.c build/libxdistill.a -o "$dir/planted" -lm -lpthread || return 1
    printf '{"size": 5, "data": "hello"}' >"$dir/planted.seed"
    rm -f "$dir/planted.crash"
    "$dir/planted" "$dir/planted.seed" || return 1
    ! FUZZ_SECONDS=20 FUZZ_SEED=1 "$dir/planted" "$dir/planted.seed" 2>"$dir/planted.log" && [ -s "$dir/planted.crash" ] &&
        grep 'the input is in .*planted.crash' "$dir/planted.log" && ! "$dir/planted" "$dir/planted.crash" 2>/dev/null
}

# The losses' suites, and the golden vectors where there are some, on each CPU level that this machine has.
step_levels() {
    vectors=${GOLDEN:-../shared/golden}
    losses="tests/test_loss.c tests/test_topk.c tests/test_equivalence.c"
    [ -d "$vectors" ] || { vectors=$dir/none; mkdir -p "$vectors"; }
    unit gcc c99 O1 -DXDISTILL_PORTABLE -DXD_TEST_UNIT || return 1 # the level that ARM and old x86 run
    make --no-print-directory build/golden || return 1
    gcc $(ls build/golden.d/*.o | grep -v /implementation.o) "$unit" -o "$dir/golden" -lm -lpthread || return 1
    for level in plain portable avx2 avx512 avx512_bf16; do
        echo "== $level"
        "$dir/golden" --cpu=$level "$vectors"
        case $? in 0) ;; 77) continue ;; *) return 1 ;; esac
        "$dir/golden" --cpu=$level --invariant "$vectors" || return 1
        XDISTILL_CPU=$level suites "$dir" "$losses" test_implementation="$unit" || return 1
    done
    suites "$dir" "$(ls tests/test_simd_*.c tests/test_exact*.c)" test_implementation="$unit" carrying=tests/test_simd_loss.c \
        whole_test_cc="gcc -std=c99 -O1 -g -DXDISTILL_PORTABLE -I. -Itests/helpers"
}

# The tests of numbers on the level that ARM and older x86 run, the best one of a unit without AVX. Those that carry their own
# implementation go through the levels in the step above, but for these. Tests that need no part which an option leaves out have
# a unit without all of those: levels and options have nothing to do with each other, so one run shows both.
step_portable() {
    need gcc nm
    unit gcc c99 O1 -DXDI_NO_X86 $(printf -- '-DXDISTILL_NO_%s ' $everything) && missing || return 1
    all=$(of_numbers | grep -v 'tests/test_simd_\|tests/test_exact')
    few=$(can_run | grep -xF "$all")
    [ -n "$few" ] && suites "$dir" "$few" test_implementation="$unit" || return 1
    unit gcc c99 O1 -DXDI_NO_X86 -DXD_TEST_UNIT || return 1
    suites "$dir" "$(echo "$all" | grep -vxF "$few")" test_implementation="$unit" \
        whole_test_cc="gcc -std=c99 -O1 -g -DXDI_NO_X86 -I. -Itests/helpers"
}

# The golden vectors and the core's tests on 64-bit ARM: a cross compiler and an emulator of the processor.
step_aarch64() {
    need aarch64-linux-gnu-gcc
    emulator=
    for name in qemu-aarch64-static qemu-aarch64; do
        command -v $name >/dev/null 2>&1 && emulator=$name && break
    done
    [ -n "$emulator" ] || { echo "needs qemu-aarch64"; exit 77; }
    cc="aarch64-linux-gnu-gcc -std=c99 -O1 -I. -Itests/helpers"
    $cc -DXD_TEST_UNIT -c tests/build/implementation.c -o "$dir/unit.o" || return 1
    cc="aarch64-linux-gnu-gcc -std=c99 -O1 $private_names -Itests/helpers"
    vectors=${GOLDEN:-../shared/golden} failed=0
    if [ -d "$vectors" ]; then
        $cc -DXDISTILL_IMPLEMENTED tests/golden/*.c "$dir/unit.o" -static -o "$dir/golden" -lm -lpthread &&
        $emulator "$dir/golden" "$vectors" && $emulator "$dir/golden" --invariant "$vectors" || return 1
    fi
    for test in base crc files loss topk classic equivalence xtoken ema adamw clip safetensors comm; do
        $cc -DXDISTILL_IMPLEMENTED "tests/test_$test.c" "$dir/unit.o" -static -o "$dir/test_$test" -lm -lpthread || return 1
    done
    # The instruction for checksums, which the compiler uses for processors that have it for sure.
    $cc -march=armv8-a+crc -Isrc -DXDISTILL_IMPLEMENTED tests/test_crc.c src/base/cpu.c src/base/crc.c -static -o "$dir/test_crc_instruction" -lm || return 1
    TEST_SECONDS=300 TEST_WRAPPER=$emulator sh tests/build/run.sh "$dir" \
        $(ls "$dir"/test_* | grep -v '\.log$')
}

# Each option that leaves a wing out, as docs/building.md names them, and each two and all of them, in one unit and in sections:
# both compile and link without a warning and have the same functions; what was left out is an error that names the option, in C
# and C++. What a layer takes of another shows when it is linked, so the code is not optimized, and the tests are run with the least
# that there can be alone, by step_portable.
everything="ACROSS MODELS DIFFUSION"
step_options() {
    need gcc clang nm
    warnings=$strict
    for words in ACROSS MODELS DIFFUSION "ACROSS MODELS" "ACROSS DIFFUSION" "MODELS DIFFUSION" "$everything"; do
        echo "== $words"
        options=$(printf -- '-DXDISTILL_NO_%s ' $words)
        whole="$(driver gcc c99) -O1 $options -I."
        case $words in *\ *) [ "$words" = "$everything" ] || strict= ;; esac # one without each and one without all show what warns
        unit gcc c99 O0 -fPIC $options && missing && left_out || return 1
        $whole tests/build/declarations.c -x none "$unit" -o "$dir/linked" -lm -lpthread && "$dir/linked" || return 1
        [ "$words" != "$everything" ] || $whole -fsyntax-only tests/build/static_unit.c || return 1
        strict= # the unit has the same code
        sections "$dir/section" gcc c99 O0 -fPIC $options && same_functions "$unit" || return 1
        strict=$warnings
    done
    for old in TEXT XTOKEN TEACHER COMPAT CHECKPOINT DMD; do
        gcc -std=c99 -I. -DXDISTILL_NO_$old -fsyntax-only tests/build/declarations.c 2>&1 | grep "replaces.*_$old" || return 1
    done
}

# The sections export what the unit exports, xd_ names and no others, and link into a program.
same_functions() {
    gcc -shared $objects -o "$dir/sections.so" -lm -lpthread && gcc -shared "$1" -o "$dir/unit.so" -lm -lpthread || return 1
    for library in sections unit; do nm -D --defined-only "$dir/$library.so" | awk '$3 !~ /^_Z/ { print $3 }' | sort >"$dir/$library.names"; done
    diff "$dir/unit.names" "$dir/sections.names" && ! grep -v '^xd_' "$dir/sections.names" || return 1
    ${whole:-gcc -std=c99 -I.} tests/build/declarations.c -x none $objects -o "$dir/linked" -lm -lpthread && "$dir/linked"
}

# Sections in C and C++, and beside them suites of every wing on the sections of `make lib`. One that is missing, made with other
# options, or of another version does not link, and the linker names it. A smaller header, as tools/amalgamate.py writes it.
step_sections() {
    need gcc g++ nm python3
    whole=
    sections "$dir/section" gcc c++17 O0 -fPIC && unit gcc c++17 O0 -fPIC && whole="g++ -x c++ -std=c++17 -I." same_functions "$unit" || return 1
    make --no-print-directory build/libxdistill.a || return 1
    suites "$dir" "tests/test_loss.c tests/test_xtoken.c tests/test_wrap.c tests/test_checkpoint.c tests/test_dmd.c
        tests/test_tokenizer.c tests/test_comm.c" test_implementation="$(echo build/section?.o)" || return 1
    gcc -std=c99 -O0 -fPIC -DXDISTILL_SECTION=3 -DXDISTILL_NO_ACROSS -I. -c tests/build/implementation.c -o "$dir/other.o" || return 1
    refused 'xdistill_section_4_v' $(ls build/section?.o | grep -v section4) &&
        refused 'xdistill_section_3_v' $(ls build/section?.o | grep -v section3) "$dir/other.o" || return 1
    gcc -std=c99 -I. -DXDISTILL_SECTION=1 -DXDISTILL_STATIC -fsyntax-only tests/build/implementation.c 2>&1 | grep 'error.*XDISTILL_STATIC' &&
        gcc -std=c99 -I. -DXDISTILL_SECTION=7 -fsyntax-only tests/build/implementation.c 2>&1 | grep 'XDISTILL_SECTION is 1 to 6' || return 1
    python3 tools/amalgamate.py --wings core,models --out "$dir/small" && [ $(($(wc -c <"$dir/small/xdistill.h") * 10)) -lt $(($(wc -c <xdistill.h) * 8)) ] &&
    $(driver gcc c99) -O0 -I"$dir/small" -c tests/build/implementation.c -o "$dir/small.o" &&
    gcc -std=c99 -I"$dir/small" tests/build/declarations.c "$dir/small.o" -o "$dir/linked" -lm -lpthread && "$dir/linked" &&
    ! python3 tools/amalgamate.py --wings models
}

# A program of these objects does not link, and the linker says this name.
refused() {
    name=$1
    shift
    ! gcc -std=c99 -I. tests/build/declarations.c "$@" -o "$dir/linked" -lm -lpthread 2>"$dir/linker" && grep -o "undefined reference to .$name.*" "$dir/linker" | head -n 1
}

# The functions that $unit lacks, in $dir/missing.
missing() {
    make --no-print-directory build/libxdistill.a || return 1
    for object in build/libxdistill.a "$unit"; do nm "$object" | awk '$2 == "T" && $3 ~ /^xd_/ { print $3 }' | sort >"$dir/$(basename "$object").names"; done
    comm -23 "$dir/libxdistill.a.names" "$dir/$(basename "$unit").names" >"$dir/missing"
    [ -s "$dir/missing" ]
}

# What $options leave out are the functions that $unit lacks, and the types they take. Each is used in a line of its own: a
# function is called, a type is that of an object; and each compiler's error for that line names option and name.
left_out() {
    gcc -std=c99 -I. $options -E -dM tests/build/declarations.c >"$dir/macros"
    sed -n 's/^#define \(xd_[a-z0-9_]*\) (\(XDISTILL_NO_[A-Z]*_leaves_out_\1\))$/\1 \2/p' "$dir/macros" | sort >"$dir/functions"
    sed -n 's/^#define \(xd_[a-z0-9_]*\) \(XDISTILL_NO_[A-Z]*_leaves_out_\1\)$/\1 \2/p' "$dir/macros" | sort >"$dir/types"
    sed 's/ .*//' "$dir/functions" | diff "$dir/missing" - || { echo "not what the option leaves out"; return 1; }
    {
        echo '#include "xdistill.h"'
        awk '{ printf "void call_%d(void);\nvoid call_%d(void) { %s(); }\n", NR, NR, $1 }' "$dir/functions"
        awk '{ printf "extern %s *object_%d;\n", $1, NR }' "$dir/types"
    } >"$dir/uses.c"
    sed 's/.* //' "$dir/functions" "$dir/types" | sort >"$dir/expected"
    for cc in "gcc -std=c99" "g++ -x c++ -std=c++11" "clang -std=c99 -ferror-limit=0" "clang++ -x c++ -std=c++17 -ferror-limit=0"; do
        $cc $options -I. -fsyntax-only "$dir/uses.c" 2>&1 |
            sed -n 's/.*error:.*\(XDISTILL_NO_[A-Z]*_leaves_out_xd_[a-z0-9_]*\).*/\1/p' | sort -u | diff "$dir/expected" - ||
            { echo "$cc has other errors"; return 1; }
    done
    echo "$(wc -l <"$dir/expected") names"
}

# The tests whose objects ask for no function that was left out.
can_run() {
    make --no-print-directory build-tests >&2 || return 1
    for source in $(grep -LE "\\<($private)" tests/test_*.c); do
        nm -u "build/test/$(basename "$source" .c).o" | awk '{ print $2 }' | sort >"$dir/needs"
        comm -12 "$dir/missing" "$dir/needs" | grep -q . || echo "$source"
    done
}

step_examples() {
    ls examples/*.c >/dev/null 2>&1 || { echo "there is no examples/*.c"; exit 77; }
    make --no-print-directory examples
}

# The ranks of one machine, started and ended together.
step_launch() {
    need cc
    make --no-print-directory build/xdrun && sh tests/launch/test_xdrun.sh
}

step_demo() {
    sh tests/demo/test_demo.sh
}

step_demo_mpi() {
    need mpicc mpirun
    sh tests/demo/test_demo_mpi.sh
}

step_demo_sharded() {
    sh tests/demo/test_demo_sharded.sh
}

step_demo_toys() {
    sh tests/demo/test_demo_toys.sh
}

step_demo_images() {
    sh tests/demo/test_demo_images.sh
}

step_demo_real() {
    need python3
    sh tests/demo/test_demo_real.sh
}

step_distil() {
    need python3
    sh tests/demo/test_distil.sh
}

step_transformers() {
    need python3
    sh tests/demo/test_transformers.sh
}

step_golden() {
    [ -d "${GOLDEN:-../shared/golden}" ] || { echo "there are no golden vectors"; exit 77; }
    make --no-print-directory golden
}

# What judges the vectors, judged: a crash is one failure, no key goes unread.
step_golden_judge() {
    need python3
    [ -d "${GOLDEN:-../shared/golden}" ] || { echo "there are no golden vectors"; exit 77; }
    make --no-print-directory build/golden && python3 tests/build/test_golden.py build/golden "${GOLDEN:-../shared/golden}"
}

step_mpi() {
    need mpicc mpirun
    ls tests/mpi/*.c >/dev/null 2>&1 || { echo "there is no tests/mpi"; exit 77; }
    TEST_SECONDS=300 make --no-print-directory mpi # waiting processes spin: beside another step a test takes six times as long
}

# A few of the same tests with a second MPI library, under the names by which it stands beside Open MPI; its header in C and C++.
step_mpich() {
    need mpicc.mpich mpicxx.mpich mpiexec.hydra gcc g++
    make --no-print-directory build/libxdistill.a || return 1
    printf '#define XDISTILL_IMPLEMENTATION\n#include "xdistill.h"\n#include "xdistill_mpi.h"\n' >"$dir/companion.c"
    include=-I$(mpicc.mpich -show -c | tr ' ' '\n' | sed -n 's/^-I//p' | head -n 1)
    for language in c99 c++17; do
        $(driver gcc $language) -DXDISTILL_IMPLEMENTED $include -I. -c "$dir/companion.c" -o "$dir/companion.o" || return 1
    done
    programs=
    for name in test_mpi test_mpi_exit; do
        programs="$programs $dir/$name"
        mpicc.mpich -std=c99 -O1 -DXDISTILL_IMPLEMENTED -I. -Itests/helpers tests/mpi/$name.c build/libxdistill.a -o "$dir/$name" \
            -lm -lpthread || return 1
    done
    # Messages that broken worlds have left behind are not worth a warning.
    UCX_LOG_LEVEL=error TEST_WRAPPER="mpiexec.hydra -n 3" sh tests/build/run.sh "$dir" $programs
}

# Four hosts made of namespaces, links cut between them; 20 s.
step_hosts() {
    need mpicc mpirun
    make --no-print-directory build/mpi/test_mpi_hosts && sh tests/mpi/hosts.sh
}

# The benchmarks name private things, which nobody else would miss; tools and demonstrations are built without warnings: the front
# end reads each of them.
step_bench() {
    need clang # its front end takes a tenth of gcc's time, but warns of static functions of headers that a program does not use
    status=0
    few="-Wno-unused-function -Wno-missing-field-initializers"
    for source in bench/*.c bench/torch/*.c tools/*.c tools/xdistill/*.c examples/*/*.c; do
        clang -std=c99 -Wall -Wextra -Werror $few -I. -fsyntax-only "$source" || status=1
    done
    return $status
}

# The header, and the benchmarks of a GPU, of which the emulation sees other headers than NVIDIA's.
step_nvcc() {
    need nvcc
    nvcc -O0 -I. -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror -c tests/build/include.cu \
        -o "$dir/include.o" || return 1
    programs=gpu
    echo '#include <nccl.h>' | nvcc -x c++ -E - >/dev/null 2>&1 && programs="gpu nccl"
    for name in $programs; do
        nvcc -O0 -x c++ -DXDISTILL_IMPLEMENTED -I. -c "bench/$name.cu" -o "$dir/$name.o" || return 1
    done
}

# The CUDA unit for one architecture, `make cuda-unit` compiles it for all; and each example by the line it gives, with that
# object and, but for the first, with the library.
step_cuda() {
    need nvcc
    make --no-print-directory cuda-unit CUDA_ARCHS=90 && make --no-print-directory build/libxdistill.a || return 1
    library=
    for source in examples/cuda/*.cu; do
        line=$(sed -n '/^ \*  *nvcc /{s/^ \* *//;s#xdistill_cuda.cu#build/xdistill_cuda.o#;s# -o .*##;p;q;}' "$source")
        echo "$line"
        $line $library -lpthread -o "$dir/$(basename "$source" .cu)" || return 1
        library="-DXDISTILL_IMPLEMENTED build/libxdistill.a"
    done
}

# The tests of the CUDA unit on the emulation, from the generated files. The emulation's own tests come first. The plain order
# is run in the checker's build and by coverage_cuda, so the plain build leaves it to them. The checker watches every access of
# kernels: not the values that poison changes, nor a library's products. asan, which watches the unit's host code too, has the
# programs with much of that; tests:address watches the library.
step_cuda_emu() {
    need g++
    make --no-print-directory build/libxdistill.a || return 1
    programs= host='cublas|comm|ema|equivalence|fill|nccl|nccl_device|optimizer|reduce|route|step|thaw|topk|wrap'
    [ "$1" != asan ] || programs=$(ls tests/cuda/test_*.cpp | grep -E "test_cuda_($host)\.cpp")
    [ "$1" != checker ] || programs=$(ls tests/cuda/test_*.cpp | grep -v 'test_cuda_cublas\|test_cuda_poison')
    EMU_BUILD="$dir/emu" sh tests/emu/run.sh "$1" &&
    CUDA_TESTS=$programs CUDA_PLAIN_ORDER=0 CUDA_COMPARE=compare:3 CUDA_OBJECTS="$out/cuda_objects" CUDA_BUILD="$dir/cuda" CUDA_HEADER=. CUDA_LIBRARY=build/libxdistill.a sh tests/cuda/run.sh "$1"
}

# With the emulation that cuda_emu:plain has built before, if it has. So has the step below.
step_gpu_check() {
    need g++
    EMU_BUILD="$out/cuda_emu-plain.d/emu" sh tests/build/test_gpu_check.sh "$dir"
}

# The tests of kernels with the code that nvcc makes of them, as PTX. These programs reach all but three of the 225 kernels. What each
# operation costs by it, under its budget. And that both find the faults that are planted.
step_cuda_ptx() {
    need nvcc g++
    make --no-print-directory build/libxdistill.a || return 1
    named='dmd|dmd_losses|ema|loss|mft|optimizer|poison|reduce|ring|rounding|step|topk|uld'
    programs=$(ls tests/cuda/test_*.cpp | grep -E "test_cuda_($named)\.cpp")
    GOLDEN=none CUDA_TESTS=$programs EMU_BUILD="$out/cuda_emu-plain.d/emu" CUDA_OBJECTS="$out/cuda_objects" CUDA_BUILD="$dir/cuda" CUDA_HEADER=. CUDA_LIBRARY=build/libxdistill.a sh tests/cuda/run.sh ptx cost &&
    sh tests/emu/planted_ptx.sh "$dir/cuda/ptx" && sh tests/cuda/planted_cost.sh "$dir/cuda/ptx"
}

step_coverage_cuda() {
    need g++ gcov
    make --no-print-directory build/libxdistill.a || return 1
    EMU_BUILD="$out/cuda_emu-plain.d/emu" CUDA_OBJECTS="$out/cuda_objects" CUDA_BUILD="$dir/cuda" CUDA_LIBRARY=build/libxdistill.a sh tests/cuda/run.sh coverage
}

step_install() {
    root=$PWD/$dir
    make --no-print-directory install PREFIX=/usr DESTDIR="$root/stage" || return 1
    for file in bin/xdistill include/xdistill.h lib/libxdistill.a lib/libxdistill.so share/pkgconfig/xdistill.pc share/pkgconfig/xdistill-lib.pc \
        share/xdistill/xdistill_ctypes.py share/cmake/xdistill/xdistill-config.cmake share/cmake/xdistill/xdistill-companions.cmake; do
        [ -s "$root/stage/usr/$file" ] || { echo "$file is missing"; return 1; }
    done
    make --no-print-directory uninstall PREFIX=/usr DESTDIR="$root/stage" || return 1
    [ -z "$(find "$root/stage" -type f -o -type l)" ]
}

# Install by make and by CMake; each time a project of its own finds the package, builds and runs. As a subproject it installs
# nothing and compiles the library for a program that links it.
step_cmake() {
    need cmake
    root=$PWD/$dir
    make --no-print-directory install PREFIX="$root/make" || return 1
    cmake -S . -B "$root/own" -DCMAKE_INSTALL_PREFIX="$root/cmake" -DBUILD_TESTING=OFF || return 1
    cmake --build "$root/own" --target install || return 1
    for prefix in make cmake; do
        cmake -S tests/install -B "$root/use-$prefix" -DCMAKE_PREFIX_PATH="$root/$prefix" || return 1
        cmake --build "$root/use-$prefix" || return 1
        "$root/use-$prefix/app" && "$root/use-$prefix/linked" || return 1
    done
    cmake -S tests/install -B "$root/sub" -DXDISTILL_SOURCE="$PWD" -DCMAKE_INSTALL_PREFIX="$root/none" || return 1
    cmake --build "$root/sub" && "$root/sub/app" && "$root/sub/linked" && cmake --install "$root/sub" && [ ! -e "$root/none" ] || return 1
    components=
    command -v mpicc >/dev/null 2>&1 && components=mpi
    command -v nvcc >/dev/null 2>&1 && components="$components;cuda"
    [ -z "$components" ] || {
        cmake -S tests/install -B "$root/companions" -DCMAKE_PREFIX_PATH="$root/make" -DXDISTILL_COMPONENTS="${components#;}" \
            $(command -v nvcc >/dev/null 2>&1 && echo -DWITH_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90-virtual -DCMAKE_CUDA_FLAGS=-G) &&
        cmake --build "$root/companions" || return 1
    }
    [ ! -x "$root/companions/ranks" ] || "$root/companions/ranks" && { [ ! -x "$root/companions/device" ] || "$root/companions/device"; }
}

step_pkgconfig() {
    need pkg-config cc
    root=$PWD/$dir
    make --no-print-directory install PREFIX="$root" || return 1
    export PKG_CONFIG_PATH="$root/share/pkgconfig"
    cc -std=c99 tests/install/app.c -o "$dir/app" $(pkg-config --cflags --libs xdistill) && "$dir/app" || return 1
    cc -std=c99 tests/install/linked.c -o "$dir/linked" $(pkg-config --cflags --libs xdistill-lib) && LD_LIBRARY_PATH="$root/lib" "$dir/linked" || return 1
    # The binding and the shared library that were installed, as a Python program uses them.
    ! command -v python3 >/dev/null 2>&1 || PYTHONPATH="$root/share/xdistill" python3 -c 'import sys, xdistill_ctypes
xd = xdistill_ctypes.load(sys.argv[1])
assert xd.xd_result_name(xdistill_ctypes.XD_OK) == b"OK"' "$root/lib/libxdistill.so"
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
