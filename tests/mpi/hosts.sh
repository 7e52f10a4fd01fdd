#!/bin/sh
# Open MPI over four hosts, which are network namespaces of this machine with names, processes and two links of their own: `control`
# for mpirun, `data` for messages. Links are cut and hosts die in the middle of programs. The last line is `N passed, N failed,
# N skipped`; status 77 where namespaces are not permitted. A quarter of a minute.
#
#   sh tests/mpi/hosts.sh                      from the root, after make build/mpi/test_mpi_hosts
#   sh tests/mpi/hosts.sh build/mpi/test_mpi   this program instead, or several, with a rank on each host
#
#   XD_TEST_SEED      where programs are interrupted (1)
#   XD_TEST_SECONDS   after which all is killed (60)
set -u
seed=${XD_TEST_SEED:-1}

refuse() {
    echo "$*"
    exit 77
}

# Everything happens in namespaces that end with their first process, and with them processes, links and mounts.
work=${XD_TEST_HOSTS:-} # set inside
if [ -z "$work" ]; then
    for tool in unshare nsenter ip mount timeout mpirun; do
        command -v $tool >/dev/null 2>&1 || refuse "needs $tool"
    done
    mpirun --version 2>/dev/null | grep -q 'Open MPI' || refuse "mpirun is not Open MPI's"
    new="unshare --map-root-user --net --mount --uts --pid --fork --kill-child"
    $new true 2>/dev/null || refuse "namespaces of users, networks and processes are not permitted"
    work=$(mktemp -d) || exit 1
    trap 'kill -9 $jail 2>/dev/null; wait; rm -rf "$work"' EXIT
    trap 'exit 1' HUP INT TERM
    XD_TEST_HOSTS=$work $new timeout -s KILL "${XD_TEST_SECONDS:-60}" sh "$0" "$@" &
    jail=$!
    wait $jail
    exit $?
fi

# ---- the hosts ----

# host N: makes it. Its processes end when something is written to $work/die<N>.
host() {
    mkfifo "$work/up$1" "$work/die$1" || return 1
    unshare --net --uts --pid --fork --kill-child sh -c 'hostname "host$1"
        for space in net uts pid; do : >"$2/$space$1"; mount --bind "/proc/self/ns/$space" "$2/$space$1" || exit 1; done
        echo up >"$2/up$1"
        exec cat "$2/die$1"' host "$1" "$work" >/dev/null &
    up=$(timeout 5 cat "$work/up$1") && [ "$up" = up ] || return 1
    for link in control data; do
        ip link add "$link$1" type veth peer name $link netns "$work/net$1" &&
        ip link set "$link$1" master $link up || return 1
    done
    nsenter "--net=$work/net$1" sh -c 'ip link set lo up && ip address add "10.7.0.$1/24" dev control &&
        ip address add "10.7.1.$1/24" dev data && ip link set control up && ip link set data up' host "$1"
}

hosts() {
    ip link set lo up || return 1
    for link in control data; do ip link add $link type bridge && ip link set $link up || return 1; done
    ip address add 10.7.0.100/24 dev control || return 1
    cp /etc/hosts "$work/names" || : >"$work/names"
    for n in 1 2 3 4; do
        host $n || return 1
        echo "10.7.0.$n host$n" >>"$work/names"
        echo "host$n slots=2" >>"$work/hosts"
    done
    mount --bind "$work/names" /etc/hosts || return 1
    # What mpirun calls in place of ssh, with a host's name and a command.
    cat >"$work/remote" <<END
#!/bin/sh
n=\${1#host}
shift
exec nsenter "--net=$work/net\$n" "--uts=$work/uts\$n" "--pid=$work/pid\$n" sh -c "\$*"
END
    chmod +x "$work/remote"
}

# ---- jobs ----

# start SECONDS OPTION... PROGRAM...: a job of mpirun over the hosts, $process; it writes to $work/out and $work/err
start() {
    seconds=$1
    shift
    : >"$work/out"
    env -i PATH="$PATH" HOME="$HOME" timeout -k 1 "$seconds" mpirun --allow-run-as-root $recovery --hostfile "$work/hosts" \
        --mca plm_rsh_agent "$work/remote" --mca orte_tmpdir_base "$work" --mca odls_base_sigkill_timeout 0 \
        --mca mpi_yield_when_idle 1 --mca btl self,tcp --mca oob_tcp_if_include control --mca btl_tcp_if_include data "$@" \
        >"$work/out" 2>"$work/err" </dev/null &
    process=$!
}

# The same, and waits for its end; $status is that of mpirun.
job() {
    start "$@"
    wait $process
    status=$?
}

# mend LINK...: what a job has cut on the last host
mend() { for link; do nsenter "--net=$work/net4" ip link set "$link" up; done; }

# through N: so many ranks have come through without a failed check, and no other line was written
through() {
    [ "$(grep -c '^survivor [0-9]*: 0 failed checks$' "$work/out")" -eq "$1" ] && [ "$(wc -l <"$work/out")" -eq "$1" ]
}

# within SECONDS COMMAND: it succeeds, sooner or later
within() {
    tenths=${1}0
    shift
    until "$@"; do
        [ $((tenths -= 1)) -gt 0 ] || return 1
        sleep 0.1
    done
}

# No process is left that has been given the last host's end.
gone() { ! grep -qs "$work/die[4]" /proc/[0-9]*/cmdline; }

passed=0 failed=0

verdict() {
    if [ "$1" -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "failed: $2; status $status"
        tail -n 20 "$work/out" "$work/err"
    fi
}

mount -t tmpfs tmpfs "$work" || refuse "file systems in memory are not permitted in namespaces"
hosts 2>"$work/err" || refuse "cannot make hosts out of namespaces: $(tail -n 1 "$work/err")"
program=build/mpi/test_mpi_hosts each="--map-by ppr:1:node"
recovery=

if [ $# -gt 0 ]; then
    for program; do
        job 600 $each -n 4 "$program"
        cat "$work/out"
        verdict $status "$program"
    done
    [ "$failed" -eq 0 ]
    exit
fi

job 20 -n 8 $program meet
[ $status -eq 0 ] && through 8
verdict $? 'each rank finds its place, and a student gets the bits of one rank from a teacher on other hosts'

recovery=--enable-recovery # mpirun leaves the others alive
job 15 $each $program calls "$seed" 'ip link set data down'
[ $status -eq 0 ] && through 4
verdict $? 'a link that is cut in a program is an error of both of its sides'
mend data

job 15 $each $program route "$seed" 'ip link set data down'
[ $status -eq 0 ] && through 4
verdict $? 'so is one that is cut in a route'
mend data

job 15 $each $program route "$seed" 'kill -9 $PPID'
[ $status -ne 124 ] && [ $status -ne 137 ] && through 3
verdict $? 'a process that is killed is named by those on other hosts'

# mpirun does not learn of it for minutes.
start 15 $each $program calls "$seed" 'ip link set data down; ip link set control down'
within 10 through 3
verdict $? 'a host without any link is named by the others'
{ kill -9 -$process; wait $process; } 2>/dev/null
mend control data

# With --enable-recovery mpirun sometimes ends the job, and sometimes waits for that host for ever while the others return.
recovery=
job 15 $each $program calls "$seed" "echo now >$work/die4"
[ $status -ne 0 ] && [ $status -ne 124 ] && [ $status -ne 137 ] && within 3 gone
verdict $? 'with a host that dies mpirun ends the job'

echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
