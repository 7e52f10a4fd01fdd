#!/bin/sh
# Run test programs and add up their counts: run.sh FOLDER PROGRAM...
#
# Each program's output is kept as FOLDER/<program>.log. A program that crashes, hangs or does not exist counts
# as one failed test. The last line is `N passed, N failed, N skipped`; the exit status is 1 when a test failed
# or none ran.
#
#   TEST_SECONDS   how long a program may run (120)
#   TEST_JOBS      how many run at a time (1)
#   TEST_WRAPPER   a command put before each program, such as `mpirun -n 4`
#   TEST_PLAIN     not empty: the programs are examples, which pass by exiting with 0
#   BUILD_FAILED   not empty: something did not build: at least one test has failed
set -u

# Run one program, and print what came of it.
run_one() {
    logs=$1 program=$2 name=$(basename "$2") bound=
    log=$logs/$name.log
    command -v timeout >/dev/null 2>&1 && bound="timeout ${TEST_SECONDS:-120}"
    if [ -x "$program" ]; then
        $bound ${TEST_WRAPPER:-} "$program" >"$log" 2>&1 </dev/null
        status=$?
    else
        echo "$program was not built" >"$log"
        status=127
    fi
    [ -z "${TEST_PLAIN:-}" ] || [ "$status" -ne 0 ] || echo '1 passed, 0 failed, 0 skipped' >>"$log"
    counts=$(tail -n 1 "$log" | grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' | tr -dc '0-9 ')
    read -r p f s <<END
${counts:-0 0 0}
END
    if [ "$status" -ne 0 ] && [ "$f" -eq 0 ] || [ -z "$counts" ]; then
        f=$((f + 1))
        echo "exit status $status" >>"$log"
    fi
    echo "$p $f $s" >"$logs/$name.counts"
    told=$(
        printf '%-32s %4d passed, %d failed, %d skipped\n' "$name" "$p" "$f" "$s"
        [ "$f" -eq 0 ] || tail -n 40 "$log" | sed 's/^/    /'
        grep '^skipped ' "$log" | sed 's/^/    /'
    )
    printf '%s\n' "$told" # at once: others print too
}

if [ "$1" = --one ]; then
    run_one "$2" "$3"
    exit 0
fi

logs=$1
shift
mkdir -p "$logs"
[ $# -eq 0 ] || printf '%s\n' "$@" | xargs -n 1 -P "${TEST_JOBS:-1}" sh "$0" --one "$logs"
passed=0 failed=0 skipped=0
for program; do
    file=$logs/$(basename "$program").counts
    read -r p f s <"$file" || p=0 f=1 s=0
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    rm -f "$file"
done

if [ -n "${BUILD_FAILED:-}" ] && [ "$failed" -eq 0 ]; then
    echo "the build failed: see above"
    failed=$((failed + 1))
fi
[ $# -gt 0 ] || echo "there are no tests"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ $((passed + skipped)) -gt 0 ]
