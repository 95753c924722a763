// SPDX-License-Identifier: Apache-2.0
//
// Entry points of score_window: checks and dispatch.
#include "score_window/score_window.h"

#include "common/status.h"

#include <cmath>

namespace hubkv
{
namespace
{

void checkScoreParams(hubkv_score_window_params const& params)
{
    checkCandidatesParams(params.candidates);
    hubkv_cache_params const& cache = params.candidates.cache;
    checkRange("W", params.W, 1, 256);
    checkRange("Hq", params.Hq, 1, kINT32_MAX);
    HUBKV_CHECK(params.Hq % cache.Hkv == 0 && params.Hq / cache.Hkv <= 16,
        "Hq: %lld is not Hkv = %lld times a whole number in 1..16", static_cast<long long>(params.Hq),
        static_cast<long long>(cache.Hkv));
    int64_t const queries = checkedProduct("L * W * Hq", checkedProduct("L * W", cache.L, params.W), params.Hq);
    checkedProduct("bytes of q", queries, cache.D * elementBytes(cache.dtype));
    HUBKV_CHECK(
        params.score == HUBKV_SCORE_VANILLA || params.score == HUBKV_SCORE_SNAPKV || params.score == HUBKV_SCORE_RKV,
        "score: %d is not HUBKV_SCORE_VANILLA (0), HUBKV_SCORE_SNAPKV (1) or HUBKV_SCORE_RKV (2)",
        static_cast<int>(params.score));
    HUBKV_CHECK(params.poolKernel >= 1 && params.poolKernel <= 255 && params.poolKernel % 2 == 1,
        "poolKernel: %d is not an odd number in 1..255", static_cast<int>(params.poolKernel));
    HUBKV_CHECK(params.mix >= 0.F && params.mix <= 1.F, "mix: %g is not in 0..1", static_cast<double>(params.mix));
    HUBKV_CHECK(std::isfinite(params.scale), "scale: %g is not finite", static_cast<double>(params.scale));
}

} // namespace

ScoreWorkspace::ScoreWorkspace(hubkv_score_window_params const& params)
{
    hubkv_cache_params const& cache = params.candidates.cache;
    queries = (params.W * (params.Hq / cache.Hkv) + kWINDOW_QUERIES - 1) / kWINDOW_QUERIES * kWINDOW_QUERIES;
    int64_t const all = checkedProduct("workspace", cache.L * cache.Hkv, queries);
    WorkspaceCarver carver;
    packed = carver.take<float>(checkedProduct("workspace", all, cache.D));
    maxima = carver.take<float>(all);
    sums = carver.take<float>(all);
    bytes = carver.bytes();
}

} // namespace hubkv

extern "C"
{

hubkv_status hubkv_score_window_workspace(hubkv_device device, hubkv_score_window_params const* params, int64_t* bytes)
{
    using namespace hubkv;
    return guard(
        [&]
        {
            checkDevice(device);
            checkPointer("params", params);
            checkAligned("bytes", bytes, alignof(int64_t));
            checkScoreParams(*params);
            if constexpr (kWITH_CUDA)
            {
                if (device == HUBKV_CUDA)
                {
                    *bytes = scoreWindowCudaWorkspace(*params);
                    return;
                }
            }
            *bytes = ScoreWorkspace(*params).bytes;
        });
}

hubkv_status hubkv_score_window(hubkv_device device, [[maybe_unused]] void* stream,
    hubkv_score_window_params const* params, void const* q, int32_t const* positions, int64_t const* arena,
    int64_t const* segments, int32_t const* blockTable, float* raw, float* transformed, int32_t* candidatePositions,
    int64_t* candidateOffsets, void* workspace, int64_t workspaceBytes)
{
    using namespace hubkv;
    return guard(
        [&]
        {
            checkDevice(device);
            checkPointer("params", params);
            checkScoreParams(*params);
            hubkv_candidates_params const& candidates = params->candidates;
            checkAligned("q", q, elementBytes(candidates.cache.dtype));
            if (candidates.K > 0)
            {
                checkAligned("positions", positions, alignof(int32_t));
            }
            checkAligned("arena", arena, alignof(int64_t));
            checkAligned("segments", segments, alignof(int64_t));
            if (candidates.cache.maxPages > 0)
            {
                checkAligned("blockTable", blockTable, alignof(int32_t));
            }
            if (candidateCount(candidates) > 0)
            {
                checkAligned("raw", raw, alignof(float));
                checkAligned("transformed", transformed, alignof(float));
                checkAligned("candidatePositions", candidatePositions, alignof(int32_t));
            }
            checkAligned("candidateOffsets", candidateOffsets, alignof(int64_t));
            ScoreArrays const arrays{
                q, positions, arena, segments, blockTable, raw, transformed, candidatePositions, candidateOffsets};
            if constexpr (kWITH_CUDA)
            {
                if (device == HUBKV_CUDA)
                {
                    checkWorkspace(
                        workspace, workspaceBytes, scoreWindowCudaWorkspace(*params), kCUDA_WORKSPACE_ALIGNMENT);
                    scoreWindowCuda(stream, *params, arrays, workspace);
                    return;
                }
            }
            checkWorkspace(workspace, workspaceBytes, ScoreWorkspace(*params).bytes);
            scoreWindowHost(*params, arrays, workspace);
        });
}

} // extern "C"
