#!/bin/sh
# What a cache of draws costs against the running teacher, and what one of the likeliest tokens and a tail does: `make demo-cache`,
# from the root. Students of .66 M weights with data/teacher's tokenizer, pure distillation, 240 steps of 16 rows.
#
#   SEEDS=n    from how many seeds (1); some two minutes each on two quiet cores
#   OUT=dir    where runs go (out/cache); a run that is there is not done again
set -u
out=${OUT:-out/cache}
seeds=${SEEDS:-1}
tool=build/xdistill
mkdir -p "$out" || exit 1

# arm NAME SEED OPTION...: a run into $out/NAME-SEED, with draws of its own
arm() {
    name=$1 seed=$2
    shift 2
    run=$out/$name-$seed
    [ -s "$run/result.json" ] && return
    echo "$name, seed $seed"
    $tool distil --teacher data/teacher --text data/kjv_student.txt --out "$run" --layers 2 --hidden 128 --heads 4 --batch 16 \
        --steps 240 --seed "$seed" --no-alone --whole "$@" || exit 1
}

# number FILE KEY: the first value of that key
number() { sed -n "s/^ *\"$2\": \([-0-9.e]*\),*$/\1/p" "$1" | head -n 1; }

seed=1
while [ "$seed" -le "$seeds" ]; do
    arm live "$seed" --live
    arm draws-6-6 "$seed" --likeliest 6 --draws 6
    arm draws-1-11 "$seed" --likeliest 1 --draws 11
    arm likeliest-10 "$seed" --likeliest 10 --draws 0
    seed=$((seed + 1))
done

printf '\n%-14s %12s %10s %10s\n' cache "bytes" "best" "behind"
for name in live draws-6-6 draws-1-11 likeliest-10; do
    seed=1
    while [ "$seed" -le "$seeds" ]; do
        run=$out/$name-$seed/result.json live=$out/live-$seed/result.json
        best=$(sed -n '/"student": {/,$p' "$run" | sed -n 's/^ *"best": \([0-9.]*\),$/\1/p' | head -n 1)
        from=$(sed -n '/"student": {/,$p' "$live" | sed -n 's/^ *"best": \([0-9.]*\),$/\1/p' | head -n 1)
        echo "$name $(number "$run" cache_bytes) $best $from"
        seed=$((seed + 1))
    done
done | awk '
    !($1 in count) { order[++arms] = $1 }
    { count[$1]++; bytes[$1] = $2; sum[$1] += $3; behind[$1] += $3 - $4 }
    END { for (i = 1; i <= arms; i++) { a = order[i]
          printf "%-14s %12d %10.4f %10.4f\n", a, bytes[a], sum[a] / count[a], behind[a] / count[a] } }'
