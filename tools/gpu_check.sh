#!/bin/sh
# One script for a machine with a GPU, which may be available for minutes only and be lost at any time. Compiles everything once, on
# all cores: the unit and the library become one shared object, which all programs link. Then what tells most comes first: `steps`
# has the order. Needs the CUDA toolkit, a C compiler and this folder; not the compiler's minutes where objects are brought along.
#
#   sh tools/gpu_check.sh            or: make gpu-check          everything
#   sh tools/gpu_check.sh --rest     or: make gpu-check ARGS=--rest   continues: what has passed for these sources on this
#                                    device is not run again; first what has not been run, then what failed
#   sh tools/gpu_check.sh --build    compiles only, also without a GPU (for GPU_CHECK_ARCH, 90), and prints time and size. Programs are
#                                    linked, to see that they can be, and not kept: the folder of objects must stay within
#                                    GPU_CHECK_MEGABYTES. Both folders, copied to a machine with a GPU beside this one, are what
#                                    --rest continues there; only linking is left
#   sh tools/gpu_check.sh --steps    prints the steps in their order, and does nothing
#   sh tools/gpu_check.sh --tests    compiles, tests and golden vectors only; ends with `N passed, N failed, N skipped`.
#                                    Both also with --rest
#
# Every step that ends appends a line to GPU_CHECK_OUT/steps.jsonl: step, verdict (ok, failed, timeout, cut, skipped),
# seconds, processor seconds, the last line it printed, commit, device, driver, toolkit and date. Benchmarks append their
# rows to bench.jsonl there, each as soon as it is measured, and log has everything printed. A step has a time limit of its
# own. SIGTERM ends the step that runs, with verdict cut; after SIGKILL its line is missing, and --rest runs it again.
#
#   GPU_CHECK_OUT=folder       of results (build/gpu_check);  GPU_CHECK_BUILD=folder  of objects (build/gpu)
#   GPU_CHECK_MEGABYTES=n      what --build may leave to be carried, 24; more is an error
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
# What a GPU alone can tell comes first: losses, the ring, steps, and collectives.
first_tests="test_cuda_loss test_cuda_ring test_cuda_step test_cuda_optimizer test_cuda_nccl test_cuda_head"
sample="test_cuda_ring test_cuda_reduce test_cuda_loss test_cuda_xtoken_rows" # under compute-sanitizer before the others

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
steps_link() { for name in unit $(programs); do echo "link:$name"; done; }
# Of the tests asked for, those that a list names; then the others.
among() { for name in $1; do names | grep -x "$name"; done; }
beside() { for name in $(names); do echo " $1 " | grep -q " $name " || echo "$name"; done; }
steps_first() { for name in $(among "$first_tests"); do echo "test:$name"; done; }
steps_correct() {
    for name in $(beside "$first_tests"); do echo "test:$name"; done
    for name in $(examples); do echo "example:$name"; done
    [ ! -d "$golden" ] || echo golden:default golden:invariant
}
# What all shares are of, beside the clocks that the GPU has then: before the tests, as a GPU that is slow or shared shows there.
steps_copy() { echo bench:gpu_copy; }
# Figures: every operation, rows that calibrate the model, losses of two sweeps, and what ncu counts.
steps_figures() { echo bench:gpu bench:gpu_columns bench:gpu_two_sweeps profile:gpu; }
steps_races() {
    for name in $(among "test_cuda_ring test_cuda_reduce"); do echo "racecheck:$name"; done
    for name in $(among test_cuda_ring); do echo "synccheck:$name"; done
}
steps_memory() { for name in $(among "$sample") $(beside "$sample"); do echo "memcheck:$name"; done; }

# ---- the functions of the steps; status 77 when something is missing, which the last line names ----

