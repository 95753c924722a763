// SPDX-License-Identifier: Apache-2.0
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the undefined operand inside its own AVX-512 intrinsics for an uninitialized variable (bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "attend/tile.h"
#include "held_out_loss/held_out_loss.h"

#if HUBKV_X86

// From here to the end everything is compiled for these instructions, templates too; what is included before is not.
#if defined(__clang__)
#pragma clang attribute push(                                                                                          \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include "attend/lanes_avx512.h"

#include "attend/kernels.h"

#include "score_window/query_tiles.h"

#include "held_out_loss/loss_rows.h"

namespace hubkv
{

LossKernel lossKernelAvx512(hubkv_dtype dtype)
{
    return lossKernelOf<Avx512>(dtype);
}

} // namespace hubkv

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif // HUBKV_X86
