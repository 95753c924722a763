// SPDX-License-Identifier: Apache-2.0
//
// What a warp of attend does: it goes over rows of K and V, 16 bytes a lane, and keeps the softmax of a few queries
// over them as a running maximum, sum and weighted sum of values.
//
// The lanes of a warp are cut into groups; a group reads whole rows, each lane the same columns of every row, and has a
// softmax of its own until the end. Logits are in units of log 2, so that weights are powers of two.
#pragma once

#include "attend/attend_elements.h"
#include "common/cache_view.h"
#include "common/device.h"

#include <cstdint>

namespace hubkv
{

constexpr float kLOG2_E = 1.44269504F;

// ---- rows ----

//! Rows 0..count-1 to attend to: at equal distances, or tail tokens in pages.
struct AttendRows
{
    int32_t count;
    int32_t causalGroup;      // G where query n sees rows 0..n / G alone; 0: every query sees all rows
    int32_t firstToken;       // which tail token row 0 is
    int32_t const* pageTable; // of tail tokens, else null
    char const* keys;         // of row 0
    int64_t stride;           // bytes from row to row
    int64_t valueOffset;      // bytes from the key of a row to its value
    float const* bias;        // [count] or null
};

//! Finds tail tokens of one (layer, kv head).
struct TailView
{
    CacheView const& cache;
    int64_t layer;
    int64_t head;
};

// ---- the softmax of kQUERIES queries over the rows that a group of lanes has seen ----

//! kLANES lanes read a row, kVECTORS vectors each: vector c of a lane is vector c * kLANES + lane of the row. A lane
//! whose vector lies past the row's end has zeros there.
template <typename T, int32_t kLANES, int32_t kVECTORS, int32_t kQUERIES>
class WarpSoftmax
{
public:
    static constexpr int32_t kGROUPS = kWARP_SIZE / kLANES;
    static constexpr int32_t kIN_VECTOR = Elements<T>::kIN_VECTOR;
    static constexpr int32_t kCOLUMNS = kVECTORS * kIN_VECTOR;                        // of a lane
    static constexpr int32_t kPADDED_DIM = kLANES * kCOLUMNS;                         // >= D
    static constexpr int32_t kROWS = kVECTORS == 1 && kQUERIES * 4 <= kLANES ? 4 : 2; // of a group in a step
    static constexpr int32_t kSTEP = kROWS * kGROUPS;
    static constexpr int32_t kLOGITS = kQUERIES * kROWS; // of a group in a step
    static constexpr int32_t kREPEATS = kLANES / kLOGITS;
    static_assert(kREPEATS >= 1, "a lane has one logit");

    __device__ WarpSoftmax()
    {
#pragma unroll
        for (int32_t n = 0; n < kQUERIES; ++n)
        {
#pragma unroll
            for (int32_t i = 0; i < kCOLUMNS; ++i)
            {
                mValues[n][i] = 0.F;
            }
        }
    }

    //! Where column d of a query lies in the shared memory that add() reads: a lane's fours of columns lie kLANES fours
    //! apart, so that all lanes of a row read consecutive memory.
    static __device__ int32_t queryColumn(int32_t d)
    {
        int32_t const vector = d / kIN_VECTOR;
        int32_t const four = vector / kLANES * (kIN_VECTOR / 4) + d % kIN_VECTOR / 4;
        return (four * kLANES + vector % kLANES) * 4 + d % 4;
    }

