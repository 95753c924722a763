// SPDX-License-Identifier: Apache-2.0
//
// select_ragged on the host: a task per head bisects its threshold over keys, then writes what is above it and as many of
// those at it as there is room for.
#include "select_ragged/select_ragged.h"

#include "common/thread_pool.h"

#include <algorithm>

namespace hubkv
{
namespace
{

class RaggedHead
{
public:
    RaggedHead(hubkv_select_ragged_params const& params, SelectRaggedArrays const& arrays, HeadEntries const& entries)
        : mScores(arrays.scores + entries.first)
        , mPositions(arrays.candidatePositions + entries.first)
        , mCount(entries.count)
        , mSinkTokens(params.sinkTokens)
    {
    }

    //! to [rows] = the first `rows` >= 1 of the ranks, ascending.
    void select(int64_t rows, int32_t* to) const
    {
        // At least `rows` keys are >= low, fewer are >= high.
        int64_t low = INT32_MIN;
        int64_t high = int64_t{kPROTECTED_KEY} + 1;
        while (high - low > 1)
        {
            int64_t const middle = (low + high) >> 1;
            (atLeast(static_cast<int32_t>(middle)) >= rows ? low : high) = middle;
        }
        int64_t ties = rows - (low < kPROTECTED_KEY ? atLeast(static_cast<int32_t>(low + 1)) : 0);
        for (int64_t i = 0; i < mCount; ++i)
        {
            int32_t const key = keyAt(i);
            bool const tie = key == low && ties > 0;
            ties -= tie ? 1 : 0;
            if (key > low || tie)
            {
                *to++ = static_cast<int32_t>(i);
            }
        }
    }

private:
    int32_t keyAt(int64_t i) const
    {
        return rankKey(mScores[i], mPositions[i], mSinkTokens);
    }

    int64_t atLeast(int32_t key) const
    {
        int64_t count = 0;
        for (int64_t i = 0; i < mCount; ++i)
        {
            count += keyAt(i) >= key ? 1 : 0;
        }
        return count;
    }

    float const* mScores;
    int32_t const* mPositions;
    int64_t mCount;
    int32_t mSinkTokens;
};

} // namespace

void selectRaggedHost(hubkv_select_ragged_params const& params, SelectRaggedArrays const& arrays)
{
    int64_t rows = 0;
    for (int64_t head = 0; head < params.H; ++head)
    {
        arrays.headOffsets[head] = rows;
        int64_t const candidates = HeadEntries(arrays.candidateOffsets, head, params.N).count;
        rows = std::min(params.K, rows + std::clamp<int64_t>(arrays.counts[head], 0, candidates));
    }
    arrays.headOffsets[params.H] = rows;
    std::fill(arrays.indices + rows, arrays.indices + params.K, -1);
    parallelFor(params.H,
        [&](int64_t head)
        {
            int64_t const first = arrays.headOffsets[head];
            int64_t const count = arrays.headOffsets[head + 1] - first;
            if (count > 0)
            {
                RaggedHead(params, arrays, HeadEntries(arrays.candidateOffsets, head, params.N))
                    .select(count, arrays.indices + first);
            }
        });
}

} // namespace hubkv
