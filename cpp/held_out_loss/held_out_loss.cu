// SPDX-License-Identifier: Apache-2.0
//
// held_out_loss on the GPU. Launches:
//   headLevels    a block per head: the best ranking, and how many candidates each level has -> rows
//   windowSums, mergeSums (score_window/window_tile.h), over all rows that a query sees
//   levelMasses   weights again; every query's mass on each level, of the candidates of a block
//   headLosses    a block per head: masses of its blocks together, summed from the last level on, squared -> loss
// No atomics of floats: a sum is always that of one thread, in one order.
#include "held_out_loss/held_out_loss.h"

#include "common/candidates.h"
#include "common/device.h"
#include "score_window/window_tile.h"

#include <algorithm>

namespace hubkv
{
namespace
{

constexpr int32_t kHEAD_THREADS = 256;
constexpr int32_t kHEAD_WARPS = kHEAD_THREADS / kWARP_SIZE;
constexpr int32_t kTHREAD_LEVELS = kTILE_QUERIES * kLEVELS / kTILE_THREADS; // of one query, side by side
constexpr int64_t kMASS_BLOCKS = 1024; // of all heads together, at most: each keeps kLEVELS masses for every query
static_assert(kLEVELS == kWARP_SIZE, "a lane has a level");
static_assert(kTHREAD_LEVELS == 4, "a thread's masses move together");

//! Where things lie in the workspace; the one source of its size.
struct LossCudaWorkspace
{
    explicit LossCudaWorkspace(hubkv_held_out_loss_params const& params)
        : window(carver, allRows(params), params.W, params.Hq,
              std::clamp<int64_t>(
                  kMASS_BLOCKS / (params.candidates.cache.L * params.candidates.cache.Hkv), 1, kMAX_SLOTS))
    {
        best = carver.take<float>(window.heads);
        int64_t const blocks = checkedProduct("workspace", window.heads, window.slots);
        masses = carver.take<float>(
            checkedProduct("workspace", checkedProduct("workspace", blocks, window.queries), kLEVELS));
    }

    WorkspaceCarver carver;
    WindowArrays window;
    WorkspaceArray<float> best;   // [heads]
    WorkspaceArray<float> masses; // [heads, slots, queries, kLEVELS]
};

struct LossArguments
{
    hubkv_candidates_params candidates;
    LossArrays arrays;
    Window window;
    float* best;
    float* masses;
};

//! What one head's candidates rank by.
class HeadRanking
{
public:
    //! rows: of the head, the candidates first.
    __device__ HeadRanking(LossArguments const& arguments, HeadCandidates const& rows, int64_t number)
        : count(rows.compact + arguments.candidates.tailTokens)
        , mSinkTokens(arguments.candidates.sinkTokens)
    {
        int64_t const first = rows.firstRow + number * arguments.candidates.tailTokens;
        mRanking = arguments.arrays.ranking + first;
        mPositions = arguments.arrays.candidatePositions + first;
    }

    __device__ bool isProtected(int64_t i) const
    {
        return mPositions[i] < mSinkTokens;
    }

    __device__ float rank(int64_t i) const
    {
        return rankOf(mRanking[i]);
    }

    __device__ int32_t level(float best, int64_t i) const
    {
        return isProtected(i) ? kALWAYS_KEPT : levelOf(best, mRanking[i]);
    }

