// SPDX-License-Identifier: Apache-2.0
//
// attend on the GPU. attendRows goes over the rows: a block takes a run of rows of one kv head for all of its queries, or
// (many queries) some queries over all rows of their head. Its warps share the rows out, and pairs or fours of them the
// queries, so that rows are read from memory once. mergeParts puts the parts of a head together, in their order in the
// work list. The grid follows from the parameters alone; blocks that the tables leave nothing to do end at once.
#include "attend/attend.h"
#include "attend/attend_device.h"
#include "attend/attend_layout.h"

#include <cmath>

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
    float* slots;       // parts, or null: results go straight to out
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

//! The part of the rows of one (sequence, kv head) that a block attends to.
struct BlockRows
{
    int64_t b;
    int64_t head;
    int64_t firstCompact;
    int64_t endCompact; // cut at the rows that there are
    int64_t firstTail;
    int64_t endTail;
    int32_t newRows;
};

//! False where the block has nothing to do: there is no such item, or piece, or it names no head of this cache.
__device__ bool rowsOfBlock(AttendArguments const& arguments, CacheView const& cache, int64_t unit, BlockRows& rows)
{
    hubkv_cache_params const& params = arguments.params.cache;
    rows = BlockRows{0, 0, 0, 0, 0, 0, 0};
    bool const split = arguments.slots != nullptr;
    if (split && unit < params.capacity)
    {
        if (unit >= arguments.arrays.workCount[arguments.params.layer])
        {
            return false;
        }
        WorkItem const item = arguments.arrays.work[arguments.params.layer * params.capacity + unit];
        rows.b = item.sequence;
        rows.head = item.head;
        rows.firstCompact = max(item.firstRow, 0);
        rows.endCompact = static_cast<int64_t>(item.firstRow) + item.rows;
        return item.sequence >= 0 && item.sequence < params.B && item.head >= 0 && item.head < params.Hkv;
    }
    int64_t const number = split ? unit - params.capacity : unit;
    int64_t const pieces = split ? arguments.tailPieces : 1;
    int64_t const index = number / pieces;
    int64_t const piece = number - index * pieces;
    rows.b = index / params.Hkv;
    rows.head = index - rows.b * params.Hkv;
    rows.endCompact = split ? 0 : kINT64_MAX;
    int64_t const tokens = cache.tailTokens(arguments.arrays.tailLengths[rows.b]);
    int64_t const used = split ? tailPiecesOf(arguments, tokens) : 1;
    if (piece >= used)
    {
        return false;
    }
    rows.firstTail = tokens * piece / used;
    rows.endTail = tokens * (piece + 1) / used;
    rows.newRows = piece == used - 1 ? newTokens(arguments, rows.b) : 0;
    return true;
}

//! Bytes from one address to another, of two arrays.
__device__ int64_t distance(void const* from, void const* to)
{
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from));
}

//! The softmax of one warp's tile of queries over its share of the block's rows.
template <typename Softmax>
__device__ void addRows(AttendArguments const& arguments, CacheView const& cache, BlockRows const& block,
    float const* queries, int32_t firstQuery, int32_t slice, int32_t slices, Softmax& softmax)
{
    hubkv_attend_params const& params = arguments.params;
    TailView const tail{cache, params.layer, block.head};
    HeadRows const compact
        = cache.headRows(arguments.arrays.segments + block.b * kSEGMENT_FIELDS, params.layer, block.head);
    // One loop over the three kinds of rows: the code for a row is there once.
#pragma unroll 1
    for (int32_t kind = 0; kind < 3; ++kind)
    {
        AttendRows rows{0, 0, 0, nullptr, nullptr, cache.rowBytes, 0, nullptr};
        if (kind == 0)
        {
            rows.count = static_cast<int32_t>(max(int64_t{0}, min(block.endCompact, compact.rows) - block.firstCompact));
            rows.keys = compact.k + block.firstCompact * cache.rowBytes;
            rows.valueOffset = distance(compact.k, compact.v);
            rows.bias = compact.bias != nullptr ? compact.bias + block.firstCompact : nullptr;
        }
        else if (kind == 1)
        {
            rows.count = static_cast<int32_t>(block.endTail - block.firstTail);
            rows.firstToken = static_cast<int32_t>(block.firstTail);
            rows.pageTable = arguments.arrays.blockTable + block.b * params.cache.maxPages;
            rows.valueOffset = cache.valueOffset();
        }
        else
        {
            rows.count = block.newRows;
            rows.causalGroup = arguments.group;
            rows.stride = params.kTokenStride * (cache.rowBytes / params.cache.D);
            rows.keys = static_cast<char const*>(arguments.arrays.kNew) + block.b * params.Tq * rows.stride
                + block.head * cache.rowBytes;
            rows.valueOffset = distance(arguments.arrays.kNew, arguments.arrays.vNew); // strides are equal
        }
        softmax.add(rows, tail, queries, firstQuery, slice, slices);
    }
}

