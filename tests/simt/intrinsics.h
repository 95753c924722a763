// SPDX-License-Identifier: Apache-2.0
//
// Device functions of one thread, with the meaning that CUDA's documentation gives them. exp2f, fmaf, fmaxf and their
// kin are the C library's. The build has -ffp-contract=off: the _rn functions are the plain operators.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace hubkv
{
namespace simt
{

template <typename To, typename From>
To bitCast(From value)
{
    static_assert(sizeof(To) == sizeof(From), "bits are kept");
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
}

} // namespace simt
} // namespace hubkv

inline int __float_as_int(float x)
{
    return hubkv::simt::bitCast<int>(x);
}
inline unsigned __float_as_uint(float x)
{
    return hubkv::simt::bitCast<unsigned>(x);
}
inline float __int_as_float(int x)
{
    return hubkv::simt::bitCast<float>(x);
}
inline float __uint_as_float(unsigned x)
{
    return hubkv::simt::bitCast<float>(x);
}
inline long long __double_as_longlong(double x)
{
    return hubkv::simt::bitCast<long long>(x);
}
inline double __longlong_as_double(long long x)
{
    return hubkv::simt::bitCast<double>(x);
}

inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}
inline int __popcll(unsigned long long x)
{
    return __builtin_popcountll(x);
}
inline int __ffs(int x)
{
    return __builtin_ffs(x);
}
inline int __ffsll(long long x)
{
    return __builtin_ffsll(x);
}
inline int __clz(int x)
{
    return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}
inline int __clzll(long long x)
{
    return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
inline unsigned __umulhi(unsigned a, unsigned b)
{
    return static_cast<unsigned>((uint64_t{a} * b) >> 32);
}

inline float __fadd_rn(float a, float b)
{
    return a + b;
}
inline float __fsub_rn(float a, float b)
{
    return a - b;
}
inline float __fmul_rn(float a, float b)
{
    return a * b;
}
inline float __fdiv_rn(float a, float b)
{
    return a / b;
}
inline float __fsqrt_rn(float a)
{
    return std::sqrt(a);
}
inline float __fmaf_rn(float a, float b, float c)
{
    return std::fma(a, b, c);
}
inline double __dadd_rn(double a, double b)
{
    return a + b;
}
inline double __dsub_rn(double a, double b)
{
    return a - b;
}
inline double __dmul_rn(double a, double b)
{
    return a * b;
}
inline double __ddiv_rn(double a, double b)
{
    return a / b;
}
inline double __dsqrt_rn(double a)
{
    return std::sqrt(a);
}
inline double __fma_rn(double a, double b, double c)
{
    return std::fma(a, b, c);
}
inline float __double2float_rn(double a)
{
    return static_cast<float>(a);
}
inline float __int2float_rn(int a)
{
    return static_cast<float>(a);
}
inline float __fdividef(float a, float b)
{
    return a / b;
}
inline float __expf(float a)
{
    return std::exp(a);
}
inline float __logf(float a)
{
    return std::log(a);
}
inline float rsqrtf(float a)
{
    return static_cast<float>(1.0 / std::sqrt(static_cast<double>(a)));
}

//! Loads and stores with a cache hint.
template <typename T>
T __ldg(T const* address)
{
    return *address;
}
template <typename T>
T __ldcs(T const* address)
{
    return *address;
}
template <typename T>
T __ldcg(T const* address)
{
    return *address;
}
template <typename T>
void __stcs(T* address, T value)
{
    *address = value;
}
template <typename T>
void __stcg(T* address, T value)
{
    *address = value;
}

template <typename A, typename B>
std::common_type_t<A, B> min(A a, B b)
{
    static_assert(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, "min of numbers");
    return b < a ? static_cast<std::common_type_t<A, B>>(b) : static_cast<std::common_type_t<A, B>>(a);
}

template <typename A, typename B>
std::common_type_t<A, B> max(A a, B b)
{
    static_assert(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, "max of numbers");
    return a < b ? static_cast<std::common_type_t<A, B>>(b) : static_cast<std::common_type_t<A, B>>(a);
}
