// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of attend get, and what they all read from it.
#pragma once

#include "attend/attend.h"
#include "attend/attend_layout.h"
#include "common/cache_view.h"
#include "common/device.h"

namespace hubkv
{
namespace
{

constexpr int32_t kTHREADS = 128;
constexpr int32_t kWARPS = kTHREADS / kWARP_SIZE;
constexpr int32_t kMAX_HEAD_DIM = 256;

struct AttendArguments
{
    hubkv_attend_params params;
    AttendArrays arrays;
    float* slots; // parts, or null: results go straight to out
    int64_t slotFloats;
    int64_t tailPieces; // most pieces of a tail
    int32_t queries;    // G * Tq
    int32_t group;      // G
    int32_t blockTiles; // 1, 2 or 4: tiles of queries that a block has side by side
    int32_t headBlocks; // blocks that share out a head's queries
    float scale;        // in units of log 2
};

//! Real new tokens of a sequence.
__device__ int32_t newTokens(AttendArguments const& arguments, int64_t b)
{
    int32_t const* const lengths = arguments.arrays.newLengths;
    int32_t const Tq = static_cast<int32_t>(arguments.params.Tq);
    return lengths == nullptr ? Tq : max(0, min(lengths[b], Tq));
}

//! Pieces that the tail of a sequence is cut into; the new tokens go with the last.
__device__ int64_t tailPiecesOf(AttendArguments const& arguments, int64_t tokens)
{
    return max(int64_t{1}, min(tokens / AttendCudaLayout::kTAIL_PIECE, arguments.tailPieces));
}

} // namespace
} // namespace hubkv