//! kLANES, kVECTORS: see WarpSoftmax. kQUERIES: of a tile, which a warp takes.
template <typename T, int32_t kLANES, int32_t kVECTORS, int32_t kQUERIES>
__global__ void __launch_bounds__(kTHREADS, kVECTORS * kQUERIES <= 2 ? 4 : 3) attendRows(AttendArguments const arguments)
{
    using Softmax = WarpSoftmax<T, kLANES, kVECTORS, kQUERIES>;
    HUBKV_DYNAMIC_SHARED(float, shared); // queries, later the softmaxes of the warps
    hubkv_attend_params const& params = arguments.params;
    CacheView const cache(params.cache, arguments.arrays.arena);
    int64_t const unit = blockIdx.x / arguments.headBlocks;
    BlockRows block;
    if (!rowsOfBlock(arguments, cache, unit, block))
    {
        return;
    }
    int32_t const D = static_cast<int32_t>(params.cache.D);
    int32_t const group = arguments.group;
    int32_t const tiles = arguments.blockTiles;
    int32_t const blockQueries = tiles * kQUERIES;
    int32_t const first = static_cast<int32_t>(blockIdx.x % arguments.headBlocks) * blockQueries;
    int32_t const queries = newTokens(arguments, block.b) * group; // real ones
    int32_t const last = min(first + blockQueries, queries) - 1;
    if (last < first)
    {
        return;
    }
    block.newRows = min(block.newRows, last / group + 1); // those after are seen by none

    int64_t const stride = params.qTokenStride;
    T const* const q = static_cast<T const*>(arguments.arrays.q) + block.b * params.Tq * stride + block.head * group * D;
    for (int32_t i = threadIdx.x; i < blockQueries * Softmax::kPADDED_DIM; i += kTHREADS)
    {
        int32_t const n = i / Softmax::kPADDED_DIM;
        int32_t const d = i % Softmax::kPADDED_DIM;
        int32_t const token = (first + n) / group;
        float value = 0.F;
        if (first + n < queries && d < D)
        {
            value = Elements<T>::load(q + token * stride + (first + n - token * group) * D + d) * arguments.scale;
        }
        shared[n * Softmax::kPADDED_DIM + Softmax::queryColumn(d)] = value;
    }
    __syncthreads();

    int32_t const warp = static_cast<int32_t>(threadIdx.x) / kWARP_SIZE;
    int32_t const tile = warp % tiles;
    int32_t const slices = kWARPS / tiles;
    Softmax softmax;
    if (first + tile * kQUERIES <= last)
    {
        addRows(arguments, cache, block, shared + tile * kQUERIES * Softmax::kPADDED_DIM, first + tile * kQUERIES,
            warp / tiles, slices, softmax);
    }
    softmax.mergeGroups();
    __syncthreads();

    float* const maxima = shared; // [kWARPS, kQUERIES]
    float* const sums = maxima + kWARPS * kQUERIES;
    float* const values = sums + kWARPS * kQUERIES; // [kWARPS, kQUERIES, D]
    softmax.store(maxima + warp * kQUERIES, sums + warp * kQUERIES, values + warp * kQUERIES * D, D);
    __syncthreads();

    for (int32_t n = warp; first + n <= last; n += kWARPS)
    {
        // The warps of slice 0, 1, ... that had this query, in this order.
        float maximum = kNO_LOGIT;
        for (int32_t slice = 0; slice < slices; ++slice)
        {
            maximum = fmaxf(maximum, maxima[slice * blockQueries + n]);
        }
        float weights[kWARPS];
        float sum = 0.F;
#pragma unroll
        for (int32_t slice = 0; slice < kWARPS; ++slice)
        {
            weights[slice] = 0.F;
            if (slice < slices)
            {
                weights[slice] = exp2f(maxima[slice * blockQueries + n] - shiftOf(maximum));
                sum = fmaf(weights[slice], sums[slice * blockQueries + n], sum);
            }
        }
        int32_t const query = first + n;
        float* slot = nullptr;
        T* out = nullptr;
        float factor = 1.F;
        if (arguments.slots != nullptr)
        {
            slot = arguments.slots + unit * arguments.slotFloats;
            if (laneOf(threadIdx.x) == 0)
            {
                slot[query] = maximum;
                slot[arguments.queries + query] = sum;
            }
            slot += 2 * arguments.queries + static_cast<int64_t>(query) * D;
        }
        else
        {
            int32_t const token = query / group;
            int64_t const row = (block.b * params.Tq + token) * params.Hq + block.head * group + query - token * group;
            out = static_cast<T*>(arguments.arrays.out) + row * D;
            factor = sum != 0.F ? 1.F / sum : 0.F;
        }
        for (int32_t d = laneOf(threadIdx.x); d < D; d += kWARP_SIZE)
        {
            float value = 0.F;
#pragma unroll
            for (int32_t slice = 0; slice < kWARPS; ++slice)
            {
                if (slice < slices)
                {
                    value = fmaf(weights[slice], values[(slice * blockQueries + n) * D + d], value);
                }
            }
            if (slot != nullptr)
            {
                slot[d] = value;
            }
            else
            {
                Elements<T>::store(out + d, value * factor);
            }
        }
    }
}

