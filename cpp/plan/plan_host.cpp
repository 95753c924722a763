// SPDX-License-Identifier: Apache-2.0
#include "common/cache_view.h"
#include "common/thread_pool.h"
#include "plan/plan.h"

#include <algorithm>

namespace hubkv
{
namespace
{

//! Calls visit(sequence, head, rows) for the heads of a layer that have compact rows, in ascending order.
template <typename Visit>
void forEachHead(
    hubkv_cache_params const& params, CacheView const& cache, int64_t const* segments, int64_t layer, Visit&& visit)
{
    for (int64_t b = 0; b < params.B; ++b)
    {
        for (int64_t head = 0; head < params.Hkv; ++head)
        {
            int64_t const rows = cache.headRows(segments + b * kSEGMENT_FIELDS, layer, head).rows;
            if (rows > 0)
            {
                visit(b, head, rows);
            }
        }
    }
}

//! The smallest multiple of kITEM_GRANULE, at least `atLeast`, for which the layer's items fit in capacity.
int64_t rowsPerItem(
    hubkv_cache_params const& params, CacheView const& cache, int64_t const* segments, int64_t layer, int64_t atLeast)
{
    int64_t longest = 0;
    forEachHead(
        params, cache, segments, layer, [&](int64_t, int64_t, int64_t rows) { longest = std::max(longest, rows); });

    // In granules. `high` always fits: one item per head, and capacity >= B * Hkv. The item count falls with the
    // length.
    auto const granules = [](int64_t rows) { return rows / kITEM_GRANULE + (rows % kITEM_GRANULE != 0 ? 1 : 0); };
    int64_t low = granules(atLeast);
    int64_t high = std::max(low, granules(longest));
    while (low < high)
    {
        int64_t const middle = low + (high - low) / 2;
        int64_t items = 0;
        forEachHead(params, cache, segments, layer,
            [&](int64_t, int64_t, int64_t rows) { items += (granules(rows) + middle - 1) / middle; });
        if (items <= params.capacity)
        {
            high = middle;
        }
        else
        {
            low = middle + 1;
        }
    }
    // Past the longest head the length makes no difference; this keeps the arithmetic on it inside 64 bits.
    return std::min(low, std::max<int64_t>(1, granules(longest))) * kITEM_GRANULE;
}

} // namespace

void planHost(hubkv_cache_params const& params, int64_t minRowsPerItem, int64_t const* arena, int64_t const* segments,
    WorkItem* work, int32_t* workCount)
{
    CacheView const cache(params, arena);
    parallelFor(params.L,
        [&](int64_t layer)
        {
            int64_t const length = rowsPerItem(params, cache, segments, layer, minRowsPerItem);
            WorkItem* const items = work + layer * params.capacity;
            int64_t count = 0;
            forEachHead(params, cache, segments, layer,
                [&](int64_t b, int64_t head, int64_t rows)
                {
                    // The bound matters only where another thread changes the head offsets meanwhile.
                    for (int64_t first = 0; first < rows && count < params.capacity; first += length)
                    {
                        items[count++] = WorkItem{static_cast<int32_t>(b), static_cast<int32_t>(head),
                            static_cast<int32_t>(first), static_cast<int32_t>(std::min(length, rows - first))};
                    }
                });
            workCount[layer] = static_cast<int32_t>(count);
        });
}

} // namespace hubkv
