#!/bin/sh
# The demonstration over several meshes: in INVARIANT mode dp meshes have the bits of one rank, in the default
# mode tp and cp meshes its losses within 1e-3; a run that was killed goes on with the same bits or says why
# not. The last line is `N passed, N failed, N skipped`.
#
#   sh tests/demo/test_demo.sh     from the root
#
# Long runs are made with a program whose batch is 8 rows of 32 tokens, an eighth of the real one.
set -u
. tests/demo/common.sh

# start PROGRAM NAME OPTION...: runs into the folder NAME, quietly
start() {
    program=$1 name=$2
    shift 2
    "$work/$program" --heldout-bytes 1000 --out "$work/$name" "$@" >"$work/$name.log" 2>&1
}

# losses NAME: leaves "step loss kd ce norm" lines in NAME.losses
losses() {
    grep '"loss"' "$work/$1/metrics.jsonl" | sed 's/.*"step": \([0-9]*\).*"loss": \([^,]*\), "kd": \([^,]*\), "ce": \([^,]*\), "gradient_norm": \([^,]*\),.*/\1 \2 \3 \4 \5/' \
        >"$work/$1.losses"
}

# run PROGRAM STEPS NAME OPTION...: a whole run and its losses, STEPS of each of its students
run() {
    program=$1 steps=$2 name=$3
    shift 3
    start "$program" "$name" --steps "$steps" "$@" && losses "$name" &&
    arms=$(grep '"loss"' "$work/$name/metrics.jsonl" | grep -c '"step": 0,') && [ "$arms" -ge 2 ] &&
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
    child=$!
    appears "$file"
    end $child
    [ -s "$file" ]
}

# refused NAME WORDS OPTION...: the run fails, and says WORDS
refused() {
    name=$1 words=$2
    shift 2
    start small "$name" "$@" && return 1
    grep -q -e "$words" "$work/$name.log" || { cat "$work/$name.log"; return 1; }
}

program demo "" "$demo" && program small "$small" "$demo"
verdict $? 'the demo builds' "$work/build.log"

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
    run small 50 long_$mesh --mesh $mesh $few && close one50 long_$mesh
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

# What is wrong is answered with what would be right, before anything is done.
for bad in '--steps 0:--steps takes a number from 1 to 1000000, not "0"' '--ranks two:--ranks takes a number from 1 to 64' \
    '--mesh dp=0:--mesh takes dp=N, cp=N, tp=N' '--mesh dp=2,:once each, N 1 to 64' '--mesh dp=2,dp=1:once each' \
    '--mesh dp=64:dp is 8 at most, cp 32' '--reduction exact:deterministic, fast or invariant' '--epochs 3:no option --epochs' \
    '--seed:--seed takes a number from 0 to 1000000000; nothing follows it' '--out --overwrite:--out takes a path' \
    '--arms text,magic:there are text, pkl, gold, hkl, chunk, smollm2,' '--arms text,text:--arms names text twice' \
    '--heldout-bytes 1:--heldout-bytes must leave 34' \
    '--data nowhere:nowhere has no heldout.txt'; do
    refused refused "${bad#*:}" ${bad%%:*}
    verdict $? "${bad%%:*} is answered with the valid range"
done
"$work/small" --help >"$work/help.log"
for option in arms steps seed data out overwrite save-every resume ranks mesh reduction heldout-bytes train-teacher eval encode help; do
    grep -q "^  --$option " "$work/help.log" || echo "no --$option"
done >"$work/missing"
[ ! -s "$work/missing" ] && grep -q 'build/demo --arms' "$work/help.log" && [ "$(sed -n '/^Students/,/^$/p' "$work/help.log" | wc -l)" -eq 10 ] &&
grep -q '(240;' "$work/help.log"
verdict $? '--help lists the options, their defaults, the students and an example'

