// SPDX-License-Identifier: Apache-2.0
//
// What kernels share: loads and stores of whole vectors, sums over a warp and a block, grids.
#pragma once

#include "common/host_device.h"
#include "common/simt.h"
#include "common/status.h"

#include <cstdint>

namespace hubkv
{

constexpr int32_t kWARP_SIZE = 32;
constexpr unsigned kFULL_WARP = 0xffffffffu;

// ---- vectors ----

template <int kBYTES>
struct VectorOfBytes;

template <>
struct VectorOfBytes<16>
{
    using Type = uint4;
};

template <>
struct VectorOfBytes<8>
{
    using Type = uint2;
};

template <>
struct VectorOfBytes<4>
{
    using Type = uint32_t;
};

template <>
struct VectorOfBytes<2>
{
    using Type = uint16_t;
};

//! 2, 4, 8 or 16 bytes of any type; one load or store instruction moves them.
template <int kBYTES>
using Vector = typename VectorOfBytes<kBYTES>::Type;

//! The address is aligned to kBYTES.
template <int kBYTES>
__device__ inline Vector<kBYTES> loadVector(void const* address)
{
    return *static_cast<Vector<kBYTES> const*>(address);
}

//! The same for data that nothing writes while the kernel runs, which the nearer caches may then hold. Also tells the
//! compiler that an address which was itself read from memory is one of global memory.
template <int kBYTES>
__device__ inline Vector<kBYTES> loadReadOnly(void const* address)
{
    return __ldg(static_cast<Vector<kBYTES> const*>(address));
}

template <int kBYTES>
__device__ inline void storeVector(void* address, Vector<kBYTES> value)
{
    *static_cast<Vector<kBYTES>*>(address) = value;
}

//! The same address, known to the compiler as one of global memory. For addresses that a kernel makes from integers or
//! gets from other lanes: their loads and stores would be generic ones.
template <typename T>
__device__ inline T* globalAddress(T* address)
{
#if defined(__CUDA_ARCH__)
    __builtin_assume(__isGlobal(address));
#endif
    return address;
}

//! Four floats by one instruction; the address is aligned to 16 bytes.
__device__ inline float4 loadFloats(float const* address)
{
    return *reinterpret_cast<float4 const*>(address);
}

//! To global memory. Through L2, as every store: named, because the compiler may take a plain store of four floats apart.
__device__ inline void storeFloats(float* address, float4 value)
{
    __stcg(reinterpret_cast<float4*>(address), value);
}

//! Floats between the 16-byte boundary at or before the address and the address: 0..3.
__device__ inline int32_t floatsPastBoundary(float const* address)
{
    return static_cast<int32_t>(reinterpret_cast<uintptr_t>(address) / sizeof(float) % 4);
}

// ---- warps and blocks; all threads of the warp or block take part ----

__device__ inline int32_t laneOf(uint32_t thread)
{
    return static_cast<int32_t>(thread % kWARP_SIZE);
}

//! Sum over the warp, in every lane. For integers: the order of the additions is not stated.
template <typename T>
__device__ inline T warpSum(T value)
{
    for (int32_t step = kWARP_SIZE / 2; step > 0; step /= 2)
    {
        value += __shfl_xor_sync(kFULL_WARP, value, step);
    }
    return value;
}

__device__ inline float warpMaximum(float value)
{
    for (int32_t step = kWARP_SIZE / 2; step > 0; step /= 2)
    {
        value = fmaxf(value, __shfl_xor_sync(kFULL_WARP, value, step));
    }
    return value;
}

//! Sum over the lanes before this one.
template <typename T>
__device__ inline T warpExclusiveSum(T value)
{
    int32_t const lane = laneOf(threadIdx.x);
    T sum = value;
    for (int32_t step = 1; step < kWARP_SIZE; step *= 2)
    {
        T const before = __shfl_up_sync(kFULL_WARP, sum, step);
        sum += lane >= step ? before : T{0};
    }
    return sum - value;
}

//! Sum over the threads before this one in a block of kTHREADS. warpSums [kTHREADS / 32] is shared; it may be used again
//! after a barrier.
template <int32_t kTHREADS, typename T>
__device__ inline T blockExclusiveSum(T value, T* warpSums)
{
    constexpr int32_t kWARPS = kTHREADS / kWARP_SIZE;
    static_assert(kWARPS <= kWARP_SIZE && kTHREADS % kWARP_SIZE == 0, "one warp sums the warps' sums");
    int32_t const warp = static_cast<int32_t>(threadIdx.x) / kWARP_SIZE;
    int32_t const lane = laneOf(threadIdx.x);
    T const before = warpExclusiveSum(value);
    if (lane == kWARP_SIZE - 1)
    {
        warpSums[warp] = before + value;
    }
    __syncthreads();
    T const sumOfWarp = lane < kWARPS ? warpSums[lane] : T{0};
    T const warpsBefore = warpExclusiveSum(sumOfWarp);
    return before + __shfl_sync(kFULL_WARP, warpsBefore, warp);
}

//! Maximum over a block of kTHREADS, in every thread. warpMaxima as above.
template <int32_t kTHREADS>
__device__ inline float blockMaximum(float value, float* warpMaxima)
{
    constexpr int32_t kWARPS = kTHREADS / kWARP_SIZE;
    value = warpMaximum(value);
    if (laneOf(threadIdx.x) == 0)
    {
        warpMaxima[threadIdx.x / kWARP_SIZE] = value;
    }
    __syncthreads();
    value = warpMaxima[0];
    for (int32_t warp = 1; warp < kWARPS; ++warp)
    {
        value = fmaxf(value, warpMaxima[warp]);
    }
    return value;
}

// ---- grids ----

//! How many blocks of `perBlock` cover `count`, as a grid; refuses what no grid can hold, naming the field.
inline dim3 gridFor(char const* field, int64_t count, int64_t perBlock)
{
    int64_t const blocks = (count + perBlock - 1) / perBlock;
    HUBKV_CHECK(blocks <= kINT32_MAX, "%s: %lld are more than a launch on the GPU can hold", field,
        static_cast<long long>(count));
    return dim3(static_cast<unsigned>(blocks));
}

} // namespace hubkv
