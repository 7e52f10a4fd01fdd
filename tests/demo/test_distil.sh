#!/bin/sh
# `xdistill distil` from end to end on a small teacher, and `eval` and `generate` of what it leaves: results, an interrupted run
# that goes on to the same bits, and bad input. The last line is `N passed, N failed, N skipped`.
#
#   sh tests/demo/test_distil.sh     from the root
set -u
. tests/demo/common.sh

tool=build/xdistill
small="--teacher data/teacher --layers 1 --hidden 32 --heads 2 --row 32 --steps 24"

# distil NAME OPTION...: a run into the folder NAME, its words in NAME.log
distil() {
    name=$1
    shift
    $tool distil --text "$work/text.txt" --out "$work/$name" "$@" >"$work/$name.log" 2>&1
}

# number FILE KEY: the first value of that key in a result.json
number() { sed -n "s/^ *\"$2\": \([-0-9.e]*\),*$/\1/p" "$1" | head -n 1; }

# refused WORDS COMMAND OPTION...: ends with 2 and says that
refused() {
    words=$1
    shift
    $tool "$@" >"$work/refused.log" 2>&1
    [ $? -eq 2 ] && grep -q -e "$words" "$work/refused.log"
    verdict $? "refused: $words" "$work/refused.log"
}

make --no-print-directory build/xdistill >"$work/build.log" 2>&1
verdict $? 'the tool builds' "$work/build.log"
head -c 40000 data/kjv_student.txt >"$work/text.txt"

# ---- a whole run ----

distil run $small
verdict $? 'a run ends' "$work/run.log"
for file in result.json report.html report.txt curves.svg student/config.json student/tokenizer.json student/model.safetensors \
    alone/model.safetensors; do
    [ -s "$work/run/$file" ] || echo "$file"
done >"$work/missing"
[ ! -s "$work/missing" ] && [ ! -e "$work/run/student.state" ]
verdict $? 'it leaves a student and a report, and no state' "$work/missing"
grep -q '^teacher  *[0-9.]*$' "$work/run.log" && grep -q '^student  *[0-9.]* *[0-9.]* *[0-9]* *24$' "$work/run.log" &&
grep -q '^text alone  *[0-9.]* *[0-9.]*' "$work/run.log" && grep -q '^takes  *about [0-9]* MiB' "$work/run.log"
verdict $? 'its table has teacher, student and the student without a teacher' "$work/run.log"
tr '\r' '\n' <"$work/run.log" | awk 'length($0) > 80 && !/from_pretrained|first|is of the|^  student/ { print }' >"$work/wide"
[ ! -s "$work/wide" ]
verdict $? 'its lines fit 80 columns' "$work/wide"
$tool eval --model "$work/run/student" --text "$work/run/report.txt" --row 32 >"$work/eval.log" 2>&1
best=$(sed -n '/"student": {/,$s/^ *"best": \([0-9.]*\),$/\1/p' "$work/run/result.json" | head -n 1)
awk -v best="$best" '{ d = $2 - best; exit !(d < 1e-4 && d > -1e-4) }' "$work/eval.log"
verdict $? 'eval of the saved student gives the number of the report' "$work/eval.log"
$tool generate --model "$work/run/student" --prompt 'In the beginning' --tokens 8 >"$work/one" &&
$tool generate --model "$work/run/student" --prompt 'In the beginning' --tokens 8 >"$work/two" &&
$tool generate --model "$work/run/student" --prompt 'In the beginning' --tokens 8 --seed 2 >"$work/three" &&
grep -q '^In the beginning' "$work/one" && cmp -s "$work/one" "$work/two" && ! cmp -s "$work/one" "$work/three"
verdict $? 'generate goes on from the prompt, by its seed'
likeliest() { $tool generate --model data/teacher --temperature 0 --prompt "$1" --tokens "$2"; }
likeliest 'In the beginning' 24 >"$work/one" && likeliest "$(likeliest 'In the beginning' 12)" 12 >"$work/two" && cmp -s "$work/one" "$work/two"
verdict $? 'with the keys and values that it keeps it writes what it does without' "$work/two"
likeliest "$(head -c 1000 data/kjv_heldout.txt)" 200 >"$work/one" && [ "$(wc -c <"$work/one")" -gt 1400 ]
verdict $? 'prompt and text may be longer than a context' "$work/one"

