#!/bin/sh
# The demonstration of image distillation: pictures, table, metrics and students have the same bytes on any number of ranks, with networks
# whole or in parts, with pictures whole or shared by ranks, and after a run that was killed; what is wrong is refused. The last line is `N passed, N failed, N skipped`.
#
#   sh tests/demo/test_demo_images.sh     from the root
#
# It trains for few steps and draws 100 images, so its students are poor. Real pictures are the 100 in data/images.
set -u
. tests/demo/common.sh

short="--warm-up 1 --steps 2 --one-steps 2 --save-every 1 --count 100 --generations 1"

# start NAME OPTION...: a short run into the folder NAME, quietly
start() {
    name=$1
    shift
    "$work/images" $short --out "$work/$name" "$@" >"$work/$name.log" 2>&1
}

# refused WORDS OPTION...: nothing runs, and it says WORDS
refused() {
    words=$1
    shift
    start refused "$@" && return 1
    grep -q -e "$words" "$work/refused.log" || { cat "$work/refused.log"; return 1; }
}

# same NAME [LIKE]: all that a run leaves has the bytes of that on one rank
same() {
    for file in grid.png table.txt steps-4/metrics.jsonl steps-1/metrics.jsonl steps-4/warm-up/model.safetensors \
        steps-4/student/model.safetensors steps-4/student-ema/model.safetensors steps-1/student-ema/model.safetensors; do
        cmp "$work/${2:-one}/$file" "$work/$1/$file" || return 1
    done
}

program images '-DIMAGES_LEAD=1 -DIMAGES_REAL_SPLIT="sample"' "$images"
verdict $? 'it builds' "$work/build.log"

start one --mesh dp=1 && [ "$(grep -c 'right class' "$work/one/table.txt")" -eq 7 ] &&
! grep -qi 'nan\|inf' "$work/one/table.txt" "$work/one"/steps-*/metrics.jsonl &&
[ "$(wc -l <"$work/one/steps-4/metrics.jsonl")" -eq 12 ] && [ "$(head -c 4 "$work/one/grid.png" | tail -c 3)" = PNG ]
verdict $? 'a short run on one rank leaves a table, a picture and metrics' "$work/one.log"
awk -F '"deviation": ' 'NF == 2 { n++; d = $2 + 0; bad += !(d > 0.2 && d < 1) || !/"mean": -/ || !/"stuck": 0/ } END { exit bad || n != 2 }' \
    "$work/one/steps-1/metrics.jsonl"
verdict $? 'metrics say how bright and how different the pictures of each of its steps are' "$work/one/steps-1/metrics.jsonl"

# pulls FILE LINES: in so many lines the matching term is 64 x 256 / 2 squares of the norm of its gradient by the pictures
pulls() {
    sed -n 's/.*"vsd": \([^,]*\),.*"vsd_norm": \([^,]*\),.*/\1 \2/p' "$1" | awk -v lines="$2" \
        '{ d = $2 * $2 * 8192 - $1; most = 1e-4 * $1 + 1e-12; bad += !(d <= most && -d <= most); last = $1 } END { exit bad || NR != lines || !(last > 0) }'
}
pulls "$work/one/steps-1/metrics.jsonl" 2 && ! grep -q generator_norm "$work/one/steps-1/metrics.jsonl"
verdict $? 'metrics have the norm of the gradient of matching' "$work/one/steps-1/metrics.jsonl"
for mesh in dp=3 fsdp=2 cp=2; do
    start $mesh --mesh $mesh && same $mesh
    verdict $? "--mesh $mesh has the bytes of one rank" "$work/$mesh.log"
done

"$work/images" $short --out "$work/killed" --mesh cp=2 >"$work/killed.log" 2>&1 &
run=$!
appears "$work/killed/steps-4/checkpoints/latest"
end $run
[ ! -s "$work/killed/table.txt" ]
verdict $? 'a run was killed after its first checkpoint' "$work/killed.log"
start killed --mesh hsdp=2x1 --resume && same killed
verdict $? 'it goes on with whole pictures, under another wrapper, with the bytes of one rank' "$work/killed.log"

long="--warm-up 12 --steps 1 --one-steps 1"
start warm --mesh dp=1 $long
verdict $? 'a run with a longer warm-up' "$work/warm.log"
"$work/images" $short $long --out "$work/early" --mesh dp=2 >"$work/early.log" 2>&1 &
run=$!
appears "$work/early/steps-4/warm-up-checkpoints/latest"
end $run
[ ! -s "$work/early/steps-4/warm-up/model.safetensors" ]
verdict $? 'a run was killed within its warm-up' "$work/early.log"
start early --mesh fsdp=2 --resume $long && grep -q 'steps-4: goes on after step [0-9]* of warm-up' "$work/early.log" &&
! grep -q 'goes on' "$work/warm.log" && same early warm
verdict $? 'it goes on within its warm-up, under another wrapper, with the bytes of one rank' "$work/early.log"

