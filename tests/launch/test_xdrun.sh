#!/bin/sh
# build/xdrun: what ranks find, what comes out, how a job ends, and what is refused; some seconds. The last line is `N passed, N failed,
# N skipped`.
#
#   sh tests/launch/test_xdrun.sh [XDRUN]     from the root (build/xdrun)
set -u
xdrun=${1:-build/xdrun}
. tests/demo/common.sh

# job OPTION...: runs it; what it wrote is in $work/out and $work/err, its status in $status
job() {
    "$xdrun" "$@" >"$work/out" 2>"$work/err"
    status=$?
}

# said STATUS WORDS: the job ended with this status and wrote this line, a regular expression, of xdrun's own
said() {
    [ "$status" -eq "$1" ] && grep -qx -- "xdrun: $2" "$work/err" && return
    echo "status $status, not $1, or no line \"$2\":"
    cat "$work/err"
    return 1
}

# gone FILE: no process lives whose number is a line of FILE; waits three seconds at most
gone() {
    [ -s "$1" ] || return 1
    for turn in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do
        left=
        for process in $(cat "$1"); do
            # One that nobody has fetched yet is dead all the same.
            kill -0 "$process" 2>/dev/null && ! grep -q '^State:.Z' "/proc/$process/status" 2>/dev/null && left="$left $process"
        done
        [ -n "$left" ] || return 0
        sleep 0.2
    done
    echo "still there:$left"
    return 1
}

# lines FILE N: waits until it has N lines, five seconds at most
lines() {
    for turn in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25; do
        [ -f "$1" ] && [ "$(wc -l <"$1")" -ge "$2" ] && return 0
        sleep 0.2
    done
    return 1
}

# ---- what ranks find ----

job -n 3 sh -c 'echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $XDISTILL_JOB"; read -r x || echo "nothing to read"'
sort "$work/out" | awk '/nothing to read/ { empty++; next }
    { if ($1 != "[" n++ "]" || $2 != n - 1 || $3 != 3 || $4 != n - 1 || $5 != 3 || $6 != "127.0.0.1" || $7 < 1 || (port && ($7 != port || $8 != job))) bad++; port = $7; job = $8 }
    END { exit n != 3 || empty != 3 || bad > 0 || job !~ /^xdrun-[0-9a-f]+$/ }' && [ "$status" -eq 0 ]
verdict $? 'each rank finds its number, and all the same job' "$work/out"
first=$(sed -n 's/^\[0\].* //p' "$work/out" | grep xdrun-)
job -n 1 sh -c 'echo "$XDISTILL_JOB"'
[ -n "$first" ] && ! grep -q "$first" "$work/out"
verdict $? 'the next job has another name' "$work/out"

if [ -w /dev/shm ]; then
    job -n 1 sh -c 'echo "$XDISTILL_JOB"; : >"/dev/shm/xdistill-job-$XDISTILL_JOB"'
    [ "$status" -eq 0 ] && [ ! -e "/dev/shm/xdistill-job-$(sed 's/^\[0\] //' "$work/out")" ]
    verdict $? 'what ranks have left where they meet is gone with the job' "$work/out"
fi

# ---- what comes out ----

