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

# The sources of the demonstration, of sharded training, of points in the plane and of images.
demo=$(ls examples/demo/*.c)
sharded="$(ls examples/sharded/*.c) $(ls examples/demo/*.c | grep -v '/demo\.c$')"
toys=$(ls examples/toys/*.c)
images=$(ls examples/images/*.c)
small="-DDEMO_ROW=32 -DDEMO_BATCH=8"

# program NAME FLAGS SOURCES [MPI]: $work/NAME of these sources; with MPI, a macro that some of them look at, for mpicc. Programs, of
# other tests too, share the objects that have the same flags.
program() {
    flags=$2 mpi=${4:-} objects= link=${CC:-cc}
    [ -z "$mpi" ] || link=mpicc
    {
        make --no-print-directory build/networks.a build/libxdistill.a && mkdir -p build/demo-objects || return 1
        for source in $3; do object || return 1; done
        $link $objects build/networks.a build/libxdistill.a -o "$work/$1" -lm -lpthread
    } >"$work/build.log" 2>&1
}

# Adds the object of $source to $objects, and compiles it unless there is one that is newer than what it may include. Another test
# may be at it.
object() {
    compile="${CC:-cc} $flags"
    [ -z "$mpi" ] || ! grep -q "$mpi" "$source" || compile="mpicc -D$mpi $flags"
    object=build/demo-objects/$(echo "$compile $source" | tr -c 'a-zA-Z0-9_\n' -).o
    objects="$objects $object"
    [ -e "$object" ] && [ -z "$(find examples xdistill*.h -name '*.[ch]' -newer "$object" | head -n 1)" ] && return
    $compile -std=c99 -O2 -DXDISTILL_IMPLEMENTED -I. -c "$source" -o "$object.$$" && mv "$object.$$" "$object"
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
