// SPDX-License-Identifier: Apache-2.0
//
// The last queries of a sequence against the rows of its heads, on the GPU: what score_window and held_out_loss share.
// Logits are computed anew each time and never kept. Each head has `slots` blocks, which take its tiles of 32 rows in
// turn: the grid follows from parameters alone. A lane has a row, a warp has 4 of the 16 queries that are in shared
// memory at a time. Launches of sumWindow:
//   windowSums    maximum and sum of every query's softmax over the rows of a block
//   mergeSums     the same over all rows of a head
#pragma once

#include "attend/attend_elements.h"
#include "attend/row_stream.h"
#include "common/candidates.h"
#include "common/device.h"
#include "common/workspace.h"

#include <algorithm>
#include <cmath>

namespace hubkv
{
namespace
{

constexpr int32_t kTILE_THREADS = 128;
constexpr int32_t kTILE_WARPS = kTILE_THREADS / kWARP_SIZE;
constexpr int32_t kWARP_QUERIES = 4;
constexpr int32_t kTILE_QUERIES = kTILE_WARPS * kWARP_QUERIES; // in shared memory at a time
constexpr int64_t kMAX_SLOTS = 64;

//! What the softmaxes need of a workspace.
struct WindowArrays
{
    WindowArrays(WorkspaceCarver& carver, hubkv_candidates_params const& rows, int64_t W, int64_t Hq, int64_t mostSlots)
    {
        heads = rows.cache.L * rows.cache.Hkv;
        queries = W * (Hq / rows.cache.Hkv);
        int64_t const tiles = candidateCount(rows) / heads / kWARP_SIZE;
        slots = std::clamp<int64_t>(tiles / 4, 1, mostSlots);
        int64_t const all = checkedProduct("workspace", heads, queries);
        partMaxima = carver.take<float>(checkedProduct("workspace", all, slots));
        partSums = carver.take<float>(checkedProduct("workspace", all, slots));
        maxima = carver.take<float>(all);
        shares = carver.take<float>(all);
    }

    int64_t heads;
    int64_t queries;
    int64_t slots;
    WorkspaceArray<float> partMaxima; // [heads, slots, queries]
    WorkspaceArray<float> partSums;   // [heads, slots, queries]
    WorkspaceArray<float> maxima;     // [heads, queries]
    WorkspaceArray<float> shares;     // [heads, queries] 1 / sum
};

struct Window
{
    hubkv_candidates_params rows; // that the queries look at
    void const* q;
    int64_t const* arena;
    int64_t const* segments;
    int32_t const* blockTable;
    int64_t W;
    int64_t Hq;
    int64_t later; // of a head's last rows, those that query token 0 does not see; each token sees one more
    int64_t slots;
    int32_t queries; // W * G
    float scale;     // in units of log 2
    float* partMaxima;
    float* partSums;
    float* maxima;
    float* shares;
};

//! params and arrays: of a stage.
template <typename Params, typename Arrays>
Window windowOf(Params const& params, Arrays const& arrays, hubkv_candidates_params const& rows, int64_t later,
    WindowArrays const& layout, void* workspace)
{
    float const scale = params.scale != 0.F ? params.scale : 1.F / std::sqrt(static_cast<float>(rows.cache.D));
    return Window{rows, arrays.q, arrays.arena, arrays.segments, arrays.blockTable, params.W, params.Hq, later,
        layout.slots, static_cast<int32_t>(layout.queries), scale * kLOG2_E, layout.partMaxima.in(workspace),
        layout.partSums.in(workspace), layout.maxima.in(workspace), layout.shares.in(workspace)};
}

//! A tile of rows and a part of the queries in shared memory, and the logits between them.
template <typename T>
class WindowTile
{
public:
    __device__ WindowTile(Window const& window, HeadCandidates const& candidates, int64_t number, float* shared)
        : mWindow(window)
        , mCandidates(candidates)
        , mD(static_cast<int32_t>(window.rows.cache.D))
        , mRows(shared)
        , mBias(shared + kWARP_SIZE * (mD + 1))
        , mQueries(mBias + kWARP_SIZE)
    {
        int64_t const Hkv = window.rows.cache.Hkv;
        int64_t const layer = number / Hkv;
        mGroup = static_cast<int32_t>(window.Hq / Hkv);
        mQ = static_cast<T const*>(window.q) + (layer * window.W * window.Hq + (number - layer * Hkv) * mGroup) * mD;
    }

    //! Floats of shared memory.
    static int64_t sharedFloats(int64_t D)
    {
        return kWARP_SIZE * (D + 2) + kTILE_QUERIES * D;
    }

