// SPDX-License-Identifier: Apache-2.0
//
// 8 float32 lanes of AVX2 with FMA. Included inside a target region (attend_avx2.cpp).
#pragma once

namespace hubkv
{

struct Avx2
{
    using Reg = __m256;
    static constexpr int kLANES = 8;
    static constexpr int kACCUMULATORS = 12; // of 16 registers
    static constexpr int kDOT_QUERIES = 3;
    static constexpr int kFEW_QUERIES = 8;
    static constexpr int kTILE_REGS = 3;
    static constexpr int kTILE_ROWS = 4;

    static Reg zero()
    {
        return _mm256_setzero_ps();
    }
    static Reg set(float value)
    {
        return _mm256_set1_ps(value);
    }
    static Reg load(float const* from)
    {
        return _mm256_loadu_ps(from);
    }
    static void store(float* to, Reg value)
    {
        _mm256_storeu_ps(to, value);
    }
    static Reg add(Reg a, Reg b)
    {
        return _mm256_add_ps(a, b);
    }
    static Reg sub(Reg a, Reg b)
    {
        return _mm256_sub_ps(a, b);
    }
    static Reg mul(Reg a, Reg b)
    {
        return _mm256_mul_ps(a, b);
    }
    //! a * b + c
    static Reg fma(Reg a, Reg b, Reg c)
    {
        return _mm256_fmadd_ps(a, b, c);
    }
    //! b where a or b is NaN.
    static Reg max(Reg a, Reg b)
    {
        return _mm256_max_ps(a, b);
    }

    template <typename T>
    static Reg loadElements(T const* from)
    {
        return load8(from);
    }
    //! D is a multiple of 8 lanes: no kernel comes here.
    template <typename T>
    static Reg loadHalf(T const* from)
    {
        return load8(from);
    }
    template <typename T>
    static void store8Elements(T* to, float const* from, float factor)
    {
        store8(to, _mm256_mul_ps(_mm256_loadu_ps(from), _mm256_set1_ps(factor)));
    }

    static float maxOf(Reg value)
    {
        __m128 x = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
        x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
    }
    static float sumOf(Reg value)
    {
        __m128 x = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
        x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
    }
    //! to [4] = the sums over the lanes of a, b, c, d.
    static void sum4(Reg a, Reg b, Reg c, Reg d, float* to)
    {
        Reg const lanes = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
        _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1)));
    }

    static Reg round(Reg value)
    {
        return _mm256_round_ps(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    //! value * 2^exponent for whole exponents in -127..127; 0 at -127.
    static Reg scaleByPower(Reg value, Reg exponent)
    {
        __m256i const biased = _mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127));
        return _mm256_mul_ps(value, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
    }
};

} // namespace hubkv
