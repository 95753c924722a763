// SPDX-License-Identifier: Apache-2.0
//
// score_window on the GPU. Launches:
//   windowSums, mergeSums (window_tile.h)
//   windowScores  importance of every row -> raw, positions, offsets
//   poolScores    snapkv, or
//   mixScores     rkv
#include "score_window/score_window.h"

#include "common/candidates.h"
#include "common/device.h"
#include "score_window/score_rkv.h"
#include "score_window/window_tile.h"

namespace hubkv
{
namespace
{

//! Where things lie in the workspace; the one source of its size.
struct ScoreCudaWorkspace
{
    explicit ScoreCudaWorkspace(hubkv_score_window_params const& params)
        : window(carver, params.candidates, params.W, params.Hq, kMAX_SLOTS)
    {
    }

    WorkspaceCarver carver;
    WindowArrays window;
};

struct ScoreArguments
{
    hubkv_score_window_params params;
    ScoreArrays arrays;
    Window window;
};

template <typename T>
__global__ void __launch_bounds__(kTILE_THREADS, 4) windowScores(ScoreArguments const arguments)
{
    HUBKV_DYNAMIC_SHARED(float, shared);
    __shared__ float parts[kTILE_THREADS];
    ScoreArrays const& arrays = arguments.arrays;
    Window const& window = arguments.window;
    int64_t const number = blockIdx.x / window.slots;
    int64_t const slot = blockIdx.x - number * window.slots;
    hubkv_candidates_params const& params = arguments.params.candidates;
    CacheView const cache(params.cache, arrays.arena);
    HeadCandidates const candidates(params, cache, arrays.segments, arrays.blockTable, number);
    WindowTile<T> tile(window, candidates, number, shared);
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    int32_t const own = thread / kWARP_SIZE * kWARP_QUERIES;
    float const* const maxima = window.maxima + number * window.queries;
    float const* const shares = window.shares + number * window.queries;
    if (slot == 0 && thread == 0)
    {
        arrays.candidateOffsets[number] = candidates.first;
        if (number == params.cache.L * params.cache.Hkv - 1)
        {
            arrays.candidateOffsets[number + 1] = candidateCount(params);
        }
    }
    for (int64_t first = slot * kWARP_SIZE; first < candidates.count(); first += window.slots * kWARP_SIZE)
    {
        tile.loadRows(first);
        float total = 0.F;
        for (int32_t firstQuery = 0; firstQuery < window.queries; firstQuery += kTILE_QUERIES)
        {
            float logits[kWARP_QUERIES];
            tile.logits(firstQuery, logits);
#pragma unroll
            for (int32_t n = 0; n < kWARP_QUERIES; ++n)
            {
                int32_t const query = firstQuery + own + n;
                if (query < window.queries)
                {
                    total = fmaf(exp2f(logits[n] - maxima[query]), shares[query], total);
                }
            }
        }
        parts[thread] = total; // those of the tile before were read before its queries were loaded
        __syncthreads();
        int64_t const i = first + thread;
        if (thread < kWARP_SIZE && i < candidates.count())
        {
            float importance = 0.F;
            for (int32_t warp = 0; warp < kTILE_WARPS; ++warp)
            {
                importance += parts[warp * kWARP_SIZE + thread];
            }
            bool const there = candidates.row(i).k != nullptr;
            float const raw = there ? logf(importance / static_cast<float>(window.queries)) : kNO_LOGIT;
            arrays.raw[candidates.first + i] = raw;
            arrays.transformed[candidates.first + i] = raw;
            arrays.candidatePositions[candidates.first + i] = candidates.position(arrays.positions, i);
        }
    }
}

__global__ void __launch_bounds__(kTILE_THREADS) poolScores(ScoreArguments const arguments)
{
    ScoreArrays const& arrays = arguments.arrays;
    int32_t const sinkTokens = arguments.params.candidates.sinkTokens;
    int64_t const reach = arguments.params.poolKernel / 2;
    int64_t const number = blockIdx.x / arguments.window.slots;
    int64_t const slot = blockIdx.x - number * arguments.window.slots;
    HeadEntries const entries(arrays.candidateOffsets, number, candidateCount(arguments.params.candidates));
    int64_t const end = entries.first + entries.count;
    for (int64_t i = entries.first + slot * kTILE_THREADS + threadIdx.x; i < end;
        i += arguments.window.slots * kTILE_THREADS)
    {
        bool const held = arrays.candidatePositions[i] < sinkTokens;
        float best = arrays.raw[i];
        int64_t const last = held ? i : min(end - 1, i + reach);
        for (int64_t j = held ? i : max(entries.first, i - reach); j <= last; ++j)
        {
            best = arrays.candidatePositions[j] >= sinkTokens && arrays.raw[j] > best ? arrays.raw[j] : best;
        }
        arrays.transformed[i] = best;
    }
}

template <typename T>
void run(Stream stream, WindowArrays const& layout, ScoreArguments const& arguments)
{
    hubkv_score_window_params const& params = arguments.params;
    dim3 const grid = gridFor("L * Hkv", layout.heads * layout.slots, 1);
    dim3 const heads = gridFor("L * Hkv", layout.heads, 1);
    size_t const shared = static_cast<size_t>(WindowTile<T>::sharedFloats(params.candidates.cache.D)) * sizeof(float);
    sumWindow<T>(stream, arguments.window, layout.heads);
    launch(windowScores<T>, grid, dim3(kTILE_THREADS), shared, stream, arguments);
    if (params.score == HUBKV_SCORE_SNAPKV)
    {
        launch(poolScores, grid, dim3(kTILE_THREADS), 0, stream, arguments);
    }
    else if (params.score == HUBKV_SCORE_RKV)
    {
        launch(mixScores<T>, heads, dim3(kMIX_THREADS), 0, stream, params, arguments.arrays);
    }
}

} // namespace

int64_t scoreWindowCudaWorkspace(hubkv_score_window_params const& params)
{
    return ScoreCudaWorkspace(params).carver.bytes();
}

void scoreWindowCuda(
    void* cudaStream, hubkv_score_window_params const& params, ScoreArrays const& arrays, void* workspace)
{
    Stream const stream = static_cast<Stream>(cudaStream);
    WindowArrays const layout = ScoreCudaWorkspace(params).window;
    ScoreArguments const arguments{params, arrays, windowOf(params, arrays, params.candidates, 0, layout, workspace)};
    switch (params.candidates.cache.dtype)
    {
    case HUBKV_FLOAT32: run<float>(stream, layout, arguments); break;
    case HUBKV_FLOAT16: run<Float16>(stream, layout, arguments); break;
    case HUBKV_BFLOAT16: run<BFloat16>(stream, layout, arguments); break;
    }
}

} // namespace hubkv