    //! Attends to the rows that step `slice` of every `slices` steps has. queries [kQUERIES, kPADDED_DIM] are shared,
    //! scaled; firstQuery is the number of the first among the queries of its kv head. All lanes take part.
    __device__ void add(AttendRows const& rows, TailView const& tail, float const* queries, int32_t firstQuery,
        int32_t slice, int32_t slices)
    {
        int32_t const lane = laneOf(threadIdx.x);
        int32_t const column = lane % kLANES;
        uint32_t const group = static_cast<uint32_t>(lane / kLANES);
        int32_t const ownRow = column / kREPEATS % kROWS; // of this lane's logit
        int32_t const ownQuery = column / kREPEATS / kROWS;
        int32_t const rowVectors = static_cast<int32_t>(tail.cache.rowBytes / 16);
#pragma unroll 1
        for (uint32_t first = static_cast<uint32_t>(slice * kSTEP); first < static_cast<uint32_t>(rows.count);
            first += static_cast<uint32_t>(slices * kSTEP))
        {
            char const* keys[kROWS];
            find(rows, tail, first + group, keys);
            uint4 k[kROWS][kVECTORS];
            uint4 v[kROWS][kVECTORS];
#pragma unroll
            for (int32_t r = 0; r < kROWS; ++r)
            {
#pragma unroll
                for (int32_t c = 0; c < kVECTORS; ++c)
                {
                    int32_t const vector = c * kLANES + column;
                    k[r][c] = uint4{0, 0, 0, 0};
                    v[r][c] = uint4{0, 0, 0, 0};
                    if (keys[r] != nullptr && vector < rowVectors)
                    {
                        k[r][c] = loadReadOnly<16>(keys[r] + vector * 16);
                        v[r][c] = loadReadOnly<16>(keys[r] + rows.valueOffset + vector * 16);
                    }
                }
            }
            // Never past 2^31 rows in truth; it keeps the compiler from holding all queries in registers.
            float logit = dots(k, queries + column * 4 + (first >> 31));
            uint32_t const row = first + group + static_cast<uint32_t>(ownRow) * kGROUPS;
            bool seen = row < static_cast<uint32_t>(rows.count);
#pragma unroll
            for (int32_t r = 0; r < kROWS; ++r)
            {
                seen = seen && (r != ownRow || keys[r] != nullptr);
            }
            // A row past the query's token: row > query / G, without the division.
            uint32_t const seenFrom = row * static_cast<uint32_t>(rows.causalGroup);
            seen = seen && seenFrom <= static_cast<uint32_t>(firstQuery + ownQuery);
            if (seen && rows.bias != nullptr)
            {
                logit = fmaf(rows.bias[row], kLOG2_E, logit);
            }
            float const weight = weigh(seen ? logit : kNO_LOGIT);
#pragma unroll
            for (int32_t r = 0; r < kROWS; ++r)
            {
                float weights[kQUERIES];
#pragma unroll
                for (int32_t n = 0; n < kQUERIES; ++n)
                {
                    weights[n] = __shfl_sync(kFULL_WARP, weight, (n * kROWS + r) * kREPEATS, kLANES);
                }
#pragma unroll
                for (int32_t c = 0; c < kVECTORS; ++c)
                {
                    float values[kIN_VECTOR];
                    Elements<T>::widen(v[r][c], values);
#pragma unroll
                    for (int32_t n = 0; n < kQUERIES; ++n)
                    {
#pragma unroll
                        for (int32_t i = 0; i < kIN_VECTOR; ++i)
                        {
                            float& sum = mValues[n][c * kIN_VECTOR + i];
                            sum = fmaf(weights[n], values[i], sum);
                        }
                    }
                }
            }
        }
    }

    //! Merges the groups of the warp; all lanes have the result.
    __device__ void mergeGroups()
    {
        float sum = mOwnSum;
#pragma unroll
        for (int32_t step = kREPEATS; step < kREPEATS * kROWS; step *= 2)
        {
            sum += __shfl_xor_sync(kFULL_WARP, sum, step);
        }
#pragma unroll
        for (int32_t n = 0; n < kQUERIES; ++n)
        {
            mMaximum[n] = __shfl_sync(kFULL_WARP, mOwnMaximum, n * kROWS * kREPEATS, kLANES);
            mSum[n] = __shfl_sync(kFULL_WARP, sum, n * kROWS * kREPEATS, kLANES);
        }
#pragma unroll
        for (int32_t step = kLANES; step < kWARP_SIZE; step *= 2)
        {
#pragma unroll
            for (int32_t n = 0; n < kQUERIES; ++n)
            {
                float const maximum = fmaxf(mMaximum[n], __shfl_xor_sync(kFULL_WARP, mMaximum[n], step));
                float const weight = exp2f(mMaximum[n] - shiftOf(maximum));
                mMaximum[n] = maximum;
                float const ofGroup = mSum[n] * weight;
                mSum[n] = ofGroup + __shfl_xor_sync(kFULL_WARP, ofGroup, step);
#pragma unroll
                for (int32_t i = 0; i < kCOLUMNS; ++i)
                {
                    float const value = mValues[n][i] * weight;
                    mValues[n][i] = value + __shfl_xor_sync(kFULL_WARP, value, step);
                }
            }
        }
    }

