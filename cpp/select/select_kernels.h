// SPDX-License-Identifier: Apache-2.0
//
// The inner loops of select on the host, one set per instruction set. They compare keys: integers in the order of the
// scores, with NaN as -inf and -0 as +0, so that no float mode can change an outcome.
#pragma once

#include "common/cpu.h"
#include "common/dtype.h"
#include "select/key.h"

#include <cstdint>

namespace hubkv
{

//! Order-preserving: a ranks above b exactly where keyOf(a) > keyOf(b).
HUBKV_INLINE int32_t keyOf(float score)
{
    return keyOfBits(static_cast<int32_t>(bitsOf(score)));
}

HUBKV_INLINE int32_t keyOf(int32_t key)
{
    return key;
}

constexpr int64_t kSELECT_PADDING = 16; // elements past the last that a kernel may write in its scratch array

struct SelectKernels
{
    //! Adds to greater and equal the counts of n scores (n < 2^31) above and at the threshold.
    void (*count)(float const* scores, int64_t n, int32_t threshold, int32_t& greater, int32_t& equal);

    //! The keys of n scores that lie in low..high go to inside (room for n + kSELECT_PADDING); gives their number, and
    //! sets above to the number of keys over high.
    int32_t (*bracket)(float const* scores, int64_t n, int32_t low, int32_t high, int32_t* inside, int32_t& above);

    //! first + i for every i in 0..n-1 whose key is >= least goes to out (room for n + kSELECT_PADDING), ascending;
    //! gives their number.
    int32_t (*gather)(float const* scores, int64_t n, int32_t least, int32_t first, int32_t* out);
};

SelectKernels const& selectKernels(Isa isa) noexcept;

} // namespace hubkv