job -n 4 sh -c 'i=0; while [ $i -lt 300 ]; do printf "%s" "$i "; printf "%s" "a$RANK a$RANK"; echo " $RANK"; echo "e$RANK" >&2; i=$((i + 1)); done'
awk '$1 != "[" $5 "]" || $3 != "a" $5 || $4 != $3 || $2 != n[$5]++ || NF != 5 { bad++ } END { exit NR != 1200 || bad > 0 }' "$work/out" &&
[ "$(sort "$work/err" | uniq -c | awk '{ print $1, $2, $3 }' | tr '\n' ' ')" = '300 [0] e0 300 [1] e1 300 [2] e2 300 [3] e3 ' ]
verdict $? 'lines of ranks are whole, in their order, behind the number, and errors stay errors' "$work/out"
job -n 2 awk 'BEGIN { for (i = 0; i < 300000; i++) printf "x"; printf "\nend" }'
[ "$(awk '{ print $1, length($2) }' "$work/out" | sort | tr '\n' ' ')" = '[0] 3 [0] 300000 [1] 3 [1] 300000 ' ]
verdict $? 'a long line is one line, and the last one gets its end'
"$xdrun" -n 2 sh -c 'echo $$ >>'"$work/heads"'; while :; do echo y; done' 2>"$work/err" | head -n 3 >"$work/out"
[ "$(wc -l <"$work/out")" -eq 3 ] && grep -q '^xdrun: what ranks write cannot be passed on: Broken pipe$' "$work/err" && gone "$work/heads"
verdict $? 'a job whose reader has left ends' "$work/err"
# dd makes the pipe one that does not wait, for all that write into it
{ dd count=0 oflag=nonblock </dev/null 2>/dev/null; "$xdrun" -n 2 seq 40000 2>"$work/err"; echo "$?" >"$work/slow"; } | { sleep 0.2; wc -l >"$work/out"; }
[ "$(cat "$work/slow")" -eq 0 ] && [ "$(tr -d ' ' <"$work/out")" -eq 80000 ]
verdict $? 'a slow reader of a pipe that does not wait gets every line' "$work/err"
# a reader that reads nothing: xdrun waits for it, and hears signals all the same
{ "$xdrun" -n 1 sh -c 'trap "echo $$ >>'"$work/heard"'" TERM; echo $$ >>'"$work/stuck"'; yes & wait; while :; do sleep 0.1; done' 2>"$work/err" & echo $! >"$work/xdrun"; wait; } | { lines "$work/stuck" 1; sleep 0.3
    kill -TERM "$(cat "$work/xdrun")"; lines "$work/heard" 1 && kill -TERM "$(cat "$work/xdrun")"; gone "$work/stuck" && gone "$work/xdrun" && echo ended >"$work/out"; }
grep -q ended "$work/out" && grep -q '^xdrun: a second signal, 15 (Terminated): killing 1 ranks$' "$work/err"
verdict $? 'signals are heard while a reader reads nothing' "$work/err"

# ---- how a job ends ----

job -n 3 sh -c 'echo $$ >>'"$work/status"'; [ $RANK = 1 ] && sleep 0.2 && exit 7; sleep 30; exit 0'
said 7 'rank 1 (process [0-9]*) ended with status 7; stopping the other 2' && [ "$(wc -l <"$work/err")" -eq 1 ] && gone "$work/status"
verdict $? 'the first failure is named and ends the others'
job -n 3 sh -c '[ $RANK = 2 ] && kill -9 $$; sleep 30'
said 137 'rank 2 (process [0-9]*) was ended by signal 9 (Killed); stopping the other [0-2]'
verdict $? 'a signal is named'
job -n 3 --keep-going sh -c '[ $RANK = 1 ] && kill -9 $$; sleep 0.3; echo on'
said 0 'rank 1 (process [0-9]*) was ended by signal 9 (Killed); the other 2 go on' && [ "$(sort "$work/out" | tr '\n' ' ')" = '[0] on [2] on ' ]
verdict $? 'with --keep-going one that is killed is named, and the others go on'
job -n 3 --keep-going sh -c '[ $RANK = 1 ] && kill -9 $$; sleep 0.2; [ $RANK = 2 ] && exit 4; sleep 30'
said 4 'rank 2 (process [0-9]*) ended with status 4; stopping the other 1'
verdict $? 'but one that fails ends them'
job -n 2 --keep-going sh -c 'sleep 0.$RANK; kill -9 $$'
said 137 'rank 1 (process [0-9]*) was ended by signal 9 (Killed); nobody is left'
verdict $? 'and when nobody is left the status says so'
job -n 2 --restart 2 sh -c 'echo $XDISTILL_JOB; touch '"$work/start"'$XDRUN_RESTARTS; [ $RANK = 1 ] || exit 0; [ -e '"$work/again"' ] || { touch '"$work/again"'; kill -9 $$; }'
said 0 'starting the job again, 1 of 2 times' && [ "$(sed 's/^.....//' "$work/out" | sort -u | wc -l)" -eq 2 ]
verdict $? 'with --restart a job that has failed is started again, under another name'
[ -e "$work/start0" ] && [ -e "$work/start1" ] && [ ! -e "$work/start2" ]
verdict $? 'and told how often it was started before'
job -n 1 --restart 2 sh -c 'echo on; exit 6'
said 6 'starting the job again, 2 of 2 times' && [ "$(wc -l <"$work/out")" -eq 3 ]
verdict $? 'so many times, and the last status is that of the job'
job -n 1 --restart 2 "$work/nowhere"
said 127 '.*/nowhere: No such file or directory' && [ "$(wc -l <"$work/err")" -eq 1 ]
verdict $? 'a program that is not there is looked for once'
job -n 2 --grace 0.3 sh -c 'trap "" TERM; echo $$ >>'"$work/deaf"'; [ $RANK = 0 ] && sleep 0.2 && exit 1; while :; do sleep 0.1; done'
said 1 '1 rank did not end within 0.3 s: killed' && gone "$work/deaf"
verdict $? 'one that ignores SIGTERM is killed'
job -n 3 --early 0.3 sh -c 'echo $$ >>'"$work/early"'; [ $RANK = 1 ] && exit 0; sleep 30'
said 1 'rank 1 ended with status 0, and 2 still run 0.3 s later: stopping them' && gone "$work/early"
verdict $? 'one that ends early with 0 is named'
job -n 2 sh -c '[ $RANK = 1 ] && exit 0; sleep 0.4; exit 5'
said 5 'rank 0 (process [0-9]*) ended with status 5; rank 1 had ended with status 0, 0.[0-9] s before'
verdict $? 'so is it when another fails later'
job -n 2 sh -c 'sleep 40 & echo $! >>'"$work/children"'; exit 0'
[ "$status" -eq 0 ] && gone "$work/children"
verdict $? 'what a rank leaves behind ends with it' "$work/err"

