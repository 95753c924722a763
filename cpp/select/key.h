// SPDX-License-Identifier: Apache-2.0
//
// The order in which select ranks scores, as integers.
#pragma once

#include "common/cpu.h"
#include "common/host_device.h"

#include <cstdint>

namespace hubkv
{

//! From the bits of a float. Order-preserving: a ranks above b exactly where the key of a is greater; NaN is -inf, -0 is
//! +0. No float mode can change an outcome.
HUBKV_HOST_DEVICE HUBKV_INLINE int32_t keyOfBits(int32_t bits)
{
    bits = (bits & 0x7fffffff) > 0x7f800000 ? static_cast<int32_t>(0xff800000u) : bits;
    bits = bits == INT32_MIN ? 0 : bits;
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

} // namespace hubkv
