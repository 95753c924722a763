// SPDX-License-Identifier: Apache-2.0
//
// Entry points of held_out_loss: checks and dispatch.
#include "held_out_loss/held_out_loss.h"

#include "common/status.h"

#include <cmath>

namespace hubkv
{
namespace
{

void checkLossParams(hubkv_held_out_loss_params const& params)
{
    checkWindowParams(params.candidates, params.W, params.Hq);
    hubkv_cache_params const& cache = params.candidates.cache;
    checkRange("tailLength", params.tailLength, params.candidates.tailTokens + params.W, cache.maxPages * cache.P);
    checkCandidatesParams(allRows(params));
    HUBKV_CHECK(std::isfinite(params.scale), "scale: %g is not finite", static_cast<double>(params.scale));
}

} // namespace

} // namespace hubkv

extern "C"
{

hubkv_status hubkv_held_out_loss_workspace(
    hubkv_device device, hubkv_held_out_loss_params const* params, int64_t* bytes)
{
    using namespace hubkv;
    return guard(
        [&]
        {
            checkDevice(device);
            checkPointer("params", params);
            checkAligned("bytes", bytes, alignof(int64_t));
            checkLossParams(*params);
            if constexpr (kWITH_CUDA)
            {
                if (device == HUBKV_CUDA)
                {
                    *bytes = heldOutLossCudaWorkspace(*params);
                    return;
                }
            }
            *bytes = LossWorkspace(*params).carver.bytes();
        });
}

hubkv_status hubkv_held_out_loss(hubkv_device device, [[maybe_unused]] void* stream,
    hubkv_held_out_loss_params const* params, void const* q, float const* ranking, int32_t const* candidatePositions,
    int64_t const* arena, int64_t const* segments, int32_t const* blockTable, float* loss, int32_t* rows,
    void* workspace, int64_t workspaceBytes)
{
    using namespace hubkv;
    return guard(
        [&]
        {
            checkDevice(device);
            checkPointer("params", params);
            checkLossParams(*params);
            hubkv_candidates_params const& candidates = params->candidates;
            checkAligned("q", q, elementBytes(candidates.cache.dtype));
            if (candidateCount(candidates) > 0)
            {
                checkAligned("ranking", ranking, alignof(float));
                checkAligned("candidatePositions", candidatePositions, alignof(int32_t));
            }
            checkAligned("arena", arena, alignof(int64_t));
            checkAligned("segments", segments, alignof(int64_t));
            checkAligned("blockTable", blockTable, alignof(int32_t));
            checkAligned("loss", loss, alignof(float));
            checkAligned("rows", rows, alignof(int32_t));
            LossArrays const arrays{q, ranking, candidatePositions, arena, segments, blockTable, loss, rows};
            if constexpr (kWITH_CUDA)
            {
                if (device == HUBKV_CUDA)
                {
                    checkWorkspace(
                        workspace, workspaceBytes, heldOutLossCudaWorkspace(*params), kCUDA_WORKSPACE_ALIGNMENT);
                    heldOutLossCuda(stream, *params, arrays, workspace);
                    return;
                }
            }
            checkWorkspace(workspace, workspaceBytes, LossWorkspace(*params).carver.bytes());
            heldOutLossHost(*params, arrays, workspace);
        });
}

} // extern "C"