# One run at a time, and nothing finished is lost.
"$work/small" --heldout-bytes 1000 --out "$work/busy" --arms text --steps 100000 --mesh dp=1 >"$work/busy.log" 2>&1 &
child=$!
appears "$work/busy/metrics.jsonl"
grep -q '^[0-9]* tokens of text, [0-9]* held out; 1 rank: ' "$work/busy.log"
verdict $? 'what a run reads is told as it begins'
refused busy "process $child runs in .*busy.*--out.*--resume" --steps 2 && refused busy "process $child" --steps 2 --resume --overwrite
verdict $? 'a second run in the same folder is refused with the process of the first'
end $child
awk '!/^{.*}$/ { torn++ } END { exit torn > 1 || NR == 0 }' "$work/busy/metrics.jsonl" &&
start small busy --steps 2 --mesh dp=1 --arms text
verdict $? 'the lock goes with its process, and no line is torn but the last'
cp "$work/busy/student/model.safetensors" "$work/finished"
refused busy 'busy/student holds a finished model: --overwrite' --steps 2 --mesh dp=1 --arms text --seed 2 &&
refused busy 'busy/student holds a finished model: --overwrite' --steps 2 --mesh dp=1 --arms text --seed 2 --resume &&
cmp -s "$work/finished" "$work/busy/student/model.safetensors" &&
start small busy --steps 2 --mesh dp=1 --arms text --seed 2 --overwrite &&
! cmp -s "$work/finished" "$work/busy/student/model.safetensors"
verdict $? 'a finished student is replaced with --overwrite only'
run small 8 cp=2 --mesh cp=2 --save-every 2 --resume && same whole_cp=2 cp=2
verdict $? 'a finished run that goes on finds its own student'
cp "$work/finished" "$work/cp=2/student/model.safetensors"
refused cp=2 'cp=2/student holds a finished model that this run did not make' --steps 8 --mesh cp=2 --save-every 2 --resume &&
cmp -s "$work/finished" "$work/cp=2/student/model.safetensors"
verdict $? 'a run that goes on does not replace the student of another'

# What the run leaves behind.
grep '"heldout_bits_per_byte"' "$work/whole_dp=2/metrics.jsonl" >"$work/points" && [ "$(wc -l <"$work/points")" -eq 72 ] &&
! grep -v '"heldout_bytes": [1-9]' "$work/points" &&
grep -q '"tokens": 2048, "tokens_per_second": [1-9]' "$work/whole_dp=2/metrics.jsonl"
verdict $? 'metrics.jsonl has the held-out values, the tokens seen and their rate'
for run in dp=2 tp=2; do
    grep '"heldout_bits_per_byte"' "$work/whole_$run/metrics.jsonl" | sed 's/"wall": [^,]*, //' >"$work/points"
    grep '"heldout_bits_per_byte"' "$work/$run/metrics.jsonl" | sed 's/"wall": [^,]*, //' | cmp -s - "$work/points" &&
    cmp -s "$work/whole_$run/loss.svg" "$work/$run/loss.svg"
    verdict $? "a run on $run that was killed draws the same picture"
done
tail -n 11 "$work/whole_dp=2.log" >"$work/end" && grep -q 'report.html' "$work/end" && grep -q 'metrics.jsonl' "$work/end" &&
grep -q "from_pretrained(\"$work/whole_dp=2/student\")" "$work/end" && grep -q 'build/demo --eval' "$work/end"
verdict $? 'the last lines say where everything is and how to open it'
[ -s "$work/whole_dp=2/events.out.tfevents.xdistill" ] && grep -q '<h2>What they write</h2>' "$work/whole_dp=2/report.html" &&
! grep -q '<script' "$work/whole_dp=2/report.html" && grep -q '<svg' "$work/whole_dp=2/report.html"
verdict $? 'there is a page with the figure and samples, and the curves for TensorBoard'
awk '/^step/ && length > 100 { long++ } /^step/ && /% [|] .*tokens\/s [|] .* left$/ { lines++ } END { exit long > 0 || lines < 1 }' \
    "$work/whole_dp=2.log"
verdict $? 'progress is told in short lines'

# Texts of one's own: two files, or with a cache that only its students read.
mkdir "$work/own" && head -c 30000 data/kjv_heldout.txt >"$work/own/text.txt" && head -c 3000 data/kjv_student.txt >"$work/own/heldout.txt" &&
start small own_run --data "$work/own" --steps 2 --mesh dp=1 && grep -q 'has no teacher.xdcache' "$work/own_run.log" &&
! grep -q SmolLM2 "$work/own_run.log"
verdict $? 'a folder with two texts is enough'
echo 'not a cache' >"$work/own/teacher.xdcache"
start small own_run --data "$work/own" --steps 2 --mesh dp=1 --arms text,pkl --overwrite && refused own_run 'demo: ERROR' \
    --data "$work/own" --steps 2 --mesh dp=1 --arms smollm2 --overwrite
verdict $? 'a cache is opened for those who read it'

# What cannot go on. dp=2 holds the states of a finished run.
set -- --save-every 2 --resume --steps 8
refused dp=2 'mesh is dp=2,cp=1,tp=1, this run.s is dp=1,cp=1,tp=2' "$@" --mesh tp=2
verdict $? 'another mesh is refused with both'
refused dp=2 'reduction is deterministic, this run.s is fast' "$@" --mesh dp=2 --reduction fast
verdict $? 'another reduction mode is refused with both'
refused dp=2 'steps is 8, this run.s is 9: without --resume' "$@" --mesh dp=2 --steps 9
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
refused refused 'cannot run the arm .magic.' --arms text,magic --steps 2
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
conclude
