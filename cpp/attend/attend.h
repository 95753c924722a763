// SPDX-License-Identifier: Apache-2.0
//
// attend: attention of new tokens over compact segment, tail and new tokens. hubkv.h has the semantics.
#pragma once

#include "common/workspace.h"
#include "hubkv/hubkv.h"
#include "plan/plan.h"

#include <atomic>
#include <cstdint>

namespace hubkv
{

//! The arrays of one hubkv_attend call, as hubkv.h describes them.
struct AttendArrays
{
    void const* q;
    void const* kNew;
    void const* vNew;
    int64_t const* arena;
    int64_t const* segments;
    int32_t const* blockTable;
    int32_t const* tailLengths;
    int32_t const* newLengths;
    WorkItem const* work;
    int32_t const* workCount;
    void* out;
};

//! Where things lie in the workspace of the host attend; the one source of its size. The parameters are checked.
//!
//! Up to kSPLIT_QUERIES queries per kv head (G * Tq), the rows of a head are shared out: each work item and each piece
//! of tail is attended to on its own, and the parts are merged. Beyond, queries are shared out instead, in tiles that
//! go over all rows of their head, and nothing is kept between.
struct AttendLayout
{
    static constexpr int64_t kSPLIT_QUERIES = 32;
    static constexpr int64_t kTAIL_PIECE = 1024; // tail tokens for which another piece is worth it
    static constexpr int64_t kMAX_TAIL_PIECES = 4;

    bool split;
    int64_t heads;      // B * Hkv
    int64_t queries;    // G * Tq
    int64_t tailPieces; // most pieces of a tail
    int64_t slotFloats; // of one part: maximum [queries], sum [queries], values [queries, D]

    WorkspaceArray<int32_t> itemStarts;            // [heads + 1] where a head's items begin in `order`
    WorkspaceArray<int32_t> order;                 // [capacity] items by head
    WorkspaceArray<std::atomic<int32_t>> unmerged; // [heads] parts of a head still at work
    WorkspaceArray<float> slots;                   // [capacity + heads * tailPieces, slotFloats]
    int64_t bytes;

    explicit AttendLayout(hubkv_attend_params const& params);
};

void attendHost(hubkv_attend_params const& params, AttendArrays const& arrays, void* workspace);

//! The same on a GPU: enqueued on `stream`, all data in device memory.
int64_t attendCudaWorkspace(hubkv_attend_params const& params);
void attendCuda(void* stream, hubkv_attend_params const& params, AttendArrays const& arrays, void* workspace);

} // namespace hubkv
