#!/bin/sh
# The demonstration of sharded training: a run that was killed and went on under another wrapper on other ranks has the bits of one
# rank without a wrapper, and what is wrong is refused. The last line is `N passed, N failed, N skipped`.
#
#   sh tests/demo/test_demo_sharded.sh     from the root
#
# Its batch is 8 rows of 32 tokens, an eighth of the real one.
set -u
. tests/demo/common.sh

# start NAME OPTION...: a run into the folder NAME, quietly
start() {
    name=$1
    shift
    "$work/small" --heldout-bytes 1000 --out "$work/$name" "$@" >"$work/$name.log" 2>&1
}

# equal NAME OPTION...: a run of 6 steps that finds all four things equal; fails when it says anything else
equal() {
    start "$@" --steps 6 && [ "$(grep -c ' bit-equal$' "$work/$1.log")" -eq 4 ] && ! grep -q DIFFER "$work/$1.log" &&
    ! grep -qi 'nan\|inf' "$work/$1/plain/metrics.jsonl"
}

# refused WORDS OPTION...: nothing runs, and it says WORDS
refused() {
    words=$1
    shift
    start refused "$@" && return 1
    grep -q -e "$words" "$work/refused.log" || { cat "$work/refused.log"; return 1; }
}

make --no-print-directory build/xdrun && cp build/xdrun "$work/xdrun" &&
program small "$small" "$sharded" && program demo "$small" "$demo"
verdict $? 'it builds' "$work/build.log"

for wrap in ddp sharded fsdp hsdp; do
    equal $wrap --wrap $wrap
    verdict $? "4 ranks, $wrap, then 3 ranks have the bits of one rank" "$work/$wrap.log"
done
equal odd --wrap fsdp --mesh dp=3 --seed 7 && equal all --wrap hsdp --mesh dp=8 --seed 8
verdict $? '3 and 8 ranks have the bits of one rank' "$work/odd.log"

equal tp --wrap fsdp --mesh dp=2,tp=2 && equal split --wrap sharded --mesh tp=4 &&
cmp -s "$work/tp/student/model.safetensors" "$work/split/student/model.safetensors"
verdict $? 'ranks that split the weights, by two and by four, have the bits of one rank' "$work/tp.log"

equal cp --wrap ddp --mesh dp=2,cp=2 && equal cptp --wrap hsdp --mesh dp=2,cp=2,tp=2 && equal blocks --wrap sharded --mesh cp=4 &&
cmp -s "$work/cp/student/model.safetensors" "$work/blocks/student/model.safetensors"
verdict $? 'ranks that share sequences, by two and by four, have the bits of one rank' "$work/cp.log"

equal pp --pp 2 && equal ppddp --pp 2 --wrap ddp && equal vpp --pp 2 --vpp 2 --wrap sharded && equal pptp --pp 2 --mesh tp=2 &&
equal pphsdp --pp 2 --wrap hsdp --mesh dp=4 &&
cmp -s "$work/pp/student/model.safetensors" "$work/vpp/student/model.safetensors" &&
grep -q '^4 ranks (pp=2,dp=2,tp=1), fsdp: killed by SIGKILL after step [45]$' "$work/pp.log"
verdict $? 'pipelines of two ranks, beside data ranks and beside ranks that split the weights, have the bits of one rank' "$work/pp.log"
equal pplaunch --pp 2 --launch && cmp -s "$work/pp/student/model.safetensors" "$work/pplaunch/student/model.safetensors" &&
grep -q '^4 ranks (pp=2,dp=2,tp=1), fsdp: rank [0-3] killed by SIGKILL after step [45]$' "$work/pplaunch.log"
verdict $? 'a pipeline of processes, one of which is killed, has them too' "$work/pplaunch.log"
for wrap in fsdp hsdp; do
    equal launch --launch --wrap $wrap --overwrite && [ ! -e "$work/launch/news" ] &&
    grep -q '^xdrun: rank \([0-3]\) (process [0-9]*) was ended by signal 9 (Killed); stopping the other 3$' "$work/launch.log" &&
    grep -q "^4 ranks, $wrap: rank [0-3] killed by SIGKILL after step [45]\$" "$work/launch.log" &&
    cmp "$work/$wrap/student/model.safetensors" "$work/launch/student/model.safetensors" >>"$work/launch.log"
    verdict $? "processes, $wrap, one of which is killed, then 3 have the bits of one rank and the student of threads" "$work/launch.log"
