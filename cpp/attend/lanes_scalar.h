// SPDX-License-Identifier: Apache-2.0
//
// 4 float32 lanes in plain C++, for the processors that the other lane types leave out. Compilers turn these loops of
// four into the vector instructions that every processor of the target has.
#pragma once

#include "common/dtype.h"

#include <cmath>

namespace hubkv
{

struct ScalarLanes
{
    struct Reg
    {
        float lane[4];
    };
    static constexpr int kLANES = 4;
    static constexpr int kACCUMULATORS = 12;
    static constexpr int kDOT_QUERIES = 2;
    static constexpr int kFEW_QUERIES = 4;
    static constexpr int kTILE_REGS = 3;
    static constexpr int kTILE_ROWS = 4;

    static Reg zero()
    {
        return set(0.F);
    }
    static Reg set(float value)
    {
        return Reg{{value, value, value, value}};
    }
    static Reg load(float const* from)
    {
        return Reg{{from[0], from[1], from[2], from[3]}};
    }
    static void store(float* to, Reg const& value)
    {
        for (int i = 0; i < 4; ++i)
        {
            to[i] = value.lane[i];
        }
    }
    static Reg add(Reg const& a, Reg const& b)
    {
        Reg sum;
        for (int i = 0; i < 4; ++i)
        {
            sum.lane[i] = a.lane[i] + b.lane[i];
        }
        return sum;
    }
    static Reg sub(Reg const& a, Reg const& b)
    {
        Reg difference;
        for (int i = 0; i < 4; ++i)
        {
            difference.lane[i] = a.lane[i] - b.lane[i];
        }
        return difference;
    }
    static Reg mul(Reg const& a, Reg const& b)
    {
        Reg product;
        for (int i = 0; i < 4; ++i)
        {
            product.lane[i] = a.lane[i] * b.lane[i];
        }
        return product;
    }
    //! a * b + c
    static Reg fma(Reg const& a, Reg const& b, Reg const& c)
    {
        return add(mul(a, b), c);
    }
    //! b where a or b is NaN.
    static Reg max(Reg const& a, Reg const& b)
    {
        Reg larger;
        for (int i = 0; i < 4; ++i)
        {
            larger.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
        }
        return larger;
    }

    template <typename T>
    static Reg loadElements(T const* from)
    {
        return Reg{{toFloat(from[0]), toFloat(from[1]), toFloat(from[2]), toFloat(from[3])}};
    }
    //! D is a multiple of 4 lanes: no kernel comes here.
    template <typename T>
    static Reg loadHalf(T const* from)
    {
        return loadElements(from);
    }
    template <typename T>
    static void store8Elements(T* to, float const* from, float factor)
    {
        for (int i = 0; i < 8; ++i)
        {
            fromFloat(from[i] * factor, to[i]);
        }
    }

    static float maxOf(Reg const& value)
    {
        Reg const swapped{{value.lane[2], value.lane[3], value.lane[0], value.lane[1]}};
        Reg const pairs = max(value, swapped);
        return pairs.lane[0] > pairs.lane[1] ? pairs.lane[0] : pairs.lane[1];
    }
    static float sumOf(Reg const& value)
    {
        return (value.lane[0] + value.lane[2]) + (value.lane[1] + value.lane[3]);
    }
    //! to [4] = the sums over the lanes of a, b, c, d.
    static void sum4(Reg const& a, Reg const& b, Reg const& c, Reg const& d, float* to)
    {
        to[0] = sumOf(a);
        to[1] = sumOf(b);
        to[2] = sumOf(c);
        to[3] = sumOf(d);
    }

    static Reg round(Reg const& value)
    {
        // 1.5 * 2^23 pushes the fraction out of the significand; right for |value| < 2^22.
        Reg const magic = set(12582912.F);
        return sub(add(value, magic), magic);
    }
    //! value * 2^exponent for whole exponents in -127..127; 0 at -127. NaN where value is NaN.
    static Reg scaleByPower(Reg const& value, Reg const& exponent)
    {
        Reg product;
        for (int i = 0; i < 4; ++i)
        {
            // The low bits of exponent + 1.5 * 2^23 + 127 are the biased exponent; nothing is converted, so NaN is
            // harmless.
            uint32_t const biased = bitsOf(exponent.lane[i] + (12582912.F + 127.F)) & 0xffu;
            product.lane[i] = value.lane[i] * floatOf(biased << 23);
        }
        return product;
    }
};

} // namespace hubkv
