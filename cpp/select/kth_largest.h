// SPDX-License-Identifier: Apache-2.0
//
// The k-th largest key, and a guess of where it lies.
#pragma once

#include "common/thread_pool.h"
#include "select/select.h"
#include "select/select_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>

namespace hubkv
{

//! How a group runs its loops: over the pool, or alone where groups themselves are spread over threads.
struct Loops
{
    bool parallel;

    template <typename Fn>
    void operator()(int64_t count, Fn&& fn) const
    {
        if (parallel)
        {
            parallelFor(count, fn);
            return;
        }
        for (int64_t i = 0; i < count; ++i)
        {
            fn(i);
        }
    }
};

//! Keys from low to high, both included.
struct KeyRange
{
    int32_t low;
    int32_t high;
};

//! Adds one to histogram[(key - base) >> shift] for every key of n values no further than span above base.
//! histogram [kSELECT_BINS] is cleared first. Keys below base wrap to large distances: one comparison checks both ends.
template <typename Value>
void countKeys(
    Value const* values, int64_t n, uint32_t base, uint32_t span, int32_t shift, int64_t* histogram, Loops loops)
{
    constexpr int64_t kTASK_KEYS = 1LL << 16;
    std::fill(histogram, histogram + kSELECT_BINS, 0);
    loops((n - 1) / kTASK_KEYS + 1,
        [&](int64_t task)
        {
            uint32_t counts[kSELECT_BINS] = {};
            int64_t const last = std::min(n, (task + 1) * kTASK_KEYS);
            for (int64_t i = task * kTASK_KEYS; i < last; ++i)
            {
                uint32_t const distance = static_cast<uint32_t>(keyOf(values[i])) - base;
                if (distance <= span)
                {
                    ++counts[distance >> shift];
                }
            }
            for (int64_t bin = 0; bin < kSELECT_BINS; ++bin)
            {
                if (counts[bin] != 0)
                {
                    __atomic_fetch_add(histogram + bin, static_cast<int64_t>(counts[bin]), __ATOMIC_RELAXED);
                }
            }
        });
}

//! The rank-th largest (from 1) of those keys of n values (scores or keys) that lie in the range, which must hold that
//! many: histograms from the high bits down, each over the bin of the one before.
template <typename Value>
int32_t kthLargest(Value const* values, int64_t n, KeyRange range, int64_t rank, int64_t* histogram, Loops loops)
{
    uint32_t base = static_cast<uint32_t>(range.low);
    uint32_t span = static_cast<uint32_t>(range.high) - base;
    while (span > 0)
    {
        int32_t shift = 0;
        while ((span >> shift) >= kSELECT_BINS)
        {
            ++shift;
        }
        countKeys(values, n, base, span, shift, histogram, loops);
        uint32_t bin = span >> shift;
        while (histogram[bin] < rank)
        {
            rank -= histogram[bin];
            --bin;
        }
        span = std::min(span - (bin << shift), (1u << shift) - 1u);
        base += bin << shift;
    }
    return static_cast<int32_t>(base);
}

//! A range that holds the K-th largest key of n scores almost surely: five standard deviations of the rank to either
//! side of it in a sample. n >= kSELECT_SAMPLE; sample [kSELECT_SAMPLE] is scratch.
inline KeyRange sampleBracket(float const* scores, int64_t n, int64_t K, int32_t* sample, Loops loops)
{
    constexpr int64_t kTASKS = 16;
    int64_t const stride = n / kSELECT_SAMPLE;
    loops(kTASKS,
        [&](int64_t task)
        {
            for (int64_t i = task * kSELECT_SAMPLE / kTASKS; i < (task + 1) * kSELECT_SAMPLE / kTASKS; ++i)
            {
                // Scattered within the stride: scores may repeat with a period.
                uint64_t const hash = static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15u >> 32;
                sample[i] = keyOf(scores[i * stride + static_cast<int64_t>(hash % static_cast<uint64_t>(stride))]);
            }
        });
    double const share = static_cast<double>(K) / static_cast<double>(n);
    double const rank = share * kSELECT_SAMPLE;
    double const margin = 5.0 * std::sqrt(rank * (1.0 - share)) + 8.0;
    KeyRange range{INT32_MIN, INT32_MAX};
    int32_t* const end = sample + kSELECT_SAMPLE;
    int32_t* rest = sample;
    if (rank >= margin)
    {
        rest = sample + static_cast<int64_t>(rank - margin);
        std::nth_element(sample, rest, end, std::greater<int32_t>());
        range.high = *rest;
    }
    if (rank + margin < kSELECT_SAMPLE)
    {
        int32_t* const lowest = sample + static_cast<int64_t>(rank + margin);
        std::nth_element(rest, lowest, end, std::greater<int32_t>());
        range.low = *lowest;
    }
    return range;
}

} // namespace hubkv
