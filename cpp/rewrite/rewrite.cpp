// SPDX-License-Identifier: Apache-2.0
//
// Entry point of rewrite: checks and dispatch.
#include "rewrite/rewrite.h"

#include "common/status.h"

namespace hubkv
{

bool checkRewrite(hubkv_rewrite_params const* params, RewriteArrays const& arrays)
{
    checkPointer("params", params);
    hubkv_candidates_params const& candidates = params->candidates;
    checkCandidatesParams(candidates);
    checkRange("keptRows", params->keptRows, 0, kINT32_MAX);
    checkRange("mergedRows", params->mergedRows, 0, kINT32_MAX);
    int64_t const heads = candidates.cache.L * candidates.cache.Hkv;
    int64_t const merged = checkedProduct("L * Hkv * mergedRows", heads, params->mergedRows);
    checkRange("keptRows + L * Hkv * mergedRows", merged, 0, kINT32_MAX - params->keptRows);
    checkAligned("headOffsets", arrays.headOffsets, alignof(int64_t));
    checkAligned("arena", arrays.arena, alignof(int64_t));
    checkAligned("segments", arrays.segments, alignof(int64_t));
    if (candidates.cache.maxPages > 0)
    {
        checkAligned("blockTable", arrays.blockTable, alignof(int32_t));
    }
    if (candidateCount(candidates) > 0)
    {
        checkAligned("candidatePositions", arrays.candidatePositions, alignof(int32_t));
    }
    if (params->keptRows > 0)
    {
        checkAligned("indices", arrays.indices, alignof(int32_t));
    }
    if (params->keptRows + merged == 0)
    {
        return false;
    }
    int64_t const element = elementBytes(candidates.cache.dtype);
    checkAligned("kRows", arrays.kRows, element);
    checkAligned("vRows", arrays.vRows, element);
    checkAligned("newPositions", arrays.newPositions, alignof(int32_t));
    if (arrays.rowBias != nullptr)
    {
        checkAligned("rowBias", arrays.rowBias, alignof(float));
    }
    return true;
}

} // namespace hubkv

extern "C" hubkv_status hubkv_rewrite(hubkv_device device, [[maybe_unused]] void* stream,
    hubkv_rewrite_params const* params, int32_t const* candidatePositions, int32_t const* indices,
    int64_t const* headOffsets, int64_t const* arena, int64_t const* segments, int32_t const* blockTable, void* kRows,
    void* vRows, int32_t* newPositions, float* rowBias)
{
    using namespace hubkv;
    return guard(
        [&]
        {
            checkDevice(device);
            RewriteArrays const arrays{candidatePositions, indices, headOffsets, arena, segments, blockTable, kRows,
                vRows, newPositions, rowBias};
            if (!checkRewrite(params, arrays) || params->keptRows == 0)
            {
                return;
            }
            if constexpr (kWITH_CUDA)
            {
                if (device == HUBKV_CUDA)
                {
                    rewriteCuda(stream, *params, arrays);
                    return;
                }
            }
            rewriteHost(*params, arrays);
        });
}
