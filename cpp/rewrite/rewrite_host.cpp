// SPDX-License-Identifier: Apache-2.0
//
// rewrite on the host. A task owns a range of output rows, so that ragged heads spread evenly and a row is written by one
// thread whatever headOffsets says.
#include "rewrite/rewrite.h"

#include "common/thread_pool.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace hubkv
{
namespace
{

constexpr int64_t kTASK_BYTES = 256 << 10; // output of a task, k and v together

} // namespace

void rewriteHost(hubkv_rewrite_params const& params, RewriteArrays const& arrays)
{
    hubkv_cache_params const& shape = params.candidates.cache;
    CacheView const cache(shape, arrays.arena);
    size_t const rowBytes = static_cast<size_t>(cache.rowBytes);
    int64_t const perTask = std::max<int64_t>(1, kTASK_BYTES / (2 * cache.rowBytes));
    char* const kRows = static_cast<char*>(arrays.kRows);
    char* const vRows = static_cast<char*>(arrays.vRows);

    auto const writeRow = [&](HeadCandidates const& candidates, int64_t index, int64_t row)
    {
        CandidateRow from{nullptr, nullptr, 0.F};
        if (index >= 0 && index < candidates.count())
        {
            from = candidates.row(index);
        }
        char* const k = kRows + row * cache.rowBytes;
        char* const v = vRows + row * cache.rowBytes;
        if (from.k == nullptr)
        {
            std::memset(k, 0, rowBytes);
            std::memset(v, 0, rowBytes);
        }
        else
        {
            std::memcpy(k, from.k, rowBytes);
            std::memcpy(v, from.v, rowBytes);
        }
        arrays.newPositions[row] = from.k != nullptr ? arrays.candidatePositions[candidates.first + index] : 0;
        if (arrays.rowBias != nullptr)
        {
            arrays.rowBias[row] = from.k != nullptr ? from.bias : -std::numeric_limits<float>::infinity();
        }
    };

    parallelFor((params.keptRows - 1) / perTask + 1,
        [&](int64_t task)
        {
            int64_t const begin = task * perTask;
            int64_t const end = std::min(params.keptRows, begin + perTask);
            for (int64_t number = 0; number < shape.L * shape.Hkv; ++number)
            {
                int64_t const first = std::max(begin, arrays.headOffsets[number]);
                int64_t const last = std::min(end, arrays.headOffsets[number + 1]);
                if (first < last)
                {
                    HeadCandidates const candidates(
                        params.candidates, cache, arrays.segments, arrays.blockTable, number);
                    for (int64_t row = first; row < last; ++row)
                    {
                        writeRow(candidates, arrays.indices[row], row + number * params.mergedRows);
                    }
                }
            }
        });
}

} // namespace hubkv
