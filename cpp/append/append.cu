// SPDX-License-Identifier: Apache-2.0
//
// append on the GPU. A block takes one new token of one sequence in one layer: it looks up the page once and copies the
// rows of all heads, k and v, which lie together in the input.
#include "append/append.h"

#include "common/cache_view.h"
#include "common/device.h"

#include <algorithm>

namespace hubkv
{
namespace
{

constexpr int32_t kTHREADS = 128;
constexpr int64_t kMAX_BLOCKS = 1LL << 20; // further tokens go to the same blocks

struct AppendArguments
{
    hubkv_cache_params params;
    int64_t Tq;
    char const* k; // [L, B, Tq, Hkv, D]
    char const* v; // [L, B, Tq, Hkv, D]
    int64_t const* arena;
    int32_t const* blockTable;
    int32_t const* tailLengths;
    int32_t const* newLengths; // or null
};

//! kBYTES: of the vectors that the rows of k and v are read by. Rows of pages are aligned to 16 bytes.
template <int kBYTES>
__global__ void __launch_bounds__(kTHREADS) appendTokens(AppendArguments const arguments)
{
    hubkv_cache_params const& params = arguments.params;
    int64_t const Tq = arguments.Tq;
    CacheView const cache(params, arguments.arena);
    int32_t const rowVectors = static_cast<int32_t>(cache.rowBytes) / kBYTES;
    int64_t const tokenVectors = params.Hkv * rowVectors;
    for (int64_t number = blockIdx.x; number < params.L * params.B * Tq; number += gridDim.x)
    {
        int64_t const layerAndSequence = number / Tq;
        int64_t const token = number - layerAndSequence * Tq;
        int64_t const layer = layerAndSequence / params.B;
        int64_t const sequence = layerAndSequence - layer * params.B;
        if (arguments.newLengths != nullptr && token >= arguments.newLengths[sequence])
        {
            continue;
        }
        int64_t const slot = arguments.tailLengths[sequence] + token;
        char* const page = slot < 0
            ? nullptr
            : cache.tailKeys(arguments.blockTable + sequence * params.maxPages, slot / params.P, layer, 0);
        if (page == nullptr)
        {
            continue;
        }
        char const* const k = arguments.k + number * params.Hkv * cache.rowBytes;
        char const* const v = arguments.v + number * params.Hkv * cache.rowBytes;
        for (int64_t i = threadIdx.x; i < tokenVectors; i += kTHREADS)
        {
            int64_t const head = i / rowVectors;
            char* const to =
                page + (head * params.P + slot % params.P) * cache.rowBytes + (i - head * rowVectors) * kBYTES;
            storeVector<kBYTES>(globalAddress(to), loadVector<kBYTES>(k + i * kBYTES));
            storeVector<kBYTES>(globalAddress(to + cache.valueOffset()), loadVector<kBYTES>(v + i * kBYTES));
        }
    }
}

} // namespace

void appendCuda(void* cudaStream, hubkv_cache_params const& params, int64_t Tq, void const* kNew, void const* vNew,
    int64_t const* arena, int32_t const* blockTable, int32_t const* tailLengths, int32_t const* newLengths)
{
    uintptr_t const addresses = reinterpret_cast<uintptr_t>(kNew) | reinterpret_cast<uintptr_t>(vNew);
    auto const kernel = addresses % 16 == 0 ? appendTokens<16> : addresses % 4 == 0 ? appendTokens<4> : appendTokens<2>;
    int64_t const blocks = std::min(params.L * params.B * Tq, kMAX_BLOCKS);
    AppendArguments const arguments{params, Tq, static_cast<char const*>(kNew), static_cast<char const*>(vNew), arena,
        blockTable, tailLengths, newLengths};
    launch(kernel, gridFor("L * B * Tq", blocks, 1), dim3(kTHREADS), 0, static_cast<Stream>(cudaStream), arguments);
}

} // namespace hubkv
