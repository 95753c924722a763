// SPDX-License-Identifier: Apache-2.0
//
// refine on the host: moments of every chunk, head weights of every layer, then the refined scores chunk by chunk.
#include "refine/refine.h"

#include "common/cpu.h"
#include "common/thread_pool.h"
#include "refine/refine_kernels.h"
#include "refine/window_maxima.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

namespace hubkv
{
namespace
{

constexpr float kINFINITY = std::numeric_limits<float>::infinity();
constexpr int64_t kTASK_CHUNKS = 8;               // chunks per task where a layer is spread over threads
constexpr int64_t kLAYER_CACHE_BYTES = 4LL << 20; // a layer up to this size is read from cache the second time

//! c^tau as hubkv.h fixes it.
double headPower(double ratio, float temperature)
{
    if (temperature == 0.5F)
    {
        return std::sqrt(ratio);
    }
    if (temperature == 0.25F)
    {
        return std::sqrt(std::sqrt(ratio));
    }
    return std::pow(ratio, static_cast<double>(temperature));
}

class RefineRun
{
public:
    RefineRun(hubkv_refine_params const& params, float const* scores, float alpha, int64_t window, float* refined,
        void* workspace)
        : mParams(params)
        , mKernels(refineKernels(cpuIsa()))
        , mScores(scores)
        , mAlpha(alpha)
        , mRefined(refined)
        , mFirst(std::min<int64_t>(params.sinkTokens, params.T))
        , mLast(params.T - window)
    {
        RefineWorkspace const layout(params);
        mChunks = layout.chunks;
        mMoments = layout.moments.in(workspace);
        mMaxima = layout.maxima.in(workspace);
        mBeta = layout.beta.in(workspace);
        mWeighted = alpha != 0.0F && params.headWeightTemperature != 0.0F;
        mReach = alpha != 0.0F && params.penaltyFactor != 1.0F
            ? std::min<int64_t>((params.nmsKernel - 1) / 2, params.T - 1)
            : 0;
    }

    int64_t run()
    {
        int64_t const layerChunks = mParams.Hkv * mChunks;
        bool const layerTasks = mParams.L >= 2 * numThreads()
            && mParams.Hkv * mParams.T <= kLAYER_CACHE_BYTES / static_cast<int64_t>(sizeof(float));
        if (layerTasks)
        {
            parallelFor(mParams.L,
                [&](int64_t layer)
                {
                    DefaultFloatMode const mode;
                    prepare(layer * layerChunks, (layer + 1) * layerChunks);
                    weigh(layer);
                    finish(layer * layerChunks, (layer + 1) * layerChunks);
                });
            return mNonFinite.load();
        }

        int64_t const total = mParams.L * layerChunks;
        int64_t const tasks = (total - 1) / kTASK_CHUNKS + 1;
        auto const range = [&](int64_t task, auto&& work)
        {
            DefaultFloatMode const mode;
            work(task * kTASK_CHUNKS, std::min(total, (task + 1) * kTASK_CHUNKS));
        };
        if (mWeighted || mReach > kREFINE_CHUNK)
        {
            parallelFor(
                tasks, [&](int64_t task) { range(task, [&](int64_t begin, int64_t end) { prepare(begin, end); }); });
        }
        {
            DefaultFloatMode const mode;
            for (int64_t layer = 0; layer < mParams.L; ++layer)
            {
                weigh(layer);
            }
        }
        parallelFor(tasks, [&](int64_t task) { range(task, [&](int64_t begin, int64_t end) { finish(begin, end); }); });
        return mNonFinite.load();
    }

private:
    //! The positions of a chunk, numbered over all heads.
    struct Chunk
    {
        float const* head;  // scores [T]
        int64_t headNumber; // in L*Hkv
        int64_t begin;
        int64_t end;
    };

    Chunk chunkAt(int64_t number) const
    {
        int64_t const head = number / mChunks;
        int64_t const begin = (number - head * mChunks) * kREFINE_CHUNK;
        return {mScores + head * mParams.T, head, begin, std::min(mParams.T, begin + kREFINE_CHUNK)};
    }

    //! Moments, and maxima where a window reaches past the chunks beside it.
    void prepare(int64_t firstChunk, int64_t lastChunk)
    {
        for (int64_t number = firstChunk; number < lastChunk; ++number)
        {
            Chunk const chunk = chunkAt(number);
            if (mWeighted)
            {
                mMoments[number] = moments(chunk);
            }
            if (mReach > kREFINE_CHUNK)
            {
                mMaxima[number] = mKernels.maximum(chunk.head + chunk.begin, chunk.end - chunk.begin);
            }
        }
    }

