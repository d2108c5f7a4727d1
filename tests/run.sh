#!/bin/sh
# run.sh PROGRAM... - runs every unit test program, then the end-to-end tests, and adds up.
# The last line is "N passed, N failed"; the status is 0 only if nothing failed and something ran.
set -u
passed=0
failed=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for program; do
    "$program" >"$log" 2>&1
    rc=$?
    line=$(grep -a 'Synthesis: Tested:' "$log" | tail -1 | sed 's/\x1b\[[0-9;]*m//g')
    p=$(echo "$line" | sed -n 's/.*Passing: *\([0-9]*\).*/\1/p')
    f=$(echo "$line" | sed -n 's/.*Failing: *\([0-9]*\).*/\1/p')
    c=$(echo "$line" | sed -n 's/.*Crashing: *\([0-9]*\).*/\1/p')
    bad=$((${f:-0} + ${c:-0}))
    # A program that fails without a count, or counts no test at all, is one failure.
    if [ -z "$line" ] || { [ "$rc" -ne 0 ] && [ "$bad" -eq 0 ]; }; then bad=$((bad + 1)); fi
    passed=$((passed + ${p:-0}))
    failed=$((failed + bad))
    name=${program##*tests/}
    if [ "$bad" -ne 0 ]; then
        echo "FAIL $name"
        sed 's/^/     /' "$log" | tail -60
    else
        echo "ok   $name (${p:-0})"
    fi
done
if [ "${SAN:-}" != thread ]; then
    for t in tests/tools/*.sh; do
        [ -f "$t" ] || continue
        if sh "$t" "${BUILD:-build}/$(basename "$t" .sh)" >"$log" 2>&1; then
            passed=$((passed + 1))
            echo "ok   $t (1)"
        else
            failed=$((failed + 1))
            echo "FAIL $t"
            sed 's/^/     /' "$log" | tail -20
        fi
    done
    for t in tests/e2e/test_*.py; do
        [ -f "$t" ] || continue
        python3 "$t" >"$log" 2>&1
        rc=$?
        n=$(sed -n 's/^Ran \([0-9]*\) test.*/\1/p' "$log" | tail -1)
        if [ "$rc" -ne 0 ]; then
            failed=$((failed + 1))
            echo "FAIL $t"
            sed 's/^/     /' "$log" | tail -80
        else
            passed=$((passed + ${n:-0}))
            echo "ok   $t (${n:-0})"
        fi
    done
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
