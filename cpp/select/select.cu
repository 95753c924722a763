// SPDX-License-Identifier: Apache-2.0
//
// select on the GPU: a radix select, then two steps that write the positions in order. Launches:
//   clearHistograms
//   countDigits x 3   histograms of 11, 11 and 10 bits of the keys          each reads the scores once
//   countTiles        scores above and at the threshold in every tile       reads the scores once
//   placeTiles        where each tile writes
//   writeTiles        positions of the kept scores                          reads the scores once
// All sums are of integers and all writes go to places that sums fix, so the order in which blocks run changes nothing.
#include "select/select.h"

#include "common/device.h"
#include "select/select_digits.h"

#include <algorithm>

namespace hubkv
{
namespace
{

constexpr int32_t kTILE_THREADS = 128; // of countTiles and writeTiles, a warp per tile
constexpr int32_t kPLACE_THREADS = 1024;
constexpr int64_t kDIGIT_BLOCKS = 1024; // of countDigits: about as many as a large GPU runs at once
constexpr int32_t kROW = 4 * kWARP_SIZE;
constexpr int32_t kROWS = kSELECT_TILE / kROW;

//! The scores of one warp: 2048 positions of a head from a 16-byte boundary on; it may reach past the head's ends.
struct Tile
{
    float const* head; // scores [T]
    int64_t T;
    int64_t first; // may be < 0

    __device__ Tile(SelectArguments const& arguments, int64_t group, int64_t number)
        : T(arguments.T)
    {
        int64_t const inGroup = number / arguments.tilesPerHead;
        head = arguments.scores + (group * arguments.H + inGroup) * T;
        first = (number - inGroup * arguments.tilesPerHead) * kSELECT_TILE - floatsPastBoundary(head);
    }

    __device__ bool inside() const
    {
        return first >= 0 && first + kSELECT_TILE <= T;
    }

    //! This lane's four keys of a row; 0 outside the head.
    __device__ uint4 keys(int32_t row, bool whole) const
    {
        int64_t const position = first + row * kROW + 4 * laneOf(threadIdx.x);
        if (whole || (position >= 0 && position + 4 <= T))
        {
            return keysOf(loadFloats(head + position));
        }
        uint4 keys = make_uint4(0, 0, 0, 0);
        keys.x = position + 0 >= 0 && position + 0 < T ? keyOfScore(head[position + 0]) : 0;
        keys.y = position + 1 >= 0 && position + 1 < T ? keyOfScore(head[position + 1]) : 0;
        keys.z = position + 2 >= 0 && position + 2 < T ? keyOfScore(head[position + 2]) : 0;
        keys.w = position + 3 >= 0 && position + 3 < T ? keyOfScore(head[position + 3]) : 0;
        return keys;
    }
};

__device__ uint32_t countTile(Tile const& tile, uint32_t threshold, bool whole)
{
    uint32_t count = 0;
#pragma unroll 8
    for (int32_t row = 0; row < kROWS; ++row)
    {
        uint4 const keys = tile.keys(row, whole);
        uint32_t const values[4] = {keys.x, keys.y, keys.z, keys.w};
#pragma unroll
        for (int32_t i = 0; i < 4; ++i)
        {
            count += values[i] > threshold ? 1u : 0u;
            count += values[i] == threshold ? 1u << 16 : 0u;
        }
    }
    return count;
}

__global__ void __launch_bounds__(kTILE_THREADS) countTiles(SelectArguments const arguments)
{
    int64_t const group = blockIdx.x / arguments.blocksPerGroup;
    int64_t const block = blockIdx.x - group * arguments.blocksPerGroup;
    SelectRank const rank = nextRank<kTILE_THREADS>(arguments, group, kSELECT_PASSES - 1);
    if (block == 0 && threadIdx.x == 0)
    {
        arguments.ranks[group * kSELECT_PASSES + kSELECT_PASSES - 1] = rank;
    }
    int64_t const tilesPerGroup = arguments.H * arguments.tilesPerHead;
    int64_t const number = block * (kTILE_THREADS / kWARP_SIZE) + threadIdx.x / kWARP_SIZE;
    if (number >= tilesPerGroup)
    {
        return;
    }
    Tile const tile(arguments, group, number);
    uint32_t const count =
        warpSum(tile.inside() ? countTile(tile, rank.digits, true) : countTile(tile, rank.digits, false));
    if (laneOf(threadIdx.x) == 0)
    {
        arguments.counts[group * tilesPerGroup + number] = count;
    }
}

//! One block per group. Scores at the threshold are kept in the order of positions until K are.
__global__ void __launch_bounds__(kPLACE_THREADS) placeTiles(SelectArguments const arguments)
{
    __shared__ long long warpSums[kPLACE_THREADS / kWARP_SIZE];
    int64_t const group = blockIdx.x;
    int64_t const tilesPerGroup = arguments.H * arguments.tilesPerHead;
    uint32_t const* const counts = arguments.counts + group * tilesPerGroup;
    SelectTile* const tiles = arguments.tiles + group * tilesPerGroup;
    int64_t const ties = arguments.ranks[group * kSELECT_PASSES + kSELECT_PASSES - 1].rank;

    int64_t const each = (tilesPerGroup + kPLACE_THREADS - 1) / kPLACE_THREADS;
    int64_t const begin = min(each * threadIdx.x, tilesPerGroup);
    int64_t const end = min(begin + each, tilesPerGroup);
    long long greater = 0;
    long long equal = 0;
#pragma unroll 8
    for (int64_t tile = begin; tile < end; ++tile)
    {
        uint32_t const count = counts[tile];
        greater += count & 0xffffu;
        equal += count >> 16;
    }
    long long greaterBefore = blockExclusiveSum<kPLACE_THREADS>(greater, warpSums);
    __syncthreads();
    long long equalBefore = blockExclusiveSum<kPLACE_THREADS>(equal, warpSums);
    for (int64_t tile = begin; tile < end; ++tile)
    {
        uint32_t const count = counts[tile];
        int64_t const equalHere = count >> 16;
        int64_t const tiesBefore = min(static_cast<int64_t>(equalBefore), ties);
        int64_t const tiesHere = min(equalHere, ties - tiesBefore);
        int64_t const offset = greaterBefore + tiesBefore;
        tiles[tile] = SelectTile{offset, static_cast<int32_t>(equalHere), static_cast<int32_t>(tiesHere)};
        if (tile % arguments.tilesPerHead == 0)
        {
            arguments.headOffsets[group * arguments.H + tile / arguments.tilesPerHead] = group * arguments.K + offset;
        }
        greaterBefore += count & 0xffffu;
        equalBefore += equalHere;
    }
    if (group == arguments.S - 1 && threadIdx.x == 0)
    {
        arguments.headOffsets[arguments.S * arguments.H] = arguments.S * arguments.K;
    }
}

//! Flags of the four positions of each lane, and how many flags come before this lane's in the warp.
struct Flags
{
    bool flags[4];
    int32_t before;
    int32_t total;

