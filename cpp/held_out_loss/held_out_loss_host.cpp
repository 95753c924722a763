// SPDX-License-Identifier: Apache-2.0
//
// held_out_loss on the host: a task per head, which nothing outside it touches.
#include "attend/row_stream.h"
#include "common/cpu.h"
#include "common/thread_pool.h"
#include "held_out_loss/held_out_loss.h"

#include <algorithm>
#include <cmath>
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
    int64_t const G = params.Hq / shape.Hkv;
    float const scale = params.scale != 0.F ? params.scale : 1.F / std::sqrt(static_cast<float>(shape.D));
    int64_t const queryBytes = shape.D * elementBytes(shape.dtype);
    int32_t const sinkTokens = params.candidates.sinkTokens;

    parallelFor(shape.L * shape.Hkv,
        [&](int64_t number)
        {
            HeadCandidates const rows(all, cache, arrays.segments, arrays.blockTable, number);
            int64_t const layer = number / shape.Hkv;
            int64_t const first = rows.firstRow + number * params.candidates.tailTokens;
            int64_t const count = rows.compact + params.candidates.tailTokens;
            float const* const ranking = arrays.ranking + first;
            int32_t const* const positions = arrays.candidatePositions + first;
            char const* const q = static_cast<char const*>(arrays.q)
                + (layer * params.W * params.Hq + (number - layer * shape.Hkv) * G) * queryBytes;
            LossHead const head{WindowHead{rows, q, params.W, G, params.Hq * shape.D, shape.D, scale * kLOG2_E,
                                    layout.packed.in(workspace) + number * layout.queries * shape.D,
                                    layout.maxima.in(workspace) + number * layout.queries,
                                    layout.sums.in(workspace) + number * layout.queries},
                count, rows.count() - params.W + 1, ranking, positions, sinkTokens,
                bestOf(ranking, positions, count, sinkTokens),
                layout.masses.in(workspace) + number * layout.queries * kLEVELS, arrays.loss + number * (kLEVELS + 1)};
            countRows(head, arrays.rows + number * (kLEVELS + 1));
            kernel(head);
        });
}

} // namespace hubkv
