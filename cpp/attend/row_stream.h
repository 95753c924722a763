// SPDX-License-Identifier: Apache-2.0
//
// What a set of queries attends to, as blocks of row addresses: compact rows named by work items, then tail rows, then
// new tokens. A block crosses from one kind to the next, so the kernels never see where rows come from, and where a
// block ends does not depend on how the plan cut a head.
#pragma once

#include "common/cache_view.h"
#include "plan/plan.h"

#include <cstdint>
#include <limits>

namespace hubkv
{

//! Blocks are filled up to a multiple of this, by repeating the last row with bias -inf: its weight is 0.
constexpr int32_t kROW_GRANULE = 16;
constexpr int32_t kMAX_BLOCK_ROWS = 64;

//! Logits are in units of log 2, so that weights are powers of two.
constexpr float kLOG2_E = 1.44269504F;

struct RowBlock
{
    int32_t rows;                   // real rows, >= 1
    int32_t padded;                 // rows up to a multiple of kROW_GRANULE
    int32_t firstNew;               // first row of the block that is a new token; `rows` where there is none
    int32_t newToken;               // which new token that is
    char const* k[kMAX_BLOCK_ROWS]; // rows of D; past `rows`, up to maxRows of next(), the last row again
    char const* v[kMAX_BLOCK_ROWS];
    alignas(64) float bias[kMAX_BLOCK_ROWS]; // [padded] in units of log 2, added to scale * q . k
};

//! Rows that lie at one distance from each other: the new tokens of a (sequence, kv head).
struct StridedRows
{
    char const* k;
    char const* v;
    int64_t kStride; // bytes
    int64_t vStride;
};

class RowStream
{
public:
    RowStream(CacheView const& cache, int64_t layer, int64_t head)
        : mCache(cache)
        , mLayer(layer)
        , mHead(head)
    {
    }

    //! Items order[0..count-1] of `work`, all of this head. What an item has outside the head's rows is left out.
    void setCompact(HeadRows const& rows, WorkItem const* work, int32_t const* order, int32_t count)
    {
        mCompact = rows;
        mWork = work;
        mOrder = order;
        mItems = count;
    }

    //! Tail tokens first..end-1; pageTable [maxPages]. Tokens without a page are left out.
    void setTail(int32_t const* pageTable, int64_t first, int64_t end)
    {
        mPageTable = pageTable;
        mTailNext = first;
        mTailEnd = end;
    }

    //! New tokens 0..count-1.
    void setNew(StridedRows const& rows, int32_t count)
    {
        mNew = rows;
        mNewCount = count;
    }

    //! The next block of at most maxRows (a multiple of kROW_GRANULE) rows; false when no row is left.
    bool next(RowBlock& block, int32_t maxRows);

private:
    int32_t addCompact(RowBlock& block, int32_t rows, int32_t maxRows);
    int32_t addTail(RowBlock& block, int32_t rows, int32_t maxRows);
    int32_t addNew(RowBlock& block, int32_t rows, int32_t maxRows);

    CacheView const& mCache;
    int64_t mLayer;
    int64_t mHead;

    HeadRows mCompact{nullptr, nullptr, nullptr, 0};
    WorkItem const* mWork = nullptr;
    int32_t const* mOrder = nullptr;
    int32_t mItems = 0;
    int32_t mItem = 0;
    int64_t mRowInItem = 0;

    int32_t const* mPageTable = nullptr;
    int64_t mTailNext = 0;
    int64_t mTailEnd = 0;

    StridedRows mNew{nullptr, nullptr, 0, 0};
    int32_t mNewNext = 0;
    int32_t mNewCount = 0;
};

} // namespace hubkv
