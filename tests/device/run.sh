#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Everything that needs a GPU, in one command of less than five minutes:
#
#   tests/device/run.sh [SECTION ...]      all sections by default
#
#   build       the core with its CUDA kernels, for this machine's GPU alone
#   kernels     every kernel against its oracle on small shapes, and on wrong tables
#   graphs      CUDA graphs captured once and replayed over other tables
#   streams     the current stream, and no waiting
#   tests       the tests that carry the marker gpu, by pytest
#   memcheck    compute-sanitizer over the small shapes, after it has found a planted fault
#   racecheck   the same for shared memory
#   benchmark   achieved over copy bandwidth, torch beside
#
# Needs a GPU and its driver, nvcc, cmake, a C++ compiler and a Python with torch and numpy; for `tests` also pytest and
# hypothesis, for memcheck and racecheck compute-sanitizer. What is missing fails its section, and says so.
#
#   PYTHON=python3   BUILD=build/device   OUT=FOLDER (there: run.log, summary.json, benchmark.json)
#
# Exit status: 0 where all sections asked for passed. A target that the benchmark misses is printed, but is no failure.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export PYTHON=${PYTHON:-python3}
export BUILD=${BUILD:-$PWD/build/device}
export RESULTS=${OUT:-$BUILD/results}
export HUBKV_LIBRARY=$BUILD/libhubkv.so
export PYTHONPATH=$PWD/python:$PWD/tests PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ALL=(build kernels graphs streams tests memcheck racecheck benchmark)
WANTED=("${@:-${ALL[@]}}")
for name in "${WANTED[@]}"; do
    if [[ " ${ALL[*]} " != *" $name "* ]]; then
        echo "section: '$name' is not one of ${ALL[*]}" >&2
        exit 2
    fi
done
SUMMARY=()
FAILED=0
mkdir -p "$RESULTS"

# section NAME SECONDS COMMAND...
section()
{
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    [[ " ${WANTED[*]} " == *" $name "* ]] || return 0
    printf '\n== %s\n' "$name"
    timeout --kill-after=10 "$limit" "$@"
    status=$?
    local seconds=$((SECONDS - start)) verdict=passed
    if ((status)); then
        FAILED=1
        verdict="FAILED (exit status $status)"
        ((status == 124 || status == 137)) && verdict="FAILED (took more than $limit s)"
    fi
    printf -- '-- %s: %s, %d s\n' "$name" "$verdict" "$seconds"
    SUMMARY+=("$(printf '{"section": "%s", "result": "%s", "seconds": %d}' "$name" "$verdict" "$seconds")")
    return "$status"
}

main()
{
    printf '== machine\n'
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem --format=csv,noheader
    "$PYTHON" -c 'import sys, torch; print("Python", sys.version.split()[0] + ", torch", torch.__version__)
torch.cuda.is_available() or sys.exit("torch sees no GPU")' || return 1
    if section build 150 tests/device/build.sh; then
        section kernels 60 "$PYTHON" -m device.kernels
        section graphs 60 "$PYTHON" -m device.graphs
        section streams 60 "$PYTHON" -m device.streams
        section tests 120 tests/device/tests.sh
        section memcheck 90 tests/device/sanitize.sh memcheck
        section racecheck 90 tests/device/sanitize.sh racecheck
        section benchmark 90 "$PYTHON" benchmarks/device.py --json "$RESULTS/benchmark.json"
    fi
    printf '\n== summary, %d s\n' "$SECONDS"
    printf '%s\n' "${SUMMARY[@]}" | tr -d '{}"'
    ((FAILED)) && printf 'something FAILED\n' || printf 'all passed\n'
    printf '{"seconds": %d, "passed": %s, "sections": [%s]}\n' "$SECONDS" "$( ((FAILED)) && echo false || echo true)" \
        "$(IFS=,; echo "${SUMMARY[*]}")" >"$RESULTS/summary.json"
    return "$FAILED"
}

main 2>&1 | tee "$RESULTS/run.log"
exit "${PIPESTATUS[0]}"
