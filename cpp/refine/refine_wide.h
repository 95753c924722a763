// SPDX-License-Identifier: Apache-2.0
//
// refine on the GPU for windows that do not fit in the registers of a warp.
#pragma once

#include "refine/refine_device.h"

namespace hubkv
{
namespace
{

constexpr int32_t kTILE = 2048; // scores that a block refines

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
} // namespace hubkv