done
equal lose --launch --lose 2 --seed 4 && [ "$(grep -c '^xdrun: rank [0-3] (process [0-9]*) was ended by signal 9 (Killed); the other [23] go on$' "$work/lose.log")" -eq 2 ] &&
awk '/^4 ranks, fsdp: rank [0-3] killed by SIGKILL after step [0-5]; / { lost++; if ($12 <= 0 || $12 >= 5) late++ } END { exit lost != 2 || late > 0 }' "$work/lose.log" &&
[ "$(wc -l <"$work/lose/wrapped/metrics.jsonl")" -eq 6 ] && [ "$(awk '/^4 ranks, fsdp, [0-9]* steps$/ { in_leg = 1 } in_leg && NF == 6 && /^ +[0-9. ]+$/' "$work/lose.log" | wc -l)" -eq 2 ]
verdict $? 'processes of which two are killed go on at once as fewer, with the bits of one rank' "$work/lose.log"
start again --launch --restart 2 --mesh dp=2 --steps 4 --seed 3 && [ "$(grep -c ' bit-equal$' "$work/again.log")" -eq 4 ] &&
[ "$(grep -c '^xdrun: starting the job again, [12] of 2 times$' "$work/again.log")" -eq 2 ] &&
awk '/^2 ranks, fsdp: rank [01] killed by SIGKILL after step [0-3]; .* those started again \(dp=2,tp=1, fsdp\)/ { lost++; if ($12 <= 0 || $12 >= 30) late++ } END { exit lost != 2 || late > 0 }' "$work/again.log" && # on a busy machine
[ "$(wc -l <"$work/again/wrapped/metrics.jsonl")" -eq 4 ]
verdict $? 'processes that xdrun starts again twice go on from what was saved, with the bits of one rank' "$work/again.log"
mkdir "$work/alone" && cp "$work/small" "$work/alone" && ! "$work/alone/small" --launch --steps 6 --out "$work/alone/out" >"$work/alone.log" 2>&1 &&
grep -q 'alone/xdrun: No such file or directory$' "$work/alone.log"
verdict $? 'an xdrun that is not there is named' "$work/alone.log"

grep -q '^4 ranks, fsdp: killed by SIGKILL after step [45]$' "$work/fsdp.log" &&
grep -q '^3 ranks, ddp: went on after step 3$' "$work/fsdp.log" &&
[ "$(wc -l <"$work/fsdp/wrapped/metrics.jsonl")" -eq 6 ] && [ -f "$work/fsdp/wrapped/step-3/manifest.json" ]
verdict $? 'it is killed behind its checkpoint, goes on from it, and has every step once' "$work/fsdp.log"
cmp -s "$work/fsdp/student/model.safetensors" "$work/hsdp/student/model.safetensors" &&
! cmp -s "$work/fsdp/student/model.safetensors" "$work/odd/student/model.safetensors"
verdict $? 'a wrapper changes no bit of the student, a seed does'
for file in model optim ema-slow; do
    cmp -s "$work/fsdp/plain/step-6/$file.safetensors" "$work/fsdp/wrapped/step-6/$file.safetensors" || echo "$file"
done >"$work/other"
[ ! -s "$work/other" ]
verdict $? 'files of checkpoints are equal whoever wrote them' "$work/other"

"$work/demo" --eval "$work/fsdp/student" --heldout-bytes 1000 >"$work/eval.log" &&
bits=$(sed -n 's/^  "bits_per_byte": \([0-9.]*\),$/\1/p' "$work/fsdp/sharded.json") &&
awk -v bits="$bits" '/bits\/byte/ { d = $4 - bits; found = bits > 0 && d < 1e-5 && d > -1e-5 } END { exit !found }' "$work/eval.log"
verdict $? 'the student measures the same once it is read back' "$work/eval.log"
for run in fsdp pp vpp; do
    awk 'NF == 6 && /^ +[0-9. ]+$/ { lines++; if ($2 < 1 || $3 < $2 || $3 > 1.05 * $2) bad++ } END { exit bad > 0 || lines != 8 }' "$work/$run.log" ||
    echo "$run"
done >"$work/more"
[ ! -s "$work/more" ]
verdict $? 'every rank takes the memory that was planned' "$work/more"

refused "fsdp/student holds a finished model: --overwrite" --steps 4 --out "$work/fsdp" &&
start fsdp --overwrite --steps 4 && grep -q 'went on after step 2$' "$work/fsdp.log" && [ ! -d "$work/fsdp/wrapped/step-6" ]
verdict $? 'a finished student is replaced with --overwrite only, and an older run is not gone on from' "$work/fsdp.log"

for bad in '--steps 3:--steps takes a number from 4 to 1000000, not "3"' '--wrap zero:--wrap takes ddp, sharded' \
    '--mesh cp=3:--mesh cp=3: a sequence is 8 blocks' '--mesh cp=2 --pp 2:--mesh cp=2 and --pp 2: stages have whole sequences' '--mesh dp=5,tp=2:dp=5,cp=1,tp=2 has 10 ranks, 8 are the most' \
    '--wrap hsdp --mesh dp=3:dp=3 is not even' '--vpp 2:--vpp 2 without --pp' '--pp 4 --mesh dp=3:dp=3,cp=1,tp=1 in each stage has 12 ranks, 8 are the most' '--lose 1:--lose 1 without --launch or --mpi' '--launch --lose 4:--lose 4 of 4 ranks: nobody is left' '--restart 1:--restart 1 without --launch or --mpi' '--launch --lose 1 --restart 1:--lose 1 and --restart 1: the others go on, or all' '--mpi:--mpi needs build/demo-sharded-mpi' '--launch --mpi:--launch and --mpi: ranks are processes of one or the other' '--epochs 3:no option --epochs' \
    '--data nowhere:nowhere has no heldout.txt'; do
    refused "${bad#*:}" ${bad%%:*}
    verdict $? "${bad%%:*} is answered with what would be right"
done
"$work/small" --help >"$work/help.log"
for option in wrap mesh pp vpp steps seed data out overwrite heldout-bytes mpi launch lose restart help; do
    grep -q "^  --$option " "$work/help.log" || echo "no --$option"
done >"$work/missing"
[ ! -s "$work/missing" ] && grep -q 'build/demo-sharded --wrap' "$work/help.log"
verdict $? '--help lists the options and an example'
conclude