//! The first of `count` items that is not of a head before `index`; items ascend by head (of others, any place).
__device__ int32_t firstItemOf(WorkItem const* work, int32_t count, int64_t Hkv, int64_t index)
{
    int32_t low = 0;
    int32_t high = count;
    while (low < high)
    {
        int32_t const step = (high - low - 1) / kWARP_SIZE + 1;
        int64_t const probe = low + static_cast<int64_t>(laneOf(threadIdx.x)) * step;
        bool const before = probe < high && work[probe].sequence * Hkv + work[probe].head < index;
        int32_t const lanes = __popc(__ballot_sync(kFULL_WARP, before));
        int64_t const end = low + static_cast<int64_t>(lanes) * step;
        low = lanes == 0 ? low : static_cast<int32_t>(end) - step + 1;
        high = end < high ? static_cast<int32_t>(end) : high;
    }
    return low;
}

//! A block merges the parts of one query: warp w has parts w, w + 4, ... of the head's items and tail pieces.
template <typename T>
__global__ void __launch_bounds__(kTHREADS) mergeParts(AttendArguments const arguments)
{
    constexpr int32_t kCOLUMNS = kMAX_HEAD_DIM / kWARP_SIZE; // of a lane
    __shared__ float warpValues[kWARPS][kMAX_HEAD_DIM];
    __shared__ float warpSums[kWARPS];
    hubkv_attend_params const& params = arguments.params;
    int64_t const Hkv = params.cache.Hkv;
    int32_t const D = static_cast<int32_t>(params.cache.D);
    int32_t const group = arguments.group;
    int64_t const index = blockIdx.x / arguments.queries;
    int32_t const query = static_cast<int32_t>(blockIdx.x - index * arguments.queries);
    int64_t const b = index / Hkv;
    int64_t const head = index - b * Hkv;
    int32_t const token = query / group;
    int64_t const row = (b * params.Tq + token) * params.Hq + head * group + query - token * group;
    T* const out = static_cast<T*>(arguments.arrays.out) + row * D;
    if (token >= newTokens(arguments, b))
    {
        for (int32_t d = threadIdx.x; d < D; d += kTHREADS)
        {
            Elements<T>::store(out + d, 0.F);
        }
        return;
    }

    CacheView const cache(params.cache, arguments.arrays.arena);
    WorkItem const* const work = arguments.arrays.work + params.layer * params.cache.capacity;
    int32_t const count = static_cast<int32_t>(
        max(int64_t{0}, min(int64_t{arguments.arrays.workCount[params.layer]}, params.cache.capacity)));
    int32_t const firstItem = firstItemOf(work, count, Hkv, index);
    int32_t const items = max(0, firstItemOf(work, count, Hkv, index + 1) - firstItem);
    int64_t const parts = items + tailPiecesOf(arguments, cache.tailTokens(arguments.arrays.tailLengths[b]));

    // Null for an item of another head, in a list that is not sorted.
    auto const slotOf = [&](int64_t part) -> float const*
    {
        if (part >= parts)
        {
            return nullptr;
        }
        int64_t slot = params.cache.capacity + index * arguments.tailPieces + part - items;
        if (part < items)
        {
            slot = firstItem + part;
            if (work[slot].sequence != b || work[slot].head != head)
            {
                return nullptr;
            }
        }
        return arguments.slots + slot * arguments.slotFloats;
    };

    int32_t const lane = laneOf(threadIdx.x);
    int32_t const warp = static_cast<int32_t>(threadIdx.x) / kWARP_SIZE;
    float maximum = kNO_LOGIT;
    for (int64_t part = lane; part < parts; part += kWARP_SIZE)
    {
        float const* const slot = slotOf(part);
        maximum = slot != nullptr ? fmaxf(maximum, slot[query]) : maximum;
    }
    float const shift = shiftOf(warpMaximum(maximum));

    float sum = 0.F; // of this lane's parts
    float values[kCOLUMNS];
#pragma unroll
    for (int32_t i = 0; i < kCOLUMNS; ++i)
    {
        values[i] = 0.F;
    }
    for (int64_t first = warp; first < parts; first += kTHREADS)
    {
        // Each lane looks one part up, then all add the values of each.
        float const* const slot = slotOf(first + lane * kWARPS);
        float weight = 0.F;
        if (slot != nullptr)
        {
            weight = exp2f(slot[query] - shift);
            sum = fmaf(weight, slot[arguments.queries + query], sum);
        }
        int64_t const offset = slot != nullptr ? slot - arguments.slots : 0;
        int32_t const there = static_cast<int32_t>(min(int64_t{kWARP_SIZE}, (parts - first - 1) / kWARPS + 1));
#pragma unroll 4
        for (int32_t source = 0; source < there; ++source)
        {
            float const partWeight = __shfl_sync(kFULL_WARP, weight, source);
            float const* const from = arguments.slots + __shfl_sync(kFULL_WARP, offset, source)
                + 2 * arguments.queries + static_cast<int64_t>(query) * D;
#pragma unroll
            for (int32_t i = 0; i < kCOLUMNS; ++i)
            {
                int32_t const d = i * kWARP_SIZE + lane;
                if (partWeight != 0.F && d < D)
                {
                    values[i] = fmaf(partWeight, from[d], values[i]);
                }
            }
        }
    }
    sum = warpSum(sum);
    if (lane == 0)
    {
        warpSums[warp] = sum;
    }
#pragma unroll
    for (int32_t i = 0; i < kCOLUMNS; ++i)
    {
        warpValues[warp][i * kWARP_SIZE + lane] = values[i];
    }
    __syncthreads();
    sum = warpSums[0] + warpSums[1] + warpSums[2] + warpSums[3];
    static_assert(kWARPS == 4, "four sums");
    float const factor = sum != 0.F ? 1.F / sum : 0.F;
    for (int32_t d = threadIdx.x; d < D; d += kTHREADS)
    {
        float const value = warpValues[0][d] + warpValues[1][d] + warpValues[2][d] + warpValues[3][d];
        Elements<T>::store(out + d, value * factor);
    }
}

