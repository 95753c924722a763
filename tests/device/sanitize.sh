#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# sanitize.sh memcheck|racecheck: compute-sanitizer over every kernel on small shapes, after it has found a planted
# fault. torch takes each tensor from the driver by itself, so that the end of a tensor is the end of an allocation.
# Only kernels of libhubkv are watched.
set -euo pipefail

tool=$1
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
if [[ ! -x $sanitizer ]]; then
    echo "NOT RUN: there is no compute-sanitizer on the search path or in /usr/local/cuda/bin; it is part of the CUDA toolkit"
    exit 1
fi
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
help=$("$sanitizer" --help)
options=(--tool "$tool" --error-exitcode 9 --print-limit 20)
grep -q -- --kernel-name <<<"$help" && options+=(--kernel-name kns=hubkv)
# torch asks the driver things that it may answer with an error; those of our launches are exceptions.
grep -q -- --report-api-errors <<<"$help" && options+=(--report-api-errors no)
if [[ $tool == memcheck ]]; then
    grep -q -- --padding <<<"$help" && options+=(--padding 256)
    planted=("$PYTHON" -m device.planted_read)
    sign="Invalid __global__ read"
else
    options+=(--racecheck-report all)
    nvcc=${CUDACXX:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
    "$nvcc" -arch=native -o "$BUILD/planted_race" tests/device/planted_race.cu
    planted=("$BUILD/planted_race")
    sign="Race reported|hazard detected"
fi

status=0
said=$("$sanitizer" "${options[@]}" "${planted[@]}" 2>&1) || status=$?
if ((status == 0)) || ! grep -qE "$sign" <<<"$said"; then
    printf '%s\nNOT PROVEN: %s did not report the planted fault (exit status %d)\n' "$said" "$tool" "$status"
    exit 1
fi
echo "  the planted fault was reported"
exec "$sanitizer" "${options[@]}" "$PYTHON" -m device.kernels
