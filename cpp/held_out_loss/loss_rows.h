// SPDX-License-Identifier: Apache-2.0
//
// What a head loses, by level. Included as score_window/query_tiles.h is, behind it.
#pragma once

namespace hubkv
{

template <typename L, typename T>
class HeadJudge : QueryTiles<L, T>
{
    using Tiles = QueryTiles<L, T>;
    using Tiles::kREGS;
    using Tiles::kWIDTH;
    using Reg = typename L::Reg;

public:
    explicit HeadJudge(LossHead const& head)
        : Tiles(head.window)
        , mLossHead(head)
    {
    }

    void run()
    {
        this->pack();
        int64_t const count = this->mHead.candidates.count();
        for (int64_t first = 0; first < count; first += kWINDOW_ROWS)
        {
            this->load(first, count);
            for (int64_t tile = 0; tile < this->mTiles; ++tile)
            {
                this->logits(tile);
                hide(tile, first);
                this->accumulateSums(tile);
            }
        }
        this->finishSums();
        for (int64_t i = 0; i < this->mTiles * kLEVELS * kWIDTH; ++i)
        {
            mLossHead.masses[i] = 0.F;
        }
        for (int64_t first = 0; first < mLossHead.candidates; first += kWINDOW_ROWS)
        {
            this->load(first, mLossHead.candidates);
            findLevels(first);
            for (int64_t tile = 0; tile < this->mTiles; ++tile)
            {
                this->logits(tile);
                addMasses(tile);
            }
        }
        sumLosses();
    }

private:
    //! Takes out what lies behind a query's own token.
    void hide(int64_t tile, int64_t first)
    {
        for (int64_t r = 0; r < this->mRows; ++r)
        {
            // Query token w sees seenByFirst + w rows.
            int64_t const blindTokens = first + r - mLossHead.seenByFirst + 1;
            if (blindTokens <= 0)
            {
                continue;
            }
            int64_t const blind = blindTokens * this->mHead.G - tile * kWIDTH; // queries of the tile
            for (int64_t i = 0; i < (blind < kWIDTH ? blind : kWIDTH); ++i)
            {
                this->mLogits[r * kWIDTH + i] = kNO_LOGIT;
            }
        }
    }

    void findLevels(int64_t first)
    {
        for (int64_t r = 0; r < this->mRows; ++r)
        {
            bool const held = mLossHead.positions[first + r] < mLossHead.sinkTokens;
            mLevels[r] = held ? kALWAYS_KEPT : levelOf(mLossHead.best, mLossHead.ranking[first + r]);
        }
    }

    //! Adds the weights of the tile's queries to the masses of the rows' levels.
    void addMasses(int64_t tile)
    {
        int64_t const at = tile * kWIDTH;
        float* const masses = mLossHead.masses + at * kLEVELS;
        for (int64_t r = 0; r < this->mRows; ++r)
        {
            if (mLevels[r] == kALWAYS_KEPT)
            {
                continue;
            }
            float const* const logit = this->mLogits + r * kWIDTH;
            float* const mass = masses + mLevels[r] * kWIDTH;
            for (int64_t n = 0; n < kREGS; ++n)
            {
                int64_t const lane = n * L::kLANES;
                Reg const shift = L::load(this->mHead.maxima + at + lane);
                Reg const share = L::load(this->mHead.sums + at + lane);
                Reg const weight = exp2<L>(L::sub(L::load(logit + lane), shift));
                L::store(mass + lane, L::fma(weight, share, L::load(mass + lane)));
            }
        }
    }

    void sumLosses()
    {
        float* const loss = mLossHead.loss;
        for (int32_t level = 0; level <= kLEVELS; ++level)
        {
            loss[level] = 0.F;
        }
        for (int64_t tile = 0; tile < this->mTiles; ++tile)
        {
            for (int64_t n = 0; n < kREGS; ++n)
            {
                float const* const masses = mLossHead.masses + tile * kWIDTH * kLEVELS + n * L::kLANES;
                Reg lost = L::zero();
                for (int32_t level = kLEVELS - 1; level >= 0; --level)
                {
                    lost = L::add(lost, L::load(masses + level * kWIDTH));
                    loss[level] += L::sumOf(L::mul(lost, lost));
                }
            }
        }
        float const mean = 1.F / static_cast<float>(this->mHead.W * this->mHead.G);
        for (int32_t level = 0; level < kLEVELS; ++level)
        {
            loss[level] *= mean;
        }
    }

    LossHead const& mLossHead;
    int32_t mLevels[kWINDOW_ROWS];
};

template <typename L, typename T>
void headLoss(LossHead const& head)
{
    HeadJudge<L, T> judge(head);
    judge.run();
}

template <typename L>
LossKernel lossKernelOf(hubkv_dtype dtype)
{
    switch (dtype)
    {
    case HUBKV_FLOAT16: return headLoss<L, Float16>;
    case HUBKV_BFLOAT16: return headLoss<L, BFloat16>;
    case HUBKV_FLOAT32: break;
    }
    return headLoss<L, float>;
}

} // namespace hubkv