limit_of() {
    case $1 in
    compile:unit) echo 580 ;;
    compile:* | link:*) echo 300 ;;
    test:* | golden:* | example:*) echo 120 ;;
    memcheck:* | racecheck:* | synccheck:*) echo 60 ;;
    bench:torch) echo 400 ;;
    bench:* | profile:*) echo 90 ;;
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
        $cxx $EMU_HOST -g1 -O0 -w "$@" -Itests/helpers -I"$header" -x c++ -c "$source" -o "$object"
    else
        "$nvcc" -O2 -Xcompiler -fPIC $language "$@" -Itests/helpers -I"$header" -c "$source" -o "$object"
    fi
}

step_compile() {
    object=$build/$1.o small=
    rm -f "$object" "$build/$1"
    [ -z "$emulate" ] || small="-DGPU_SMALL -DNCCL_BENCH_MOST=8192 -DNCCL_BENCH_CALLS=2"
    nccl=${NCCL_HOME:+-I$NCCL_HOME/include}
    if uses_nccl "$1" && [ -z "$emulate" ]; then
        echo '#include <nccl.h>' | "$nvcc" -x c++ $nccl -E - >/dev/null 2>&1 || missing nccl.h
    fi
    case $1 in
    unit)
        if [ "$emulate" ]; then $cxx $EMU_CU -g1 -O0 -fPIC -I"$header" -c "$header/xdistill_cuda.cu" -o "$object"
        else
            NVCC="$nvcc" CUDA_ARCHS="$check_arch" CUDA_FLAGS="-Xcompiler -fPIC" sh tools/cuda_build.sh "$header" "$object"
            result=$?
            rm -f "$build"/unit.ptx* # what it has looked at is twice as long as the object
            return "$result"
        fi ;;
    # Tests call private functions, so the shared object shows them.
    library) $cc -std=c99 $([ "$emulate" ] && echo -O0 || echo -O2) -fPIC -DXD_PRIVATE=extern -I"$header" -c tests/build/implementation.c -o "$object" ;;
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
        compile_host bench/torch/gpu_shim.cu -DXDISTILL_IMPLEMENTED ;;
    test_*) compile_host "tests/cuda/$1.cpp" -Isrc -DXD_TEST_LAYERS $nccl ;;
    *) compile_example "examples/cuda/$1.cu" -DXDISTILL_IMPLEMENTED $nccl ;;
    esac
}

