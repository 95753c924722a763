// SPDX-License-Identifier: Apache-2.0
//
// The last queries of one head and the rows that they look at: what the host's score_window and held_out_loss share.
#pragma once

#include "attend/row_stream.h"
#include "common/candidates.h"
#include "common/workspace.h"

#include <cmath>
#include <cstdint>

namespace hubkv
{

constexpr int64_t kWINDOW_QUERIES = 32; // W * G is padded to a multiple of this
constexpr int64_t kWINDOW_ROWS = 64;    // rows that are gone over together

struct WindowHead
{
    HeadCandidates const& candidates;
    void const* q; // query 0 of the window, first query head of the kv head
    int64_t W;
    int64_t G;
    int64_t tokenStride; // elements
    int64_t D;
    float scale; // in units of log 2
    float* packed;
    float* maxima;
    float* sums;
};

//! Refuses candidates, and windows of queries over them, that a cache cannot have.
inline void checkWindowParams(hubkv_candidates_params const& candidates, int64_t W, int64_t Hq)
{
    checkCandidatesParams(candidates);
    hubkv_cache_params const& cache = candidates.cache;
    checkRange("W", W, 1, 256);
    checkRange("Hq", Hq, 1, kINT32_MAX);
    HUBKV_CHECK(Hq % cache.Hkv == 0 && Hq / cache.Hkv <= 16, "Hq: %lld is not Hkv = %lld times a whole number in 1..16",
        static_cast<long long>(Hq), static_cast<long long>(cache.Hkv));
    int64_t const queries = checkedProduct("L * W * Hq", checkedProduct("L * W", cache.L, W), Hq);
    checkedProduct("bytes of q", queries, cache.D * elementBytes(cache.dtype));
}

//! Scratch of the host: per head its queries, side by side, and what is known of their softmax.
struct WindowWorkspace
{
    WindowWorkspace(WorkspaceCarver& carver, hubkv_cache_params const& cache, int64_t W, int64_t Hq)
        : queries((W * (Hq / cache.Hkv) + kWINDOW_QUERIES - 1) / kWINDOW_QUERIES * kWINDOW_QUERIES)
    {
        int64_t const all = checkedProduct("workspace", cache.L * cache.Hkv, queries);
        packed = carver.take<float>(checkedProduct("workspace", all, cache.D));
        maxima = carver.take<float>(all);
        sums = carver.take<float>(all);
    }

    //! The window of head `number` over its rows. q [L, W, Hq, D]; Params: of score_window or held_out_loss.
    template <typename Params>
    WindowHead head(
        Params const& params, void const* q, HeadCandidates const& rows, int64_t number, void* workspace) const
    {
        hubkv_cache_params const& cache = params.candidates.cache;
        int64_t const G = params.Hq / cache.Hkv;
        int64_t const layer = number / cache.Hkv;
        int64_t const first = layer * params.W * params.Hq + (number - layer * cache.Hkv) * G;
        float const scale = params.scale != 0.F ? params.scale : 1.F / std::sqrt(static_cast<float>(cache.D));
        return WindowHead{rows, static_cast<char const*>(q) + first * cache.D * elementBytes(cache.dtype), params.W, G,
            params.Hq * cache.D, cache.D, scale * kLOG2_E, packed.in(workspace) + number * queries * cache.D,
            maxima.in(workspace) + number * queries, sums.in(workspace) + number * queries};
    }

    int64_t queries;              // W * G, padded
    WorkspaceArray<float> packed; // [L*Hkv, queries / width, D, width]
    WorkspaceArray<float> maxima; // [L*Hkv, queries]
    WorkspaceArray<float> sums;   // [L*Hkv, queries]
};

} // namespace hubkv
