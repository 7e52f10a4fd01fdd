#!/bin/sh
# tools/gpu_check.sh on the emulation, cut twice: by SIGTERM while it compiles, and by SIGKILL of all its processes while a
# test runs. It must go on each time, lose no step, and pass no step twice. Then what it leaves to be carried to another machine, the
# order of its steps, and the table of bench/gpu.cu: its lines, and that it finds gradients which are spoilt.
#
#   sh tests/build/test_gpu_check.sh FOLDER
cd "$(dirname "$0")/../.." || exit 1
folder=$1
rm -rf "$folder/out" "$folder/objects"
mkdir -p "$folder"
lines=$folder/out/steps.jsonl
export GPU_CHECK_OUT="$folder/out" GPU_CHECK_BUILD="$folder/objects" GPU_CHECK_EMULATE=1 GPU_CHECK_COMMIT=of-the-test GOLDEN=none
export CUDA_TESTS="tests/cuda/test_cuda_reduce.cpp tests/cuda/test_cuda_matmul.cpp"
command -v setsid >/dev/null 2>&1 && command -v timeout >/dev/null 2>&1 || { echo "needs setsid and timeout"; exit 77; }

# Starts the script in a session of its own, and waits until the command says that a step is under way.
start() {
    begun=$1
    shift
    setsid sh tools/gpu_check.sh "$@" >>"$folder/printed" 2>&1 &
    pid=$!
    until eval "$begun"; do
        kill -0 $pid 2>/dev/null || { echo "it ended too early"; cat "$folder/printed"; exit 1; }
        sleep 0.05
    done
}

: >"$folder/printed"
start '[ -e "$folder/objects/compile-unit.log" ]'
kill -TERM $pid
wait $pid
status=$?
[ $status -eq 143 ] || { echo "status $status after SIGTERM"; cat "$folder/printed"; exit 1; }
grep -q '"step":"compile:unit","verdict":"cut"' "$lines" || { echo "no line says that compile:unit was cut"; exit 1; }

start 'grep -q "^== test:test_cuda_matmul" "$folder/out/log"' --rest
kill -9 "-$pid"
wait $pid

sh tools/gpu_check.sh --rest >>"$folder/printed" || { cat "$folder/printed"; exit 1; }
sh tools/gpu_check.sh --rest >"$folder/again" || exit 1 # nothing is left to do but what lacks something
! grep -q ': ok' "$folder/again" || { echo "it ran again"; cat "$folder/again"; exit 1; }

awk -F '"' '
    { step = $8; verdict = $12; n[verdict]++; last[step] = verdict; if (verdict == "ok") passed[step]++ }
    $0 !~ /^{"schema":.*"seconds":[0-9.]*,.*"commit":"of-the-test",.*"device":"emulation",.*"date":"[0-9T:-]*Z"}$/ { print; bad = 1 }
    END {
        for (step in last) if (last[step] != "ok" && last[step] != "skipped") { print step ": " last[step]; bad = 1 }
        for (step in passed) if (passed[step] != 1) { print step " passed " passed[step] " times"; bad = 1 }
        needed = "compile:unit compile:library link:bench_gpu test:test_cuda_reduce test:test_cuda_matmul bench:gpu bench:nccl"
        count = split(needed, name, " ")
        for (i = 1; i <= count; i++) if (last[name[i]] != "ok") { print name[i] " is missing"; bad = 1 }
        printf "%d steps passed once each, %d lines of what was cut\n", n["ok"], n["cut"]
        exit bad
    }' "$lines" || { cat "$lines"; exit 1; }
[ "$(grep -c '"op":"ce"' "$folder/out/bench.jsonl")" -ge 2 ] || { echo "rows of the benchmarks are missing"; exit 1; }

# What tells most comes first, and PyTorch last.
sh tools/gpu_check.sh --steps >"$folder/steps"
after=0
for step in link:unit link:bench_gpu bench:gpu_copy bench:gpu bench:gpu_columns bench:gpu_two_sweeps test:test_cuda_reduce racecheck:test_cuda_reduce \
    bench:nccl memcheck:test_cuda_matmul bench:torch; do
    line=$(grep -nx "$step" "$folder/steps" | cut -d : -f 1)
    [ "${line:-0}" -gt "$after" ] || { echo "$step is not behind line $after of the steps"; cat "$folder/steps"; exit 1; }
    after=$line