    __device__ void scan()
    {
        uint32_t const lower = (1u << laneOf(threadIdx.x)) - 1u;
        before = 0;
        total = 0;
#pragma unroll
        for (int32_t i = 0; i < 4; ++i)
        {
            uint32_t const lanes = __ballot_sync(kFULL_WARP, flags[i]);
            before += __popc(lanes & lower);
            total += __popc(lanes);
        }
    }
};

__global__ void __launch_bounds__(kTILE_THREADS) writeTiles(SelectArguments const arguments)
{
    int64_t const group = blockIdx.x / arguments.blocksPerGroup;
    int64_t const block = blockIdx.x - group * arguments.blocksPerGroup;
    int64_t const tilesPerGroup = arguments.H * arguments.tilesPerHead;
    int64_t const number = block * (kTILE_THREADS / kWARP_SIZE) + threadIdx.x / kWARP_SIZE;
    if (number >= tilesPerGroup)
    {
        return;
    }
    uint32_t const threshold = arguments.ranks[group * kSELECT_PASSES + kSELECT_PASSES - 1].digits;
    uint32_t const greater = arguments.counts[group * tilesPerGroup + number] & 0xffffu;
    SelectTile const place = arguments.tiles[group * tilesPerGroup + number];
    if (greater == 0 && place.ties == 0)
    {
        return;
    }
    Tile const tile(arguments, group, number);
    bool const whole = tile.inside();
    int32_t* out = arguments.positions + group * arguments.K + place.offset;
    // In at most one tile of a group some scores at the threshold are kept and some not.
    bool const someTies = place.ties != 0 && place.ties != place.equal;
    uint32_t const least = place.ties == 0 ? threshold + 1 : threshold;
    int32_t tiesLeft = place.ties;
#pragma unroll 4
    for (int32_t row = 0; row < kROWS; ++row)
    {
        uint4 const keys = tile.keys(row, whole);
        uint32_t const values[4] = {keys.x, keys.y, keys.z, keys.w};
        Flags kept;
#pragma unroll
        for (int32_t i = 0; i < 4; ++i)
        {
            kept.flags[i] = values[i] >= least;
        }
        if (someTies)
        {
            Flags ties;
#pragma unroll
            for (int32_t i = 0; i < 4; ++i)
            {
                ties.flags[i] = values[i] == threshold;
            }
            ties.scan();
            int32_t before = ties.before;
#pragma unroll
            for (int32_t i = 0; i < 4; ++i)
            {
                kept.flags[i] = values[i] > threshold || (ties.flags[i] && before < tiesLeft);
                before += ties.flags[i] ? 1 : 0;
            }
            tiesLeft -= ties.total;
        }
        kept.scan();
        int64_t const position = tile.first + row * kROW + 4 * laneOf(threadIdx.x);
        int32_t at = kept.before;
#pragma unroll
        for (int32_t i = 0; i < 4; ++i)
        {
            if (kept.flags[i])
            {
                out[at] = static_cast<int32_t>(position + i);
                ++at;
            }
        }
        out += kept.total;
    }
}

//! K = 0 and K = H * T: `rows`, 0 or T, of every head.
__global__ void __launch_bounds__(kTHREADS) allOrNothing(SelectArguments const arguments, int64_t rows)
{
    int64_t const heads = arguments.S * arguments.H;
    int64_t const step = static_cast<int64_t>(gridDim.x) * kTHREADS;
    int64_t const first = static_cast<int64_t>(blockIdx.x) * kTHREADS + threadIdx.x;
    for (int64_t head = first; head <= heads; head += step)
    {
        arguments.headOffsets[head] = head * rows;
    }
    for (int64_t row = first; row < heads * rows; row += step)
    {
        arguments.positions[row] = static_cast<int32_t>(row % rows);
    }
}

} // namespace

void selectCuda(void* cudaStream, hubkv_select_params const& params, float const* refined, int32_t* positions,
    int64_t* headOffsets, void* workspace)
{
    Stream const stream = static_cast<Stream>(cudaStream);
    SelectCudaWorkspace const layout(params);
    SelectArguments arguments{refined, positions, headOffsets, params.S, params.H, params.T, params.K,
        layout.tilesPerHead, 0, layout.histograms.in(workspace), layout.ranks.in(workspace),
        layout.counts.in(workspace), layout.tiles.in(workspace)};
    int64_t const scores = params.H * params.T;
    if (params.K == 0 || params.K == scores)
    {
        int64_t const rows = params.K == 0 ? 0 : params.T;
        int64_t const work = std::max(params.S * params.H + 1, params.S * params.K);
        dim3 const grid = gridFor("S * H * T", std::min(work, kDIGIT_BLOCKS * 8 * kTHREADS), kTHREADS);
        launch(allOrNothing, grid, dim3(kTHREADS), 0, stream, arguments, rows);
        return;
    }

    int64_t const vectors = params.S * kSELECT_PASSES * kBINS * 8 / static_cast<int64_t>(sizeof(uint4));
    launch(clearHistograms, gridFor("S", std::min(vectors, kDIGIT_BLOCKS * kTHREADS), kTHREADS), dim3(kTHREADS), 0,
        stream, reinterpret_cast<uint4*>(arguments.histograms), vectors);

    int64_t const parts = (scores + 3 + kBLOCK_SCORES - 1) / kBLOCK_SCORES;
    arguments.blocksPerGroup = std::min(parts, (kDIGIT_BLOCKS + params.S - 1) / params.S);
    dim3 const digitGrid = gridFor("S", params.S * arguments.blocksPerGroup, 1);
    launch(countDigits<0>, digitGrid, dim3(kTHREADS), 0, stream, arguments);
    launch(countDigits<1>, digitGrid, dim3(kTHREADS), 0, stream, arguments);
    launch(countDigits<2>, digitGrid, dim3(kTHREADS), 0, stream, arguments);

    constexpr int64_t kWARPS = kTILE_THREADS / kWARP_SIZE;
    arguments.blocksPerGroup = (params.H * layout.tilesPerHead + kWARPS - 1) / kWARPS;
    dim3 const tileGrid = gridFor("S * H * T", params.S * arguments.blocksPerGroup, 1);
    launch(countTiles, tileGrid, dim3(kTILE_THREADS), 0, stream, arguments);
    launch(placeTiles, gridFor("S", params.S, 1), dim3(kPLACE_THREADS), 0, stream, arguments);
    launch(writeTiles, tileGrid, dim3(kTILE_THREADS), 0, stream, arguments);
}

} // namespace hubkv
