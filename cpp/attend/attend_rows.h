// SPDX-License-Identifier: Apache-2.0
//
// attendRows goes over the rows: a block takes a run of rows of one kv head, or (many queries) some queries over all
// rows of their head. Its warps share the rows out, and pairs or fours of them the queries, so that rows are read from
// memory once.
#pragma once

#include "attend/attend_arguments.h"
#include "attend/attend_device.h"

namespace hubkv
{
namespace
{

//! How many blocks of attendRows share a multiprocessor at least: 3 have 168 registers a thread, 4 have 128. One fewer
//! where the compiler would otherwise spill on the way to the loop.
constexpr int32_t leastBlocks(int32_t vectors, int32_t queries)
{
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890)
    return vectors * queries <= 2 && queries < 2 ? 4 : 3;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 1000
    return vectors * queries <= 2 ? 4 : vectors * queries < 8 ? 3 : 2;
#else
    return vectors * queries <= 2 ? 4 : 3;
#endif
}

//! The part of the rows of one (sequence, kv head) that a block attends to.
struct BlockRows
{
    int64_t b;
    int64_t head;
    int64_t firstCompact;
    int64_t endCompact; // cut at the rows that there are
    int64_t firstTail;
    int64_t endTail;
    int32_t newRows;
};

//! False where the block has nothing to do: there is no such item, or piece, or it names no head of this cache.
__device__ bool rowsOfBlock(AttendArguments const& arguments, CacheView const& cache, int64_t unit, BlockRows& rows)
{
    hubkv_cache_params const& params = arguments.params.cache;
    rows = BlockRows{0, 0, 0, 0, 0, 0, 0};
    bool const split = arguments.slots != nullptr;
    if (split && unit < params.capacity)
    {
        if (unit >= arguments.arrays.workCount[arguments.params.layer])
        {
            return false;
        }
        WorkItem const item = arguments.arrays.work[arguments.params.layer * params.capacity + unit];
        rows.b = item.sequence;
        rows.head = item.head;
        rows.firstCompact = max(item.firstRow, 0);
        rows.endCompact = static_cast<int64_t>(item.firstRow) + item.rows;
        return item.sequence >= 0 && item.sequence < params.B && item.head >= 0 && item.head < params.Hkv;
    }
    int64_t const number = split ? unit - params.capacity : unit;
    int64_t const pieces = split ? arguments.tailPieces : 1;
    int64_t const index = number / pieces;
    int64_t const piece = number - index * pieces;
    rows.b = index / params.Hkv;
    rows.head = index - rows.b * params.Hkv;
    rows.endCompact = split ? 0 : kINT64_MAX;
    int64_t const tokens = cache.tailTokens(arguments.arrays.tailLengths[rows.b]);
    int64_t const used = split ? tailPiecesOf(arguments, tokens) : 1;
    if (piece >= used)
    {
        return false;
    }
    rows.firstTail = tokens * piece / used;
    rows.endTail = tokens * (piece + 1) / used;
    rows.newRows = piece == used - 1 ? newTokens(arguments, rows.b) : 0;
    return true;
}

//! Bytes from one address to another, of two arrays.
__device__ int64_t distance(void const* from, void const* to)
{
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from));
}

//! The softmax of one warp's tile of queries over its share of the block's rows.
template <typename Softmax>
__device__ void addRows(AttendArguments const& arguments, CacheView const& cache, BlockRows const& block,
    float const* queries, int32_t firstQuery, int32_t slice, int32_t slices, Softmax& softmax)
{
    hubkv_attend_params const& params = arguments.params;
    TailView const tail{cache, params.layer, block.head};
    HeadRows const compact =
        cache.headRows(arguments.arrays.segments + block.b * kSEGMENT_FIELDS, params.layer, block.head);
    // One loop over the three kinds of rows: the code for a row is there once.
#pragma unroll 1
    for (int32_t kind = 0; kind < 3; ++kind)
    {
        AttendRows rows{0, 0, 0, nullptr, nullptr, cache.rowBytes, 0, nullptr};
        if (kind == 0)
        {
            int64_t const count = min(block.endCompact, compact.rows) - block.firstCompact;
            rows.count = static_cast<int32_t>(max(int64_t{0}, count));
            rows.keys = compact.k + block.firstCompact * cache.rowBytes;
            rows.valueOffset = distance(compact.k, compact.v);
            rows.bias = compact.bias != nullptr ? compact.bias + block.firstCompact : nullptr;
        }
        else if (kind == 1)
        {
            rows.count = static_cast<int32_t>(block.endTail - block.firstTail);
            rows.firstToken = static_cast<int32_t>(block.firstTail);
            rows.pageTable = arguments.arrays.blockTable + block.b * params.cache.maxPages;
            rows.valueOffset = cache.valueOffset();
        }
        else
        {
            rows.count = block.newRows;
            rows.causalGroup = arguments.group;
            rows.stride = params.kTokenStride * (cache.rowBytes / params.cache.D);
            rows.keys = static_cast<char const*>(arguments.arrays.kNew) + block.b * params.Tq * rows.stride
                + block.head * cache.rowBytes;
            rows.valueOffset = distance(arguments.arrays.kNew, arguments.arrays.vNew); // strides are equal
        }
        softmax.add(rows, tail, queries, firstQuery, slice, slices);
    }
}

