#!/bin/sh
# The demonstrations with the processes of an MPI job as ranks: on each mesh they have the bits of threads, and go
# on from each other's states; so have those of sharded training, killed and resumed, and of images. The last line is `N passed, N failed, N skipped`.
#
#   sh tests/demo/test_demo_mpi.sh     from the root
set -u
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

program threads "$small" "$demo" && program processes "$small" "$demo" DEMO_MPI
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

# Sharded training: killed and resumed processes have the bits of one, and those of threads.
program sharded "$small" "$sharded" && program sharded-mpi "$small" "$sharded" SHARDED_MPI
verdict $? 'sharded training builds for threads and for processes' "$work/build.log"
"$work/sharded" --steps 6 --heldout-bytes 1000 --wrap ddp --out "$work/st" >"$work/st.log" 2>&1
for how in '--wrap fsdp' '--wrap hsdp' '--wrap sharded --mesh dp=2,tp=2'; do
    "$work/sharded-mpi" --mpi --steps 6 --heldout-bytes 1000 $how --overwrite --out "$work/sp" >"$work/sp.log" 2>&1 &&
    [ "$(grep -c ' bit-equal$' "$work/sp.log")" -eq 4 ] && ! grep -q DIFFER "$work/sp.log" &&
    grep -q 'killed by SIGKILL after step [45]$' "$work/sp.log" && [ ! -e "$work/sp/news" ]
    verdict $? "$how: processes that were killed and went on have the bits of one" "$work/sp.log"
    case $how in *tp*) continue ;; esac # whose sums are of pieces
    cmp "$work/st/student/model.safetensors" "$work/sp/student/model.safetensors" >"$work/sp.log"
    verdict $? "$how: the student of processes is that of threads" "$work/sp.log"
done
"$work/sharded-mpi" --mpi --restart 1 --mesh dp=2 --steps 4 --heldout-bytes 1000 --seed 3 --overwrite --out "$work/sp" >"$work/sp.log" 2>&1 &&
[ "$(grep -c ' bit-equal$' "$work/sp.log")" -eq 4 ] &&
awk '/^2 ranks, fsdp: rank [01] killed by SIGKILL after step [0-3]; .* those started again \(dp=1,tp=1, fsdp\)/ { lost++; late += $12 <= 0 || $12 >= 30 } END { exit lost != 1 || late > 0 }' "$work/sp.log"
verdict $? 'a job that is killed and started again on one rank fewer has the bits of one' "$work/sp.log"
"$work/sharded-mpi" --mpi --restart 4 --out "$work/sn" >"$work/sp.log" 2>&1
[ $? -eq 2 ] && grep -q 'restart 4 of 4 ranks under MPI: nobody is left' "$work/sp.log"
verdict $? 'one of which nobody would be left is refused' "$work/sp.log"
"$work/sharded-mpi" --mpi --steps 6 --data nowhere --out "$work/sn" >"$work/sp.log" 2>&1
[ $? -eq 1 ] && grep -q 'nowhere has no heldout.txt' "$work/sp.log"
verdict $? 'data that are not there are named' "$work/sp.log"

# Images.
short="--warm-up 1 --steps 1 --one-steps 1 --count 100 --generations 1"
program images -DIMAGES_LEAD=1 "$images" && program images-mpi -DIMAGES_LEAD=1 "$images" IMAGES_MPI
verdict $? 'image distillation builds for threads and for processes' "$work/build.log"
"$work/images" $short --mesh dp=1 --out "$work/it" >"$work/it.log" 2>&1 &&
mpirun -n 2 "$work/images-mpi" $short --mesh fsdp=2 --out "$work/ip" >"$work/ip.log" 2>&1 </dev/null
for file in grid.png table.txt steps-4/metrics.jsonl steps-4/student/model.safetensors steps-1/student-ema/model.safetensors; do
    cmp "$work/it/$file" "$work/ip/$file" >>"$work/ip.log" 2>&1
    verdict $? "$file of two processes has the bytes of one rank" "$work/ip.log"
done
mpirun -n 2 "$work/images-mpi" $short --mesh dp=3 --out "$work/ip" >"$work/ip.log" 2>&1 </dev/null
[ $? -ne 0 ] && grep -q 'as many ranks as there are processes, 2, not 3' "$work/ip.log"
verdict $? 'a mesh of other ranks than there are processes is refused' "$work/ip.log"
conclude
