// SPDX-License-Identifier: Apache-2.0
//
// select_ragged on the GPU. A block takes a head: it counts the rows of the heads before, bisects its threshold over keys
// with a count over the block at each step, then goes over its candidates in order and writes those that are kept.
#include "select_ragged/select_ragged.h"

#include "common/device.h"

namespace hubkv
{
namespace
{

constexpr int32_t kTHREADS = 256;
constexpr int32_t kWARPS = kTHREADS / kWARP_SIZE;

//! Sum over the block, in every thread. warpSums [kWARPS] is shared and may be in use up to the call.
__device__ int64_t blockSum(int64_t value, int64_t* warpSums)
{
    __syncthreads();
    value = warpSum(value);
    if (laneOf(threadIdx.x) == 0)
    {
        warpSums[threadIdx.x / kWARP_SIZE] = value;
    }
    __syncthreads();
    value = 0;
    for (int32_t warp = 0; warp < kWARPS; ++warp)
    {
        value += warpSums[warp];
    }
    return value;
}

//! The candidates of the block's head.
struct Candidates
{
    float const* scores;
    int32_t const* positions;
    int64_t count;
    int32_t sinkTokens;

    __device__ int32_t key(int64_t i) const
    {
        return rankKey(scores[i], positions[i], sinkTokens);
    }

    __device__ int64_t atLeast(int64_t key, int64_t* warpSums) const
    {
        int64_t above = 0;
        for (int64_t i = threadIdx.x; i < count; i += kTHREADS)
        {
            above += this->key(i) >= key ? 1 : 0;
        }
        return blockSum(above, warpSums);
    }
};

__device__ int64_t rowsOfHead(hubkv_select_ragged_params const& params, SelectRaggedArrays const& arrays, int64_t head)
{
    int64_t const candidates = HeadEntries(arrays.candidateOffsets, head, params.N).count;
    return max(int64_t{0}, min(static_cast<int64_t>(arrays.counts[head]), candidates));
}

__global__ void __launch_bounds__(kTHREADS)
    selectHeads(hubkv_select_ragged_params const params, SelectRaggedArrays const arrays)
{
    __shared__ int64_t warpSums[kWARPS];
    __shared__ int64_t chunkSum;
    int64_t const head = blockIdx.x;
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    int64_t before = 0;
    for (int64_t other = thread; other < head; other += kTHREADS)
    {
        before += rowsOfHead(params, arrays, other);
    }
    before = blockSum(before, warpSums);
    int64_t const first = min(params.K, before);
    int64_t const rows = min(params.K, before + rowsOfHead(params, arrays, head)) - first;
    if (thread == 0)
    {
        arrays.headOffsets[head] = first;
    }
    if (head == params.H - 1)
    {
        if (thread == 0)
        {
            arrays.headOffsets[params.H] = first + rows;
        }
        for (int64_t row = first + rows + thread; row < params.K; row += kTHREADS)
        {
            arrays.indices[row] = -1;
        }
    }
    if (rows == 0)
    {
        return;
    }

    HeadEntries const entries(arrays.candidateOffsets, head, params.N);
    Candidates const candidates{
        arrays.scores + entries.first, arrays.candidatePositions + entries.first, entries.count, params.sinkTokens};
    // At least `rows` keys are >= low, fewer are >= high.
    int64_t low = INT32_MIN;
    int64_t high = int64_t{kPROTECTED_KEY} + 1;
    while (high - low > 1)
    {
        int64_t const middle = (low + high) >> 1;
        (candidates.atLeast(middle, warpSums) >= rows ? low : high) = middle;
    }
    int64_t const greater = candidates.atLeast(high, warpSums);
    int64_t const ties = rows - greater;

    // What lies before a candidate: 2^32 * those above the threshold + those at it.
    int64_t past = 0;
    __syncthreads(); // warpSums has been read
    for (int64_t begin = 0; begin < candidates.count; begin += kTHREADS)
    {
        int64_t const i = begin + thread;
        int32_t const key = i < candidates.count ? candidates.key(i) : INT32_MIN;
        int64_t const mine = i < candidates.count ? (key > low ? int64_t{1} << 32 : key == low ? 1 : 0) : 0;
        int64_t const here = past + blockExclusiveSum<kTHREADS>(mine, warpSums);
        if (thread == kTHREADS - 1)
        {
            chunkSum = here + mine;
        }
        __syncthreads();
        past = chunkSum;
        int64_t const tiesBefore = here & 0xffffffff;
        if (mine > 1 || (mine == 1 && tiesBefore < ties))
        {
            arrays.indices[first + (here >> 32) + min(tiesBefore, ties)] = static_cast<int32_t>(i);
        }
    }
}

} // namespace

void selectRaggedCuda(void* cudaStream, hubkv_select_ragged_params const& params, SelectRaggedArrays const& arrays)
{
    launch(selectHeads, gridFor("H", params.H, 1), dim3(kTHREADS), 0, static_cast<Stream>(cudaStream), params, arrays);
}

} // namespace hubkv
