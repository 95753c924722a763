// SPDX-License-Identifier: Apache-2.0
//
// The workspace of attend on a GPU.
#pragma once

#include "common/workspace.h"
#include "hubkv/hubkv.h"

#include <algorithm>
#include <cstdint>

namespace hubkv
{

//! Where things lie in the workspace of the CUDA attend; the one source of its size. The parameters are checked.
//!
//! Up to kSPLIT_QUERIES queries per kv head (G * Tq), the rows of a head are shared out: a block takes a work item or a
//! piece of a tail, and the parts are merged by a second kernel. Beyond, queries are shared out: a block takes some of
//! them over all rows of their head, and nothing is kept between.
struct AttendCudaLayout
{
    static constexpr int64_t kSPLIT_QUERIES = 32;
    static constexpr int64_t kTAIL_PIECE = 256; // tail tokens for which another piece is worth it
    static constexpr int64_t kMAX_TAIL_PIECES = 16;

    bool split;
    int64_t heads;      // B * Hkv
    int64_t queries;    // G * Tq
    int64_t tailPieces; // most pieces of a tail; follows from maxPages, so that a graph fits all tail lengths
    int64_t slotFloats; // of one part: maximum [queries], sum [queries], values [queries, D]

    WorkspaceArray<float> slots; // [capacity + heads * tailPieces, slotFloats]
    WorkspaceArray<char> kNew;   // [B, Tq, Hkv, D], for new rows that are not aligned to 16 bytes
    WorkspaceArray<char> vNew;   // the same
    int64_t bytes;

    explicit AttendCudaLayout(hubkv_attend_params const& params)
    {
        hubkv_cache_params const& cache = params.cache;
        heads = cache.B * cache.Hkv;
        queries = params.Hq / cache.Hkv * params.Tq;
        split = queries <= kSPLIT_QUERIES;
        tailPieces = std::clamp<int64_t>(cache.maxPages * cache.P / kTAIL_PIECE, 1, kMAX_TAIL_PIECES);
        slotFloats = queries * (cache.D + 2);

        WorkspaceCarver carver;
        slots = carver.take<float>(split ? (cache.capacity + heads * tailPieces) * slotFloats : 0);
        int64_t const newBytes = cache.B * params.Tq * cache.Hkv * cache.D * (cache.dtype == HUBKV_FLOAT32 ? 4 : 2);
        kNew = carver.take<char>(newBytes);
        vNew = carver.take<char>(newBytes);
        bytes = carver.bytes();
    }
};

} // namespace hubkv
