// SPDX-License-Identifier: Apache-2.0
//
// Entry points of select: checks and dispatch.
#include "select/select.h"

#include "common/status.h"

namespace hubkv
{
namespace
{

// Below this the scores of a group stay in cache and histograms over them cost little.
constexpr int64_t kSAMPLED_GROUP = 1LL << 18;

void checkSelectParams(hubkv_select_params const& params)
{
    checkRange("S", params.S, 1, kINT64_MAX);
    checkRange("H", params.H, 1, kINT64_MAX);
    checkRange("T", params.T, 1, kINT32_MAX);
    int64_t const group = checkedProduct("H * T", params.H, params.T);
    checkedProduct("bytes of refined", checkedProduct("S * H * T", params.S, group), sizeof(float));
    checkRange("K", params.K, 0, group);
}

} // namespace

SelectWorkspace::SelectWorkspace(hubkv_select_params const& params)
    : chunksPerHead((params.T - 1) / kSELECT_CHUNK + 1)
{
    int64_t const scores = params.H * params.T;
    bool const sampled = scores >= kSAMPLED_GROUP;
    // A bracket holds about 4% of the scores; the rest is room for values that occur often.
    candidateCapacity = sampled ? scores / 8 : 0;
    WorkspaceCarver carver;
    chunks = carver.take<SelectChunk>(params.H * chunksPerHead);
    histogram = carver.take<int64_t>(kSELECT_BINS);
    sample = carver.take<int32_t>(sampled ? kSELECT_SAMPLE : 0);
    candidates = carver.take<int32_t>(candidateCapacity);
    bytesPerGroup = carver.bytes();
    bytes = checkedProduct("workspace", params.S, bytesPerGroup);
}

SelectCudaWorkspace::SelectCudaWorkspace(hubkv_select_params const& params)
    : tilesPerHead((params.T + 3 + kSELECT_TILE - 1) / kSELECT_TILE) // from any 16-byte boundary on
{
    int64_t const allTiles = checkedProduct("workspace", checkedProduct("workspace", params.S, params.H), tilesPerHead);
    int64_t const passes = checkedProduct("workspace", params.S, kSELECT_PASSES);
    WorkspaceCarver carver;
    histograms = carver.take<unsigned long long>(checkedProduct("workspace", passes, kSELECT_BINS));
    ranks = carver.take<SelectRank>(passes);
    counts = carver.take<uint32_t>(allTiles);
    tiles = carver.take<SelectTile>(allTiles);
    bytes = carver.bytes();
}

} // namespace hubkv

extern "C"
{

hubkv_status hubkv_select_workspace(hubkv_device device, hubkv_select_params const* params, int64_t* bytes)
{
    using namespace hubkv;
    return guard(
        [&]
        {
            checkDevice(device);
            checkPointer("params", params);
            checkAligned("bytes", bytes, alignof(int64_t));
            checkSelectParams(*params);
            *bytes = device == HUBKV_CUDA ? SelectCudaWorkspace(*params).bytes : SelectWorkspace(*params).bytes;
        });
}

hubkv_status hubkv_select(hubkv_device device, [[maybe_unused]] void* stream, hubkv_select_params const* params,
    float const* refined, int32_t* positions, int64_t* headOffsets, void* workspace, int64_t workspaceBytes)
{
    using namespace hubkv;
    return guard(
        [&]
        {
            checkDevice(device);
            checkPointer("params", params);
            checkSelectParams(*params);
            checkAligned("refined", refined, alignof(float));
            if (params->K > 0)
            {
                checkAligned("positions", positions, alignof(int32_t));
            }
            checkAligned("headOffsets", headOffsets, alignof(int64_t));
            if constexpr (kWITH_CUDA)
            {
                if (device == HUBKV_CUDA)
                {
                    checkWorkspace(
                        workspace, workspaceBytes, SelectCudaWorkspace(*params).bytes, kCUDA_WORKSPACE_ALIGNMENT);
                    selectCuda(stream, *params, refined, positions, headOffsets, workspace);
                    return;
                }
            }
            checkWorkspace(workspace, workspaceBytes, SelectWorkspace(*params).bytes);
            selectHost(*params, refined, positions, headOffsets, workspace);
        });
}

} // extern "C"
