#!/bin/sh
# The demonstration over several meshes: in INVARIANT mode dp meshes have the bits of one rank, in the default
# mode tp and cp meshes its losses within 1e-3; a run that was killed goes on with the same bits or says why
# not. The last line is `N passed, N failed, N skipped`.
#
#   sh tests/demo/test_demo.sh [INCLUDE]     from the root; INCLUDE is the folder of xdistill.h (.)
#
# Long runs are made with a program whose batch is 8 rows of 32 tokens, an eighth of the real one.
set -u
include=${1:-.}
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
passed=0 failed=0

# start PROGRAM NAME OPTION...: runs into the folder NAME, quietly
start() {
    program=$1 name=$2
    shift 2
    "$work/$program" --heldout-bytes 1000 --out "$work/$name" "$@" >"$work/$name.log" 2>&1
}

# losses NAME: leaves "step loss kd ce norm" lines in NAME.losses
losses() {
    sed 's/.*"step": \([0-9]*\).*"loss": \([^,]*\), "kd": \([^,]*\), "ce": \([^,]*\), "gradient_norm": \([^,]*\),.*/\1 \2 \3 \4 \5/' \
        "$work/$1/metrics.jsonl" >"$work/$1.losses"
}

# run PROGRAM STEPS NAME OPTION...: a whole run and its losses, STEPS of each of its students
run() {
    program=$1 steps=$2 name=$3
    shift 3
    start "$program" "$name" --steps "$steps" "$@" && losses "$name" &&
    arms=$(grep -c '"step": 0,' "$work/$name/metrics.jsonl") && [ "$arms" -ge 2 ] &&
    [ "$(wc -l <"$work/$name.losses")" -eq $((arms * steps)) ] && ! grep -qi 'nan\|inf' "$work/$name.losses"
}

# same A B: the two runs have the same bits
same() {
    cmp -s "$work/$1.losses" "$work/$2.losses" && cmp -s "$work/$1/student/model.safetensors" \
        "$work/$2/student/model.safetensors"
}

# close A B: every loss of the two runs within 1e-3; says how far apart they are
close() {
    paste -d ' ' "$work/$1.losses" "$work/$2.losses" | awk -v what="$1 and $2" '
        { for (i = 2; i <= 4; i++) { d = $i - $(i + 5); if (d < 0) d = -d; if (d > most) most = d } }
        END { printf "%s: %d losses within %.1e\n", what, NR, most; exit !(NR > 0 && most <= 1e-3) }'
}

# interrupted FILE NAME OPTION...: kills a run of 8 steps as soon as resume/FILE is there
interrupted() {
    file=$work/$2/resume/$1 name=$2
    shift 2
    "$work/small" --heldout-bytes 1000 --out "$work/$name" "$@" --steps 8 --save-every 2 >/dev/null 2>&1 &
    child=$! waited=0
    while [ ! -f "$file" ] && [ $waited -lt 300 ]; do
        sleep 0.1
        waited=$((waited + 1))
    done
    kill -9 $child 2>/dev/null
    wait $child 2>/dev/null
    [ -f "$file" ]
}

# refused NAME WORDS OPTION...: the run fails, and says WORDS
refused() {
    name=$1 words=$2
    shift 2
    start small "$name" "$@" && return 1
    grep -q "$words" "$work/$name.log" || { cat "$work/$name.log"; return 1; }
}

