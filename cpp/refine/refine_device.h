// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of refine are given.
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

} // namespace hubkv
