// SPDX-License-Identifier: Apache-2.0
//
// merge on the host: a task per head goes over its evicted candidates twice.
#include "merge/merge.h"

#include "common/dtype.h"
#include "common/thread_pool.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace hubkv
{
namespace
{

constexpr float kINFINITY = std::numeric_limits<float>::infinity();

template <typename T>
class HeadMerger
{
public:
    HeadMerger(hubkv_rewrite_params const& params, float const* logits, RewriteArrays const& arrays,
        CacheView const& cache, int64_t number)
        : mArrays(arrays)
        , mCandidates(params.candidates, cache, arrays.segments, arrays.blockTable, number)
        , mEvicted(params, arrays, number, mCandidates.count())
        , mLogits(logits + mCandidates.first)
        , mD(params.candidates.cache.D)
    {
    }

    //! Group `group` of `groups` to row `to` of the new segment.
    void merge(int64_t group, int64_t groups, int64_t to)
    {
        int64_t const begin = mEvicted.groupStart(group, groups);
        int64_t const end = mEvicted.groupStart(group + 1, groups);
        float largest = -kINFINITY;
        int64_t last = -1;
        forMembers(begin, end,
            [&](int64_t i, CandidateRow const&, float logit)
            {
                largest = std::max(largest, logit);
                last = i;
            });
        float key[256] = {};
        float value[256] = {};
        float sum = 0.F;
        float bias = 0.F;
        forMembers(begin, end,
            [&](int64_t, CandidateRow const& row, float logit)
            {
                float const weight = std::exp(logit - largest);
                if (weight == 0.F)
                {
                    return;
                }
                T const* const k = reinterpret_cast<T const*>(row.k);
                T const* const v = reinterpret_cast<T const*>(row.v);
                for (int64_t d = 0; d < mD; ++d)
                {
                    key[d] += weight * toFloat(k[d]);
                    value[d] += weight * toFloat(v[d]);
                }
                sum += weight;
                bias += weight * (row.bias - (logit - largest));
            });
        float const share = last >= 0 ? 1.F / sum : 0.F;
        T* const k = static_cast<T*>(mArrays.kRows) + to * mD;
        T* const v = static_cast<T*>(mArrays.vRows) + to * mD;
        for (int64_t d = 0; d < mD; ++d)
        {
            fromFloat(key[d] * share, k[d]);
            fromFloat(value[d] * share, v[d]);
        }
        mArrays.newPositions[to] = last >= 0 ? mArrays.candidatePositions[mCandidates.first + last] : 0;
        mArrays.rowBias[to] = last >= 0 ? bias * share + std::log(sum) : -kINFINITY;
    }

private:
    //! visit(candidate number, its row, its logit) for the members among evicted candidates begin..end-1.
    template <typename Visit>
    void forMembers(int64_t begin, int64_t end, Visit&& visit) const
    {
        for (int64_t e = begin; e < end; ++e)
        {
            int64_t const i = mEvicted.at(e);
            CandidateRow const row = mCandidates.row(i);
            if (row.k != nullptr && row.bias > -kINFINITY)
            {
                visit(i, row, mLogits[i] > kLEAST_LOGIT ? mLogits[i] : kLEAST_LOGIT);
            }
        }
    }

    RewriteArrays const& mArrays;
    HeadCandidates const mCandidates;
    Evicted const mEvicted;
    float const* mLogits;
    int64_t mD;
};

template <typename T>
void mergeHeads(
    hubkv_rewrite_params const& params, float const* logits, RewriteArrays const& arrays, CacheView const& cache)
{
    hubkv_cache_params const& shape = params.candidates.cache;
    parallelFor(shape.L * shape.Hkv,
        [&](int64_t number)
        {
            HeadMerger<T> merger(params, logits, arrays, cache, number);
            int64_t const end = std::clamp<int64_t>(arrays.headOffsets[number + 1], 0, params.keptRows);
            for (int64_t group = 0; group < params.mergedRows; ++group)
            {
                merger.merge(group, params.mergedRows, end + number * params.mergedRows + group);
            }
        });
}

} // namespace

void mergeHost(hubkv_rewrite_params const& params, float const* logits, RewriteArrays const& arrays)
{
    CacheView const cache(params.candidates.cache, arrays.arena);
    switch (params.candidates.cache.dtype)
    {
    case HUBKV_FLOAT32: mergeHeads<float>(params, logits, arrays, cache); break;
    case HUBKV_FLOAT16: mergeHeads<Float16>(params, logits, arrays, cache); break;
    case HUBKV_BFLOAT16: mergeHeads<BFloat16>(params, logits, arrays, cache); break;
    }
}

} // namespace hubkv
