// SPDX-License-Identifier: Apache-2.0
//
// One planted fault each, of those that every build of the emulator reports: at meetings of threads. fixture_fault(n)
// runs the n-th.
#include "fixtures.h"

namespace
{

using namespace hubkv;

__global__ void barrierInOneBranch(int* out)
{
    if (threadIdx.x < 40)
    {
        __syncthreads();
    }
    out[threadIdx.x] = 1;
}

__global__ void barriersInBothBranches(int* out)
{
    if (threadIdx.x < 40)
    {
        __syncthreads();
    }
    else
    {
        __syncthreads();
    }
    out[threadIdx.x] = 1;
}

__global__ void unequalTripCounts(int* out)
{
    for (unsigned i = 0; i < 1 + threadIdx.x / 32; ++i)
    {
        out[threadIdx.x] = __syncthreads_or(static_cast<int>(i));
    }
}

__global__ void maskWithoutOwnLane(int* out)
{
    out[threadIdx.x] = __any_sync(0xffffU, 1);
}

__global__ void maskOfAbsentLane(int* out)
{
    if (threadIdx.x % 32 < 16)
    {
        out[threadIdx.x] = __shfl_sync(kFULL, 1, 0);
    }
}

__global__ void masksThatDiffer(int* out)
{
    out[threadIdx.x] = static_cast<int>(__ballot_sync(threadIdx.x % 32 < 16 ? 0xffffU : kFULL, 1));
}

__global__ void maskPastTheBlock(int* out)
{
    __syncwarp(kFULL); // the last warp of 48 threads has 16 lanes
    out[threadIdx.x] = 1;
}

__global__ void collectivesThatDiffer(int* out)
{
    if (threadIdx.x % 32 == 7)
    {
        out[threadIdx.x] = __shfl_sync(kFULL, 1, 0);
    }
    else
    {
        out[threadIdx.x] = __shfl_down_sync(kFULL, 1, 1);
    }
}

__global__ void collectiveAgainstBarrier(int* out)
{
    if (threadIdx.x == 3)
    {
        __syncthreads();
    }
    out[threadIdx.x] = __all_sync(kFULL, 1);
    if (threadIdx.x != 3)
    {
        __syncthreads();
    }
}

__global__ void sourceOutsideMask(int* out)
{
    if (threadIdx.x < 8)
    {
        out[threadIdx.x] = __shfl_down_sync(0xffU, 1, 4);
    }
}

__global__ void widthOfTwelve(int* out)
{
    out[threadIdx.x] = __shfl_xor_sync(kFULL, 1, 1, 12);
}

} // namespace

FIXTURE fixture_fault(int32_t which, int* out, int64_t threads)
{
    constexpr void (*kKERNELS[])(int*) = {barrierInOneBranch, barriersInBothBranches, unequalTripCounts,
        maskWithoutOwnLane, maskOfAbsentLane, masksThatDiffer, maskPastTheBlock, collectivesThatDiffer,
        collectiveAgainstBarrier, sourceOutsideMask, widthOfTwelve};
    return guard([&] { launch(kKERNELS[which], 2, dim3(threads), 0, nullptr, out); });
}
