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
#include "refine/refine_moments.h"
#include "refine/refine_wide.h"

namespace hubkv
{
namespace
{

constexpr int32_t kROWS = 4;      // rows of 128 scores that a warp refines
constexpr int64_t kMAX_REACH = 4; // of refineScores

//! Refines kROWS rows of a head. kWHOLE: they lie inside the head, and the results at 16-byte boundaries, too.
template <int kREACH, bool kWHOLE>
__device__ void refineRows(RefineArguments const& arguments, int64_t head, Rows const& rows)
{
    int64_t const T = arguments.T;
    float* const refined = arguments.refined + head * T;
    int32_t const lane = laneOf(threadIdx.x);

    // The rows to either side are read by one lane each, which hands them to its neighbour.
    float4 loaded[kROWS + 2];
#pragma unroll
    for (int32_t row = 0; row < kROWS; ++row)
    {
        loaded[row + 1] = kWHOLE ? loadRow(rows, row) : loadGuarded(rows, row, 0, T, -kINFINITY);
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
            bool const inside = kWHOLE || (position + i >= 0 && position + i < T);
            nonFinite += inside && !isFinite(score) ? 1 : 0;
            if (!kWHOLE && inside)
            {
                refined[position + i] = results[i];
            }
        }
        if (kWHOLE)
        {
            storeFloats(refined + position, make_float4(results[0], results[1], results[2], results[3]));
        }
    }
    countNonFinite(arguments, nonFinite);
}

//! One warp per kROWS rows.
template <int kREACH>
__global__ void __launch_bounds__(kTHREADS) refineScores(RefineArguments const arguments)
{
    int64_t const number = static_cast<int64_t>(blockIdx.x) * kWARPS + threadIdx.x / kWARP_SIZE;
    int64_t const partsPerHead = arguments.partsPerHead(kROWS * kREFINE_LANES);
    if (number >= arguments.heads * partsPerHead)
    {
        return;
    }
    int64_t const head = number / partsPerHead;
    float const* const scores = arguments.scores + head * arguments.T;
    Rows const rows{scores, (number - head * partsPerHead) * (kROWS * kREFINE_LANES) - floatsPastBoundary(scores)};
    bool const inside = rows.first >= 0 && rows.first + kROWS * kREFINE_LANES <= arguments.T;
    if (inside && floatsPastBoundary(arguments.refined + head * arguments.T) == floatsPastBoundary(scores))
    {
        refineRows<kREACH, true>(arguments, head, rows);
    }
    else
    {
        refineRows<kREACH, false>(arguments, head, rows);
    }
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
