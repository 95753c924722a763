#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# sanitize.sh memcheck|racecheck: compute-sanitizer over every kernel on small shapes. torch takes each tensor from the
# driver by itself, so that the end of a tensor is the end of an allocation. Only kernels of libhubkv are watched.
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
[[ $tool == racecheck ]] && options+=(--racecheck-report all)
[[ $tool == memcheck ]] && grep -q -- --padding <<<"$help" && options+=(--padding 256)

if [[ $tool == memcheck ]]; then
    status=0
    said=$("$sanitizer" "${options[@]}" "$PYTHON" -m device.planted 2>&1) || status=$?
    if ((status == 0)) || ! grep -q "Invalid __global__ read" <<<"$said"; then
        printf '%s\nNOT PROVEN: a planted read outside of memory was not reported\n' "$said"
        exit 1
    fi
    echo "  a planted read outside of memory was reported"
fi
exec "$sanitizer" "${options[@]}" "$PYTHON" -m device.kernels
