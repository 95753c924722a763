// SPDX-License-Identifier: Apache-2.0
//
// Entry point of compact: checks and dispatch.
#include "compact/compact.h"

#include "common/dtype.h"
#include "common/status.h"

#include <cstdio>

namespace hubkv
{
namespace
{

void checkStrides(hubkv_compact_params const& params, char const* headField, int64_t headStride, char const* tokenField,
    int64_t tokenStride)
{
    checkRange(headField, headStride, 0, kINT64_MAX / 8); // bytes fit as well
    checkRange(tokenField, tokenStride, 0, kINT64_MAX / 8);
    int64_t const heads = checkedProduct(headField, params.Hkv - 1, headStride);
    int64_t const tokens = checkedProduct(tokenField, params.T - 1, tokenStride);
    HUBKV_CHECK(heads <= kINT64_MAX / 8 && tokens <= kINT64_MAX / 8, "%s, %s: %lld, %lld reach past 64 bits", headField,
        tokenField, static_cast<long long>(headStride), static_cast<long long>(tokenStride));
}

void checkCompactParams(hubkv_compact_params const& params)
{
    checkRange("L", params.L, 1, kINT64_MAX);
    checkRange("Hkv", params.Hkv, 1, kINT64_MAX);
    checkRange("T", params.T, 1, kINT32_MAX);
    checkHeadDim(params.D);
    int64_t const heads = checkedProduct("L * Hkv", params.L, params.Hkv);
    checkRange("K", params.K, 0, checkedProduct("L * Hkv * T", heads, params.T));
    HUBKV_CHECK(isDtype(params.dtype), "dtype: %d is not HUBKV_FLOAT32 (0), HUBKV_FLOAT16 (1) or HUBKV_BFLOAT16 (2)",
        static_cast<int>(params.dtype));
    checkedProduct("bytes of kRows and vRows", params.K, 2 * params.D * elementBytes(params.dtype));
    checkStrides(params, "kHeadStride", params.kHeadStride, "kTokenStride", params.kTokenStride);
    checkStrides(params, "vHeadStride", params.vHeadStride, "vTokenStride", params.vTokenStride);
}

void checkLayers(char const* field, void const* const* layers, int64_t L, int64_t alignment)
{
    checkAligned(field, layers, alignof(void*));
    for (int64_t layer = 0; layer < L; ++layer)
    {
        char name[32];
        std::snprintf(name, sizeof(name), "%s[%lld]", field, static_cast<long long>(layer));
        checkAligned(name, layers[layer], alignment);
    }
}

} // namespace
} // namespace hubkv

extern "C" hubkv_status hubkv_compact(hubkv_device device, [[maybe_unused]] void* stream,
    hubkv_compact_params const* params, void const* const* k, void const* const* v, int32_t const* positions,
    int64_t const* headOffsets, void* kRows, void* vRows)
{
    using namespace hubkv;
    return guard(
        [&]
        {
            checkDevice(device);
            checkPointer("params", params);
            checkCompactParams(*params);
            int64_t const element = elementBytes(params->dtype);
            checkLayers("k", k, params->L, element);
            checkLayers("v", v, params->L, element);
            checkAligned("headOffsets", headOffsets, alignof(int64_t));
            if (params->K > 0)
            {
                checkAligned("positions", positions, alignof(int32_t));
                checkAligned("kRows", kRows, element);
                checkAligned("vRows", vRows, element);
                if constexpr (kWITH_CUDA)
                {
                    if (device == HUBKV_CUDA)
                    {
                        compactCuda(stream, *params, k, v, positions, headOffsets, kRows, vRows);
                        return;
                    }
                }
                compactHost(*params, k, v, positions, headOffsets, kRows, vRows);
            }
        });
}
