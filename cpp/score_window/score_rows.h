// SPDX-License-Identifier: Apache-2.0
//
// The importance of a head's candidates. Included as query_tiles.h is, behind it.
#pragma once

namespace hubkv
{

template <typename L, typename T>
class HeadScorer : QueryTiles<L, T>
{
    using Tiles = QueryTiles<L, T>;
    using Tiles::kWIDTH;

public:
    explicit HeadScorer(WindowHead const& head)
        : Tiles(head)
    {
    }

    //! importance [count]
    void run(float* importance)
    {
        this->pack();
        int64_t const count = this->mHead.candidates.count();
        for (int64_t first = 0; first < count; first += kWINDOW_ROWS)
        {
            this->load(first, count);
            for (int64_t tile = 0; tile < this->mTiles; ++tile)
            {
                this->logits(tile);
                this->accumulateSums(tile);
            }
        }
        this->finishSums();
        float const mean = 1.F / static_cast<float>(this->mHead.W * this->mHead.G);
        for (int64_t first = 0; first < count; first += kWINDOW_ROWS)
        {
            this->load(first, count);
            float total[kWINDOW_ROWS] = {};
            for (int64_t tile = 0; tile < this->mTiles; ++tile)
            {
                this->logits(tile);
                addWeights(tile, total);
            }
            for (int64_t r = 0; r < this->mRows; ++r)
            {
                importance[first + r] = total[r] * mean;
            }
        }
    }

private:
    //! Adds the softmax weights of the tile's queries to total [rows].
    void addWeights(int64_t tile, float* total) const
    {
        using Reg = typename L::Reg;
        int64_t const at = tile * kWIDTH;
        Reg const shift0 = L::load(this->mHead.maxima + at);
        Reg const shift1 = L::load(this->mHead.maxima + at + L::kLANES);
        Reg const share0 = L::load(this->mHead.sums + at);
        Reg const share1 = L::load(this->mHead.sums + at + L::kLANES);
        for (int64_t r = 0; r < this->mRows; ++r)
        {
            float const* const logit = this->mLogits + r * kWIDTH;
            Reg const weight0 = exp2<L>(L::sub(L::load(logit), shift0));
            Reg const weight1 = exp2<L>(L::sub(L::load(logit + L::kLANES), shift1));
            total[r] += L::sumOf(L::fma(weight1, share1, L::mul(weight0, share0)));
        }
    }
};

template <typename L, typename T>
void headImportance(WindowHead const& head, float* importance)
{
    HeadScorer<L, T> scorer(head);
    scorer.run(importance);
}

template <typename L, typename T>
void widenRow(char const* from, int64_t D, float* to)
{
    T const* const row = reinterpret_cast<T const*>(from);
    for (int64_t d = 0; d < D; ++d)
    {
        to[d] = toFloat(row[d]);
    }
}

template <typename L>
ScoreKernels scoreKernelsOf(hubkv_dtype dtype)
{
    switch (dtype)
    {
    case HUBKV_FLOAT16: return {headImportance<L, Float16>, widenRow<L, Float16>};
    case HUBKV_BFLOAT16: return {headImportance<L, BFloat16>, widenRow<L, BFloat16>};
    case HUBKV_FLOAT32: break;
    }
    return {headImportance<L, float>, widenRow<L, float>};
}

} // namespace hubkv
