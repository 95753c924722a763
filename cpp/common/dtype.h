// SPDX-License-Identifier: Apache-2.0
//
// The element types of K and V, and their conversion to and from float32. Storing rounds to nearest, ties to even;
// NaN stays NaN.
#pragma once

#include "common/cpu.h"
#include "hubkv/hubkv.h"

#include <cstdint>
#include <cstring>

namespace hubkv
{

struct Float16
{
    uint16_t bits;
};

struct BFloat16
{
    uint16_t bits;
};

constexpr bool isDtype(hubkv_dtype dtype)
{
    return dtype == HUBKV_FLOAT32 || dtype == HUBKV_FLOAT16 || dtype == HUBKV_BFLOAT16;
}

constexpr int64_t elementBytes(hubkv_dtype dtype)
{
    return dtype == HUBKV_FLOAT32 ? 4 : 2;
}

inline uint32_t bitsOf(float value)
{
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

inline float floatOf(uint32_t bits)
{
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// ---- one element ----

inline float toFloat(float value)
{
    return value;
}

inline float toFloat(BFloat16 value)
{
    return floatOf(static_cast<uint32_t>(value.bits) << 16);
}

inline float toFloat(Float16 value)
{
    uint32_t const sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
    uint32_t const magnitude = value.bits & 0x7fffu;
    if (magnitude >= 0x7c00u) // infinity, NaN (made quiet, as the instruction does)
    {
        uint32_t const quiet = magnitude > 0x7c00u ? 0x00400000u : 0u;
        return floatOf(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13) | quiet);
    }
    if (magnitude < 0x0400u) // zero, subnormal: magnitude * 2^-24 is exact
    {
        float const value24 = static_cast<float>(magnitude) * 5.9604644775390625e-8F;
        return floatOf(sign | bitsOf(value24));
    }
    return floatOf(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
}

inline void fromFloat(float value, float& out)
{
    out = value;
}

inline void fromFloat(float value, BFloat16& out)
{
    uint32_t const bits = bitsOf(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
    {
        out.bits = static_cast<uint16_t>((bits >> 16) | 0x0040u);
        return;
    }
    out.bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline void fromFloat(float value, Float16& out)
{
    uint32_t const bits = bitsOf(value);
    uint32_t const sign = (bits >> 16) & 0x8000u;
    uint32_t const magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) // NaN
    {
        half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    }
    else if (magnitude >= 0x477ff000u) // rounds past 65504
    {
        half = 0x7c00u;
    }
    else if (magnitude < 0x38800000u) // below 2^-14: the float addition rounds to units of 2^-24
    {
        half = bitsOf(floatOf(magnitude) + 0.5F) - bitsOf(0.5F);
    }
    else
    {
        half = (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    }
    out.bits = static_cast<uint16_t>(sign | half);
}

#if HUBKV_X86

// ---- 8 elements, AVX2 ----

HUBKV_TARGET_AVX2 inline __m256 load8(float const* from)
{
    return _mm256_loadu_ps(from);
}

HUBKV_TARGET_AVX2 inline __m256 load8(Float16 const* from)
{
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<__m128i const*>(from)));
}

HUBKV_TARGET_AVX2 inline __m256 load8(BFloat16 const* from)
{
    __m128i const bits = _mm_loadu_si128(reinterpret_cast<__m128i const*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

HUBKV_TARGET_AVX2 inline void store8(float* to, __m256 value)
{
    _mm256_storeu_ps(to, value);
}

HUBKV_TARGET_AVX2 inline void store8(Float16* to, __m256 value)
{
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

HUBKV_TARGET_AVX2 inline void store8(BFloat16* to, __m256 value)
{
    __m256i const bits = _mm256_castps_si256(value);
    __m256i const odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i const rounded =
        _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i const quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    __m256i const isNan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    __m256i const words = _mm256_blendv_epi8(rounded, quiet, isNan);
    __m128i const packed = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
}

// ---- 16 elements, AVX-512 ----

HUBKV_TARGET_AVX512 inline __m512 load16(float const* from)
{
    return _mm512_loadu_ps(from);
}

HUBKV_TARGET_AVX512 inline __m512 load16(Float16 const* from)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<__m256i const*>(from)));
}

HUBKV_TARGET_AVX512 inline __m512 load16(BFloat16 const* from)
{
    __m256i const bits = _mm256_loadu_si256(reinterpret_cast<__m256i const*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

#endif // HUBKV_X86

} // namespace hubkv
