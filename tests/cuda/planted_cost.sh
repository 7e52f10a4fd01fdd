#!/bin/sh
# Plants faults in the budgets and the counts of operations, and shows that tools/gpu_cost.py finds each. Run `make cuda-cost` first.
#
#   sh tests/cuda/planted_cost.sh [FOLDER OF report, operations AND unit.log]      default: build/cuda/ptx
folder=${1:-build/cuda/ptx}
planted=$folder/planted missed=0

judge() { python3 tools/gpu_cost.py "$1" "$folder/operations" "$folder/unit.log" "$2" >"$planted.log" 2>&1; }

# The named file with a line changed by sed must be refused, in these words.
plant() {
    title=$1 file=$2 says=$3
    shift 3
    sed -E "$@" "$file" >"$planted"
    report=$folder/report budget=bench/gpu_budget.txt
    if [ "$file" = "$budget" ]; then budget=$planted; else report=$planted; fi
    if cmp -s "$file" "$planted"; then
        echo "$title: nothing to change"
        missed=$((missed + 1))
    elif judge "$report" "$budget" || ! grep -q "$says" "$planted.log"; then
        echo "$title: not found"
        missed=$((missed + 1))
    else
        echo "$title: $(grep "$says" "$planted.log")"
    fi
    rm -f "$planted" "$planted.log"
}

judge "$folder/report" bench/gpu_budget.txt || { echo "over budget without a fault"; exit 1; }
plant "a budget is lowered" bench/gpu_budget.txt '^ce bf16 issues .* its budget is 2$' 's/^(ce +bf16 +[0-9]+ +)[0-9.]+/\12/'
plant "more bytes on their way are asked for" bench/gpu_budget.txt '^kl bf16 has .* it needs 250$' 's/^(kl +bf16 .* )25$/\1250/'
plant "an operation has no budget" bench/gpu_budget.txt '^norm f32 is not in' '/^norm +f32/d'
plant "a kernel issues more integers" "$folder/report" '^ce bf16 issues' \
    's/^(ce bf16\t[^\t]*loss[^\t]*\t([^\t]*\t){19})([0-9]+)/\19\3/'
# Without the rule for rows of a chunk the head is slower than its budget.
planted=$folder/head.py
sed -E 's/^(    return most), min.*/    return 256, 256/' tools/gpu_head.py >"$planted"
cmp -s "$planted" tools/gpu_head.py && { echo "head: nothing planted"; missed=$((missed + 1)); }
PYTHONPATH=tools python3 "$planted" "$PWD/src/loss/head.c" >"$planted.log" && { echo "missed: chunks of 256 rows"; missed=$((missed + 1)); }
rm -f "$planted"
# The model's constants are those that its fit gives, and its errors are no larger than they were.
for script in "gpu_model.py" "gpu_head.py" "gpu_cost.py --check"; do
    python3 tools/$script >"$planted.log" || { cat "$planted.log"; missed=$((missed + 1)); }
    grep "mean\|head_ce" "$planted.log"
done
rm -f "$planted.log"
[ $missed -eq 0 ]