    //! Rows first..first+31; what is absent is zeros with bias -inf.
    __device__ void loadRows(int64_t first)
    {
        __syncthreads(); // the rows before have been read
        mFirst = first;
        int32_t const lane = laneOf(threadIdx.x);
        for (int32_t r = static_cast<int32_t>(threadIdx.x) / kWARP_SIZE; r < kWARP_SIZE; r += kTILE_WARPS)
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

    //! Logits of this lane's row with the warp's queries first + 4 * warp + n, of kTILE_QUERIES from `first` on; -inf past
    //! the last query, and where the query does not see the row.
    __device__ void logits(int32_t first, float* values)
    {
        __syncthreads(); // the queries before have been read
        for (int32_t i = static_cast<int32_t>(threadIdx.x); i < kTILE_QUERIES * mD; i += kTILE_THREADS)
        {
            int32_t const query = first + i / mD;
            bool const real = query < mWindow.queries;
            int64_t const at = real ? query / mGroup * mWindow.Hq + query % mGroup : 0;
            mQueries[i] = real ? Elements<T>::load(mQ + at * mD + i % mD) : 0.F;
        }
        __syncthreads();
        int32_t const lane = laneOf(threadIdx.x);
        int64_t const behind = mFirst + lane - (mCandidates.count() - mWindow.later); // 0: query token 1 sees it first
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
            int32_t const query = first + own + n;
            bool const real = query < mWindow.queries && query / mGroup > behind;
            values[n] = real ? fmaf(values[n], mWindow.scale, mBias[lane]) : kNO_LOGIT;
        }
    }

private:
    Window const& mWindow;
    HeadCandidates const& mCandidates;
    int32_t mD;
    int32_t mGroup;
    T const* mQ;
    int64_t mFirst = 0;
    float* mRows;    // [32, D + 1]
    float* mBias;    // [32]
    float* mQueries; // [kTILE_QUERIES, D]
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
__global__ void __launch_bounds__(kTILE_THREADS, 4) windowSums(Window const window)
{
    HUBKV_DYNAMIC_SHARED(float, shared);
    int64_t const number = blockIdx.x / window.slots;
    int64_t const slot = blockIdx.x - number * window.slots;
    CacheView const cache(window.rows.cache, window.arena);
    HeadCandidates const candidates(window.rows, cache, window.segments, window.blockTable, number);
    WindowTile<T> tile(window, candidates, number, shared);
    int32_t const warp = static_cast<int32_t>(threadIdx.x) / kWARP_SIZE;
    bool const writes = laneOf(threadIdx.x) == 0;
    // A query's numbers are read and written by one thread.
    float* const maxima = window.partMaxima + blockIdx.x * window.queries;
    float* const sums = window.partSums + blockIdx.x * window.queries;
    for (int32_t first = 0; writes && first < window.queries; first += kTILE_QUERIES)
    {
        for (int32_t n = 0; n < kWARP_QUERIES; ++n)
        {
            int32_t const query = first + warp * kWARP_QUERIES + n;
            if (query < window.queries)
            {
                maxima[query] = kNO_LOGIT;
                sums[query] = 0.F;
            }
        }
    }
    for (int64_t row = slot * kWARP_SIZE; row < candidates.count(); row += window.slots * kWARP_SIZE)
    {
        tile.loadRows(row);
        for (int32_t first = 0; first < window.queries; first += kTILE_QUERIES)
        {
            float logits[kWARP_QUERIES];
            tile.logits(first, logits);
#pragma unroll
            for (int32_t n = 0; n < kWARP_QUERIES; ++n)
            {
                int32_t const query = first + warp * kWARP_QUERIES + n;
                float const maximum = warpMaximum(logits[n]);
                float const sum = warpFloatSum(exp2f(logits[n] - shiftOf(maximum)));
                if (writes && query < window.queries)
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
__global__ void __launch_bounds__(kTILE_THREADS) mergeSums(Window const window)
{
    int64_t const number = blockIdx.x;
    for (int32_t query = static_cast<int32_t>(threadIdx.x); query < window.queries; query += kTILE_THREADS)
    {
        int64_t const first = number * window.slots * window.queries + query;
        float maximum = kNO_LOGIT;
        for (int64_t slot = 0; slot < window.slots; ++slot)
        {
            maximum = fmaxf(maximum, window.partMaxima[first + slot * window.queries]);
        }
        float const shift = shiftOf(maximum);
        float sum = 0.F;
        for (int64_t slot = 0; slot < window.slots; ++slot)
        {
            int64_t const at = first + slot * window.queries;
            sum = fmaf(window.partSums[at], exp2f(window.partMaxima[at] - shift), sum);
        }
        window.maxima[number * window.queries + query] = shift;
        // A query without a finite logit weighs nothing.
        window.shares[number * window.queries + query] = sum > 0.F ? 1.F / sum : 0.F;
    }
}

//! Maxima and shares of every query.
template <typename T>
void sumWindow(Stream stream, Window const& window, int64_t heads)
{
    size_t const shared = static_cast<size_t>(WindowTile<T>::sharedFloats(window.rows.cache.D)) * sizeof(float);
    dim3 const grid = gridFor("L * Hkv", heads * window.slots, 1);
    launch(windowSums<T>, grid, dim3(kTILE_THREADS), shared, stream, window);
    launch(mergeSums, gridFor("L * Hkv", heads, 1), dim3(kTILE_THREADS), 0, stream, window);
}

} // namespace
} // namespace hubkv
