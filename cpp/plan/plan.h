// SPDX-License-Identifier: Apache-2.0
//
// plan: the work list of attend. hubkv.h has the semantics.
#pragma once

#include "hubkv/hubkv.h"

#include <cstdint>

namespace hubkv
{

//! A run of rows of one (sequence, kv head): an entry of work [L, capacity, 4].
struct WorkItem
{
    int32_t sequence;
    int32_t head;
    int32_t firstRow; // within the head
    int32_t rows;
};
static_assert(sizeof(WorkItem) == 4 * sizeof(int32_t), "work is int32 [L, capacity, 4]");

//! Item lengths are multiples of this, except for the last item of a head.
constexpr int64_t kITEM_GRANULE = 16;

//! Fills work [L, capacity, 4] and workCount [L]; the parameters are checked. Items ascend by (sequence, head,
//! firstRow).
void planHost(hubkv_cache_params const& params, int64_t minRowsPerItem, int64_t const* arena, int64_t const* segments,
    WorkItem* work, int32_t* workCount);

//! The same on a GPU: enqueued on `stream`, all data in device memory; the same items in the same order.
void planCuda(void* stream, hubkv_cache_params const& params, int64_t minRowsPerItem, int64_t const* arena,
    int64_t const* segments, WorkItem* work, int32_t* workCount);

} // namespace hubkv
