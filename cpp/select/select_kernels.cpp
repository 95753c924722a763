// SPDX-License-Identifier: Apache-2.0
#include "select/select_kernels.h"

namespace hubkv
{
namespace
{

HUBKV_INLINE void countBody(
    float const* HUBKV_RESTRICT scores, int64_t n, int32_t threshold, int32_t& greater, int32_t& equal)
{
    int32_t above = 0;
    int32_t at = 0;
    for (int64_t i = 0; i < n; ++i)
    {
        int32_t const key = keyOf(scores[i]);
        above += key > threshold ? 1 : 0;
        at += key == threshold ? 1 : 0;
    }
    greater += above;
    equal += at;
}

HUBKV_INLINE int32_t bracketBody(
    float const* scores, int64_t n, int32_t low, int32_t high, int32_t* inside, int32_t& above)
{
    int32_t count = 0;
    int32_t over = 0;
    for (int64_t i = 0; i < n; ++i)
    {
        int32_t const key = keyOf(scores[i]);
        inside[count] = key; // overwritten by the next one where this one does not count
        count += key >= low && key <= high ? 1 : 0;
        over += key > high ? 1 : 0;
    }
    above = over;
    return count;
}

HUBKV_INLINE int32_t gatherBody(float const* scores, int64_t n, int32_t least, int32_t first, int32_t* out)
{
    int32_t count = 0;
    for (int64_t i = 0; i < n; ++i)
    {
        out[count] = first + static_cast<int32_t>(i);
        count += keyOf(scores[i]) >= least ? 1 : 0;
    }
    return count;
}

void countScalar(float const* scores, int64_t n, int32_t threshold, int32_t& greater, int32_t& equal)
{
    countBody(scores, n, threshold, greater, equal);
}

int32_t bracketScalar(float const* scores, int64_t n, int32_t low, int32_t high, int32_t* inside, int32_t& above)
{
    return bracketBody(scores, n, low, high, inside, above);
}

int32_t gatherScalar(float const* scores, int64_t n, int32_t least, int32_t first, int32_t* out)
{
    return gatherBody(scores, n, least, first, out);
}

#if HUBKV_X86

// ---- AVX2: 8 keys at a time, the kept ones moved to the front by a permutation looked up for their mask ----

struct Compressions
{
    uint64_t lanes[256]; // a byte for each lane: the kept lanes ascending, then zeros
};

constexpr Compressions compressions()
{
    Compressions table{};
    for (unsigned mask = 0; mask < 256; ++mask)
    {
        unsigned kept = 0;
        for (unsigned lane = 0; lane < 8; ++lane)
        {
            if ((mask >> lane & 1u) != 0)
            {
                table.lanes[mask] |= static_cast<uint64_t>(lane) << (8 * kept++);
            }
        }
    }
    return table;
}

alignas(64) constexpr Compressions kCOMPRESSIONS = compressions();

HUBKV_TARGET_AVX2 HUBKV_INLINE void storeKept8(int32_t* to, __m256i values, unsigned mask)
{
    __m128i const lanes = _mm_loadl_epi64(reinterpret_cast<__m128i const*>(kCOMPRESSIONS.lanes + mask));
    __m256i const packed = _mm256_permutevar8x32_epi32(values, _mm256_cvtepu8_epi32(lanes));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), packed);
}

HUBKV_TARGET_AVX2 HUBKV_INLINE __m256i keys8(float const* scores)
{
    __m256i bits = _mm256_loadu_si256(reinterpret_cast<__m256i const*>(scores));
    __m256i const magnitudeMask = _mm256_set1_epi32(0x7fffffff);
    __m256i const isNan = _mm256_cmpgt_epi32(_mm256_and_si256(bits, magnitudeMask), _mm256_set1_epi32(0x7f800000));
    bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(static_cast<int32_t>(0xff800000u)), isNan);
    bits = _mm256_andnot_si256(_mm256_cmpeq_epi32(bits, _mm256_set1_epi32(INT32_MIN)), bits);
    return _mm256_xor_si256(bits, _mm256_and_si256(_mm256_srai_epi32(bits, 31), magnitudeMask));
}

HUBKV_TARGET_AVX2 HUBKV_INLINE unsigned greater8(__m256i a, __m256i b)
{
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(a, b))));
}

HUBKV_TARGET_AVX2 void countAvx2(float const* scores, int64_t n, int32_t threshold, int32_t& greater, int32_t& equal)
{
    countBody(scores, n, threshold, greater, equal);
}

HUBKV_TARGET_AVX2 int32_t bracketAvx2(
    float const* scores, int64_t n, int32_t low, int32_t high, int32_t* inside, int32_t& above)
{
    __m256i const lowKeys = _mm256_set1_epi32(low);
    __m256i const highKeys = _mm256_set1_epi32(high);
    int32_t count = 0;
    int32_t over = 0;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
    {
        __m256i const keys = keys8(scores + i);
        unsigned const isOver = greater8(keys, highKeys);
        over += __builtin_popcount(isOver);
        unsigned const isInside = 0xffu & ~(isOver | greater8(lowKeys, keys));
        storeKept8(inside + count, keys, isInside);
        count += __builtin_popcount(isInside);
    }
    count += bracketBody(scores + i, n - i, low, high, inside + count, above);
    above += over;
    return count;
}

