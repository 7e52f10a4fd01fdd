#!/bin/sh
# Errors that composed frameworks are known for, as patches of src/: each is applied to a copy, and build/compose must find it;
# or, where a line `found by tests/test_NAME.c` stands before the patch, that test: what wrapped training does not reach.
#
#   sh tests/mutants/run.sh FOLDER    works in that folder; ends with `N passed, N failed`
#   MUTANTS="a.patch b.patch"         these alone
#   PARTS=objects                     a folder with the object of each part, as `make check` compiles them: where a patch changes one
#                                     part and no header, that part alone is compiled, and the tests once
set -u
cd "$(dirname "$0")/../.." || exit 1
out=$1
# What neither compose nor those tests reach is not compiled.
without="-DXDISTILL_NO_TEXT -DXDISTILL_NO_XTOKEN -DXDISTILL_NO_TEACHER -DXDISTILL_NO_COMPAT -DXDISTILL_NO_DMD"
cc="${CC:-cc} -std=c99 -w -D_POSIX_C_SOURCE=200809L"
passed=0 failed=0

# finder TEST: the program that looks for the error in $copy; TEST is empty for build/compose.
finder() {
    part=$(sed -n 's/^+++ b\/src\/\(.*\.c\)$/\1/p' "$patch")
    if [ -z "${PARTS:-}" ] || [ "$(grep -c '^+++ ' "$patch")" -ne 1 ] || [ -z "$part" ]; then
        $cc -O0 -DXDISTILL_IMPLEMENTED $without -I"$copy/src" -Itests/helpers ${1:-tests/compose/*.c} \
            -x c tests/mutants/implementation.c -o "$copy/finder" -lm -lpthread
        return
    fi
    name=$(echo "${1:-compose}" | tr / -)
    mkdir -p "$out/$name.d"
    for source in ${1:-tests/compose/*.c}; do
        object=$out/$name.d/$(basename "$source" .c).o
        [ -f "$object" ] || $cc -O1 -DXDISTILL_IMPLEMENTED -Isrc -Itests/helpers -c "$source" -o "$object" || return 1
    done
    $cc -O1 -I"$copy/src" -DXDISTILL_IMPLEMENTATION -DXD_PRIVATE=extern -c "$copy/src/$part" -o "$copy/part.o" &&
    $cc "$out/$name.d"/*.o "$copy/part.o" $(ls "$PARTS"/*.o | grep -v "/$(echo "$part" | tr / -)\.o$") -o "$copy/finder" -lm -lpthread
}

for patch in ${MUTANTS:-tests/mutants/*.patch}; do
    copy=$out/$(basename "$patch" .patch)
    rm -rf "$copy" && mkdir -p "$copy" && cp -r src "$copy/" || exit 1
    test=$(sed -n 's/^found by //p' "$patch")
    sign='^seed' options='--seed 1 --count 400 --quick'
    [ -z "$test" ] || sign='^FAILED' options=
    if patch -d "$copy" -p1 -s <"$patch" && finder "$test"; then
        if "$copy/finder" $options >"$copy/log" 2>&1 || ! grep -q "$sign" "$copy/log"; then
            echo "not found: $patch"
            failed=$((failed + 1))
        else
            passed=$((passed + 1))
            echo "$(basename "$patch" .patch): $(grep "$sign" "$copy/log" | head -n 1)"
        fi
    else
        echo "does not apply, or does not compile: $patch"
        failed=$((failed + 1))
    fi
    rm -rf "$copy/src"
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
