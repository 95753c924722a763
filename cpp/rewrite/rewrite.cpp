// SPDX-License-Identifier: Apache-2.0
//
// Entry point of rewrite: checks and dispatch.
#include "rewrite/rewrite.h"

#include "common/status.h"

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
            checkPointer("params", params);
            hubkv_candidates_params const& candidates = params->candidates;
            checkCandidatesParams(candidates);
            checkRange("newRows", params->newRows, 0, kINT32_MAX);
            checkAligned("headOffsets", headOffsets, alignof(int64_t));
            checkAligned("arena", arena, alignof(int64_t));
            checkAligned("segments", segments, alignof(int64_t));
            if (candidates.cache.maxPages > 0)
            {
                checkAligned("blockTable", blockTable, alignof(int32_t));
            }
            if (candidateCount(candidates) > 0)
            {
                checkAligned("candidatePositions", candidatePositions, alignof(int32_t));
            }
            if (params->newRows == 0)
            {
                return;
            }
            int64_t const element = elementBytes(candidates.cache.dtype);
            checkAligned("indices", indices, alignof(int32_t));
            checkAligned("kRows", kRows, element);
            checkAligned("vRows", vRows, element);
            checkAligned("newPositions", newPositions, alignof(int32_t));
            if (rowBias != nullptr)
            {
                checkAligned("rowBias", rowBias, alignof(float));
            }
            RewriteArrays const arrays{candidatePositions, indices, headOffsets, arena, segments, blockTable, kRows,
                vRows, newPositions, rowBias};
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
