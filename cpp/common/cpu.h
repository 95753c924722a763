// SPDX-License-Identifier: Apache-2.0
//
// Which instructions the host kernels use. One binary holds all variants: a kernel for AVX2 is a function marked
// HUBKV_TARGET_AVX2 that uses intrinsics, chosen at run time by cpuIsa(). The library is never built with -march.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define HUBKV_X86 1
#include <immintrin.h>
#define HUBKV_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define HUBKV_TARGET_AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define HUBKV_X86 0
#endif

//! For bodies that are compiled once per instruction set: inlined into functions marked with the targets above.
#if defined(__GNUC__)
#define HUBKV_INLINE inline __attribute__((always_inline))
#define HUBKV_RESTRICT __restrict__
#else
#define HUBKV_INLINE inline
#define HUBKV_RESTRICT
#endif

namespace hubkv
{

enum class Isa : int
{
    kSCALAR = 0,
    kAVX2 = 1,
    kAVX512 = 2
};

//! What the CPU and the operating system offer, lowered by HUBKV_CPU_ISA=scalar|avx2|avx512. Fixed at the first call.
Isa cpuIsa() noexcept;

//! "scalar", "avx2" or "avx512".
char const* isaName(Isa isa) noexcept;

//! While it lives, float arithmetic on this thread rounds to nearest and keeps subnormals, whatever the program set
//! (torch.set_flush_denormal, for one): results are the same bits on every thread.
class DefaultFloatMode
{
public:
#if HUBKV_X86
    DefaultFloatMode() noexcept
        : mSaved(_mm_getcsr())
    {
        _mm_setcsr(0x1f80);
    }
    ~DefaultFloatMode()
    {
        _mm_setcsr(mSaved);
    }

private:
    unsigned mSaved;
#else
    DefaultFloatMode() noexcept { }
#endif

public:
    DefaultFloatMode(DefaultFloatMode const&) = delete;
    DefaultFloatMode& operator=(DefaultFloatMode const&) = delete;
};

} // namespace hubkv
