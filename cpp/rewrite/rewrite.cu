// SPDX-License-Identifier: Apache-2.0
//
// rewrite on the GPU. A warp owns 32 rows of the new segment: each lane finds where one of them comes from and writes its
// position and bias, then the warp copies them together; those that merge fills are left out. Rows of the cache are
// aligned to 16 bytes.
#include "rewrite/rewrite.h"

#include "common/candidates.h"
#include "common/device.h"
#include "common/row_copy.h"

namespace hubkv
{
namespace
{

constexpr int32_t kTHREADS = 128;
constexpr int32_t kWARPS = kTHREADS / kWARP_SIZE;

template <int kBYTES>
__global__ void __launch_bounds__(kTHREADS) rewriteRows(hubkv_rewrite_params const params, RewriteArrays const arrays)
{
    int64_t const firstRow = (static_cast<int64_t>(blockIdx.x) * kWARPS + threadIdx.x / kWARP_SIZE) * kWARP_SIZE;
    int64_t const heads = params.candidates.cache.L * params.candidates.cache.Hkv;
    int64_t const newRows = params.keptRows + heads * params.mergedRows;
    if (firstRow >= newRows)
    {
        return;
    }
    int64_t const row = firstRow + laneOf(threadIdx.x);
    char const* k = nullptr;
    char const* v = nullptr;
    bool there = false;
    CacheView const cache(params.candidates.cache, arrays.arena);
    if (row < newRows)
    {
        int64_t const number = headOfRow(arrays.headOffsets, heads, row, params.mergedRows);
        int64_t const kept = row - number * params.mergedRows;
        there = arrays.headOffsets[number] <= kept && kept < arrays.headOffsets[number + 1] && kept >= 0
            && kept < params.keptRows;
        if (there)
        {
            HeadCandidates const candidates(params.candidates, cache, arrays.segments, arrays.blockTable, number);
            int64_t const index = arrays.indices[kept];
            CandidateRow from{nullptr, nullptr, 0.F};
            if (index >= 0 && index < candidates.count())
            {
                from = candidates.row(index);
            }
            k = from.k;
            v = from.v;
            arrays.newPositions[row] = k != nullptr ? arrays.candidatePositions[candidates.first + index] : 0;
            if (arrays.rowBias != nullptr)
            {
                arrays.rowBias[row] = k != nullptr ? from.bias : -__builtin_inff();
            }
        }
    }
    int32_t const rowVectors = static_cast<int32_t>(cache.rowBytes) / kBYTES;
    int64_t const to = firstRow * cache.rowBytes;
    copyWarpRows<kBYTES>(
        k, v, there, rowVectors, static_cast<char*>(arrays.kRows) + to, static_cast<char*>(arrays.vRows) + to);
}

} // namespace

void rewriteCuda(void* cudaStream, hubkv_rewrite_params const& params, RewriteArrays const& arrays)
{
    uintptr_t const all = reinterpret_cast<uintptr_t>(arrays.kRows) | reinterpret_cast<uintptr_t>(arrays.vRows);
    auto const kernel = all % 16 == 0 ? rewriteRows<16> : all % 4 == 0 ? rewriteRows<4> : rewriteRows<2>;
    int64_t const rows = params.keptRows + params.candidates.cache.L * params.candidates.cache.Hkv * params.mergedRows;
    launch(kernel, gridFor("keptRows", rows, kTHREADS), dim3(kTHREADS), 0, static_cast<Stream>(cudaStream), params,
        arrays);
}

} // namespace hubkv
