// SPDX-License-Identifier: Apache-2.0
//
// held_out_loss on the host: a task per head, which nothing outside it touches.
#include "common/cpu.h"
#include "common/thread_pool.h"
#include "held_out_loss/held_out_loss.h"

#include <algorithm>
#include <limits>

namespace hubkv
{
namespace
{

LossKernel kernelFor(hubkv_dtype dtype)
{
#if HUBKV_X86
    switch (cpuIsa())
    {
    case Isa::kAVX512: return lossKernelAvx512(dtype);
    case Isa::kAVX2: return lossKernelAvx2(dtype);
    case Isa::kSCALAR: break;
    }
#endif
    return lossKernelScalar(dtype);
}

//! The best ranking of candidates that are not protected.
float bestOf(float const* ranking, int32_t const* positions, int64_t count, int32_t sinkTokens)
{
    float best = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < count; ++i)
    {
        best = positions[i] >= sinkTokens ? std::max(best, rankOf(ranking[i])) : best;
    }
    return best;
}

//! rows [kLEVELS + 1]
void countRows(LossHead const& head, int32_t* rows)
{
    std::fill(rows, rows + kLEVELS + 1, 0);
    for (int64_t i = 0; i < head.candidates; ++i)
    {
        bool const held = head.positions[i] < head.sinkTokens;
        ++rows[held ? 0 : levelOf(head.best, head.ranking[i]) + 1];
    }
    for (int32_t level = 0; level < kLEVELS; ++level)
    {
        rows[level + 1] += rows[level];
    }
}

} // namespace

void heldOutLossHost(hubkv_held_out_loss_params const& params, LossArrays const& arrays, void* workspace)
{
    hubkv_candidates_params const all = allRows(params);
    hubkv_cache_params const& shape = all.cache;
    CacheView const cache(shape, arrays.arena);
    LossWorkspace const layout(params);
    LossKernel const kernel = kernelFor(shape.dtype);
    int32_t const sinkTokens = params.candidates.sinkTokens;

    parallelFor(shape.L * shape.Hkv,
        [&](int64_t number)
        {
            HeadCandidates const rows(all, cache, arrays.segments, arrays.blockTable, number);
            int64_t const first = rows.firstRow + number * params.candidates.tailTokens;
            int64_t const count = rows.compact + params.candidates.tailTokens;
            float const* const ranking = arrays.ranking + first;
            int32_t const* const positions = arrays.candidatePositions + first;
            LossHead const head{layout.window.head(params, arrays.q, rows, number, workspace), count,
                rows.count() - params.W + 1, ranking, positions, sinkTokens,
                bestOf(ranking, positions, count, sinkTokens),
                layout.masses.in(workspace) + number * layout.window.queries * kLEVELS,
                arrays.loss + number * (kLEVELS + 1)};
            countRows(head, arrays.rows + number * (kLEVELS + 1));
            kernel(head);
        });
}

} // namespace hubkv
