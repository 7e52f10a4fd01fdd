#!/bin/sh
# tools/gpu_check.sh on the emulation, cut twice: by SIGTERM while it compiles, and by SIGKILL of all its processes while a
# test runs. It must go on each time, lose no step, and pass no step twice.
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
GPU_CHECK_COMMIT=another GPU_CHECK_SECONDS=0 sh tools/gpu_check.sh --rest >"$folder/another"
[ $? -eq 75 ] || { echo "what one commit has passed counts for another"; cat "$folder/another"; exit 1; }

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
[ "$(grep -c '"op":"ce_fwd_bwd"' "$folder/out/bench.jsonl")" -ge 2 ] || { echo "rows of the benchmarks are missing"; exit 1; }
