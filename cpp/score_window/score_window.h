// SPDX-License-Identifier: Apache-2.0
//
// score_window: the last queries against the keys of the candidates. hubkv.h has the semantics.
#pragma once

#include "common/candidates.h"
#include "common/workspace.h"
#include "hubkv/hubkv.h"
#include "score_window/window_head.h"

#include <cstdint>

namespace hubkv
{

constexpr float kSMALLEST_SHARE = 1e-10F; // added to a share of the rkv score before its logarithm

//! The arrays of one hubkv_score_window call, as hubkv.h describes them.
struct ScoreArrays
{
    void const* q;
    int32_t const* positions;
    int64_t const* arena;
    int64_t const* segments;
    int32_t const* blockTable;
    float* raw;
    float* transformed;
    int32_t* candidatePositions;
    int64_t* candidateOffsets;
};

//! Where things lie in the scratch of the host; the one source of its size.
struct ScoreWorkspace
{
    explicit ScoreWorkspace(hubkv_score_window_params const& params)
        : window(carver, params.candidates.cache, params.W, params.Hq)
    {
    }

    WorkspaceCarver carver;
    WindowWorkspace window;
};

//! The kernels of one instruction set and element type.
struct ScoreKernels
{
    //! importance [candidates]
    void (*importance)(WindowHead const& head, float* importance);
    //! to [D] = the row.
    void (*widen)(char const* from, int64_t D, float* to);
};

ScoreKernels scoreKernelsScalar(hubkv_dtype dtype);
#if HUBKV_X86
ScoreKernels scoreKernelsAvx2(hubkv_dtype dtype);
ScoreKernels scoreKernelsAvx512(hubkv_dtype dtype);
#endif

//! Arguments as in hubkv_score_window, checked; what the tables hold is not.
void scoreWindowHost(hubkv_score_window_params const& params, ScoreArrays const& arrays, void* workspace);

//! The same on a GPU: enqueued on `stream`, all data in device memory.
int64_t scoreWindowCudaWorkspace(hubkv_score_window_params const& params);
void scoreWindowCuda(void* stream, hubkv_score_window_params const& params, ScoreArrays const& arrays, void* workspace);

} // namespace hubkv
