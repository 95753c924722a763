// SPDX-License-Identifier: Apache-2.0
//
// score_window on the GPU. Logits are computed twice and never kept. Launches:
//   windowSums    maximum and sum of every query's softmax over the rows of a block
//   mergeSums     the same over all rows of a head
//   windowScores  importance of every row -> raw, positions, offsets
//   poolScores    snapkv, or
//   mixScores     rkv
// Each head has `slots` blocks, which take its tiles of 32 rows in turn: the grid follows from N alone. A lane has a row,
// a warp has 4 of the 16 queries that are in shared memory at a time.
#include "score_window/score_window.h"

#include "attend/attend_elements.h"
#include "attend/row_stream.h"
#include "common/candidates.h"
#include "common/device.h"
#include "score_window/score_rkv.h"

#include <algorithm>
#include <cmath>

namespace hubkv
{
namespace
{

constexpr int32_t kTHREADS = 128;
constexpr int32_t kWARPS = kTHREADS / kWARP_SIZE;
constexpr int32_t kWARP_QUERIES = 4;
constexpr int32_t kQUERIES = kWARPS * kWARP_QUERIES; // in shared memory at a time
constexpr int64_t kMAX_SLOTS = 64;

//! Where things lie in the workspace; the one source of its size.
struct ScoreCudaWorkspace
{
    explicit ScoreCudaWorkspace(hubkv_score_window_params const& params)
    {
        hubkv_cache_params const& cache = params.candidates.cache;
        heads = cache.L * cache.Hkv;
        queries = params.W * (params.Hq / cache.Hkv);
        int64_t const tiles = candidateCount(params.candidates) / heads / kWARP_SIZE;
        slots = std::clamp<int64_t>(tiles / 4, 1, kMAX_SLOTS);
        int64_t const all = checkedProduct("workspace", heads, queries);
        WorkspaceCarver carver;
        partMaxima = carver.take<float>(checkedProduct("workspace", all, slots));
        partSums = carver.take<float>(checkedProduct("workspace", all, slots));
        maxima = carver.take<float>(all);
        shares = carver.take<float>(all);
        bytes = carver.bytes();
    }

    int64_t heads;
    int64_t queries;
    int64_t slots;
    WorkspaceArray<float> partMaxima; // [heads, slots, queries]
    WorkspaceArray<float> partSums;   // [heads, slots, queries]
    WorkspaceArray<float> maxima;     // [heads, queries]
    WorkspaceArray<float> shares;     // [heads, queries] 1 / sum
    int64_t bytes;
};

struct ScoreArguments
{
    hubkv_score_window_params params;
    ScoreArrays arrays;
    int64_t slots;
    int32_t queries; // W * G
    float scale;     // in units of log 2
    float* partMaxima;
    float* partSums;
    float* maxima;
    float* shares;
};

//! A tile of rows and a part of the queries in shared memory, and the logits between them.
template <typename T>
class WindowTile
{
public:
    __device__ WindowTile(
        ScoreArguments const& arguments, HeadCandidates const& candidates, int64_t number, float* shared)
        : mArguments(arguments)
        , mCandidates(candidates)
        , mD(static_cast<int32_t>(arguments.params.candidates.cache.D))
        , mRows(shared)
        , mBias(shared + kWARP_SIZE * (mD + 1))
        , mQueries(mBias + kWARP_SIZE)
    {
        int64_t const Hkv = arguments.params.candidates.cache.Hkv;
        int64_t const layer = number / Hkv;
        mGroup = static_cast<int32_t>(arguments.params.Hq / Hkv);
        mQ = static_cast<T const*>(arguments.arrays.q)
            + (layer * arguments.params.W * arguments.params.Hq + (number - layer * Hkv) * mGroup) * mD;
    }

    //! Floats of shared memory.
    static int64_t sharedFloats(int64_t D)
    {
        return kWARP_SIZE * (D + 2) + kQUERIES * D;
    }