done

# A line of at most 80 columns for each operation that has a budget, and for the head.
table=$folder/table objects=$folder/objects
LD_LIBRARY_PATH="${EMU_BUILD:-build/emu}/plain/toolkit" "$objects/bench_gpu" >"$table" || { cat "$table"; exit 1; }
awk 'length > 80 { print "more than 80 columns: " $0; bad = 1 } END { exit bad }' "$table" || exit 1
{ grep -v '^#' bench/gpu_budget.txt; printf '%s bf16\n' head head_no_room head_own; } | awk '
    NR == FNR { if ($0 !~ /^#/ && NF == 9 && $4 > 0 && $5 > 0) seen[$1, $2]++; next }
    NF && seen[$1, $2] != 1 { print $1, $2 ": " seen[$1, $2] + 0 " lines of bench_gpu"; bad = 1 }
    END { exit bad }' "$table" - || { cat "$table"; exit 1; }

# Gradients without half of their softmax, or with half of the label's column: no time of a loss with a label, and status 1.
. "${EMU_BUILD:-build/emu}/plain/flags.sh"
cxx=${CXX:-g++}
$cxx $EMU_HOST -I. -c tests/build/planted_gradient.cpp -o "$folder/planted.o" &&
    $cxx "$objects/bench_gpu.o" "$folder/planted.o" -Wl,--wrap=xd_loss "$objects/libxdistill_check.so" "${EMU_BUILD:-build/emu}/plain/libemu.a" \
        $EMU_LINK -lm -Wl,-rpath,"$(cd "$objects" && pwd)" -o "$folder/planted" || exit 1
for what in softmax label; do
    PLANTED=$what GPU_ONLY=ce,kl,hard_soft "$folder/planted" >"$table"
    [ $? -eq 1 ] && [ "$(grep -c '^\(ce\|hard_soft\) .*wrong: error 0.5 above' "$table")" -eq 4 ] && [ "$(grep -c '^kl .* GB/s ' "$table")" -eq 2 ] ||
        { echo "planted: $what"; cat "$table"; exit 1; }
    echo "found: half of the $what"
done

# What --build leaves for another machine has no program in it, and --rest links there. Its size is judged. Objects are those of above.
brought=$folder/brought
rm -rf "$brought"
mkdir "$brought"
cp -r "$folder/out" "$objects" "$brought"
grep -v '"step":"link:' "$folder/out/steps.jsonl" >"$brought/out/steps.jsonl"
export GPU_CHECK_OUT="$brought/out" GPU_CHECK_BUILD="$brought/objects"
sh tools/gpu_check.sh --build --rest >"$brought/built" || { cat "$brought/built"; exit 1; }
grep 'MB to carry' "$brought/built" && ! grep '^compile:.*: ok' "$brought/built" && grep -q '^link:bench_gpu: ok' "$brought/built" || exit 1
[ ! -e "$brought/objects/bench_gpu" ] && [ ! -e "$brought/objects/unit.o" ] || { echo "more is left than objects"; exit 1; }
GPU_CHECK_MEGABYTES=0.5 sh tools/gpu_check.sh --build --rest >"$brought/judged" && { echo "half a megabyte is not enough"; exit 1; }
grep -q 'more than 0.5 MB' "$brought/judged" || exit 1
CUDA_TESTS=tests/cuda/test_cuda_matmul.cpp sh tools/gpu_check.sh --tests --rest >"$brought/tested" || { cat "$brought/tested"; exit 1; }
! grep '^compile:.*: ok' "$brought/tested" && grep -q '^link:test_cuda_matmul: ok' "$brought/tested" || { cat "$brought/tested"; exit 1; }

export GPU_CHECK_OUT="$folder/out" GPU_CHECK_BUILD="$folder/objects"
GPU_CHECK_COMMIT=another GPU_CHECK_SECONDS=0 sh tools/gpu_check.sh --rest >"$folder/another"
[ $? -eq 75 ] || { echo "what one commit has passed counts for another"; cat "$folder/another"; exit 1; }
