#!/bin/sh
# One script for a machine with a GPU, which may be available for half an hour only and be lost at any time. Compiles the
# CUDA unit and everything around it once, on all cores; then correctness; the benchmark of the unit; compute-sanitizer on a
# sample; the other benchmarks; and compute-sanitizer on the other tests. Needs the CUDA toolkit, a C compiler and this folder.
#
#   sh tools/gpu_check.sh            or: make gpu-check          everything
#   sh tools/gpu_check.sh --rest     or: make gpu-check ARGS=--rest   continues: what has passed for these sources on this
#                                    device is not run again; first what has not been run, then what failed
#   sh tools/gpu_check.sh --build    compiles only, also without a GPU (for GPU_CHECK_ARCH, 90), and prints the time. Both
#                                    folders, copied to a machine with a GPU, are what --rest continues there
#   sh tools/gpu_check.sh --tests    compiles, tests and golden vectors only; ends with `N passed, N failed, N skipped`.
#                                    Both also with --rest
#
# Every step that ends appends a line to GPU_CHECK_OUT/steps.jsonl: step, verdict (ok, failed, timeout, cut, skipped),
# seconds, processor seconds, the last line it printed, commit, device, driver, toolkit and date. Benchmarks append their
# rows to bench.jsonl there, each as soon as it is measured, and log has everything printed. A step has a time limit of its
# own. SIGTERM ends the step that runs, with verdict cut; after SIGKILL its line is missing, and --rest runs it again.
#
#   GPU_CHECK_OUT=folder       of results (build/gpu_check);  GPU_CHECK_BUILD=folder  of objects (build/gpu)
#   GPU_CHECK_SECONDS=n        ends after so many seconds, with verdict cut for the running steps
#   GPU_CHECK_COMMIT=name      without git; or a file COMMIT in this folder; else "unknown"
#   GPU_CHECK_EMULATE=1        the same on the CPU, through the emulation: how this script is tested
#   GOLDEN=dir  CUDA_TESTS="tests/cuda/test_x.cpp ..."  CUDA_HEADER=src or .  NCCL_HOME=dir  NVCC, CC, CXX=programs
#   TORCH_PYTHON=file          a python with PyTorch, and Liger if it is to be compared; python3
cd "$(dirname "$0")/.." || exit 1
out=${GPU_CHECK_OUT:-build/gpu_check} build=${GPU_CHECK_BUILD:-build/gpu}
lines=$out/steps.jsonl rows=$out/bench.jsonl log=$out/log
nvcc=${NVCC:-nvcc} cc=${CC:-cc} cxx=${CXX:-g++} header=${CUDA_HEADER:-.} emulate=${GPU_CHECK_EMULATE:-}
tests=${CUDA_TESTS:-$(ls tests/cuda/test_*.cpp)}
golden=${GOLDEN:-../shared/golden}
python=${TORCH_PYTHON:-python3}
sample="test_cuda_reduce test_cuda_loss test_cuda_xtoken_rows" # under compute-sanitizer before the benchmarks

names() { for file in $tests; do basename "$file" .cpp; done; }

# ---- the steps, in order ----

