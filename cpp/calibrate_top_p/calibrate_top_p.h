// SPDX-License-Identifier: Apache-2.0
//
// calibrate_top_p: how many candidates each head keeps. hubkv.h has the semantics.
#pragma once

#include "common/workspace.h"
#include "hubkv/hubkv.h"

#include <cstdint>

namespace hubkv
{

//! The arrays of one hubkv_calibrate_top_p call, as hubkv.h describes them.
struct CalibrateArrays
{
    float const* raw;
    float const* transformed;
    int32_t const* candidatePositions;
    int64_t const* candidateOffsets;
    int32_t* counts;
    float* temperature;
    float* calibrated;
};

//! Scratch, the same on both devices.
struct CalibrateWorkspace
{
    explicit CalibrateWorkspace(hubkv_calibrate_top_p_params const& params);

    WorkspaceArray<int32_t> keys;     // [N] protected ones: kPROTECTED_KEY
    WorkspaceArray<uint32_t> weights; // [N]
    WorkspaceArray<int32_t> least;    // [L*Hkv] rows that a head keeps in any case
    int64_t bytes;
};

//! Arguments as in hubkv_calibrate_top_p, checked; what offsets and positions hold is not.
void calibrateTopPHost(hubkv_calibrate_top_p_params const& params, CalibrateArrays const& arrays, void* workspace);

//! The same on a GPU: enqueued on `stream`, all data in device memory; the same bits.
void calibrateTopPCuda(
    void* stream, hubkv_calibrate_top_p_params const& params, CalibrateArrays const& arrays, void* workspace);

} // namespace hubkv
