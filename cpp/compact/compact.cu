// SPDX-License-Identifier: Apache-2.0
//
// compact on the GPU. A warp owns 32 rows of the output: each lane finds where one of them comes from, then the warp
// copies them together, k and v, so ragged heads spread evenly and consecutive lanes move consecutive bytes. One launch
// copies up to 128 layers.
#include "compact/compact.h"

#include "common/device.h"
#include "common/dtype.h"
#include "common/row_copy.h"

#include <algorithm>

namespace hubkv
{
namespace
{

constexpr int32_t kTHREADS = 128;
constexpr int32_t kWARPS = kTHREADS / kWARP_SIZE;
constexpr int64_t kLAYERS = 128; // of a launch: their pointers are its argument

//! Rows [Hkv, T] of one side; strides in bytes.
struct Side
{
    char const* layers[kLAYERS];
    int64_t headStride;
    int64_t tokenStride;
    char* rows; // [K, D]
};

struct CompactArguments
{
    Side k;
    Side v;
    int32_t const* positions;   // [K]
    int64_t const* headOffsets; // [L*Hkv + 1], of all layers
    int64_t firstHead;          // of this launch's layers
    int64_t heads;              // of this launch's layers
    int64_t Hkv;
    int64_t T;
    int64_t K;
    int32_t rowVectors; // vectors of a row
};

template <int kBYTES>
__global__ void __launch_bounds__(kTHREADS) copyRows(CompactArguments const arguments)
{
    int32_t const lane = laneOf(threadIdx.x);
    int64_t const firstRow = (static_cast<int64_t>(blockIdx.x) * kWARPS + threadIdx.x / kWARP_SIZE) * kWARP_SIZE;
    if (firstRow >= arguments.K)
    {
        return;
    }

    // This lane's row: absent (not of these layers), or there with null for a row of zeros.
    int64_t const row = firstRow + lane;
    char const* k = nullptr;
    char const* v = nullptr;
    bool there = false;
    if (row < arguments.K)
    {
        int64_t const* const offsets = arguments.headOffsets + arguments.firstHead;
        int64_t const number = headOfRow(offsets, arguments.heads, row);
        there = offsets[number] <= row && row < offsets[number + 1];
        int64_t const position = arguments.positions[row];
        if (there && position >= 0 && position < arguments.T)
        {
            int64_t const layer = number / arguments.Hkv;
            int64_t const head = number - layer * arguments.Hkv;
            k = arguments.k.layers[layer] + head * arguments.k.headStride + position * arguments.k.tokenStride;
            v = arguments.v.layers[layer] + head * arguments.v.headStride + position * arguments.v.tokenStride;
        }
    }
    int32_t const rowVectors = arguments.rowVectors;
    int64_t const to = firstRow * rowVectors * kBYTES;
    copyWarpRows<kBYTES>(k, v, there, rowVectors, arguments.k.rows + to, arguments.v.rows + to);
}

//! The largest vector whose size divides all addresses and strides.
int32_t vectorBytes(
    hubkv_compact_params const& params, void const* const* k, void const* const* v, void* kRows, void* vRows)
{
    int64_t const element = elementBytes(params.dtype);
    uint64_t all = reinterpret_cast<uintptr_t>(kRows) | reinterpret_cast<uintptr_t>(vRows);
    for (int64_t const stride : {params.kHeadStride, params.kTokenStride, params.vHeadStride, params.vTokenStride})
    {
        all |= static_cast<uint64_t>(stride * element);
    }
    for (int64_t layer = 0; layer < params.L; ++layer)
    {
        all |= reinterpret_cast<uintptr_t>(k[layer]) | reinterpret_cast<uintptr_t>(v[layer]);
    }
    return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 2;
}

} // namespace

void compactCuda(void* cudaStream, hubkv_compact_params const& params, void const* const* k, void const* const* v,
    int32_t const* positions, int64_t const* headOffsets, void* kRows, void* vRows)
{
    Stream const stream = static_cast<Stream>(cudaStream);
    int64_t const element = elementBytes(params.dtype);
    int32_t const bytes = vectorBytes(params, k, v, kRows, vRows);
    auto const kernel = bytes == 16 ? copyRows<16> : bytes == 4 ? copyRows<4> : copyRows<2>;
    dim3 const grid = gridFor("K", params.K, kTHREADS);
    for (int64_t first = 0; first < params.L; first += kLAYERS)
    {
        int64_t const layers = std::min(kLAYERS, params.L - first);
        CompactArguments arguments{};
        arguments.k.headStride = params.kHeadStride * element;
        arguments.k.tokenStride = params.kTokenStride * element;
        arguments.k.rows = static_cast<char*>(kRows);
        arguments.v.headStride = params.vHeadStride * element;
        arguments.v.tokenStride = params.vTokenStride * element;
        arguments.v.rows = static_cast<char*>(vRows);
        for (int64_t layer = 0; layer < layers; ++layer)
        {
            arguments.k.layers[layer] = static_cast<char const*>(k[first + layer]);
            arguments.v.layers[layer] = static_cast<char const*>(v[first + layer]);
        }
        arguments.positions = positions;
        arguments.headOffsets = headOffsets;
        arguments.firstHead = first * params.Hkv;
        arguments.heads = layers * params.Hkv;
        arguments.Hkv = params.Hkv;
        arguments.T = params.T;
        arguments.K = params.K;
        arguments.rowVectors = static_cast<int32_t>(params.D * element / bytes);
        launch(kernel, grid, dim3(kTHREADS), 0, stream, arguments);
    }
}

} // namespace hubkv
