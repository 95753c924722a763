// SPDX-License-Identifier: Apache-2.0
//
// calibrate_top_p on the host: a task per head, then a task per layer for its budget. Thresholds are found by bisection
// over keys, each step a pass over the rows: no row is moved or sorted.
#include "calibrate_top_p/calibrate_top_p.h"

#include "calibrate_top_p/weight.h"
#include "common/cpu.h"
#include "common/dtype.h"
#include "common/thread_pool.h"

#include <algorithm>

namespace hubkv
{
namespace
{

//! Sums over candidates whose key is at least some key.
struct Above
{
    int64_t count;
    int64_t mass;
};

//! One head's candidates by the values of one array.
class RankedHead
{
public:
    RankedHead(HeadEntries const& entries, float const* values, int32_t const* positions, int32_t sinkTokens,
        int32_t* keys, uint32_t* weights)
        : mCount(entries.count)
        , mKeys(keys + entries.first)
        , mWeights(weights + entries.first)
    {
        int32_t largest = kKEY_OF_MINUS_INFINITY;
        mProtected = 0;
        for (int64_t i = 0; i < mCount; ++i)
        {
            largest = std::max(largest, valueKey(values[entries.first + i]));
        }
        mLargest = keyValue(largest);
        for (int64_t i = 0; i < mCount; ++i)
        {
            bool const kept = positions[entries.first + i] < sinkTokens;
            mKeys[i] = kept ? kPROTECTED_KEY : valueKey(values[entries.first + i]);
            mProtected += kept ? 1 : 0;
        }
        mValues = values + entries.first;
    }

    int64_t count() const
    {
        return mCount;
    }
    int64_t protectedCount() const
    {
        return mProtected;
    }
    int64_t total() const
    {
        return mTotal;
    }

    void weigh(float temperature)
    {
        mTotal = 0;
        for (int64_t i = 0; i < mCount; ++i)
        {
            mWeights[i] = weightOf(valueKey(mValues[i]), mLargest, temperature);
            mTotal += mWeights[i];
        }
    }

    Above above(int32_t key) const
    {
        Above sums{0, 0};
        for (int64_t i = 0; i < mCount; ++i)
        {
            int64_t const counted = mKeys[i] >= key ? 1 : 0;
            sums.count += counted;
            sums.mass += -counted & static_cast<int64_t>(mWeights[i]);
        }
        return sums;
    }

    //! top(): the least number of first ranked candidates with mass p.
    int64_t top(double p) const
    {
        int64_t const target = targetMass(p, mTotal);
        if (above(kPROTECTED_KEY).mass >= target)
        {
            return mProtected;
        }
        // Keys from `low` on have the mass, those from `high` on have not.
        int64_t low = kKEY_OF_MINUS_INFINITY;
        int64_t high = kPROTECTED_KEY;
        while (high - low > 1)
        {
            int64_t const middle = (low + high) >> 1;
            (above(static_cast<int32_t>(middle)).mass >= target ? low : high) = middle;
        }
        Above const before = above(static_cast<int32_t>(high));
        Above const with = above(static_cast<int32_t>(low));
        // Where wrong offsets make heads overlap, another thread writes here meanwhile, and any of this may be 0.
        int64_t const ties = std::max<int64_t>(with.count - before.count, 1);
        int64_t const weight = std::max<int64_t>((with.mass - before.mass) / ties, 1);
        return std::clamp<int64_t>(before.count + (target - before.mass + weight - 1) / weight, 0, mCount);
    }

    //! Splits the head at its first `count` candidates.
    void split(int64_t count)
    {
        int64_t low = kKEY_OF_MINUS_INFINITY;
        int64_t high = kPROTECTED_KEY;
        while (high - low > 1 && count > mProtected)
        {
            int64_t const middle = (low + high) >> 1;
            (above(static_cast<int32_t>(middle)).count >= count ? low : high) = middle;
        }
        mHigh = static_cast<int32_t>(high);
        mTies = count > mProtected ? count - above(mHigh).count : 0;
        mLastKey = static_cast<int32_t>(low);
    }

    //! Weight of the last of the first ones (-1: all of them are protected), and of all of them.
    int64_t lastWeight(float temperature) const
    {
        return mTies > 0 ? static_cast<int64_t>(weightOf(mLastKey, mLargest, temperature)) : -1;
    }
    int64_t firstMass(int64_t lastWeight) const
    {
        return above(mHigh).mass + mTies * lastWeight;
    }

