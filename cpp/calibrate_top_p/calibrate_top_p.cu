// SPDX-License-Identifier: Apache-2.0
//
// calibrate_top_p on the GPU, the bits of the host. calibrateHeads: a block per head; each of its bisections is a sum of
// integers over the block at every step. cutLayers: a block per layer. A thread goes over the same candidates each time, so
// keys and weights need no barrier. Compiled without contraction of a * b + c.
#include "calibrate_top_p/calibrate_top_p.h"

#include "calibrate_top_p/weight.h"
#include "common/device.h"

namespace hubkv
{
namespace
{

constexpr int32_t kTHREADS = 256;
constexpr int32_t kWARPS = kTHREADS / kWARP_SIZE;

struct CalibrateArguments
{
    hubkv_calibrate_top_p_params params;
    CalibrateArrays arrays;
    int32_t* keys;
    uint32_t* weights;
    int32_t* least;
};

//! Sums over candidates whose key is at least some key.
struct Above
{
    int64_t count;
    int64_t mass;
};

//! Over the block, in every thread. shared [kWARPS] may be in use up to the call.
__device__ Above blockSum(Above value, Above* shared)
{
    __syncthreads();
    value.count = warpSum(value.count);
    value.mass = warpSum(value.mass);
    if (laneOf(threadIdx.x) == 0)
    {
        shared[threadIdx.x / kWARP_SIZE].count = value.count;
        shared[threadIdx.x / kWARP_SIZE].mass = value.mass;
    }
    __syncthreads();
    value.count = 0;
    value.mass = 0;
    for (int32_t warp = 0; warp < kWARPS; ++warp)
    {
        value.count += shared[warp].count;
        value.mass += shared[warp].mass;
    }
    return value;
}

//! The host's RankedHead, over a block.
class RankedHead
{
public:
    __device__ RankedHead(CalibrateArguments const& arguments, HeadEntries const& entries, Above* shared)
        : mPositions(arguments.arrays.candidatePositions + entries.first)
        , mKeys(arguments.keys + entries.first)
        , mWeights(arguments.weights + entries.first)
        , mCount(entries.count)
        , mSinkTokens(arguments.params.sinkTokens)
        , mShared(shared)
    {
    }

    __device__ void rank(float const* values)
    {
        mValues = values;
        int64_t kept = 0;
        int32_t largest = kKEY_OF_MINUS_INFINITY;
        for (int64_t i = threadIdx.x; i < mCount; i += kTHREADS)
        {
            int32_t const key = valueKey(values[i]);
            bool const held = mPositions[i] < mSinkTokens;
            largest = max(largest, key);
            mKeys[i] = held ? kPROTECTED_KEY : key;
            kept += held ? 1 : 0;
        }
        protectedCount = blockSum(Above{kept, 0}, mShared).count;
        // The largest key by bisection over the keys that any thread has.
        int64_t low = kKEY_OF_MINUS_INFINITY;
        int64_t high = kPROTECTED_KEY;
        while (high - low > 1)
        {
            int64_t const middle = (low + high) >> 1;
            int64_t const reached = blockSum(Above{largest >= middle ? 1 : 0, 0}, mShared).count;
            (reached > 0 ? low : high) = middle;
        }
        mLargest = keyValue(static_cast<int32_t>(low));
    }

    __device__ void weigh(float temperature)
    {
        int64_t sum = 0;
        for (int64_t i = threadIdx.x; i < mCount; i += kTHREADS)
        {
            uint32_t const weight = weightOf(valueKey(mValues[i]), mLargest, temperature);
            mWeights[i] = weight;
            sum += weight;
        }
        total = blockSum(Above{0, sum}, mShared).mass;
    }

    __device__ Above above(int64_t key) const
    {
        Above sums{0, 0};
        for (int64_t i = threadIdx.x; i < mCount; i += kTHREADS)
        {
            bool const counted = mKeys[i] >= key;
            sums.count += counted ? 1 : 0;
            sums.mass += counted ? mWeights[i] : 0;
        }
        return blockSum(sums, mShared);
    }

    __device__ int64_t top(double p) const
    {
        int64_t const target = targetMass(p, total);
        if (above(kPROTECTED_KEY).mass >= target)
        {
            return protectedCount;
        }
        int64_t low = kKEY_OF_MINUS_INFINITY;
        int64_t high = kPROTECTED_KEY;
        while (high - low > 1)
        {
            int64_t const middle = (low + high) >> 1;
            (above(middle).mass >= target ? low : high) = middle;
        }
        Above const before = above(high);
        Above const with = above(low);
        // Where wrong offsets make heads overlap, another block writes here meanwhile, and any of this may be 0.
        int64_t const ties = with.count > before.count ? with.count - before.count : 1;
        int64_t const mass = with.mass - before.mass;
        int64_t const weight = mass > ties ? mass / ties : 1;
        return before.count + (target - before.mass + weight - 1) / weight;
    }

    __device__ void split(int64_t count)
    {
        int64_t low = kKEY_OF_MINUS_INFINITY;
        int64_t high = kPROTECTED_KEY;
        while (high - low > 1 && count > protectedCount)
        {
            int64_t const middle = (low + high) >> 1;
            (above(middle).count >= count ? low : high) = middle;
        }
        mHigh = high;
        mLastKey = static_cast<int32_t>(low);
        mTies = count > protectedCount ? count - above(high).count : 0;
    }

    __device__ int64_t lastWeight(float temperature) const
    {
        return mTies > 0 ? static_cast<int64_t>(weightOf(mLastKey, mLargest, temperature)) : -1;
    }

    __device__ int64_t firstMass(int64_t lastWeight) const
    {
        return above(mHigh).mass + mTies * lastWeight;
    }

