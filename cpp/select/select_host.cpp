// SPDX-License-Identifier: Apache-2.0
//
// select on the host. A group is done in four steps:
//   1. a sample of the scores gives a bracket of keys that holds the K-th largest almost surely;
//   2. one reading counts the scores above the bracket in every chunk and keeps the keys inside it (about 4%);
//   3. histograms of these keys give the threshold, exactly; where the bracket was wrong or full, because values
//      repeat, histograms of all scores give it;
//   4. sums over the chunks say where each one writes; a second reading writes the positions.
// Every step is a count of integers or happens in the order of positions: threads change nothing in the result.
#include "select/select.h"

#include "common/cpu.h"
#include "common/thread_pool.h"
#include "select/kth_largest.h"
#include "select/select_kernels.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>

namespace hubkv
{
namespace
{

constexpr int64_t kTASK_CHUNKS = 8;
constexpr int64_t kSMALL_GROUP = 1LL << 16;

class SelectGroup
{
public:
    SelectGroup(hubkv_select_params const& params, SelectWorkspace const& layout, float const* scores, char* workspace,
        Loops loops)
        : mKernels(selectKernels(cpuIsa()))
        , mH(params.H)
        , mT(params.T)
        , mK(params.K)
        , mScores(scores)
        , mChunksPerHead(layout.chunksPerHead)
        , mChunkCount(params.H * layout.chunksPerHead)
        , mCapacity(layout.candidateCapacity)
        , mChunks(layout.chunks.in(workspace))
        , mHistogram(layout.histogram.in(workspace))
        , mSample(layout.sample.in(workspace))
        , mCandidates(layout.candidates.in(workspace))
        , mLoops(loops)
    {
    }

    //! positions [K]; headOffsets [H], rows counted from firstRow.
    void run(int32_t* positions, int64_t* headOffsets, int64_t firstRow)
    {
        if (mK == 0 || mK == mH * mT)
        {
            allOrNothing(positions, headOffsets, firstRow);
            return;
        }
        if (mCapacity == 0 || !findInBracket())
        {
            mThreshold = kthLargest(mScores, mH * mT, {INT32_MIN, INT32_MAX}, mK, mHistogram, mLoops);
            countChunks();
        }
        placeChunks(headOffsets, firstRow);
        writeChunks(positions);
    }

private:
    void allOrNothing(int32_t* positions, int64_t* headOffsets, int64_t firstRow) const
    {
        int64_t const rows = mK == 0 ? 0 : mT;
        mLoops(mH,
            [&](int64_t head)
            {
                headOffsets[head] = firstRow + head * rows;
                if (rows > 0)
                {
                    std::iota(positions + head * mT, positions + (head + 1) * mT, 0);
                }
            });
    }

    //! Calls fn(chunk record, its scores, their number, its first position) for all chunks.
    template <typename Fn>
    void forEachChunk(Fn&& fn) const
    {
        mLoops((mChunkCount - 1) / kTASK_CHUNKS + 1,
            [&](int64_t task)
            {
                int64_t const last = std::min(mChunkCount, (task + 1) * kTASK_CHUNKS);
                for (int64_t number = task * kTASK_CHUNKS; number < last; ++number)
                {
                    int64_t const head = number / mChunksPerHead;
                    int64_t const first = (number - head * mChunksPerHead) * kSELECT_CHUNK;
                    int64_t const n = std::min(kSELECT_CHUNK, mT - first);
                    fn(mChunks[number], mScores + head * mT + first, n, static_cast<int32_t>(first));
                }
            });
    }

    //! Steps 1 to 3. False where the bracket does not lead to the threshold.
    bool findInBracket()
    {
        KeyRange const bracket = sampleBracket(mScores, mH * mT, mK, mSample, mLoops);
        if (bracket.low == bracket.high)
        {
            mThreshold = bracket.low;
            countChunks();
            int64_t greater = 0;
            int64_t equal = 0;
            for (int64_t i = 0; i < mChunkCount; ++i)
            {
                greater += mChunks[i].greater;
                equal += mChunks[i].equal;
            }
            return greater < mK && mK <= greater + equal;
        }

        std::atomic<int64_t> above{0};
        std::atomic<int64_t> inside{0};
        forEachChunk(
            [&](SelectChunk& chunk, float const* scores, int64_t n, int32_t)
            {
                chunk.candidates = 0;
                if (inside.load(std::memory_order_relaxed) > mCapacity)
                {
                    return;
                }
                int32_t keys[kSELECT_CHUNK + kSELECT_PADDING];
                chunk.candidates = mKernels.bracket(scores, n, bracket.low, bracket.high, keys, chunk.greater);
                chunk.offset = inside.fetch_add(chunk.candidates, std::memory_order_relaxed);
                above.fetch_add(chunk.greater, std::memory_order_relaxed);
                if (chunk.offset + chunk.candidates <= mCapacity)
                {
                    std::memcpy(
                        mCandidates + chunk.offset, keys, static_cast<size_t>(chunk.candidates) * sizeof(int32_t));
                }
            });
        int64_t const rank = mK - above.load();
        if (inside.load() > mCapacity || rank <= 0 || rank > inside.load())
        {
            return false;
        }
        mThreshold = kthLargest(mCandidates, inside.load(), bracket, rank, mHistogram, mLoops);
        forEachChunk(
            [&](SelectChunk& chunk, float const*, int64_t, int32_t)
            {
                int32_t const* const keys = mCandidates + chunk.offset;
                chunk.equal = 0;
                for (int32_t i = 0; i < chunk.candidates; ++i)
                {
                    chunk.greater += keys[i] > mThreshold ? 1 : 0;
                    chunk.equal += keys[i] == mThreshold ? 1 : 0;
                }
            });
        return true;
    }

