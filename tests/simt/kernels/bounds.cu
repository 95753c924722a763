// SPDX-License-Identifier: Apache-2.0
//
// Overruns by `past` elements, for the AddressSanitizer build; past = 0 is right.
#include "fixtures.h"

namespace
{

using namespace hubkv;

//! Not inlined: the compiler knows nothing of the array's size here.
template <typename T>
__device__ __attribute__((noinline)) T& at(T* array, int i)
{
    return array[i];
}

__global__ void globalRead(int const* in, int* out, int past)
{
    out[threadIdx.x] = in[threadIdx.x + past];
}

__global__ void globalWrite(int const* in, int* out, int past)
{
    out[threadIdx.x + past] = in[threadIdx.x];
}

__global__ void globalAtomic(int const* in, int* out, int past)
{
    atomicAdd(out + threadIdx.x + past, in[threadIdx.x]);
}

__global__ void staticShared(int const* in, int* out, int past)
{
    __shared__ int tile[64];
    at(tile, threadIdx.x + past) = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = at(tile, threadIdx.x + past);
}

template <int kCOLUMNS>
__global__ void staticSharedOfTemplate(int const* in, int* out, int past)
{
    __shared__ __half tile[64 / kCOLUMNS][kCOLUMNS];
    at(&tile[0][0], threadIdx.x + past) = __float2half(static_cast<float>(in[threadIdx.x]));
    __syncthreads();
    out[threadIdx.x] = static_cast<int>(__half2float(at(&tile[0][0], threadIdx.x + past)));
}

__global__ void dynamicShared(int const* in, int* out, int past)
{
    HUBKV_DYNAMIC_SHARED(int, tile);
    at(tile, threadIdx.x + past) = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = at(tile, threadIdx.x + past);
}

__global__ void local(int const* in, int* out, int past)
{
    int values[4];
    for (int i = 0; i < 4; ++i)
    {
        values[i] = in[i];
    }
    out[threadIdx.x] = at(values, threadIdx.x % 4 + past * 4);
}

__global__ void misaligned(int const* in, int* out, int past)
{
    if (threadIdx.x < 8)
    {
        out[threadIdx.x] = reinterpret_cast<int4 const*>(in + past)[threadIdx.x].x;
    }
}

} // namespace

FIXTURE fixture_bounds(int32_t which, int const* in, int* out, int32_t past)
{
    constexpr void (*kKERNELS[])(int const*, int*, int) = {globalRead, globalWrite, globalAtomic, staticShared,
        staticSharedOfTemplate<8>, dynamicShared, local, misaligned};
    return guard([&] { launch(kKERNELS[which], 1, 64, 64 * sizeof(int), nullptr, in, out, past); });
}