    //! After mergeGroups(). maxima and sums [kQUERIES], values [kQUERIES, D].
    __device__ void store(float* maxima, float* sums, float* values, int32_t D) const
    {
        int32_t const lane = laneOf(threadIdx.x);
        if (lane >= kLANES)
        {
            return;
        }
#pragma unroll
        for (int32_t n = 0; n < kQUERIES; ++n)
        {
            if (lane == 0)
            {
                maxima[n] = mMaximum[n];
                sums[n] = mSum[n];
            }
#pragma unroll
            for (int32_t c = 0; c < kVECTORS; ++c)
            {
                int32_t const d = (c * kLANES + lane) * kIN_VECTOR;
                if (d < D)
                {
#pragma unroll
                    for (int32_t i = 0; i < kIN_VECTOR; ++i)
                    {
                        values[n * D + d + i] = mValues[n][c * kIN_VECTOR + i];
                    }
                }
            }
        }
    }

private:
    //! Addresses of rows first, first + kGROUPS, ...: null where a tail token has no page; past the end, the last row.
    static __device__ void find(
        AttendRows const& rows, TailView const& tail, uint32_t first, char const* (&keys)[kROWS])
    {
        uint32_t const last = static_cast<uint32_t>(rows.count) - 1;
        if (rows.pageTable == nullptr)
        {
#pragma unroll
            for (int32_t r = 0; r < kROWS; ++r)
            {
                keys[r] = rows.keys + min(first + r * kGROUPS, last) * rows.stride;
            }
            return;
        }
        uint32_t const P = static_cast<uint32_t>(tail.cache.P);
#pragma unroll
        for (int32_t r = 0; r < kROWS; ++r)
        {
            uint32_t const token = static_cast<uint32_t>(rows.firstToken) + min(first + r * kGROUPS, last);
            uint32_t const page = token / P;
            char const* const head = tail.cache.tailKeys(rows.pageTable, page, tail.layer, tail.head);
            keys[r] = head != nullptr ? head + (token - page * P) * rows.stride : nullptr;
        }
    }

    //! q . k of this lane's own query and row.
    static __device__ float dots(uint4 const (&k)[kROWS][kVECTORS], float const* queries)
    {
        float logits[kLOGITS]; // [kQUERIES, kROWS], of this lane's columns
        constexpr int32_t kFOURS = kIN_VECTOR / 4;
#pragma unroll
        for (int32_t four = 0; four < kCOLUMNS / 4; ++four)
        {
            float keys[kROWS][kIN_VECTOR];
#pragma unroll
            for (int32_t r = 0; r < kROWS; ++r)
            {
                Elements<T>::widen(k[r][four / kFOURS], keys[r]);
            }
#pragma unroll
            for (int32_t n = 0; n < kQUERIES; ++n)
            {
                float4 const q = loadFloats(queries + n * kPADDED_DIM + four * kLANES * 4);
#pragma unroll
                for (int32_t r = 0; r < kROWS; ++r)
                {
                    float const* const key = keys[r] + four % kFOURS * 4;
                    float& logit = logits[n * kROWS + r];
                    float const before = four == 0 ? 0.F : logit;
                    logit = fmaf(q.w, key[3], fmaf(q.z, key[2], fmaf(q.y, key[1], fmaf(q.x, key[0], before))));
                }
            }
        }
        // Lanes add up in pairs, and each of a pair goes on with one half of the logits.
        int32_t const lane = laneOf(threadIdx.x);
        int32_t count = kLOGITS;
#pragma unroll
        for (int32_t step = kLANES / 2; step > 0; step /= 2)
        {
            if (count == 1)
            {
                logits[0] += __shfl_xor_sync(kFULL_WARP, logits[0], step);
                continue;
            }
            count /= 2;
            bool const upper = (lane & step) != 0;
#pragma unroll
            for (int32_t i = 0; i < kLOGITS / 2; ++i)
            {
                if (i < count)
                {
                    float const given = upper ? logits[i] : logits[i + count];
                    float const kept = upper ? logits[i + count] : logits[i];
                    logits[i] = kept + __shfl_xor_sync(kFULL_WARP, given, step);
                }
            }
        }
        return logits[0];
    }

    //! Turns this lane's logit into a weight under the new maximum of its query, and what was summed before along with
    //! it.
    __device__ float weigh(float logit)
    {
        float maximum = fmaxf(mOwnMaximum, logit);
#pragma unroll
        for (int32_t step = kREPEATS; step < kREPEATS * kROWS; step *= 2)
        {
            maximum = fmaxf(maximum, __shfl_xor_sync(kFULL_WARP, maximum, step));
        }
        float const shift = shiftOf(maximum);
        float const kept = exp2f(mOwnMaximum - shift);
        float const weight = exp2f(logit - shift);
        mOwnMaximum = maximum;
        mOwnSum = fmaf(mOwnSum, kept, weight);
#pragma unroll
        for (int32_t n = 0; n < kQUERIES; ++n)
        {
            float const keptOfQuery = __shfl_sync(kFULL_WARP, kept, n * kROWS * kREPEATS, kLANES);
#pragma unroll
            for (int32_t i = 0; i < kCOLUMNS; ++i)
            {
                mValues[n][i] *= keptOfQuery;
            }
        }
        return weight;
    }

    // While rows come in: of this lane's own query, all rows of the group (maximum), this lane's rows (sum).
    float mOwnMaximum = kNO_LOGIT;
    float mOwnSum = 0.F;
    // After mergeGroups().
    float mMaximum[kQUERIES];
    float mSum[kQUERIES];
    float mValues[kQUERIES][kCOLUMNS];
};

} // namespace hubkv