# Objects become a program beside the shared object, which the loader finds there, or that object itself.
step_link() {
    objects="$build/$1.o" libraries="-lpthread -lm" program=$build/$1 shared=$build/libxdistill_check.so
    if [ "$1" = unit ]; then objects="$build/unit.o $build/library.o" program=$shared
    elif [ ! -f "$shared" ]; then missing "$shared"; fi
    [ "$1" != golden ] || objects=$(ls "$build"/golden.d/*.o)
    ! uses_nccl "$1" || [ "$emulate" ] || libraries="$libraries ${NCCL_HOME:+-L$NCCL_HOME/lib -Xlinker -rpath=$NCCL_HOME/lib} -lnccl"
    [ "$1" != torch ] || program=$build/gpu_shim.so
    case $1 in unit | torch) libraries="$libraries -shared" ;; esac
    for file in $objects; do [ -f "$file" ] || missing "$file"; done
    link_objects "$1" || return 1
    # What --build leaves is for another machine: the shared object holds these two, and programs are linked again there.
    case $what:$1 in
    build:unit) rm -f "$build/library.o" "$build/unit.o" ;;
    build:*) rm -f "$program" ;;
    esac
}
link_objects() {
    if [ "$emulate" ]; then
        case $1 in unit | torch) emulation= ;; *) emulation=$EMU_LIBRARY ;; esac # whose one copy is in the program
        $cxx $objects $([ "$1" = unit ] || echo "$shared") $emulation $EMU_LINK $libraries -Wl,-rpath,'$ORIGIN' -o "$program"
    else
        [ "$1" != unit ] || libraries="$libraries -Xlinker -Bsymbolic"
        "$nvcc" -cudart shared $objects $([ "$1" = unit ] || echo "$shared") $libraries -Xlinker -rpath,'$ORIGIN' \
            -Xlinker -rpath,"$(dirname "$(dirname "$(command -v "$nvcc")")")/lib64" -o "$program"
    fi
}

run() {
    [ -x "$build/$1" ] || missing "$build/$1"
    program=$build/$1
    shift
    "$program" "$@"
}

step_test() { run "$1"; }
step_example() { if [ "$1" = nccl ]; then run_ranks nccl; else run "$1"; fi; }

# A process for each GPU. Where there is one GPU also two processes on it: NCCL allows that of processes which do not seem to be
# on one host.
gpus() { if [ "$emulate" ]; then echo 1; else nvidia-smi -L | wc -l; fi; }
run_ranks() {
    start_ranks "$1" "$(gpus)" || return 1
    run_two_ranks "$1"
}
run_two_ranks() {
    [ "$(gpus)" = 1 ] && [ -z "$emulate" ] || return 0
    timeout 60 sh "$script" --do "two_ranks:$1" || echo "NCCL does not let two processes have one GPU"
}
step_two_ranks() { NCCL_HOSTID=apart start_ranks "$1" 2; }
start_ranks() {
    secret=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n') rank=0 children= result=0
    while [ "$rank" -lt "$2" ]; do
        RANK=$rank WORLD_SIZE=$2 LOCAL_RANK=$([ "${NCCL_HOSTID:-}" ] && echo 0 || echo "$rank") \
            LOCAL_WORLD_SIZE=$([ "${NCCL_HOSTID:-}" ] && echo 1 || echo "$2") MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
            XDISTILL_SECRET=$secret NCCL_HOSTID=${NCCL_HOSTID:+$NCCL_HOSTID$rank} "$build/$1" &
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
step_synccheck() { sanitize synccheck "$1"; }

# One call of each of these, as the hardware counts it: instructions issued, memory's share, hits of L2, and what warps wait for.
step_profile() {
    [ -z "$emulate" ] || missing "a GPU"
    command -v ncu >/dev/null 2>&1 || missing ncu
    [ -x "$build/bench_gpu" ] || missing "$build/bench_gpu"
    GPU_ONCE=1 GPU_ONLY="ce,kl,jsd,norm,adamw,vsd_65536" ncu --clock-control none --print-summary per-kernel --metrics \
sm__inst_executed.sum.per_cycle_active,sm__warps_active.avg.pct_of_peak_sustained_active,dram__throughput.avg.pct_of_peak_sustained_elapsed,\
lts__t_sector_hit_rate.pct,smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio,gpu__time_duration.sum \
        "$build/bench_gpu"
}

step_bench() {
    case $1 in
    gpu_copy)
        [ "$emulate" ] || nvidia-smi --query-gpu=clocks.sm,clocks.mem,clocks.max.sm,power.draw,utilization.gpu --format=csv
        GPU_ONLY=none run bench_gpu && { [ "$emulate" ] || nvidia-smi --query-gpu=clocks.sm,clocks.mem,power.draw --format=csv; } ;;
    gpu_two_sweeps) GPU_TWO_SWEEPS=1 GPU_ONLY="ce,kl,reverse_kl,jsd,hard_soft" run bench_gpu -J "$rows" ;;
    gpu_columns) GPU_COLUMNS=1 run bench_gpu -J "$rows" ;;
    torch)
        [ -f "$build/gpu_shim.so" ] || missing "$build/gpu_shim.so"
        "$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || missing "a PyTorch that can use the GPU"
        PYTHONUNBUFFERED=1 "$python" bench/torch/compare.py --device cuda "$build/gpu_shim.so" --rounds 3 -J "$rows" ;;
    nccl) run bench_nccl -J "$rows" && run_two_ranks bench_nccl ;;
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

# What is worth most comes first: everything but PyTorch takes less than five minutes where the objects are there.
steps() {
    {
        [ "$what" != all ] && [ "$what" != tests ] && [ "$what" != build ] || { steps_compile; steps_link; }
        [ "$what" != all ] || steps_copy
        [ "$what" = build ] || steps_first
        [ "$what" != all ] || steps_figures
        [ "$what" = build ] || steps_correct
        [ "$what" != all ] || { steps_races; echo bench:nccl; steps_memory; echo bench:torch; }
    } | xargs -n 1
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
    compile:unit | compile:library) [ -f "$build/libxdistill_check.so" ] || [ -f "$build/${1#*:}.o" ] ;;
    compile:*) [ -f "$build/${1#*:}.o" ] ;;
    link:unit) [ -f "$build/libxdistill_check.so" ] ;;
    link:*) [ "$what" = build ] || made_program "${1#*:}" ;;
    esac
}
made_program() {
    case $1 in
    torch) [ -f "$build/gpu_shim.so" ] ;;
    *) [ -f "$build/$1" ] ;;
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

# Those of $wanted that a pattern names, several at a time.
go() {
    chosen=$(echo "$wanted" | grep -E "^($1)")
    [ "$chosen" ] && [ -z "$ended" ] || return 0
    echo "$chosen" | xargs -n 1 -P "$2" sh "$script" --one &
    wait $!
    [ -z "$ended" ] || wait
}

# Steps of the GPU one after the other; compute-sanitizer leaves most of it idle.
go_through() {
    wanted=$1 cores=$(getconf _NPROCESSORS_ONLN)
    go compile: "$cores"
    go link:unit 1
    wanted=$(echo "$1" | grep -v '^link:unit$')
    go link: "$cores"
    go '(test|example|golden|profile|racecheck|synccheck):|bench:(gpu|nccl)' 1
    go memcheck: 4
    go bench:torch 1
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
    [ "$what" != build ] || carried=$(du -sk "$build" | awk '{ printf "%.1f", $1 / 1024 }')
    [ "$what" != build ] || echo "$carried MB to carry in $build"
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
    [ "$what" != build ] || echo "$carried ${GPU_CHECK_MEGABYTES:-24}" | awk '{ exit $1 > $2 }' ||
        { echo "more than ${GPU_CHECK_MEGABYTES:-24} MB to carry"; exit 1; }
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
    [ -z "$listed" ] || { steps; exit 0; }
    mkdir -p "$out" "$build"
    # What an earlier run has left running holds this too, and may still write the line of its step.
    exec 9>"$build/lock"
    command -v flock >/dev/null 2>&1 && { flock -n 9 || { echo "waits for the end of what runs in $build"; flock 9; }; }
    describe
    [ "$rest$compiled$check_arch" = "1$(cat "$build/of" 2>/dev/null)" ] || rm -rf "$build"/*.o "$build"/*.so "$build"/*.log
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
    export check_arch check_end check_what="$what"
    trap end TERM INT HUP
    verdicts >"$build/verdicts"
    new=$(sed -n 's/^\([^ ]*\) \(cut\)\{0,1\}$/\1/p' "$build/verdicts")
    again=$(sed -n 's/^\([^ ]*\) \(failed\|timeout\|skipped\)$/\1/p' "$build/verdicts")
    go_through "$new"
    go_through "$again"
    finish
}

script=tools/gpu_check.sh what=${check_what:-all} rest= listed=
case ${1:-} in
--one) one "$2" ;;
--do) "step_${2%%:*}" "${2#*:}" ;;
*)
    for option; do
        case $option in
        --rest) rest=1 ;;
        --steps) listed=1 ;;
        --build | --tests) what=${option#--} ;;
        *)
            echo "usage: sh tools/gpu_check.sh [--build | --tests] [--rest | --steps]" >&2
            exit 2
            ;;
        esac
    done
    main
    ;;
esac
