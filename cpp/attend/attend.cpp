// SPDX-License-Identifier: Apache-2.0
#include "attend/attend.h"

#include "common/cache_view.h"
#include "common/status.h"

#include <cmath>

namespace
{

void checkStride(char const* field, int64_t stride, char const* least, int64_t atLeast, int64_t tokens)
{
    HUBKV_CHECK(stride >= atLeast, "%s: %lld is less than %s = %lld", field, static_cast<long long>(stride), least,
        static_cast<long long>(atLeast));
    hubkv::checkedProduct(field, hubkv::checkedProduct(field, tokens, stride), sizeof(float));
}

void checkParams(hubkv_attend_params const& params)
{
    hubkv_cache_params const& cache = params.cache;
    hubkv::checkCacheParams(cache);
    hubkv::checkRange("Hq", params.Hq, 1, hubkv::kINT32_MAX);
    HUBKV_CHECK(params.Hq % cache.Hkv == 0 && params.Hq / cache.Hkv <= 16,
        "Hq: %lld is not Hkv = %lld times a whole number in 1..16", static_cast<long long>(params.Hq),
        static_cast<long long>(cache.Hkv));
    // G * Tq queries of a head are counted in 32 bits.
    hubkv::checkRange("Tq", params.Tq, 1, hubkv::kINT32_MAX / 16);
    hubkv::checkRange("layer", params.layer, 0, cache.L - 1);
    HUBKV_CHECK(std::isfinite(params.scale), "scale: %g is not finite", static_cast<double>(params.scale));
    int64_t const tokens = hubkv::checkedProduct("B * Tq", cache.B, params.Tq);
    checkStride("qTokenStride", params.qTokenStride, "Hq * D", params.Hq * cache.D, tokens);
    checkStride("kTokenStride", params.kTokenStride, "Hkv * D", cache.Hkv * cache.D, tokens);
    checkStride("vTokenStride", params.vTokenStride, "Hkv * D", cache.Hkv * cache.D, tokens);
}

} // namespace

extern "C"
{

hubkv_status hubkv_attend_workspace(hubkv_device device, hubkv_attend_params const* params, int64_t* bytes)
{
    return hubkv::guard(
        [&]
        {
            hubkv::checkPointer("params", params);
            checkParams(*params);
            hubkv::checkPointer("bytes", bytes);
            hubkv::checkDevice(device);
            if constexpr (hubkv::kWITH_CUDA)
            {
                if (device == HUBKV_CUDA)
                {
                    *bytes = hubkv::attendCudaWorkspace(*params);
                    return;
                }
            }
            *bytes = hubkv::AttendLayout(*params).bytes;
        });
}

hubkv_status hubkv_attend(hubkv_device device, [[maybe_unused]] void* stream, hubkv_attend_params const* params,
    void const* q, void const* kNew, void const* vNew, int64_t const* arena, int64_t const* segments,
    int32_t const* blockTable, int32_t const* tailLengths, int32_t const* newLengths, int32_t const* work,
    int32_t const* workCount, void* out, void* workspace, int64_t workspaceBytes)
{
    return hubkv::guard(
        [&]
        {
            hubkv::checkPointer("params", params);
            checkParams(*params);
            int64_t const elementBytes = hubkv::elementBytes(params->cache.dtype);
            hubkv::checkAligned("q", q, elementBytes);
            hubkv::checkAligned("kNew", kNew, elementBytes);
            hubkv::checkAligned("vNew", vNew, elementBytes);
            hubkv::checkAligned("arena", arena, sizeof(int64_t));
            hubkv::checkAligned("segments", segments, sizeof(int64_t));
            if (params->cache.maxPages > 0)
            {
                hubkv::checkAligned("blockTable", blockTable, sizeof(int32_t));
            }
            hubkv::checkAligned("tailLengths", tailLengths, sizeof(int32_t));
            if (newLengths != nullptr)
            {
                hubkv::checkAligned("newLengths", newLengths, sizeof(int32_t));
            }
            hubkv::checkAligned("work", work, sizeof(int32_t));
            hubkv::checkAligned("workCount", workCount, sizeof(int32_t));
            hubkv::checkAligned("out", out, elementBytes);
            hubkv::checkDevice(device);
            hubkv::AttendArrays const arrays{q, kNew, vNew, arena, segments, blockTable, tailLengths, newLengths,
                reinterpret_cast<hubkv::WorkItem const*>(work), workCount, out};
            if constexpr (hubkv::kWITH_CUDA)
            {
                if (device == HUBKV_CUDA)
                {
                    hubkv::checkWorkspace(workspace, workspaceBytes, hubkv::attendCudaWorkspace(*params),
                        hubkv::kCUDA_WORKSPACE_ALIGNMENT);
                    hubkv::attendCuda(stream, *params, arrays, workspace);
                    return;
                }
            }
            hubkv::checkWorkspace(workspace, workspaceBytes, hubkv::AttendLayout(*params).bytes);
            hubkv::attendHost(*params, arrays, workspace);
        });
}

} // extern "C"
