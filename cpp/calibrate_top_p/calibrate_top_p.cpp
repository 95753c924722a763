// SPDX-License-Identifier: Apache-2.0
//
// Entry points of calibrate_top_p: checks and dispatch.
#include "calibrate_top_p/calibrate_top_p.h"

#include "common/status.h"

namespace hubkv
{
namespace
{

void checkCalibrateParams(hubkv_calibrate_top_p_params const& params)
{
    checkRange("L", params.L, 1, kINT32_MAX);
    checkRange("Hkv", params.Hkv, 1, kINT32_MAX);
    checkedProduct("bytes of candidateOffsets", checkedProduct("L * Hkv", params.L, params.Hkv), sizeof(int64_t));
    checkRange("N", params.N, 0, kINT32_MAX);
    HUBKV_CHECK(params.p > 0.F && params.p <= 1.F, "p: %g is not in (0, 1]", static_cast<double>(params.p));
    checkRange("sinkTokens", params.sinkTokens, 0, kINT32_MAX);
    checkRange("minRows", params.minRows, 0, kINT32_MAX);
    checkRange("maxRows", params.maxRows, 0, kINT32_MAX);
    checkRange("layerRows", params.layerRows, 0, kINT32_MAX);
    checkRange("fill", params.fill, 0, 1);
    HUBKV_CHECK(params.fill == 0 || params.layerRows > 0, "layerRows: %lld, but fill needs a number of rows to fill",
        static_cast<long long>(params.layerRows));
}

} // namespace

CalibrateWorkspace::CalibrateWorkspace(hubkv_calibrate_top_p_params const& params)
{
    WorkspaceCarver carver;
    keys = carver.take<int32_t>(params.N);
    weights = carver.take<uint32_t>(params.N);
    least = carver.take<int32_t>(params.L * params.Hkv);
    bytes = carver.bytes();
}

} // namespace hubkv

extern "C"
{

hubkv_status hubkv_calibrate_top_p_workspace(
    hubkv_device device, hubkv_calibrate_top_p_params const* params, int64_t* bytes)
{
    using namespace hubkv;
    return guard(
        [&]
        {
            checkDevice(device);
            checkPointer("params", params);
            checkAligned("bytes", bytes, alignof(int64_t));
            checkCalibrateParams(*params);
            *bytes = CalibrateWorkspace(*params).bytes;
        });
}

hubkv_status hubkv_calibrate_top_p(hubkv_device device, [[maybe_unused]] void* stream,
    hubkv_calibrate_top_p_params const* params, float const* raw, float const* transformed,
    int32_t const* candidatePositions, int64_t const* candidateOffsets, int32_t* counts, float* temperature,
    float* calibrated, void* workspace, int64_t workspaceBytes)
{
    using namespace hubkv;
    return guard(
        [&]
        {
            checkDevice(device);
            checkPointer("params", params);
            checkCalibrateParams(*params);
            if (params->N > 0)
            {
                checkAligned("raw", raw, alignof(float));
                checkAligned("transformed", transformed, alignof(float));
                checkAligned("candidatePositions", candidatePositions, alignof(int32_t));
                checkAligned("calibrated", calibrated, alignof(float));
            }
            checkAligned("candidateOffsets", candidateOffsets, alignof(int64_t));
            checkAligned("counts", counts, alignof(int32_t));
            checkAligned("temperature", temperature, alignof(float));
            CalibrateArrays const arrays{
                raw, transformed, candidatePositions, candidateOffsets, counts, temperature, calibrated};
            int64_t const needed = CalibrateWorkspace(*params).bytes;
            if constexpr (kWITH_CUDA)
            {
                if (device == HUBKV_CUDA)
                {
                    checkWorkspace(workspace, workspaceBytes, needed, kCUDA_WORKSPACE_ALIGNMENT);
                    calibrateTopPCuda(stream, *params, arrays, workspace);
                    return;
                }
            }
            checkWorkspace(workspace, workspaceBytes, needed);
            calibrateTopPHost(*params, arrays, workspace);
        });
}

} // extern "C"