# verdict STATUS WHAT
verdict() {
    if [ "$1" -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "failed: $2"
    fi
}

library=$work/xdistill.o
if [ "$include" = . ]; then library=build/libxdistill.a && make --no-print-directory "$library"
else ${CC:-cc} -std=c99 -O2 "-I$include" -c tests/build/implementation.c -o "$library"; fi
build="${CC:-cc} -std=c99 -O2 -DXDISTILL_IMPLEMENTED -I$include examples/demo/*.c examples/nn/*.c $library -lm -lpthread"
$build -o "$work/demo" && $build -DDEMO_ROW=32 -DDEMO_BATCH=8 -o "$work/small"
verdict $? 'the demo builds'

# The program as it is.
run demo 2 one --mesh dp=1 --reduction invariant
verdict $? 'one rank runs'
for dp in 2 3; do
    run demo 2 dp$dp --mesh dp=$dp --reduction invariant && same one dp$dp
    verdict $? "dp=$dp has the bits of one rank in INVARIANT mode"
done
for axis in tp cp; do
    run demo 2 $axis --mesh $axis=2 && close one $axis
    verdict $? "$axis=2 has the losses of one rank within 1e-3"
done

# Longer runs of the small one.
few="--arms text,pkl,gold"
run small 50 one50 --mesh dp=1 $few
verdict $? 'one rank runs 50 steps'
for mesh in tp=2 cp=2; do
    run small 50 $mesh --mesh $mesh $few && close one50 $mesh
    verdict $? "$mesh has the losses of one rank within 1e-3 over 50 steps"
done
run small 8 small_one --mesh dp=1 --reduction invariant
verdict $? 'one rank runs in INVARIANT mode'
for dp in 2 3 4; do
    run small 8 small_dp$dp --mesh dp=$dp --reduction invariant && same small_one small_dp$dp
    verdict $? "dp=$dp has the bits of one rank in INVARIANT mode"
done
run small 8 all --mesh dp=2,cp=2,tp=2 && close small_one all
verdict $? 'a mesh of three axes has the losses of one rank within 1e-3'
run small 8 fast --mesh dp=2,tp=2 --reduction fast && close small_one fast
verdict $? 'FAST mode has the losses of one rank within 1e-3'

# Killed, and gone on: the same lines and the same student as without, no step twice.
for mesh in dp=2 cp=2 tp=2; do
    run small 8 whole_$mesh --mesh $mesh && interrupted 1.safetensors $mesh --mesh $mesh &&
    run small 8 $mesh --mesh $mesh --save-every 2 --resume && same whole_$mesh $mesh
    verdict $? "a run on $mesh goes on with the same bits"
done
interrupted 1.safetensors elsewhere --mesh dp=2 --reduction invariant &&
run small 8 elsewhere --mesh dp=4 --reduction invariant --resume && same small_one elsewhere
verdict $? 'in INVARIANT mode another mesh goes on with the same bits'

# What cannot go on. dp=2 holds the states of a finished run.
set -- --save-every 2 --resume --steps 8
refused dp=2 'mesh is dp=2,cp=1,tp=1, this run.s is dp=1,cp=1,tp=2' "$@" --mesh tp=2
verdict $? 'another mesh is refused with both'
refused dp=2 'reduction is deterministic, this run.s is fast' "$@" --mesh dp=2 --reduction fast
verdict $? 'another reduction mode is refused with both'
refused dp=2 'steps is 8, this run.s is 9' "$@" --mesh dp=2 --steps 9
verdict $? 'another number of steps is refused with both'
refused dp=2 'arms is .*text,pkl.*, this run.s is pkl,text' "$@" --mesh dp=2 --arms pkl,text
verdict $? 'other arms are refused with both'
head -c 100 "$work/dp=2/metrics.jsonl" >"$work/short" && cp "$work/short" "$work/dp=2/metrics.jsonl"
refused dp=2 'has 100 bytes, the state to go on from was saved after [0-9]' "$@" --mesh dp=2
verdict $? 'a metrics.jsonl that is too short is refused with both lengths'
rm "$work/dp=2/metrics.jsonl"
refused dp=2 'has 0 bytes' "$@" --mesh dp=2
verdict $? 'a metrics.jsonl that is missing is refused'
head -c 5000 "$work/tp=2/resume/1.safetensors" >"$work/short" &&
cp "$work/short" "$work/tp=2/resume/1.safetensors"
refused tp=2 'demo: ERROR' "$@" --mesh tp=2
verdict $? 'a state that is cut short is refused'
if [ -c /dev/full ]; then
    mkdir "$work/full" && ln -s /dev/full "$work/full/metrics.jsonl"
    refused full 'cannot write .*metrics.jsonl' --steps 2 --mesh dp=2 &&
    refused full 'cannot write .*metrics.jsonl' --steps 2 --mesh dp=2 --save-every 1
    verdict $? 'a full disk is an error'
fi
refused refused 'cannot run the arm magic' --arms text,magic --steps 2
verdict $? 'an arm that there is not is refused'
refused refused 'dp meshes only' --mesh tp=2 --reduction invariant
verdict $? 'INVARIANT mode on a tp mesh is refused'

# A directory is measured as the run that wrote it measured it.
"$work/demo" --eval "$work/one/student" --heldout-bytes 1000 >"$work/eval.log" &&
bits=$(sed -n 's/^P-KL  *[0-9]*  *\([0-9.]*\).*/\1/p' "$work/one.log") &&
awk -v bits="$bits" '/bits\/byte/ { d = $4 - bits; found = d < 1e-4 && d > -1e-4 } END { exit !found }' "$work/eval.log"
verdict $? 'the student measures the same once it is read back'
grep -q '"reduction": "invariant"' "$work/one/run.json" && grep -q '"ranks_are": "threads"' "$work/one/run.json" &&
grep -q '"version": "[0-9.]*"' "$work/one/run.json" && grep -q '"compiler": "..*"' "$work/one/run.json"
verdict $? 'run.json says what ran'
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