examples() { for file in examples/cuda/*.cu; do basename "$file" .cu; done; }
# Programs that need NCCL: "missing" without its header.
uses_nccl() { case $1 in nccl | *_nccl | test_cuda_nccl_gpus) true ;; *) false ;; esac; }
programs() {
    echo $(names) $(examples) $([ ! -d "$golden" ] || echo golden)
    [ "$what" = tests ] || echo bench_gpu bench_nccl torch
}
steps_compile() { for name in unit library $(programs); do echo "compile:$name"; done; } # the longest first
steps_link() { for name in $(programs); do echo "link:$name"; done; }
steps_correct() {
    for name in $(names); do echo "test:$name"; done
    for name in $(examples); do echo "example:$name"; done
    [ ! -d "$golden" ] || echo golden:default golden:invariant
}
steps_measure() {
    echo bench:gpu bench:gpu_two_sweeps
    for name in $sample; do names | grep -qx "$name" && echo "memcheck:$name"; done
    echo racecheck:test_cuda_reduce bench:torch bench:nccl
    for name in $(names); do echo " $sample " | grep -q " $name " || echo "memcheck:$name"; done
}

# ---- the functions of the steps; status 77 when something is missing, which the last line names ----

limit_of() {
    case $1 in
    compile:unit) echo 580 ;;
    compile:* | link:*) echo 300 ;;
    test:* | golden:* | example:*) echo 120 ;;
    memcheck:* | racecheck:*) echo 60 ;;
    bench:torch) echo 400 ;;
    *) echo 200 ;;
    esac
}

missing() {
    echo "needs $1"
    exit 77
}

# A file beside the unit: of host code, where nvcc knows where CUDA's headers are, or an example, which may have kernels.
compile_host() { compile_beside "-x c++" "$@"; }
compile_example() { compile_beside "-arch=sm_$check_arch" "$@"; }
compile_beside() {
    language=$1 source=$2
    shift 2
    if [ "$emulate" ]; then
        $cxx $EMU_HOST -O0 -w "$@" -Itests/helpers -I"$header" -x c++ -c "$source" -o "$object"
    else
        "$nvcc" -O3 -Xcompiler -fPIC $language "$@" -Itests/helpers -I"$header" -c "$source" -o "$object"
    fi
}

step_compile() {
    object=$build/$1.o small=
    rm -f "$object" "$build/$1"
    [ -z "$emulate" ] || small="-DGPU_ROWS=8 -DGPU_VOCABULARY=300 -DGPU_PARAMS=4096 -DGPU_HEAD_ROWS=8 -DGPU_WIDTH=64 \
-DGPU_ARRAYS=9 -DGPU_ARRAY=8 -DNCCL_BENCH_MOST=4096 -DNCCL_BENCH_CALLS=2"
    nccl=${NCCL_HOME:+-I$NCCL_HOME/include}
    if uses_nccl "$1" && [ -z "$emulate" ]; then
        echo '#include <nccl.h>' | "$nvcc" -x c++ $nccl -E - >/dev/null 2>&1 || missing nccl.h
    fi
    case $1 in
    unit)
        if [ "$emulate" ]; then $cxx $EMU_CU -O0 -I"$header" -c "$header/xdistill_cuda.cu" -o "$object"
        else NVCC="$nvcc" CUDA_ARCHS="$check_arch" CUDA_FLAGS="-Xcompiler -fPIC" sh tools/cuda_build.sh "$header" "$object"; fi ;;
    library) $cc -std=c99 $([ "$emulate" ] && echo -O0 || echo -O2) -fPIC -DXD_TEST_UNIT -I"$header" -c tests/build/implementation.c -o "$object" ;;
    golden)
        mkdir -p "$build/golden.d" || return 1
        flags=$([ "$emulate" ] && echo "-O0 -DXD_EMU -Itests/emu/include" || echo -O2)
        for part in tests/golden/*.c; do
            $cc -std=c99 $flags -DXDISTILL_IMPLEMENTED -DXD_TEST_LAYERS -DXD_PRIVATE=extern -DGOLDEN_CUDA -Isrc -Itests/helpers -c "$part" \
                -o "$build/golden.d/$(basename "$part" .c).o" || return 1
        done
        : >"$object" ;;
    bench_gpu) compile_host bench/gpu.cu -DXDISTILL_IMPLEMENTED $small ;;
    bench_nccl) compile_host bench/nccl.cu -DXDISTILL_IMPLEMENTED $small $nccl ;;
    torch)
        [ -z "$emulate" ] || missing "a GPU"
        "$python" -c 'import torch' 2>/dev/null || missing "a python with PyTorch"
        compile_host bench/torch/gpu_shim.cu -DXDISTILL_IMPLEMENTED ;;
    test_*) compile_host "tests/cuda/$1.cpp" -Isrc -DXD_TEST_LAYERS $nccl ;;
    *) compile_example "examples/cuda/$1.cu" -DXDISTILL_IMPLEMENTED $nccl ;;
    esac
}

step_link() {
    objects="$build/$1.o" libraries="-lpthread -lm" program=$build/$1
    [ "$1" != golden ] || objects=$(ls "$build"/golden.d/*.o)
    ! uses_nccl "$1" || [ "$emulate" ] || libraries="$libraries ${NCCL_HOME:+-L$NCCL_HOME/lib -Xlinker -rpath=$NCCL_HOME/lib} -lnccl"
    [ "$1" != torch ] || libraries="$libraries -shared" program=$build/gpu_shim.so
    for file in "$build/$1.o" "$build/unit.o" "$build/library.o"; do [ -f "$file" ] || missing "$file"; done
    if [ "$emulate" ]; then $cxx $objects "$build/unit.o" "$build/library.o" "$EMU_LIBRARY" $EMU_LINK $libraries -o "$program"
    else "$nvcc" $objects "$build/unit.o" "$build/library.o" $libraries -o "$program"; fi
}

run() {
    [ -x "$build/$1" ] || missing "$build/$1"
    program=$build/$1
    shift
    "$program" "$@"
}

step_test() { run "$1"; }
step_example() { if [ "$1" = nccl ]; then run_ranks; else run "$1"; fi; }

# A process for each GPU. Where there is one GPU also two processes on it: NCCL allows that of processes which do not seem to be
# on one host.
run_ranks() {
    gpus=1
    [ "$emulate" ] || gpus=$(nvidia-smi -L | wc -l)
    start_ranks "$gpus" || return 1
    [ "$gpus" = 1 ] && [ -z "$emulate" ] || return 0
    timeout 60 sh "$script" --do two_ranks:nccl || echo "NCCL does not let two processes have one GPU"
}
step_two_ranks() { NCCL_HOSTID=apart start_ranks 2; }
start_ranks() {
    secret=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n') rank=0 children= result=0
    while [ "$rank" -lt "$1" ]; do
        RANK=$rank WORLD_SIZE=$1 LOCAL_RANK=$([ "${NCCL_HOSTID:-}" ] && echo 0 || echo "$rank") \
            LOCAL_WORLD_SIZE=$([ "${NCCL_HOSTID:-}" ] && echo 1 || echo "$1") MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
            XDISTILL_SECRET=$secret NCCL_HOSTID=${NCCL_HOSTID:+$NCCL_HOSTID$rank} "$build/nccl" &
        children="$children $!" rank=$((rank + 1))
    done
    for child in $children; do wait "$child" || result=1; done
    return "$result"
}
step_golden() { if [ "$1" = invariant ]; then run golden --invariant "$golden"; else run golden "$golden"; fi; }

sanitize() {
    command -v compute-sanitizer >/dev/null 2>&1 || missing compute-sanitizer
    [ -x "$build/$2" ] || missing "$build/$2"
    compute-sanitizer --tool "$1" --error-exitcode 9 "$build/$2"
}
step_memcheck() { sanitize memcheck "$1"; }
step_racecheck() { sanitize racecheck "$1"; }

step_bench() {
    case $1 in
    gpu_two_sweeps) GPU_TWO_SWEEPS=1 run bench_gpu -J "$rows" ;;
    torch)
        [ -f "$build/gpu_shim.so" ] || missing "$build/gpu_shim.so"
        "$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || missing "a PyTorch that can use the GPU"
        PYTHONUNBUFFERED=1 "$python" bench/torch/compare.py --device cuda "$build/gpu_shim.so" --rounds 3 -J "$rows" ;;
    *) run "bench_$1" -J "$rows" ;;
    esac
}

# ---- running one: its limit, its line ----

file_name() { echo "$1" | tr : -; }
text() { tr -d '"\\' | tr -c '[:print:]' ' ' | cut -c 1-200 | sed 's/ *$//'; }
clock() { if [ -r /proc/uptime ]; then cut -d ' ' -f 1 /proc/uptime; else date +%s; fi; }

# `gpu_check.sh --one STEP`, a separate process. Compilations run in parallel: each has its own log until it ends.
one() {
    step=$1 limit=$(limit_of "$1") mine=$build/running/$(file_name "$1") file=$log child= cut= trimmed=
    trap 'cut=1 trimmed=1; [ -z "$child" ] || kill -TERM "$child"' TERM INT HUP
    echo $$ >"$mine"
    [ -z "$check_end" ] || left=$((check_end - $(date +%s)))
    [ -z "$check_end" ] || [ "$left" -ge "$limit" ] || limit=$left trimmed=1
    if [ "$limit" -le 0 ] || [ -e "$build/running/stop" ]; then
        rm "$mine"
        return
    fi
    case $step in
    compile:* | link:*) file=$build/$(file_name "$step").log; : >"$file" ;;
    *) echo "== $step" >>"$log" ;;
    esac
    start=$(($(wc -c <"$file") + 1)) begin=$(clock)
    timeout -k 5 "$limit" sh "$script" --do "$step" >>"$file" 2>&1 &
    child=$!
    [ -z "$cut" ] || kill -TERM "$child"
    wait "$child"
    status=$?
    [ -z "$cut" ] || { wait "$child"; status=124; }
    note "$status"
    rm "$mine"
}

# The step's line, and what the terminal shows of it.
note() {
    case $1:$trimmed in
    0:*) verdict=ok ;;
    77:*) verdict=skipped ;;
    124:1 | 137:1) verdict=cut ;;
    124: | 137:) verdict=timeout ;;
    *) verdict=failed ;;
    esac
    seconds=$(echo "$begin $(clock)" | awk '{ printf "%.2f", $2 - $1 }')
    times >"$mine.times" # of this shell, and of all processes that it has waited for
    processor=$(awk 'NR == 2 { for (i = 1; i <= 2; i++) { split($i, part, /[ms]/); all += 60 * part[1] + part[2] }
        printf "%.2f", all }' "$mine.times")
    rm "$mine.times"
    detail=$(tail -c "+$start" "$file" | tail -n 1 | text)
    [ "$file" = "$log" ] || { echo "== $step"; cat "$file"; } >>"$log"
    printf '{"schema":"xdistill-gpu-check/1","step":"%s","verdict":"%s","seconds":%s,"processor_seconds":%s,' \
        "$step" "$verdict" "$seconds" "$processor" >"$mine.line"
    printf '"detail":"%s",%s,"date":"%s"}\n' "$detail" "$check_record" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" >>"$mine.line"
    cat "$mine.line" >>"$lines" # in one write
    rm "$mine.line"
    echo "$step: $verdict, $seconds s; $detail"
    case $verdict in failed | timeout) tail -c "+$start" "$file" | tail -n 20 | sed 's/^/    /' ;; esac
}

# ---- all of them ----

gpu() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1; }

# What every line carries. A verdict "ok" counts for the same commit and sources, and unless it is of an object for the
# same device.
describe() {
    commit=${GPU_CHECK_COMMIT:-$(git describe --always --dirty --abbrev=12 2>/dev/null || cat COMMIT 2>/dev/null || echo unknown)}
    sources=$(find src tests/cuda tests/golden tests/helpers tests/test_poison.c examples/cuda bench xdistill* -type f ! -path 'bench/results/*' |
        LC_ALL=C sort | xargs cat | cksum)
    if [ "$emulate" ]; then
        device=emulation toolkit=$($cxx --version | head -n 1)
    else
        device=$(gpu name) toolkit=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
    fi
    compiled=$(printf '"commit":"%s","sources":"%s"' "$(echo "$commit" | text)" "${sources%% *}")
    identity=$(printf '%s,"device":"%s"' "$compiled" "$(echo "${device:-none}" | text)")
    check_record=$(printf '%s,"capability":"%s","memory":"%s","driver":"%s","toolkit":"%s"' "$identity" "$check_arch" \
        "$(gpu memory.total)" "$(gpu driver_version)" "$(echo "$toolkit" | text)")
    export check_record XDISTILL_COMMIT="$commit"
    echo "$check_record"
}

steps() {
    {
        steps_compile
        steps_link
        [ "$what" = build ] || steps_correct
        [ "$what" != all ] || steps_measure
    } | tr ' ' '\n'
}

# The lines that count: of this run, or with --rest of these sources, on this device unless of an object; the last one of
# each step.
last_lines() {
    tail -n "+$first" "$lines" | grep -F "$compiled" | awk -F '"step":"' -v identity="$identity" '
        index($0, identity) || $2 ~ /^(compile|link):/ { name = $2; sub(/".*/, "", name); last[name] = $0 }
        END { for (name in last) print last[name] }'
}

