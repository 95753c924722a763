// SPDX-License-Identifier: Apache-2.0
//
// A barrier that nothing needs: its removal cannot be noticed.
#include "fixtures.h"

namespace
{

__global__ void ownElement(int* out)
{
    __shared__ int tile[64];
    tile[threadIdx.x] = static_cast<int>(threadIdx.x);
    /* __syncthreads() in a comment is none */
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x];
}

} // namespace

FIXTURE fixture_own_element(int* out)
{
    return hubkv::guard([&] { hubkv::launch(ownElement, 1, 64, 0, nullptr, out); });
}
