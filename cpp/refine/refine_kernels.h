// SPDX-License-Identifier: Apache-2.0
//
// The inner loops of refine on the host, one set per instruction set.
#pragma once

#include "common/cpu.h"
#include "refine/refine.h"

#include <cstdint>

namespace hubkv
{

struct RefineKernels
{
    //! Moments of rows * 128 scores; what is not finite is skipped (so NaN can stand for "not here").
    Moments (*moments)(float const* scores, int64_t rows);

    //! Maximum of n values, NaN as -inf; -inf for n = 0.
    float (*maximum)(float const* values, int64_t n);

    //! best[i] = max of scores[i - reach .. i + reach], NaN as -inf, for i in 0..n-1; n <= kREFINE_CHUNK and
    //! reach <= kREFINE_CHUNK. All of scores[-reach .. n - 1 + reach] is read.
    void (*windowMaximum)(float const* scores, int64_t n, int64_t reach, float* best);

    //! The formula without protection: refined[i] from scores[i] and best[i].
    void (*blend)(
        float const* scores, float const* best, int64_t n, float gamma, float beta, float alpha, float* refined);

    //! How many of n scores are NaN or infinite.
    int64_t (*countNonFinite)(float const* scores, int64_t n);
};

RefineKernels const& refineKernelsScalar();
RefineKernels const& refineKernelsAvx2();
RefineKernels const& refineKernelsAvx512();

inline RefineKernels const& refineKernels(Isa isa)
{
#if HUBKV_X86
    switch (isa)
    {
    case Isa::kAVX512: return refineKernelsAvx512();
    case Isa::kAVX2: return refineKernelsAvx2();
    case Isa::kSCALAR: break;
    }
#else
    (void)isa;
#endif
    return refineKernelsScalar();
}

} // namespace hubkv
