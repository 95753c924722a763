// SPDX-License-Identifier: Apache-2.0
//
// Plain loops that the compiler vectorises, compiled once per instruction set. Lanes, not the compiler, fix the order
// of the sums, so each set gives the same bits.
#include "refine/refine_kernels.h"

#include "common/dtype.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace hubkv
{
namespace
{

constexpr float kINFINITY = std::numeric_limits<float>::infinity();

//! Larger of the two; b where a is NaN.
HUBKV_INLINE float larger(float a, float b)
{
    return a > b ? a : b;
}

HUBKV_INLINE bool isFinite(float value)
{
    return (bitsOf(value) & 0x7f800000u) != 0x7f800000u;
}

HUBKV_INLINE Moments momentsBody(float const* HUBKV_RESTRICT scores, int64_t rows)
{
    double sums[kREFINE_LANES] = {};
    double squares[kREFINE_LANES] = {};
    int32_t counts[kREFINE_LANES] = {};
    for (int64_t row = 0; row < rows; ++row)
    {
        float const* const from = scores + row * kREFINE_LANES;
        for (int64_t lane = 0; lane < kREFINE_LANES; ++lane)
        {
            bool const counted = isFinite(from[lane]);
            // Adding +0 to a sum that started as +0 changes nothing: the same as skipping.
            double const value = static_cast<double>(counted ? from[lane] : 0.0F);
            sums[lane] += value;
            squares[lane] += value * value;
            counts[lane] += counted ? 1 : 0;
        }
    }
    for (int64_t width = kREFINE_LANES / 2; width > 0; width /= 2)
    {
        for (int64_t lane = 0; lane < width; ++lane)
        {
            sums[lane] += sums[lane + width];
            squares[lane] += squares[lane + width];
            counts[lane] += counts[lane + width];
        }
    }
    return {sums[0], squares[0], counts[0]};
}

HUBKV_INLINE float maximumBody(float const* HUBKV_RESTRICT values, int64_t n)
{
    constexpr int64_t kWIDTH = 64;
    float best[kWIDTH];
    std::fill(best, best + kWIDTH, -kINFINITY);
    int64_t i = 0;
    for (; i + kWIDTH <= n; i += kWIDTH)
    {
        for (int64_t lane = 0; lane < kWIDTH; ++lane)
        {
            best[lane] = larger(values[i + lane], best[lane]);
        }
    }
    for (; i < n; ++i)
    {
        best[0] = larger(values[i], best[0]);
    }
    for (int64_t lane = 1; lane < kWIDTH; ++lane)
    {
        best[0] = larger(best[lane], best[0]);
    }
    return best[0];
}

template <int64_t kREACH>
HUBKV_INLINE void windowDirect(float const* HUBKV_RESTRICT scores, int64_t n, float* HUBKV_RESTRICT best)
{
    for (int64_t i = 0; i < n; ++i)
    {
        float value = -kINFINITY;
#pragma GCC unroll 17
        for (int64_t offset = -kREACH; offset <= kREACH; ++offset)
        {
            value = larger(scores[i + offset], value);
        }
        best[i] = value;
    }
}

//! Maxima over 1, 2, 4, .. neighbours to the right, each from the one before; the window is two of the last overlapped.
HUBKV_INLINE void windowDoubling(float const* HUBKV_RESTRICT scores, int64_t n, int64_t reach,
    float* HUBKV_RESTRICT best)
{
    float span[3 * kREFINE_CHUNK]; // span[j] = max of scores[j - reach .. j - reach + length - 1]
    int64_t const width = 2 * reach + 1;
    int64_t const total = n + 2 * reach;
    for (int64_t j = 0; j < total; ++j)
    {
        span[j] = larger(scores[j - reach], -kINFINITY);
    }
    int64_t length = 1;
    for (; 2 * length <= width; length *= 2)
    {
        // In place, in blocks: the block read ahead of the one written has not been overwritten yet.
        int64_t const last = total - 2 * length + 1;
        for (int64_t j = 0; j < last; j += 64)
        {
            float block[64];
            int64_t const size = std::min<int64_t>(64, last - j);
            for (int64_t lane = 0; lane < size; ++lane)
            {
                block[lane] = larger(span[j + lane], span[j + lane + length]);
            }
            std::memcpy(span + j, block, static_cast<size_t>(size) * sizeof(float));
        }
    }
    for (int64_t i = 0; i < n; ++i)
    {
        best[i] = larger(span[i], span[i + width - length]);
    }
}

HUBKV_INLINE void windowMaximumBody(float const* scores, int64_t n, int64_t reach, float* best)
{
    switch (reach)
    {
    case 0: windowDirect<0>(scores, n, best); break;
    case 1: windowDirect<1>(scores, n, best); break;
    case 2: windowDirect<2>(scores, n, best); break;
    case 3: windowDirect<3>(scores, n, best); break;
    case 4: windowDirect<4>(scores, n, best); break;
    default: windowDoubling(scores, n, reach, best); break;
    }
}

HUBKV_INLINE void blendBody(float const* HUBKV_RESTRICT scores, float const* best, int64_t n, float gamma, float beta,
    float alpha, float* HUBKV_RESTRICT refined)
{
    for (int64_t i = 0; i < n; ++i)
    {
        float const s = scores[i];
        float const q = s >= best[i] ? s : gamma * s;
        float t = beta * q;
        t = t - s;
        t = alpha * t;
        float const z = s + t;
        refined[i] = isFinite(s) ? z : s;
    }
}

HUBKV_INLINE int64_t countNonFiniteBody(float const* HUBKV_RESTRICT scores, int64_t n)
{
    int64_t total = 0;
    for (int64_t begin = 0; begin < n; begin += kREFINE_CHUNK)
    {
        int64_t const end = std::min(n, begin + kREFINE_CHUNK);
        int32_t count = 0;
        for (int64_t i = begin; i < end; ++i)
        {
            count += isFinite(scores[i]) ? 0 : 1;
        }
        total += count;
    }
    return total;
}

#define HUBKV_REFINE_KERNELS(NAME, TARGET)                                                                             \
    TARGET Moments moments##NAME(float const* scores, int64_t rows)                                                    \
    {                                                                                                                  \
        return momentsBody(scores, rows);                                                                              \
    }                                                                                                                  \
    TARGET float maximum##NAME(float const* values, int64_t n)                                                         \
    {                                                                                                                  \
        return maximumBody(values, n);                                                                                 \
    }                                                                                                                  \
    TARGET void windowMaximum##NAME(float const* scores, int64_t n, int64_t reach, float* best)                        \
    {                                                                                                                  \
        windowMaximumBody(scores, n, reach, best);                                                                     \
    }                                                                                                                  \
    TARGET void blend##NAME(                                                                                           \
        float const* scores, float const* best, int64_t n, float gamma, float beta, float alpha, float* refined)       \
    {                                                                                                                  \
        blendBody(scores, best, n, gamma, beta, alpha, refined);                                                       \
    }                                                                                                                  \
    TARGET int64_t countNonFinite##NAME(float const* scores, int64_t n)                                                \
    {                                                                                                                  \
        return countNonFiniteBody(scores, n);                                                                          \
    }                                                                                                                  \
    constexpr RefineKernels kKERNELS_##NAME{                                                                           \
        moments##NAME, maximum##NAME, windowMaximum##NAME, blend##NAME, countNonFinite##NAME};

HUBKV_REFINE_KERNELS(SCALAR, )
#if HUBKV_X86
HUBKV_REFINE_KERNELS(AVX2, HUBKV_TARGET_AVX2)
HUBKV_REFINE_KERNELS(AVX512, HUBKV_TARGET_AVX512)
#endif

} // namespace

RefineKernels const& refineKernels(Isa isa) noexcept
{
#if HUBKV_X86
    switch (isa)
    {
    case Isa::kAVX512: return kKERNELS_AVX512;
    case Isa::kAVX2: return kKERNELS_AVX2;
    case Isa::kSCALAR: break;
    }
#else
    (void) isa;
#endif
    return kKERNELS_SCALAR;
}

} // namespace hubkv
