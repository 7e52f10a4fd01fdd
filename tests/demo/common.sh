# What the tests of this folder share; each of them begins with `. tests/demo/common.sh`, from the root. Makes the folder
# $work, which goes away with the test.
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
passed=0 failed=0

# verdict STATUS WHAT [LOG]: counts; of a failure it shows the end of LOG, a file
verdict() {
    if [ "$1" -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "failed: $2"
        [ -z "${3:-}" ] || tail -n 5 "$3"
    fi
}

# conclude: the last line of a test, and its exit status
conclude() {
    echo "$passed passed, $failed failed, 0 skipped"
    [ "$failed" -eq 0 ]
}

# demo_sources INCLUDE: leaves in $sources what a compiler needs besides flags to make the demonstration with the header in
# that folder, and in $sharded_sources, $toys_sources and $images_sources the same for those of sharded training, of points in the
# plane and of images; fails when the library cannot be built
demo_sources() {
    library=$work/xdistill.o
    if [ "$1" = . ]; then
        library=build/libxdistill.a
        make --no-print-directory "$library" || return 1
    else
        ${CC:-cc} -std=c99 -O2 "-I$1" -c tests/build/implementation.c -o "$library" || return 1
    fi
    shared="-std=c99 -O2 -DXDISTILL_IMPLEMENTED -I$1 examples/common/*.c examples/nn/*.c $library -lm -lpthread"
    sources="examples/demo/*.c $shared"
    toys_sources="examples/toys/*.c $shared"
    images_sources="examples/images/*.c $shared"
    sharded_sources="examples/sharded/*.c $(ls examples/demo/*.c | grep -v '/demo\.c$' | tr '\n' ' ') $shared"
}

# appears FILE: waits until it is there and not empty, half a minute at most
appears() {
    waited=0
    while [ ! -s "$1" ] && [ $waited -lt 300 ]; do
        sleep 0.1
        waited=$((waited + 1))
    done
    [ -s "$1" ]
}

# end PROCESS: kills a process of this test's
end() {
    kill -9 "$1" 2>/dev/null
    wait "$1" 2>/dev/null
}
