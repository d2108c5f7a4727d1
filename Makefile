# batchgen - see README.md. Two commands set a fresh Debian machine up: make demo, make test.
#
#   make            the binary, build/batchgen
#   make test       everything that needs no GPU        SAN=address,undefined or SAN=thread: under a sanitizer
#   make lint       formatting, static analysis, include borders
#   make one T=unit/test_buf     one test program, built and run
#
# Without nvcc the build is CPU-only and says so.

comma    := ,
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

srcs = $(shell find src/$(1) -name '*.c' ! -path 'src/cli/main.c' 2>/dev/null | sort)
objs = $(patsubst %.c,$(BUILD)/%.o,$(call srcs,$(1)))

all: $(BUILD)/batchgen

$(BUILD)/batchgen: $(BUILD)/src/cli/main.o $(foreach m,$(MODULES),$(BUILD)/lib/$(m).a)
	$(CC) $(LDFLAGS) -o $@ $< -Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(LDLIBS)

define module_rules
$(BUILD)/lib/$(1).a: $(call objs,$(1))
	@mkdir -p $$(@D)
	@rm -f $$@
	@ar rcs $$@ $$^
endef
$(foreach m,$(MODULES),$(eval $(call module_rules,$(m))))

$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c -o $@ $<

# tests/unit/MODULE/test_*.c is one Criterion program each; tests/support/*.c goes into all.
TESTS := $(patsubst tests/%.c,%,$(sort $(wildcard tests/unit/*/test_*.c)))
SUPPORT := $(patsubst %.c,$(BUILD)/%.o,$(wildcard tests/support/*.c))
$(BUILD)/tests/%.o: CPPFLAGS += -Itests
define test_rules
$(BUILD)/tests/$(1): $(BUILD)/tests/$(1).o $(SUPPORT) $(foreach d,$(2) $(DEPS_$(2)),$(BUILD)/lib/$(d).a)
	@mkdir -p $$(@D)
	$(CC) $(LDFLAGS) -o $$@ $$(filter %.o,$$^) -Wl,--start-group $$(filter %.a,$$^) -Wl,--end-group -lcriterion $(LDLIBS)
endef
$(foreach t,$(TESTS),$(eval $(call test_rules,$(t),$(word 2,$(subst /, ,$(t))))))

one: $(BUILD)/tests/$(T)
	$(BUILD)/tests/$(T) $(ARGS)

clean:
	rm -rf build build-*

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
.PHONY: all one clean
.SECONDARY:
