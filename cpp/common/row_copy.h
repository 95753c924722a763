// SPDX-License-Identifier: Apache-2.0
//
// A warp copies 32 rows of keys and values that its lanes looked up, so that consecutive lanes move consecutive bytes.
#pragma once

#include "common/device.h"

#include <cstdint>

namespace hubkv
{
namespace
{

constexpr int32_t kCOPY_BATCH = 4; // vectors of k and of v that a thread has under way

//! The last of `count` heads whose first row is not past `row`, for ascending offsets; any of them for others. Each head has
//! `spare` rows behind those that the offsets count.
__device__ int64_t headOfRow(int64_t const* headOffsets, int64_t count, int64_t row, int64_t spare = 0)
{
    int64_t low = 0;
    int64_t high = count - 1;
    while (low < high)
    {
        int64_t const middle = low + (high - low + 1) / 2;
        if (headOffsets[middle] <= row - middle * spare)
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

//! k, v: of this lane's row, null for a row of zeros. there: whether it is written at all. kTo, vTo: where row 0 of the warp
//! goes. All lanes come.
template <int kBYTES>
__device__ void copyWarpRows(char const* k, char const* v, bool there, int32_t rowVectors, char* kTo, char* vTo)
{
    uint32_t const present = __ballot_sync(kFULL_WARP, there);
    if (present == 0)
    {
        return;
    }

    // Vector `index` of the 32 rows is vector `column` of row `source`; each step goes 32 vectors on.
    int32_t const lane = laneOf(threadIdx.x);
    int32_t const rowStep = kWARP_SIZE / rowVectors;
    int32_t const columnStep = kWARP_SIZE - rowStep * rowVectors;
    int32_t source = lane / rowVectors;
    int32_t column = lane - source * rowVectors;
    for (int32_t first = 0; first < rowVectors; first += kCOPY_BATCH)
    {
        Vector<kBYTES> kVectors[kCOPY_BATCH] = {};
        Vector<kBYTES> vVectors[kCOPY_BATCH] = {};
        bool written[kCOPY_BATCH];
#pragma unroll
        for (int32_t i = 0; i < kCOPY_BATCH; ++i)
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
        for (int32_t i = 0; i < kCOPY_BATCH; ++i)
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

} // namespace
} // namespace hubkv