# judged FOLDER: its newest checkpoint holds a discriminator
judged() {
    [ -s "$1/checkpoints/$(cat "$1/checkpoints/latest")/extra-discriminator.safetensors" ]
}
gan="--gan .03 --gan-r1 .1 --real data/images"
start gan --mesh dp=1 $gan && grep -q '^with GAN: weight 0.03, R1 0.1, real pictures of data/images$' "$work/gan/table.txt" &&
! grep -q GAN "$work/one/table.txt" && [ "$(grep -c discriminator_norm "$work/gan/steps-4/metrics.jsonl")" -eq 11 ] &&
! grep -qi 'nan\|inf' "$work/gan/table.txt" "$work/gan"/steps-*/metrics.jsonl && judged "$work/gan/steps-1" &&
! cmp -s "$work/one/steps-1/student/model.safetensors" "$work/gan/steps-1/student/model.safetensors"
verdict $? '--gan trains other students, and tells of it' "$work/gan.log"
pulls "$work/gan/steps-1/metrics.jsonl" 2 && [ "$(grep -c '"generator_norm": 0[.0]*[1-9]' "$work/gan/steps-1/metrics.jsonl")" -eq 2 ]
verdict $? '--gan has norms of both terms' "$work/gan/steps-1/metrics.jsonl"
start gan2 --mesh dp=2,cp=2 $gan && same gan2 gan
verdict $? '--gan has the bytes of one rank on four, two to each picture' "$work/gan2.log"
"$work/images" $short --out "$work/cut" --mesh dp=2 $gan >"$work/cut.log" 2>&1 &
run=$!
appears "$work/cut/steps-4/checkpoints/latest"
end $run
[ ! -s "$work/cut/table.txt" ] && start cut --mesh fsdp=2,cp=2 --resume $gan && same cut gan &&
cmp "$work/cut/steps-1/checkpoints/step-8/extra-discriminator.safetensors" \
    "$work/gan/steps-1/checkpoints/step-8/extra-discriminator.safetensors" &&
cmp "$work/cut/steps-1/checkpoints/step-8/optim-discriminator.safetensors" \
    "$work/gan/steps-1/checkpoints/step-8/optim-discriminator.safetensors"
verdict $? 'killed, it goes on in parts of networks and pictures with the bytes of one rank, those of the discriminator too' "$work/cut.log"
cp "$work/one/table.txt" "$work/table.before"
refused 'was begun with .* not with .* GAN' --out "$work/one" --resume $gan
verdict $? 'a run does not go on with an adversarial term that it began without'
refused 'holds a finished student' --out "$work/one"
verdict $? 'a finished student is not replaced unasked'
refused 'was begun with seed 1' --out "$work/one" --resume --seed 2
verdict $? 'a run does not go on with another seed'
cmp -s "$work/one/table.txt" "$work/table.before"
verdict $? 'nothing was changed by what was refused'

for bad in '--mesh tp=2:--mesh takes dp=N, fsdp=N or hsdp=GxN' '--mesh dp=9:--mesh takes' '--mesh cp=3:and cp=2 or cp=4' \
    '--mesh dp=4,cp=4:ranks in all 1 to 8' '--mesh hsdp=3x1:with G a power of two' '--mesh fsdp=2,dp=2:--mesh takes' \
    '--train-teacher /nowhere --mesh cp=2:--mesh without cp=2' '--count 99:--count takes a number from 100' \
    '--steps 0:--steps takes a number from 1' '--gan 0:--gan takes a number above 0' '--gan-r1 .1:which --gan adds' \
    '--gan .03 --real /nowhere:tools/fetch_images.sh' '--data /nowhere:/nowhere' '--epochs 3:no option --epochs'; do
    refused "${bad#*:}" ${bad%%:*}
    verdict $? "${bad%%:*} is answered with what would be right"
done
"$work/images" --help >"$work/help.log"
for option in mesh warm-up steps one-steps count generations seed gan gan-r1 real save-every resume data out overwrite train-teacher help; do
    grep -q "^  --$option " "$work/help.log" || echo "no --$option"
done >"$work/missing"
[ ! -s "$work/missing" ]
verdict $? '--help lists the options' "$work/missing"
conclude
