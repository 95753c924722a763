// SPDX-License-Identifier: Apache-2.0
//
// The items of a layer by head (sequence * Hkv + kv head). Within a head they keep the order of the work list; items
// that name no head of this cache are left out.
#pragma once

#include "hubkv/hubkv.h"
#include "plan/plan.h"

#include <algorithm>
#include <cstdint>

namespace hubkv
{

class ItemIndex
{
public:
    //! work [capacity] of the layer; starts [B * Hkv + 1] and order [capacity] are scratch that lives as long as the
    //! index.
    ItemIndex(
        hubkv_cache_params const& params, WorkItem const* work, int32_t workCount, int32_t* starts, int32_t* order)
        : mStarts(starts)
        , mOrder(order)
        , mHeads(params.B * params.Hkv)
    {
        auto const headOf = [&](int64_t i) -> int64_t
        {
            WorkItem const& item = work[i];
            bool const real =
                item.sequence >= 0 && item.sequence < params.B && item.head >= 0 && item.head < params.Hkv;
            return real ? item.sequence * params.Hkv + item.head : -1;
        };
        int64_t const count = std::clamp<int64_t>(workCount, 0, params.capacity);
        std::fill_n(starts, mHeads + 1, 0);
        for (int64_t i = 0; i < count; ++i)
        {
            if (int64_t const head = headOf(i); head >= 0)
            {
                ++starts[head];
            }
        }
        // Counts become ends, and filling from the back turns ends into starts.
        for (int64_t head = 0; head < mHeads; ++head)
        {
            starts[head + 1] += starts[head];
        }
        for (int64_t i = count - 1; i >= 0; --i)
        {
            if (int64_t const head = headOf(i); head >= 0)
            {
                order[--starts[head]] = static_cast<int32_t>(i);
            }
        }
    }

    //! Places in the work list of all items, by head; count() of them.
    int32_t const* all() const
    {
        return mOrder;
    }
    int32_t count() const
    {
        return mStarts[mHeads];
    }

    int32_t const* itemsOf(int64_t head) const
    {
        return mOrder + mStarts[head];
    }
    int32_t countOf(int64_t head) const
    {
        return mStarts[head + 1] - mStarts[head];
    }

private:
    int32_t const* mStarts;
    int32_t const* mOrder;
    int64_t mHeads;
};

} // namespace hubkv
