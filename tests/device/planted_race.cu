// SPDX-License-Identifier: Apache-2.0
//
// A race on shared memory, for a sanitizer to find: two warps exchange values with no barrier between.
#include <cuda_runtime.h>

namespace hubkv
{

__global__ void exchange(int* out)
{
    __shared__ int values[64];
    values[threadIdx.x] = static_cast<int>(threadIdx.x);
    out[threadIdx.x] = values[63 - threadIdx.x];
}

} // namespace hubkv

int main()
{
    int* out = nullptr;
    if (cudaMalloc(&out, 64 * sizeof(int)) != cudaSuccess)
    {
        return 1;
    }
    hubkv::exchange<<<1, 64>>>(out);
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}