    Moments moments(Chunk const& chunk) const
    {
        int64_t const begin = std::max(chunk.begin, mFirst);
        int64_t const end = std::min(chunk.end, mLast);
        if (begin >= end)
        {
            return {0.0, 0.0, 0};
        }
        if (begin == chunk.begin && (end - begin) % kREFINE_LANES == 0)
        {
            return mKernels.moments(chunk.head + begin, (end - begin) / kREFINE_LANES);
        }
        // Protected positions and those past T become NaN, which moments skip.
        float padded[kREFINE_CHUNK];
        int64_t const rows = (end - chunk.begin - 1) / kREFINE_LANES + 1;
        float const nan = std::numeric_limits<float>::quiet_NaN();
        std::fill(padded, padded + (begin - chunk.begin), nan);
        std::copy(chunk.head + begin, chunk.head + end, padded + (begin - chunk.begin));
        std::fill(padded + (end - chunk.begin), padded + rows * kREFINE_LANES, nan);
        return mKernels.moments(padded, rows);
    }

    //! beta of the heads of one layer.
    void weigh(int64_t layer)
    {
        float* const beta = mBeta + layer * mParams.Hkv;
        std::fill(beta, beta + mParams.Hkv, 1.0F);
        if (!mWeighted)
        {
            return;
        }
        double total = 0.0;
        for (int64_t head = 0; head < mParams.Hkv; ++head)
        {
            total += variation(layer * mParams.Hkv + head);
        }
        double const mean = total / static_cast<double>(mParams.Hkv);
        if (mean == 0.0)
        {
            return;
        }
        for (int64_t head = 0; head < mParams.Hkv; ++head)
        {
            int64_t const number = layer * mParams.Hkv + head;
            double const power = headPower(variation(number) / mean, mParams.headWeightTemperature);
            if (countOf(number) > 0 && !std::isnan(power))
            {
                double const low = mParams.minHeadWeight;
                double const high = mParams.maxHeadWeight;
                beta[head] = static_cast<float>(std::clamp(power, low, high));
            }
        }
    }

    int64_t countOf(int64_t head) const
    {
        int64_t count = 0;
        for (int64_t chunk = 0; chunk < mChunks; ++chunk)
        {
            count += mMoments[head * mChunks + chunk].count;
        }
        return count;
    }

    //! c of a head; 0 where nothing is counted.
    double variation(int64_t head) const
    {
        Moments sum{0.0, 0.0, 0};
        for (int64_t chunk = 0; chunk < mChunks; ++chunk)
        {
            Moments const& part = mMoments[head * mChunks + chunk];
            sum.sum += part.sum;
            sum.squares += part.squares;
            sum.count += part.count;
        }
        if (sum.count == 0)
        {
            return 0.0;
        }
        double const n = static_cast<double>(sum.count);
        double const mean = sum.sum / n;
        double const variance = sum.squares / n - mean * mean;
        return std::sqrt(std::max(0.0, variance)) / (mean + 1e-6);
    }

    //! The refined scores of chunks.
    void finish(int64_t firstChunk, int64_t lastChunk)
    {
        float best[kREFINE_CHUNK];
        int64_t nonFinite = 0;
        for (int64_t number = firstChunk; number < lastChunk; ++number)
        {
            Chunk const chunk = chunkAt(number);
            float const* const from = chunk.head + chunk.begin;
            float* const to = mRefined + chunk.headNumber * mParams.T + chunk.begin;
            int64_t const n = chunk.end - chunk.begin;
            nonFinite += mKernels.countNonFinite(from, n);
            if (mAlpha == 0.0F)
            {
                std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
            }
            else
            {
                if (mReach > 0)
                {
                    windowMaxima(mKernels, {chunk.head, mParams.T, mMaxima + chunk.headNumber * mChunks}, chunk.begin,
                        chunk.end, mReach, best);
                }
                mKernels.blend(
                    from, mReach > 0 ? best : from, n, mParams.penaltyFactor, mBeta[chunk.headNumber], mAlpha, to);
            }
            protect(chunk, to);
        }
        mNonFinite.fetch_add(nonFinite, std::memory_order_relaxed);
    }

    void protect(Chunk const& chunk, float* refined) const
    {
        int64_t const n = chunk.end - chunk.begin;
        std::fill(refined, refined + std::clamp<int64_t>(mFirst - chunk.begin, 0, n), kINFINITY);
        std::fill(refined + std::clamp<int64_t>(mLast - chunk.begin, 0, n), refined + n, kINFINITY);
    }

    hubkv_refine_params const& mParams;
    RefineKernels const& mKernels;
    float const* mScores;
    float mAlpha;
    float* mRefined;
    int64_t mFirst; // first position that sinks do not protect
    int64_t mLast;  // first position that the window protects
    int64_t mChunks;
    Moments* mMoments;
    float* mMaxima;
    float* mBeta;
    bool mWeighted; // heads have weights
    int64_t mReach; // positions to either side that a hub must not be below
    std::atomic<int64_t> mNonFinite{0};
};

} // namespace

void refineHost(hubkv_refine_params const& params, float const* scores, float alpha, int64_t window, float* refined,
    int64_t* nonFinite, void* workspace)
{
    RefineRun run(params, scores, alpha, window, refined, workspace);
    int64_t const count = run.run();
    if (nonFinite != nullptr)
    {
        *nonFinite = count;
    }
}

} // namespace hubkv