python3 - "$work/run/events.out.tfevents.xdistill" <<'END' >"$work/events.log" 2>&1
import struct, sys

def crc(data, table=[]):
    if not table:
        for i in range(256):
            for _ in range(8):
                i = i >> 1 ^ 0x82f63b78 if i & 1 else i >> 1
            table.append(i)
    value = 0xffffffff
    for byte in data:
        value = value >> 8 ^ table[(value ^ byte) & 255]
    value ^= 0xffffffff
    return ((value >> 15 | value << 17) + 0xa282ead8) & 0xffffffff

data, at, events = open(sys.argv[1], "rb").read(), 0, []
while at < len(data):
    length, mask = struct.unpack_from("<QI", data, at)
    event = data[at + 12:at + 12 + length]
    assert mask == crc(data[at:at + 8]) and struct.unpack_from("<I", data, at + 12 + length)[0] == crc(event)
    events.append(event)
    at += 16 + length
assert b"brain.Event:2" in events[0]
assert sum(b"loss/student" in event for event in events) == 24 and sum(b"held-out bits per byte/text alone" in event for event in events) == 16
END
verdict $? 'its curves are records that TensorBoard reads' "$work/events.log"

# ---- students ----

distil layers --teacher data/teacher --teacher-layers 2 --row 32 --steps 6 --no-alone
verdict $? 'a student of the layers of the teacher' "$work/layers.log"
bytes=$(wc -c <"$work/layers/student/model.safetensors")
[ "$bytes" -gt 3000000 ] && grep -q 'not known: --alone' "$work/layers.log"
verdict $? 'has its embedding; the report says that nobody knows what the teacher gave' "$work/layers.log"
distil from --teacher data/teacher --from "$work/run/student" --row 32 --steps 3 --no-alone --draws 0 --likeliest 16 --ce-weight 0.5
verdict $? 'a student from a directory, with both losses and a cache with tails' "$work/from.log"
python3 tests/demo/tiny_gguf.py "$work/tiny.gguf" && distil gguf --teacher "$work/tiny.gguf" --teacher-layers 1 --row 16 --steps 3 --ranks 1
verdict $? 'a teacher in a GGUF file, one rank' "$work/gguf.log"

distil own $small --vocabulary 600 --layers 2 --text "$work/text.txt" && grep -q 'random; 600 tokens' "$work/own.log"
verdict $? 'a student with a tokenizer trained on the text' "$work/own.log"
$tool eval --model "$work/own/student" --text "$work/own/report.txt" --row 32 >"$work/eval.log" 2>&1
best=$(sed -n '/"student": {/,$s/^ *"best": \([0-9.]*\),$/\1/p' "$work/own/result.json" | head -n 1)
awk -v best="$best" '{ d = $2 - best; exit !(d < 1e-4 && d > -1e-4) }' "$work/eval.log"
verdict $? 'eval of it gives the number of the report' "$work/eval.log"
distil file $small --tokenizer data/student/tokenizer.json --layers 2 --ranks 1 --no-alone &&
distil from2 --teacher data/teacher --from "$work/file/student" --row 32 --steps 4 --no-alone
verdict $? 'a tokenizer from a file, and a directory with another one than the teacher' "$work/from2.log"

distil live $small --live --no-alone && [ ! -e "$work/live/cache" ] && grep -q 'Whether the teacher helped' "$work/live.log"
verdict $? 'a teacher that runs on every row' "$work/live.log"

