// SPDX-License-Identifier: Apache-2.0
//
// Device functions of one thread, with the meaning that CUDA's documentation gives them. exp2f, fmaf, fmaxf and their
// kin are the C library's. The build has -ffp-contract=off: the _rn functions are the plain operators.
#pragma once

#include <cstdint>
#include <cstring>
#include <math.h>
#include <type_traits>

// ---- bits ----

#define HUBKV_SIMT_CAST(name, From, To)                                                                                \
    inline To name(From value)                                                                                         \
    {                                                                                                                  \
        static_assert(sizeof(From) == sizeof(To), "bits are kept");                                                    \
        To result;                                                                                                     \
        std::memcpy(&result, &value, sizeof(To));                                                                      \
        return result;                                                                                                 \
    }

HUBKV_SIMT_CAST(__float_as_int, float, int)
HUBKV_SIMT_CAST(__float_as_uint, float, unsigned)
HUBKV_SIMT_CAST(__int_as_float, int, float)
HUBKV_SIMT_CAST(__uint_as_float, unsigned, float)
HUBKV_SIMT_CAST(__double_as_longlong, double, long long)
HUBKV_SIMT_CAST(__longlong_as_double, long long, double)

#define HUBKV_SIMT_UNARY(Result, name, T, result)                                                                      \
    inline Result name(T a)                                                                                            \
    {                                                                                                                  \
        return static_cast<Result>(result);                                                                            \
    }
#define HUBKV_SIMT_BINARY(T, name, result)                                                                             \
    inline T name(T a, T b)                                                                                            \
    {                                                                                                                  \
        return static_cast<T>(result);                                                                                 \
    }

HUBKV_SIMT_UNARY(int, __popc, unsigned, __builtin_popcount(a))
HUBKV_SIMT_UNARY(int, __popcll, unsigned long long, __builtin_popcountll(a))
HUBKV_SIMT_UNARY(int, __ffs, int, __builtin_ffs(a))
HUBKV_SIMT_UNARY(int, __ffsll, long long, __builtin_ffsll(a))
HUBKV_SIMT_UNARY(int, __clz, int, a == 0 ? 32 : __builtin_clz(static_cast<unsigned>(a)))
HUBKV_SIMT_UNARY(int, __clzll, long long, a == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(a)))
HUBKV_SIMT_BINARY(unsigned, __umulhi, (uint64_t{a} * b) >> 32)

// ---- arithmetic ----

HUBKV_SIMT_BINARY(float, __fadd_rn, a + b)
HUBKV_SIMT_BINARY(float, __fsub_rn, a - b)
HUBKV_SIMT_BINARY(float, __fmul_rn, a* b)
HUBKV_SIMT_BINARY(float, __fdiv_rn, a / b)
HUBKV_SIMT_BINARY(float, __fdividef, a / b)
HUBKV_SIMT_BINARY(double, __dadd_rn, a + b)
HUBKV_SIMT_BINARY(double, __dsub_rn, a - b)
HUBKV_SIMT_BINARY(double, __dmul_rn, a* b)
HUBKV_SIMT_BINARY(double, __ddiv_rn, a / b)
HUBKV_SIMT_UNARY(float, __fsqrt_rn, float, std::sqrt(a))
HUBKV_SIMT_UNARY(double, __dsqrt_rn, double, std::sqrt(a))
HUBKV_SIMT_UNARY(float, __double2float_rn, double, a)
HUBKV_SIMT_UNARY(float, __int2float_rn, int, a)
HUBKV_SIMT_UNARY(float, __expf, float, std::exp(a))
HUBKV_SIMT_UNARY(float, __logf, float, std::log(a))
HUBKV_SIMT_UNARY(float, hubkvSimtRsqrt, float, 1.0 / std::sqrt(static_cast<double>(a)))
#define rsqrtf hubkvSimtRsqrt // newer C libraries have one of their own

inline float __fmaf_rn(float a, float b, float c)
{
    return std::fma(a, b, c);
}

inline double __fma_rn(double a, double b, double c)
{
    return std::fma(a, b, c);
}

template <typename A, typename B>
std::common_type_t<A, B> min(A a, B b)
{
    static_assert(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, "min of numbers");
    using T = std::common_type_t<A, B>;
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}

template <typename A, typename B>
std::common_type_t<A, B> max(A a, B b)
{
    static_assert(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, "max of numbers");
    using T = std::common_type_t<A, B>;
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

// ---- loads and stores with a cache hint ----

#define HUBKV_SIMT_LOAD(name)                                                                                          \
    template <typename T>                                                                                              \
    T name(T const* address)                                                                                           \
    {                                                                                                                  \
        return *address;                                                                                               \
    }
#define HUBKV_SIMT_STORE(name)                                                                                         \
    template <typename T>                                                                                              \
    void name(T* address, T value)                                                                                     \
    {                                                                                                                  \
        *address = value;                                                                                              \
    }

HUBKV_SIMT_LOAD(__ldg)
HUBKV_SIMT_LOAD(__ldcs)
HUBKV_SIMT_LOAD(__ldcg)
HUBKV_SIMT_STORE(__stcs)
HUBKV_SIMT_STORE(__stcg)
