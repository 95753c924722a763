// SPDX-License-Identifier: Apache-2.0
//
// Shares the attention of a batch out over the threads. How rows are grouped, and in which order parts are merged,
// follows from the work list and the sequence's own lengths alone. Hence the bits of a result do not depend on the
// number of threads nor on where in the batch a sequence stands; on other sequences only through the rows per item of
// the plan, and beyond AttendLayout::kSPLIT_QUERIES queries not at all.
#include "attend/attend.h"
#include "attend/item_index.h"
#include "attend/row_stream.h"
#include "attend/tile.h"
#include "common/cache_view.h"
#include "common/cpu.h"
#include "common/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>

namespace hubkv
{
namespace
{

AttendKernels kernelsFor(hubkv_dtype dtype)
{
#if HUBKV_X86
    switch (cpuIsa())
    {
    case Isa::kAVX512: return attendKernelsAvx512(dtype);
    case Isa::kAVX2: return attendKernelsAvx2(dtype);
    case Isa::kSCALAR: break;
    }
#endif
    return attendKernelsScalar(dtype);
}

class HostAttend
{
public:
    HostAttend(hubkv_attend_params const& params, AttendArrays const& arrays, void* workspace)
        : mParams(params)
        , mArrays(arrays)
        , mLayout(params)
        , mCache(params.cache, arrays.arena)
        , mKernels(kernelsFor(params.cache.dtype))
        , mElementBytes(elementBytes(params.cache.dtype))
        , mG(params.Hq / params.cache.Hkv)
        , mWork(arrays.work + params.layer * params.cache.capacity)
        , mItems(params.cache, mWork, arrays.workCount[params.layer], mLayout.itemStarts.in(workspace),
              mLayout.order.in(workspace))
        , mUnmerged(mLayout.unmerged.in(workspace))
        , mSlots(mLayout.slots.in(workspace))
    {
        float const scale = params.scale != 0.F ? params.scale : 1.F / std::sqrt(static_cast<float>(params.cache.D));
        mScale = scale * kLOG2_E;
    }

    void run()
    {
        mLayout.split ? runSplit() : runTiles();
    }

private:
    int32_t newTokens(int64_t b) const
    {
        int32_t const given = mArrays.newLengths != nullptr ? mArrays.newLengths[b] : kINT32_MAX;
        return static_cast<int32_t>(std::clamp<int64_t>(given, 0, mParams.Tq));
    }

    int64_t tailTokens(int64_t b) const
    {
        return mCache.tailTokens(mArrays.tailLengths[b]);
    }

    //! Pieces that the tail of a sequence is cut into; the new tokens go with the last.
    int64_t tailPieces(int64_t b) const
    {
        return std::clamp<int64_t>(tailTokens(b) / AttendLayout::kTAIL_PIECE, 1, mLayout.tailPieces);
    }

    void addCompact(RowStream& rows, int64_t b, int64_t head, int32_t const* order, int32_t count) const
    {
        HeadRows const compact = mCache.headRows(mArrays.segments + b * kSEGMENT_FIELDS, mParams.layer, head);
        rows.setCompact(compact, mWork, order, count);
    }

    void addTail(RowStream& rows, int64_t b, int64_t first, int64_t end) const
    {
        if (first < end)
        {
            rows.setTail(mArrays.blockTable + b * mParams.cache.maxPages, first, end);
        }
    }

    void addNew(RowStream& rows, int64_t b, int64_t head, int32_t count) const
    {
        int64_t const kStride = mParams.kTokenStride * mElementBytes;
        int64_t const vStride = mParams.vTokenStride * mElementBytes;
        int64_t const row = head * mCache.rowBytes;
        rows.setNew(StridedRows{static_cast<char const*>(mArrays.kNew) + b * mParams.Tq * kStride + row,
                        static_cast<char const*>(mArrays.vNew) + b * mParams.Tq * vStride + row, kStride, vStride},
            count);
    }

    QueryRows<void const*> queryRows(int64_t b, int64_t head) const
    {
        int64_t const offset = b * mParams.Tq * mParams.qTokenStride + head * mG * mParams.cache.D;
        return {
            static_cast<char const*>(mArrays.q) + offset * mElementBytes, mParams.qTokenStride, mG, mParams.cache.D};
    }

    QueryRows<void*> outRows(int64_t b, int64_t head) const
    {
        int64_t const stride = mParams.Hq * mParams.cache.D;
        int64_t const offset = b * mParams.Tq * stride + head * mG * mParams.cache.D;
        return {static_cast<char*>(mArrays.out) + offset * mElementBytes, stride, mG, mParams.cache.D};
    }

    //! Tokens that are not real get zeros.
    void clearPadding(int64_t b, int64_t head) const
    {
        QueryRows<void*> const out = outRows(b, head);
        for (int64_t token = newTokens(b); token < mParams.Tq; ++token)
        {
            std::memset(static_cast<char*>(out.rows) + token * out.tokenStride * mElementBytes, 0,
                static_cast<size_t>(mG * mCache.rowBytes));
        }
    }

    Tile tileOf(int64_t b, int64_t head, int64_t first, int64_t count) const
    {
        return Tile{queryRows(b, head), static_cast<int32_t>(first), static_cast<int32_t>(count), mScale,
            Part{nullptr, nullptr, nullptr}, outRows(b, head)};
    }

    Parts partsOf(int64_t b, int64_t head) const
    {
        int64_t const index = b * mParams.cache.Hkv + head;
        int32_t const items = mItems.countOf(index);
        return Parts{mSlots, mLayout.slotFloats, mLayout.queries, mItems.itemsOf(index), items,
            mParams.cache.capacity + index * mLayout.tailPieces, items + static_cast<int32_t>(tailPieces(b))};
    }