# The teacher once more, with a merge less, so that it counts as a student with another tokenizer: what it learns it knows.
cp -r data/teacher "$work/twin" && python3 - "$work/twin/tokenizer.json" <<'END'
import json, sys
with open(sys.argv[1]) as file:
    tokenizer = json.load(file)
tokenizer["model"]["merges"].pop()
with open(sys.argv[1], "w") as file:
    json.dump(tokenizer, file)
END
head -c 3000 data/kjv_heldout.txt >"$work/report.txt"
distil beside --teacher data/teacher --from "$work/twin" --row 32 --steps 3 --no-alone --ce-weight 0 --live --report-text "$work/report.txt" &&
python3 -c 'import json, sys; sys.exit(not 0 < json.load(open(sys.argv[1]))["student"]["losses"][0] < 2.5)' "$work/beside/result.json"
verdict $? 'a teacher that runs beside a student with another tokenizer reads the same text' "$work/beside.log"
[ "$(number "$work/beside/result.json" report_bytes)" -eq 3000 ] && cmp -s "$work/beside/report.txt" "$work/report.txt"
verdict $? 'the report is of a text of its own'

# ---- tokenize, pair, cache ----

$tool tokenize train --text data/kjv_student.txt --entries 1024 --pieces llama3 --out "$work/s.json" >"$work/train.log" 2>&1 &&
cmp "$work/s.json" data/student/tokenizer.json >>"$work/train.log" 2>&1
verdict $? "tokenize train gives data/student's tokenizer to the byte" "$work/train.log"
$tool tokenize encode --tokenizer "$work/s.json" --text "$work/text.txt" >"$work/ids" && [ "$(wc -l <"$work/ids")" -gt 5000 ] &&
$tool tokenize encode --tokenizer "$work/run/student" --text "$work/text.txt" >"$work/ids2" && ! cmp -s "$work/ids" "$work/ids2"
verdict $? 'tokenize encode prints ids, by a file and by a directory'
$tool pair --student "$work/s.json" --teacher data/teacher --text "$work/text.txt" --out "$work/p.xdproj" >"$work/pair.log" 2>&1 &&
grep -q 'the same in both  987 ' "$work/pair.log" && grep -q '^  exact  *[0-9]* (100.00%)' "$work/pair.log" &&
$tool pair --show "$work/p.xdproj" | grep -q '^matrix  *1024 x 2048'
verdict $? 'pair prints overlap and alignment, and writes a projection' "$work/pair.log"
head -c 5000 data/kjv_heldout.txt >"$work/few.txt"
$tool cache write --teacher data/teacher --text "$work/few.txt" --out "$work/cache" --likeliest 4 --draws 2 >"$work/cache.log" 2>&1 &&
$tool cache inspect --cache "$work/cache" --positions 2 >>"$work/cache.log" 2>&1 &&
grep -q 'teacher teacher, positions [0-9]*, documents 1, vocabulary 2048, likeliest 4, draws 2' "$work/cache.log" &&
[ "$(grep -c 'the drawn ones are for' "$work/cache.log")" -ge 2 ]
verdict $? 'cache write and cache inspect' "$work/cache.log"
$tool cache write --teacher data/teacher --text "$work/few.txt" --out "$work/cache1" --contexts 1000 >"$work/cache.log" 2>&1 &&
[ -s "$work/cache1/0000.xdcache" ] && [ ! -e "$work/cache1/0001.xdcache" ] && [ -e "$work/cache/0001.xdcache" ]
verdict $? 'a cache in one file' "$work/cache.log"

# ---- interrupted ----