    int64_t count;

private:
    int32_t mSinkTokens;
    float const* mRanking;
    int32_t const* mPositions;
};

__global__ void __launch_bounds__(kHEAD_THREADS, 4) headLevels(LossArguments const arguments)
{
    __shared__ float maxima[kHEAD_WARPS];
    __shared__ int32_t counts[kLEVELS];
    int64_t const number = blockIdx.x;
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    Window const& window = arguments.window;
    CacheView const cache(window.rows.cache, window.arena);
    HeadCandidates const rows(window.rows, cache, window.segments, window.blockTable, number);
    HeadRanking const ranking(arguments, rows, number);
    if (thread < kLEVELS)
    {
        counts[thread] = 0;
    }
    float best = kNO_LOGIT;
    for (int64_t i = thread; i < ranking.count; i += kHEAD_THREADS)
    {
        best = ranking.isProtected(i) ? best : fmaxf(best, ranking.rank(i));
    }
    best = blockMaximum<kHEAD_THREADS>(best, maxima); // the counts are 0 behind its barrier
    for (int64_t i = thread; i < ranking.count; i += kHEAD_THREADS)
    {
        int32_t const level = ranking.level(best, i);
        if (level != kALWAYS_KEPT)
        {
            atomicAdd(&counts[level], 1);
        }
    }
    __syncthreads();
    if (thread <= kLEVELS)
    {
        int64_t kept = ranking.count;
        for (int32_t level = thread; level < kLEVELS; ++level)
        {
            kept -= counts[level];
        }
        arguments.arrays.rows[number * (kLEVELS + 1) + thread] = static_cast<int32_t>(kept);
    }
    if (thread == 0)
    {
        arguments.best[number] = best;
    }
}

template <typename T>
__global__ void __launch_bounds__(kTILE_THREADS, 4) levelMasses(LossArguments const arguments)
{
    HUBKV_DYNAMIC_SHARED(float, shared);
    __shared__ float weights[kTILE_QUERIES][kWARP_SIZE + 1];
    __shared__ int32_t levels[kWARP_SIZE];
    Window const& window = arguments.window;
    int64_t const number = blockIdx.x / window.slots;
    int64_t const slot = blockIdx.x - number * window.slots;
    CacheView const cache(window.rows.cache, window.arena);
    HeadCandidates const rows(window.rows, cache, window.segments, window.blockTable, number);
    HeadRanking const ranking(arguments, rows, number);
    WindowTile<T> tile(window, rows, number, shared);
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    int32_t const lane = laneOf(threadIdx.x);
    int32_t const own = thread / kWARP_SIZE * kWARP_QUERIES; // first query of the warp, as lanes have rows
    // A thread then has one query's mass on four levels, from ownLevel on: it alone reads and writes them.
    int32_t const ownQuery = thread / (kLEVELS / kTHREAD_LEVELS);
    int32_t const ownLevel = thread % (kLEVELS / kTHREAD_LEVELS) * kTHREAD_LEVELS;
    float const best = arguments.best[number];
    float const* const maxima = window.maxima + number * window.queries;
    float const* const shares = window.shares + number * window.queries;
    float* const masses = arguments.masses + static_cast<int64_t>(blockIdx.x) * window.queries * kLEVELS + ownLevel;
    for (int32_t query = ownQuery; query < window.queries; query += kTILE_QUERIES)
    {
        storeFloats(masses + query * kLEVELS, float4{0.F, 0.F, 0.F, 0.F});
    }
    for (int64_t first = slot * kWARP_SIZE; first < ranking.count; first += window.slots * kWARP_SIZE)
    {
        tile.loadRows(first);
        if (thread < kWARP_SIZE) // the levels before were read before these rows were loaded
        {
            levels[thread] = first + thread < ranking.count ? ranking.level(best, first + thread) : kALWAYS_KEPT;
        }
        for (int32_t firstQuery = 0; firstQuery < window.queries; firstQuery += kTILE_QUERIES)
        {
            float logits[kWARP_QUERIES];
            tile.logits(firstQuery, logits);
#pragma unroll
            for (int32_t n = 0; n < kWARP_QUERIES; ++n)
            {
                int32_t const query = firstQuery + own + n;
                bool const real = query < window.queries;
                weights[own + n][lane] = real ? exp2f(logits[n] - maxima[query]) * shares[query] : 0.F;
            }
            __syncthreads();
            int32_t const query = firstQuery + ownQuery;
            if (query < window.queries)
            {
                float4 mass = loadFloats(masses + query * kLEVELS);
                for (int32_t r = 0; r < kWARP_SIZE; ++r)
                {
                    float const weight = weights[ownQuery][r];
                    int32_t const level = levels[r] - ownLevel;
                    mass.x += level == 0 ? weight : 0.F;
                    mass.y += level == 1 ? weight : 0.F;
                    mass.z += level == 2 ? weight : 0.F;
                    mass.w += level == 3 ? weight : 0.F;
                }
                storeFloats(masses + query * kLEVELS, mass);
            }
        }
    }
}

//! A warp takes a query, a lane a level.
__global__ void __launch_bounds__(kHEAD_THREADS) headLosses(LossArguments const arguments)
{
    __shared__ float parts[kHEAD_WARPS][kLEVELS];
    Window const& window = arguments.window;
    int64_t const number = blockIdx.x;
    int32_t const warp = static_cast<int32_t>(threadIdx.x) / kWARP_SIZE;
    int32_t const lane = laneOf(threadIdx.x);
    float squares = 0.F;
    for (int32_t query = warp; query < window.queries; query += kHEAD_WARPS)
    {
        float mass = 0.F;
        for (int64_t slot = 0; slot < window.slots; ++slot)
        {
            int64_t const block = number * window.slots + slot;
            mass += arguments.masses[(block * window.queries + query) * kLEVELS + lane];
        }
        // One after the other, so that no level loses less than the next.
        float sum = 0.F;
        float lost = 0.F;
        for (int32_t level = kLEVELS - 1; level >= 0; --level)
        {
            sum += __shfl_sync(kFULL_WARP, mass, level);
            lost = level == lane ? sum : lost;
        }
        squares = fmaf(lost, lost, squares);
    }
    parts[warp][lane] = squares;
    __syncthreads();
    if (warp == 0)
    {
        float sum = 0.F;
        for (int32_t other = 0; other < kHEAD_WARPS; ++other)
        {
            sum += parts[other][lane];
        }
        float* const loss = arguments.arrays.loss + number * (kLEVELS + 1);
        loss[lane] = sum / static_cast<float>(window.queries);
        if (lane == 0)
        {
            loss[kLEVELS] = 0.F;
        }
    }
}

template <typename T>
void run(Stream stream, LossCudaWorkspace const& layout, LossArguments const& arguments)
{
    Window const& window = arguments.window;
    dim3 const grid = gridFor("L * Hkv", layout.window.heads * window.slots, 1);
    dim3 const heads = gridFor("L * Hkv", layout.window.heads, 1);
    size_t const shared = static_cast<size_t>(WindowTile<T>::sharedFloats(window.rows.cache.D)) * sizeof(float);
    launch(headLevels, heads, dim3(kHEAD_THREADS), 0, stream, arguments);
    sumWindow<T>(stream, window, layout.window.heads);
    launch(levelMasses<T>, grid, dim3(kTILE_THREADS), shared, stream, arguments);
    launch(headLosses, heads, dim3(kHEAD_THREADS), 0, stream, arguments);
}

} // namespace

int64_t heldOutLossCudaWorkspace(hubkv_held_out_loss_params const& params)
{
    return LossCudaWorkspace(params).carver.bytes();
}

void heldOutLossCuda(
    void* cudaStream, hubkv_held_out_loss_params const& params, LossArrays const& arrays, void* workspace)
{
    Stream const stream = static_cast<Stream>(cudaStream);
    LossCudaWorkspace const layout(params);
    LossArguments const arguments{params.candidates, arrays,
        windowOf(params, arrays, allRows(params), params.W - 1, layout.window, workspace), layout.best.in(workspace),
        layout.masses.in(workspace)};
    switch (params.candidates.cache.dtype)
    {
    case HUBKV_FLOAT32: run<float>(stream, layout, arguments); break;
    case HUBKV_FLOAT16: run<Float16>(stream, layout, arguments); break;
    case HUBKV_BFLOAT16: run<BFloat16>(stream, layout, arguments); break;
    }
}

} // namespace hubkv
