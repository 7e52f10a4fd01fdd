#!/bin/sh
# The demonstration with the processes of an MPI job as ranks: on each mesh they have the bits of threads, and go
# on from each other's states. The last line is `N passed, N failed, N skipped`.
#
#   sh tests/demo/test_demo_mpi.sh [INCLUDE]     from the root; INCLUDE is the folder of xdistill.h (.)
set -u
include=${1:-.}
. tests/demo/common.sh
options="--steps 4 --heldout-bytes 1000"
# What Open MPI wants to hear before it starts more processes than cores, or for root.
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

# threads NAME OPTION..., processes N NAME OPTION...: a run into the folder NAME
threads() {
    name=$1
    shift
    "$work/threads" $options --out "$work/$name" "$@" >"$work/$name.log" 2>&1
}
processes() {
    count=$1 name=$2
    shift 2
    mpirun -n "$count" "$work/processes" $options --out "$work/$name" "$@" >"$work/$name.log" 2>&1 </dev/null
}

# same A B: the same metrics but for the time they took, and the same student
same() {
    for run in "$1" "$2"; do
        sed 's/"wall": [^,]*, //; s/, "tokens_per_second": [^}]*//' "$work/$run/metrics.jsonl" >"$work/$run.losses"
    done
    [ "$(wc -l <"$work/$1.losses")" -ge 8 ] && cmp -s "$work/$1.losses" "$work/$2.losses" &&
    cmp -s "$work/$1/student/model.safetensors" "$work/$2/student/model.safetensors"
}

small="-DDEMO_ROW=32 -DDEMO_BATCH=8"
{
    demo_sources "$include" && ${CC:-cc} $small $sources -o "$work/threads" &&
    mpicc -DDEMO_MPI $small $sources -o "$work/processes"
} >"$work/build.log" 2>&1
verdict $? 'the demo builds for threads and for processes' "$work/build.log"
for mesh in 2:dp=2 2:tp=2 2:cp=2 4:dp=2,tp=2 4:cp=2,tp=2; do
    axes=${mesh#*:}
    threads $axes --mesh $axes && processes ${mesh%%:*} p-$axes --mesh $axes && same $axes p-$axes
    verdict $? "$axes has the same bits on processes" "$work/p-$axes.log"
done
threads one --mesh dp=1 --reduction invariant && processes 4 dp=4 --reduction invariant && same one dp=4
verdict $? 'four processes have the bits of one rank in INVARIANT mode' "$work/dp=4.log"
grep -q '"ranks_are": "processes"' "$work/dp=4/run.json" && grep -q '"ranks": 4' "$work/dp=4/run.json"
verdict $? 'run.json says that ranks were processes' "$work/dp=4.log"

# Threads are killed on the way; processes take it from there.
"$work/threads" $options --steps 40 --out "$work/begun" --mesh tp=2 --save-every 2 >"$work/begun.log" 2>&1 &
child=$!
appears "$work/begun/resume/1.safetensors"
end $child
threads whole --mesh tp=2 --steps 40 && processes 2 begun --steps 40 --mesh tp=2 --save-every 2 --resume &&
same whole begun
verdict $? 'processes go on from the state of threads with the same bits' "$work/begun.log"

# What fails in one process or in all ends the job, and is said.
for bad in '--data nowhere:nowhere' '--mesh tp=4:as many ranks as there are processes'; do
    processes 2 bad ${bad%%:*}
    [ $? -ne 0 ] && grep -q "demo: .*${bad#*:}" "$work/bad.log"
    verdict $? "${bad%%:*} is an error" "$work/bad.log"
done
mkdir "$work/full" && ln -s /dev/full "$work/full/metrics.jsonl"
processes 2 full --save-every 1
[ $? -ne 0 ] && grep -q 'demo: .*cannot write .*metrics.jsonl' "$work/full.log"
verdict $? 'a file that one process cannot write is an error' "$work/full.log"
conclude
