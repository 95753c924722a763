// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of refine share: their arguments, how a warp reads scores, the formula. Included by refine.cu alone.
#pragma once

#include "common/device.h"
#include "refine/refine.h"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace hubkv
{

constexpr float kINFINITY = std::numeric_limits<float>::infinity();

__device__ inline bool isFinite(float value)
{
    return (__float_as_int(value) & 0x7f800000) != 0x7f800000;
}

//! alpha and window stay where they are, in device memory: a captured graph reads them anew at each replay.
struct RefineArguments
{
    RefineArguments(hubkv_refine_params const& params, float const* scores, float const* alpha, int32_t const* window,
        float* refined, int64_t* nonFinite, void* workspace)
        : scores(scores)
        , refined(refined)
        , alpha(alpha)
        , window(window)
        , nonFinite(reinterpret_cast<unsigned long long*>(nonFinite))
        , heads(params.L * params.Hkv)
        , Hkv(params.Hkv)
        , T(params.T)
        , sinks(std::min<int64_t>(params.sinkTokens, params.T))
        , reach(params.penaltyFactor != 1.0F ? std::min<int64_t>((params.nmsKernel - 1) / 2, params.T - 1) : 0)
        , gamma(params.penaltyFactor)
        , temperature(params.headWeightTemperature)
        , minHeadWeight(params.minHeadWeight)
        , maxHeadWeight(params.maxHeadWeight)
    {
        RefineWorkspace const layout(params);
        chunks = layout.chunks;
        moments = layout.moments.in(workspace);
        maxima = layout.maxima.in(workspace);
        variations = layout.variations.in(workspace);
        beta = layout.beta.in(workspace);
    }

    //! First position that sinks do not protect.
    __device__ int64_t firstUnprotected() const
    {
        return sinks;
    }

    //! First position that the window protects.
    __device__ int64_t lastUnprotected() const
    {
        int64_t const w = *window;
        return T - (w < 0 ? 0 : w > T ? T : w);
    }

    //! Parts of `size` scores that cover a head from any 16-byte boundary on.
    HUBKV_HOST_DEVICE int64_t partsPerHead(int64_t size) const
    {
        return (T + 3 + size - 1) / size;
    }

    float const* scores;           // [L*Hkv, T]
    float* refined;                // [L*Hkv, T]
    float const* alpha;            // [1]
    int32_t const* window;         // [1]
    unsigned long long* nonFinite; // [1] or null
    int64_t heads;                 // L*Hkv
    int64_t Hkv;
    int64_t T;
    int64_t sinks; // 0..T
    int64_t reach; // positions to either side that a hub must not be below
    float gamma;
    float temperature;
    float minHeadWeight;
    float maxHeadWeight;
    int64_t chunks;            // per head
    Moments* moments;          // [L*Hkv, chunks]
    float* maxima;             // [L*Hkv, chunks]
    HeadVariation* variations; // [L*Hkv]
    float* beta;               // [L*Hkv]
};

namespace
{

constexpr int32_t kTHREADS = 256;
constexpr int32_t kWARPS = kTHREADS / kWARP_SIZE;

//! A warp's scores: position 0 of row 0 is `first`, at a 16-byte boundary; lane j reads 4j..4j+3 of each row of 128.
struct Rows
{
    float const* head; // scores [T]
    int64_t first;     // may lie before the sequence
};

//! This lane's four scores of a row; `missing` at positions outside begin..end-1.
__device__ float4 loadGuarded(Rows const& rows, int32_t row, int64_t begin, int64_t end, float missing)
{
    int64_t const position = rows.first + row * kREFINE_LANES + 4 * laneOf(threadIdx.x);
    if (position >= begin && position + 4 <= end)
    {
        return loadFloats(rows.head + position);
    }
    float4 scores = make_float4(missing, missing, missing, missing);
    scores.x = position + 0 >= begin && position + 0 < end ? rows.head[position + 0] : missing;
    scores.y = position + 1 >= begin && position + 1 < end ? rows.head[position + 1] : missing;
    scores.z = position + 2 >= begin && position + 2 < end ? rows.head[position + 2] : missing;
    scores.w = position + 3 >= begin && position + 3 < end ? rows.head[position + 3] : missing;
    return scores;
}

__device__ float4 loadRow(Rows const& rows, int32_t row)
{
    return loadFloats(rows.head + rows.first + row * kREFINE_LANES + 4 * laneOf(threadIdx.x));
}

//! What the formula needs beside a score and its window's maximum.
struct Formula
{
    __device__ Formula(RefineArguments const& arguments, int64_t head)
        : gamma(arguments.gamma)
        , beta(arguments.beta[head])
        , alpha(*arguments.alpha)
        , firstUnprotected(arguments.firstUnprotected())
        , lastUnprotected(arguments.lastUnprotected())
    {
    }

    __device__ float operator()(float score, float best, int64_t position) const
    {
        if (position < firstUnprotected || position >= lastUnprotected)
        {
            return kINFINITY;
        }
        if (alpha == 0.0F || !isFinite(score))
        {
            return score;
        }
        float const q = score >= best ? score : __fmul_rn(gamma, score);
        return __fadd_rn(score, __fmul_rn(alpha, __fsub_rn(__fmul_rn(beta, q), score)));
    }

    float gamma;
    float beta;
    float alpha;
    int64_t firstUnprotected;
    int64_t lastUnprotected;
};

//! Adds a warp's count of scores that are not finite.
__device__ void countNonFinite(RefineArguments const& arguments, int32_t count)
{
    count = warpSum(count);
    if (count > 0 && laneOf(threadIdx.x) == 0 && arguments.nonFinite != nullptr)
    {
        atomicAdd(arguments.nonFinite, static_cast<unsigned long long>(count));
    }
}

} // namespace
} // namespace hubkv