# "step verdict" for every step, the second word empty where it has not been run. What was compiled counts where it still is.
made() {
    case $1 in
    compile:*) [ -f "$build/${1#*:}.o" ] ;;
    link:torch) [ -f "$build/gpu_shim.so" ] ;;
    link:*) [ -f "$build/${1#*:}" ] ;;
    esac
}
verdicts() {
    last_lines | sed 's/.*"step":"\([^"]*\)","verdict":"\([a-z]*\)".*/\1 \2/' >"$build/last"
    steps | while read -r step; do
        verdict=$(sed -n "s/^$step //p" "$build/last")
        case $step:$verdict in compile:*:ok | link:*:ok) made "$step" || verdict= ;; esac
        echo "$step $verdict"
    done
}

# Ends the running steps, and each writes its line. Only processes that this script has started are in the folder.
end() {
    ended=1
    : >"$build/running/stop"
    for file in "$build"/running/*; do
        case ${file##*/} in *.* | stop) ;; *) kill -TERM "$(cat "$file")" 2>/dev/null ;; esac
    done
}

# Those of $wanted whose kind is one of these words, several at a time.
go() {
    chosen=$(echo "$wanted" | grep -E "^($1):")
    [ "$chosen" ] && [ -z "$ended" ] || return 0
    echo "$chosen" | xargs -n 1 -P "$2" sh "$script" --one &
    wait $!
    [ -z "$ended" ] || wait
}

