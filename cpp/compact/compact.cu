// SPDX-License-Identifier: Apache-2.0
//
// compact on the GPU. A warp owns 32 rows of the output: each lane finds where one of them comes from, then the warp
// copies them together, k and v, so ragged heads spread evenly and consecutive lanes move consecutive bytes. One launch
// copies up to 128 layers.
#include "compact/compact.h"

#include "common/device.h"
#include "common/dtype.h"

#include <algorithm>

namespace hubkv
{
namespace
{

constexpr int32_t kTHREADS = 128;
constexpr int32_t kWARPS = kTHREADS / kWARP_SIZE;
constexpr int64_t kLAYERS = 128; // of a launch: their pointers are its argument
constexpr int32_t kBATCH = 4;    // vectors of k and of v that a thread has under way

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

//! The last of `count` heads whose first row is not past `row`, for ascending offsets; any of them for others.
__device__ int64_t headOfRow(int64_t const* headOffsets, int64_t count, int64_t row)
{
    int64_t low = 0;
    int64_t high = count - 1;
    while (low < high)
    {
        int64_t const middle = low + (high - low + 1) / 2;
        if (headOffsets[middle] <= row)
        {
            low = middle;
        }
        else
        {
            high = middle - 1;
        }
    }
    return low;
}

//! Address of a row that another lane looked up.
__device__ char const* fromLane(char const* address, int32_t lane)
{
    return reinterpret_cast<char const*>(static_cast<uintptr_t>(
        __shfl_sync(kFULL_WARP, static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(address)), lane)));
}

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
    uint32_t const present = __ballot_sync(kFULL_WARP, there);
    if (present == 0)
    {
        return;
    }

    // Vector `index` of the 32 rows is vector `column` of row `source`; each step goes 32 vectors on.
    int32_t const rowVectors = arguments.rowVectors;
    int32_t const rowStep = kWARP_SIZE / rowVectors;
    int32_t const columnStep = kWARP_SIZE - rowStep * rowVectors;
    int32_t source = lane / rowVectors;
    int32_t column = lane - source * rowVectors;
    char* const kTo = arguments.k.rows + firstRow * rowVectors * kBYTES;
    char* const vTo = arguments.v.rows + firstRow * rowVectors * kBYTES;
    for (int32_t first = 0; first < rowVectors; first += kBATCH)
    {
        Vector<kBYTES> kVectors[kBATCH] = {};
        Vector<kBYTES> vVectors[kBATCH] = {};
        bool written[kBATCH];
#pragma unroll
        for (int32_t i = 0; i < kBATCH; ++i)
        {
            char const* const kFrom = fromLane(k, source);
            char const* const vFrom = fromLane(v, source);
            written[i] = first + i < rowVectors && (present >> source & 1u) != 0;
            if (written[i] && kFrom != nullptr)
            {
                kVectors[i] = loadVector<kBYTES>(globalAddress(kFrom + column * kBYTES));
                vVectors[i] = loadVector<kBYTES>(globalAddress(vFrom + column * kBYTES));
            }
            source += rowStep;
            column += columnStep;
            if (column >= rowVectors)
            {
                column -= rowVectors;
                ++source;
            }
            source %= kWARP_SIZE; // past the last step of a batch: not written
        }
#pragma unroll
        for (int32_t i = 0; i < kBATCH; ++i)
        {
            if (written[i])
            {
                int64_t const at = static_cast<int64_t>((first + i) * kWARP_SIZE + lane) * kBYTES;
                storeVector<kBYTES>(kTo + at, kVectors[i]);
                storeVector<kBYTES>(vTo + at, vVectors[i]);
            }
        }
    }
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
