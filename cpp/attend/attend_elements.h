// SPDX-License-Identifier: Apache-2.0
//
// The elements of K, V and queries in kernels: how 16 bytes become floats, and a float one element.
#pragma once

#include "common/device.h"
#include "common/dtype.h"

#include <cstdint>

namespace hubkv
{

constexpr float kNO_LOGIT = -__builtin_inff();

//! What to subtract from logits of this maximum: where all are -inf, 0 keeps -inf - maximum from being NaN.
__device__ inline float shiftOf(float maximum)
{
    return maximum == kNO_LOGIT ? 0.F : maximum;
}

//! How 16 bytes become floats, and a float one element.
template <typename T>
struct Elements;

template <>
struct Elements<float>
{
    static constexpr int32_t kIN_VECTOR = 4;

    static __device__ void widen(uint4 vector, float* values)
    {
        values[0] = __uint_as_float(vector.x);
        values[1] = __uint_as_float(vector.y);
        values[2] = __uint_as_float(vector.z);
        values[3] = __uint_as_float(vector.w);
    }
    static __device__ float load(float const* address)
    {
        return *address;
    }
    static __device__ void store(float* address, float value)
    {
        *address = value;
    }
};

template <>
struct Elements<Float16>
{
    static constexpr int32_t kIN_VECTOR = 8;

    static __device__ float one(uint32_t bits)
    {
        return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    }
    static __device__ void widen(uint4 vector, float* values)
    {
        uint32_t const words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
        for (int32_t i = 0; i < 4; ++i)
        {
            values[2 * i] = one(words[i] & 0xffffu);
            values[2 * i + 1] = one(words[i] >> 16);
        }
    }
    static __device__ float load(Float16 const* address)
    {
        return one(address->bits);
    }
    static __device__ void store(Float16* address, float value)
    {
        address->bits = __half_as_ushort(__float2half_rn(value));
    }
};

template <>
struct Elements<BFloat16>
{
    static constexpr int32_t kIN_VECTOR = 8;

    static __device__ void widen(uint4 vector, float* values)
    {
        uint32_t const words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
        for (int32_t i = 0; i < 4; ++i)
        {
            values[2 * i] = __uint_as_float(words[i] << 16);
            values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
    static __device__ float load(BFloat16 const* address)
    {
        return __uint_as_float(static_cast<uint32_t>(address->bits) << 16);
    }
    static __device__ void store(BFloat16* address, float value)
    {
        address->bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
    }
};

} // namespace hubkv
