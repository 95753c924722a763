// SPDX-License-Identifier: Apache-2.0
//
// score_window on the host: a task per head, which nothing outside it touches.
#include "score_window/score_window.h"

#include "attend/row_stream.h"
#include "common/cpu.h"
#include "common/thread_pool.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace hubkv
{
namespace
{

constexpr float kMINUS_INFINITY = -std::numeric_limits<float>::infinity();

ScoreKernels kernelsFor(hubkv_dtype dtype)
{
#if HUBKV_X86
    switch (cpuIsa())
    {
    case Isa::kAVX512: return scoreKernelsAvx512(dtype);
    case Isa::kAVX2: return scoreKernelsAvx2(dtype);
    case Isa::kSCALAR: break;
    }
#endif
    return scoreKernelsScalar(dtype);
}

//! transformed = the maximum of raw over the candidates around that are not protected; of a protected one, its own.
void pool(
    float const* raw, int32_t const* positions, int64_t count, int32_t sinkTokens, int64_t reach, float* transformed)
{
    for (int64_t i = 0; i < count; ++i)
    {
        float best = raw[i];
        int64_t const last = positions[i] < sinkTokens ? i : std::min(count - 1, i + reach);
        for (int64_t j = positions[i] < sinkTokens ? i : std::max<int64_t>(0, i - reach); j <= last; ++j)
        {
            best = positions[j] >= sinkTokens && raw[j] > best ? raw[j] : best;
        }
        transformed[i] = best;
    }
}

//! Replaces the importance in scores [count] by the logarithm of the rkv score.
class KeyRedundancy
{
public:
    KeyRedundancy(ScoreKernels const& kernels, HeadCandidates const& candidates, int64_t D)
        : mKernels(kernels)
        , mCandidates(candidates)
        , mD(D)
    {
    }

    void mix(float mix, float* scores)
    {
        int64_t const count = mCandidates.count();
        for (int64_t i = 0; i < count; ++i)
        {
            double const factor = unitFactor(i);
            for (int64_t d = 0; d < mD && factor > 0.0; ++d)
            {
                mSum[d] += mKey[d] * factor;
            }
        }
        // The softmax over mean cosines, which lie in [-1, 1]: no maximum need be taken off.
        double total = 0.0;
        for (int64_t i = 0; i < count; ++i)
        {
            total += std::exp(meanCosine(i));
        }
        float least = std::numeric_limits<float>::infinity();
        for (int64_t i = 0; i < count; ++i)
        {
            double const redundancy = std::exp(meanCosine(i)) / total;
            scores[i] = static_cast<float>(mix * scores[i] - (1.0 - mix) * redundancy);
            least = std::min(least, scores[i]);
        }
        double all = 0.0;
        for (int64_t i = 0; i < count; ++i)
        {
            all += scores[i] - least;
        }
        float const share = all > 0.0 ? static_cast<float>(1.0 / all) : 0.F;
        for (int64_t i = 0; i < count; ++i)
        {
            scores[i] = std::log((scores[i] - least) * share + kSMALLEST_SHARE);
        }
    }

private:
    //! 1 / |k_i|, and the key itself in mKey; 0 for a key that is absent or zero.
    double unitFactor(int64_t i)
    {
        char const* const row = mCandidates.row(i).k;
        if (row == nullptr)
        {
            return 0.0;
        }
        mKernels.widen(row, mD, mKey);
        double squares = 0.0;
        for (int64_t d = 0; d < mD; ++d)
        {
            squares += static_cast<double>(mKey[d]) * mKey[d];
        }
        return squares > 0.0 ? 1.0 / std::sqrt(squares) : 0.0;
    }

    //! Of key i with all other keys: their sum gives it without a look at any pair.
    double meanCosine(int64_t i)
    {
        double const factor = unitFactor(i);
        if (factor == 0.0 || mCandidates.count() < 2)
        {
            return 0.0;
        }
        double dot = 0.0;
        for (int64_t d = 0; d < mD; ++d)
        {
            dot += mSum[d] * mKey[d];
        }
        return (dot * factor - 1.0) / static_cast<double>(mCandidates.count() - 1);
    }

    ScoreKernels const& mKernels;
    HeadCandidates const& mCandidates;
    int64_t mD;
    float mKey[256];
    double mSum[256] = {};
};

} // namespace

void scoreWindowHost(hubkv_score_window_params const& params, ScoreArrays const& arrays, void* workspace)
{
    hubkv_cache_params const& shape = params.candidates.cache;
    CacheView const cache(shape, arrays.arena);
    ScoreWorkspace const layout(params);
    ScoreKernels const kernels = kernelsFor(shape.dtype);
    int64_t const heads = shape.L * shape.Hkv;

    parallelFor(heads,
        [&](int64_t number)
        {
            HeadCandidates const candidates(params.candidates, cache, arrays.segments, arrays.blockTable, number);
            int64_t const count = candidates.count();
            arrays.candidateOffsets[number] = candidates.first;
            int32_t* const positions = arrays.candidatePositions + candidates.first;
            for (int64_t i = 0; i < count; ++i)
            {
                positions[i] = candidates.position(arrays.positions, i);
            }
            if (count == 0)
            {
                return;
            }
            float* const raw = arrays.raw + candidates.first;
            float* const transformed = arrays.transformed + candidates.first;
            kernels.importance(layout.window.head(params, arrays.q, candidates, number, workspace), transformed);
            for (int64_t i = 0; i < count; ++i)
            {
                raw[i] = candidates.row(i).k != nullptr ? std::log(transformed[i]) : kMINUS_INFINITY;
            }
            switch (params.score)
            {
            case HUBKV_SCORE_VANILLA: std::copy(raw, raw + count, transformed); break;
            case HUBKV_SCORE_SNAPKV:
                pool(raw, positions, count, params.candidates.sinkTokens, params.poolKernel / 2, transformed);
                break;
            case HUBKV_SCORE_RKV: KeyRedundancy(kernels, candidates, shape.D).mix(params.mix, transformed); break;
            }
        });
    arrays.candidateOffsets[heads] = candidateCount(params.candidates);
}

} // namespace hubkv
