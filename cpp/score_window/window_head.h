// SPDX-License-Identifier: Apache-2.0
//
// The last queries of one head and the rows that they look at: what the host's score_window and held_out_loss share.
#pragma once

#include "common/candidates.h"

#include <cstdint>

namespace hubkv
{

constexpr int64_t kWINDOW_QUERIES = 32; // W * G is padded to a multiple of this
constexpr int64_t kWINDOW_ROWS = 64;    // rows that are gone over together

struct WindowHead
{
    HeadCandidates const& candidates;
    void const* q; // query 0 of the window, first query head of the kv head
    int64_t W;
    int64_t G;
    int64_t tokenStride; // elements
    int64_t D;
    float scale; // in units of log 2
    float* packed;
    float* maxima;
    float* sums;
};

} // namespace hubkv
