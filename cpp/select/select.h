// SPDX-License-Identifier: Apache-2.0
//
// select: refined scores -> positions of the K largest of each group. hubkv.h states order and ties.
#pragma once

#include "common/workspace.h"
#include "hubkv/hubkv.h"

#include <cstdint>

namespace hubkv
{

constexpr int64_t kSELECT_CHUNK = 4096; // positions of one head that are counted and written together
constexpr int64_t kSELECT_BINS = 2048;  // of a histogram pass: 11 bits of the key
constexpr int64_t kSELECT_SAMPLE = 16384;

//! What is known of a chunk. Counted first; then offset and `equal` say what it writes.
struct SelectChunk
{
    int64_t offset;     // of its candidates, then of its rows in the group
    int32_t candidates; // scores in the bracket
    int32_t greater;    // scores above the threshold
    int32_t equal;      // scores at the threshold, then those of them that are kept
};

//! Scratch of one group; the groups lie one after another, bytesPerGroup apart.
struct SelectWorkspace
{
    explicit SelectWorkspace(hubkv_select_params const& params);

    int64_t chunksPerHead;
    int64_t candidateCapacity; // 0: the group is too small to be worth a sample
    WorkspaceArray<SelectChunk> chunks;
    WorkspaceArray<int64_t> histogram; // [kSELECT_BINS]
    WorkspaceArray<int32_t> sample;    // [kSELECT_SAMPLE] or none
    WorkspaceArray<int32_t> candidates;
    int64_t bytesPerGroup;
    int64_t bytes;
};

//! Arguments as in hubkv_select, checked.
void selectHost(
    hubkv_select_params const& params, float const* refined, int32_t* positions, int64_t* headOffsets, void* workspace);

// ---- on a GPU ----

constexpr int64_t kSELECT_TILE = 2048; // positions of one head that a warp counts and writes
constexpr int64_t kSELECT_PASSES = 3;  // digits of a key: 11, 11 and 10 bits

//! What is known of the K-th largest key of a group after some digits.
struct SelectRank
{
    uint32_t digits; // the leading ones
    int32_t unused;
    int64_t rank; // among the keys that start with them, from 1
};

//! Where the rows of a tile go.
struct SelectTile
{
    int64_t offset; // rows before it in the group
    int32_t equal;  // scores at the threshold
    int32_t ties;   // of them, those that are kept
};

struct SelectCudaWorkspace
{
    explicit SelectCudaWorkspace(hubkv_select_params const& params);

    int64_t tilesPerHead;
    WorkspaceArray<unsigned long long> histograms; // [S, kSELECT_PASSES, kSELECT_BINS]
    WorkspaceArray<SelectRank> ranks;              // [S, kSELECT_PASSES]
    WorkspaceArray<uint32_t> counts;  // [S, H, tilesPerHead] scores above the threshold, 65536 * those at it
    WorkspaceArray<SelectTile> tiles; // [S, H, tilesPerHead]
    int64_t bytes;
};

//! The same on a GPU: enqueued on `stream`, all data in device memory.
void selectCuda(void* stream, hubkv_select_params const& params, float const* refined, int32_t* positions,
    int64_t* headOffsets, void* workspace);

} // namespace hubkv
