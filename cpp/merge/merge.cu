// SPDX-License-Identifier: Apache-2.0
//
// merge on the GPU. A block takes a group: its threads look up 128 members at a time, then each sums two elements of their
// keys and values.
#include "merge/merge.h"

#include "attend/attend_elements.h"
#include "common/candidates.h"
#include "common/device.h"

namespace hubkv
{
namespace
{

constexpr int32_t kTHREADS = 128;
constexpr int32_t kWARPS = kTHREADS / kWARP_SIZE;
constexpr int32_t kELEMENTS = 2; // of a thread: D <= 256

//! Members that the block has at hand.
template <typename T>
struct Members
{
    T const* k[kTHREADS];
    T const* v[kTHREADS];
    float logit[kTHREADS]; // -inf: no member
    float bias[kTHREADS];
};

template <typename T>
__global__ void __launch_bounds__(kTHREADS)
    mergeGroups(hubkv_rewrite_params const params, float const* const logits, RewriteArrays const arrays)
{
    __shared__ Members<T> members;
    __shared__ float maxima[kWARPS];
    __shared__ int32_t last;
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    int32_t const D = static_cast<int32_t>(params.candidates.cache.D);
    int64_t const number = blockIdx.x / params.mergedRows;
    int64_t const group = blockIdx.x - number * params.mergedRows;
    CacheView const cache(params.candidates.cache, arrays.arena);
    HeadCandidates const candidates(params.candidates, cache, arrays.segments, arrays.blockTable, number);
    Evicted const evicted(params, arrays, number, candidates.count());
    int64_t const begin = evicted.groupStart(group, params.mergedRows);
    int64_t const end = evicted.groupStart(group + 1, params.mergedRows);

    if (thread == 0)
    {
        last = -1;
    }
    __syncthreads();
    float largest = kNO_LOGIT;
    int32_t lastHere = -1;
    for (int64_t e = begin + thread; e < end; e += kTHREADS)
    {
        int64_t const i = evicted.at(e);
        CandidateRow const row = candidates.row(i);
        if (row.k != nullptr && row.bias > kNO_LOGIT)
        {
            largest = fmaxf(largest, fmaxf(logits[candidates.first + i], kLEAST_LOGIT));
            lastHere = static_cast<int32_t>(i);
        }
    }
    atomicMax(&last, lastHere);
    largest = blockMaximum<kTHREADS>(largest, maxima);

    float key[kELEMENTS] = {};
    float value[kELEMENTS] = {};
    float sum = 0.F;
    float bias = 0.F;
    for (int64_t first = begin; first < end; first += kTHREADS)
    {
        __syncthreads(); // the members before have been read
        members.logit[thread] = kNO_LOGIT;
        if (first + thread < end)
        {
            int64_t const i = evicted.at(first + thread);
            CandidateRow const row = candidates.row(i);
            members.k[thread] = reinterpret_cast<T const*>(row.k);
            members.v[thread] = reinterpret_cast<T const*>(row.v);
            members.bias[thread] = row.bias;
            if (row.k != nullptr && row.bias > kNO_LOGIT)
            {
                members.logit[thread] = fmaxf(logits[candidates.first + i], kLEAST_LOGIT);
            }
        }
        __syncthreads();
        int32_t const count = static_cast<int32_t>(min(int64_t{kTHREADS}, end - first));
        for (int32_t m = 0; m < count; ++m)
        {
            float const below = members.logit[m] - largest;
            float const weight = members.logit[m] > kNO_LOGIT ? expf(below) : 0.F;
            if (weight == 0.F)
            {
                continue;
            }
            sum += weight;
            bias = fmaf(weight, members.bias[m] - below, bias);
#pragma unroll
            for (int32_t i = 0; i < kELEMENTS; ++i)
            {
                int32_t const d = i * kTHREADS + thread;
                if (d < D)
                {
                    key[i] = fmaf(weight, Elements<T>::load(globalAddress(members.k[m] + d)), key[i]);
                    value[i] = fmaf(weight, Elements<T>::load(globalAddress(members.v[m] + d)), value[i]);
                }
            }
        }
    }

    int64_t const rows = max(int64_t{0}, min(arrays.headOffsets[number + 1], params.keptRows));
    int64_t const to = rows + number * params.mergedRows + group;
    bool const empty = last < 0;
    float const share = empty ? 0.F : 1.F / sum;
#pragma unroll
    for (int32_t i = 0; i < kELEMENTS; ++i)
    {
        int32_t const d = i * kTHREADS + thread;
        if (d < D)
        {
            Elements<T>::store(static_cast<T*>(arrays.kRows) + to * D + d, key[i] * share);
            Elements<T>::store(static_cast<T*>(arrays.vRows) + to * D + d, value[i] * share);
        }
    }
    if (thread == 0)
    {
        arrays.newPositions[to] = empty ? 0 : arrays.candidatePositions[candidates.first + last];
        arrays.rowBias[to] = empty ? kNO_LOGIT : fmaf(bias, share, logf(sum));
    }
}

} // namespace

void mergeCuda(void* cudaStream, hubkv_rewrite_params const& params, float const* logits, RewriteArrays const& arrays)
{
    Stream const stream = static_cast<Stream>(cudaStream);
    hubkv_cache_params const& cache = params.candidates.cache;
    dim3 const grid = gridFor("L * Hkv * mergedRows", cache.L * cache.Hkv * params.mergedRows, 1);
    auto const kernel = cache.dtype == HUBKV_FLOAT32 ? mergeGroups<float>
        : cache.dtype == HUBKV_FLOAT16               ? mergeGroups<Float16>
                                                     : mergeGroups<BFloat16>;
    launch(kernel, grid, dim3(kTHREADS), 0, stream, params, logits, arrays);
}

} // namespace hubkv
