// SPDX-License-Identifier: Apache-2.0
//
// Queries of one head against rows, over lanes of queries. A template over the lane type, included inside its target
// region, behind attend/kernels.h (which says why).
//
// Logits are computed twice, a block of rows at a time: first for the maximum and sum of each query's softmax, then for
// the weights, so that no logit is kept. All lanes of a query tile share the loads of a row.
#pragma once

namespace hubkv
{

//! Of the queries of a head: blocks of rows and their logits, and what is known of each softmax.
template <typename L, typename T>
class QueryTiles
{
public:
    static constexpr int64_t kREGS = 2;
    static constexpr int64_t kWIDTH = kREGS * L::kLANES; // queries of a tile
    static constexpr int64_t kGROUP = 4;                 // rows that share the loads of the queries
    static_assert(kWINDOW_QUERIES % kWIDTH == 0 && kWINDOW_ROWS % kGROUP == 0, "whole tiles");

protected:
    explicit QueryTiles(WindowHead const& head)
        : mHead(head)
        , mTiles((head.W * head.G + kWIDTH - 1) / kWIDTH)
    {
    }

    //! After all rows went through accumulateSums(): sums become shares.
    void finishSums()
    {
        for (int64_t i = 0; i < mTiles * kWIDTH; ++i)
        {
            // A query without a finite logit, and the padding, weigh nothing.
            mHead.sums[i] = i < mHead.W * mHead.G && mHead.sums[i] > 0.F ? 1.F / mHead.sums[i] : 0.F;
            mHead.maxima[i] = shiftOf<L>(mHead.maxima[i]);
        }
    }

    //! Queries of a tile side by side, scaled; zeros past the last.
    void pack()
    {
        int64_t const D = mHead.D;
        for (int64_t i = 0; i < mTiles * kWIDTH; ++i)
        {
            bool const real = i < mHead.W * mHead.G;
            T const* const from =
                static_cast<T const*>(mHead.q) + (real ? i / mHead.G * mHead.tokenStride + i % mHead.G * D : 0);
            float* const to = mHead.packed + i / kWIDTH * D * kWIDTH + i % kWIDTH;
            for (int64_t d = 0; d < D; ++d)
            {
                to[d * kWIDTH] = real ? toFloat(from[d]) * mHead.scale : 0.F;
            }
            mHead.maxima[i] = kNO_LOGIT;
            mHead.sums[i] = 0.F;
        }
    }

    //! Rows first.. as floats; rows that are absent or past the last are zeros with bias -inf.
    void load(int64_t first, int64_t count)
    {
        int64_t const D = mHead.D;
        mRows = count - first < kWINDOW_ROWS ? count - first : kWINDOW_ROWS;
        mPadded = (mRows + kGROUP - 1) / kGROUP * kGROUP;
        for (int64_t r = 0; r < mPadded; ++r)
        {
            CandidateRow const row = r < mRows ? mHead.candidates.row(first + r) : CandidateRow{nullptr, nullptr, 0.F};
            float* const to = mFloats + r * D;
            mBias[r] = row.k != nullptr ? row.bias * kLOG2_E : kNO_LOGIT;
            T const* const from = reinterpret_cast<T const*>(row.k);
            for (int64_t d = 0; d < D; d += 8)
            {
                for (int64_t i = 0; i < 8; ++i)
                {
                    to[d + i] = from != nullptr ? toFloat(from[d + i]) : 0.F;
                }
            }
        }
    }

    void logits(int64_t tile)
    {
        using Reg = typename L::Reg;
        int64_t const D = mHead.D;
        float const* const q = mHead.packed + tile * D * kWIDTH;
        for (int64_t r = 0; r < mPadded; r += kGROUP)
        {
            float const* const rows = mFloats + r * D;
            Reg sums[kGROUP][kREGS];
            for (int64_t i = 0; i < kGROUP; ++i)
            {
                for (int64_t n = 0; n < kREGS; ++n)
                {
                    sums[i][n] = L::set(mBias[r + i]);
                }
            }
            for (int64_t d = 0; d < D; ++d)
            {
                Reg query[kREGS];
                for (int64_t n = 0; n < kREGS; ++n)
                {
                    query[n] = L::load(q + d * kWIDTH + n * L::kLANES);
                }
                for (int64_t i = 0; i < kGROUP; ++i)
                {
                    Reg const value = L::set(rows[i * D + d]);
                    for (int64_t n = 0; n < kREGS; ++n)
                    {
                        sums[i][n] = L::fma(value, query[n], sums[i][n]);
                    }
                }
            }
            for (int64_t i = 0; i < kGROUP; ++i)
            {
                for (int64_t n = 0; n < kREGS; ++n)
                {
                    L::store(mLogits + (r + i) * kWIDTH + n * L::kLANES, sums[i][n]);
                }
            }
        }
    }

    //! The block's logits into the maxima and sums of the tile's queries.
    void accumulateSums(int64_t tile)
    {
        using Reg = typename L::Reg;
        for (int64_t n = 0; n < kREGS; ++n)
        {
            int64_t const at = tile * kWIDTH + n * L::kLANES;
            float const* const logit = mLogits + n * L::kLANES;
            Reg const before = L::load(mHead.maxima + at);
            Reg maximum = before;
            for (int64_t r = 0; r < mPadded; ++r)
            {
                maximum = L::max(L::load(logit + r * kWIDTH), maximum);
            }
            L::store(mHead.maxima + at, maximum);
            float shift[L::kLANES];
            L::store(shift, maximum);
            for (int i = 0; i < L::kLANES; ++i)
            {
                shift[i] = shiftOf<L>(shift[i]);
            }
            Reg const shifts = L::load(shift);
            Reg sum = L::mul(L::load(mHead.sums + at), exp2<L>(L::sub(before, shifts)));
            for (int64_t r = 0; r < mPadded; ++r)
            {
                sum = L::add(sum, exp2<L>(L::sub(L::load(logit + r * kWIDTH), shifts)));
            }
            L::store(mHead.sums + at, sum);
        }
    }

    WindowHead const& mHead;
    int64_t mTiles;
    int64_t mRows = 0;
    int64_t mPadded = 0;
    alignas(64) float mFloats[kWINDOW_ROWS * kMAX_HEAD_DIM];
    alignas(64) float mLogits[kWINDOW_ROWS * kWIDTH];
    float mBias[kWINDOW_ROWS];
};

} // namespace hubkv
