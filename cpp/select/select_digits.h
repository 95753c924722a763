// SPDX-License-Identifier: Apache-2.0
//
// select on the GPU, first half: the key of the K-th largest score of each group, digit by digit. Included by select.cu
// alone.
#pragma once

#include "common/device.h"
#include "select/key.h"
#include "select/select.h"

namespace hubkv
{
namespace
{

constexpr int32_t kTHREADS = 256; // of countDigits
constexpr int32_t kBINS = kSELECT_BINS;
constexpr int32_t kBLOCK_SCORES = 4096; // that a block of countDigits reads at a time

struct SelectArguments
{
    float const* scores;  // [S, H, T]
    int32_t* positions;   // [S * K]
    int64_t* headOffsets; // [S * H + 1]
    int64_t S;
    int64_t H;
    int64_t T;
    int64_t K;
    int64_t tilesPerHead;
    int64_t blocksPerGroup; // of the kernel that is launched
    unsigned long long* histograms;
    SelectRank* ranks;
    uint32_t* counts;
    SelectTile* tiles;
};

//! Unsigned, so that digits compare as keys do. Every key of a score is > 0.
__device__ uint32_t keyOfScore(float score)
{
    return static_cast<uint32_t>(keyOfBits(__float_as_int(score))) ^ 0x80000000u;
}

__device__ uint4 keysOf(float4 scores)
{
    return make_uint4(keyOfScore(scores.x), keyOfScore(scores.y), keyOfScore(scores.z), keyOfScore(scores.w));
}

//! Bits below the digit of a pass.
__device__ constexpr int32_t shiftOf(int32_t pass)
{
    return pass == 0 ? 21 : pass == 1 ? 10 : 0;
}

__device__ constexpr int32_t bitsOfPass(int32_t pass)
{
    return pass < 2 ? 11 : 10;
}

__global__ void __launch_bounds__(kTHREADS) clearHistograms(uint4* histograms, int64_t count)
{
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kTHREADS + threadIdx.x; i < count;
        i += static_cast<int64_t>(gridDim.x) * kTHREADS)
    {
        histograms[i] = make_uint4(0, 0, 0, 0);
    }
}

//! The rank after one more digit, by all threads of a block: the histogram of the pass, from its largest digit down.
template <int32_t kBLOCK>
__device__ SelectRank nextRank(SelectArguments const& arguments, int64_t group, int32_t pass)
{
    __shared__ long long warpSums[kBLOCK / kWARP_SIZE];
    __shared__ SelectRank found;
    constexpr int32_t kEACH = kBINS / kBLOCK;
    SelectRank const known =
        pass == 0 ? SelectRank{0, 0, arguments.K} : arguments.ranks[group * kSELECT_PASSES + pass - 1];
    unsigned long long const* const histogram = arguments.histograms + (group * kSELECT_PASSES + pass) * kBINS;
    int32_t const highest = kBINS - 1 - kEACH * static_cast<int32_t>(threadIdx.x);
    long long counts[kEACH];
    long long sum = 0;
#pragma unroll
    for (int32_t i = 0; i < kEACH; ++i)
    {
        counts[i] = static_cast<long long>(histogram[highest - i]);
        sum += counts[i];
    }
    long long const before = blockExclusiveSum<kBLOCK>(sum, warpSums);
    if (before < known.rank && known.rank <= before + sum)
    {
        long long rank = known.rank - before;
        int32_t digit = highest;
#pragma unroll
        for (int32_t i = 0; i + 1 < kEACH; ++i)
        {
            // Once the digit is found the rank is within its count.
            if (highest - i == digit && counts[i] < rank)
            {
                rank -= counts[i];
                --digit;
            }
        }
        found = SelectRank{known.digits << bitsOfPass(pass) | static_cast<uint32_t>(digit), 0, rank};
    }
    __syncthreads();
    return found;
}

//! Adds four keys to a histogram. Equal digits in a row are added at once: scores that are alike lie together.
template <int32_t kPASS>
__device__ void tally(uint32_t* histogram, uint4 keys, uint32_t digits)
{
    constexpr int32_t kSHIFT = shiftOf(kPASS);
    constexpr int32_t kBITS = bitsOfPass(kPASS);
    uint32_t const values[4] = {keys.x, keys.y, keys.z, keys.w};
    uint32_t run = 0;
    uint32_t digit = 0;
#pragma unroll
    for (int32_t i = 0; i < 4; ++i)
    {
        bool const counted = values[i] != 0 && (kPASS == 0 || values[i] >> (kSHIFT + kBITS) % 32 == digits);
        uint32_t const next = values[i] >> kSHIFT & ((1u << kBITS) - 1u);
        if (run > 0 && (next != digit || !counted))
        {
            atomicAdd(histogram + digit, run);
            run = 0;
        }
        digit = next;
        run += counted ? 1 : 0;
    }
    if (run > 0)
    {
        atomicAdd(histogram + digit, run);
    }
}

//! Counts the digits of a pass among the keys that start with the digits known. Block p of a group reads every
//! blocksPerGroup-th part of its scores.
template <int32_t kPASS>
__global__ void __launch_bounds__(kTHREADS) countDigits(SelectArguments const arguments)
{
    __shared__ uint32_t histogram[kBINS];
    int64_t const group = blockIdx.x / arguments.blocksPerGroup;
    int64_t const block = blockIdx.x - group * arguments.blocksPerGroup;
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    for (int32_t bin = thread; bin < kBINS; bin += kTHREADS)
    {
        histogram[bin] = 0;
    }
    uint32_t digits = 0;
    if (kPASS > 0)
    {
        SelectRank const rank = nextRank<kTHREADS>(arguments, group, kPASS - 1);
        digits = rank.digits;
        if (block == 0 && thread == 0)
        {
            arguments.ranks[group * kSELECT_PASSES + kPASS - 1] = rank;
        }
    }
    __syncthreads();

    int64_t const count = arguments.H * arguments.T;
    float const* const scores = arguments.scores + group * count;
    int64_t const shifted = floatsPastBoundary(scores);
    constexpr int32_t kVECTORS = kBLOCK_SCORES / (4 * kTHREADS);
    for (int64_t part = block * kBLOCK_SCORES - shifted; part < count; part += arguments.blocksPerGroup * kBLOCK_SCORES)
    {
        if (part >= 0 && part + kBLOCK_SCORES <= count)
        {
            float4 vectors[kVECTORS];
#pragma unroll
            for (int32_t i = 0; i < kVECTORS; ++i)
            {
                vectors[i] = loadFloats(scores + part + 4 * (i * kTHREADS + thread));
            }
#pragma unroll
            for (int32_t i = 0; i < kVECTORS; ++i)
            {
                tally<kPASS>(histogram, keysOf(vectors[i]), digits);
            }
            continue;
        }
        for (int32_t i = thread; i < kBLOCK_SCORES; i += kTHREADS)
        {
            int64_t const position = part + i;
            bool const inside = position >= 0 && position < count;
            tally<kPASS>(histogram, make_uint4(inside ? keyOfScore(scores[position]) : 0, 0, 0, 0), digits);
        }
    }
    __syncthreads();
    unsigned long long* const sums = arguments.histograms + (group * kSELECT_PASSES + kPASS) * kBINS;
    for (int32_t bin = thread; bin < kBINS; bin += kTHREADS)
    {
        if (histogram[bin] != 0)
        {
            atomicAdd(sums + bin, static_cast<unsigned long long>(histogram[bin]));
        }
    }
}

} // namespace
} // namespace hubkv