HUBKV_TARGET_AVX2 int32_t gatherAvx2(float const* scores, int64_t n, int32_t least, int32_t first, int32_t* out)
{
    __m256i const leastKeys = _mm256_set1_epi32(least);
    __m256i numbers = _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    int32_t count = 0;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
    {
        unsigned const kept = 0xffu & ~greater8(leastKeys, keys8(scores + i));
        storeKept8(out + count, numbers, kept);
        count += __builtin_popcount(kept);
        numbers = _mm256_add_epi32(numbers, _mm256_set1_epi32(8));
    }
    return count + gatherBody(scores + i, n - i, least, first + static_cast<int32_t>(i), out + count);
}

// ---- AVX-512: 16 keys at a time, the kept ones compressed in a register ----

HUBKV_TARGET_AVX512 HUBKV_INLINE __m512i keys16(float const* scores, __mmask16 lanes)
{
    __m512i bits = _mm512_maskz_loadu_epi32(lanes, scores);
    __m512i const magnitudeMask = _mm512_set1_epi32(0x7fffffff);
    __mmask16 const isNan =
        _mm512_cmpgt_epi32_mask(_mm512_and_si512(bits, magnitudeMask), _mm512_set1_epi32(0x7f800000));
    bits = _mm512_mask_mov_epi32(bits, isNan, _mm512_set1_epi32(static_cast<int32_t>(0xff800000u)));
    bits = _mm512_maskz_mov_epi32(_mm512_cmpneq_epi32_mask(bits, _mm512_set1_epi32(INT32_MIN)), bits);
    return _mm512_xor_si512(bits, _mm512_and_si512(_mm512_srai_epi32(bits, 31), magnitudeMask));
}

HUBKV_TARGET_AVX512 HUBKV_INLINE __mmask16 lanesFrom(int64_t i, int64_t n)
{
    return n - i >= 16 ? static_cast<__mmask16>(0xffffu) : static_cast<__mmask16>((1u << (n - i)) - 1u);
}

HUBKV_TARGET_AVX512 void countAvx512(
    float const* scores, int64_t n, int32_t threshold, int32_t& greater, int32_t& equal)
{
    __m512i const thresholds = _mm512_set1_epi32(threshold);
    int32_t above = 0;
    int32_t at = 0;
    for (int64_t i = 0; i < n; i += 16)
    {
        __mmask16 const lanes = lanesFrom(i, n);
        __m512i const keys = keys16(scores + i, lanes);
        above += __builtin_popcount(_mm512_mask_cmpgt_epi32_mask(lanes, keys, thresholds));
        at += __builtin_popcount(_mm512_mask_cmpeq_epi32_mask(lanes, keys, thresholds));
    }
    greater += above;
    equal += at;
}

HUBKV_TARGET_AVX512 int32_t bracketAvx512(
    float const* scores, int64_t n, int32_t low, int32_t high, int32_t* inside, int32_t& above)
{
    __m512i const lowKeys = _mm512_set1_epi32(low);
    __m512i const highKeys = _mm512_set1_epi32(high);
    int32_t count = 0;
    int32_t over = 0;
    for (int64_t i = 0; i < n; i += 16)
    {
        __mmask16 const lanes = lanesFrom(i, n);
        __m512i const keys = keys16(scores + i, lanes);
        __mmask16 const isOver = _mm512_mask_cmpgt_epi32_mask(lanes, keys, highKeys);
        __mmask16 const isInside = static_cast<__mmask16>(_mm512_mask_cmpge_epi32_mask(lanes, keys, lowKeys) & ~isOver);
        over += __builtin_popcount(isOver);
        _mm512_storeu_si512(inside + count, _mm512_maskz_compress_epi32(isInside, keys));
        count += __builtin_popcount(isInside);
    }
    above = over;
    return count;
}

HUBKV_TARGET_AVX512 int32_t gatherAvx512(float const* scores, int64_t n, int32_t least, int32_t first, int32_t* out)
{
    __m512i const leastKeys = _mm512_set1_epi32(least);
    __m512i const step = _mm512_set1_epi32(16);
    __m512i numbers = _mm512_add_epi32(
        _mm512_set1_epi32(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    int32_t count = 0;
    for (int64_t i = 0; i < n; i += 16)
    {
        __mmask16 const lanes = lanesFrom(i, n);
        __mmask16 const kept = _mm512_mask_cmpge_epi32_mask(lanes, keys16(scores + i, lanes), leastKeys);
        _mm512_storeu_si512(out + count, _mm512_maskz_compress_epi32(kept, numbers));
        count += __builtin_popcount(kept);
        numbers = _mm512_add_epi32(numbers, step);
    }
    return count;
}

constexpr SelectKernels kKERNELS_AVX2{countAvx2, bracketAvx2, gatherAvx2};
constexpr SelectKernels kKERNELS_AVX512{countAvx512, bracketAvx512, gatherAvx512};

#endif // HUBKV_X86

constexpr SelectKernels kKERNELS_SCALAR{countScalar, bracketScalar, gatherScalar};

} // namespace

SelectKernels const& selectKernels(Isa isa) noexcept
{
#if HUBKV_X86
    switch (isa)
    {
    case Isa::kAVX512: return kKERNELS_AVX512;
    case Isa::kAVX2: return kKERNELS_AVX2;
    case Isa::kSCALAR: break;
    }
#else
    (void)isa;
#endif
    return kKERNELS_SCALAR;
}

} // namespace hubkv
