// SPDX-License-Identifier: Apache-2.0
//
// attend on the GPU: which kernels a call launches. The grid follows from the parameters alone; blocks that the tables
// leave nothing to do end at once.
#include "attend/attend.h"

#include "attend/attend_layout.h"
#include "attend/attend_merge.h"
#include "attend/attend_rows.h"

#include <algorithm>
#include <cmath>

namespace hubkv
{
namespace
{

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
    arguments.scale =
        (params.scale != 0.F ? params.scale : 1.F / std::sqrt(static_cast<float>(params.cache.D))) * kLOG2_E;
    packNew(stream, layout, arguments, workspace);
    switch (params.cache.dtype)
    {
    case HUBKV_FLOAT32: run<float, 16>(stream, layout, arguments); break;
    case HUBKV_FLOAT16: run<Float16, 8>(stream, layout, arguments); break;
    case HUBKV_BFLOAT16: run<BFloat16, 8>(stream, layout, arguments); break;
    }
}

} // namespace hubkv
