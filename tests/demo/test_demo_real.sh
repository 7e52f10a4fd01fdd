#!/bin/sh
# tools/demo_real.sh from end to end, with a tiny random teacher in the place of the real one and nothing fetched: the
# students stay, as directories that measure the same once read back, with samples and a picture. The last line is
# `N passed, N failed, N skipped`.
#
#   sh tests/demo/test_demo_real.sh     from the root
set -u
. tests/demo/common.sh

tool=build/xdistill
out=$work/out

# real [STEPS]: a whole run, its words in $work/log
real() {
    sh tools/demo_real.sh --offline --files "$work/files" --out "$out" --steps "${1:-2}" --long 3 --text "$work/text.txt" \
        --held-out "$work/heldout.txt" >"$work/log" 2>&1
}

# number FILE ARM KEY: of an arm of a result.json
number() { sed -n "/\"$2\": {/,\$s/^ *\"$3\": \([0-9.]*\),\$/\1/p" "$1" | head -n 1; }

make --no-print-directory build/xdistill >"$work/build.log" 2>&1
verdict $? 'the tool builds' "$work/build.log"
mkdir "$work/files"
python3 tests/demo/tiny_gguf.py "$work/files/smollm2.gguf"
head -c 40000 data/kjv_student.txt >"$work/text.txt"
head -c 3000 data/kjv_heldout.txt >"$work/heldout.txt"
real
verdict $? 'the demonstration runs' "$work/log"

# Each student: the folder of its run, its directory there, and its key in result.json.
for student in cached-2-1/student:student cached-2-1/alone:text_alone live-2-1/student:student cached-3-1/student:student \
    cached-3-1/alone:text_alone; do
    folder=$out/${student%:*} result=$out/${student%%/*}/result.json
    for file in config.json generation_config.json tokenizer.json tokenizer_config.json model.safetensors; do
        [ -s "$folder/$file" ] || echo "$student has no $file"
    done >"$work/missing"
    bits=$(number "$result" "${student#*:}" best)
    [ ! -s "$work/missing" ] && $tool eval --model "$folder" --text "$work/heldout.txt" --row 128 >"$work/eval.log" &&
    awk -v bits="$bits" 'NR == 1 { d = $2 - bits; exit !(d < 1e-4 && d > -1e-4) }' "$work/eval.log"
    verdict $? "$student stays, and measures the same once it is read back" "$work/eval.log"
done
for name in cached-2 'cached-2, text alone' live-2 cached-3 'cached-3, text alone'; do
    grep -q "^$name:\$" "$work/log" && grep -q "^$name  *[23]  *1  *[0-9.]*  *-  *[0-9.]* " "$work/log"
    verdict $? "$name is in the table, and what it writes is shown" "$work/log"
done
grep -q '^And it came to pass' "$out/teacher.txt" && grep -q '^teacher  *[0-9.]*$' "$work/log"
verdict $? 'so is the teacher'
svg=$out/students.svg
[ "$(grep -c '<polyline' "$svg")" -eq 15 ] && [ "$(grep -c 'stroke-dasharray' "$svg")" -eq 2 ] && grep -q 'live-2' "$svg"
verdict $? 'the picture has every student and the teacher'
entries=$(sed -n 's/.*"vocab_size": \([0-9]*\).*/\1/p' "$out/cached-2-1/alone/config.json")
[ "$entries" -gt 300 ] && grep -q "Students of $entries entries from smollm2.gguf" "$svg"
verdict $? 'its title tells the size of the vocabulary that there is'
grep -q '^pair-qwen: skipped, .*llama3.ranks is missing: it could not be fetched' "$work/log"
verdict $? 'what is skipped says why'
tail -n 6 "$work/log" | grep -q 'from_pretrained(".*/cached-2-1/student")'
verdict $? 'the last lines say where everything is and how to open it'
cmp -s "$out/cached-2-1/cache/0000.xdcache" "$out/cached-3-1/cache/0000.xdcache" && [ ! -e "$out/live-2-1/cache" ]
verdict $? 'runs share what the teacher said'

real && grep -q 'done before' "$work/log" && ! grep -q '^----' "$work/log"
verdict $? 'what is done is not done again' "$work/log"
rm "$out/cached-2-1/result.json" "$out/cached-2-1/student/model.safetensors"
real && [ -s "$out/cached-2-1/student/model.safetensors" ] && [ "$(grep -c '^----' "$work/log")" -eq 1 ]
verdict $? 'what is missing is done' "$work/log"
rm "$out/cached-2-1/result.json"
: >"$out/cached-2-1/letter.txt"
real
[ $? -ne 0 ] && grep -q 'holds other files, such as letter.txt' "$work/log" && grep -q '^cached-2-1: failed' "$work/log"
verdict $? 'what fails says so' "$work/log"
sh tools/demo_real.sh --step 5 >"$work/log" 2>&1
[ $? -eq 2 ] && grep -q 'there is no option --step' "$work/log"
verdict $? 'an unknown option is refused' "$work/log"

# Two runs with seeds of their own are one student; a picture of them alone.
seeds="--teacher $work/files/smollm2.gguf --text $work/text.txt --tokenizer $out/tokenizer.json --layers 1 --hidden 32 --heads 2 --row 32
    --steps 4 --no-alone --live"
$tool distil $seeds --seed 1 --out "$work/s-1" >"$work/log" 2>&1 && $tool distil $seeds --seed 2 --out "$work/s-2" >>"$work/log" 2>&1 &&
$tool compare "$work/s.svg" "$work/s-1" "$work/s-2/" >"$work/log" 2>&1 && grep -q '^s  *4  *2  *[0-9.]*  *[0-9.]*  *[0-9.]* ' "$work/log"
verdict $? 'two seeds are one student' "$work/log"

$tool pair --student data/student/tokenizer.json --teacher data/teacher/tokenizer.json --text "$work/heldout.txt" --steps 5 >"$work/pair" &&
awk '/^  loss/ { found = $2 > $4 && $4 > 0; exit } END { exit !found }' "$work/pair" &&
$tool pair --student data/student/tokenizer.json --teacher data/teacher/tokenizer.json --text "$work/heldout.txt" --steps 5 --ranks 1 \
    >"$work/pair1" && [ "$(grep '^  loss' "$work/pair")" = "$(grep '^  loss' "$work/pair1")" ]
verdict $? 'two vocabularies train; shared by ranks they have the same losses' "$work/pair"
$tool eval --model data/teacher --text "$work/heldout.txt" --row 128 >"$work/rows" && head -c 300 "$work/heldout.txt" >"$work/few.txt" &&
for ranks in 1 2 3; do $tool eval --model data/teacher --text "$work/few.txt" --ranks $ranks --repeat 2 | cut -d ' ' -f 1-10 | head -n 1; done |
    uniq -c >"$work/eval.log" && grep -q '^ *3 teacher: [0-9.]* bits per byte of 297 bytes' "$work/eval.log"
verdict $? 'one context measures the same on any number of ranks' "$work/eval.log"
conclude
