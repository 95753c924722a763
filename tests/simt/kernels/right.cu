// SPDX-License-Identifier: Apache-2.0
//
// Right kernels, and the fixtures' error message.
#include "fixtures.h"

extern "C" __attribute__((visibility("default"))) char const* fixture_error()
{
    return hubkv::lastError();
}

namespace
{

using namespace hubkv;

template <typename T>
__device__ T sumOfWarp(T value)
{
    for (int delta = 16; delta > 0; delta /= 2)
    {
        value += __shfl_down_sync(kFULL, value, delta);
    }
    return value;
}

//! sums[block] = sum of in[block * blockDim.x ...] over blockDim.x elements, by shuffles, static shared memory, a barrier.
template <typename T>
__global__ void __launch_bounds__(1024) blockSums(T const* in, T* sums)
{
    __shared__ T partial[32];
    T sum = sumOfWarp(in[blockIdx.x * blockDim.x + threadIdx.x]);
    if (threadIdx.x % 32 == 0)
    {
        partial[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x < 32)
    {
        sum = sumOfWarp(threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : T(0));
        if (threadIdx.x == 0)
        {
            sums[blockIdx.x] = sum;
        }
    }
}

//! Reverses halves of a block through dynamic shared memory; counts positives with atomics and with ballots.
__global__ void reverseHalves(__half const* in, __half* out, int* positives, unsigned long long* total)
{
    HUBKV_DYNAMIC_SHARED(__half, tile);
    __shared__ unsigned count;
    int const i = static_cast<int>(threadIdx.x);
    if (i == 0)
    {
        count = 0;
    }
    tile[i] = in[i];
    __syncthreads();
    bool const positive = __half2float(in[i]) > 0;
    unsigned const ballot = __ballot_sync(kFULL, positive);
    if (i % 32 == 0)
    {
        atomicAdd(&count, static_cast<unsigned>(__popc(ballot)));
    }
    out[i] = tile[blockDim.x - 1 - i];
    int const counted = __syncthreads_count(positive);
    if (i == 0)
    {
        positives[0] = static_cast<int>(count);
        positives[1] = counted;
    }
    atomicMax(total, static_cast<unsigned long long>(i));
}

//! Within a warp, memory ordered by __syncwarp: each pass every lane takes its right neighbour's value.
__global__ void rotate(int const* in, int* out, int passes)
{
    __shared__ int ring[32];
    ring[threadIdx.x] = in[threadIdx.x];
    for (int pass = 0; pass < passes; ++pass)
    {
        __syncwarp(kFULL);
        int const next = ring[(threadIdx.x + 1) % 32];
        __syncwarp(kFULL);
        ring[threadIdx.x] = next;
    }
    out[threadIdx.x] = ring[threadIdx.x];
}

//! Which block and thread came when.
__global__ void order(unsigned* ticket, unsigned* out)
{
    out[atomicAdd(ticket, 1U)] = blockIdx.x * blockDim.x + threadIdx.x;
}

//! All the shuffles and votes of a warp.
__global__ void warpFunctions(int* out)
{
    int const lane = static_cast<int>(threadIdx.x);
    out[lane] = __shfl_sync(kFULL, lane, 5);
    out[32 + lane] = __shfl_up_sync(kFULL, lane, 3);
    out[64 + lane] = __shfl_down_sync(kFULL, lane, 3, 16);
    out[96 + lane] = static_cast<int>(__shfl_xor_sync(kFULL, static_cast<double>(lane), 17));
    out[128 + lane] = static_cast<int>(__shfl_sync(kFULL, int64_t{lane}, lane + 1, 8));
    out[160 + lane] = static_cast<int>(__ballot_sync(kFULL, lane % 3 == 0));
    out[192 + lane] = __any_sync(kFULL, lane == 31) + 2 * __all_sync(kFULL, lane < 31);
    if (lane < 16)
    {
        out[lane] += __shfl_xor_sync(0xffffU, lane, 1);
    }
}

} // namespace

FIXTURE fixture_block_sums(float const* in, float* sums, int64_t blocks, int64_t threads)
{
    return guard([&] { launch(blockSums<float>, dim3(blocks), dim3(threads), 0, nullptr, in, sums); });
}

FIXTURE fixture_block_sums_double(double const* in, double* sums, int64_t blocks, int64_t threads)
{
    return guard([&] { launch(blockSums<double>, dim3(blocks), dim3(threads), 0, nullptr, in, sums); });
}

FIXTURE fixture_reverse(void const* in, void* out, int* positives, unsigned long long* total, int64_t threads)
{
    return guard(
        [&]
        {
            launch(reverseHalves, 1, dim3(threads), threads * sizeof(__half), nullptr, static_cast<__half const*>(in),
                static_cast<__half*>(out), positives, total);
        });
}

FIXTURE fixture_rotate(int const* in, int* out, int passes)
{
    return guard([&] { launch(rotate, 1, 32, 0, nullptr, in, out, passes); });
}

FIXTURE fixture_order(unsigned* ticket, unsigned* out, int64_t blocks, int64_t threads)
{
    return guard([&] { launch(order, dim3(blocks), dim3(threads), 0, nullptr, ticket, out); });
}

FIXTURE fixture_warp_functions(int* out)
{
    return guard([&] { launch(warpFunctions, 1, 32, 0, nullptr, out); });
}

FIXTURE fixture_launch(int64_t grid, int64_t block, int64_t sharedBytes)
{
    return guard([&] { launch(order, dim3(grid), dim3(block), sharedBytes, nullptr, nullptr, nullptr); });
}
