// SPDX-License-Identifier: Apache-2.0
//
// Entry point of merge: checks and dispatch.
#include "merge/merge.h"

#include "common/status.h"

extern "C" hubkv_status hubkv_merge(hubkv_device device, [[maybe_unused]] void* stream,
    hubkv_rewrite_params const* params, float const* logits, int32_t const* candidatePositions, int32_t const* indices,
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
            if (!checkRewrite(params, arrays) || params->mergedRows == 0)
            {
                return;
            }
            checkPointer("rowBias", rowBias);
            if (candidateCount(params->candidates) > 0)
            {
                checkAligned("logits", logits, alignof(float));
            }
            if constexpr (kWITH_CUDA)
            {
                if (device == HUBKV_CUDA)
                {
                    mergeCuda(stream, *params, logits, arrays);
                    return;
                }
            }
            mergeHost(*params, logits, arrays);
        });
}