    __device__ void share(float* calibrated) const
    {
        for (int64_t i = threadIdx.x; i < mCount; i += kTHREADS)
        {
            calibrated[i] =
                total > 0 ? static_cast<float>(static_cast<double>(mWeights[i]) / static_cast<double>(total)) : 0.F;
        }
    }

    int64_t protectedCount = 0;
    int64_t total = 0;

private:
    float const* mValues = nullptr;
    int32_t const* mPositions;
    int32_t* mKeys;
    uint32_t* mWeights;
    int64_t mCount;
    int32_t mSinkTokens;
    Above* mShared;
    double mLargest = 0.0;
    int64_t mHigh = 0;
    int64_t mTies = 0;
    int32_t mLastKey = 0;
};

__global__ void __launch_bounds__(kTHREADS, 2) calibrateHeads(CalibrateArguments const arguments)
{
    __shared__ Above shared[kWARPS];
    hubkv_calibrate_top_p_params const& params = arguments.params;
    CalibrateArrays const& arrays = arguments.arrays;
    int64_t const number = blockIdx.x;
    HeadEntries const entries(arrays.candidateOffsets, number, params.N);
    int64_t const n = entries.count;
    double const p = params.p;
    TemperatureSearch search;
    RankedHead head(arguments, entries, shared);
    int64_t first = n;
    if (p < 1.0)
    {
        head.rank(arrays.raw + entries.first);
        head.weigh(1.F);
        first = head.top(p);
    }
    head.rank(arrays.transformed + entries.first);
    head.split(first);
    bool found = false;
    while (!found)
    {
        head.weigh(search.now);
        int64_t const last = head.lastWeight(search.now);
        found = p == 1.0 || search.next(p, head.total, head.firstMass(last), last);
    }
    head.weigh(search.now);
    head.share(arrays.calibrated + entries.first);

    int64_t kept = p == 1.0 || params.fill != 0 ? n : max(head.top(p), min(params.minRows, n));
    kept = params.maxRows > 0 ? min(kept, params.maxRows) : kept;
    kept = max(kept, head.protectedCount);
    if (threadIdx.x == 0)
    {
        arrays.temperature[number] = search.now;
        arrays.counts[number] = static_cast<int32_t>(kept);
        arguments.least[number] = static_cast<int32_t>(min(kept, max(head.protectedCount, params.minRows)));
    }
}

//! Rows that a head keeps where those of a `calibrated` of at least `share` (as bits) are.
__device__ int64_t keptFrom(CalibrateArguments const& arguments, int64_t number, int32_t share, Above* shared)
{
    CalibrateArrays const& arrays = arguments.arrays;
    HeadEntries const entries(arrays.candidateOffsets, number, arguments.params.N);
    int64_t count = 0;
    for (int64_t i = entries.first + threadIdx.x; i < entries.first + entries.count; i += kTHREADS)
    {
        bool const held = arrays.candidatePositions[i] < arguments.params.sinkTokens;
        count += held || __float_as_int(arrays.calibrated[i]) >= share ? 1 : 0;
    }
    count = blockSum(Above{count, 0}, shared).count;
    return max(static_cast<int64_t>(arguments.least[number]), min(count, static_cast<int64_t>(arrays.counts[number])));
}

__device__ int64_t layerFrom(CalibrateArguments const& arguments, int64_t begin, int32_t share, Above* shared)
{
    int64_t rows = 0;
    for (int64_t head = begin; head < begin + arguments.params.Hkv; ++head)
    {
        rows += keptFrom(arguments, head, share, shared);
    }
    return rows;
}

__global__ void __launch_bounds__(kTHREADS) cutLayers(CalibrateArguments const arguments)
{
    __shared__ Above shared[kWARPS];
    int64_t const layerRows = arguments.params.layerRows;
    int64_t const begin = blockIdx.x * arguments.params.Hkv;
    if (layerFrom(arguments, begin, 0, shared) <= layerRows)
    {
        return;
    }
    // From `low` on there are more rows than the budget, from `high` on no more.
    int32_t low = 0;
    int32_t high = kKEY_OF_INFINITY;
    while (high - low > 1)
    {
        int32_t const middle = low + (high - low) / 2;
        (layerFrom(arguments, begin, middle, shared) > layerRows ? low : high) = middle;
    }
    int64_t room = layerRows - layerFrom(arguments, begin, high, shared);
    for (int64_t head = begin; head < begin + arguments.params.Hkv; ++head)
    {
        int64_t const rows = keptFrom(arguments, head, high, shared);
        int64_t const ties = max(int64_t{0}, min(room, keptFrom(arguments, head, low, shared) - rows));
        __syncthreads(); // counts have been read
        if (threadIdx.x == 0)
        {
            arguments.arrays.counts[head] = static_cast<int32_t>(rows + ties);
        }
        room -= ties;
    }
}

} // namespace

void calibrateTopPCuda(
    void* cudaStream, hubkv_calibrate_top_p_params const& params, CalibrateArrays const& arrays, void* workspace)
{
    Stream const stream = static_cast<Stream>(cudaStream);
    CalibrateWorkspace const layout(params);
    CalibrateArguments const arguments{
        params, arrays, layout.keys.in(workspace), layout.weights.in(workspace), layout.least.in(workspace)};
    launch(calibrateHeads, gridFor("L * Hkv", params.L * params.Hkv, 1), dim3(kTHREADS), 0, stream, arguments);
    if (params.layerRows > 0)
    {
        launch(cutLayers, gridFor("L", params.L, 1), dim3(kTHREADS), 0, stream, arguments);
    }
}

} // namespace hubkv
