#!/bin/sh
# lint.sh - formatting, include borders, cppcheck, clang-tidy.
set -u
bad=0
say() { echo "lint: $*"; }

# shellcheck disable=SC2046
clang-format --dry-run -Werror $(git ls-files '*.c' '*.h' '*.cu' '*.cuh') 2>/tmp/lint.$$ || {
    grep error: /tmp/lint.$$ | cut -d: -f1 | sort | uniq -c | head -20
    say "not formatted; make format"
    bad=1
}
rm -f /tmp/lint.$$

# A folder shows the others one header: NAME/NAME.h; base/* and backend/ops.h are open to all.
for f in $(git ls-files 'src/*.c' 'src/*.h'); do
    own=$(echo "$f" | cut -d/ -f2)
    grep -Hn '^#include "' "$f" | sed 's/#include "\([^"]*\)".*/\1/' | while IFS=: read -r where line inc; do
        dir=${inc%%/*}
        [ "$dir" = "$own" ] && continue
        case $inc in
        bgk.h | pack.h | shapes.h) case $f in src/backend/cuda/*) ;; *) echo "$where:$line: includes $inc: src/backend/cuda does" ;; esac ;;
        base/*.h | backend/ops.h | backend/device.h | "$dir/$dir.h") ;;
        job/*.h | output/status.h | output/cat.h | output/merge.h | output/repair.h) [ "$own" = cli ] || echo "$where:$line: includes $inc, which is $dir's own" ;;
        *) echo "$where:$line: includes $inc, which is $dir's own" ;;
        esac
    done
done >/tmp/borders.$$
[ -s /tmp/borders.$$ ] && { cat /tmp/borders.$$; say "includes that reach round a header"; bad=1; }
rm -f /tmp/borders.$$

# Only src/cli prints and exits; environment variables are read in one place, but for faults and the like that tests ask for.
if git grep -nE '\b(printf|puts|exit|abort|getenv)\(' -- 'src/*.c' ':!src/cli' ':!src/job/run.c' ':!src/backend/cuda/fault.c' \
    ':!src/backend/device.c' |
    grep -vE '(sn|fn|vsn|f|buf_)printf|_exit\('; then
    say "printing, exiting or getenv below src/cli"
    bad=1
fi

cppcheck --quiet --std=c11 --enable=warning,portability --inline-suppr --error-exitcode=1 \
    --suppress=missingIncludeSystem --suppress=uninitMemberVar -D_GNU_SOURCE -DBG_VERSION='""' -Isrc -j 2 src tools || {
    say cppcheck
    bad=1
}
# Two files at a time. The kernels of other instruction sets need flags of their own: the compiler sees them.
# The CUDA backend needs CUDA's headers: where they are not, it is left out.
cuda=$(dirname "$(dirname "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")
[ -f "$cuda/include/cuda_runtime_api.h" ] && without='^$' || without='^src/backend/cuda/'
git ls-files 'src/*.c' | grep -vE '_(avx2|avx512|vnni)\.c$' | grep -vE "$without" |
    xargs -P 2 -I{} clang-tidy --quiet --warnings-as-errors='*' {} -- -std=c17 -D_GNU_SOURCE \
        -DBG_VERSION='""' -Isrc -Ikernels -isystem "$cuda/include" >/tmp/tidy.$$ 2>/dev/null || {
    grep -E 'error:|warning:' /tmp/tidy.$$ | sort -u
    say clang-tidy
    bad=1
}
rm -f /tmp/tidy.$$

# No gcc -fanalyzer: in gcc 12 it takes what a caller's struct holds (r->stops = calloc(..)) for a leak.
[ "$bad" = 0 ] && say clean
exit $bad
