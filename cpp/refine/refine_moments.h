// SPDX-License-Identifier: Apache-2.0
//
// refine on the GPU, first half: moments of chunks and the weights of heads.
#pragma once

#include "refine/refine_device.h"

namespace hubkv
{
namespace
{

// ---- moments ----

//! Four of the 128 lanes in which a chunk is summed.
struct LaneSums
{
    double sum[4];
    double squares[4];
    int32_t count;
};

__device__ void add(LaneSums& lanes, float4 scores)
{
    float const values[4] = {scores.x, scores.y, scores.z, scores.w};
#pragma unroll
    for (int32_t i = 0; i < 4; ++i)
    {
        bool const counted = isFinite(values[i]);
        // Adding +0 to a sum that started as +0 changes nothing: the same as skipping.
        double const value = counted ? static_cast<double>(values[i]) : 0.0;
        lanes.sum[i] = __dadd_rn(lanes.sum[i], value);
        lanes.squares[i] = __dadd_rn(lanes.squares[i], __dmul_rn(value, value));
        lanes.count += counted ? 1 : 0;
    }
}

//! Adds whole rows from `row` on, kBATCH at a time, as long as so many are left. A batch has its loads under way together.
template <int32_t kBATCH>
__device__ void addRows(LaneSums& lanes, Rows const& rows, int32_t& row, int32_t lastRow)
{
    for (; row + kBATCH <= lastRow; row += kBATCH)
    {
        float4 batch[kBATCH];
#pragma unroll
        for (int32_t i = 0; i < kBATCH; ++i)
        {
            batch[i] = loadRow(rows, row + i);
        }
#pragma unroll
        for (int32_t i = 0; i < kBATCH; ++i)
        {
            add(lanes, batch[i]);
        }
    }
}

//! Folds the 128 lanes by 64, 32, 16, 8, 4, 2, 1. Thread j holds lanes 4j..4j+3, or all lanes are shifted by the same
//! distance: a fold adds lanes that lie its width apart, on a ring too. Addition commutes, so both threads of a pair
//! have the sum; in the first two folds each keeps half of the lanes.
__device__ double fold(double const (&lanes)[4])
{
    int32_t const thread = laneOf(threadIdx.x);
    bool const high = (thread & 16) != 0;
    double const low0 = __shfl_xor_sync(kFULL_WARP, high ? lanes[0] : lanes[2], 16);
    double const low1 = __shfl_xor_sync(kFULL_WARP, high ? lanes[1] : lanes[3], 16);
    double const a = __dadd_rn(high ? lanes[2] : lanes[0], low0);
    double const b = __dadd_rn(high ? lanes[3] : lanes[1], low1);
    bool const odd = (thread & 8) != 0;
    double const other = __shfl_xor_sync(kFULL_WARP, odd ? a : b, 8);
    double sum = __dadd_rn(odd ? b : a, other);
    // 16, 8 and 4 lie 4, 2 and 1 threads apart; 2 and 1 lie where the first two folds parted the lanes.
    sum = __dadd_rn(sum, __shfl_xor_sync(kFULL_WARP, sum, 4));
    sum = __dadd_rn(sum, __shfl_xor_sync(kFULL_WARP, sum, 2));
    sum = __dadd_rn(sum, __shfl_xor_sync(kFULL_WARP, sum, 1));
    sum = __dadd_rn(sum, __shfl_xor_sync(kFULL_WARP, sum, 16));
    return __dadd_rn(sum, __shfl_xor_sync(kFULL_WARP, sum, 8));
}

//! One warp per chunk.
__global__ void __launch_bounds__(kTHREADS) chunkMoments(RefineArguments const arguments)
{
    int64_t const number = static_cast<int64_t>(blockIdx.x) * kWARPS + threadIdx.x / kWARP_SIZE;
    if (number >= arguments.heads * arguments.chunks || *arguments.alpha == 0.0F)
    {
        return;
    }
    int64_t const head = number / arguments.chunks;
    int64_t const chunk = (number - head * arguments.chunks) * kREFINE_CHUNK;
    int64_t const begin = max(chunk, arguments.firstUnprotected());
    int64_t const end = min(chunk + kREFINE_CHUNK, arguments.lastUnprotected());

    LaneSums lanes = {};
    if (begin < end)
    {
        float const* const scores = arguments.scores + head * arguments.T;
        Rows const rows{scores, chunk - floatsPastBoundary(scores)};
        int32_t const from = static_cast<int32_t>(begin - rows.first);
        int32_t const to = static_cast<int32_t>(end - rows.first);
        constexpr int32_t kROW = kREFINE_LANES;
        int32_t const firstWhole = (from + kROW - 1) / kROW;
        int32_t const lastWhole = to / kROW;
        float const none = __int_as_float(0x7fc00000); // NaN: moments skip it
        if (from % kROW != 0)
        {
            add(lanes, loadGuarded(rows, from / kROW, begin, end, none));
        }
        int32_t row = firstWhole;
        addRows<8>(lanes, rows, row, lastWhole);
        addRows<4>(lanes, rows, row, lastWhole);
        addRows<2>(lanes, rows, row, lastWhole);
        addRows<1>(lanes, rows, row, lastWhole);
        if (to % kROW != 0 && lastWhole >= firstWhole)
        {
            add(lanes, loadGuarded(rows, lastWhole, begin, end, none));
        }
    }
    double const sum = fold(lanes.sum);
    double const squares = fold(lanes.squares);
    int32_t const count = warpSum(lanes.count);
    if (laneOf(threadIdx.x) == 0)
    {
        arguments.moments[number] = Moments{sum, squares, count};
    }
}

// ---- head weights ----

__device__ HeadVariation variationOf(Moments const* chunks, int64_t count)
{
    Moments total{0.0, 0.0, 0};
#pragma unroll 8
    for (int64_t chunk = 0; chunk < count; ++chunk)
    {
        total.sum = __dadd_rn(total.sum, chunks[chunk].sum);
        total.squares = __dadd_rn(total.squares, chunks[chunk].squares);
        total.count += chunks[chunk].count;
    }
    if (total.count == 0)
    {
        return {0.0, 0};
    }
    double const n = static_cast<double>(total.count);
    double const mean = __ddiv_rn(total.sum, n);
    double const variance = __dsub_rn(__ddiv_rn(total.squares, n), __dmul_rn(mean, mean));
    return {__ddiv_rn(__dsqrt_rn(variance > 0.0 ? variance : 0.0), __dadd_rn(mean, 1e-6)), total.count};
}

//! ratio^temperature as hubkv.h fixes it.
__device__ double headPower(double ratio, float temperature)
{
    if (temperature == 0.5F)
    {
        return __dsqrt_rn(ratio);
    }
    if (temperature == 0.25F)
    {
        return __dsqrt_rn(__dsqrt_rn(ratio));
    }
    return pow(ratio, static_cast<double>(temperature));
}

//! One block per layer, one thread per head. Clears nonFinite, too.
__global__ void __launch_bounds__(kTHREADS) headWeights(RefineArguments const arguments)
{
    if (blockIdx.x == 0 && threadIdx.x == 0 && arguments.nonFinite != nullptr)
    {
        *arguments.nonFinite = 0;
    }
    int64_t const Hkv = arguments.Hkv;
    int64_t const firstHead = blockIdx.x * Hkv;
    bool const weighted = arguments.temperature != 0.0F && *arguments.alpha != 0.0F;
    HeadVariation* const variations = arguments.variations + firstHead;
    for (int64_t head = threadIdx.x; head < Hkv && weighted; head += kTHREADS)
    {
        variations[head] = variationOf(arguments.moments + (firstHead + head) * arguments.chunks, arguments.chunks);
    }
    __syncthreads();
    for (int64_t head = threadIdx.x; head < Hkv; head += kTHREADS)
    {
        float beta = 1.0F;
        if (weighted)
        {
            double total = 0.0;
            for (int64_t other = 0; other < Hkv; ++other)
            {
                total = __dadd_rn(total, variations[other].c);
            }
            double const mean = __ddiv_rn(total, static_cast<double>(Hkv));
            double const power = headPower(__ddiv_rn(variations[head].c, mean), arguments.temperature);
            if (mean != 0.0 && variations[head].count > 0 && power == power)
            {
                double const low = arguments.minHeadWeight;
                double const high = arguments.maxHeadWeight;
                beta = __double2float_rn(power < low ? low : high < power ? high : power);
            }
        }
        arguments.beta[firstHead + head] = beta;
    }
}

} // namespace
} // namespace hubkv
