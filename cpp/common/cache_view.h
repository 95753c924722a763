// SPDX-License-Identifier: Apache-2.0
//
// The ragged KV cache as plan, attend and append read it (hubkv.h, "the cache"). The tables are data that may hold
// anything, so each number read from them is bounded against the arena before it becomes an address: whatever they
// hold, a pointer given here has all of its rows inside the arena, aligned for 16-byte loads (head offsets: 8 bytes,
// row bias: 4). What does not fit is absent: no segment, fewer rows, no page.
//
// The bounds rest on parameters that checkCacheParams() accepted, and on arena[0], arena[1] being one block of memory.
#pragma once

#include "common/dtype.h"
#include "common/host_device.h"
#include "common/status.h"
#include "hubkv/hubkv.h"

#include <cstdint>

namespace hubkv
{

constexpr int64_t kROW_ALIGNMENT = 16;
constexpr int64_t kSEGMENT_FIELDS = 4;

//! Refuses sizes that a cache cannot have, among them products past 64 bits: later arithmetic on them cannot overflow.
inline void checkCacheParams(hubkv_cache_params const& params)
{
    checkRange("B", params.B, 1, kINT32_MAX);
    checkRange("L", params.L, 1, kINT32_MAX);
    checkRange("Hkv", params.Hkv, 1, kINT32_MAX);
    checkHeadDim(params.D);
    HUBKV_CHECK(isDtype(params.dtype), "dtype: %d is not HUBKV_FLOAT32 (0), HUBKV_FLOAT16 (1) or HUBKV_BFLOAT16 (2)",
        static_cast<int>(params.dtype));
    checkRange("P", params.P, 1, kINT32_MAX);
    checkRange("maxPages", params.maxPages, 0, kINT32_MAX);
    checkRange("pageBase", params.pageBase, 0, kINT64_MAX);
    HUBKV_CHECK(params.pageBase % kROW_ALIGNMENT == 0, "pageBase: %lld is not a multiple of %lld bytes",
        static_cast<long long>(params.pageBase), static_cast<long long>(kROW_ALIGNMENT));
    checkRange("capacity", params.capacity, checkedProduct("B * Hkv", params.B, params.Hkv), kINT32_MAX);
    int64_t const rows = checkedProduct("L * Hkv * P", checkedProduct("L * Hkv", params.L, params.Hkv), params.P);
    checkedProduct("bytes of a page", rows, 2 * params.D * elementBytes(params.dtype));
    checkedProduct("B * maxPages", params.B, params.maxPages);
}

//! The compact rows of one (sequence, layer, kv head). rows = 0: nothing, and the pointers mean nothing.
struct HeadRows
{
    char const* k;     // [rows, D]
    char const* v;     // [rows, D]
    float const* bias; // [rows] or null
    int64_t rows;      // <= 2^31 - 1
};

//! The arena and the sizes that turn table entries into addresses. Cheap to build: once per call, or per CUDA thread.
struct CacheView
{
    char* base;
    int64_t bytes; // of the arena
    int64_t L;
    int64_t Hkv;
    int64_t P;
    int64_t maxPages;
    int64_t rowBytes;  // D elements
    int64_t pageBytes; // [L, 2, Hkv, P, D]
    int64_t pageBase;
    int64_t pages; // whole pages between pageBase and the end of the arena

    //! arena [2] int64: address, bytes. A null address or a negative size is an empty arena.
    HUBKV_HOST_DEVICE CacheView(hubkv_cache_params const& params, int64_t const* arena)
        : base(reinterpret_cast<char*>(static_cast<uintptr_t>(arena[0])))
        , bytes(arena[0] != 0 && arena[1] > 0 ? arena[1] : 0)
        , L(params.L)
        , Hkv(params.Hkv)
        , P(params.P)
        , maxPages(params.maxPages)
        , rowBytes(params.D * (params.dtype == HUBKV_FLOAT32 ? 4 : 2))
        , pageBytes(params.L * 2 * params.Hkv * params.P * rowBytes)
        , pageBase(params.pageBase)
        , pages(fitting(params.pageBase, pageBytes, kROW_ALIGNMENT))
    {
    }

    //! How many things of `size` bytes lie in the arena from `offset` on; 0 for an offset outside or misaligned.
    HUBKV_HOST_DEVICE int64_t fitting(int64_t offset, int64_t size, int64_t alignment) const
    {
        if (offset < 0 || offset >= bytes
            || (reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(offset)) % static_cast<uintptr_t>(alignment)
                != 0)
        {
            return 0;
        }
        return (bytes - offset) / size;
    }

    //! segment [4]: the sequence's row of `segments`.
    HUBKV_HOST_DEVICE HeadRows headRows(int64_t const* segment, int64_t layer, int64_t head) const
    {
        HeadRows view{nullptr, nullptr, nullptr, 0};
        int64_t const kOffset = segment[0];
        int64_t const vOffset = segment[1];
        int64_t const tableOffset = segment[2];
        int64_t const biasOffset = segment[3];

        int64_t const entry = layer * Hkv + head;
        if (fitting(tableOffset, sizeof(int64_t), sizeof(int64_t)) < entry + 2)
        {
            return view;
        }
        int64_t limit = smaller(fitting(kOffset, rowBytes, kROW_ALIGNMENT), fitting(vOffset, rowBytes, kROW_ALIGNMENT));
        if (biasOffset >= 0)
        {
            limit = smaller(limit, fitting(biasOffset, sizeof(float), sizeof(float)));
        }
        int64_t const* const offsets = reinterpret_cast<int64_t const*>(base + tableOffset) + entry;
        int64_t const first = offsets[0];
        int64_t const last = smaller(offsets[1], limit);
        if (first < 0 || first >= last)
        {
            return view;
        }
        view.k = base + kOffset + first * rowBytes;
        view.v = base + vOffset + first * rowBytes;
        view.bias = biasOffset >= 0 ? reinterpret_cast<float const*>(base + biasOffset) + first : nullptr;
        view.rows = smaller(last - first, 2147483647);
        return view;
    }

    //! Tail tokens that have a column in the block table.
    HUBKV_HOST_DEVICE int64_t tailTokens(int32_t tailLength) const
    {
        return tailLength < 0 ? 0 : smaller(tailLength, maxPages * P);
    }

    //! Keys [P, D] of (layer, head) in page number `index` of a sequence, null where there is no such page; values lie
    //! valueOffset() bytes further. pageTable [maxPages]: the sequence's row of `blockTable`.
    HUBKV_HOST_DEVICE char* tailKeys(int32_t const* pageTable, int64_t index, int64_t layer, int64_t head) const
    {
        if (index < 0 || index >= maxPages)
        {
            return nullptr;
        }
        int64_t const page = pageTable[index];
        if (page < 0 || page >= pages)
        {
            return nullptr;
        }
        return base + pageBase + page * pageBytes + ((layer * 2) * Hkv + head) * P * rowBytes;
    }

    //! Bytes from the keys of a head in a page to its values.
    HUBKV_HOST_DEVICE int64_t valueOffset() const
    {
        return Hkv * P * rowBytes;
    }

    HUBKV_HOST_DEVICE static int64_t smaller(int64_t a, int64_t b)
    {
        return a < b ? a : b;
    }
};

} // namespace hubkv
