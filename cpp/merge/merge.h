// SPDX-License-Identifier: Apache-2.0
//
// merge: the evicted candidates of every head as a few rows that keep their log-sum-exp. hubkv.h has the semantics.
#pragma once

#include "common/host_device.h"
#include "hubkv/hubkv.h"
#include "rewrite/rewrite.h"

#include <cstdint>

namespace hubkv
{

constexpr float kLEAST_LOGIT = -1e30F; // of a member whose logit is -inf or NaN

//! Which candidates of a head its kept ones leave out.
struct Evicted
{
    int32_t const* kept; // ascending; numbers of candidates
    int64_t keptCount;   // <= count
    int64_t count;       // of candidates

    //! headOffsets and indices may hold anything.
    HUBKV_HOST_DEVICE Evicted(
        hubkv_rewrite_params const& params, RewriteArrays const& arrays, int64_t head, int64_t candidates)
        : count(candidates)
    {
        int64_t const begin = arrays.headOffsets[head];
        int64_t const end = arrays.headOffsets[head + 1];
        bool const right = begin >= 0 && begin <= end && end <= params.keptRows && end - begin <= candidates;
        kept = arrays.indices + (right ? begin : 0);
        keptCount = right ? end - begin : 0;
    }

    HUBKV_HOST_DEVICE int64_t evictedCount() const
    {
        return count - keptCount;
    }

    //! Candidate number of the e-th evicted one; inside 0..count-1 whatever the kept ones are.
    HUBKV_HOST_DEVICE int64_t at(int64_t e) const
    {
        // As many kept ones lie before it as have no more than e evicted ones before them.
        int64_t low = 0;
        int64_t high = keptCount;
        while (low < high)
        {
            int64_t const middle = low + (high - low) / 2;
            if (kept[middle] - middle <= e)
            {
                low = middle + 1;
            }
            else
            {
                high = middle;
            }
        }
        return e + low;
    }

    //! The first evicted one of a group.
    HUBKV_HOST_DEVICE int64_t groupStart(int64_t group, int64_t groups) const
    {
        return evictedCount() * group / groups;
    }
};

//! logits [N] of hubkv_merge; the rest as in hubkv_rewrite. Checked; what the tables hold is not.
void mergeHost(hubkv_rewrite_params const& params, float const* logits, RewriteArrays const& arrays);

//! The same on a GPU: enqueued on `stream`, all data in device memory.
void mergeCuda(void* stream, hubkv_rewrite_params const& params, float const* logits, RewriteArrays const& arrays);

} // namespace hubkv
