// SPDX-License-Identifier: Apache-2.0
//
// The weight of a candidate as an integer: a fixed sequence of float64 additions, multiplications and divisions, the same
// bits in host code, in kernels (compiled without contraction) and in NumPy.
#pragma once

#include "common/candidates.h"
#include "common/cpu.h"
#include "common/host_device.h"
#include "select/key.h"

#include <cstdint>
#include <cstring>

namespace hubkv
{

constexpr double kWEIGHT_ONE = 2147483648.0; // 2^31: the weight of the largest value
constexpr double kMASS_TOLERANCE = 0.01;
constexpr double kDROPPED_TOLERANCE = 0.1;
constexpr float kLEAST_TEMPERATURE = 0.0009765625F; // 2^-10
constexpr float kMOST_TEMPERATURE = 1024.F;
constexpr int32_t kBISECTIONS = 40;
constexpr int32_t kKEY_OF_INFINITY = 0x7f800000;
constexpr int32_t kKEY_OF_LARGEST = 0x7f7fffff;
constexpr int32_t kKEY_OF_MINUS_INFINITY = static_cast<int32_t>(0xff800000u) ^ 0x7fffffff;

//! Rank of a candidate, and by keyValue() its value: select's key, +inf as the largest finite number.
HUBKV_HOST_DEVICE HUBKV_INLINE int32_t valueKey(float value)
{
    int32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    int32_t const key = keyOfBits(bits);
    return key == kKEY_OF_INFINITY ? kKEY_OF_LARGEST : key;
}

HUBKV_HOST_DEVICE HUBKV_INLINE double keyValue(int32_t key)
{
    int32_t const bits = key ^ ((key >> 31) & 0x7fffffff);
    float value;
    memcpy(&value, &bits, sizeof(value));
    return static_cast<double>(value);
}

//! exp(x) for x in [-40, 0]: 2^k times a polynomial of degree 13 in the rest, which lies in [-ln 2 / 2, ln 2 / 2].
HUBKV_HOST_DEVICE HUBKV_INLINE double weightExp(double x)
{
    constexpr double kROUND = 6755399441055744.0; // 1.5 * 2^52
    double const shifted = x * 1.4426950408889634 + kROUND;
    double const k = shifted - kROUND;
    double const rest = (x - k * 0.693147180369123816490) - k * 1.90821492927058770002e-10;
    double power = 1.0 / 6227020800.0;
    power = power * rest + 1.0 / 479001600.0;
    power = power * rest + 1.0 / 39916800.0;
    power = power * rest + 1.0 / 3628800.0;
    power = power * rest + 1.0 / 362880.0;
    power = power * rest + 1.0 / 40320.0;
    power = power * rest + 1.0 / 5040.0;
    power = power * rest + 1.0 / 720.0;
    power = power * rest + 1.0 / 120.0;
    power = power * rest + 1.0 / 24.0;
    power = power * rest + 1.0 / 6.0;
    power = power * rest + 0.5;
    power = power * rest + 1.0;
    power = power * rest + 1.0;
    int64_t const bits = (static_cast<int64_t>(k) + 1023) << 52;
    double scale;
    memcpy(&scale, &bits, sizeof(scale));
    return power * scale;
}

//! Of the value of `key` where `largest` is the largest value.
HUBKV_HOST_DEVICE HUBKV_INLINE uint32_t weightOf(int32_t key, double largest, float temperature)
{
    double const x = key <= kKEY_OF_MINUS_INFINITY ? -40.0 : (keyValue(key) - largest) / temperature;
    return static_cast<uint32_t>(weightExp(x > -40.0 ? x : -40.0) * kWEIGHT_ONE);
}

//! What weights must sum to at least.
HUBKV_HOST_DEVICE HUBKV_INLINE int64_t targetMass(double p, int64_t total)
{
    double const exact = p * static_cast<double>(total);
    int64_t const whole = static_cast<int64_t>(exact);
    int64_t const target = static_cast<double>(whole) < exact ? whole + 1 : whole;
    return target < total ? target : total;
}

//! How far beyond it they may go: at p = 0.99 a hundredth would be all that is left, and any temperature low enough accepted.
HUBKV_HOST_DEVICE HUBKV_INLINE int64_t massTolerance(double p, int64_t total)
{
    double const ofDropped = kDROPPED_TOLERANCE * (1.0 - p);
    double const share = ofDropped < kMASS_TOLERANCE ? ofDropped : kMASS_TOLERANCE;
    return static_cast<int64_t>(share * static_cast<double>(total));
}

//! The next temperature between two.
HUBKV_HOST_DEVICE HUBKV_INLINE float betweenTemperatures(float low, float high)
{
    double const product = static_cast<double>(low) * static_cast<double>(high);
#if defined(__CUDA_ARCH__)
    return static_cast<float>(sqrt(product));
#else
    return static_cast<float>(__builtin_sqrt(product));
#endif
}

//! How the search for the temperature goes on.
struct TemperatureSearch
{
    float low = kLEAST_TEMPERATURE;
    float high = kMOST_TEMPERATURE;
    float now = 1.F;
    int32_t step = 0;

    //! mass: of the n* first at `now`, of them `last` the weight of the last one that is not protected (-1: there is none).
    //! Whether `now` is final.
    HUBKV_HOST_DEVICE bool next(double p, int64_t total, int64_t mass, int64_t last)
    {
        int64_t const target = targetMass(p, total);
        bool const enough = mass >= target;
        int64_t const most = target + massTolerance(p, total);
        if (enough && (last < 0 || mass - last < target || mass <= most))
        {
            return true;
        }
        (enough ? low : high) = now;
        now = step == kBISECTIONS ? low : betweenTemperatures(low, high);
        return step++ == kBISECTIONS;
    }
};

} // namespace hubkv