go_through() {
    wanted=$1 cores=$(getconf _NPROCESSORS_ONLN)
    go compile "$cores"
    go link "$cores"
    go 'test|example|golden' 1
    go 'memcheck|racecheck|bench' 1
}

counts() {
    last_lines | grep '"step":"\(test\|golden\):' | awk '{
        ok = match($0, /[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped/)
        split(ok ? substr($0, RSTART, RLENGTH) : "0 0 0", n, /[^0-9]+/)
        passed += n[1]; failed += n[2]; if ($0 ~ /"step":"test:/) skipped += n[3]
        if (n[2] + 0 == 0 && $0 !~ /"verdict":"ok"/) failed++
    } END { printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped }'
}

finish() {
    verdicts >"$build/verdicts"
    last_lines | awk '/"step":"(compile|link):/ { sub(/.*"processor_seconds":/, ""); all += $0 + 0 }
        END { printf "compiled in %.0f processor seconds, %.0f s on 16 cores\n", all, all / 16 }'
    awk '{ n[NF > 1 ? $2 : "cut"]++ } END { printf "%d steps passed, %d failed, %d ran out of time, %d lack something, %d are left\n",
        n["ok"], n["failed"], n["timeout"], n["skipped"], n["cut"] }' "$build/verdicts"
    [ "$what" != tests ] || counts
    [ -z "$ended" ] || exit 143
    if grep -q ' $\| cut$' "$build/verdicts"; then
        echo "cut; to go on: sh tools/gpu_check.sh --rest"
        exit 75
    fi
    bad=$(sed -n 's/\(.*\) \(failed\|timeout\)$/\1/p' "$build/verdicts")
    if [ "$bad" ]; then
        echo "failed:" $bad "($log)"
        exit 1
    fi
    echo "everything passes; it is in $out"
}

