// SPDX-License-Identifier: Apache-2.0
//
// refine on the GPU, in the order of sums that hubkv.h states. Launches:
//   chunkMoments   float64 sums of every chunk                        reads the scores once
//   headWeights    sums of chunks -> c -> beta
//   refineScores   window maximum, formula, protection                reads the scores once, writes the refined scores
// For windows past the registers of a warp refineScoresWide does the last step, with maxima of whole chunks from
// chunkMaxima where a window is wider still. Compiled without contraction of a * b + c.
#include "refine/refine.h"

#include "refine/refine_device.h"

namespace hubkv
{
namespace
{

constexpr int32_t kTHREADS = 256;
constexpr int32_t kWARPS = kTHREADS / kWARP_SIZE;
constexpr int32_t kROWS = 4;      // rows of 128 scores that a warp refines
constexpr int32_t kTILE = 2048;   // scores that a block of refineScoresWide refines
constexpr int64_t kMAX_REACH = 4; // of refineScores

//! A warp's scores: position 0 of row 0 is `first`, at a 16-byte boundary; lane j reads 4j..4j+3 of each row of 128.
struct Rows
{
    float const* head; // scores [T]
    int64_t first;     // may lie before the sequence
};

//! This lane's four scores of a row; `missing` at positions outside begin..end-1.
__device__ float4 loadGuarded(Rows const& rows, int32_t row, int64_t begin, int64_t end, float missing)
{
    int64_t const position = rows.first + row * kREFINE_LANES + 4 * laneOf(threadIdx.x);
    if (position >= begin && position + 4 <= end)
    {
        return loadFloats(rows.head + position);
    }
    float4 scores = make_float4(missing, missing, missing, missing);
    scores.x = position + 0 >= begin && position + 0 < end ? rows.head[position + 0] : missing;
    scores.y = position + 1 >= begin && position + 1 < end ? rows.head[position + 1] : missing;
    scores.z = position + 2 >= begin && position + 2 < end ? rows.head[position + 2] : missing;
    scores.w = position + 3 >= begin && position + 3 < end ? rows.head[position + 3] : missing;
    return scores;
}

__device__ float4 loadRow(Rows const& rows, int32_t row)
{
    return loadFloats(rows.head + rows.first + row * kREFINE_LANES + 4 * laneOf(threadIdx.x));
}

// ---- moments ----

//! Four of the 128 lanes in which a chunk is summed.
struct LaneSums
{
    double sum[4];
    double squares[4];
    int32_t count;
};

__device__ void add(LaneSums& lanes, float4 scores)
{
    float const values[4] = {scores.x, scores.y, scores.z, scores.w};
#pragma unroll
    for (int32_t i = 0; i < 4; ++i)
    {
        bool const counted = isFinite(values[i]);
        // Adding +0 to a sum that started as +0 changes nothing: the same as skipping.
        double const value = counted ? static_cast<double>(values[i]) : 0.0;
        lanes.sum[i] = __dadd_rn(lanes.sum[i], value);
        lanes.squares[i] = __dadd_rn(lanes.squares[i], __dmul_rn(value, value));
        lanes.count += counted ? 1 : 0;
    }
}

//! Adds whole rows from `row` on, kBATCH at a time, as long as so many are left. A batch has its loads under way together.
template <int32_t kBATCH>
__device__ void addRows(LaneSums& lanes, Rows const& rows, int32_t& row, int32_t lastRow)
{
    for (; row + kBATCH <= lastRow; row += kBATCH)
    {
        float4 batch[kBATCH];
#pragma unroll
        for (int32_t i = 0; i < kBATCH; ++i)
        {
            batch[i] = loadRow(rows, row + i);
        }
#pragma unroll
        for (int32_t i = 0; i < kBATCH; ++i)
        {
            add(lanes, batch[i]);
        }
    }
}

//! Folds the 128 lanes by 64, 32, 16, 8, 4, 2, 1. Thread j holds lanes 4j..4j+3, or all lanes are shifted by the same
//! distance: a fold adds lanes that lie its width apart, on a ring too. Addition commutes, so both threads of a pair
//! have the sum; in the first two folds each keeps half of the lanes.
__device__ double fold(double const (&lanes)[4])
{
    int32_t const thread = laneOf(threadIdx.x);
    bool const high = (thread & 16) != 0;
    double const low0 = __shfl_xor_sync(kFULL_WARP, high ? lanes[0] : lanes[2], 16);
    double const low1 = __shfl_xor_sync(kFULL_WARP, high ? lanes[1] : lanes[3], 16);
    double const a = __dadd_rn(high ? lanes[2] : lanes[0], low0);
    double const b = __dadd_rn(high ? lanes[3] : lanes[1], low1);
    bool const odd = (thread & 8) != 0;
    double const other = __shfl_xor_sync(kFULL_WARP, odd ? a : b, 8);
    double sum = __dadd_rn(odd ? b : a, other);
    // 16, 8 and 4 lie 4, 2 and 1 threads apart; 2 and 1 lie where the first two folds parted the lanes.
    sum = __dadd_rn(sum, __shfl_xor_sync(kFULL_WARP, sum, 4));
    sum = __dadd_rn(sum, __shfl_xor_sync(kFULL_WARP, sum, 2));
    sum = __dadd_rn(sum, __shfl_xor_sync(kFULL_WARP, sum, 1));
    sum = __dadd_rn(sum, __shfl_xor_sync(kFULL_WARP, sum, 16));
    return __dadd_rn(sum, __shfl_xor_sync(kFULL_WARP, sum, 8));
}

//! One warp per chunk.
__global__ void __launch_bounds__(kTHREADS) chunkMoments(RefineArguments const arguments)
{
    int64_t const number = static_cast<int64_t>(blockIdx.x) * kWARPS + threadIdx.x / kWARP_SIZE;
    if (number >= arguments.heads * arguments.chunks || *arguments.alpha == 0.0F)
    {
        return;
    }
    int64_t const head = number / arguments.chunks;
    int64_t const chunk = (number - head * arguments.chunks) * kREFINE_CHUNK;
    int64_t const begin = max(chunk, arguments.firstUnprotected());
    int64_t const end = min(chunk + kREFINE_CHUNK, arguments.lastUnprotected());

    LaneSums lanes = {};
    if (begin < end)
    {
        float const* const scores = arguments.scores + head * arguments.T;
        Rows const rows{scores, chunk - floatsPastBoundary(scores)};
        int32_t const from = static_cast<int32_t>(begin - rows.first);
        int32_t const to = static_cast<int32_t>(end - rows.first);
        constexpr int32_t kROW = kREFINE_LANES;
        int32_t const firstWhole = (from + kROW - 1) / kROW;
        int32_t const lastWhole = to / kROW;
        float const none = __int_as_float(0x7fc00000); // NaN: moments skip it
        if (from % kROW != 0)
        {
            add(lanes, loadGuarded(rows, from / kROW, begin, end, none));
        }
        int32_t row = firstWhole;
        addRows<8>(lanes, rows, row, lastWhole);
        addRows<4>(lanes, rows, row, lastWhole);
        addRows<2>(lanes, rows, row, lastWhole);
        addRows<1>(lanes, rows, row, lastWhole);
        if (to % kROW != 0 && lastWhole >= firstWhole)
        {
            add(lanes, loadGuarded(rows, lastWhole, begin, end, none));
        }
    }
    double const sum = fold(lanes.sum);
    double const squares = fold(lanes.squares);
    int32_t const count = warpSum(lanes.count);
    if (laneOf(threadIdx.x) == 0)
    {
        arguments.moments[number] = Moments{sum, squares, count};
    }
}

// ---- head weights ----

__device__ HeadVariation variationOf(Moments const* chunks, int64_t count)
{
    Moments total{0.0, 0.0, 0};
#pragma unroll 8
    for (int64_t chunk = 0; chunk < count; ++chunk)
    {
        total.sum = __dadd_rn(total.sum, chunks[chunk].sum);
        total.squares = __dadd_rn(total.squares, chunks[chunk].squares);
        total.count += chunks[chunk].count;
    }
    if (total.count == 0)
    {
        return {0.0, 0};
    }
    double const n = static_cast<double>(total.count);
    double const mean = __ddiv_rn(total.sum, n);
    double const variance = __dsub_rn(__ddiv_rn(total.squares, n), __dmul_rn(mean, mean));
    return {__ddiv_rn(__dsqrt_rn(variance > 0.0 ? variance : 0.0), __dadd_rn(mean, 1e-6)), total.count};
}

//! ratio^temperature as hubkv.h fixes it.
__device__ double headPower(double ratio, float temperature)
{
    if (temperature == 0.5F)
    {
        return __dsqrt_rn(ratio);
    }
    if (temperature == 0.25F)
    {
        return __dsqrt_rn(__dsqrt_rn(ratio));
    }
    return pow(ratio, static_cast<double>(temperature));
}

//! One block per layer, one thread per head. Clears nonFinite, too.
__global__ void __launch_bounds__(kTHREADS) headWeights(RefineArguments const arguments)
{
    if (blockIdx.x == 0 && threadIdx.x == 0 && arguments.nonFinite != nullptr)
    {
        *arguments.nonFinite = 0;
    }
    int64_t const Hkv = arguments.Hkv;
    int64_t const firstHead = blockIdx.x * Hkv;
    bool const weighted = arguments.temperature != 0.0F && *arguments.alpha != 0.0F;
    HeadVariation* const variations = arguments.variations + firstHead;
    for (int64_t head = threadIdx.x; head < Hkv && weighted; head += kTHREADS)
    {
        variations[head] = variationOf(arguments.moments + (firstHead + head) * arguments.chunks, arguments.chunks);
    }
    __syncthreads();
    for (int64_t head = threadIdx.x; head < Hkv; head += kTHREADS)
    {
        float beta = 1.0F;
        if (weighted)
        {
            double total = 0.0;
            for (int64_t other = 0; other < Hkv; ++other)
            {
                total = __dadd_rn(total, variations[other].c);
            }
            double const mean = __ddiv_rn(total, static_cast<double>(Hkv));
            double const power = headPower(__ddiv_rn(variations[head].c, mean), arguments.temperature);
            if (mean != 0.0 && variations[head].count > 0 && power == power)
            {
                double const low = arguments.minHeadWeight;
                double const high = arguments.maxHeadWeight;
                beta = __double2float_rn(power < low ? low : high < power ? high : power);
            }
        }
        arguments.beta[firstHead + head] = beta;
    }
}

// ---- refined scores, windows of up to 9 ----

//! What the formula needs beside a score and its window's maximum.
struct Formula
{
    __device__ Formula(RefineArguments const& arguments, int64_t head)
        : gamma(arguments.gamma)
        , beta(arguments.beta[head])
        , alpha(*arguments.alpha)
        , firstUnprotected(arguments.firstUnprotected())
        , lastUnprotected(arguments.lastUnprotected())
    {
    }

