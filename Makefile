# xdistill needs no build: copy xdistill.h. This file builds and checks everything around it, in build/.

CC ?= cc
PYTHON ?= python3
PREFIX ?= /usr/local
GOLDEN ?= ../shared/golden
CFLAGS ?= -O2
NVCC ?= nvcc
TORCH_PYTHON ?= $(PYTHON)
TOKENIZER_PYTHON ?= $(PYTHON)
CUDA_ARCHS ?= 80 90 100
GPU_ARCH ?= native
MPIRUN ?= mpirun --oversubscribe --allow-run-as-root -n 4
LIBS = -lm -lpthread

version = $(shell sed -n 's/^\#define XD_VERSION_[A-Z]* \([0-9]*\)$$/\1/p' src/base/config.h | paste -sd. -)
warnings = -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wmissing-prototypes -Wundef -Wvla

# How the tests are built. make check gives other values: another compiler, the generated header, sanitizers. Objects of
# tests contain no part of the library, so those of test_objects may be linked with any test_implementation.
# SANITIZE=address,undefined builds them so, in a folder of their own.
comma = ,
test_dir = build/test$(if $(SANITIZE),-$(subst $(comma),-,$(SANITIZE)))
test_objects = $(test_dir)
test_header = src
test_cc = $(CC) -std=c99 -O1 -g $(warnings) $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-omit-frame-pointer -fno-sanitize-recover=all)
test_implementation = $(layer_objects)
test_libs = $(LIBS)
test_sources := $(sort $(wildcard tests/test_*.c))

# V=1 shows each command.
compiling = $(if $(V),,@echo "compiling $@"; )

# The library that tests link is one object for each layer, a folder of src/: a change costs its own layer. The longest layers are
# cut into pieces: each takes every n-th file. Private functions are visible to the other objects, as in one unit, and to nothing
# else.
pieces = comm.1of2 comm.2of2 checkpoint.1of3 checkpoint.2of3 checkpoint.3of3 model.1of2 model.2of2 dmd.1of2 dmd.2of2 \
    kernel-cpu.1of2 kernel-cpu.2of2 kernel-simd.1of4 kernel-simd.2of4 kernel-simd.3of4 kernel-simd.4of4
layers := $(sort $(subst /,-,$(shell sed -n 's|^\#include "\(.*\)/[^/]*\.c"$$|\1|p' src/xdistill.h)))
layer_dir = $(test_dir)/layers
layer_objects := $(foreach layer,$(layers),$(patsubst %,$(layer_dir)/%.o,$(or $(filter $(layer).%,$(pieces)),$(layer).1of1)))
private = '-DXD_PRIVATE=extern __attribute__((visibility("hidden")))'