main() {
    if [ -z "$emulate" ] && { ! command -v "$nvcc" >/dev/null 2>&1 || { [ "$what" != build ] && [ -z "$(gpu name)" ]; }; }; then
        echo "skipped: needs nvcc and a GPU"
        echo "0 passed, 0 failed, 1 skipped"
        exit 0
    fi
    ended= check_arch=$(gpu compute_cap | tr -d .)
    check_arch=${GPU_CHECK_ARCH:-${check_arch:-90}} check_end=${GPU_CHECK_SECONDS:+$(($(date +%s) + GPU_CHECK_SECONDS))}
    mkdir -p "$out" "$build"
    # What an earlier run has left running holds this too, and may still write the line of its step.
    exec 9>"$build/lock"
    command -v flock >/dev/null 2>&1 && { flock -n 9 || { echo "waits for the end of what runs in $build"; flock 9; }; }
    describe
    [ "$rest$compiled$check_arch" = "1$(cat "$build/of" 2>/dev/null)" ] || rm -rf "$build"/*.o "$build"/*.log
    rm -rf "$build/running"
    mkdir -p "$build/running"
    echo "$compiled$check_arch" >"$build/of"
    touch "$lines" "$log"
    first=1
    [ "$rest" ] || first=$(($(wc -l <"$lines") + 1))
    if [ "$emulate" ]; then
        emu=${EMU_BUILD:-build/emu}
        sh tests/emu/build.sh plain "$emu/plain" && . "$emu/plain/flags.sh" || exit 1
        export EMU_CU EMU_HOST EMU_LINK EMU_LIBRARY="$emu/plain/libemu.a"
    fi
    export check_arch check_end
    trap end TERM INT HUP
    verdicts >"$build/verdicts"
    new=$(sed -n 's/^\([^ ]*\) \(cut\)\{0,1\}$/\1/p' "$build/verdicts")
    again=$(sed -n 's/^\([^ ]*\) \(failed\|timeout\|skipped\)$/\1/p' "$build/verdicts")
    go_through "$new"
    go_through "$again"
    finish
}

script=tools/gpu_check.sh what=all rest=
case ${1:-} in
--one) one "$2" ;;
--do) "step_${2%%:*}" "${2#*:}" ;;
*)
    for option; do
        case $option in
        --rest) rest=1 ;;
        --build | --tests) what=${option#--} ;;
        *)
            echo "usage: sh tools/gpu_check.sh [--build | --tests] [--rest]" >&2
            exit 2
            ;;
        esac
    done
    main
    ;;
esac