"$xdrun" -n 2 sh -c 'trap "echo saved; exit 0" TERM; echo ready; while :; do sleep 0.1; done' >"$work/term" 2>"$work/err" &
lines "$work/term" 2 && kill -TERM $! && wait $! && [ "$(sort "$work/term" | tr '\n' ' ')" = '[0] ready [0] saved [1] ready [1] saved ' ]
verdict $? 'SIGTERM is passed on' "$work/err"
"$xdrun" -n 2 sh -c 'echo ready; exec sleep 30' >"$work/int" 2>"$work/err" &
lines "$work/int" 2 && kill -INT $!
wait $!
status=$?
said 130 'rank [01] (process [0-9]*) was ended by signal 2 (Interrupt), which was passed on\(; stopping the other 1\)\?'
verdict $? 'SIGINT is passed on'
"$xdrun" -n 2 --grace 30 sh -c 'trap "" INT TERM; echo ready; while :; do sleep 0.1; done' >"$work/twice" 2>"$work/err" &
lines "$work/twice" 2 && kill -TERM $! && sleep 0.3 && kill -TERM $!
wait $!
status=$?
said 143 'a second signal, 15 (Terminated): killing 2 ranks'
verdict $? 'a second one kills'
"$xdrun" -n 3 --grace 0.4 sh -c '[ $RANK = 0 ] && trap "" TERM INT; echo $$ >>'"$work/late"'; [ $RANK = 1 ] && kill -STOP $$; [ $RANK = 2 ] && exec sleep 40; while :; do sleep 0.1; done' >"$work/out" 2>"$work/err" &
lines "$work/late" 3 && sleep 0.3 && kill -TERM $!
wait $!
status=$?
said 143 '2 ranks did not end within 0.4 s: killed' && gone "$work/late"
verdict $? 'a rank that is deaf and one that is stopped are killed when the grace after SIGTERM is over'
job -n 2 --grace 0.4 sh -c 'echo $$ >>'"$work/still"'; [ $RANK = 1 ] && { sleep 0.3; exit 3; }; kill -STOP $$'
said 3 '1 rank did not end within 0.4 s: killed' && gone "$work/still"
verdict $? 'so is one that is stopped when another has failed'
# a reader that reads nothing, and a rank that is deaf: the grace ends both waits
{ "$xdrun" -n 1 --grace 0.4 sh -c 'trap "" TERM; echo $$ >>'"$work/full"'; yes' 2>"$work/err" & echo $! >"$work/xdrun"; wait; } | { lines "$work/full" 1; sleep 0.3
    kill -TERM "$(cat "$work/xdrun")"; gone "$work/full" && gone "$work/xdrun" && echo ended >"$work/out"; }
