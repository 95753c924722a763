// SPDX-License-Identifier: Apache-2.0
//
// append on the host. One task is one sequence in one layer; a decode step is too small to be worth waking threads.
#include "append/append.h"

#include "common/cache_view.h"
#include "common/thread_pool.h"

#include <algorithm>
#include <cstring>

namespace hubkv
{
namespace
{

constexpr int64_t kPARALLEL_BYTES = 512 << 10;

} // namespace

void appendHost(hubkv_cache_params const& params, int64_t Tq, void const* kNew, void const* vNew, int64_t const* arena,
    int32_t const* blockTable, int32_t const* tailLengths, int32_t const* newLengths)
{
    CacheView const cache(params, arena);
    size_t const rowBytes = static_cast<size_t>(cache.rowBytes);
    int64_t const tokenBytes = params.Hkv * cache.rowBytes;

    auto const appendSequence = [&](int64_t task, int32_t)
    {
        int64_t const layer = task / params.B;
        int64_t const sequence = task - layer * params.B;
        int64_t const tokens = newLengths != nullptr ? std::min<int64_t>(newLengths[sequence], Tq) : Tq;
        int32_t const* const pageTable = blockTable + sequence * params.maxPages;
        char const* const k = static_cast<char const*>(kNew) + task * Tq * tokenBytes;
        char const* const v = static_cast<char const*>(vNew) + task * Tq * tokenBytes;
        for (int64_t token = 0; token < tokens; ++token)
        {
            int64_t const slot = tailLengths[sequence] + token;
            char* const page = slot < 0 ? nullptr : cache.tailKeys(pageTable, slot / params.P, layer, 0);
            if (page == nullptr)
            {
                continue;
            }
            for (int64_t head = 0; head < params.Hkv; ++head)
            {
                char* const to = page + (head * params.P + slot % params.P) * cache.rowBytes;
                std::memcpy(to, k + token * tokenBytes + head * cache.rowBytes, rowBytes);
                std::memcpy(to + cache.valueOffset(), v + token * tokenBytes + head * cache.rowBytes, rowBytes);
            }
        }
    };

    int64_t const tasks = params.L * params.B;
    bool const small = 2 * tasks * Tq * tokenBytes < kPARALLEL_BYTES;
    parallelForSlots(tasks, small ? 1 : kMAX_THREADS, appendSequence);
}

} // namespace hubkv
