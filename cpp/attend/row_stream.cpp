// SPDX-License-Identifier: Apache-2.0
#include "attend/row_stream.h"

#include <algorithm>

namespace hubkv
{
namespace
{

void addRows(RowBlock& block, int32_t at, int32_t count, StridedRows const& from, float const* bias)
{
    for (int32_t i = 0; i < count; ++i)
    {
        block.k[at + i] = from.k + i * from.kStride;
        block.v[at + i] = from.v + i * from.vStride;
    }
    for (int32_t i = 0; i < count; ++i)
    {
        block.bias[at + i] = bias != nullptr ? bias[i] * kLOG2_E : 0.F;
    }
}

} // namespace

int32_t RowStream::addCompact(RowBlock& block, int32_t rows, int32_t maxRows)
{
    while (mItem < mItems && rows < maxRows)
    {
        WorkItem const& item = mWork[mOrder[mItem]];
        int64_t const first = std::clamp<int64_t>(item.firstRow, 0, mCompact.rows);
        int64_t const length = std::clamp<int64_t>(item.rows, 0, mCompact.rows - first);
        int32_t const count = static_cast<int32_t>(std::min<int64_t>(length - mRowInItem, maxRows - rows));
        if (count > 0)
        {
            int64_t const row = first + mRowInItem;
            addRows(block, rows, count,
                StridedRows{mCompact.k + row * mCache.rowBytes, mCompact.v + row * mCache.rowBytes, mCache.rowBytes,
                    mCache.rowBytes},
                mCompact.bias != nullptr ? mCompact.bias + row : nullptr);
            rows += count;
            mRowInItem += count;
        }
        if (mRowInItem >= length)
        {
            ++mItem;
            mRowInItem = 0;
        }
    }
    return rows;
}

int32_t RowStream::addTail(RowBlock& block, int32_t rows, int32_t maxRows)
{
    while (mTailNext < mTailEnd && rows < maxRows)
    {
        int64_t const page = mTailNext / mCache.P;
        int64_t const slot = mTailNext - page * mCache.P;
        int64_t const inPage = std::min(mCache.P - slot, mTailEnd - mTailNext);
        char const* const keys = mCache.tailKeys(mPageTable, page, mLayer, mHead);
        if (keys == nullptr)
        {
            mTailNext += inPage;
            continue;
        }
        int32_t const count = static_cast<int32_t>(std::min<int64_t>(inPage, maxRows - rows));
        char const* const from = keys + slot * mCache.rowBytes;
        addRows(block, rows, count, StridedRows{from, from + mCache.valueOffset(), mCache.rowBytes, mCache.rowBytes},
            nullptr);
        rows += count;
        mTailNext += count;
    }
    return rows;
}

int32_t RowStream::addNew(RowBlock& block, int32_t rows, int32_t maxRows)
{
    int32_t const count = std::min(mNewCount - mNewNext, maxRows - rows);
    if (count > 0)
    {
        StridedRows const from{
            mNew.k + mNewNext * mNew.kStride, mNew.v + mNewNext * mNew.vStride, mNew.kStride, mNew.vStride};
        addRows(block, rows, count, from, nullptr);
        rows += count;
        mNewNext += count;
    }
    return rows;
}

bool RowStream::next(RowBlock& block, int32_t maxRows)
{
    int32_t rows = addCompact(block, 0, maxRows);
    rows = addTail(block, rows, maxRows);
    block.firstNew = rows;
    block.newToken = mNewNext;
    rows = addNew(block, rows, maxRows);
    if (rows == 0)
    {
        return false;
    }
    block.rows = rows;
    block.padded = (rows + kROW_GRANULE - 1) / kROW_GRANULE * kROW_GRANULE;
    for (int32_t r = rows; r < maxRows; ++r)
    {
        block.k[r] = block.k[rows - 1];
        block.v[r] = block.v[rows - 1];
    }
    for (int32_t r = rows; r < block.padded; ++r)
    {
        block.bias[r] = -std::numeric_limits<float>::infinity();
    }
    return true;
}

} // namespace hubkv
