// SPDX-License-Identifier: Apache-2.0
//
// Entry point of append: checks and dispatch.
#include "append/append.h"

#include "common/cache_view.h"
#include "common/status.h"

extern "C" hubkv_status hubkv_append(hubkv_device device, [[maybe_unused]] void* stream,
    hubkv_cache_params const* params, int64_t Tq, void const* kNew, void const* vNew, int64_t const* arena,
    int32_t const* blockTable, int32_t const* tailLengths, int32_t const* newLengths)
{
    using namespace hubkv;
    return guard(
        [&]
        {
            checkDevice(device);
            checkPointer("params", params);
            checkCacheParams(*params);
            checkRange("Tq", Tq, 1, kINT32_MAX);
            int64_t const element = elementBytes(params->dtype);
            int64_t const rows = checkedProduct("L * B * Tq * Hkv",
                checkedProduct("L * B * Tq", checkedProduct("L * B", params->L, params->B), Tq), params->Hkv);
            checkedProduct("bytes of kNew and vNew", rows, 2 * params->D * element);
            checkAligned("kNew", kNew, element);
            checkAligned("vNew", vNew, element);
            checkAligned("arena", arena, alignof(int64_t));
            if (params->maxPages > 0)
            {
                checkAligned("blockTable", blockTable, alignof(int32_t));
            }
            checkAligned("tailLengths", tailLengths, alignof(int32_t));
            if (newLengths != nullptr)
            {
                checkAligned("newLengths", newLengths, alignof(int32_t));
            }
            if constexpr (kWITH_CUDA)
            {
                if (device == HUBKV_CUDA)
                {
                    appendCuda(stream, *params, Tq, kNew, vNew, arena, blockTable, tailLengths, newLengths);
                    return;
                }
            }
            appendHost(*params, Tq, kNew, vNew, arena, blockTable, tailLengths, newLengths);
        });
}