long="$small --steps 160 --whole --no-alone"
distil whole $long
verdict $? 'a longer run' "$work/whole.log"
mkdir "$work/cut" && cp -r "$work/run/cache" "$work/cut/" && rm "$work/cut/cache/0001.xdcache"
(exec $tool distil --text "$work/text.txt" --out "$work/cut" $long >"$work/cut.log" 2>&1) &
process=$!
appears "$work/cut/student.state"
distil cut $long
[ $? -eq 2 ] && grep -q "process [0-9]* runs in" "$work/cut.log"
verdict $? 'a second run in the same folder is refused' "$work/cut.log"
end $process
[ -e "$work/cut/result.json" ]
[ $? -ne 0 ] && distil cut $long --steps 161
[ $? -eq 2 ] && grep -q 'begun with other settings: steps 160, here steps 161' "$work/cut.log"
verdict $? 'an interrupted run does not go on with other settings' "$work/cut.log"
distil cut $long && grep -q 'goes on after step' "$work/cut.log" && grep -q '^takes .* for the steps left' "$work/cut.log"
verdict $? 'it goes on with the same' "$work/cut.log"
cmp -s "$work/cut/student/model.safetensors" "$work/whole/student/model.safetensors" &&
for part in 0000 0001; do cmp -s "$work/cut/cache/$part.xdcache" "$work/whole/cache/$part.xdcache" || exit 1; done
verdict $? 'to the same bits, the part of the cache that was missing too'
distil cut $long
[ $? -eq 2 ] && grep -q 'holds a finished run' "$work/cut.log"
verdict $? 'a finished run is not replaced unasked' "$work/cut.log"

# Ctrl-C once the state is there. A shell's background commands ignore it, so Python starts the run.
mkdir "$work/stop" && cp -r "$work/run/cache" "$work/stop/"
python3 - "$work/stop/student.state" $tool distil --text "$work/text.txt" --out "$work/stop" $long --overwrite >"$work/stop.log" 2>&1 <<'END'
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
run = subprocess.Popen(sys.argv[2:])
while run.poll() is None and not os.path.exists(sys.argv[1]):
    time.sleep(0.005)
run.send_signal(signal.SIGINT)
sys.exit(run.wait())
END
[ $? -eq 2 ] && grep -q 'student stopped after step [0-9]* of 160: the same command goes on' "$work/stop.log" &&
distil stop $long --overwrite && grep -q 'goes on after step [0-9]* of 160' "$work/stop.log" &&
cmp -s "$work/stop/student/model.safetensors" "$work/whole/student/model.safetensors"
verdict $? 'Ctrl-C stops between two measurements; the same command goes on, with --overwrite too' "$work/stop.log"

distil from2 --teacher data/teacher --from "$work/file/student" --text "$work/few.txt" --row 32 --steps 4 --no-alone --overwrite
verdict $? 'with --overwrite it is, for another text, too' "$work/from2.log"

# ---- bad input ----

cp "$work/few.txt" "$work/precious.txt"
refused 'precious.txt is there, and is no tokenizer.json' tokenize train --text "$work/few.txt" --out "$work/precious.txt"
refused 'precious.txt is there, and is no picture' compare "$work/precious.txt" "$work/run"
refused 'precious.txt is there, and is no projection' pair --student data/student --teacher data/teacher --out "$work/precious.txt"
cmp -s "$work/few.txt" "$work/precious.txt"
verdict $? 'no text is overwritten'
refused 'only runs with one teacher and text compare' compare "$work/x.svg" "$work/run" "$work/from2"
n=0; while [ $n -lt 33 ]; do cp -r "$work/run" "$work/many${n}x"; n=$((n + 1)); done
refused 'more than 32 students: a picture holds no more' compare "$work/x.svg" "$work"/many*
refused 'is no finished run: it has no result.json' compare "$work/x.svg" "$work/run" "$work/cache"

