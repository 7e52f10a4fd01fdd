#!/bin/sh
# What build_xdistill.py calls as nvcc, with g++ and the emulation of CUDA in the folder EMU (of tests/emu/build.sh, with -fPIC).
. "$EMU/flags.sh"
before= object= shared=
for word in "$@"; do
    case $before$word in
    -gencode* | -Xcompiler) word= ;;
    -Xlinker) before=-Xlinker word= ;;
    -Xlinker*) before= word=-Wl,$word ;;
    -shared) shared="$EMU/libemu.a $EMU_LINK" ;;
    *.cu) word="-x c++ $word -x none" ;;
    esac
    line="${line:-} $word"
done
exec g++ ${EMU_CU% -x c++} $line $shared
