// SPDX-License-Identifier: Apache-2.0
//
// The rkv score on the GPU: a block per head, a warp per key. The sum of the unit keys gives each key's mean cosine with
// all others.
#pragma once

#include "attend/attend_elements.h"
#include "common/candidates.h"
#include "common/device.h"
#include "score_window/score_window.h"

namespace hubkv
{
namespace
{

constexpr int32_t kMIX_THREADS = 256;
constexpr int32_t kMIX_WARPS = kMIX_THREADS / kWARP_SIZE;
constexpr int32_t kKEY_FLOATS = 8; // of a key of 256 elements, in each lane

//! A key: its elements in the lanes of a warp, and one over its length, 0 where it is absent or zero.
template <typename T>
struct WarpKey
{
    float values[kKEY_FLOATS];
    float factor;

    __device__ WarpKey(T const* key, int32_t D)
    {
        float squares = 0.F;
#pragma unroll
        for (int32_t i = 0; i < kKEY_FLOATS; ++i)
        {
            int32_t const d = i * kWARP_SIZE + laneOf(threadIdx.x);
            values[i] = key != nullptr && d < D ? Elements<T>::load(globalAddress(key + d)) : 0.F;
            squares = fmaf(values[i], values[i], squares);
        }
        squares = warpTotal(squares);
        factor = squares > 0.F ? 1.F / sqrtf(squares) : 0.F;
    }

    static __device__ float warpTotal(float value)
    {
        for (int32_t step = kWARP_SIZE / 2; step > 0; step /= 2)
        {
            value += __shfl_xor_sync(kFULL_WARP, value, step);
        }
        return value;
    }
};

//! The values of all threads together, in every thread: their sum, or the least. shared [kMIX_WARPS] may be in use up to
//! the call.
template <bool kLEAST>
__device__ float blockTogether(float value, float* shared)
{
    __syncthreads();
    for (int32_t step = kWARP_SIZE / 2; step > 0; step /= 2)
    {
        float const other = __shfl_xor_sync(kFULL_WARP, value, step);
        value = kLEAST ? fminf(value, other) : value + other;
    }
    if (laneOf(threadIdx.x) == 0)
    {
        shared[threadIdx.x / kWARP_SIZE] = value;
    }
    __syncthreads();
    value = shared[0];
    for (int32_t warp = 1; warp < kMIX_WARPS; ++warp)
    {
        value = kLEAST ? fminf(value, shared[warp]) : value + shared[warp];
    }
    return value;
}

template <typename T>
__global__ void __launch_bounds__(kMIX_THREADS, 2)
    mixScores(hubkv_score_window_params const params, ScoreArrays const arrays)
{
    constexpr int32_t kMAX_DIM = kKEY_FLOATS * kWARP_SIZE;
    __shared__ float sums[kMIX_WARPS][kMAX_DIM]; // of the warps' unit keys; then row 0 of all
    __shared__ float shared[kMIX_WARPS];
    CacheView const cache(params.candidates.cache, arrays.arena);
    HeadCandidates const candidates(params.candidates, cache, arrays.segments, arrays.blockTable, blockIdx.x);
    int32_t const D = static_cast<int32_t>(params.candidates.cache.D);
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    int32_t const warp = thread / kWARP_SIZE;
    int32_t const lane = laneOf(threadIdx.x);
    int64_t const count = candidates.count();
    float* const scores = arrays.transformed + candidates.first;
    float const* const raw = arrays.raw + candidates.first;

    float sum[kKEY_FLOATS] = {};
    for (int64_t i = warp; i < count; i += kMIX_WARPS)
    {
        WarpKey<T> const key(reinterpret_cast<T const*>(candidates.row(i).k), D);
#pragma unroll
        for (int32_t j = 0; j < kKEY_FLOATS; ++j)
        {
            sum[j] = fmaf(key.values[j], key.factor, sum[j]);
        }
    }
#pragma unroll
    for (int32_t j = 0; j < kKEY_FLOATS; ++j)
    {
        sums[warp][j * kWARP_SIZE + lane] = sum[j];
    }
    __syncthreads();
    for (int32_t other = 1; other < kMIX_WARPS; ++other)
    {
        sums[0][thread] += sums[other][thread];
    }
    __syncthreads();

    // Mean cosines lie in [-1, 1]: their softmax needs no maximum.
    for (int64_t i = warp; i < count; i += kMIX_WARPS)
    {
        WarpKey<T> const key(reinterpret_cast<T const*>(candidates.row(i).k), D);
        float dot = 0.F;
#pragma unroll
        for (int32_t j = 0; j < kKEY_FLOATS; ++j)
        {
            dot = fmaf(key.values[j], sums[0][j * kWARP_SIZE + lane], dot);
        }
        dot = WarpKey<T>::warpTotal(dot);
        if (lane == 0)
        {
            bool const pairs = key.factor > 0.F && count > 1;
            scores[i] = pairs ? expf((dot * key.factor - 1.F) / static_cast<float>(count - 1)) : 1.F;
        }
    }
    __syncthreads();
    float total = 0.F;
    for (int64_t i = thread; i < count; i += kMIX_THREADS)
    {
        total += scores[i];
    }
    total = blockTogether<false>(total, shared);
    float least = __builtin_inff();
    for (int64_t i = thread; i < count; i += kMIX_THREADS)
    {
        scores[i] = params.mix * expf(raw[i]) - (1.F - params.mix) * (scores[i] / total);
        least = fminf(least, scores[i]);
    }
    least = blockTogether<true>(least, shared);
    float all = 0.F;
    for (int64_t i = thread; i < count; i += kMIX_THREADS)
    {
        all += scores[i] - least;
    }
    all = blockTogether<false>(all, shared);
    float const share = all > 0.F ? 1.F / all : 0.F;
    for (int64_t i = thread; i < count; i += kMIX_THREADS)
    {
        scores[i] = logf((scores[i] - least) * share + kSMALLEST_SHARE);
    }
}

} // namespace
} // namespace hubkv