    void share(float* calibrated) const
    {
        for (int64_t i = 0; i < mCount; ++i)
        {
            calibrated[i] =
                mTotal > 0 ? static_cast<float>(static_cast<double>(mWeights[i]) / static_cast<double>(mTotal)) : 0.F;
        }
    }

private:
    int64_t mCount;
    int32_t* mKeys;
    uint32_t* mWeights;
    float const* mValues;
    int64_t mProtected;
    double mLargest;
    int64_t mTotal = 0;
    int32_t mHigh = kPROTECTED_KEY;
    int32_t mLastKey = 0;
    int64_t mTies = 0;
};

class CalibrateRun
{
public:
    CalibrateRun(hubkv_calibrate_top_p_params const& params, CalibrateArrays const& arrays, void* workspace)
        : mParams(params)
        , mArrays(arrays)
        , mKeys(CalibrateWorkspace(params).keys.in(workspace))
        , mWeights(CalibrateWorkspace(params).weights.in(workspace))
        , mLeast(CalibrateWorkspace(params).least.in(workspace))
    {
    }

    void run()
    {
        parallelFor(mParams.L * mParams.Hkv, [&](int64_t head) { calibrate(head); });
        if (mParams.layerRows > 0)
        {
            parallelFor(mParams.L, [&](int64_t layer) { cut(layer); });
        }
    }

private:
    RankedHead ranked(HeadEntries const& entries, float const* values) const
    {
        return RankedHead(entries, values, mArrays.candidatePositions, mParams.sinkTokens, mKeys, mWeights);
    }

    void calibrate(int64_t number)
    {
        DefaultFloatMode const mode;
        HeadEntries const entries(mArrays.candidateOffsets, number, mParams.N);
        double const p = mParams.p;
        TemperatureSearch search;
        int64_t first = entries.count;
        if (p < 1.0)
        {
            RankedHead raw = ranked(entries, mArrays.raw);
            raw.weigh(1.F);
            first = raw.top(p);
        }
        RankedHead head = ranked(entries, mArrays.transformed);
        head.split(first);
        bool found = false;
        while (!found)
        {
            head.weigh(search.now);
            int64_t const last = head.lastWeight(search.now);
            found = p == 1.0 || search.next(p, head.total(), head.firstMass(last), last);
        }
        head.weigh(search.now);
        mArrays.temperature[number] = search.now;
        head.share(mArrays.calibrated + entries.first);

        int64_t const n = head.count();
        int64_t kept = p == 1.0 || mParams.fill != 0 ? n : std::max(head.top(p), std::min(mParams.minRows, n));
        kept = mParams.maxRows > 0 ? std::min(kept, mParams.maxRows) : kept;
        kept = std::max(kept, head.protectedCount());
        mArrays.counts[number] = static_cast<int32_t>(kept);
        mLeast[number] = static_cast<int32_t>(std::min(kept, std::max(head.protectedCount(), mParams.minRows)));
    }

    //! Rows that a head keeps where those of a `calibrated` of at least `share` (as bits) are.
    int64_t keptFrom(int64_t number, int32_t share) const
    {
        HeadEntries const entries(mArrays.candidateOffsets, number, mParams.N);
        int64_t count = 0;
        for (int64_t i = entries.first; i < entries.first + entries.count; ++i)
        {
            bool const kept = mArrays.candidatePositions[i] < mParams.sinkTokens;
            count += kept || static_cast<int32_t>(bitsOf(mArrays.calibrated[i])) >= share ? 1 : 0;
        }
        return std::clamp<int64_t>(count, mLeast[number], mArrays.counts[number]);
    }

    //! The layer's budget: its heads' counts, lowered.
    void cut(int64_t layer)
    {
        int64_t const begin = layer * mParams.Hkv;
        int64_t const end = begin + mParams.Hkv;
        auto const all = [&](int32_t share)
        {
            int64_t rows = 0;
            for (int64_t head = begin; head < end; ++head)
            {
                rows += keptFrom(head, share);
            }
            return rows;
        };
        if (all(0) <= mParams.layerRows)
        {
            return;
        }
        // From `low` on there are more rows than the budget, from `high` on no more.
        int32_t low = 0;
        int32_t high = kKEY_OF_INFINITY;
        while (high - low > 1)
        {
            int32_t const middle = low + (high - low) / 2;
            (all(middle) > mParams.layerRows ? low : high) = middle;
        }
        int64_t room = mParams.layerRows - all(high);
        for (int64_t head = begin; head < end; ++head)
        {
            int64_t const rows = keptFrom(head, high);
            int64_t const ties = std::clamp<int64_t>(room, 0, keptFrom(head, low) - rows);
            mArrays.counts[head] = static_cast<int32_t>(rows + ties);
            room -= ties;
        }
    }

    hubkv_calibrate_top_p_params const& mParams;
    CalibrateArrays const& mArrays;
    int32_t* mKeys;
    uint32_t* mWeights;
    int32_t* mLeast;
};

} // namespace

void calibrateTopPHost(hubkv_calibrate_top_p_params const& params, CalibrateArrays const& arrays, void* workspace)
{
    CalibrateRun run(params, arrays, workspace);
    run.run();
}

} // namespace hubkv
