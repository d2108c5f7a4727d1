# batchgen - see README.md. Two commands set a fresh Debian machine up: make demo, make test.
#
#   make               the binary, build/batchgen, and the tools
#   make demo          installs what is missing, builds, runs a real job on a real small model
#   make test          everything that needs no GPU; SAN=address,undefined or SAN=thread under a sanitizer
#   make one T=unit/base/test_buf [ARGS=--verbose]    one test program
#   make fuzz [SECONDS=60]   every fuzzer for that long
#   make crash [N=200]       kills and resumes jobs N times; simulated lost and failed writes
#   make slurm               four shards under a real Slurm (root; installs it)
#   make lint, make format, make bench, make install [PREFIX=/usr/local] [DESTDIR=], make clean
#
# Without nvcc the build is CPU-only and says so. WERROR=0: warnings are no errors.

comma    := ,
Q        := $(if $(V),,@) # V=1 shows the commands
VERSION  := 0.1.0
PREFIX   ?= /usr/local
CC       ?= gcc
SAN      ?=
BUILD    ?= build$(if $(SAN),-$(subst $(comma),-,$(SAN)))


OPT      ?= -O2
CPPFLAGS += -D_GNU_SOURCE -Isrc -DBG_VERSION='"$(VERSION)"'
WARN     := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wvla \
            -Wwrite-strings -Wformat=2 -Wundef
ifneq ($(WERROR),0)
WARN     += -Werror
endif
CFLAGS   += -std=c17 $(OPT) -g -fno-math-errno -fno-strict-aliasing -ffp-contract=off -pthread $(WARN)
LDFLAGS  += -pthread
LDLIBS   += -ljansson -llz4 -lzstd -lz -lpcre2-8 -lxxhash -lm
ifneq ($(SAN),)
CFLAGS   += -fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=all
LDFLAGS  += -fsanitize=$(SAN)
endif

# Sizes in these folders come from strangers.
STRICT   := src/gguf src/input src/output
$(foreach d,$(STRICT),$(eval $(BUILD)/$(d)/%.o: CFLAGS += -Wconversion))

# Kernels for instruction sets beyond the baseline, by file name; chosen at run time.
$(BUILD)/src/backend/cpu/%.o: OPT := -O3
$(BUILD)/src/backend/cpu/%_avx2.o: CFLAGS += -mavx2 -mfma -mf16c
$(BUILD)/src/backend/cpu/%_avx512.o: CFLAGS += -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512cd -mavx2 -mfma -mf16c -mprefer-vector-width=512
$(BUILD)/src/backend/cpu/%_vnni.o: CFLAGS += -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512cd -mavx512vnni -mavx512vbmi -mavx2 -mfma -mf16c -mprefer-vector-width=512

# Which folders a folder's tests need (transitively); keeps one folder's tests buildable alone.
DEPS_base    :=
DEPS_gguf    := base
DEPS_text    := base gguf
DEPS_input   := base
DEPS_output  := base
DEPS_comm    := base
DEPS_backend := base gguf comm
DEPS_model   := base gguf comm backend
DEPS_engine  := base gguf comm backend model
DEPS_job     := base gguf text input output comm backend model engine
DEPS_cli     := $(DEPS_job) job
MODULES      := base gguf text input output comm backend model engine job cli

srcs = $(shell find src/$(1) -name '*.c' ! -path 'src/cli/main.c' ! -path '*/cuda/*' 2>/dev/null | sort)
objs = $(patsubst %.c,$(BUILD)/%.o,$(call srcs,$(1)))

