// SPDX-License-Identifier: Apache-2.0
//
// Entry point of select_ragged: checks and dispatch.
#include "select_ragged/select_ragged.h"

#include "common/status.h"

extern "C" hubkv_status hubkv_select_ragged(hubkv_device device, [[maybe_unused]] void* stream,
    hubkv_select_ragged_params const* params, float const* scores, int32_t const* candidatePositions,
    int64_t const* candidateOffsets, int32_t const* counts, int32_t* indices, int64_t* headOffsets)
{
    using namespace hubkv;
    return guard(
        [&]
        {
            checkDevice(device);
            checkPointer("params", params);
            checkRange("H", params->H, 1, kINT32_MAX);
            checkRange("N", params->N, 0, kINT32_MAX);
            checkRange("K", params->K, 0, params->N);
            checkRange("sinkTokens", params->sinkTokens, 0, kINT32_MAX);
            if (params->N > 0)
            {
                checkAligned("scores", scores, alignof(float));
                checkAligned("candidatePositions", candidatePositions, alignof(int32_t));
            }
            if (params->K > 0)
            {
                checkAligned("indices", indices, alignof(int32_t));
            }
            checkAligned("candidateOffsets", candidateOffsets, alignof(int64_t));
            checkAligned("counts", counts, alignof(int32_t));
            checkAligned("headOffsets", headOffsets, alignof(int64_t));
            SelectRaggedArrays const arrays{scores, candidatePositions, candidateOffsets, counts, indices, headOffsets};
            if constexpr (kWITH_CUDA)
            {
                if (device == HUBKV_CUDA)
                {
                    selectRaggedCuda(stream, *params, arrays);
                    return;
                }
            }
            selectRaggedHost(*params, arrays);
        });
}
