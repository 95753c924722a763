// SPDX-License-Identifier: Apache-2.0
//
// Races and uninitialised reads, one each, for the race build; fixture_race(n, planted = 0) runs the right twin.
#include "fixtures.h"

#include <cstring>

namespace
{

using namespace hubkv;

//! Written by one warp, read by another.
__global__ void sharedAcrossWarps(int* out, bool planted)
{
    __shared__ int tile[64];
    tile[threadIdx.x] = static_cast<int>(threadIdx.x);
    if (!planted)
    {
        __syncthreads();
    }
    out[threadIdx.x] = tile[63 - threadIdx.x];
}

//! Read by a neighbour lane; a shuffle orders nothing.
__global__ void sharedWithinWarp(int* out, bool planted)
{
    __shared__ int tile[64];
    tile[threadIdx.x] = 1;
    __shfl_xor_sync(kFULL, 1, 1);
    if (!planted)
    {
        __syncwarp(kFULL);
    }
    out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

//! Overwritten in the next pass while others may still read.
__global__ void sharedWriteAfterRead(int* out, bool planted)
{
    HUBKV_DYNAMIC_SHARED(int, tile);
    int sum = 0;
    for (int pass = 0; pass < 2; ++pass)
    {
        tile[threadIdx.x] = pass;
        __syncthreads();
        sum += tile[(threadIdx.x + 33) % 64];
        if (!planted)
        {
            __syncthreads();
        }
    }
    out[threadIdx.x] = sum;
}

//! Two lanes write one half each, or the same byte.
__global__ void sharedBytes(int* out, bool planted)
{
    __shared__ unsigned char tile[64];
    tile[planted ? threadIdx.x / 2 : threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = tile[planted ? threadIdx.x / 2 : threadIdx.x];
}

//! Stored 16 bytes at a time, read by the word.
__global__ void sharedVectors(int* out, bool planted)
{
    __shared__ __align__(16) int tile[256];
    reinterpret_cast<int4*>(tile)[threadIdx.x] = make_int4(1, 2, 3, 4);
    if (!planted)
    {
        __syncthreads();
    }
    out[threadIdx.x] = tile[threadIdx.x];
}

//! The same through memcpy of a fixed size, and halves: neighbours in one word are no race.
__global__ void sharedHalves(int* out, bool planted)
{
    __shared__ __align__(8) __half tile[256];
    __half const ones[4] = {__float2half(1), __float2half(1), __float2half(1), __float2half(1)};
    std::memcpy(tile + threadIdx.x * 4, ones, sizeof(ones));
    if (!planted)
    {
        __syncthreads();
    }
    tile[threadIdx.x] = __float2half(2);
    __syncthreads();
    out[threadIdx.x] = static_cast<int>(__half2float(tile[threadIdx.x]));
}

//! A barrier of half a warp does not order the other half.
__global__ void halfWarpBarrier(int* out, bool planted)
{
    __shared__ int tile[64];
    unsigned const lane = threadIdx.x % 32;
    tile[threadIdx.x] = 1;
    __syncwarp(lane < 16 ? 0xffffU : 0xffff0000U);
    out[threadIdx.x] = tile[planted ? threadIdx.x ^ 16 : threadIdx.x ^ 1];
}

//! An atomic orders nothing but itself.
__global__ void sharedAtomicThenRead(int* out, bool planted)
{
    __shared__ int count;
    if (threadIdx.x == 0)
    {
        count = 0;
    }
    __syncthreads();
    atomicAdd(&count, 1);
    if (!planted)
    {
        __syncthreads();
    }
    out[threadIdx.x] = count;
}

__global__ void uninitialisedStatic(int* out, bool planted)
{
    __shared__ int tile[65];
    tile[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x + planted];
}

__global__ void uninitialisedDynamic(int* out, bool planted)
{
    HUBKV_DYNAMIC_SHARED(int, tile);
    if (!planted || threadIdx.x != 17)
    {
        tile[threadIdx.x] = 1;
    }
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

__global__ void uninitialisedCounter(int* out, bool planted)
{
    __shared__ int count;
    if (!planted && threadIdx.x == 0)
    {
        count = 0;
    }
    __syncthreads();
    atomicAdd(&count, 1);
    out[threadIdx.x] = 0;
}

__global__ void globalWithinBlock(int* out, bool planted)
{
    out[threadIdx.x] = 1;
    if (!planted)
    {
        __syncthreads();
    }
    out[64 + threadIdx.x] = out[63 - threadIdx.x];
}

//! Each block's slice, or all blocks the same.
__global__ void globalAcrossBlocks(int* out, bool planted)
{
    out[(planted ? 0 : blockIdx.x * 64) + threadIdx.x] = 1;
}

//! Reads what another block wrote, after a fence and an atomic: blocks are not ordered.
__global__ void globalReadAcrossBlocks(int* out, bool planted)
{
    out[blockIdx.x * 64 + threadIdx.x] = 1;
    __threadfence();
    __syncthreads();
    atomicAdd(out + 128, 1);
    if (planted)
    {
        out[129 + blockIdx.x * 64 + threadIdx.x] = out[(1 - blockIdx.x) * 64 + threadIdx.x];
    }
}

//! Blocks that only read one place may be many; one that then writes it is one too many.
__global__ void globalWriteAfterReadAcrossBlocks(int* out, bool planted)
{
    int const first = out[0];
    out[64 + blockIdx.x * 64 + threadIdx.x] = first;
    __syncthreads();
    if (planted && threadIdx.x == 0)
    {
        out[0] = 1;
    }
}

//! A plain write beside atomics of other blocks.
__global__ void globalAtomicAndWrite(int* out, bool planted)
{
    if (planted && threadIdx.x == 5)
    {
        out[0] = 1;
    }
    else
    {
        atomicAdd(out, 1);
    }
}

__global__ void pastDynamicShared(int* out, bool planted)
{
    HUBKV_DYNAMIC_SHARED(int, tile);
    tile[threadIdx.x + planted] = 1;
    __syncthreads();
    out[threadIdx.x] = 1;
}

} // namespace

//! out [256]
FIXTURE fixture_race(int32_t which, int* out, int32_t planted)
{
    static constexpr struct
    {
        void (*kernel)(int*, bool);
        unsigned blocks;
    } kCASES[] = {{sharedAcrossWarps, 1}, {sharedWithinWarp, 1}, {sharedWriteAfterRead, 1}, {sharedBytes, 1},
        {sharedVectors, 1}, {sharedHalves, 1}, {halfWarpBarrier, 1}, {sharedAtomicThenRead, 1},
        {uninitialisedStatic, 1}, {uninitialisedDynamic, 1}, {uninitialisedCounter, 1}, {globalWithinBlock, 1},
        {globalAcrossBlocks, 2}, {globalReadAcrossBlocks, 2}, {globalWriteAfterReadAcrossBlocks, 2},
        {globalAtomicAndWrite, 2}, {pastDynamicShared, 1}};
    auto const& one = kCASES[which];
    return guard([&] { launch(one.kernel, one.blocks, 64, 64 * sizeof(int), nullptr, out, planted != 0); });
}