# The CUDA backend is a library beside the program, which loads it where there is a GPU: so it is built
# where nvcc is (CUDA=0: not at all) and one program serves both kinds of machine.
NVCC     ?= $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
CUDA     ?= $(if $(and $(NVCC),$(shell command -v g++ 2>/dev/null),$(if $(SAN),,y)),1,0)
# Compute capabilities, those that this nvcc knows of; CUDA_ARCHS=native for this machine's alone.
ifeq ($(CUDA),1)
KNOWN    := $(shell $(NVCC) --list-gpu-code 2>/dev/null)
CUDA_ARCHS ?= $(foreach a,80 86 89 90a 100a 120a,$(if $(filter sm_$(patsubst %a,%,$(a)),$(KNOWN)),$(a)))
endif
CUDA_HOME := $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
GENCODE  := $(if $(filter native,$(CUDA_ARCHS)),-arch=native,$(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a)$(comma)code=sm_$(a)))
# Device code is mostly templates: compressed it is a twentieth (nvcc 12.8 and later).
COMPRESS := $(if $(filter 1,$(CUDA)),$(shell $(NVCC) --help 2>/dev/null | grep -q -- '--compress-mode' && echo -compress-mode=size))
CU_OBJS  := $(patsubst %.cu,$(BUILD)/%.o,$(sort $(wildcard kernels/*.cu)))
CUDA_OBJS := $(patsubst %.c,$(BUILD)/%.o,$(sort $(wildcard src/backend/cuda/*.c)))
CUDA_LIB := $(if $(filter 1,$(CUDA)),$(BUILD)/libbatchgen_cuda.so)
TOOLS    := $(patsubst tools/%.c,%,$(shell grep -lsw main tools/*.c))

all: $(BUILD)/batchgen $(addprefix $(BUILD)/,$(TOOLS)) $(CUDA_LIB)
	@echo "built $(BUILD)/batchgen: $(if $(CUDA_LIB),CPU and CUDA ($(CUDA_ARCHS)),CPU backend only$(if $(NVCC),$(if $(SAN),, (nvcc needs g++, or CUDA=0)), (no nvcc found)))"

# -rdynamic: the CUDA library finds bg_* functions in the program.
$(BUILD)/batchgen: $(BUILD)/src/cli/main.o $(foreach m,$(MODULES),$(BUILD)/lib/$(m).a)
	$(Q)$(CC) $(LDFLAGS) -rdynamic -o $@ $< -Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(LDLIBS)

define module_rules
$(BUILD)/lib/$(1).a: $(call objs,$(1))
	@mkdir -p $$(@D)
	@rm -f $$@
	@ar rcs $$@ $$^
endef
$(foreach m,$(MODULES),$(eval $(call module_rules,$(m))))

$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c -o $@ $<

$(CUDA_OBJS): CPPFLAGS += -Ikernels -isystem $(CUDA_HOME)/include
$(CUDA_OBJS): CFLAGS += -fPIC -fvisibility=hidden
$(BUILD)/kernels/%.o: kernels/%.cu
	@mkdir -p $(@D)
	$(Q)$(NVCC) -std=c++17 -O3 -lineinfo $(COMPRESS) $(GENCODE) -t 0 -Ikernels -Xcompiler -fPIC,-fvisibility=hidden -MMD -MP -c -o $@ $<
# An object without a list of its headers beside it (of a build before there were lists) is made again.
$(foreach o,$(CU_OBJS),$(if $(wildcard $(o:.o=.d)),,$(eval $(o): again)))

$(BUILD)/libbatchgen_cuda.so: $(CU_OBJS) $(CUDA_OBJS)
	$(Q)$(NVCC) -shared -cudart static $(GENCODE) -o $@ $^ -ljansson

# tests/unit/MODULE/test_*.c is one Criterion program each; tests/support/*.c goes into all.
TESTS := $(patsubst tests/%.c,%,$(sort $(wildcard tests/unit/*/test_*.c)))
SUPPORT := $(patsubst %.c,$(BUILD)/%.o,$(wildcard tests/support/*.c))
$(BUILD)/tests/%.o: CPPFLAGS += $(if $(filter thread,$(SAN)),-Itests/tsan) -Itests
$(BUILD)/tests/%.o: CFLAGS += $(if $(filter thread,$(SAN)),-Wno-unused-parameter -Wno-unused-variable -Wno-unused-but-set-variable)
# ThreadSanitizer cannot start Criterion's processes: there tests/tsan stands in for it.
RUNNER  := $(if $(filter thread,$(SAN)),$(BUILD)/tests/tsan/main.o)
LIBTEST := $(if $(filter thread,$(SAN)),,-lcriterion)
define test_rules
$(BUILD)/tests/$(1): $(BUILD)/tests/$(1).o $(SUPPORT) $(RUNNER) $(foreach d,$(2) $(DEPS_$(2)),$(BUILD)/lib/$(d).a)
	@mkdir -p $$(@D)
	$(Q)$(CC) $(LDFLAGS) -rdynamic -o $$@ $$(filter %.o,$$^) -Wl,--start-group $$(filter %.a,$$^) -Wl,--end-group $(LIBTEST) $(LDLIBS)
endef
$(foreach t,$(TESTS),$(eval $(call test_rules,$(t),$(word 2,$(subst /, ,$(t))))))

# The CUDA backend's table of shapes is plain C.
$(BUILD)/tests/unit/backend/test_tune_table.o: CPPFLAGS += -Ikernels
$(BUILD)/tests/unit/backend/test_tune_table: $(BUILD)/src/backend/cuda/tune_table.o

# tests/gpu/test_*.c: kernels by themselves, on a GPU. Linked with the kernels and the CUDA backend, so they
# build where nvcc is; `make gpu-test` runs them where a GPU is.
GPU_TESTS := $(if $(CUDA_LIB),$(patsubst %.c,$(BUILD)/%,$(sort $(wildcard tests/gpu/test_*.c))))
$(BUILD)/tests/gpu/%.o: CPPFLAGS += -Ikernels -isystem $(CUDA_HOME)/include
$(BUILD)/tests/gpu/test_%: $(BUILD)/tests/gpu/test_%.o $(CU_OBJS) $(CUDA_OBJS) $(foreach m,$(DEPS_model) model,$(BUILD)/lib/$(m).a)
	$(Q)$(NVCC) -cudart static $(GENCODE) -o $@ $(filter %.o,$^) -Xlinker --start-group $(filter %.a,$^) -Xlinker --end-group -lcriterion $(subst -Wl$(comma),-Xlinker ,$(LDLIBS))
gpu-tests: $(GPU_TESTS)
gpu-test: gpu-tests
	@for t in $(GPU_TESTS); do $$t || exit 1; done

# The same (but test_comm, which forks) and test_golden as single processes, without Criterion, which is what
# compute-sanitizer gets on with; and kernels with EVERY_LANE (matmul.cuh, launch.cuh).
ONE_CU := $(patsubst $(BUILD)/%,$(BUILD)/one/%,$(CU_OBJS))
$(BUILD)/one/kernels/%.o: kernels/%.cu $(wildcard kernels/*.h kernels/*.cuh)
	@mkdir -p $(@D)
	$(Q)if grep -qE '(matmul|few)\.cuh' $<; then $(NVCC) -std=c++17 -O3 -lineinfo $(COMPRESS) $(GENCODE) -t 0 -Ikernels -DEVERY_LANE \
	    -Xcompiler -fPIC,-fvisibility=hidden -c -o $@ $<; else $(MAKE) --no-print-directory $(BUILD)/kernels/$*.o && \
	    cp $(BUILD)/kernels/$*.o $@; fi
$(BUILD)/one/libbatchgen_cuda.so: $(ONE_CU) $(CUDA_OBJS)
	$(Q)$(NVCC) -shared -cudart static $(GENCODE) -o $@ $^ -ljansson
$(BUILD)/one/batchgen: $(BUILD)/batchgen $(BUILD)/one/libbatchgen_cuda.so
	@cp $< $@
$(BUILD)/one/%.o: %.c
	@mkdir -p $(@D)
	$(Q)$(CC) $(CPPFLAGS) -Itests/tsan -Itests -Ikernels -isystem $(CUDA_HOME)/include $(CFLAGS) -Wno-unused-parameter \
	    -Wno-unused-variable -Wno-unused-but-set-variable -Wno-unused-function -MMD -MP -c -o $@ $<
$(BUILD)/one/test_%: $(BUILD)/one/tests/gpu/test_%.o $(BUILD)/one/tests/tsan/main.o $(ONE_CU) $(CUDA_OBJS) $(foreach m,$(DEPS_model) model,$(BUILD)/lib/$(m).a)
	$(Q)$(NVCC) -cudart static $(GENCODE) -o $@ $(filter %.o,$^) -Xlinker --start-group $(filter %.a,$^) -Xlinker --end-group $(subst -Wl$(comma),-Xlinker ,$(LDLIBS))
$(BUILD)/one/golden: $(BUILD)/one/tests/unit/model/test_golden.o $(BUILD)/one/tests/tsan/main.o $(foreach m,$(DEPS_model) model,$(BUILD)/lib/$(m).a) $(BUILD)/one/libbatchgen_cuda.so
	$(Q)$(CC) $(LDFLAGS) -rdynamic -o $@ $(filter %.o,$^) -Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(LDLIBS)
SANITIZED := $(patsubst tests/gpu/%.c,$(BUILD)/one/%,$(filter-out %/test_comm.c %/test_fast.c,$(sort $(wildcard tests/gpu/test_*.c)))) $(BUILD)/one/golden $(BUILD)/one/batchgen
sanitize-tests: $(SANITIZED)
sanitize: sanitize-tests
	@BUILD=$(BUILD) tests/gpu/sanitize.sh

# tools/NAME.c with a main() is build/NAME; tools/NAME_*.c belong to it.
TOOL_DEPS := $(DEPS_model) model input output
define tool_rules
$(BUILD)/$(1): $(patsubst %.c,$(BUILD)/%.o,tools/$(1).c $(wildcard tools/$(1)_*.c)) $(foreach m,$(TOOL_DEPS),$(BUILD)/lib/$(m).a)
	$(Q)$(CC) $(LDFLAGS) -o $$@ $$(filter %.o,$$^) -Wl,--start-group $$(filter %.a,$$^) -Wl,--end-group $(LDLIBS)
endef
$(foreach t,$(TOOLS),$(eval $(call tool_rules,$(t))))

one: $(BUILD)/tests/$(T)
	$(BUILD)/tests/$(T) $(ARGS)

setup:
	@tools/setup.sh

# A fresh machine has no compiler libraries yet, so both install first and build in a second make.
demo: setup
	@$(MAKE) --no-print-directory all
	@tools/demo.sh $(BUILD)/batchgen

test: setup
	@$(MAKE) --no-print-directory test-all

TEST_PROGRAMS := $(addprefix $(BUILD)/tests/,$(TESTS))
# Under ThreadSanitizer: what talks between threads.
THREADED := unit/base/test_queue unit/base/test_ring unit/base/test_ordered unit/engine/test_engine \
            unit/engine/test_replicas \
            unit/comm/test_shm unit/backend/test_pool
ifeq ($(SAN),thread)
TEST_PROGRAMS := $(foreach t,$(THREADED),$(filter $(BUILD)/tests/$(t)%,$(TEST_PROGRAMS)))
endif

test-all: $(if $(filter thread,$(SAN)),,all) $(TEST_PROGRAMS)
	@BUILD=$(BUILD) SAN=$(SAN) tests/run.sh $(TEST_PROGRAMS)

# ---- fuzzing: clang's libFuzzer over the folders that read strangers' bytes --------------------------
SECONDS ?= 60
FUZZERS := $(patsubst tests/fuzz/%.c,%,$(sort $(wildcard tests/fuzz/fuzz_*.c)))
FUZZ_LIBS := base gguf text input output comm backend model engine job
fuzz: setup
	@$(MAKE) --no-print-directory BUILD=build-fuzz CC=clang WERROR=0 OPT=-O1 \
	    CFLAGS="-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -Wno-unknown-warning-option" fuzz-run

define fuzz_rules
$(BUILD)/$(1): $(BUILD)/tests/fuzz/$(1).o $(foreach m,$(FUZZ_LIBS),$(BUILD)/lib/$(m).a)
	$(CC) -fsanitize=fuzzer,address,undefined -o $$@ $$< -Wl,--start-group $$(filter %.a,$$^) -Wl,--end-group $(LDLIBS)
endef
$(foreach f,$(FUZZERS),$(eval $(call fuzz_rules,$(f))))
fuzz-run: $(addprefix $(BUILD)/,$(FUZZERS))
	@SECONDS_EACH=$(SECONDS) tests/fuzz/run.sh $(BUILD) $(FUZZERS)

# ---- crashes: SIGKILL at random moments N times, then simulated lost and failed writes ----------------
N ?= 200
crash: all $(BUILD)/tests/unit/output/test_crash
	@BUILD=$(BUILD) python3 tests/crash/kill.py --kills $(N) $(ARGS)
	@log=$$(mktemp); BATCHGEN_CRASH_ROUNDS=$(or $(ROUNDS),$(N)) $(BUILD)/tests/unit/output/test_crash >$$log 2>&1; rc=$$?; \
	    grep -a 'simulated\|Synthesis\|FAIL' $$log; rm -f $$log; exit $$rc

# Four shards in a real Slurm on this machine; installs slurm-wlm, needs root.
slurm: all
	@BUILD=$(BUILD) tests/slurm/run.sh

# ---- lint ----------------------------------------------------------------------------------------------
C_FILES = $(shell git ls-files '*.c' '*.h' '*.cu' '*.cuh')
format:
	clang-format -i $(C_FILES)
lint: setup
	@tools/lint.sh

bench: all
	@tools/bench.sh $(BUILD)

# ---- install -------------------------------------------------------------------------------------------
SHARE := $(DESTDIR)$(PREFIX)/share
install: all
	install -D -m 755 $(BUILD)/batchgen $(DESTDIR)$(PREFIX)/bin/batchgen
	$(if $(CUDA_LIB),install -D -m 755 $(CUDA_LIB) $(DESTDIR)$(PREFIX)/lib/batchgen/libbatchgen_cuda.so)
	install -D -m 644 tools/batchgen.1 $(SHARE)/man/man1/batchgen.1
	install -d $(SHARE)/batchgen/schemas $(SHARE)/batchgen/jobs $(SHARE)/doc/batchgen
	install -m 644 schemas/*.json $(SHARE)/batchgen/schemas
	install -m 644 jobs/* $(SHARE)/batchgen/jobs
	install -m 644 README.md LICENSE $(SHARE)/doc/batchgen

clean:
	rm -rf build build-*

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
.PHONY: again all one setup demo test test-all fuzz fuzz-run crash slurm format lint bench install clean
.SECONDARY:
