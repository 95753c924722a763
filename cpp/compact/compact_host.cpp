// SPDX-License-Identifier: Apache-2.0
//
// compact on the host: a gather at the speed of memory. A task owns a range of output rows, so ragged heads spread
// evenly and a row is written by one thread whatever headOffsets says.
#include "compact/compact.h"

#include "common/cpu.h"
#include "common/dtype.h"
#include "common/thread_pool.h"

#include <algorithm>
#include <cstring>

namespace hubkv
{
namespace
{

constexpr int64_t kTASK_BYTES = 256 << 10;    // output of a task, k and v together
constexpr int64_t kTASKS_PER_THREAD = 16;     // at most
constexpr int64_t kSTREAM_BYTES = 16LL << 20; // outputs from this size on bypass the cache
constexpr int64_t kPREFETCH_BYTES = 4 << 10;  // rows asked for ahead of the copy

//! Rows of one head from one tensor.
struct RowCopy
{
    char const* from; // token 0
    int64_t tokenBytes;
    int64_t T;
    int32_t const* positions;
    int64_t rows;
    int64_t rowBytes; // a multiple of 16
    char* to;
};

alignas(64) constexpr char kZEROS[256 * sizeof(float)] = {};

HUBKV_INLINE char const* sourceRow(RowCopy const& copy, int64_t row)
{
    int64_t const position = copy.positions[row];
    return position >= 0 && position < copy.T ? copy.from + position * copy.tokenBytes : kZEROS;
}

HUBKV_INLINE void prefetchRow(RowCopy const& copy, int64_t row)
{
#if defined(__GNUC__)
    char const* const from = sourceRow(copy, row);
    for (int64_t byte = 0; byte < copy.rowBytes; byte += 64)
    {
        __builtin_prefetch(from + byte, 0, 2);
    }
#else
    (void)copy;
    (void)row;
#endif
}

//! copyRow(from, to, bytes) for every row. Rows are asked for a block ahead and into the second-level cache: more reads
//! are then under way than the first level can wait for.
template <typename CopyRow>
HUBKV_INLINE void forRows(RowCopy const& copy, CopyRow copyRow)
{
    int64_t const block = std::max<int64_t>(1, kPREFETCH_BYTES / copy.rowBytes);
    for (int64_t row = 0; row < std::min(block, copy.rows); ++row)
    {
        prefetchRow(copy, row);
    }
    for (int64_t first = 0; first < copy.rows; first += block)
    {
        int64_t const last = std::min(copy.rows, first + block);
        for (int64_t row = last; row < std::min(copy.rows, last + block); ++row)
        {
            prefetchRow(copy, row);
        }
        for (int64_t row = first; row < last; ++row)
        {
            copyRow(sourceRow(copy, row), copy.to + row * copy.rowBytes, copy.rowBytes);
        }
    }
}

void copyPlain(RowCopy const& copy)
{
    forRows(copy, [](char const* from, char* to, int64_t bytes) { std::memcpy(to, from, static_cast<size_t>(bytes)); });
}

#if HUBKV_X86

//! Stores around the cache, 16 bytes at a time; `to` is aligned to 16 bytes.
void copyStream16(RowCopy const& copy)
{
    forRows(copy,
        [](char const* from, char* to, int64_t bytes)
        {
            for (int64_t byte = 0; byte < bytes; byte += 16)
            {
                _mm_stream_si128(reinterpret_cast<__m128i*>(to + byte),
                    _mm_loadu_si128(reinterpret_cast<__m128i const*>(from + byte)));
            }
        });
    _mm_sfence();
}

//! The same, 32 bytes at a time.
HUBKV_TARGET_AVX2 void copyStream32(RowCopy const& copy)
{
    forRows(copy,
        [](char const* from, char* to, int64_t bytes) HUBKV_TARGET_AVX2
        {
            for (int64_t byte = 0; byte < bytes; byte += 32)
            {
                _mm256_stream_si256(reinterpret_cast<__m256i*>(to + byte),
                    _mm256_loadu_si256(reinterpret_cast<__m256i const*>(from + byte)));
            }
        });
    _mm_sfence();
}

//! The same for rows of whole cache lines that start on one.
HUBKV_TARGET_AVX512 void copyStream64(RowCopy const& copy)
{
    forRows(copy,
        [](char const* from, char* to, int64_t bytes) HUBKV_TARGET_AVX512
        {
            for (int64_t byte = 0; byte < bytes; byte += 64)
            {
                _mm512_stream_si512(reinterpret_cast<__m512i*>(to + byte), _mm512_loadu_si512(from + byte));
            }
        });
    _mm_sfence();
}

#endif

using CopyRows = void (*)(RowCopy const& copy);

CopyRows chooseCopy(int64_t rows, int64_t rowBytes, void const* kRows, void const* vRows)
{
#if HUBKV_X86
    uintptr_t const addresses = reinterpret_cast<uintptr_t>(kRows) | reinterpret_cast<uintptr_t>(vRows);
    if (2 * rows * rowBytes >= kSTREAM_BYTES)
    {
        if (cpuIsa() == Isa::kAVX512 && addresses % 64 == 0 && rowBytes % 64 == 0)
        {
            return copyStream64;
        }
        if (cpuIsa() >= Isa::kAVX2 && addresses % 32 == 0 && rowBytes % 32 == 0)
        {
            return copyStream32;
        }
        if (addresses % 16 == 0)
        {
            return copyStream16;
        }
    }
#else
    (void)rows;
    (void)rowBytes;
    (void)kRows;
    (void)vRows;
#endif
    return copyPlain;
}

} // namespace

void compactHost(hubkv_compact_params const& params, void const* const* k, void const* const* v,
    int32_t const* positions, int64_t const* headOffsets, void* kRows, void* vRows)
{
    int64_t const element = elementBytes(params.dtype);
    int64_t const rowBytes = params.D * element;
    CopyRows const copyRows = chooseCopy(params.K, rowBytes, kRows, vRows);
    int64_t const wanted = 2 * params.K * rowBytes / kTASK_BYTES + 1;
    int64_t const tasks = std::min({wanted, params.K, kTASKS_PER_THREAD * numThreads()});
    parallelFor(tasks,
        [&](int64_t task)
        {
            int64_t const firstRow = params.K / tasks * task + std::min(task, params.K % tasks);
            int64_t const lastRow = firstRow + params.K / tasks + (task < params.K % tasks ? 1 : 0);
            for (int64_t number = 0; number < params.L * params.Hkv; ++number)
            {
                int64_t const first = std::max(firstRow, headOffsets[number]);
                int64_t const last = std::min(lastRow, headOffsets[number + 1]);
                if (first >= last)
                {
                    continue;
                }
                int64_t const layer = number / params.Hkv;
                int64_t const head = number - layer * params.Hkv;
                auto const copy = [&](void const* from, int64_t headStride, int64_t tokenStride, void* to)
                {
                    copyRows(
                        {static_cast<char const*>(from) + head * headStride * element, tokenStride * element, params.T,
                            positions + first, last - first, rowBytes, static_cast<char*>(to) + first * rowBytes});
                };
                copy(k[layer], params.kHeadStride, params.kTokenStride, kRows);
                copy(v[layer], params.vHeadStride, params.vTokenStride, vRows);
            }
        });
}

} // namespace hubkv