//! Zeros for the tokens that are not real; mergeParts does it where there are parts. A block takes tokens of a sequence.
__global__ void __launch_bounds__(kTHREADS) clearPadding(AttendArguments const arguments)
{
    hubkv_attend_params const& params = arguments.params;
    for (int64_t token = blockIdx.x; token < params.cache.B * params.Tq; token += gridDim.x)
    {
        int64_t const b = token / params.Tq;
        if (token - b * params.Tq < newTokens(arguments, b))
        {
            continue;
        }
        bool const wide = params.cache.dtype == HUBKV_FLOAT32;
        int64_t const elements = params.Hq * params.cache.D;
        char* const out = static_cast<char*>(arguments.arrays.out) + token * elements * (wide ? 4 : 2);
        for (int64_t i = threadIdx.x; i < elements; i += kTHREADS)
        {
            wide ? storeVector<4>(out + i * 4, 0) : storeVector<2>(out + i * 2, 0);
        }
    }
}

//! Copies new rows with a stride, or off the 16-byte grid, together: [tokens, Hkv, D]. A block takes tokens.
template <int32_t kBYTES>
__global__ void __launch_bounds__(kTHREADS)
    packRows(char const* k, char const* v, int64_t kStride, int64_t vStride, int64_t tokens, int64_t width, char* kTo, char* vTo)
{
    for (int64_t token = blockIdx.x; token < tokens; token += gridDim.x)
    {
        for (int64_t i = threadIdx.x; i < width; i += kTHREADS)
        {
            int64_t const to = (token * width + i) * kBYTES;
            storeVector<kBYTES>(kTo + to, loadVector<kBYTES>(k + (token * kStride + i) * kBYTES));
            storeVector<kBYTES>(vTo + to, loadVector<kBYTES>(v + (token * vStride + i) * kBYTES));
        }
    }
}

