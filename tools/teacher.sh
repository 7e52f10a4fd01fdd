#!/bin/sh
# Makes data/ again: the texts, the vocabularies and the teacher. Run from the root of the repository, `make teacher`.
#
# Needs a C compiler and the Debian packages bible-kjv and bible-kjv-text, and takes about 20 minutes on two cores. The
# text files and the vocabularies come out the same to the byte; data/README.md says what to expect of the teacher. Its
# curve goes to build/teacher. After an interruption, the last line with --resume continues.
set -eu
cc=${CC:-cc}
mkdir -p build
sh tools/kjv_split.sh build/kjv
mkdir -p data/teacher data/student
cp build/kjv/kjv_student.txt build/kjv/kjv_heldout.txt data/
make --no-print-directory build/xdistill
train="build/xdistill tokenize train"
$train --text build/kjv/kjv_teacher.txt --entries 2048 --pieces ascii --out data/teacher/tokenizer.json
$train --text build/kjv/kjv_student.txt --entries 1024 --pieces llama3 --out data/student/tokenizer.json
$cc -std=c99 -O2 -I. examples/demo/*.c examples/common/*.c examples/nn/*.c -o build/demo -lm -lpthread
build/demo --train-teacher build/kjv/kjv_teacher.txt --out build/teacher --ranks 2 --save-every 100 --overwrite
