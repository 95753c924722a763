// SPDX-License-Identifier: Apache-2.0
//
// What goes on around attendRows: mergeParts puts the parts of a head together, in their order in the work list, and
// new rows are brought into a shape that can be read by 16 bytes.
#pragma once

#include "attend/attend_arguments.h"
#include "attend/attend_elements.h"

namespace hubkv
{
namespace
{

//! The first of `count` items that is not of a head before `index`; items ascend by head (of others, any place).
__device__ int32_t firstItemOf(WorkItem const* work, int32_t count, int64_t Hkv, int64_t index)
{
    int32_t low = 0;
    int32_t high = count;
    while (low < high)
    {
        int32_t const step = (high - low - 1) / kWARP_SIZE + 1;
        int64_t const probe = low + static_cast<int64_t>(laneOf(threadIdx.x)) * step;
        bool const before = probe < high && work[probe].sequence * Hkv + work[probe].head < index;
        int32_t const lanes = __popc(__ballot_sync(kFULL_WARP, before));
        int64_t const end = low + static_cast<int64_t>(lanes) * step;
        low = lanes == 0 ? low : static_cast<int32_t>(end) - step + 1;
        high = end < high ? static_cast<int32_t>(end) : high;
    }
    return low;
}

//! A block merges the parts of one query: warp w has parts w, w + 4, ... of the head's items and tail pieces.
template <typename T>
__global__ void __launch_bounds__(kTHREADS) mergeParts(AttendArguments const arguments)
{
    constexpr int32_t kCOLUMNS = kMAX_HEAD_DIM / kWARP_SIZE; // of a lane
    __shared__ float warpValues[kWARPS][kMAX_HEAD_DIM];
    __shared__ float warpSums[kWARPS];
    hubkv_attend_params const& params = arguments.params;
    int64_t const Hkv = params.cache.Hkv;
    int32_t const D = static_cast<int32_t>(params.cache.D);
    int32_t const group = arguments.group;
    int64_t const index = blockIdx.x / arguments.queries;
    int32_t const query = static_cast<int32_t>(blockIdx.x - index * arguments.queries);
    int64_t const b = index / Hkv;
    int64_t const head = index - b * Hkv;
    int32_t const token = query / group;
    int64_t const row = (b * params.Tq + token) * params.Hq + head * group + query - token * group;
    T* const out = static_cast<T*>(arguments.arrays.out) + row * D;
    if (token >= newTokens(arguments, b))
    {
        for (int32_t d = threadIdx.x; d < D; d += kTHREADS)
        {
            Elements<T>::store(out + d, 0.F);
        }
        return;
    }

    CacheView const cache(params.cache, arguments.arrays.arena);
    WorkItem const* const work = arguments.arrays.work + params.layer * params.cache.capacity;
    int32_t const count = static_cast<int32_t>(
        max(int64_t{0}, min(int64_t{arguments.arrays.workCount[params.layer]}, params.cache.capacity)));
    int32_t const firstItem = firstItemOf(work, count, Hkv, index);
    int32_t const items = max(0, firstItemOf(work, count, Hkv, index + 1) - firstItem);
    int64_t const parts = items + tailPiecesOf(arguments, cache.tailTokens(arguments.arrays.tailLengths[b]));

    // Null for an item of another head, in a list that is not sorted.
    auto const slotOf = [&](int64_t part) -> float const*
    {
        if (part >= parts)
        {
            return nullptr;
        }
        int64_t slot = params.cache.capacity + index * arguments.tailPieces + part - items;
        if (part < items)
        {
            slot = firstItem + part;
            if (work[slot].sequence != b || work[slot].head != head)
            {
                return nullptr;
            }
        }
        return arguments.slots + slot * arguments.slotFloats;
    };

    int32_t const lane = laneOf(threadIdx.x);
    int32_t const warp = static_cast<int32_t>(threadIdx.x) / kWARP_SIZE;
    float maximum = kNO_LOGIT;
    for (int64_t part = lane; part < parts; part += kWARP_SIZE)
    {
        float const* const slot = slotOf(part);
        maximum = slot != nullptr ? fmaxf(maximum, slot[query]) : maximum;
    }
    float const shift = shiftOf(warpMaximum(maximum));

    float sum = 0.F; // of this lane's parts
    float values[kCOLUMNS];
#pragma unroll
    for (int32_t i = 0; i < kCOLUMNS; ++i)
    {
        values[i] = 0.F;
    }
    for (int64_t first = warp; first < parts; first += kTHREADS)
    {
        // Each lane looks one part up, then all add the values of each.
        float const* const slot = slotOf(first + lane * kWARPS);
        float weight = 0.F;
        if (slot != nullptr)
        {
            weight = exp2f(slot[query] - shift);
            sum = fmaf(weight, slot[arguments.queries + query], sum);
        }
        int64_t const offset = slot != nullptr ? slot - arguments.slots : 0;
        int32_t const there = static_cast<int32_t>(min(int64_t{kWARP_SIZE}, (parts - first - 1) / kWARPS + 1));
#pragma unroll 4
        for (int32_t source = 0; source < there; ++source)
        {
            float const partWeight = __shfl_sync(kFULL_WARP, weight, source);
            float const* const from = arguments.slots + __shfl_sync(kFULL_WARP, offset, source) + 2 * arguments.queries
                + static_cast<int64_t>(query) * D;
#pragma unroll
            for (int32_t i = 0; i < kCOLUMNS; ++i)
            {
                int32_t const d = i * kWARP_SIZE + lane;
                if (partWeight != 0.F && d < D)
                {
                    values[i] = fmaf(partWeight, from[d], values[i]);
                }
            }
        }
    }
    sum = warpSum(sum);
    if (lane == 0)
    {
        warpSums[warp] = sum;
    }
#pragma unroll
    for (int32_t i = 0; i < kCOLUMNS; ++i)
    {
        warpValues[warp][i * kWARP_SIZE + lane] = values[i];
    }
    __syncthreads();
    sum = warpSums[0] + warpSums[1] + warpSums[2] + warpSums[3];
    static_assert(kWARPS == 4, "four sums");
    float const factor = sum != 0.F ? 1.F / sum : 0.F;
    for (int32_t d = threadIdx.x; d < D; d += kTHREADS)
    {
        float const value = warpValues[0][d] + warpValues[1][d] + warpValues[2][d] + warpValues[3][d];
        Elements<T>::store(out + d, value * factor);
    }
}

//! Zeros for the tokens that are not real; mergeParts does it where there are parts. A block takes whole tokens.
__global__ void __launch_bounds__(kTHREADS) clearPadding(AttendArguments const arguments)
{
    hubkv_attend_params const& params = arguments.params;
    for (int64_t token = blockIdx.x; token < params.cache.B * params.Tq; token += gridDim.x)
    {
        int64_t const b = token / params.Tq;
        if (token - b * params.Tq < newTokens(arguments, b))
        {
            continue;
        }
        bool const wide = params.cache.dtype == HUBKV_FLOAT32;
        int64_t const elements = params.Hq * params.cache.D;
        char* const out = static_cast<char*>(arguments.arrays.out) + token * elements * (wide ? 4 : 2);
        for (int64_t i = threadIdx.x; i < elements; i += kTHREADS)
        {
            wide ? storeVector<4>(out + i * 4, 0) : storeVector<2>(out + i * 2, 0);
        }
    }
}

//! Copies new rows with a stride, or off the 16-byte grid, together: [tokens, Hkv, D]. A block takes tokens.
template <int32_t kBYTES>
__global__ void __launch_bounds__(kTHREADS) packRows(
    char const* k, char const* v, int64_t kStride, int64_t vStride, int64_t tokens, int64_t width, char* kTo, char* vTo)
{
    for (int64_t token = blockIdx.x; token < tokens; token += gridDim.x)
    {
        for (int64_t i = threadIdx.x; i < width; i += kTHREADS)
        {
            int64_t const to = (token * width + i) * kBYTES;
            storeVector<kBYTES>(kTo + to, loadVector<kBYTES>(k + (token * kStride + i) * kBYTES));
            storeVector<kBYTES>(vTo + to, loadVector<kBYTES>(v + (token * vStride + i) * kBYTES));
        }
    }
}

} // namespace
} // namespace hubkv
