// SPDX-License-Identifier: Apache-2.0
//
// The candidates of a compression while decoding (hubkv.h): the compact rows of a head, then the first tokens of its
// tail. As in cache_view.h, numbers read from tables are bounded before they are used: entries of a head lie in 0..N,
// and a row that is not in the arena has no address.
#pragma once

#include "common/cache_view.h"
#include "common/host_device.h"
#include "common/status.h"
#include "hubkv/hubkv.h"

#include <cstdint>

namespace hubkv
{

//! N. The parameters are checked.
HUBKV_HOST_DEVICE inline int64_t candidateCount(hubkv_candidates_params const& params)
{
    return params.K + params.cache.L * params.cache.Hkv * params.tailTokens;
}

inline void checkCandidatesParams(hubkv_candidates_params const& params)
{
    checkCacheParams(params.cache);
    checkRange("B", params.cache.B, 1, 1);
    checkRange("K", params.K, 0, kINT32_MAX);
    checkRange(
        "tailTokens", params.tailTokens, 0, checkedProduct("maxPages * P", params.cache.maxPages, params.cache.P));
    checkRange("tailBase", params.tailBase, 0, kINT32_MAX);
    checkRange("tailBase + tailTokens", params.tailTokens, 0, kINT32_MAX - params.tailBase);
    checkRange("sinkTokens", params.sinkTokens, 0, kINT32_MAX);
    int64_t const heads = params.cache.L * params.cache.Hkv;
    int64_t const tails = checkedProduct("L * Hkv * tailTokens", heads, params.tailTokens);
    HUBKV_CHECK(tails <= kINT32_MAX - params.K, "N: K + L * Hkv * tailTokens = %lld + %lld is more than %lld",
        static_cast<long long>(params.K), static_cast<long long>(tails), static_cast<long long>(kINT32_MAX));
}

//! A row of K or V of the cache: null where there is none.
struct CandidateRow
{
    char const* k;
    char const* v;
    float bias;
};

//! The candidates of one (layer, kv head).
class HeadCandidates
{
public:
    //! number = layer * Hkv + head. segment [4], pageTable [maxPages].
    HUBKV_HOST_DEVICE HeadCandidates(hubkv_candidates_params const& params, CacheView const& cache,
        int64_t const* segment, int32_t const* pageTable, int64_t number)
        : mCache(cache)
        , mPageTable(pageTable)
        , mLayer(number / params.cache.Hkv)
        , mHead(number - mLayer * params.cache.Hkv)
        , mCompact(cache.headRows(segment, mLayer, mHead))
        , mTailBase(params.tailBase)
        , tail(params.tailTokens)
    {
        int64_t const table = segment[2];
        int64_t last = 0;
        firstRow = 0;
        if (segment[0] >= 0 && segment[1] >= 0 && cache.fitting(table, sizeof(int64_t), sizeof(int64_t)) >= number + 2)
        {
            int64_t const* const offsets = reinterpret_cast<int64_t const*>(cache.base + table) + number;
            firstRow = clamped(offsets[0], 0, params.K);
            last = clamped(offsets[1], firstRow, params.K);
        }
        compact = last - firstRow;
        first = firstRow + number * params.tailTokens;
    }

    HUBKV_HOST_DEVICE int64_t count() const
    {
        return compact + tail;
    }

    //! Of candidate i in 0..count()-1.
    HUBKV_HOST_DEVICE CandidateRow row(int64_t i) const
    {
        if (i < compact)
        {
            if (i >= mCompact.rows)
            {
                return CandidateRow{nullptr, nullptr, 0.F};
            }
            return CandidateRow{mCompact.k + i * mCache.rowBytes, mCompact.v + i * mCache.rowBytes,
                mCompact.bias != nullptr ? mCompact.bias[i] : 0.F};
        }
        int64_t const token = i - compact;
        char const* const page = mCache.tailKeys(mPageTable, token / mCache.P, mLayer, mHead);
        if (page == nullptr)
        {
            return CandidateRow{nullptr, nullptr, 0.F};
        }
        char const* const k = page + token % mCache.P * mCache.rowBytes;
        return CandidateRow{k, k + mCache.valueOffset(), 0.F};
    }

    //! positions [K] of the compact rows.
    HUBKV_HOST_DEVICE int32_t position(int32_t const* positions, int64_t i) const
    {
        return i < compact ? positions[firstRow + i] : static_cast<int32_t>(mTailBase + i - compact);
    }

private:
    HUBKV_HOST_DEVICE static int64_t clamped(int64_t value, int64_t low, int64_t high)
    {
        return value < low ? low : value > high ? high : value;
    }

    CacheView const& mCache;
    int32_t const* mPageTable;
    int64_t mLayer;
    int64_t mHead;
    HeadRows mCompact;
    int64_t mTailBase;

public:
    int64_t tail;     // tail tokens
    int64_t firstRow; // of the compact rows, in the segment
    int64_t compact;  // compact rows
    int64_t first;    // entry of candidate 0 in arrays over all candidates
};

//! The entries of a head in an array over N candidates, whatever the offsets hold.
struct HeadEntries
{
    int64_t first;
    int64_t count;

    HUBKV_HOST_DEVICE HeadEntries(int64_t const* offsets, int64_t head, int64_t N)
    {
        int64_t const begin = offsets[head];
        int64_t const end = offsets[head + 1];
        first = begin < 0 ? 0 : begin > N ? N : begin;
        count = (end < first ? first : end > N ? N : end) - first;
    }
};

//! Ranks before every value.
constexpr int32_t kPROTECTED_KEY = INT32_MAX;

} // namespace hubkv