//! kLANES, kVECTORS: see WarpSoftmax. kQUERIES: of a tile, which a warp takes.
template <typename T, int32_t kLANES, int32_t kVECTORS, int32_t kQUERIES>
__global__ void __launch_bounds__(kTHREADS, leastBlocks(kVECTORS, kQUERIES)) attendRows(AttendArguments const arguments)
{
    using Softmax = WarpSoftmax<T, kLANES, kVECTORS, kQUERIES>;
    HUBKV_DYNAMIC_SHARED(float, shared); // queries, later the softmaxes of the warps
    hubkv_attend_params const& params = arguments.params;
    CacheView const cache(params.cache, arguments.arrays.arena);
    int64_t const unit = blockIdx.x / arguments.headBlocks;
    BlockRows block;
    if (!rowsOfBlock(arguments, cache, unit, block))
    {
        return;
    }
    int32_t const D = static_cast<int32_t>(params.cache.D);
    int32_t const group = arguments.group;
    int32_t const tiles = arguments.blockTiles;
    int32_t const blockQueries = tiles * kQUERIES;
    int32_t const first = static_cast<int32_t>(blockIdx.x % arguments.headBlocks) * blockQueries;
    int32_t const queries = newTokens(arguments, block.b) * group; // real ones
    int32_t const last = min(first + blockQueries, queries) - 1;
    if (last < first)
    {
        return;
    }
    block.newRows = min(block.newRows, last / group + 1); // those after are seen by none

    int64_t const stride = params.qTokenStride;
    T const* const q =
        static_cast<T const*>(arguments.arrays.q) + block.b * params.Tq * stride + block.head * group * D;
    for (int32_t i = threadIdx.x; i < blockQueries * Softmax::kPADDED_DIM; i += kTHREADS)
    {
        int32_t const n = i / Softmax::kPADDED_DIM;
        int32_t const d = i % Softmax::kPADDED_DIM;
        int32_t const token = (first + n) / group;
        float value = 0.F;
        if (first + n < queries && d < D)
        {
            value = Elements<T>::load(q + token * stride + (first + n - token * group) * D + d) * arguments.scale;
        }
        shared[n * Softmax::kPADDED_DIM + Softmax::queryColumn(d)] = value;
    }
    __syncthreads();

    int32_t const warp = static_cast<int32_t>(threadIdx.x) / kWARP_SIZE;
    int32_t const tile = warp % tiles;
    int32_t const slices = kWARPS / tiles;
    Softmax softmax;
    if (first + tile * kQUERIES <= last)
    {
        addRows(arguments, cache, block, shared + tile * kQUERIES * Softmax::kPADDED_DIM, first + tile * kQUERIES,
            warp / tiles, slices, softmax);
    }
    softmax.mergeGroups();
    __syncthreads();

    float* const maxima = shared; // [kWARPS, kQUERIES]
    float* const sums = maxima + kWARPS * kQUERIES;
    float* const values = sums + kWARPS * kQUERIES; // [kWARPS, kQUERIES, D]
    softmax.store(maxima + warp * kQUERIES, sums + warp * kQUERIES, values + warp * kQUERIES * D, D);
    __syncthreads();

    for (int32_t n = warp; first + n <= last; n += kWARPS)
    {
        // The warps of slice 0, 1, ... that had this query, in this order.
        float maximum = kNO_LOGIT;
        for (int32_t slice = 0; slice < slices; ++slice)
        {
            maximum = fmaxf(maximum, maxima[slice * blockQueries + n]);
        }
        float weights[kWARPS];
        float sum = 0.F;
#pragma unroll
        for (int32_t slice = 0; slice < kWARPS; ++slice)
        {
            weights[slice] = 0.F;
            if (slice < slices)
            {
                weights[slice] = exp2f(maxima[slice * blockQueries + n] - shiftOf(maximum));
                sum = fmaf(weights[slice], sums[slice * blockQueries + n], sum);
            }
        }
        int32_t const query = first + n;
        float* slot = nullptr;
        T* out = nullptr;
        float factor = 1.F;
        if (arguments.slots != nullptr)
        {
            slot = arguments.slots + unit * arguments.slotFloats;
            if (laneOf(threadIdx.x) == 0)
            {
                slot[query] = maximum;
                slot[arguments.queries + query] = sum;
            }
            slot += 2 * arguments.queries + static_cast<int64_t>(query) * D;
        }
        else
        {
            int32_t const token = query / group;
            int64_t const row = (block.b * params.Tq + token) * params.Hq + block.head * group + query - token * group;
            out = static_cast<T*>(arguments.arrays.out) + row * D;
            factor = sum != 0.F ? 1.F / sum : 0.F;
        }
        for (int32_t d = laneOf(threadIdx.x); d < D; d += kWARP_SIZE)
        {
            float value = 0.F;
#pragma unroll
            for (int32_t slice = 0; slice < kWARPS; ++slice)
            {
                if (slice < slices)
                {
                    value = fmaf(weights[slice], values[(slice * blockQueries + n) * D + d], value);
                }
            }
            if (slot != nullptr)
            {
                slot[d] = value;
            }
            else
            {
                Elements<T>::store(out + d, value * factor);
            }
        }
    }
}

} // namespace
} // namespace hubkv