    //! ---- rows shared out ----

    void runSplit()
    {
        for (int64_t index = 0; index < mLayout.heads; ++index)
        {
            int64_t const b = index / mParams.cache.Hkv;
            new (mUnmerged + index) std::atomic<int32_t>(partsOf(b, index % mParams.cache.Hkv).count);
        }
        // Items first: they are the long ones.
        int64_t const items = mItems.count();
        parallelFor(items + mLayout.heads * mLayout.tailPieces,
            [this, items](int64_t unit) { unit < items ? runItem(unit) : runTail(unit - items); });
    }

    void runItem(int64_t index)
    {
        int32_t const* const item = mItems.all() + index;
        int64_t const b = mWork[*item].sequence;
        int64_t const head = mWork[*item].head;
        RowStream prototype(mCache, mParams.layer, head);
        addCompact(prototype, b, head, item, 1);
        runPart(b, head, *item, prototype);
    }

    void runTail(int64_t index)
    {
        int64_t const b = index / mLayout.tailPieces / mParams.cache.Hkv;
        int64_t const head = index / mLayout.tailPieces % mParams.cache.Hkv;
        int64_t const piece = index % mLayout.tailPieces;
        int64_t const pieces = tailPieces(b);
        if (piece >= pieces)
        {
            return;
        }
        int64_t const tokens = tailTokens(b);
        int64_t const length = (tokens / pieces + kROW_GRANULE - 1) / kROW_GRANULE * kROW_GRANULE;
        bool const last = piece == pieces - 1;
        RowStream prototype(mCache, mParams.layer, head);
        addTail(prototype, b, piece * length, last ? tokens : (piece + 1) * length);
        if (last)
        {
            addNew(prototype, b, head, newTokens(b));
        }
        runPart(b, head, mParams.cache.capacity + index, prototype);
    }

    //! One part of a head; whoever finishes the last part of a head merges them.
    void runPart(int64_t b, int64_t head, int64_t slot, RowStream const& prototype)
    {
        Parts const parts = partsOf(b, head);
        Part const part = parts.at(slot);
        int64_t const queries = newTokens(b) * mG;
        for (int64_t first = 0; first < queries; first += mKernels.tileQueries)
        {
            Tile tile = tileOf(b, head, first, std::min<int64_t>(mKernels.tileQueries, queries - first));
            tile.part = Part{part.maximum + first, part.sum + first, part.values + first * mParams.cache.D};
            RowStream rows = prototype;
            mKernels.run(tile, rows);
        }
        if (mUnmerged[b * mParams.cache.Hkv + head].fetch_sub(1, std::memory_order_acq_rel) == 1)
        {
            mKernels.merge(parts, static_cast<int32_t>(queries), outRows(b, head));
            clearPadding(b, head);
        }
    }

    //! ---- queries shared out ----

    void runTiles()
    {
        int64_t const tiles = (mLayout.queries + mKernels.tileQueries - 1) / mKernels.tileQueries;
        parallelFor(mLayout.heads * tiles, [this, tiles](int64_t unit) { runTile(unit / tiles, unit % tiles); });
    }

    void runTile(int64_t index, int64_t tileIndex)
    {
        int64_t const b = index / mParams.cache.Hkv;
        int64_t const head = index % mParams.cache.Hkv;
        int64_t const first = tileIndex * mKernels.tileQueries;
        int64_t const count = std::min<int64_t>(mKernels.tileQueries, newTokens(b) * mG - first);
        if (tileIndex == 0)
        {
            clearPadding(b, head);
        }
        if (count <= 0)
        {
            return;
        }
        RowStream rows(mCache, mParams.layer, head);
        addCompact(rows, b, head, mItems.itemsOf(index), mItems.countOf(index));
        addTail(rows, b, 0, tailTokens(b));
        // New tokens past the last query's are seen by none.
        addNew(rows, b, head, static_cast<int32_t>((first + count - 1) / mG + 1));
        mKernels.run(tileOf(b, head, first, count), rows);
    }

    hubkv_attend_params const& mParams;
    AttendArrays const& mArrays;
    AttendLayout const mLayout;
    CacheView const mCache;
    AttendKernels const mKernels;
    int64_t const mElementBytes;
    int64_t const mG;
    WorkItem const* const mWork;
    ItemIndex const mItems;
    std::atomic<int32_t>* const mUnmerged;
    float* const mSlots;
    float mScale = 0.F;
};

} // namespace

AttendLayout::AttendLayout(hubkv_attend_params const& params)
{
    hubkv_cache_params const& cache = params.cache;
    heads = cache.B * cache.Hkv;
    queries = params.Hq / cache.Hkv * params.Tq;
    split = queries <= kSPLIT_QUERIES;
    tailPieces = std::clamp<int64_t>(cache.maxPages * cache.P / kTAIL_PIECE, 1, kMAX_TAIL_PIECES);
    // Slots begin on cache lines of their own.
    constexpr int64_t kLINE_FLOATS = kWORKSPACE_ALIGNMENT / static_cast<int64_t>(sizeof(float));
    slotFloats = (queries * (cache.D + 2) + kLINE_FLOATS - 1) / kLINE_FLOATS * kLINE_FLOATS;

    WorkspaceCarver carver;
    itemStarts = carver.take<int32_t>(heads + 1);
    order = carver.take<int32_t>(cache.capacity);
    unmerged = carver.take<std::atomic<int32_t>>(split ? heads : 0);
    slots = carver.take<float>(split ? (cache.capacity + heads * tailPieces) * slotFloats : 0);
    bytes = carver.bytes();
}

void attendHost(hubkv_attend_params const& params, AttendArrays const& arrays, void* workspace)
{
    HostAttend(params, arrays, workspace).run();
}

} // namespace hubkv
