// SPDX-License-Identifier: Apache-2.0
#include "refine/refine_kernels.h"

#include <cstring>
#include <limits>

#if HUBKV_X86

// From here to the end everything is compiled for these instructions, templates too; what is included before is not.
#if defined(__clang__)
#pragma clang attribute push(                                                                                          \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include "refine/refine_lanes.h"

namespace hubkv
{

RefineKernels const& refineKernelsAvx512()
{
    return kREFINE_KERNELS<16>;
}

} // namespace hubkv

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif // HUBKV_X86
