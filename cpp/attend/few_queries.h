// SPDX-License-Identifier: Apache-2.0
//
// Few queries per kv head (decoding): bound by memory. Lanes run over D; rows of K and V are read once, straight from
// the cache, for all queries. While the keys of a block are read its values are prefetched, and while its values are
// read, the keys of the next block. Included inside a target region, see kernels.h.
#pragma once

namespace hubkv
{

//! Rows per block: 8 KiB of keys and 8 KiB of values, so that what is prefetched is used before it is evicted.
template <typename L>
int32_t blockRowsFor(int64_t rowBytes)
{
    int64_t const rows = 8192 / rowBytes / kROW_GRANULE * kROW_GRANULE;
    return static_cast<int32_t>(rows < kROW_GRANULE ? kROW_GRANULE : (rows < kMAX_BLOCK_ROWS ? rows : kMAX_BLOCK_ROWS));
}

//! logits [NQ, kMAX_BLOCK_ROWS] = q . k for the padded rows of the block; q [NQ, stride].
template <typename L, typename T, int NQ>
void dotRows(RowBlock const& block, float const* q, int64_t stride, int64_t D, float* logits, bool prefetchValues)
{
    using Reg = typename L::Reg;
    for (int32_t r = 0; r < block.padded; r += 4)
    {
        T const* k[4];
        for (int i = 0; i < 4; ++i)
        {
            k[i] = reinterpret_cast<T const*>(block.k[r + i]);
            if (prefetchValues)
            {
                prefetchRow<L>(block.v[r + i], D * static_cast<int64_t>(sizeof(T)));
            }
        }
        Reg sums[4][NQ];
        for (int i = 0; i < 4; ++i)
        {
            for (int n = 0; n < NQ; ++n)
            {
                sums[i][n] = L::zero();
            }
        }
        int64_t d = 0;
        for (; d + L::kLANES <= D; d += L::kLANES)
        {
            Reg query[NQ];
            for (int n = 0; n < NQ; ++n)
            {
                query[n] = L::load(q + n * stride + d);
            }
            for (int i = 0; i < 4; ++i)
            {
                Reg const key = L::loadElements(k[i] + d);
                for (int n = 0; n < NQ; ++n)
                {
                    sums[i][n] = L::fma(key, query[n], sums[i][n]);
                }
            }
        }
        if (L::kLANES > 8 && d < D)
        {
            for (int i = 0; i < 4; ++i)
            {
                Reg const key = L::loadHalf(k[i] + d);
                for (int n = 0; n < NQ; ++n)
                {
                    sums[i][n] = L::fma(key, L::load(q + n * stride + d), sums[i][n]);
                }
            }
        }
        for (int n = 0; n < NQ; ++n)
        {
            L::sum4(sums[0][n], sums[1][n], sums[2][n], sums[3][n], logits + n * kMAX_BLOCK_ROWS + r);
        }
    }
}

//! values [NQ, stride] = values * correction [NQ] + weights [NQ, kMAX_BLOCK_ROWS] . v, on NC registers of columns from
//! `column` on. HALF: the one register is half a row's end.
template <typename L, typename T, int NQ, int NC, bool HALF>
void addColumns(RowBlock const& block, float const* weights, float const* correction, float* values, int64_t stride,
    int64_t column, RowBlock const* nextBlock, int64_t rowBytes)
{
    using Reg = typename L::Reg;
    Reg sums[NQ][NC];
    for (int n = 0; n < NQ; ++n)
    {
        for (int c = 0; c < NC; ++c)
        {
            sums[n][c] = L::mul(L::set(correction[n]), L::load(values + n * stride + column + c * L::kLANES));
        }
    }
    for (int32_t r = 0; r < block.rows; ++r)
    {
        T const* const v = reinterpret_cast<T const*>(block.v[r]) + column;
        if (nextBlock != nullptr)
        {
            prefetchRow<L>(nextBlock->k[r], rowBytes);
        }
        Reg value[NC];
        for (int c = 0; c < NC; ++c)
        {
            value[c] = HALF ? L::loadHalf(v) : L::loadElements(v + c * L::kLANES);
        }
        for (int n = 0; n < NQ; ++n)
        {
            Reg const weight = L::set(weights[n * kMAX_BLOCK_ROWS + r]);
            for (int c = 0; c < NC; ++c)
            {
                sums[n][c] = L::fma(weight, value[c], sums[n][c]);
            }
        }
    }
    for (int n = 0; n < NQ; ++n)
    {
        for (int c = 0; c < NC; ++c)
        {
            L::store(values + n * stride + column + c * L::kLANES, sums[n][c]);
        }
    }
}

//! addColumns over all columns, with as many registers at once as there are accumulators for.
template <typename L, typename T, int NQ>
void addValues(RowBlock const& block, float const* weights, float const* correction, float* values, int64_t stride,
    int64_t D, RowBlock const* nextBlock)
{
    constexpr int kWIDEST = L::kACCUMULATORS / NQ >= 8 ? 8 : (L::kACCUMULATORS / NQ >= 4 ? 4 : 2);
    int64_t const rowBytes = D * static_cast<int64_t>(sizeof(T));
    int64_t column = 0;
    for (; column + kWIDEST * L::kLANES <= D; column += kWIDEST * L::kLANES)
    {
        addColumns<L, T, NQ, kWIDEST, false>(
            block, weights, correction, values, stride, column, column == 0 ? nextBlock : nullptr, rowBytes);
    }
    if (kWIDEST > 4 && column + 4 * L::kLANES <= D)
    {
        addColumns<L, T, NQ, 4, false>(
            block, weights, correction, values, stride, column, column == 0 ? nextBlock : nullptr, rowBytes);
        column += 4 * L::kLANES;
    }
    if (kWIDEST > 2 && column + 2 * L::kLANES <= D)
    {
        addColumns<L, T, NQ, 2, false>(
            block, weights, correction, values, stride, column, column == 0 ? nextBlock : nullptr, rowBytes);
        column += 2 * L::kLANES;
    }
    for (; column + L::kLANES <= D; column += L::kLANES)
    {
        addColumns<L, T, NQ, 1, false>(
            block, weights, correction, values, stride, column, column == 0 ? nextBlock : nullptr, rowBytes);
    }
    if (L::kLANES > 8 && column < D)
    {
        addColumns<L, T, NQ, 1, true>(
            block, weights, correction, values, stride, column, column == 0 ? nextBlock : nullptr, rowBytes);
    }
}

//! Turns logits [padded] into weights 2^(logit + bias - maximum); brings maximum and sum up to date. What was summed
//! before is to be multiplied by the answer.
template <typename L>
float softmaxRow(RowBlock const& block, float* logits, float& maximum, float& sum)
{
    using Reg = typename L::Reg;
    Reg largest = L::set(maximum);
    for (int32_t r = 0; r < block.padded; r += L::kLANES)
    {
        Reg const x = L::add(L::load(logits + r), L::load(block.bias + r));
        L::store(logits + r, x);
        largest = L::max(x, largest);
    }
    float const before = maximum;
    maximum = L::maxOf(largest);
    float const shift = shiftOf<L>(maximum);
    Reg sums = L::zero();
    for (int32_t r = 0; r < block.padded; r += L::kLANES)
    {
        Reg const weight = exp2<L>(L::sub(L::load(logits + r), L::set(shift)));
        L::store(logits + r, weight);
        sums = L::add(sums, weight);
    }
    float const correction = exp2Scalar<L>(before - shift);
    sum = sum * correction + L::sumOf(sums);
    return correction;
}

//! Queries see new tokens up to their own.
template <typename L>
void maskNewTokens(RowBlock const& block, float* logits, int64_t token)
{
    int64_t const visible = block.firstNew + (token + 1 - block.newToken);
    for (int64_t r = visible > block.firstNew ? visible : block.firstNew; r < block.rows; ++r)
    {
        logits[r] = kNO_LOGIT;
    }
}

template <typename L, typename T, int NQ>
void attendGroup(Tile const& tile, int32_t from, RowBlock const& block, RowBlock const* nextBlock, float const* q,
    int64_t stride, float* maximum, float* sum, float* values)
{
    alignas(64) float logits[NQ * kMAX_BLOCK_ROWS];
    float correction[NQ];
    dotRows<L, T, NQ>(block, q + from * stride, stride, tile.q.D, logits, from == 0);
    for (int n = 0; n < NQ; ++n)
    {
        maskNewTokens<L>(block, logits + n * kMAX_BLOCK_ROWS, (tile.first + from + n) / tile.q.G);
        correction[n] = softmaxRow<L>(block, logits + n * kMAX_BLOCK_ROWS, maximum[from + n], sum[from + n]);
    }
    addValues<L, T, NQ>(block, logits, correction, values + from * stride, stride, tile.q.D, nextBlock);
}

template <typename L, typename T>
void attendFewQueries(Tile const& tile, RowStream& rows)
{
    int64_t const D = tile.q.D;
    int64_t const stride = (D + L::kLANES - 1) / L::kLANES * L::kLANES;
    alignas(64) float q[L::kFEW_QUERIES * kMAX_HEAD_DIM];
    alignas(64) float values[L::kFEW_QUERIES * kMAX_HEAD_DIM];
    float maximum[L::kFEW_QUERIES];
    float sum[L::kFEW_QUERIES];
    for (int32_t i = 0; i < tile.count; ++i)
    {
        maximum[i] = kNO_LOGIT;
        sum[i] = 0.F;
    }
    for (int64_t i = 0; i < tile.count * stride; ++i)
    {
        q[i] = 0.F;
        values[i] = 0.F;
    }
    for (int32_t i = 0; i < tile.count; ++i)
    {
        T const* const from = static_cast<T const*>(tile.q.rows) + tile.q.offset(tile.first + i);
        for (int64_t d = 0; d < D; ++d)
        {
            q[i * stride + d] = toFloat(from[d]) * tile.scale;
        }
    }

    int32_t const groups = (tile.count + L::kDOT_QUERIES - 1) / L::kDOT_QUERIES;
    int32_t const blockRows = blockRowsFor<L>(D * static_cast<int64_t>(sizeof(T)));
    RowBlock blocks[2];
    int current = 0;
    bool more = rows.next(blocks[0], blockRows);
    for (int32_t r = 0; more && r < blocks[0].rows; ++r)
    {
        prefetchRow<L>(blocks[0].k[r], D * static_cast<int64_t>(sizeof(T)));
    }
    while (more)
    {
        RowBlock const& block = blocks[current];
        RowBlock& following = blocks[1 - current];
        more = rows.next(following, blockRows);
        for (int32_t from = 0, group = 0; group < groups; ++group)
        {
            int32_t const count = (tile.count - from + groups - group - 1) / (groups - group);
            RowBlock const* const nextBlock = group == groups - 1 && more ? &following : nullptr;
            switch (count)
            {
            case 1: attendGroup<L, T, 1>(tile, from, block, nextBlock, q, stride, maximum, sum, values); break;
            case 2: attendGroup<L, T, 2>(tile, from, block, nextBlock, q, stride, maximum, sum, values); break;
            case 3:
                attendGroup<L, T, L::kDOT_QUERIES >= 3 ? 3 : 1>(
                    tile, from, block, nextBlock, q, stride, maximum, sum, values);
                break;
            default:
                attendGroup<L, T, L::kDOT_QUERIES >= 4 ? 4 : 1>(
                    tile, from, block, nextBlock, q, stride, maximum, sum, values);
                break;
            }
            from += count;
        }
        current = 1 - current;
    }
    for (int32_t i = 0; i < tile.count; ++i)
    {
        finishQuery<L, T>(tile, i, maximum[i], sum[i], values + i * stride);
    }
}

} // namespace hubkv
