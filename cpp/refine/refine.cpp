// SPDX-License-Identifier: Apache-2.0
//
// Entry points of refine: checks and dispatch.
#include "refine/refine.h"

#include "common/status.h"

#include <algorithm>
#include <cmath>

namespace hubkv
{
namespace
{

void checkRefineParams(hubkv_refine_params const& params)
{
    checkRange("L", params.L, 1, kINT64_MAX);
    checkRange("Hkv", params.Hkv, 1, kINT64_MAX);
    checkRange("T", params.T, 1, kINT64_MAX);
    int64_t const scores = checkedProduct("L * Hkv * T", checkedProduct("L * Hkv", params.L, params.Hkv), params.T);
    checkedProduct("bytes of scores", scores, sizeof(float));
    HUBKV_CHECK(params.nmsKernel >= 1 && params.nmsKernel % 2 == 1, "nmsKernel: %d is not an odd number >= 1",
        params.nmsKernel);
    HUBKV_CHECK(params.penaltyFactor >= 0.0F && params.penaltyFactor <= 1.0F, "penaltyFactor: %g is not in [0, 1]",
        static_cast<double>(params.penaltyFactor));
    HUBKV_CHECK(std::isfinite(params.headWeightTemperature) && params.headWeightTemperature >= 0.0F,
        "headWeightTemperature: %g is not a finite number >= 0", static_cast<double>(params.headWeightTemperature));
    HUBKV_CHECK(std::isfinite(params.minHeadWeight) && params.minHeadWeight > 0.0F,
        "minHeadWeight: %g is not a finite number > 0", static_cast<double>(params.minHeadWeight));
    HUBKV_CHECK(std::isfinite(params.maxHeadWeight) && params.maxHeadWeight >= params.minHeadWeight,
        "maxHeadWeight: %g is not a finite number >= minHeadWeight (%g)", static_cast<double>(params.maxHeadWeight),
        static_cast<double>(params.minHeadWeight));
    checkRange("sinkTokens", params.sinkTokens, 0, kINT32_MAX);
}

} // namespace

RefineWorkspace::RefineWorkspace(hubkv_refine_params const& params)
    : chunks((params.T - 1) / kREFINE_CHUNK + 1)
{
    int64_t const heads = params.L * params.Hkv;
    WorkspaceCarver carver;
    moments = carver.take<Moments>(heads * chunks);
    maxima = carver.take<float>(heads * chunks);
    variations = carver.take<HeadVariation>(heads);
    beta = carver.take<float>(heads);
    bytes = carver.bytes();
}

} // namespace hubkv

extern "C"
{

hubkv_status hubkv_refine_workspace(hubkv_device device, hubkv_refine_params const* params, int64_t* bytes)
{
    using namespace hubkv;
    return guard(
        [&]
        {
            checkDevice(device);
            checkPointer("params", params);
            checkAligned("bytes", bytes, alignof(int64_t));
            checkRefineParams(*params);
            *bytes = RefineWorkspace(*params).bytes;
        });
}

hubkv_status hubkv_refine(hubkv_device device, [[maybe_unused]] void* stream, hubkv_refine_params const* params,
    float const* scores, float const* alpha, int32_t const* window, float* refined, int64_t* nonFinite, void* workspace,
    int64_t workspaceBytes)
{
    using namespace hubkv;
    return guard(
        [&]
        {
            checkDevice(device);
            checkPointer("params", params);
            checkRefineParams(*params);
            checkAligned("scores", scores, alignof(float));
            checkAligned("alpha", alpha, alignof(float));
            checkAligned("window", window, alignof(int32_t));
            checkAligned("refined", refined, alignof(float));
            if (nonFinite != nullptr)
            {
                checkAligned("nonFinite", nonFinite, alignof(int64_t));
            }
            uintptr_t const bytes = static_cast<uintptr_t>(params->L * params->Hkv * params->T) * sizeof(float);
            uintptr_t const from = reinterpret_cast<uintptr_t>(scores);
            uintptr_t const to = reinterpret_cast<uintptr_t>(refined);
            HUBKV_CHECK(from + bytes <= to || to + bytes <= from, "refined: %p overlaps scores at %p",
                static_cast<void const*>(refined), static_cast<void const*>(scores));
            if constexpr (kWITH_CUDA)
            {
                if (device == HUBKV_CUDA)
                {
                    checkWorkspace(
                        workspace, workspaceBytes, RefineWorkspace(*params).bytes, kCUDA_WORKSPACE_ALIGNMENT);
                    refineCuda(stream, *params, scores, alpha, window, refined, nonFinite, workspace);
                    return;
                }
            }
            HUBKV_CHECK(*alpha >= 0.0F && *alpha <= 1.0F, "alpha: %g is not in [0, 1]", static_cast<double>(*alpha));
            HUBKV_CHECK(*window >= 0, "window: %d is not >= 0", *window);
            checkWorkspace(workspace, workspaceBytes, RefineWorkspace(*params).bytes);
            refineHost(*params, scores, *alpha, std::min<int64_t>(*window, params->T), refined, nonFinite, workspace);
        });
}

} // extern "C"
