#!/bin/sh
# The demonstration with points in the plane: students learn what they should within seconds, table and figure have the same bytes on
# any number of ranks, and what is wrong is refused. The last line is `N passed, N failed, N skipped`.
#
#   sh tests/demo/test_demo_toys.sh     from the root
#
# It measures on 1000 points instead of 10,000.
set -u
. tests/demo/common.sh

# start NAME OPTION...: a run into the folder NAME, quietly
start() {
    name=$1
    shift
    "$work/toys" --out "$work/$name" "$@" >"$work/$name.log" 2>&1
}

# refused WORDS OPTION...: nothing runs, and it says WORDS
refused() {
    words=$1
    shift
    start refused "$@" && return 1
    grep -q -e "$words" "$work/refused.log" || { cat "$work/refused.log"; return 1; }
}

program toys -DTOY_POINTS=1000 "$toys"
verdict $? 'it builds' "$work/build.log"

# curve FILE: the heights of its four rungs in its first panel, of which the frame's top is 0 and the teacher's own value 110
curve() {
    sed -n '/fake_score</,/^<\/g>/s/^<path fill="none".* d="\(.*\)".*/\1/p' "$1"
}

# Half the distance of the teacher's four steps in one.
start moons --toy moons --teacher-steps 500 --steps 100 && awk '
    /^moons  *teacher, 4 steps/ { teacher = $5 } /^moons  *student, 1 step/ { student = $5 }
    END { print student, "of", teacher; exit !(student > 0 && teacher > 0 && student < 0.6 * teacher) }' "$work/moons/table.txt"
verdict $? 'a student of one step is nearer to the moons than the teacher in four' "$work/moons.log"

[ "$(curve "$work/moons/curves-moons.svg" | wc -l)" -eq 4 ] && grep -q 'rate 0.0003, fake score.s 0.002, 1 step in 5' "$work/moons/curves-moons.svg"
verdict $? 'curves have four rungs, and the rates they are of' "$work/moons/curves-moons.svg"
start wild --toy moons --teacher-steps 500 --steps 100 --rate 0.1 && curve "$work/wild/curves-moons.svg" | grep -q ' 0\.0\(L\|$\)' &&
! curve "$work/moons/curves-moons.svg" | grep -q ' 0\.0\(L\|$\)'
verdict $? 'a student that steps too far leaves the frame, and another does not' "$work/wild.log"
start one --ranks 1 --teacher-steps 20 --steps 3 && start two --ranks 2 --teacher-steps 20 --steps 3 &&
start three --ranks 3 --teacher-steps 20 --steps 3 && start other --seed 2 --teacher-steps 20 --steps 3
verdict $? 'short runs on 1, 2 and 3 ranks' "$work/three.log"
for file in table.txt toys.svg curves-moons.svg curves-gaussians.svg; do
    cmp "$work/one/$file" "$work/two/$file" && cmp "$work/one/$file" "$work/three/$file" &&
    ! cmp -s "$work/one/$file" "$work/other/$file"
    verdict $? "$file has the same bytes on 1, 2 and 3 ranks, and others with another seed"
done
[ "$(grep -c '^moons ' "$work/one/table.txt")" -eq 4 ] && [ "$(grep -c '^gaussians ' "$work/one/table.txt")" -eq 4 ] &&
! grep -qi 'nan\|inf' "$work/one/table.txt" && [ "$(grep -c '<path' "$work/one/toys.svg")" -eq 10 ] &&
[ "$(grep -c ': data</text>' "$work/one/toys.svg")" -eq 2 ]
verdict $? 'table and figure have four samplers of two toys, and the figure the data' "$work/one/table.txt"
grep -q "$(tail -n 1 "$work/one/table.txt")" "$work/one.log"
verdict $? 'the table is printed too' "$work/one.log"

for bad in '--steps 0:--steps takes a number from 1 to 1000000, not "0"' '--ranks 9:--ranks takes a number from 1 to 8' \
    '--turn 1:--turn takes a number from 2 to 100' '--fake-rate 2:--fake-rate takes a number from 1e-07 to 1' \
    '--toy spiral:--toy takes moons, gaussians or all' '--epochs 3:no option --epochs'; do
    refused "${bad#*:}" ${bad%%:*}
    verdict $? "${bad%%:*} is answered with what would be right"
done
: >"$work/file"
"$work/toys" --out "$work/file/below" >"$work/refused.log" 2>&1 && echo "it ran" >"$work/refused.log"
grep -q "cannot make the directory $work/file" "$work/refused.log"
verdict $? 'a folder that cannot be made is named' "$work/refused.log"
"$work/toys" --help >"$work/help.log"
for option in toy steps teacher-steps rate fake-rate turn ranks seed out help; do
    grep -q "^  --$option " "$work/help.log" || echo "no --$option"
done >"$work/missing"
[ ! -s "$work/missing" ]
verdict $? '--help lists the options' "$work/missing"
conclude
