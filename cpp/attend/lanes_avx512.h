// SPDX-License-Identifier: Apache-2.0
//
// 16 float32 lanes of AVX-512. Included inside a target region (attend_avx512.cpp).
#pragma once

namespace hubkv
{

struct Avx512
{
    using Reg = __m512;
    static constexpr int kLANES = 16;
    static constexpr int kACCUMULATORS = 24; // of 32 registers
    static constexpr int kDOT_QUERIES = 4;   // queries that share the loads of 4 rows
    static constexpr int kFEW_QUERIES = 12;  // up to here lanes run over D, beyond over queries
    static constexpr int kTILE_REGS = 3;
    static constexpr int kTILE_ROWS = 8; // kTILE_ROWS * kTILE_REGS accumulators

    static Reg zero()
    {
        return _mm512_setzero_ps();
    }
    static Reg set(float value)
    {
        return _mm512_set1_ps(value);
    }
    static Reg load(float const* from)
    {
        return _mm512_loadu_ps(from);
    }
    static void store(float* to, Reg value)
    {
        _mm512_storeu_ps(to, value);
    }
    static Reg add(Reg a, Reg b)
    {
        return _mm512_add_ps(a, b);
    }
    static Reg sub(Reg a, Reg b)
    {
        return _mm512_sub_ps(a, b);
    }
    static Reg mul(Reg a, Reg b)
    {
        return _mm512_mul_ps(a, b);
    }
    //! a * b + c
    static Reg fma(Reg a, Reg b, Reg c)
    {
        return _mm512_fmadd_ps(a, b, c);
    }
    //! b where a or b is NaN.
    static Reg max(Reg a, Reg b)
    {
        return _mm512_max_ps(a, b);
    }

    template <typename T>
    static Reg loadElements(T const* from)
    {
        return load16(from);
    }
    //! 8 elements, then 8 zeros.
    template <typename T>
    static Reg loadHalf(T const* from)
    {
        return _mm512_zextps256_ps512(load8(from));
    }
    template <typename T>
    static void store8Elements(T* to, float const* from, float factor)
    {
        store8(to, _mm256_mul_ps(_mm256_loadu_ps(from), _mm256_set1_ps(factor)));
    }

    static float maxOf(Reg value)
    {
        return _mm512_reduce_max_ps(value);
    }
    static float sumOf(Reg value)
    {
        return _mm512_reduce_add_ps(value);
    }
    //! to [4] = the sums over the lanes of a, b, c, d.
    static void sum4(Reg a, Reg b, Reg c, Reg d, float* to)
    {
        Reg const ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        Reg const cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        Reg const lanes =
            _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))),
                _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))));
        __m256 const half = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
        _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
    }

    static Reg round(Reg value)
    {
        return _mm512_roundscale_ps(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    //! value * 2^exponent for whole exponents in -127..127; 0 at -127.
    static Reg scaleByPower(Reg value, Reg exponent)
    {
        __m512i const biased = _mm512_add_epi32(_mm512_cvtps_epi32(exponent), _mm512_set1_epi32(127));
        return _mm512_mul_ps(value, _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23)));
    }
};

} // namespace hubkv