// ---- launches ----

constexpr int64_t kMAX_BLOCKS = 1LL << 16; // of kernels whose blocks take more than one token

using Kernel = void (*)(AttendArguments);

struct RowsKernel
{
    Kernel kernel;
    int32_t tileQueries;
    int32_t paddedDim;
};

template <typename T, int32_t kLANES, int32_t kVECTORS>
RowsKernel kernelFor(int64_t queries)
{
    constexpr int32_t kPADDED_DIM = WarpSoftmax<T, kLANES, kVECTORS, 1>::kPADDED_DIM;
    switch (queries)
    {
    case 1: return {attendRows<T, kLANES, kVECTORS, 1>, 1, kPADDED_DIM};
    case 2: return {attendRows<T, kLANES, kVECTORS, 2>, 2, kPADDED_DIM};
    default: return {attendRows<T, kLANES, kVECTORS, 4>, 4, kPADDED_DIM};
    }
}

//! kLANES: of a row of 64 elements.
template <typename T, int32_t kLANES>
RowsKernel kernelFor(int64_t D, int64_t queries)
{
    if (D <= 64)
    {
        return kernelFor<T, kLANES, 1>(queries);
    }
    if (D <= 128)
    {
        return kernelFor<T, 2 * kLANES, 1>(queries);
    }
    return kernelFor<T, kWARP_SIZE, kLANES / 8>(queries);
}

