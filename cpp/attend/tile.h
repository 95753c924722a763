// SPDX-License-Identifier: Apache-2.0
//
// The unit of work of the host attend: some queries of one (sequence, kv head) over one stream of rows; and the merging
// of what such units found. Query i of a kv head is head i % G of new token i / G. Logits are in units of log 2: scale
// includes log2(e), so that weights are powers of two.
#pragma once

#include "attend/row_stream.h"
#include "common/dtype.h"

#include <cstdint>

namespace hubkv
{

//! What is known of the softmax of some queries over some rows: the weighted values are not yet divided by the sum.
struct Part
{
    float* maximum; // [queries] -inf where every row was masked or there was none
    float* sum;     // [queries] of 2^(logit - maximum)
    float* values;  // [queries, D] sums of 2^(logit - maximum) * v
};

//! Rows of q or out of one (sequence, kv head): [tokens, G, D], tokens tokenStride elements apart.
template <typename Pointer>
struct QueryRows
{
    Pointer rows; // token 0, first query head of the kv head
    int64_t tokenStride;
    int64_t G;
    int64_t D;

    //! Elements from `rows` to query i.
    int64_t offset(int64_t i) const
    {
        return i / G * tokenStride + i % G * D;
    }
};

struct Tile
{
    QueryRows<void const*> q;
    int32_t first; // queries first..first+count-1
    int32_t count;
    float scale;
    Part part; // of `count` queries; maximum null: results are divided and go to `out` instead
    QueryRows<void*> out;
};

//! Parts of one (sequence, kv head). Part p is slot order[p] for p < items, then slot tailSlot + p - items; a slot is
//! maximum [queries], sum [queries], values [queries, D].
struct Parts
{
    float* slots;
    int64_t slotFloats;
    int64_t slotQueries;
    int32_t const* order;
    int32_t items;
    int64_t tailSlot;
    int32_t count; // items and tail parts

    Part at(int64_t slot) const
    {
        float* const start = slots + slot * slotFloats;
        return Part{start, start + slotQueries, start + 2 * slotQueries};
    }
    Part operator[](int32_t p) const
    {
        return at(p < items ? order[p] : tailSlot + p - items);
    }
};

//! The kernels of one instruction set and element type.
struct AttendKernels
{
    int32_t tileQueries; // most queries of a tile
    void (*run)(Tile const& tile, RowStream& rows);
    //! out = the parts together, for queries 0..queries-1. The order of parts fixes the bits of the result.
    void (*merge)(Parts const& parts, int32_t queries, QueryRows<void*> const& out);
};

AttendKernels attendKernelsScalar(hubkv_dtype dtype);
#if HUBKV_X86
AttendKernels attendKernelsAvx2(hubkv_dtype dtype);
AttendKernels attendKernelsAvx512(hubkv_dtype dtype);
#endif

} // namespace hubkv
