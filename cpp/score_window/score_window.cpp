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
    checkWindowParams(params.candidates, params.W, params.Hq);
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
            *bytes = ScoreWorkspace(*params).carver.bytes();
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
            checkWorkspace(workspace, workspaceBytes, ScoreWorkspace(*params).carver.bytes());
            scoreWindowHost(*params, arrays, workspace);
        });
}

} // extern "C"
