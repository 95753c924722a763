// SPDX-License-Identifier: Apache-2.0
#include "refine/window_maxima.h"

#include <algorithm>
#include <limits>

namespace hubkv
{
namespace
{

constexpr float kINFINITY = std::numeric_limits<float>::infinity();

//! Maximum of scores[begin .. end) cut to the sequence.
float rangeMaximum(RefineKernels const& kernels, HeadScores const& head, int64_t begin, int64_t end)
{
    begin = std::max<int64_t>(begin, 0);
    end = std::min(end, head.T);
    float best = -kINFINITY;
    while (begin < end)
    {
        int64_t const chunk = begin / kREFINE_CHUNK;
        int64_t const chunkEnd = std::min(head.T, (chunk + 1) * kREFINE_CHUNK);
        int64_t const stop = std::min(end, chunkEnd);
        bool const whole = begin == chunk * kREFINE_CHUNK && stop == chunkEnd;
        best = std::max(best, whole ? head.chunkMaxima[chunk] : kernels.maximum(head.scores + begin, stop - begin));
        begin = stop;
    }
    return best;
}

//! reach > kREFINE_CHUNK: every window covers the whole chunk, so what is left is a running maximum to either side of
//! it, started from the maxima of chunks.
void farMaxima(
    RefineKernels const& kernels, HeadScores const& head, int64_t begin, int64_t end, int64_t reach, float* best)
{
    float left = rangeMaximum(kernels, head, end - 1 - reach, end);
    for (int64_t position = end - 1; position >= begin; --position)
    {
        int64_t const edge = position - reach;
        left = edge >= 0 && head.scores[edge] > left ? head.scores[edge] : left;
        best[position - begin] = left;
    }
    float right = rangeMaximum(kernels, head, end, begin + reach + 1);
    for (int64_t position = begin; position < end; ++position)
    {
        int64_t const edge = position + reach;
        right = edge < head.T && head.scores[edge] > right ? head.scores[edge] : right;
        best[position - begin] = std::max(best[position - begin], right);
    }
}

} // namespace

void windowMaxima(
    RefineKernels const& kernels, HeadScores const& head, int64_t begin, int64_t end, int64_t reach, float* best)
{
    int64_t const n = end - begin;
    if (reach > kREFINE_CHUNK)
    {
        farMaxima(kernels, head, begin, end, reach, best);
    }
    else if (begin >= reach && end + reach <= head.T)
    {
        kernels.windowMaximum(head.scores + begin, n, reach, best);
    }
    else
    {
        // Past the ends of the sequence lies -inf.
        float padded[3 * kREFINE_CHUNK];
        int64_t const first = std::max<int64_t>(0, begin - reach);
        int64_t const last = std::min(head.T, end + reach);
        float* const inside = padded + reach + first - begin;
        std::fill(padded, inside, -kINFINITY);
        std::copy(head.scores + first, head.scores + last, inside);
        std::fill(inside + (last - first), padded + n + 2 * reach, -kINFINITY);
        kernels.windowMaximum(padded + reach, n, reach, best);
    }
}

} // namespace hubkv