grep -q ended "$work/out" && grep -q '^xdrun: 1 rank did not end within 0.4 s: killed$' "$work/err"
verdict $? 'also while a reader reads nothing' "$work/err"
"$xdrun" -n 3 sh -c 'sleep 40 & echo $! >>'"$work/orphans"'; echo $$ >>'"$work/orphans"'; wait' >"$work/out" 2>"$work/err" &
lines "$work/orphans" 6 && kill -KILL $! && gone "$work/orphans"
verdict $? 'nothing outlives an xdrun that is killed' "$work/err"
wait 2>/dev/null

# ---- ranks that meet ----

{ make --no-print-directory build/examples/21_launch && cp build/examples/21_launch "$work/launch"; } >"$work/build.log" 2>&1
verdict $? 'the example builds' "$work/build.log"
job -n 4 "$work/launch"
[ "$status" -eq 0 ] && [ "$(sort "$work/out" | tr '\n' '/')" = "$(for r in 0 1 2 3; do printf '[%d] rank %d of 4: 5 sums of 1000 elements, 0 wrong/' $r $r; done)" ]
verdict $? 'processes find their ranks and add up' "$work/err"
job -n 4 "$work/launch" --leave 2
said 3 'rank 2 (process [0-9]*) ended with status 3; stopping the other [0-3]'
verdict $? 'one that leaves in the middle is named'
"$work/launch" >"$work/out" 2>&1 && grep -qx 'rank 0 of 1: 5 sums of 1000 elements, 0 wrong' "$work/out"
verdict $? 'alone it is one rank' "$work/out"
RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 "$work/launch" >"$work/out" 2>&1
[ $? -eq 1 ] && grep -q 'RANK is set to "1", but LOCAL_WORLD_SIZE is not set' "$work/out"
verdict $? 'a variable that is missing is named' "$work/out"
if command -v mpirun >/dev/null 2>&1; then
    mpirun --oversubscribe --allow-run-as-root -n 3 "$work/launch" >"$work/out" 2>"$work/err" </dev/null
    [ "$(sort "$work/out" | tr '\n' '/')" = "$(for r in 0 1 2; do printf 'rank %d of 3: 5 sums of 1000 elements, 0 wrong/' $r; done)" ]
    verdict $? 'so do those of mpirun, without MPI' "$work/err"
fi

# ---- cores ----

if [ -r /proc/self/status ]; then
    job -n 2 --bind sh -c 'grep Cpus_allowed_list /proc/self/status'
    cores=$(nproc)
    awk '{ print $3 }' "$work/out" | sort -u >"$work/lists"
    [ "$status" -eq 0 ] && { [ "$cores" -lt 2 ] || [ "$(wc -l <"$work/lists")" -eq 2 ]; }
    verdict $? 'with --bind ranks have cores of their own' "$work/out"
    job -n $((cores + 1)) --bind sh -c 'nproc'
    [ "$status" -eq 0 ] && [ "$(awk '{ print $2 }' "$work/out" | sort -u)" = 1 ]
    verdict $? 'and one each when there are fewer' "$work/out"
fi

# ---- what is refused ----

job -n 4 "$work/nowhere"
said 127 "$work/nowhere: No such file or directory"
verdict $? 'a program that is not there'
echo text >"$work/plain"
job -n 4 "$work/plain"
said 126 "$work/plain: Permission denied"
verdict $? 'a file that is no program'
for bad in '-n 0 true:-n takes a number from 1 to 1024, not "0"' '-n 1025 true:-n takes a number from 1 to 1024, not "1025"' \
    '-n x true:-n takes a number from 1 to 1024, not "x"' '-n:-n takes a number from 1 to 1024, not ""' \
    '-n 2:there is no program behind the options' 'true:-n N, the number of ranks, is missing; --help lists the options' \
    '-n 2 --hosts x:no option --hosts; --help lists them' '-n 2 --grace -1 true:--grace takes seconds, not "-1"'; do
    job ${bad%%:*}
    said 2 "${bad#*:}"
    verdict $? "${bad%%:*} is answered with what would be right"
done
(ulimit -n 40 && job -n 64 true && said 1 '64 ranks need 144 open files, the limit is 40: fewer ranks, or ulimit -n')
verdict $? 'more ranks than may be started'
job -n 2 -- sh -c 'exit 0'
[ "$status" -eq 0 ] && "$xdrun" --help | grep -q '^  -n N '
verdict $? '-- ends the options, and --help lists them'
conclude
