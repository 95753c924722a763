// SPDX-License-Identifier: Apache-2.0
#include "plan/plan.h"

#include "common/cache_view.h"
#include "common/status.h"

extern "C" hubkv_status hubkv_plan(hubkv_device device, [[maybe_unused]] void* stream, hubkv_cache_params const* params,
    int64_t minRowsPerItem, int64_t const* arena, int64_t const* segments, int32_t* work, int32_t* workCount)
{
    return hubkv::guard(
        [&]
        {
            hubkv::checkPointer("params", params);
            hubkv::checkCacheParams(*params);
            hubkv::checkRange("minRowsPerItem", minRowsPerItem, 1, hubkv::kINT64_MAX);
            hubkv::checkAligned("arena", arena, sizeof(int64_t));
            hubkv::checkAligned("segments", segments, sizeof(int64_t));
            hubkv::checkAligned("work", work, sizeof(int32_t));
            hubkv::checkAligned("workCount", workCount, sizeof(int32_t));
            hubkv::checkDevice(device);
            hubkv::WorkItem* const items = reinterpret_cast<hubkv::WorkItem*>(work);
            if constexpr (hubkv::kWITH_CUDA)
            {
                if (device == HUBKV_CUDA)
                {
                    hubkv::planCuda(stream, *params, minRowsPerItem, arena, segments, items, workCount);
                    return;
                }
            }
            hubkv::planHost(*params, minRowsPerItem, arena, segments, items, workCount);
        });
}
