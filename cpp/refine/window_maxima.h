// SPDX-License-Identifier: Apache-2.0
//
// Maxima over the window around every position of a chunk, at the ends of the sequence and for windows of any width.
#pragma once

#include "refine/refine_kernels.h"

#include <cstdint>

namespace hubkv
{

//! The scores that windows look at.
struct HeadScores
{
    float const* scores; // [T]
    int64_t T;
    float const* chunkMaxima; // [chunks]; read only where reach > kREFINE_CHUNK
};

//! best[i] = max of scores[j] over |j - (begin + i)| <= reach, j in 0..T-1, NaN as -inf, for the positions begin..end-1
//! of one chunk.
void windowMaxima(
    RefineKernels const& kernels, HeadScores const& head, int64_t begin, int64_t end, int64_t reach, float* best);

} // namespace hubkv
