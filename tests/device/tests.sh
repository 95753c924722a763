#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The tests with the marker gpu: the stages' own tests on CUDA tensors, and test_gpu.py. By four processes where
# pytest-xdist is there: most of the time goes to the oracles.
set -euo pipefail

missing=$("$PYTHON" -c 'from importlib.util import find_spec
print(*(name for name in ("pytest", "hypothesis") if find_spec(name) is None))')
if [[ -n $missing ]]; then
    echo "NOT RUN: this Python has no $missing; $PYTHON -m pip install $missing"
    exit 1
fi
parallel=()
"$PYTHON" -c 'import xdist' 2>/dev/null && parallel=(-n 4)
exec "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider "${parallel[@]}" tests/test_gpu.py tests/test_cuda_*.py
