// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of all lane types share: the exponential, results out, merging. Like few_queries.h and
// many_queries.h, every function is a template over the lane type, and is included inside the target region of that
// type: no code compiled for one instruction set is ever linked into another. Hence no other header is included here.
#pragma once

namespace hubkv
{

constexpr int64_t kMAX_HEAD_DIM = 256;

//! 2^x for x <= 0, relative error below 2e-7 (polynomial of degree 6, minimax on [-0.5, 0.5]); 0 below -126.5; NaN
//! stays.
template <typename L>
typename L::Reg exp2(typename L::Reg x)
{
    x = L::max(L::set(-127.F), x);
    typename L::Reg const whole = L::round(x);
    typename L::Reg const part = L::sub(x, whole);
    typename L::Reg power = L::set(1.5345812e-4F);
    power = L::fma(power, part, L::set(1.3399931e-3F));
    power = L::fma(power, part, L::set(9.6184891e-3F));
    power = L::fma(power, part, L::set(5.5503286e-2F));
    power = L::fma(power, part, L::set(2.4022646e-1F));
    power = L::fma(power, part, L::set(6.9314718e-1F));
    power = L::fma(power, part, L::set(1.F));
    return L::scaleByPower(power, whole);
}

//! What to subtract from logits of this maximum: where all are -inf, 0 keeps -inf - maximum from being NaN.
inline constexpr float kNO_LOGIT = -__builtin_inff();

template <typename L>
float shiftOf(float maximum)
{
    return maximum == kNO_LOGIT ? 0.F : maximum;
}

//! 2^x of one number, by the same arithmetic as the vectors.
template <typename L>
float exp2Scalar(float x)
{
    float lanes[L::kLANES];
    L::store(lanes, exp2<L>(L::set(x)));
    return lanes[0];
}

//! Into the second-level cache: more lines can be on their way to it than to the first (a third faster where measured).
template <typename L>
void prefetchRow(char const* row, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += 64)
    {
        __builtin_prefetch(row + at, 0, 2);
    }
}

//! out row = values [D] / sum; zeros where nothing was attended to.
template <typename L, typename T>
void storeResult(float const* values, float sum, QueryRows<void*> const& out, int64_t query)
{
    T* const row = static_cast<T*>(out.rows) + out.offset(query);
    float const factor = sum != 0.F ? 1.F / sum : 0.F;
    for (int64_t d = 0; d < out.D; d += 8)
    {
        L::store8Elements(row + d, values + d, factor);
    }
}

//! The result of query `index` of the tile, values [D].
template <typename L, typename T>
void finishQuery(Tile const& tile, int32_t index, float maximum, float sum, float const* values)
{
    if (tile.part.maximum == nullptr)
    {
        storeResult<L, T>(values, sum, tile.out, tile.first + index);
        return;
    }
    tile.part.maximum[index] = maximum;
    tile.part.sum[index] = sum;
    float* const to = tile.part.values + index * tile.q.D;
    for (int64_t d = 0; d < tile.q.D; ++d)
    {
        to[d] = values[d];
    }
}

template <typename L, typename T>
void mergeParts(Parts const& parts, int32_t queries, QueryRows<void*> const& out)
{
    alignas(64) float values[kMAX_HEAD_DIM];
    for (int32_t query = 0; query < queries; ++query)
    {
        float maximum = kNO_LOGIT;
        for (int32_t p = 0; p < parts.count; ++p)
        {
            float const other = parts[p].maximum[query];
            maximum = other > maximum ? other : maximum;
        }
        float const shift = shiftOf<L>(maximum);
        float sum = 0.F;
        for (int64_t d = 0; d < out.D; ++d)
        {
            values[d] = 0.F;
        }
        for (int32_t p = 0; p < parts.count; ++p)
        {
            Part const part = parts[p];
            float const weight = exp2Scalar<L>(part.maximum[query] - shift);
            sum += weight * part.sum[query];
            float const* const from = part.values + query * out.D;
            for (int64_t d = 0; d < out.D; ++d)
            {
                values[d] += weight * from[d];
            }
        }
        storeResult<L, T>(values, sum, out, query);
    }
}

} // namespace hubkv
