// SPDX-License-Identifier: Apache-2.0
//
// Many queries per kv head (several new tokens, large groups): bound by arithmetic. Lanes run over the queries, so the
// softmax needs no sum across lanes; both products are the same small matrix kernel with numbers of K or V
// broadcast against registers of queries or weights. Included inside a target region, see kernels.h.
#pragma once

namespace hubkv
{

//! The state of a tile. Everything has lanes = queries as its last dimension.
template <typename L>
struct TileState
{
    static constexpr int32_t kWIDTH = L::kLANES * L::kTILE_REGS;
    alignas(64) float q[kMAX_HEAD_DIM * kWIDTH];        // [D, kWIDTH] times scale
    alignas(64) float values[kMAX_HEAD_DIM * kWIDTH];   // [D, kWIDTH]
    alignas(64) float logits[kMAX_BLOCK_ROWS * kWIDTH]; // [rows, kWIDTH], then the weights
    alignas(64) float maximum[kWIDTH];
    alignas(64) float sum[kWIDTH];
    alignas(64) float correction[kWIDTH];
};

//! logits [padded, kWIDTH] = q . k + bias
template <typename L, int NR>
void tileDots(RowBlock const& block, char const* const* rows, int64_t D, TileState<L>& state)
{
    using Reg = typename L::Reg;
    constexpr int32_t kWIDTH = TileState<L>::kWIDTH;
    for (int32_t r = 0; r < block.padded; r += L::kTILE_ROWS)
    {
        float const* k[L::kTILE_ROWS];
        Reg sums[L::kTILE_ROWS][NR];
        for (int i = 0; i < L::kTILE_ROWS; ++i)
        {
            k[i] = reinterpret_cast<float const*>(rows[r + i]);
            for (int n = 0; n < NR; ++n)
            {
                sums[i][n] = L::zero();
            }
        }
        for (int64_t d = 0; d < D; ++d)
        {
            Reg query[NR];
            for (int n = 0; n < NR; ++n)
            {
                query[n] = L::load(state.q + d * kWIDTH + n * L::kLANES);
            }
            for (int i = 0; i < L::kTILE_ROWS; ++i)
            {
                Reg const key = L::set(k[i][d]);
                for (int n = 0; n < NR; ++n)
                {
                    sums[i][n] = L::fma(key, query[n], sums[i][n]);
                }
            }
        }
        // The bias comes last: sums that start from it would carry its rounding errors.
        for (int i = 0; i < L::kTILE_ROWS; ++i)
        {
            Reg const bias = L::set(block.bias[r + i]);
            for (int n = 0; n < NR; ++n)
            {
                L::store(state.logits + (r + i) * kWIDTH + n * L::kLANES, L::add(sums[i][n], bias));
            }
        }
    }
}

//! Query i, at new token i / G, sees new tokens up to its own.
template <typename L>
void tileMask(Tile const& tile, RowBlock const& block, TileState<L>& state)
{
    for (int32_t r = block.firstNew; r < block.rows; ++r)
    {
        int64_t const firstQuery = (block.newToken + (r - block.firstNew)) * tile.q.G - tile.first;
        int64_t const blind = firstQuery < tile.count ? firstQuery : tile.count;
        for (int64_t i = 0; i < blind; ++i)
        {
            state.logits[r * TileState<L>::kWIDTH + i] = kNO_LOGIT;
        }
    }
}

//! Logits to weights; maximum, sum and correction for each lane.
template <typename L, int NR>
void tileSoftmax(RowBlock const& block, TileState<L>& state)
{
    using Reg = typename L::Reg;
    constexpr int32_t kWIDTH = TileState<L>::kWIDTH;
    for (int n = 0; n < NR; ++n)
    {
        float* const logits = state.logits + n * L::kLANES;
        Reg const before = L::load(state.maximum + n * L::kLANES);
        Reg largest = before;
        for (int32_t r = 0; r < block.rows; ++r)
        {
            largest = L::max(L::load(logits + r * kWIDTH), largest);
        }
        L::store(state.maximum + n * L::kLANES, largest);
        // Where every logit is -inf the lowest number stands in for the maximum: -inf minus it is -inf, not NaN.
        Reg const shift = L::max(largest, L::set(-__FLT_MAX__));
        Reg sums = L::zero();
        for (int32_t r = 0; r < block.rows; ++r)
        {
            Reg const weight = exp2<L>(L::sub(L::load(logits + r * kWIDTH), shift));
            L::store(logits + r * kWIDTH, weight);
            sums = L::add(sums, weight);
        }
        Reg const correction = exp2<L>(L::sub(before, shift));
        L::store(state.correction + n * L::kLANES, correction);
        Reg const sum = L::load(state.sum + n * L::kLANES);
        L::store(state.sum + n * L::kLANES, L::fma(sum, correction, sums));
    }
}

//! values [D, kWIDTH] = values * correction + v . weights
template <typename L, int NR>
void tileValues(RowBlock const& block, char const* const* rows, int64_t D, TileState<L>& state)
{
    using Reg = typename L::Reg;
    constexpr int32_t kWIDTH = TileState<L>::kWIDTH;
    Reg correction[NR];
    for (int n = 0; n < NR; ++n)
    {
        correction[n] = L::load(state.correction + n * L::kLANES);
    }
    for (int64_t d = 0; d < D; d += L::kTILE_ROWS)
    {
        Reg sums[L::kTILE_ROWS][NR];
        for (int i = 0; i < L::kTILE_ROWS; ++i)
        {
            for (int n = 0; n < NR; ++n)
            {
                sums[i][n] = L::mul(L::load(state.values + (d + i) * kWIDTH + n * L::kLANES), correction[n]);
            }
        }
        for (int32_t r = 0; r < block.rows; ++r)
        {
            float const* const v = reinterpret_cast<float const*>(rows[r]) + d;
            Reg weight[NR];
            for (int n = 0; n < NR; ++n)
            {
                weight[n] = L::load(state.logits + r * kWIDTH + n * L::kLANES);
            }
            for (int i = 0; i < L::kTILE_ROWS; ++i)
            {
                Reg const value = L::set(v[i]);
                for (int n = 0; n < NR; ++n)
                {
                    sums[i][n] = L::fma(value, weight[n], sums[i][n]);
                }
            }
        }
        for (int i = 0; i < L::kTILE_ROWS; ++i)
        {
            for (int n = 0; n < NR; ++n)
            {
                L::store(state.values + (d + i) * kWIDTH + n * L::kLANES, sums[i][n]);
            }
        }
    }
}

//! Rows as float32: the cache's own where it is float32, else a copy in `scratch`.
template <typename L, typename T>
struct FloatRows
{
    alignas(64) float scratch[kMAX_BLOCK_ROWS * kMAX_HEAD_DIM];
    char const* rows[kMAX_BLOCK_ROWS];

