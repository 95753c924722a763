// SPDX-License-Identifier: Apache-2.0
//
// refine: raw scores -> refined scores. hubkv.h states the formula and the order of every sum.
#pragma once

#include "common/workspace.h"
#include "hubkv/hubkv.h"

#include <cstdint>

namespace hubkv
{

constexpr int64_t kREFINE_CHUNK = 4096; // positions whose moments are summed together; part of the result's definition
constexpr int64_t kREFINE_LANES = 128;

//! Moments of one chunk's finite unprotected scores.
struct Moments
{
    double sum;     // of s
    double squares; // of s * s
    int64_t count;
};

//! c of one head. count: the positions that it is made of.
struct HeadVariation
{
    double c;
    int64_t count;
};

//! The workspace; every array is [L*Hkv, chunks] unless a shape stands beside it.
struct RefineWorkspace
{
    explicit RefineWorkspace(hubkv_refine_params const& params);

    int64_t chunks; // per head
    WorkspaceArray<Moments> moments;
    WorkspaceArray<float> maxima;
    WorkspaceArray<HeadVariation> variations; // [L*Hkv]
    WorkspaceArray<float> beta;               // [L*Hkv]
    int64_t bytes;
};

//! Arguments as in hubkv_refine, checked. window counts 0..T positions; nonFinite may be null.
void refineHost(hubkv_refine_params const& params, float const* scores, float alpha, int64_t window, float* refined,
    int64_t* nonFinite, void* workspace);

//! The same on a GPU: enqueued on `stream`, all data in device memory. A window outside 0..T is cut to it.
void refineCuda(void* stream, hubkv_refine_params const& params, float const* scores, float const* alpha,
    int32_t const* window, float* refined, int64_t* nonFinite, void* workspace);

} // namespace hubkv
