#!/bin/sh
# The demonstration over several meshes, four steps each: in INVARIANT mode dp meshes have the bits of one
# rank, in the default mode tp and cp meshes its losses within 1e-3. The last line is `N passed, N failed,
# N skipped`.
#
#   sh tests/demo/test_demo.sh [INCLUDE]     from the root; INCLUDE is the folder of xdistill.h (.)
set -u
include=${1:-.}
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
passed=0 failed=0

# run NAME OPTION...: leaves "step loss kd ce norm" lines in $work/NAME.losses
run() {
    name=$1
    shift
    "$work/demo" --steps 4 --heldout-bytes 2000 --out "$work/$name" "$@" >"$work/$name.log" 2>&1 || return 1
    sed 's/.*"step": \([0-9]*\).*"loss": \([^,]*\), "kd": \([^,]*\), "ce": \([^,]*\), "gradient_norm": \([^,]*\),.*/\1 \2 \3 \4 \5/' \
        "$work/$name/metrics.jsonl" >"$work/$name.losses"
    [ "$(wc -l <"$work/$name.losses")" -eq 8 ]
}

# close A B: every loss of the two runs within 1e-3
close() {
    paste -d ' ' "$work/$1.losses" "$work/$2.losses" | awk '
        { for (i = 2; i <= 4; i++) { d = $i - $(i + 5); if (d > 1e-3 || d < -1e-3) bad = 1 } }
        END { exit bad || NR != 8 }'
}

# verdict STATUS WHAT
verdict() {
    if [ "$1" -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "failed: $2"
    fi
}

${CC:-cc} -std=c99 -O2 -I"$include" examples/demo/*.c examples/nn/*.c -o "$work/demo" -lm -lpthread
verdict $? 'the demo builds'
run one --mesh dp=1 --reduction invariant
verdict $? 'one rank runs'
for dp in 2 3; do
    run dp$dp --mesh dp=$dp --reduction invariant && cmp -s "$work/one.losses" "$work/dp$dp.losses"
    verdict $? "dp=$dp has the bits of one rank in INVARIANT mode"
done
for axis in tp cp; do
    run $axis --mesh $axis=2 && close one $axis
    verdict $? "$axis=2 has the losses of one rank within 1e-3"
done

# Killed once the second arm has saved, and gone on: the same lines as without.
"$work/demo" --steps 4 --heldout-bytes 2000 --out "$work/resumed" --reduction invariant --save-every 2 \
    >/dev/null 2>&1 &
child=$! waited=0
while [ ! -f "$work/resumed/resume/1-1.safetensors" ] && [ $waited -lt 30 ]; do
    sleep 1
    waited=$((waited + 1))
done
kill -9 $child 2>/dev/null
wait $child 2>/dev/null
run resumed --reduction invariant --save-every 2 --resume && cmp -s "$work/one.losses" "$work/resumed.losses"
verdict $? 'a resumed run has the bits of an uninterrupted one, no step twice'

run refused --mesh tp=2 --reduction invariant
[ $? -ne 0 ] && grep -q 'dp meshes only' "$work/refused.log"
verdict $? 'INVARIANT mode on a tp mesh is refused'
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
