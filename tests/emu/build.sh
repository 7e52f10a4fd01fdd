#!/bin/sh
# Builds the emulation for one kind of build: tests/emu/build.sh plain|checker|asan FOLDER
# makes FOLDER/libemu.a and writes the flags for a .cu file, for other sources and for the link into FOLDER/flags.sh as
# EMU_CU, EMU_HOST and EMU_LINK. CXX names the compiler. Only what is older than its sources is rebuilt.
# Beside it are libraries that a program loads by their names, as it would NVIDIA's: libcublasLt_emu.so, libcublasLt_newer.so of a
# later minor version, and libcublasLt_other.so of another major one. Under the name that is loaded without being given,
# libcublasLt.so.99, the first one lies in the folder toolkit, beside a libcudart.so: no program finds it unless it loads that first. They
# use the program's emulation, so programs export their symbols.
set -e
here=$(cd "$(dirname "$0")" && pwd)
mode=$1
out=$2
cxx=${CXX:-g++}
common="-std=c++17 -g -DXD_EMU -I$here/include"
# What this machine can do in one instruction is not a call: fused products, counting and placing bits. No other product is
# fused, so every result keeps its bits.
flags=$(grep -m 1 '^flags' /proc/cpuinfo 2>/dev/null) || flags=
case "$(uname -m) $flags " in
x86_64*' fma '*' bmi2 '*) common="$common -mfma -mbmi -mbmi2 -mpopcnt -ffp-contract=off" ;;
esac

case $mode in
plain) layer=-O2 cu=-O2 link= ;;
checker) # only the .cu is instrumented: the emulation has the callbacks
    layer="-O2 -DEMU_CHECK" link=-fsanitize=undefined
    cu="-O2 -DEMU_CHECK -fsanitize=thread,undefined -fno-sanitize-recover=undefined"
    ;;
asan)
    layer="-O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
    cu=$layer link="-fsanitize=address,undefined"
    ;;
*)
    echo "usage: build.sh plain|checker|asan FOLDER" >&2
    exit 2
    ;;
esac

mkdir -p "$out"
out=$(cd "$out" && pwd)
# DT_RPATH: a sanitizer's dlopen stands between the program and the loader, which then ignores DT_RUNPATH.
cat > "$out/flags.sh" <<EOF
EMU_CU="$common $cu -x c++"
EMU_HOST="$common $layer"
EMU_LINK="$link -rdynamic -Wl,--disable-new-dtags,-rpath,$out -lpthread -ldl"
EOF

# True when the file $1 is missing or older than one of the others.
stale() {
    target=$1
    shift
    [ -e "$target" ] || return 0
    [ -n "$(find "$@" -newer "$target" | head -n 1)" ]
}

# asan does not watch the code that switches threads: it would be slow, and touches no memory of a kernel.
for part in control symbol fiber exec shared bulk atomic check memory stream runtime collective nccl ptx ptx_parse \
    ptx_body ptx_run ptx_integer ptx_float ptx_compare ptx_convert ptx_memory ptx_flight; do
    object=$out/$part.o
    if stale "$object" "$here/$part.cpp" "$here"/*.h "$here"/include/*.h "$0"; then
        case $mode/$part in
        asan/fiber | asan/exec) how="-O2 -DEMU_ASAN" ;;
        *) how=$layer ;;
        esac
        $cxx $common $how -Wall -Wextra -Wshadow -c "$here/$part.cpp" -o "$object"
        rm -f "$out/libemu.a"
    fi
done
[ -e "$out/libemu.a" ] || ar rcs "$out/libemu.a" "$out"/*.o

# nodelete: a graph or a stream that outlives dlclose holds functions of the library.
build_cublaslt() {
    stale "$out/$1" "$here/cublaslt.cpp" "$here"/*.h "$here"/include/*.h "$0" || return 0
    $cxx $common $layer -Wall -Wextra -Wshadow -fPIC -shared -DEMU_CUBLASLT_VERSION="$2" "$here/cublaslt.cpp" $link \
        -Wl,-soname,"$(basename "$1")" -Wl,-z,nodelete -o "$out/$1"
}
mkdir -p "$out/toolkit"
build_cublaslt libcublasLt_emu.so 990100
build_cublaslt libcublasLt_newer.so 990200
build_cublaslt libcublasLt_other.so 120803
build_cublaslt toolkit/libcublasLt.so.99 990100
if stale "$out/toolkit/libcudart.so" "$0"; then
    echo 'extern "C" int cudaGetDevice(int *device) { return *device = 0; }' |
        $cxx -x c++ -fPIC -shared - -Wl,-soname,libcudart.so.13 -o "$out/toolkit/libcudart.so"
fi
