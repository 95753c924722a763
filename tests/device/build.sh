#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds libhubkv with the kernels for the GPU that torch sees, and no others. -lineinfo gives compute-sanitizer the
# lines of what it finds, and costs nothing.
set -euo pipefail

architecture=$("$PYTHON" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
nvcc=${CUDACXX:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
"$nvcc" --version | tail -n 2
generator=()
command -v ninja >/dev/null && generator=(-G Ninja)
cmake "${generator[@]}" -S . -B "$BUILD" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CUDA_COMPILER="$nvcc" \
    -DCMAKE_CUDA_FLAGS=-lineinfo -DHUBKV_CUDA=ON -DHUBKV_CUDA_ARCHITECTURES="$architecture-real" -DHUBKV_PLUGIN=OFF
cmake --build "$BUILD" --parallel
"$PYTHON" -c 'from hubkv_trt import ops; print("libhubkv", ops.version() + ", CUDA kernels:", ops.has_cuda()); ops.has_cuda() or exit(1)'
