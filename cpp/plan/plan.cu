// SPDX-License-Identifier: Apache-2.0
//
// plan on the GPU, the same list as on the host. A block takes a layer: it finds the item length by bisection, then goes
// over the heads in order, as many as it has threads at a time, and writes their items together.
#include "plan/plan.h"

#include "common/cache_view.h"
#include "common/device.h"

#include <algorithm>

namespace hubkv
{
namespace
{

constexpr int32_t kTHREADS = 256;
constexpr int32_t kWARPS = kTHREADS / kWARP_SIZE;
constexpr int64_t kKEPT_HEADS = 8192; // whose row counts fit in shared memory; beyond, they are read again each time

struct PlanArguments
{
    hubkv_cache_params params;
    int64_t minRowsPerItem;
    int64_t const* arena;
    int64_t const* segments;
    WorkItem* work;
    int32_t* workCount;
};

__device__ int64_t granules(int64_t rows)
{
    return rows / kITEM_GRANULE + (rows % kITEM_GRANULE != 0 ? 1 : 0);
}

//! Sum over the block, in every thread. warpSums [kWARPS] is shared and may be in use up to the call.
__device__ int64_t blockSum(int64_t value, int64_t* warpSums)
{
    __syncthreads();
    value = warpSum(value);
    if (laneOf(threadIdx.x) == 0)
    {
        warpSums[threadIdx.x / kWARP_SIZE] = value;
    }
    __syncthreads();
    value = 0;
    for (int32_t warp = 0; warp < kWARPS; ++warp)
    {
        value += warpSums[warp];
    }
    return value;
}

//! Rows of the heads of a layer, head = sequence * Hkv + kv head.
class LayerRows
{
public:
    __device__ LayerRows(PlanArguments const& arguments, int64_t layer, int32_t* kept)
        : mCache(arguments.params, arguments.arena)
        , mSegments(arguments.segments)
        , mLayer(layer)
        , mHeads(arguments.params.B * arguments.params.Hkv)
        , mKept(mHeads <= kKEPT_HEADS ? kept : nullptr)
    {
        for (int64_t head = threadIdx.x; mKept != nullptr && head < mHeads; head += kTHREADS)
        {
            mKept[head] = static_cast<int32_t>(read(head));
        }
    }

    __device__ int64_t heads() const
    {
        return mHeads;
    }

    //! Of a head that this thread has: threadIdx.x, threadIdx.x + kTHREADS, ...
    __device__ int64_t at(int64_t head) const
    {
        return mKept != nullptr ? mKept[head] : read(head);
    }

private:
    __device__ int64_t read(int64_t head) const
    {
        int64_t const b = head / mCache.Hkv;
        return mCache.headRows(mSegments + b * kSEGMENT_FIELDS, mLayer, head - b * mCache.Hkv).rows;
    }

    CacheView const mCache;
    int64_t const* const mSegments;
    int64_t const mLayer;
    int64_t const mHeads;
    int32_t* const mKept;
};

//! As rowsPerItem() of the host.
__device__ int64_t rowsPerItem(PlanArguments const& arguments, LayerRows const& rows, int64_t* warpSums)
{
    __shared__ int32_t longest;
    if (threadIdx.x == 0)
    {
        longest = 0;
    }
    __syncthreads();
    int32_t longestHere = 0;
    for (int64_t head = threadIdx.x; head < rows.heads(); head += kTHREADS)
    {
        longestHere = max(longestHere, static_cast<int32_t>(rows.at(head)));
    }
    atomicMax(&longest, longestHere);
    __syncthreads();

    int64_t low = granules(arguments.minRowsPerItem);
    int64_t high = max(low, granules(longest));
    while (low < high)
    {
        int64_t const middle = low + (high - low) / 2;
        int64_t items = 0;
        for (int64_t head = threadIdx.x; head < rows.heads(); head += kTHREADS)
        {
            items += (granules(rows.at(head)) + middle - 1) / middle;
        }
        if (blockSum(items, warpSums) <= arguments.params.capacity)
        {
            high = middle;
        }
        else
        {
            low = middle + 1;
        }
    }
    return min(low, max(int64_t{1}, granules(longest))) * kITEM_GRANULE;
}

__global__ void __launch_bounds__(kTHREADS) planLayer(PlanArguments const arguments)
{
    HUBKV_DYNAMIC_SHARED(int32_t, kept);
    __shared__ int64_t warpSums[kWARPS];
    __shared__ int64_t starts[kTHREADS + 1]; // of the heads at hand, in the list
    __shared__ int32_t lengths[kTHREADS];    // rows of these heads
    int64_t const layer = blockIdx.x;
    int64_t const capacity = arguments.params.capacity;
    int64_t const Hkv = arguments.params.Hkv;
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    LayerRows const rows(arguments, layer, kept);
    int64_t const length = rowsPerItem(arguments, rows, warpSums);
    WorkItem* const items = arguments.work + layer * capacity;

    int64_t count = 0;
    for (int64_t firstHead = 0; firstHead < rows.heads(); firstHead += kTHREADS)
    {
        int64_t const mine = firstHead + thread < rows.heads() ? rows.at(firstHead + thread) : 0;
        int64_t const itemsHere = (mine + length - 1) / length;
        __syncthreads(); // starts and lengths have been read
        starts[thread] = count + blockExclusiveSum<kTHREADS>(itemsHere, warpSums);
        lengths[thread] = static_cast<int32_t>(mine);
        if (thread == kTHREADS - 1)
        {
            starts[kTHREADS] = starts[thread] + itemsHere;
        }
        __syncthreads();
        // The bound matters only where another kernel changes the head offsets meanwhile.
        int64_t const end = min(starts[kTHREADS], capacity);
        for (int64_t i = count + thread; i < end; i += kTHREADS)
        {
            // The last head that starts at or before i: heads without items start where the next one does.
            int32_t low = 0;
            int32_t high = kTHREADS - 1;
            while (low < high)
            {
                int32_t const middle = (low + high + 1) / 2;
                if (starts[middle] <= i)
                {
                    low = middle;
                }
                else
                {
                    high = middle - 1;
                }
            }
            int64_t const head = firstHead + low;
            int64_t const first = (i - starts[low]) * length;
            items[i] = WorkItem{static_cast<int32_t>(head / Hkv), static_cast<int32_t>(head % Hkv),
                static_cast<int32_t>(first), static_cast<int32_t>(min(length, lengths[low] - first))};
        }
        count = end;
    }
    if (thread == 0)
    {
        arguments.workCount[layer] = static_cast<int32_t>(count);
    }
}

} // namespace

void planCuda(void* cudaStream, hubkv_cache_params const& params, int64_t minRowsPerItem, int64_t const* arena,
    int64_t const* segments, WorkItem* work, int32_t* workCount)
{
    int64_t const heads = params.B * params.Hkv;
    size_t const shared = heads <= kKEPT_HEADS ? static_cast<size_t>(heads) * sizeof(int32_t) : 0;
    PlanArguments const arguments{params, minRowsPerItem, arena, segments, work, workCount};
    launch(planLayer, gridFor("L", params.L, 1), dim3(kTHREADS), shared, static_cast<Stream>(cudaStream), arguments);
}

} // namespace hubkv
