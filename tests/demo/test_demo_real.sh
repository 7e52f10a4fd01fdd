#!/bin/sh
# tools/demo_real.sh from end to end, with a tiny random teacher in the place of the real one and nothing fetched: the
# students stay, as directories that measure the same once read back, with samples and a picture. The last line is
# `N passed, N failed, N skipped`.
#
#   sh tests/demo/test_demo_real.sh     from the root
set -u
. tests/demo/common.sh

# real [STEPS]: a whole run, its words in $work/log
real() {
    REAL_OFFLINE=1 REAL_CACHE=$work/cache REAL_OUT=$work/out REAL_STEPS=${1:-2} REAL_LONG=3 REAL_TEXT=$work/data/text.txt \
        REAL_HELDOUT=$work/data/heldout.txt sh tools/demo_real.sh >"$work/log" 2>&1
}

make --no-print-directory build/real build/xdistill build/demo >"$work/build.log" 2>&1
verdict $? 'the programs build'
mkdir "$work/cache" "$work/data"
python3 tests/demo/tiny_gguf.py "$work/cache/smollm2.gguf"
head -c 120000 data/kjv_student.txt >"$work/data/text.txt"
head -c 3000 data/kjv_heldout.txt >"$work/data/heldout.txt"
real
verdict $? 'the demonstration runs'

students='alone-2-1 cached-2-1 live-2-1 alone-3-1 cached-3-1'
for student in $students; do
    folder=$work/out/students/$student
    for file in config.json generation_config.json tokenizer.json tokenizer_config.json model.safetensors curve.json; do
        [ -s "$folder/$file" ] || echo "$student has no $file"
    done >"$work/missing"
    [ ! -s "$work/missing" ] && bits=$(sed -n 's/.*"bits_per_byte": \([0-9.]*\).*/\1/p' "$work/out/student-$student.jsonl") &&
    build/demo --data "$work/data" --eval "$folder" | awk -v bits="$bits" '
        /bits\/byte/ { d = $4 - bits; found = d < 2e-6 && d > -2e-6 } END { exit !found }'
    verdict $? "$student stays, and measures the same once it is read back"
    name=$(echo "$student" | sed 's/\([a-z]*\)-\([0-9]*\).*/\1, \2 steps:/')
    grep -q "^$name" "$work/log"
    verdict $? "what $student writes is shown"
done
grep -q '^teacher:' "$work/log" && grep -q '"judge": "smollm2.gguf", "bytes": [1-9]' "$work/out/teacher.jsonl"
verdict $? 'so is what the teacher writes, and it is measured'
svg=$work/out/students.svg
[ "$(grep -c '<polyline' "$svg")" -eq 15 ] && [ "$(grep -c 'stroke-dasharray' "$svg")" -eq 2 ] && grep -q 'live, 2 steps' "$svg"
verdict $? 'the picture has every student and the teacher'
entries=$(sed -n 's/.*"vocab_size": \([0-9]*\).*/\1/p' "$work/out/students/alone-2-1/config.json")
[ "$entries" -gt 300 ] && grep -q "Students of $entries entries" "$svg"
verdict $? 'its title tells the size of the vocabulary that there is'
[ "$(grep -c '^\(alone\|cached\|live\)  *[23]  *1  *[0-9.]*  *-  ' "$work/log")" -eq 5 ] && grep -q '^teacher  .*of the same text' "$work/log"
verdict $? 'the table has every student and the teacher'
grep -q '^pair-qwen: skipped, .*llama3.ranks is missing: it could not be fetched' "$work/log"
verdict $? 'what is skipped says why'
tail -n 6 "$work/log" | grep -q 'from_pretrained(".*/students/alone-2-1")'
verdict $? 'the last lines say where everything is and how to open it'

real && grep -q 'done before' "$work/log" && ! grep -q '^----' "$work/log"
verdict $? 'what is done is not done again'
mv "$work/out/student-alone-2-1.jsonl" "$work/kept.jsonl"
cp "$work/out/students/alone-2-1/model.safetensors" "$work/kept"
real
[ $? -ne 0 ] && grep -q 'alone-2-1 holds a finished model: --overwrite' "$work/log" && grep -q 'REAL_OVERWRITE=1' "$work/log" &&
cmp -s "$work/kept" "$work/out/students/alone-2-1/model.safetensors"
verdict $? 'a finished student is not replaced unasked'
if command -v flock >/dev/null 2>&1; then
    rm "$work/out/.stage"
    (real 1000000 &)
    appears "$work/out/.stage"
    sleep 0.5
    first=$(cat "$work/out/.process") stage=$(cat "$work/out/.stage")
    mv "$work/log" "$work/first" # the second run has one of its own
    real
    [ $? -ne 0 ] && grep -q "^process $first runs in" "$work/log" && grep -q 'REAL_OUT' "$work/log"
    verdict $? 'a second run in the same folder is refused with the process of the first'
    kill -9 "$first"
    while kill -0 "$first" 2>/dev/null; do sleep 0.1; done
    real
    [ $? -ne 0 ] && grep -q "^process $stage, left behind" "$work/log"
    verdict $? 'what a killed run left behind is named'
    kill -9 "$stage"
    sleep 0.2
    mv "$work/kept.jsonl" "$work/out/student-alone-2-1.jsonl"
    real
    verdict $? 'after it the next run goes on'
fi

# A teacher without one of its weights: nobody may read them.
LC_ALL=C sed 's/output_norm[.]weight/output_gone.weight/' "$work/cache/smollm2.gguf" >"$work/no_weights.gguf"
cached() {
    build/real student "$1" "$work/out/tokenizer.json" "$work/data/text.txt" "$work/data/heldout.txt" "$work/no_weights.gguf" \
        "$work/out/smollm2.xdcache" --steps 1 >"$work/log" 2>&1
}
cached cached && ! cached live && grep -q output_norm "$work/log"
verdict $? 'a student of the cache does not load the weights of the teacher'

cp data/student/tokenizer.json "$work/s.json"
cp data/teacher/tokenizer.json "$work/t.json"
build/real pair "$work/s.json" "$work/t.json" "$work/data/heldout.txt" --steps 1 --out "$work/pair" >/dev/null &&
grep -q '"student": "s.json", "teacher": "t.json"' "$work/pair"
verdict $? 'a pair names its student and its teacher'
conclude