    void countChunks() const
    {
        forEachChunk(
            [&](SelectChunk& chunk, float const* scores, int64_t n, int32_t)
            {
                chunk.greater = 0;
                chunk.equal = 0;
                mKernels.count(scores, n, mThreshold, chunk.greater, chunk.equal);
            });
    }

    //! Where each chunk writes. Scores at the threshold are kept in the order of positions until K are.
    void placeChunks(int64_t* headOffsets, int64_t firstRow) const
    {
        int64_t ties = mK;
        for (int64_t i = 0; i < mChunkCount; ++i)
        {
            ties -= mChunks[i].greater;
        }
        int64_t row = 0;
        for (int64_t i = 0; i < mChunkCount; ++i)
        {
            if (i % mChunksPerHead == 0)
            {
                headOffsets[i / mChunksPerHead] = firstRow + row;
            }
            SelectChunk& chunk = mChunks[i];
            chunk.offset = row;
            chunk.candidates = chunk.equal;
            chunk.equal = static_cast<int32_t>(std::min<int64_t>(chunk.equal, ties));
            ties -= chunk.equal;
            row += chunk.greater + chunk.equal;
        }
    }

    void writeChunks(int32_t* positions) const
    {
        forEachChunk(
            [&](SelectChunk& chunk, float const* scores, int64_t n, int32_t first)
            {
                int32_t kept[kSELECT_CHUNK + kSELECT_PADDING];
                int32_t const count = chunk.greater + chunk.equal;
                if (count == 0)
                {
                    return;
                }
                if (chunk.equal == 0 || chunk.equal == chunk.candidates)
                {
                    // No key is above that of +inf, so one more does not overflow.
                    mKernels.gather(scores, n, chunk.equal == 0 ? mThreshold + 1 : mThreshold, first, kept);
                }
                else
                {
                    gatherSomeTies(scores, n, chunk.equal, first, kept);
                }
                std::memcpy(positions + chunk.offset, kept, static_cast<size_t>(count) * sizeof(int32_t));
            });
    }

    void gatherSomeTies(float const* scores, int64_t n, int32_t ties, int32_t first, int32_t* kept) const
    {
        int32_t count = 0;
        for (int64_t i = 0; i < n; ++i)
        {
            int32_t const key = keyOf(scores[i]);
            bool const tie = key == mThreshold && ties > 0;
            ties -= tie ? 1 : 0;
            kept[count] = first + static_cast<int32_t>(i);
            count += key > mThreshold || tie ? 1 : 0;
        }
    }

    SelectKernels const& mKernels;
    int64_t mH;
    int64_t mT;
    int64_t mK;
    float const* mScores; // [H, T]
    int64_t mChunksPerHead;
    int64_t mChunkCount;
    int64_t mCapacity;
    SelectChunk* mChunks;
    int64_t* mHistogram;
    int32_t* mSample;
    int32_t* mCandidates;
    Loops mLoops;
    int32_t mThreshold = 0; // key of the K-th largest score
};

} // namespace

void selectHost(
    hubkv_select_params const& params, float const* refined, int32_t* positions, int64_t* headOffsets, void* workspace)
{
    SelectWorkspace const layout(params);
    bool const spreadGroups = params.S > 1 && (params.S >= 2 * numThreads() || params.H * params.T <= kSMALL_GROUP);
    Loops const groups{spreadGroups};
    Loops const inside{!spreadGroups};
    groups(params.S,
        [&](int64_t group)
        {
            SelectGroup select(params, layout, refined + group * params.H * params.T,
                static_cast<char*>(workspace) + group * layout.bytesPerGroup, inside);
            select.run(positions + group * params.K, headOffsets + group * params.H, group * params.K);
        });
    headOffsets[params.S * params.H] = params.S * params.K;
}

} // namespace hubkv
