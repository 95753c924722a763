// SPDX-License-Identifier: Apache-2.0
//
// held_out_loss: later queries judge what earlier ones ranked. hubkv.h has the semantics.
#pragma once

#include "common/candidates.h"
#include "common/workspace.h"
#include "hubkv/hubkv.h"
#include "score_window/window_head.h"

#include <cstdint>

namespace hubkv
{

constexpr int32_t kLEVELS = HUBKV_LEVELS;
constexpr int32_t kALWAYS_KEPT = -1; // the level of what no head drops

//! The arrays of one hubkv_held_out_loss call, as hubkv.h describes them.
struct LossArrays
{
    void const* q;
    float const* ranking;
    int32_t const* candidatePositions;
    int64_t const* arena;
    int64_t const* segments;
    int32_t const* blockTable;
    float* loss;
    int32_t* rows;
};

//! What a candidate ranks by; NaN as -inf.
HUBKV_HOST_DEVICE inline float rankOf(float ranking)
{
    return ranking == ranking ? ranking : -__builtin_inff();
}

//! best: of the candidates that are not protected. The same float32 steps on every backend.
HUBKV_HOST_DEVICE inline int32_t levelOf(float best, float ranking)
{
    if (!(best >= -3.40282347e38F && best <= 3.40282347e38F))
    {
        return kLEVELS - 1;
    }
    float const below = 2.F * (best - rankOf(ranking));
    // The whole part: below is not negative, and may be infinite.
    return below < static_cast<float>(kLEVELS - 1) ? static_cast<int32_t>(below) : kLEVELS - 1;
}

//! The candidates with the rest of the tail behind them: all rows that the last query sees.
inline hubkv_candidates_params allRows(hubkv_held_out_loss_params const& params)
{
    hubkv_candidates_params all = params.candidates;
    all.tailTokens = params.tailLength;
    return all;
}

//! Where things lie in the scratch of the host; the one source of its size.
struct LossWorkspace
{
    explicit LossWorkspace(hubkv_held_out_loss_params const& params)
        : window(carver, params.candidates.cache, params.W, params.Hq)
    {
        hubkv_cache_params const& cache = params.candidates.cache;
        int64_t const all = checkedProduct("workspace", cache.L * cache.Hkv, window.queries);
        masses = carver.take<float>(checkedProduct("workspace", all, kLEVELS));
    }

    WorkspaceCarver carver;
    WindowWorkspace window;
    WorkspaceArray<float> masses; // [L*Hkv, queries / width, kLEVELS, width]
};

//! The judgement of one head.
struct LossHead
{
    WindowHead window;
    int64_t candidates;       // rows 0..candidates-1 of the window; later ones are the rest of the tail
    int64_t seenByFirst;      // rows 0..seenByFirst-1 are those that query token 0 sees; each sees one more
    float const* ranking;     // [candidates]
    int32_t const* positions; // [candidates]
    int32_t sinkTokens;
    float best;    // of the candidates that are not protected
    float* masses; // [queries / width, kLEVELS, width]
    float* loss;   // [kLEVELS + 1]
};

//! The kernel of one instruction set and element type.
using LossKernel = void (*)(LossHead const& head);

LossKernel lossKernelScalar(hubkv_dtype dtype);
#if HUBKV_X86
LossKernel lossKernelAvx2(hubkv_dtype dtype);
LossKernel lossKernelAvx512(hubkv_dtype dtype);
#endif

//! Arguments as in hubkv_held_out_loss, checked; what the tables hold is not.
void heldOutLossHost(hubkv_held_out_loss_params const& params, LossArrays const& arrays, void* workspace);

//! The same on a GPU: enqueued on `stream`, all data in device memory.
int64_t heldOutLossCudaWorkspace(hubkv_held_out_loss_params const& params);
void heldOutLossCuda(void* stream, hubkv_held_out_loss_params const& params, LossArrays const& arrays, void* workspace);

} // namespace hubkv
