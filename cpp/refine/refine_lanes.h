// SPDX-License-Identifier: Apache-2.0
//
// The inner loops of refine over the compiler's generic vectors, W lanes wide. Included once by each file that compiles
// them for one instruction set: everything here stays local to that file. Lanes fix the order of the sums and nothing
// is contracted, so each set gives the same bits.
#pragma once

#include "refine/refine_kernels.h"

#include <cstdint>
#include <cstring>
#include <limits>

namespace hubkv
{
namespace
{

constexpr float kINFINITY = std::numeric_limits<float>::infinity();
constexpr int32_t kEXPONENT = 0x7f800000; // all ones: NaN or infinite

template <int W>
struct Lanes
{
    typedef float Float __attribute__((vector_size(4 * W)));
    typedef int32_t Int __attribute__((vector_size(4 * W)));
    typedef double Double __attribute__((vector_size(8 * W)));
};

template <typename Vector, typename Value>
inline Vector loadLanes(Value const* from)
{
    Vector vector;
    std::memcpy(&vector, from, sizeof(vector));
    return vector;
}

template <typename Vector, typename Value>
inline void storeLanes(Value* to, Vector vector)
{
    std::memcpy(to, &vector, sizeof(vector));
}

//! Larger of the two, lane by lane; b where a is NaN.
template <typename Value>
inline Value larger(Value a, Value b)
{
    return a > b ? a : b;
}

//! Calls fn(i, vector width as a type) over 0..n-1: in steps of W, then one by one.
template <int W, typename Fn>
inline void forLanes(int64_t n, Fn fn)
{
    int64_t i = 0;
    for (; i + W <= n; i += W)
    {
        fn(i, Lanes<W>{});
    }
    for (; i < n; ++i)
    {
        fn(i, Lanes<1>{});
    }
}

template <int W>
inline Moments momentsOf(float const* scores, int64_t rows)
{
    constexpr int kWIDTH = W / 2; // doubles in a register
    constexpr int kVECTORS = 4;   // of a pass over the rows, whose sums stay in registers
    using Int = typename Lanes<kWIDTH>::Int;
    using Float = typename Lanes<kWIDTH>::Float;
    using Double = typename Lanes<kWIDTH>::Double;
    double sums[kREFINE_LANES];
    double squares[kREFINE_LANES];
    int32_t counts[kREFINE_LANES];
    for (int64_t first = 0; first < kREFINE_LANES; first += kWIDTH * kVECTORS)
    {
        Double sum[kVECTORS] = {};
        Double square[kVECTORS] = {};
        Int count[kVECTORS] = {};
        for (int64_t row = 0; row < rows; ++row)
        {
#pragma GCC unroll 4
            for (int vector = 0; vector < kVECTORS; ++vector)
            {
                Int bits = loadLanes<Int>(scores + row * kREFINE_LANES + first + kWIDTH * vector);
                Int const counted = (bits & kEXPONENT) != kEXPONENT; // -1 where finite
                bits &= counted;
                // Adding +0 to a sum that started as +0 changes nothing: the same as skipping.
                Double const value = __builtin_convertvector(loadLanes<Float>(&bits), Double);
                sum[vector] += value;
                square[vector] += value * value;
                count[vector] -= counted;
            }
        }
        std::memcpy(sums + first, sum, sizeof(sum));
        std::memcpy(squares + first, square, sizeof(square));
        std::memcpy(counts + first, count, sizeof(count));
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

template <int W>
inline float maximumOf(float const* values, int64_t n)
{
    using Float = typename Lanes<W>::Float;
    Float lanes = Float{} - kINFINITY;
    int64_t i = 0;
    for (; i + W <= n; i += W)
    {
        lanes = larger(loadLanes<Float>(values + i), lanes);
    }
    float best = -kINFINITY;
    for (int lane = 0; lane < W; ++lane)
    {
        best = larger(static_cast<float>(lanes[lane]), best);
    }
    for (; i < n; ++i)
    {
        best = larger(values[i], best);
    }
    return best;
}

template <int W, int64_t kREACH>
inline void windowDirect(float const* scores, int64_t n, float* best)
{
    forLanes<W>(n,
        [=](int64_t i, auto lanes)
        {
            using Float = typename decltype(lanes)::Float;
            Float value = Float{} - kINFINITY;
#pragma GCC unroll 9
            for (int64_t offset = -kREACH; offset <= kREACH; ++offset)
            {
                value = larger(loadLanes<Float>(scores + i + offset), value);
            }
            storeLanes(best + i, value);
        });
}

//! Maxima over 1, 2, 4, .. neighbours to the right, each from the one before; the window is two of the last overlapped.
template <int W>
inline void windowDoubling(float const* scores, int64_t n, int64_t reach, float* best)
{
    float span[3 * kREFINE_CHUNK]; // span[j] = max of scores[j - reach .. j - reach + length - 1]
    int64_t const width = 2 * reach + 1;
    int64_t const total = n + 2 * reach;
    auto const widest = [](float const* a, float const* b, float* to)
    {
        return [=](int64_t i, auto lanes)
        {
            using Float = typename decltype(lanes)::Float;
            storeLanes(to + i, larger(loadLanes<Float>(a + i), loadLanes<Float>(b + i)));
        };
    };
    forLanes<W>(total,
        [&](int64_t i, auto lanes)
        {
            using Float = typename decltype(lanes)::Float;
            storeLanes(span + i, larger(loadLanes<Float>(scores - reach + i), Float{} - kINFINITY));
        });
    int64_t length = 1;
    for (; 2 * length <= width; length *= 2)
    {
        // In place: what a step reads ahead of itself has not been overwritten yet.
        forLanes<W>(total - 2 * length + 1, widest(span, span + length, span));
    }
    forLanes<W>(n, widest(span, span + width - length, best));
}

template <int W>
inline void windowMaximumOf(float const* scores, int64_t n, int64_t reach, float* best)
{
    switch (reach)
    {
    case 0: windowDirect<W, 0>(scores, n, best); break;
    case 1: windowDirect<W, 1>(scores, n, best); break;
    case 2: windowDirect<W, 2>(scores, n, best); break;
    case 3: windowDirect<W, 3>(scores, n, best); break;
    case 4: windowDirect<W, 4>(scores, n, best); break;
    default: windowDoubling<W>(scores, n, reach, best); break;
    }
}

template <int W>
inline void blendOf(
    float const* scores, float const* best, int64_t n, float gamma, float beta, float alpha, float* refined)
{
    forLanes<W>(n,
        [=](int64_t i, auto lanes)
        {
            using Float = typename decltype(lanes)::Float;
            using Int = typename decltype(lanes)::Int;
            Float const s = loadLanes<Float>(scores + i);
            Float const factor = s >= loadLanes<Float>(best + i) ? Float{} + 1.0F : Float{} + gamma;
            Float const q = factor * s; // a factor of 1 changes no bit
            Float t = beta * q;
            t = t - s;
            t = alpha * t;
            Float const z = s + t;
            Int const finite = (loadLanes<Int>(scores + i) & kEXPONENT) != kEXPONENT;
            storeLanes(refined + i, finite ? z : s);
        });
}

template <int W>
inline int64_t countNonFiniteOf(float const* scores, int64_t n)
{
    using Int = typename Lanes<W>::Int;
    Int counts = {};
    int64_t i = 0;
    for (; i + W <= n; i += W)
    {
        counts -= (loadLanes<Int>(scores + i) & kEXPONENT) == kEXPONENT;
    }
    int64_t total = 0;
    for (int lane = 0; lane < W; ++lane)
    {
        total += counts[lane];
    }
    for (; i < n; ++i)
    {
        total += (loadLanes<int32_t>(scores + i) & kEXPONENT) == kEXPONENT ? 1 : 0;
    }
    return total;
}

template <int W>
constexpr RefineKernels kREFINE_KERNELS{
    momentsOf<W>, maximumOf<W>, windowMaximumOf<W>, blendOf<W>, countNonFiniteOf<W>};

} // namespace
} // namespace hubkv