    __device__ float operator()(float score, float best, int64_t position) const
    {
        if (position < firstUnprotected || position >= lastUnprotected)
        {
            return kINFINITY;
        }
        if (alpha == 0.0F || !isFinite(score))
        {
            return score;
        }
        float const q = score >= best ? score : __fmul_rn(gamma, score);
        return __fadd_rn(score, __fmul_rn(alpha, __fsub_rn(__fmul_rn(beta, q), score)));
    }

    float gamma;
    float beta;
    float alpha;
    int64_t firstUnprotected;
    int64_t lastUnprotected;
};

//! Adds a warp's count of scores that are not finite.
__device__ void countNonFinite(RefineArguments const& arguments, int32_t count)
{
    count = warpSum(count);
    if (count > 0 && laneOf(threadIdx.x) == 0 && arguments.nonFinite != nullptr)
    {
        atomicAdd(arguments.nonFinite, static_cast<unsigned long long>(count));
    }
}

//! rows[0] and rows[kROWS + 1] are read by one lane each, which hands them to its neighbour.
template <int kREACH>
__global__ void __launch_bounds__(kTHREADS) refineScores(RefineArguments const arguments)
{
    int64_t const number = static_cast<int64_t>(blockIdx.x) * kWARPS + threadIdx.x / kWARP_SIZE;
    int64_t const partsPerHead = arguments.partsPerHead(kROWS * kREFINE_LANES);
    if (number >= arguments.heads * partsPerHead)
    {
        return;
    }
    int64_t const T = arguments.T;
    int64_t const head = number / partsPerHead;
    float const* const scores = arguments.scores + head * T;
    float* const refined = arguments.refined + head * T;
    Rows const rows{scores, (number - head * partsPerHead) * (kROWS * kREFINE_LANES) - floatsPastBoundary(scores)};
    int32_t const lane = laneOf(threadIdx.x);
    bool const inside = rows.first >= 0 && rows.first + kROWS * kREFINE_LANES <= T;

    float4 loaded[kROWS + 2];
    if (inside)
    {
#pragma unroll
        for (int32_t row = 0; row < kROWS; ++row)
        {
            loaded[row + 1] = loadRow(rows, row);
        }
    }
    else
    {
#pragma unroll
        for (int32_t row = 0; row < kROWS; ++row)
        {
            loaded[row + 1] = loadGuarded(rows, row, 0, T, -kINFINITY);
        }
    }
    loaded[0] = make_float4(-kINFINITY, -kINFINITY, -kINFINITY, -kINFINITY);
    loaded[kROWS + 1] = loaded[0];
    if (kREACH > 0 && lane == kWARP_SIZE - 1)
    {
        loaded[0] = loadGuarded(rows, -1, 0, T, -kINFINITY);
    }
    if (kREACH > 0 && lane == 0)
    {
        loaded[kROWS + 1] = loadGuarded(rows, kROWS, 0, T, -kINFINITY);
    }

    Formula const formula(arguments, head);
    bool const vectors = inside && reinterpret_cast<uintptr_t>(refined + rows.first) % sizeof(float4) == 0;
    int32_t nonFinite = 0;
#pragma unroll
    for (int32_t row = 1; row <= kROWS; ++row)
    {
        float4 const here = loaded[row];
        // What lies in the lanes beside this one; those of the first and last lane lie in the rows beside.
        float4 const toRight = lane == kWARP_SIZE - 1 ? loaded[row - 1] : here;
        float4 const toLeft = lane == 0 ? loaded[row + 1] : here;
        float const right[4] = {toLeft.x, toLeft.y, toLeft.z, toLeft.w};
        float const left[4] = {toRight.x, toRight.y, toRight.z, toRight.w};
        float window[4 + 2 * kREACH] = {};
#pragma unroll
        for (int32_t i = 0; i < kREACH; ++i)
        {
            window[i] = __shfl_sync(kFULL_WARP, left[4 - kREACH + i], (lane + kWARP_SIZE - 1) % kWARP_SIZE);
            window[kREACH + 4 + i] = __shfl_sync(kFULL_WARP, right[i], (lane + 1) % kWARP_SIZE);
        }
        window[kREACH + 0] = here.x;
        window[kREACH + 1] = here.y;
        window[kREACH + 2] = here.z;
        window[kREACH + 3] = here.w;

        int64_t const position = rows.first + (row - 1) * kREFINE_LANES + 4 * lane;
        float results[4];
#pragma unroll
        for (int32_t i = 0; i < 4; ++i)
        {
            float best = -kINFINITY;
#pragma unroll
            for (int32_t j = 0; j <= 2 * kREACH; ++j)
            {
                best = fmaxf(best, window[i + j]); // the other one where one is NaN
            }
            float const score = window[kREACH + i];
            results[i] = formula(score, best, position + i);
            nonFinite += !isFinite(score) && position + i >= 0 && position + i < T ? 1 : 0;
        }
        if (vectors)
        {
            storeFloats(refined + position, make_float4(results[0], results[1], results[2], results[3]));
        }
        else
        {
#pragma unroll
            for (int32_t i = 0; i < 4; ++i)
            {
                if (position + i >= 0 && position + i < T)
                {
                    refined[position + i] = results[i];
                }
            }
        }
    }
    countNonFinite(arguments, nonFinite);
}

// ---- refined scores, wider windows ----

//! Maximum of every chunk, one warp each.
__global__ void __launch_bounds__(kTHREADS) chunkMaxima(RefineArguments const arguments)
{
    int64_t const number = static_cast<int64_t>(blockIdx.x) * kWARPS + threadIdx.x / kWARP_SIZE;
    if (number >= arguments.heads * arguments.chunks || *arguments.alpha == 0.0F)
    {
        return;
    }
    int64_t const head = number / arguments.chunks;
    int64_t const begin = (number - head * arguments.chunks) * kREFINE_CHUNK;
    int64_t const end = min(begin + kREFINE_CHUNK, arguments.T);
    float const* const scores = arguments.scores + head * arguments.T;
    float best = -kINFINITY;
    for (int64_t position = begin + laneOf(threadIdx.x); position < end; position += kWARP_SIZE)
    {
        best = fmaxf(best, scores[position]);
    }
    best = warpMaximum(best);
    if (laneOf(threadIdx.x) == 0)
    {
        arguments.maxima[number] = best;
    }
}

//! Fills span [total] so that the maximum of scores first+i .. first+i+width-1 is that of span[i] and
//! span[i + width - length], where length is the result: the largest power of two that is not above width.
__device__ int32_t slideMaximum(
    float* span, float const* scores, int64_t T, int64_t first, int32_t total, int32_t width)
{
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    for (int32_t i = thread; i < total; i += kTHREADS)
    {
        int64_t const position = first + i;
        span[i] = position >= 0 && position < T ? fmaxf(scores[position], -kINFINITY) : -kINFINITY;
    }
    __syncthreads();
    int32_t length = 1;
    for (; 2 * length <= width; length *= 2)
    {
        // In place and upwards: what a step reads ahead of itself has not been overwritten yet.
        int32_t const count = total - 2 * length + 1;
        for (int32_t from = 0; from < count; from += kTHREADS)
        {
            int32_t const i = from + thread;
            float const larger = i < count ? fmaxf(span[i], span[i + length]) : 0.0F;
            __syncthreads();
            if (i < count)
            {
                span[i] = larger;
            }
        }
        __syncthreads();
    }
    return length;
}

//! Maximum of scores begin..end-1 cut to the sequence, by all threads of the block; begin < end where cut.
__device__ float rangeMaximum(
    float const* scores, float const* maxima, int64_t T, int64_t begin, int64_t end, float* warpMaxima)
{
    begin = max(begin, static_cast<int64_t>(0));
    end = min(end, T);
    int64_t const firstChunk = (begin + kREFINE_CHUNK - 1) / kREFINE_CHUNK;
    int64_t const lastChunk = (end == T ? end + kREFINE_CHUNK - 1 : end) / kREFINE_CHUNK;
    bool const chunks = firstChunk < lastChunk;
    float best = -kINFINITY;
    int64_t const beforeChunks = chunks ? firstChunk * kREFINE_CHUNK : end;
    for (int64_t i = begin + threadIdx.x; i < beforeChunks; i += kTHREADS)
    {
        best = fmaxf(best, scores[i]);
    }
    if (chunks)
    {
        for (int64_t i = firstChunk + threadIdx.x; i < lastChunk; i += kTHREADS)
        {
            best = fmaxf(best, maxima[i]);
        }
        for (int64_t i = lastChunk * kREFINE_CHUNK + threadIdx.x; i < end; i += kTHREADS)
        {
            best = fmaxf(best, scores[i]);
        }
    }
    return blockMaximum<kTHREADS>(best, warpMaxima);
}

//! One block per tile of 2048 scores; any window.
__global__ void __launch_bounds__(kTHREADS) refineScoresWide(RefineArguments const arguments)
{
    __shared__ float span[2 * kTILE];
    __shared__ float warpMaxima[kWARPS];
    int64_t const T = arguments.T;
    int64_t const tilesPerHead = (T - 1) / kTILE + 1;
    int64_t const head = blockIdx.x / tilesPerHead;
    int64_t const begin = (blockIdx.x - head * tilesPerHead) * kTILE;
    int64_t const reach = arguments.reach;
    float const* const scores = arguments.scores + head * T;
    float* const refined = arguments.refined + head * T;
    int32_t const thread = static_cast<int32_t>(threadIdx.x);

    constexpr int32_t kEACH = kTILE / kTHREADS;
    float best[kEACH] = {};
    if (*arguments.alpha != 0.0F)
    {
        if (2 * reach + 1 < kTILE)
        {
            int32_t const width = static_cast<int32_t>(2 * reach + 1);
            int32_t const length = slideMaximum(span, scores, T, begin - reach, kTILE + width - 1, width);
#pragma unroll
            for (int32_t i = 0; i < kEACH; ++i)
            {
                float const* const from = span + thread + i * kTHREADS;
                best[i] = fmaxf(from[0], from[width - length]);
            }
        }
        else
        {
            // Every window is a part as long as the tile at either end, and between them what all windows share.
            float const shared = rangeMaximum(scores, arguments.maxima + head * arguments.chunks, T,
                begin + kTILE - 1 - reach, begin + reach + 1, warpMaxima);
            slideMaximum(span, scores, T, begin - reach, 2 * kTILE - 1, kTILE);
#pragma unroll
            for (int32_t i = 0; i < kEACH; ++i)
            {
                best[i] = fmaxf(shared, span[thread + i * kTHREADS]);
            }
            // A thread fills the places that it alone has just read: no barrier.
            slideMaximum(span, scores, T, begin + reach - kTILE + 1, 2 * kTILE - 1, kTILE);
#pragma unroll
            for (int32_t i = 0; i < kEACH; ++i)
            {
                best[i] = fmaxf(best[i], span[thread + i * kTHREADS]);
            }
        }
    }

    Formula const formula(arguments, head);
    int32_t nonFinite = 0;
#pragma unroll
    for (int32_t i = 0; i < kEACH; ++i)
    {
        int64_t const position = begin + thread + i * kTHREADS;
        if (position < T)
        {
            float const score = scores[position];
            refined[position] = formula(score, best[i], position);
            nonFinite += isFinite(score) ? 0 : 1;
        }
    }
    countNonFinite(arguments, nonFinite);
}

} // namespace

void refineCuda(void* cudaStream, hubkv_refine_params const& params, float const* scores, float const* alpha,
    int32_t const* window, float* refined, int64_t* nonFinite, void* workspace)
{
    Stream const stream = static_cast<Stream>(cudaStream);
    RefineArguments const arguments(params, scores, alpha, window, refined, nonFinite, workspace);
    dim3 const block(kTHREADS);
    dim3 const chunkGrid = gridFor("L * Hkv * T", arguments.heads * arguments.chunks, kWARPS);
    if (params.headWeightTemperature != 0.0F)
    {
        launch(chunkMoments, chunkGrid, block, 0, stream, arguments);
    }
    launch(headWeights, gridFor("L", params.L, 1), block, 0, stream, arguments);
    if (arguments.reach > kMAX_REACH)
    {
        if (2 * arguments.reach + 1 >= kTILE)
        {
            launch(chunkMaxima, chunkGrid, block, 0, stream, arguments);
        }
        int64_t const tiles = arguments.heads * ((params.T - 1) / kTILE + 1);
        launch(refineScoresWide, gridFor("L * Hkv * T", tiles, 1), block, 0, stream, arguments);
        return;
    }
    void (*const kernels[kMAX_REACH + 1])(RefineArguments) = {
        refineScores<0>, refineScores<1>, refineScores<2>, refineScores<3>, refineScores<4>};
    int64_t const warps = arguments.heads * arguments.partsPerHead(kROWS * kREFINE_LANES);
    launch(kernels[arguments.reach], gridFor("L * Hkv * T", warps, kWARPS), block, 0, stream, arguments);
}

} // namespace hubkv