    //! Rows first..first+31; what is absent is zeros with bias -inf.
    __device__ void loadRows(int64_t first)
    {
        __syncthreads(); // the rows before have been read
        int32_t const lane = laneOf(threadIdx.x);
        for (int32_t r = static_cast<int32_t>(threadIdx.x) / kWARP_SIZE; r < kWARP_SIZE; r += kWARPS)
        {
            CandidateRow row{nullptr, nullptr, 0.F};
            if (first + r < mCandidates.count())
            {
                row = mCandidates.row(first + r);
            }
            T const* const from = reinterpret_cast<T const*>(row.k);
            for (int32_t d = lane; d < mD; d += kWARP_SIZE)
            {
                mRows[r * (mD + 1) + d] = from != nullptr ? Elements<T>::load(globalAddress(from + d)) : 0.F;
            }
            if (lane == 0)
            {
                mBias[r] = from != nullptr ? row.bias * kLOG2_E : kNO_LOGIT;
            }
        }
    }

    //! Logits of this lane's row with the warp's queries first + 4 * warp + n, of kQUERIES from `first` on; -inf past the
    //! last query.
    __device__ void logits(int32_t first, float* values)
    {
        __syncthreads(); // the queries before have been read
        for (int32_t i = static_cast<int32_t>(threadIdx.x); i < kQUERIES * mD; i += kTHREADS)
        {
            int32_t const query = first + i / mD;
            bool const real = query < mArguments.queries;
            int64_t const at = real ? query / mGroup * mArguments.params.Hq + query % mGroup : 0;
            mQueries[i] = real ? Elements<T>::load(mQ + at * mD + i % mD) : 0.F;
        }
        __syncthreads();
        int32_t const lane = laneOf(threadIdx.x);
        int32_t const own = static_cast<int32_t>(threadIdx.x) / kWARP_SIZE * kWARP_QUERIES;
        float const* const row = mRows + lane * (mD + 1);
        float const* const q = mQueries + own * mD;
#pragma unroll
        for (int32_t n = 0; n < kWARP_QUERIES; ++n)
        {
            values[n] = 0.F;
        }
        for (int32_t d = 0; d < mD; ++d)
        {
            float const value = row[d];
#pragma unroll
            for (int32_t n = 0; n < kWARP_QUERIES; ++n)
            {
                values[n] = fmaf(value, q[n * mD + d], values[n]);
            }
        }
#pragma unroll
        for (int32_t n = 0; n < kWARP_QUERIES; ++n)
        {
            bool const real = first + own + n < mArguments.queries;
            values[n] = real ? fmaf(values[n], mArguments.scale, mBias[lane]) : kNO_LOGIT;
        }
    }

private:
    ScoreArguments const& mArguments;
    HeadCandidates const& mCandidates;
    int32_t mD;
    int32_t mGroup;
    T const* mQ;
    float* mRows;    // [32, D + 1]
    float* mBias;    // [32]
    float* mQueries; // [kQUERIES, D]
};

__device__ float warpFloatSum(float value)
{
    for (int32_t step = kWARP_SIZE / 2; step > 0; step /= 2)
    {
        value += __shfl_xor_sync(kFULL_WARP, value, step);
    }
    return value;
}

template <typename T>
__global__ void __launch_bounds__(kTHREADS, 4) windowSums(ScoreArguments const arguments)
{
    HUBKV_DYNAMIC_SHARED(float, shared);
    ScoreArrays const& arrays = arguments.arrays;
    int64_t const number = blockIdx.x / arguments.slots;
    int64_t const slot = blockIdx.x - number * arguments.slots;
    CacheView const cache(arguments.params.candidates.cache, arrays.arena);
    HeadCandidates const candidates(arguments.params.candidates, cache, arrays.segments, arrays.blockTable, number);
    WindowTile<T> tile(arguments, candidates, number, shared);
    int32_t const warp = static_cast<int32_t>(threadIdx.x) / kWARP_SIZE;
    bool const writes = laneOf(threadIdx.x) == 0;
    // A query's numbers are read and written by one thread.
    float* const maxima = arguments.partMaxima + blockIdx.x * arguments.queries;
    float* const sums = arguments.partSums + blockIdx.x * arguments.queries;
    for (int32_t first = 0; writes && first < arguments.queries; first += kQUERIES)
    {
        for (int32_t n = 0; n < kWARP_QUERIES; ++n)
        {
            int32_t const query = first + warp * kWARP_QUERIES + n;
            if (query < arguments.queries)
            {
                maxima[query] = kNO_LOGIT;
                sums[query] = 0.F;
            }
        }
    }
    for (int64_t row = slot * kWARP_SIZE; row < candidates.count(); row += arguments.slots * kWARP_SIZE)
    {
        tile.loadRows(row);
        for (int32_t first = 0; first < arguments.queries; first += kQUERIES)
        {
            float logits[kWARP_QUERIES];
            tile.logits(first, logits);
#pragma unroll
            for (int32_t n = 0; n < kWARP_QUERIES; ++n)
            {
                int32_t const query = first + warp * kWARP_QUERIES + n;
                float const maximum = warpMaximum(logits[n]);
                float const sum = warpFloatSum(exp2f(logits[n] - shiftOf(maximum)));
                if (writes && query < arguments.queries)
                {
                    float const before = maxima[query];
                    float const both = fmaxf(before, maximum);
                    float const shift = shiftOf(both);
                    sums[query] = fmaf(sums[query], exp2f(before - shift), sum * exp2f(maximum - shift));
                    maxima[query] = both;
                }
            }
        }
    }
}

//! A thread per query of a head.
__global__ void __launch_bounds__(kTHREADS) mergeSums(ScoreArguments const arguments)
{
    int64_t const number = blockIdx.x;
    for (int32_t query = static_cast<int32_t>(threadIdx.x); query < arguments.queries; query += kTHREADS)
    {
        int64_t const first = number * arguments.slots * arguments.queries + query;
        float maximum = kNO_LOGIT;
        for (int64_t slot = 0; slot < arguments.slots; ++slot)
        {
            maximum = fmaxf(maximum, arguments.partMaxima[first + slot * arguments.queries]);
        }
        float const shift = shiftOf(maximum);
        float sum = 0.F;
        for (int64_t slot = 0; slot < arguments.slots; ++slot)
        {
            int64_t const at = first + slot * arguments.queries;
            sum = fmaf(arguments.partSums[at], exp2f(arguments.partMaxima[at] - shift), sum);
        }
        arguments.maxima[number * arguments.queries + query] = shift;
        // A query without a finite logit weighs nothing.
        arguments.shares[number * arguments.queries + query] = sum > 0.F ? 1.F / sum : 0.F;
    }
}

template <typename T>
__global__ void __launch_bounds__(kTHREADS, 4) windowScores(ScoreArguments const arguments)
{
    HUBKV_DYNAMIC_SHARED(float, shared);
    __shared__ float parts[kTHREADS];
    ScoreArrays const& arrays = arguments.arrays;
    int64_t const number = blockIdx.x / arguments.slots;
    int64_t const slot = blockIdx.x - number * arguments.slots;
    hubkv_candidates_params const& params = arguments.params.candidates;
    CacheView const cache(params.cache, arrays.arena);
    HeadCandidates const candidates(params, cache, arrays.segments, arrays.blockTable, number);
    WindowTile<T> tile(arguments, candidates, number, shared);
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    int32_t const own = thread / kWARP_SIZE * kWARP_QUERIES;
    float const* const maxima = arguments.maxima + number * arguments.queries;
    float const* const shares = arguments.shares + number * arguments.queries;
    if (slot == 0 && thread == 0)
    {
        arrays.candidateOffsets[number] = candidates.first;
        if (number == params.cache.L * params.cache.Hkv - 1)
        {
            arrays.candidateOffsets[number + 1] = candidateCount(params);
        }
    }
    for (int64_t first = slot * kWARP_SIZE; first < candidates.count(); first += arguments.slots * kWARP_SIZE)
    {
        tile.loadRows(first);
        float total = 0.F;
        for (int32_t firstQuery = 0; firstQuery < arguments.queries; firstQuery += kQUERIES)
        {
            float logits[kWARP_QUERIES];
            tile.logits(firstQuery, logits);
#pragma unroll
            for (int32_t n = 0; n < kWARP_QUERIES; ++n)
            {
                int32_t const query = firstQuery + own + n;
                if (query < arguments.queries)
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
            for (int32_t warp = 0; warp < kWARPS; ++warp)
            {
                importance += parts[warp * kWARP_SIZE + thread];
            }
            bool const there = candidates.row(i).k != nullptr;
            float const raw = there ? logf(importance / static_cast<float>(arguments.queries)) : kNO_LOGIT;
            arrays.raw[candidates.first + i] = raw;
            arrays.transformed[candidates.first + i] = raw;
            arrays.candidatePositions[candidates.first + i] = candidates.position(arrays.positions, i);
        }
    }
}

__global__ void __launch_bounds__(kTHREADS) poolScores(ScoreArguments const arguments)
{
    ScoreArrays const& arrays = arguments.arrays;
    int32_t const sinkTokens = arguments.params.candidates.sinkTokens;
    int64_t const reach = arguments.params.poolKernel / 2;
    int64_t const number = blockIdx.x / arguments.slots;
    int64_t const slot = blockIdx.x - number * arguments.slots;
    HeadEntries const entries(arrays.candidateOffsets, number, candidateCount(arguments.params.candidates));
    int64_t const end = entries.first + entries.count;
    for (int64_t i = entries.first + slot * kTHREADS + threadIdx.x; i < end; i += arguments.slots * kTHREADS)
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
void run(Stream stream, ScoreCudaWorkspace const& layout, ScoreArguments const& arguments)
{
    hubkv_score_window_params const& params = arguments.params;
    dim3 const grid = gridFor("L * Hkv", layout.heads * layout.slots, 1);
    dim3 const heads = gridFor("L * Hkv", layout.heads, 1);
    size_t const shared = static_cast<size_t>(WindowTile<T>::sharedFloats(params.candidates.cache.D)) * sizeof(float);
    launch(windowSums<T>, grid, dim3(kTHREADS), shared, stream, arguments);
    launch(mergeSums, heads, dim3(kTHREADS), 0, stream, arguments);
    launch(windowScores<T>, grid, dim3(kTHREADS), shared, stream, arguments);
    if (params.score == HUBKV_SCORE_SNAPKV)
    {
        launch(poolScores, grid, dim3(kTHREADS), 0, stream, arguments);
    }
    else if (params.score == HUBKV_SCORE_RKV)
    {
        launch(mixScores<T>, heads, dim3(kMIX_THREADS), 0, stream, params, arguments.arrays);
    }
}

} // namespace

int64_t scoreWindowCudaWorkspace(hubkv_score_window_params const& params)
{
    return ScoreCudaWorkspace(params).bytes;
}

void scoreWindowCuda(
    void* cudaStream, hubkv_score_window_params const& params, ScoreArrays const& arrays, void* workspace)
{
    Stream const stream = static_cast<Stream>(cudaStream);
    ScoreCudaWorkspace const layout(params);
    float const scale =
        params.scale != 0.F ? params.scale : 1.F / std::sqrt(static_cast<float>(params.candidates.cache.D));
    ScoreArguments const arguments{params, arrays, layout.slots, static_cast<int32_t>(layout.queries), scale * kLOG2_E,
        layout.partMaxima.in(workspace), layout.partSums.in(workspace), layout.maxima.in(workspace),
        layout.shares.in(workspace)};
    switch (params.candidates.cache.dtype)
    {
    case HUBKV_FLOAT32: run<float>(stream, layout, arguments); break;
    case HUBKV_FLOAT16: run<Float16>(stream, layout, arguments); break;
    case HUBKV_BFLOAT16: run<BFloat16>(stream, layout, arguments); break;
    }
}

} // namespace hubkv