template <typename T, int32_t kLANES>
void run(Stream stream, AttendCudaLayout const& layout, AttendArguments& arguments)
{
    hubkv_cache_params const& cache = arguments.params.cache;
    RowsKernel const rows = kernelFor<T, kLANES>(cache.D, layout.queries);
    int64_t const tiles = (layout.queries + rows.tileQueries - 1) / rows.tileQueries;
    arguments.blockTiles = tiles > 2 ? 4 : static_cast<int32_t>(tiles);
    arguments.headBlocks = static_cast<int32_t>((tiles + arguments.blockTiles - 1) / arguments.blockTiles);
    int64_t const units = layout.split ? cache.capacity + layout.heads * layout.tailPieces : layout.heads;
    dim3 const grid = gridFor("capacity and G * Tq", checkedProduct("G * Tq", units, arguments.headBlocks), 1);
    int64_t const forQueries = int64_t{arguments.blockTiles} * rows.tileQueries * rows.paddedDim;
    int64_t const forWarps = int64_t{kWARPS} * rows.tileQueries * (cache.D + 2);
    size_t const shared = static_cast<size_t>(std::max(forQueries, forWarps)) * sizeof(float);
    launch(rows.kernel, grid, dim3(kTHREADS), shared, stream, arguments);
    if (layout.split)
    {
        launch(mergeParts<T>, gridFor("B * Hkv * G * Tq", layout.heads * layout.queries, 1), dim3(kTHREADS), 0, stream,
            arguments);
    }
    else if (arguments.arrays.newLengths != nullptr)
    {
        int64_t const blocks = std::min(cache.B * arguments.params.Tq, kMAX_BLOCKS);
        launch(clearPadding, dim3(static_cast<unsigned>(blocks)), dim3(kTHREADS), 0, stream, arguments);
    }
}

//! Rows are read by 16 bytes, keys and values at one stride; new rows that do not lie so are copied to the workspace
//! first.
void packNew(Stream stream, AttendCudaLayout const& layout, AttendArguments& arguments, void* workspace)
{
    hubkv_attend_params& params = arguments.params;
    int64_t const element = elementBytes(params.cache.dtype);
    uint64_t const all = reinterpret_cast<uintptr_t>(arguments.arrays.kNew)
        | reinterpret_cast<uintptr_t>(arguments.arrays.vNew) | static_cast<uint64_t>(params.kTokenStride * element)
        | static_cast<uint64_t>(params.vTokenStride * element);
    if (all % kROW_ALIGNMENT == 0 && params.kTokenStride == params.vTokenStride)
    {
        return;
    }
    int64_t const tokens = params.cache.B * params.Tq;
    int64_t const width = params.cache.Hkv * params.cache.D;
    char* const k = layout.kNew.in(workspace);
    char* const v = layout.vNew.in(workspace);
    launch(element == 4 ? packRows<4> : packRows<2>, dim3(static_cast<unsigned>(std::min(tokens, kMAX_BLOCKS))),
        dim3(kTHREADS), 0, stream, static_cast<char const*>(arguments.arrays.kNew),
        static_cast<char const*>(arguments.arrays.vNew), params.kTokenStride, params.vTokenStride, tokens, width, k, v);
    arguments.arrays.kNew = k;
    arguments.arrays.vNew = v;
    params.kTokenStride = width;
    params.vTokenStride = width;
}

} // namespace

int64_t attendCudaWorkspace(hubkv_attend_params const& params)
{
    return AttendCudaLayout(params).bytes;
}

void attendCuda(void* cudaStream, hubkv_attend_params const& params, AttendArrays const& arrays, void* workspace)
{
    Stream const stream = static_cast<Stream>(cudaStream);
    AttendCudaLayout const layout(params);
    AttendArguments arguments{};
    arguments.params = params;
    arguments.arrays = arrays;
    arguments.slots = layout.split ? layout.slots.in(workspace) : nullptr;
    arguments.slotFloats = layout.slotFloats;
    arguments.tailPieces = layout.tailPieces;
    arguments.queries = static_cast<int32_t>(layout.queries);
    arguments.group = static_cast<int32_t>(params.Hq / params.cache.Hkv);
    arguments.scale
        = (params.scale != 0.F ? params.scale : 1.F / std::sqrt(static_cast<float>(params.cache.D))) * kLOG2_E;
    packNew(stream, layout, arguments, workspace);
    switch (params.cache.dtype)
    {
    case HUBKV_FLOAT32: run<float, 16>(stream, layout, arguments); break;
    case HUBKV_FLOAT16: run<Float16, 8>(stream, layout, arguments); break;
    case HUBKV_BFLOAT16: run<BFloat16, 8>(stream, layout, arguments); break;
    }
}

} // namespace hubkv