: >"$work/empty.txt"
{ head -c 5000 data/kjv_student.txt; printf '\000'; } >"$work/binary.txt"
{ head -c 5000 data/kjv_student.txt; printf '\377'; } >"$work/latin.txt"
head -c 1000 data/kjv_student.txt >"$work/short.txt"
given="--teacher data/teacher --out $work/bad"
refused 'empty.txt is empty' distil $given --text "$work/empty.txt"
refused 'is no text: byte 5000 is zero' distil $given --text "$work/binary.txt"
refused 'latin.txt is not UTF-8: byte 5000 is 0xff' distil $given --text "$work/latin.txt"
refused 'has 1000 bytes, at least 4096' distil $given --text "$work/short.txt"
refused 'cannot open\|open' distil $given --text "$work/nothing.txt"
refused 'cannot open the model' distil --teacher "$work/nothing" --out "$work/bad" --text "$work/text.txt"
refused 'is a file, not a directory' distil --teacher data/teacher --text "$work/text.txt" --out "$work/text.txt"
refused '--teacher-layers 9: teacher has 4' distil $given --text "$work/text.txt" --teacher-layers 9
refused '--row 512: teacher reads at most 128' distil $given --text "$work/text.txt" --row 512
refused '--ranks 8 share --batch 4' distil $given --text "$work/text.txt" --ranks 8
refused 'name three students' distil $given --text "$work/text.txt" --teacher-layers 2 --layers 2
refused 'takes a number from 1e-07 to 1, not "5"' distil $given --text "$work/text.txt" --lr 5
refused 'result.json' compare "$work/x.svg" "$work/twin"
refused '--text is needed' pair --student "$work/s.json" --teacher data/teacher --steps 2
refused '--live has none' distil $given --text "$work/text.txt" --live --draws 2
refused '--vocabulary and --tokenizer are of --layers' distil $given --text "$work/text.txt" --vocabulary 600
refused 'takes a number from 257 to 65536, not "100"' tokenize train --text "$work/text.txt" --out "$work/bad" --entries 100
refused 'takes ascii, gpt2, smollm or llama3, not "words"' tokenize train --text "$work/text.txt" --out "$work/bad" --pieces words
refused 'there is no learn' tokenize learn
refused 'cannot open the tokenizer' tokenize encode --tokenizer "$work/nothing" --text "$work/text.txt"
refused '--teacher is needed' pair --student "$work/s.json"
refused 'has no file NAME.xdcache' cache inspect --cache "$work/gguf"
mkdir "$work/full" && : >"$work/full/letter.txt"
refused 'holds other files, such as letter.txt' distil --teacher data/teacher --text "$work/text.txt" --out "$work/full"
refused 'is neither a GGUF file nor a directory' distil --teacher "$work/text.txt" --text "$work/text.txt" --out "$work/bad"
refused 'is no tokenizer.json' distil $given --text "$work/text.txt" --layers 1 --tokenizer "$work/text.txt"
refused "its student is $work/run/student" eval --model "$work/run" --text "$work/text.txt"
refused 'there is no option --stepz' distil $given --text "$work/text.txt" --stepz 5
refused '--text is needed' distil $given
refused 'there is no command destil' destil
mkdir "$work/gemma" "$work/lfs" "$work/small"
cp data/teacher/*.json "$work/gemma" && sed 's/"model_type": "llama"/"model_type": "gemma3"/' data/teacher/config.json >"$work/gemma/config.json"
refused 'a model of type "gemma3": llama, qwen2 and qwen3 are known' eval --model "$work/gemma" --text "$work/text.txt"
cp data/teacher/*.json "$work/lfs" && printf 'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n' >"$work/lfs/model.safetensors"
refused 'Git LFS' eval --model "$work/lfs" --text "$work/text.txt"
cp data/teacher/* "$work/small" && sed 's/"vocab_size": 2048/"vocab_size": 1024/' data/teacher/config.json >"$work/small/config.json"
refused 'the tokenizer has 2048 tokens, the embedding 1024 rows' eval --model "$work/small" --text "$work/text.txt"
[ ! -e "$work/bad" ]
verdict $? 'nothing is left of what was refused'
for command in distil eval generate 'tokenize train' 'tokenize encode' pair 'cache write' 'cache inspect' bench; do
    $tool $command --help >"$work/help" && grep -q '^example:' "$work/help" && awk 'length($0) > 80 { exit 1 }' "$work/help"
    verdict $? "$command --help ends with an example and fits 80 columns" "$work/help"
done
conclude