# A test that uses private names includes their headers from src (XD_TEST_LAYERS), and is linked with an object whose private
# functions are visible: the layers, or one of the generated header with XD_TEST_UNIT. test_exact_terms calls functions that are
# static in their files, so it has the library for itself, and test_debug one of its own options; make check says in `carrying`
# which do beside them.
private_sources := $(shell grep -lE '\<(xdi_|XDI_|XDISTILL_STATIC)' $(test_sources) /dev/null)
whole_sources = tests/test_exact_terms.c tests/test_debug.c $(carrying)
tests := $(test_sources:tests/%.c=$(test_dir)/%)
whole_tests = $(whole_sources:tests/%.c=$(test_dir)/%)
examples := $(patsubst examples/%,build/examples/%,$(basename $(sort $(wildcard examples/*.c examples/*.cpp))))
private_names := $(shell grep -lE '\<xdi_' bench/*.c /dev/null)
# bench/node.c needs mpicc.
bench := $(patsubst bench/%.c,build/bench/%,$(sort $(filter-out bench/node.c,$(wildcard bench/*.c))))
# tests/mpi/hosts.sh runs the other one.
mpi_sources := $(sort $(filter-out %_hosts.c,$(wildcard tests/mpi/*.c)))
mpi_tests := $(mpi_sources:tests/mpi/%.c=build/mpi/%)
headers := $(wildcard xdistill.h xdistill_cuda.cu xdistill_nccl.h xdistill_mpi.h)

# Programs around the library share one object of it for each set of flags; this leaves it out of their files.
library = build/libxdistill.a
linked = -DXDISTILL_IMPLEMENTED

# The networks of the examples and what programs around them share: demonstrations and tests link what they need of it.
networks = build/networks.a
network_objects := $(patsubst examples/%.c,build/networks/%.o,$(sort $(wildcard examples/nn/*.c examples/common/*.c)))

.PHONY: help lib edit-to-test demo demo-mpi demo-sharded demo-toys diffusion-pictures demo-images demo-real demo-cache teacher image-teacher test check fuzz golden golden-levels bench bench-all bench-threads bench-gpu bench-nccl bench-torch bench-torch-xtoken bench-torch-gpu bench-dmd bench-fake bench-wrap bench-files bench-tokenizers examples mpi cuda cuda-unit cuda-cost test-cuda test-cuda-emu test-cuda-ptx coverage-cuda gpu-check install uninstall dist format check-format amalgamate api docs clean
.DELETE_ON_ERROR:

help: ## Library: list the targets
	@for group in Library Tests Demonstrations GPU Speed Source; do echo "$$group"; \
	sed -n "s/^\([a-z-]*\):[^#]*## $$group: \(.*\)/  make \1\t\2/p" Makefile | expand -t 28; done

lib: build/libxdistill.a build/libxdistill.so ## Library: the library to link, static and shared; -j helps

# The six sections of the implementation, each an object: xdistill.h says what they are. build/xdistill.o is all of them in one.
section_objects := $(foreach section,1 2 3 4 5 6,build/section$(section).o)

$(section_objects): build/section%.o: tests/build/implementation.c xdistill.h | build
	$(if $(V),,@echo "compiling section $* of 6 of the library, 2 to 7 s"; )$(CC) -std=c99 $(CFLAGS) -fPIC -DXDISTILL_SECTION=$* -I. -c $< -o $@

build/xdistill.o: tests/build/implementation.c xdistill.h | build
	$(if $(V),,@echo "compiling the library, about 30 s"; )$(CC) -std=c99 $(CFLAGS) -fPIC -I. -c $< -o $@

build/libxdistill.a: $(section_objects)
	$(if $(V),,@)rm -f $@ && $(AR) -rc $@ $^

# A program finds it by its name for the loader, libxdistill.so.0.2: before 1.0 a minor version may change the interface.
shared = libxdistill.so.$(basename $(version))

build/libxdistill.so: $(section_objects)
	$(compiling)$(CC) -shared $(if $(filter Linux,$(shell uname)),-Wl$(comma)-soname$(comma)$(shared)) $^ -o build/$(shared) $(LIBS)
	ln -sf $(shared) $@

build/networks.a: $(network_objects)
	$(if $(V),,@)rm -f $@ && $(AR) -rc $@ $^

$(network_objects): build/networks/%.o: examples/%.c xdistill.h $(wildcard examples/nn/*.h examples/common/*.h) | build/networks/nn build/networks/common
	$(compiling)$(CC) -std=c99 $(CFLAGS) $(warnings) $(linked) -I. -c $< -o $@

test: ## Tests: build and run tests/test_*.c; minutes, -j helps
	@failed=; $(MAKE) -k --no-print-directory build-tests || failed=1; \
	BUILD_FAILED=$$failed sh tests/build/run.sh $(test_dir) $(tests)

check: ## Tests: all compilers, standards, options, sanitizers, demos
	@sh tests/build/check.sh

edit-to-test: ## Tests: seconds from an edit in each layer to a test; ARGS
	@sh tests/build/edit_to_test.sh $(ARGS)

golden: build/golden ## Tests: compare with the golden vectors in GOLDEN=dir
	@if [ -d "$(GOLDEN)" ]; then build/golden "$(GOLDEN)"; \
	else echo "skipped: no golden vectors in $(GOLDEN)"; echo "0 passed, 0 failed, 1 skipped"; fi

golden-levels: build/golden ## Tests: the same on every CPU level and in INVARIANT mode
	@for level in plain portable avx2 avx512 avx512_bf16; do echo "$$level:"; \
	build/golden --cpu=$$level "$(GOLDEN)"; status=$$?; [ $$status = 0 ] || [ $$status = 77 ] || exit 1; done
	@echo "invariant:"; build/golden --invariant "$(GOLDEN)"

.PHONY: build-tests print-test-dir print-layers
build-tests: $(tests)

print-test-dir:
	@echo $(test_dir)

print-layers:
	@printf '%s\n' $(layer_objects)

test_includes = -I$(test_header) -Itests/helpers
whole_test_cc = $(test_cc) $(test_includes)
dependencies = -MMD -MP -MF $@.d -MT $@

$(filter-out $(whole_tests),$(tests)): $(test_dir)/%: $(test_objects)/%.o $(test_implementation) | $(test_dir)
	$(compiling)$(test_cc) -x none $(test_objects)/$*.o $(test_implementation) -o $@ $(link_flags) $(test_libs)

# Where the library finds no second thread.
$(test_dir)/test_fingerprint: link_flags = -Wl,--wrap=pthread_create

$(test_sources:tests/%.c=$(test_objects)/%.o): $(test_objects)/%.o: tests/%.c | $(test_objects)
	$(compiling)$(test_cc) $(if $(filter $<,$(private_sources)),-Isrc -DXD_TEST_LAYERS $(private)) $(test_includes) $(dependencies) $(linked) -c $< -o $@

$(whole_tests): $(test_dir)/%: tests/%.c | $(test_dir)
	$(compiling)$(whole_test_cc) -DXDISTILL_STATIC $(dependencies) $< -o $@ $(test_libs)

# kernel-simd.3of4: words 3 and 4.
part = $(subst of, ,$(subst .,,$(suffix $*)))
$(layer_objects): $(layer_dir)/%.o: src/xdistill.h | $(layer_dir)
	$(compiling)awk -F'"' -v layer="$(subst -,/,$(basename $*))/" -v piece=$(word 1,$(part)) -v pieces=$(word 2,$(part)) \
	'/^#include ".*\.c"$$/ && index($$2, layer) == 1 && $$2 !~ layer ".*/" && n++ % pieces == piece - 1' $< | \
	$(test_cc) -Isrc -DXDISTILL_IMPLEMENTATION $(private) $(dependencies) -x c -c - -o $@

golden_objects := $(patsubst tests/golden/%.c,build/golden.d/%.o,$(wildcard tests/golden/*.c))
# make check takes the object of the library, from the generated header, which is the same text.
golden_implementation ?= $(layer_objects)

build/golden: $(golden_objects) $(golden_implementation) | build
	$(compiling)$(CC) $(golden_objects) $(golden_implementation) -o $@ $(LIBS)

$(golden_objects): build/golden.d/%.o: tests/golden/%.c | build/golden.d
	$(compiling)$(CC) -std=c99 -O2 $(warnings) $(linked) -DXD_TEST_LAYERS $(private) -Isrc -Itests/helpers $(dependencies) -c $< -o $@

# Configurations of wrapped training against one rank: build/compose --seed 1 --count 200
build/compose: $(wildcard tests/compose/*) $(golden_implementation) | build
	$(compiling)$(CC) -std=c99 -O2 $(warnings) -D_POSIX_C_SOURCE=200809L $(linked) -Isrc tests/compose/*.c $(golden_implementation) -o $@ $(LIBS)

# The transformer of examples/nn under every wrapper against one rank: build/equivalence. make check says build/networks.a, which is of
# the generated header too.
equivalence_networks ?= $(wildcard examples/nn/*.c)

build/equivalence: $(wildcard tests/equivalence/* examples/nn/*) $(equivalence_networks) $(golden_implementation) | build
	$(compiling)$(CC) -std=c99 -O2 $(warnings) -D_POSIX_C_SOURCE=200809L $(linked) -Isrc tests/equivalence/*.c $(equivalence_networks) $(golden_implementation) -o $@ $(LIBS)

# A distillation of small networks under every wrapper against one rank: build/equivalence_dmd
build/equivalence_dmd: $(wildcard tests/equivalence_dmd/* examples/nn/*) $(equivalence_networks) $(golden_implementation) | build
	$(compiling)$(CC) -std=c99 -O2 $(warnings) -D_POSIX_C_SOURCE=200809L $(linked) -Isrc tests/equivalence_dmd/*.c $(equivalence_networks) $(golden_implementation) -o $@ $(LIBS)

fuzz: ## Tests: every fuzzer for FUZZ_SECONDS
	@sh tests/build/check.sh fuzz

# Their own out/ is written again each time; a folder that ARGS names is not.
own_out = $(if $(findstring --out,$(ARGS)),,--overwrite)

demo: build/demo ## Demonstrations: distil small models on real text; ARGS=--help
	build/demo $(own_out) $(ARGS)

build/demo: $(wildcard examples/demo/* examples/common/*.h examples/nn/*.h) $(networks) $(library)
	$(compiling)$(CC) -std=c99 $(CFLAGS) $(linked) -I. $(wildcard examples/demo/*.c) $(networks) $(library) -o $@ $(LIBS)

demo-mpi: build/demo-mpi ## Demonstrations: the same with MPI processes as ranks
	$(MPIRUN) build/demo-mpi $(own_out) $(ARGS)

build/demo-mpi: $(wildcard examples/demo/* examples/common/*.h examples/nn/*.h) xdistill_mpi.h $(networks) $(library)
	$(compiling)mpicc -std=c99 $(CFLAGS) $(linked) -I. -DDEMO_MPI $(wildcard examples/demo/*.c) $(networks) $(library) -o $@ $(LIBS)

# What Open MPI wants to hear before it starts more processes than cores, or for root; --mpi in ARGS asks for processes.
open_mpi = OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
mpi_if_asked = $(if $(filter --mpi,$(ARGS)),-mpi)

demo-sharded: build/demo-sharded$(mpi_if_asked) build/xdrun ## Demonstrations: a sharded student, killed and resumed; ARGS=--help
	$(open_mpi) $< $(own_out) $(ARGS)

sharded_sources = $(wildcard examples/sharded/*.c) $(filter-out examples/demo/demo.c,$(wildcard examples/demo/*.c))

build/demo-sharded: $(wildcard examples/sharded/* examples/demo/* examples/common/*.h examples/nn/*.h) $(networks) $(library)
	$(compiling)$(CC) -std=c99 $(CFLAGS) $(linked) -I. $(sharded_sources) $(networks) $(library) -o $@ $(LIBS)

build/demo-sharded-mpi: $(wildcard examples/sharded/* examples/demo/* examples/common/*.h examples/nn/*.h) xdistill_mpi.h $(networks) $(library)
	$(compiling)mpicc -std=c99 $(CFLAGS) $(linked) -I. -DSHARDED_MPI $(sharded_sources) $(networks) $(library) -o $@ $(LIBS)

demo-toys: build/demo-toys ## Demonstrations: distil points in the plane; ARGS=--help
	build/demo-toys $(ARGS)

diffusion-pictures: build/demo-toys build/examples/29_own_diffusion ## Demonstrations: make the pictures of docs/diffusion.md again
	build/demo-toys --toy moons --out out/diffusion/well
	build/demo-toys --toy moons --out out/diffusion/slow --fake-rate 0.00001
	build/demo-toys --toy moons --out out/diffusion/wild --rate 0.03
	for run in well slow wild; do cp out/diffusion/$$run/curves-moons.svg docs/diffusion_$$run.svg || exit 1; done
	awk 'BEGIN { for (i = 0; i < 3000; i++) { a = .7 + 4.9 * i / 3000; \
	print 1.6 * cos(a) + sin(77.7 * i) / 8, 1.6 * sin(a) + cos(33.3 * i) / 8 } }' >out/diffusion/points.txt
	build/examples/29_own_diffusion out/diffusion/points.txt docs/diffusion_own.svg

build/demo-toys: $(wildcard examples/toys/* examples/common/*.h examples/nn/*.h) $(networks) $(library)
	$(compiling)$(CC) -std=c99 $(CFLAGS) $(linked) -I. $(wildcard examples/toys/*.c) $(networks) $(library) -o $@ $(LIBS)

demo-images: build/demo-images$(mpi_if_asked) ## Demonstrations: distil a diffusion model of pictures; ARGS=--help
	$(if $(mpi_if_asked),$(MPIRUN)) $< $(own_out) $(filter-out --mpi,$(ARGS))

build/demo-images: $(wildcard examples/images/* examples/common/*.h examples/nn/*.h) $(networks) $(library)
	$(compiling)$(CC) -std=c99 $(CFLAGS) $(linked) -I. $(wildcard examples/images/*.c) $(networks) $(library) -o $@ $(LIBS)

build/demo-images-mpi: $(wildcard examples/images/* examples/common/*.h examples/nn/*.h) xdistill_mpi.h $(networks) $(library)
	$(compiling)mpicc -std=c99 $(CFLAGS) $(linked) -I. -DIMAGES_MPI $(wildcard examples/images/*.c) $(networks) $(library) -o $@ $(LIBS)

demo-cache: build/xdistill ## Demonstrations: a cache of draws beside the running teacher; SEEDS=n
	@sh tools/demo_cache.sh

demo-real: build/xdistill ## Demonstrations: real vocabularies and a real teacher; half an hour
	@sh tools/demo_real.sh $(ARGS)

build/xdrun: tools/xdrun.c | build
	$(compiling)$(CC) -std=c99 $(CFLAGS) $< -o $@

tool_sources = $(wildcard tools/xdistill/*.c)

build/xdistill: $(wildcard tools/xdistill/* tools/dcp*.h examples/common/*.h examples/nn/*.h) tools/listing.h bench/bench.h $(networks) $(library)
	$(compiling)$(CC) -std=c99 $(CFLAGS) $(linked) -I. $(tool_sources) $(networks) $(library) -o $@ $(LIBS)

images_sources = $(addprefix examples/images/,classifier.c dataset.c frechet.c tensors.c)

build/images_data: tools/images_data.c $(images_sources) $(wildcard examples/images/*.h examples/nn/*.h) $(networks) $(library)
	$(compiling)$(CC) -std=c99 $(CFLAGS) $(linked) -I. $< $(images_sources) $(networks) $(library) -o $@ $(LIBS)

teacher: ## Demonstrations: train the teacher of the demonstration again
	sh tools/teacher.sh

image-teacher: build/images_data build/demo-images ## Demonstrations: make data/images again
	sh tools/fetch_images.sh
	build/images_data build/images data/images
	build/demo-images --train-teacher build/images

examples: ## Tests: build and run each example
	@failed=; $(MAKE) -k --no-print-directory build-examples || failed=1; \
	TEST_PLAIN=1 BUILD_FAILED=$$failed sh tests/build/run.sh build/examples $(examples)

.PHONY: build-examples
build-examples: $(examples)

build/examples/%: examples/%.c $(library) | build/examples
	$(compiling)$(CC) -std=c99 -O2 $(linked) $< $(library) -o $@ $(LIBS)

# These two train the transformer of examples/nn; the second is made of parts of the demos, with shorter rows.
student_sources = $(patsubst %,examples/demo/demo_%.c,bridge data flat load loss rank shares text) $(patsubst %,examples/sharded/sharded_%.c,memory stages student)

build/examples/24_fsdp_transformer: examples/24_fsdp_transformer.c $(wildcard examples/nn/*.h) $(networks) $(library) | build/examples
	$(compiling)$(CC) -std=c99 -O2 $(linked) -I. $< $(networks) $(library) -o $@ $(LIBS)

build/examples/25_xtoken_student: examples/25_xtoken_student.c $(student_sources) $(wildcard examples/*/*.h) $(networks) $(library) | build/examples
	$(compiling)$(CC) -std=c99 -O2 $(linked) -I. -DDEMO_ROW=64 -DDEMO_BATCH=8 $< $(student_sources) $(networks) $(library) -o $@ $(LIBS)

build/examples/29_own_diffusion: examples/29_own_diffusion.c $(wildcard examples/29_*.h) $(library) | build/examples
	$(compiling)$(CC) -std=c99 -O3 $(linked) -I. $< $(library) -o $@ $(LIBS)

build/examples/01_quickstart: examples/01_quickstart.c xdistill.h | build/examples
	$(compiling)$(CC) -std=c99 -O2 $< -o $@ $(LIBS)

build/examples/11_from_cpp: examples/11_from_cpp.cpp xdistill.h | build/examples
	$(compiling)$(CXX) -std=c++11 -O2 $< -o $@ $(LIBS)

bench_mpi := $(if $(shell command -v mpicc),build/bench/comm_mpi)
node_mpi := $(if $(bench_mpi),build/bench/node_mpi)
wrap_mpi := $(if $(shell command -v mpicc),build/bench/wrap_mpi)
two_processes = mpirun --oversubscribe --allow-run-as-root -n 2

bench: build/xdistill ## Speed: each operation on a line, in a minute
	@build/xdistill bench --tokenizer data/teacher/tokenizer.json --text data/kjv_heldout.txt $(ARGS)

bench-all: $(bench) $(bench_mpi) $(node_mpi) ## Speed: build and run the benchmarks in bench/
	@for program in $(filter-out build/bench/wrap build/bench/files build/bench/dmd build/bench/fake,$(bench)); do $$program || exit 1; done
	@[ -z "$(bench_mpi)" ] || { $(two_processes) $(bench_mpi) && $(two_processes) $(node_mpi); }

build/bench/%: bench/%.c $(wildcard bench/*.h) build/bench/xdistill.o
	$(compiling)$(CC) -std=c99 -O3 $(linked) -I. $< build/bench/xdistill.o -o $@ $(LIBS)

# Those that use private names.
$(patsubst bench/%.c,build/bench/%,$(filter bench/%.c,$(private_names))): build/bench/%: bench/%.c $(wildcard bench/*.h) xdistill.h \
    | build/bench
	$(compiling)$(CC) -std=c99 -O3 -I. $< -o $@ $(LIBS)

build/bench/comm_mpi: bench/comm.c bench/bench.h xdistill_mpi.h build/bench/xdistill.o
	$(compiling)mpicc -std=c99 -O3 -DBENCH_MPI $(linked) -I. $< build/bench/xdistill.o -o $@ $(LIBS)

build/bench/node_mpi: bench/node.c bench/bench.h build/bench/xdistill.o
	$(compiling)mpicc -std=c99 -O3 -DBENCH_MPI $(linked) -I. $< build/bench/xdistill.o -o $@ $(LIBS)

# Minutes each: apart from the others. MACHINE=NAME appends the rows to bench/results/NAME-wrap.jsonl and NAME-files.jsonl.
results = $(if $(MACHINE),-J bench/results/$(MACHINE)-$1.jsonl)

bench-wrap: build/bench/wrap $(wrap_mpi) ## Speed: wrapped models and PyTorch's; TORCH_PYTHON, MACHINE
	build/bench/wrap $(call results,wrap)
	$(TORCH_PYTHON) bench/torch/wrap.py build/bench/wrap $(if $(wrap_mpi),--mpi "$(two_processes) $(wrap_mpi)") $(call results,wrap) $(ARGS)

bench-files: build/bench/files ## Speed: checkpoints and PyTorch's; TORCH_PYTHON, MACHINE
	build/bench/files $(call results,files)
	$(TORCH_PYTHON) bench/torch/files.py build/bench/files $(call results,files) $(ARGS)

bench-dmd: build/bench/dmd ## Speed: distribution matching and PyTorch; TORCH_PYTHON
	build/bench/dmd $(call results,dmd)
	$(TORCH_PYTHON) bench/torch/dmd.py build/bench/dmd $(call results,dmd) $(ARGS)

bench-fake: build/bench/fake ## Speed: a fake score from shards and PyTorch; TORCH_PYTHON
	build/bench/fake $(call results,fake)
	$(TORCH_PYTHON) bench/torch/fake.py build/bench/fake $(call results,fake) $(ARGS)

dmd_networks = examples/toys/toy_net.c examples/nn/nn_matmul.c examples/nn/nn_exp.c

build/bench/dmd: bench/dmd.c $(dmd_networks) $(wildcard bench/*.h examples/toys/toy_net.h examples/nn/*.h) build/bench/xdistill.o
	$(compiling)$(CC) -std=c99 -O3 $(linked) -I. $< $(dmd_networks) build/bench/xdistill.o -o $@ $(LIBS)

build/bench/wrap: bench/wrap.c $(wildcard bench/*.h examples/nn/*.[ch]) build/bench/xdistill.o
	$(compiling)$(CC) -std=c99 -O3 $(linked) -I. $< $(wildcard examples/nn/*.c) build/bench/xdistill.o -o $@ $(LIBS)

build/bench/wrap_mpi: bench/wrap.c $(wildcard bench/*.h examples/nn/*.[ch]) xdistill_mpi.h build/bench/xdistill.o
	$(compiling)mpicc -std=c99 -O3 -DBENCH_MPI $(linked) -I. $< $(wildcard examples/nn/*.c) build/bench/xdistill.o -o $@ $(LIBS)

build/bench/xdistill.o: tests/build/implementation.c xdistill.h | build/bench
	$(compiling)$(CC) -std=c99 -O3 -I. -c $< -o $@

bench-torch: build/bench/shim.so ## Speed: CPU kernels and PyTorch's; TORCH_PYTHON, ARGS
	$(TORCH_PYTHON) bench/torch/compare.py build/bench/shim.so $(ARGS)

bench-threads: build/bench/shim.so ## Speed: one thread and several, without PyTorch; ARGS
	$(PYTHON) bench/torch/threads.py build/bench/shim.so $(ARGS)

bench-torch-xtoken: build/bench/xtoken_shim.so ## Speed: losses across tokenizers and PyTorch's
	$(TORCH_PYTHON) bench/torch/xtoken.py build/bench/xtoken_shim.so $(ARGS)

bench-torch-gpu: build/bench/gpu_shim.so ## Speed: a GPU, PyTorch, and Liger where it is installed
	$(TORCH_PYTHON) bench/torch/compare.py --device cuda build/bench/gpu_shim.so $(ARGS)

build/bench/gpu_shim.so: bench/torch/gpu_shim.cu xdistill.h build/bench/xdistill_cuda.o | build/bench
	$(compiling)$(NVCC) -O3 -arch=$(GPU_ARCH) -shared -Xcompiler -fPIC -I. $< build/bench/xdistill_cuda.o -o $@

# PyTorch's times come first, where it can use the GPU, and are a column of the table.
bench-gpu: build/bench/gpu ## Speed: each operation of a GPU, a line each; ARGS
	@if $(TORCH_PYTHON) -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then \
	$(TORCH_PYTHON) bench/torch/peers.py >build/bench/gpu_peers; GPU_PEERS=build/bench/gpu_peers build/bench/gpu $(ARGS); \
	else build/bench/gpu $(ARGS); fi

bench-nccl: build/bench/nccl ## Speed: collectives of all GPUs; NCCL_HOME, ARGS
	build/bench/nccl $(ARGS)

build/bench/gpu: bench/gpu.cu $(wildcard bench/*.h) build/bench/xdistill_cuda.o build/bench/xdistill.o
	$(compiling)$(NVCC) -O3 -x cu -arch=$(GPU_ARCH) $(linked) -I. $< -x none build/bench/xdistill_cuda.o build/bench/xdistill.o -o $@ $(LIBS)

nccl_flags = $(if $(NCCL_HOME),-I$(NCCL_HOME)/include -L$(NCCL_HOME)/lib -Xlinker -rpath=$(NCCL_HOME)/lib) -lnccl

build/bench/nccl: bench/nccl.cu bench/bench.h xdistill_nccl.h build/bench/xdistill_cuda.o build/bench/xdistill.o
	$(compiling)$(NVCC) -O3 -x cu -arch=$(GPU_ARCH) $(linked) -I. $< -x none build/bench/xdistill_cuda.o build/bench/xdistill.o -o $@ $(nccl_flags) $(LIBS)

build/bench/xdistill_cuda.o: xdistill_cuda.cu xdistill.h | build/bench
	$(compiling)$(NVCC) -O2 -arch=$(GPU_ARCH) -split-compile=0 -Xcompiler -fPIC -I. -c $< -o $@

bench-tokenizers: ## Speed: reference packages; TOKENIZERS, TOKENIZER_PYTHON
	$(TOKENIZER_PYTHON) tests/tokenizers/compare.py "$(TOKENIZERS)" $(ARGS)

build/bench/%.so: bench/torch/%.c $(wildcard bench/*.h bench/torch/*.h) xdistill.h | build/bench
	$(compiling)$(CC) -std=c99 -O2 -fPIC -shared -I. $< -o $@ $(LIBS)

mpi: ## Tests: tests/mpi/*.c on four ranks
ifeq ($(and $(mpi_sources),$(shell command -v mpicc)),)
	@echo "skipped: needs mpicc and tests/mpi"; echo "0 passed, 0 failed, 1 skipped"
else
	@failed=; $(MAKE) -k --no-print-directory build-mpi || failed=1; \
	TEST_WRAPPER="$(MPIRUN)" BUILD_FAILED=$$failed sh tests/build/run.sh build/mpi $(mpi_tests)
endif

.PHONY: build-mpi
build-mpi: $(mpi_tests)

build/mpi/test_mpi_equivalence: $(wildcard tests/equivalence/* examples/nn/*)

build/mpi/%: tests/mpi/%.c $(wildcard tests/mpi/*.h tests/helpers/*.h) xdistill_mpi.h $(library) | build/mpi
	$(compiling)mpicc -std=c99 -O1 -g $(linked) -I. -Itests/helpers $< $(library) -o $@ $(LIBS)

cuda: cuda-unit ## GPU: compile the unit for CUDA_ARCHS; cost on 9.0
	@$(MAKE) --no-print-directory cuda-cost CUDA_ARCHS=90

cuda-unit: | build
ifeq ($(shell command -v $(NVCC)),)
	@echo "skipped: needs nvcc"; echo "0 passed, 0 failed, 1 skipped"
else
	@NVCC="$(NVCC)" CUDA_ARCHS="$(CUDA_ARCHS)" sh tools/cuda_build.sh . build/xdistill_cuda.o
endif

cuda-cost: ## GPU: what each operation issues and should take
	@for arch in $(CUDA_ARCHS); do NVCC="$(NVCC)" CUDA_ARCH=$$arch CUDA_HEADER=. sh tests/cuda/run.sh cost || exit 1; done
	@$(PYTHON) tools/gpu_model.py | grep mean; $(PYTHON) tools/gpu_cost.py --check | grep mean

test-cuda-emu: ## GPU: the CUDA unit without a GPU, under sanitizers
	@GOLDEN="$(GOLDEN)" sh tests/cuda/run.sh

test-cuda: ## GPU: the same tests on a GPU
	@NVCC="$(NVCC)" GOLDEN="$(GOLDEN)" sh tests/cuda/run.sh gpu

test-cuda-ptx: ## GPU: the same with nvcc's own code, its PTX interpreted
	@NVCC="$(NVCC)" GOLDEN="$(GOLDEN)" sh tests/cuda/run.sh ptx

coverage-cuda: ## GPU: device code that these tests run; below 95 % fails
	@GOLDEN="$(GOLDEN)" sh tests/cuda/run.sh coverage

gpu-check: ## GPU: build, tests and benchmarks on a GPU; ARGS=--rest
	@NVCC="$(NVCC)" GOLDEN="$(GOLDEN)" TORCH_PYTHON="$(TORCH_PYTHON)" sh tools/gpu_check.sh $(ARGS)

amalgamate: ## Source: write the generated headers from src/
	@$(PYTHON) tools/amalgamate.py

api: ## Source: write docs/api.txt, build/api.json, ctypes binding
	@CC="$(CC)" $(PYTHON) tools/api.py --accept

docs: ## Source: write the reference to build/docs/index.html
	@CC="$(CC)" $(PYTHON) tools/docs.py

# Formatted by hand: the tables of contents src/xdistill*.h, the examples, and all C++.
formatted = $(wildcard src/*/*.[ch] src/*/*/*.[ch] src/*/*/*.inc tests/*.[ch] tests/helpers/*.h tests/golden/*.[ch] tests/mpi/*.[ch]) \
    $(wildcard fuzz/*.[ch] bench/*.[ch] tools/*.c tools/*/*.[ch] tools/dcp*.h tools/listing.h examples/*/*.[ch])

format: ## Source: lay out the sources with clang-format
	@clang-format -i $(formatted)

check-format: ## Source: fail if format would change something
	@clang-format --dry-run -Werror $(formatted)

prefix = $(DESTDIR)$(PREFIX)

install: xdistill.h lib build/xdistill ## Library: headers, library, tool to DESTDIR/PREFIX
	install -d "$(prefix)/bin" "$(prefix)/include" "$(prefix)/lib" "$(prefix)/share/pkgconfig" "$(prefix)/share/cmake/xdistill"
	install -m 644 build/libxdistill.a build/$(shared) "$(prefix)/lib"
	ln -sf $(shared) "$(prefix)/lib/libxdistill.so"
	install -m 644 $(headers) "$(prefix)/include"
	install -m 755 build/xdistill "$(prefix)/bin"
	install -m 644 cmake/xdistill-config.cmake cmake/xdistill-companions.cmake "$(prefix)/share/cmake/xdistill"
	sed 's|@VERSION@|$(version)|' cmake/xdistill-config-version.cmake.in \
	    > "$(prefix)/share/cmake/xdistill/xdistill-config-version.cmake"
	for name in xdistill xdistill-lib; do sed 's|@VERSION@|$(version)|; s|@PREFIX@|$(PREFIX)|' $$name.pc.in \
	    > "$(prefix)/share/pkgconfig/$$name.pc" || exit 1; done
	@if command -v $(PYTHON) >/dev/null; then $(MAKE) --no-print-directory build/xdistill_ctypes.py && \
	install -d "$(prefix)/share/xdistill" && install -m 644 build/xdistill_ctypes.py "$(prefix)/share/xdistill"; \
	else echo "without the ctypes binding: no $(PYTHON)"; fi

build/xdistill_ctypes.py: xdistill.h tools/api.py tools/api_ctypes.py | build
	$(compiling)CC="$(CC)" $(PYTHON) tools/api.py --build build

# From what is committed; DIST=dir. The archive of a commit has the same bytes everywhere.
DIST ?= build
archive = xdistill-$(version)

dist: ## Library: an archive of the sources and its SHA-256
	git archive --prefix=$(archive)/ HEAD | gzip -9n >"$(DIST)/$(archive).tar.gz"
	cd "$(DIST)" && sha256sum $(archive).tar.gz >$(archive).tar.gz.sha256

uninstall: ## Library: remove what install wrote
	rm -f "$(prefix)/bin/xdistill"
	cd "$(prefix)/include" && rm -f xdistill.h xdistill_cuda.cu xdistill_nccl.h xdistill_mpi.h
	cd "$(prefix)/lib" && rm -f libxdistill.a libxdistill.so $(shared)
	cd "$(prefix)/share" && rm -f pkgconfig/xdistill.pc pkgconfig/xdistill-lib.pc && rm -rf cmake/xdistill xdistill

clean: ## Library: remove build/
	rm -rf build

build build/bench build/examples build/golden.d build/mpi build/networks/nn build/networks/common $(sort $(test_dir) $(test_objects) $(layer_dir)):
	@mkdir -p $@

-include $(wildcard $(sort $(test_dir)/*.d $(test_objects)/*.d) $(layer_dir)/*.d build/golden.d/*.d)