    char const* const* convert(char const* const* from, int32_t count, int64_t D)
    {
        for (int32_t r = 0; r < count; ++r)
        {
            T const* const row = reinterpret_cast<T const*>(from[r]);
            float* const to = scratch + r * D;
            int64_t d = 0;
            for (; d + L::kLANES <= D; d += L::kLANES)
            {
                L::store(to + d, L::loadElements(row + d));
            }
            for (; d < D; ++d)
            {
                to[d] = toFloat(row[d]);
            }
            rows[r] = reinterpret_cast<char const*>(to);
        }
        return rows;
    }
};

template <typename L>
struct FloatRows<L, float>
{
    char const* const* convert(char const* const* from, int32_t, int64_t)
    {
        return from;
    }
};

template <typename L, typename T, int NR>
void attendTile(Tile const& tile, RowStream& rows, TileState<L>& state)
{
    FloatRows<L, T> floats;
    RowBlock blocks[2];
    int current = 0;
    int64_t const rowBytes = tile.q.D * static_cast<int64_t>(sizeof(T));
    bool more = rows.next(blocks[0], kMAX_BLOCK_ROWS);
    while (more)
    {
        RowBlock const& block = blocks[current];
        RowBlock& following = blocks[1 - current];
        more = rows.next(following, kMAX_BLOCK_ROWS);
        for (int32_t r = 0; more && r < following.rows; ++r)
        {
            prefetchRow<L>(following.k[r], rowBytes);
            prefetchRow<L>(following.v[r], rowBytes);
        }
        tileDots<L, NR>(block, floats.convert(block.k, block.padded, tile.q.D), tile.q.D, state);
        tileMask<L>(tile, block, state);
        tileSoftmax<L, NR>(block, state);
        tileValues<L, NR>(block, floats.convert(block.v, block.rows, tile.q.D), tile.q.D, state);
        current = 1 - current;
    }
}

template <typename L, typename T>
void attendManyQueries(Tile const& tile, RowStream& rows)
{
    constexpr int32_t kWIDTH = TileState<L>::kWIDTH;
    static_assert(L::kTILE_REGS == 3, "the switch below");
    TileState<L> state;
    int64_t const D = tile.q.D;
    for (int32_t i = 0; i < kWIDTH; ++i)
    {
        state.maximum[i] = kNO_LOGIT;
        state.sum[i] = 0.F;
        bool const real = i < tile.count;
        T const* const from = static_cast<T const*>(tile.q.rows) + (real ? tile.q.offset(tile.first + i) : 0);
        for (int64_t d = 0; d < D; ++d)
        {
            state.q[d * kWIDTH + i] = real ? toFloat(from[d]) * tile.scale : 0.F;
            state.values[d * kWIDTH + i] = 0.F;
        }
    }
    switch ((tile.count + L::kLANES - 1) / L::kLANES)
    {
    case 1: attendTile<L, T, 1>(tile, rows, state); break;
    case 2: attendTile<L, T, 2>(tile, rows, state); break;
    default: attendTile<L, T, 3>(tile, rows, state); break;
    }
    for (int32_t i = 0; i < tile.count; ++i)
    {
        alignas(64) float values[kMAX_HEAD_DIM];
        for (int64_t d = 0; d < D; ++d)
        {
            values[d] = state.values[d * kWIDTH + i];
        }
        finishQuery<L, T>(tile, i, state.maximum[i], state.sum[i], values);
    }
}

//! The kernels of lane type L and element type T.
template <typename L, typename T>
void attendQueries(Tile const& tile, RowStream& rows)
{
    if (tile.count <= L::kFEW_QUERIES)
    {
        attendFewQueries<L, T>(tile, rows);
    }
    else
    {
        attendManyQueries<L, T>(tile, rows);
    }
}

template <typename L>
AttendKernels kernelsOf(hubkv_dtype dtype)
{
    switch (dtype)
    {
    case HUBKV_FLOAT16: return {TileState<L>::kWIDTH, attendQueries<L, Float16>, mergeParts<L, Float16>};
    case HUBKV_BFLOAT16: return {TileState<L>::kWIDTH, attendQueries<L, BFloat16>, mergeParts<L, BFloat16>};
    case HUBKV_FLOAT32: break;
    }
    return {TileState<L>::kWIDTH, attendQueries<L, float>, mergeParts<L, float>};
}

} // namespace hubkv
