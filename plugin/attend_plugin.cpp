// SPDX-License-Identifier: Apache-2.0
//
// HubKVAttend: attention of new tokens over compact segment, tail and new tokens of one layer.
//   inputs   q [N, Hq, D] or [B, Tq, Hq, D], k_new and v_new likewise with Hkv heads, arena int64 [2],
//            segments int64 [B, 4], block_table int32 [B, maxPages], tail_lengths int32 [B], new_lengths int32 [B],
//            work int32 [L, capacity, 4], work_count int32 [L]. N = B*Tq, sequence-major.
//   outputs  out, of the shape of q
#include "creators.h"

#include <algorithm>

namespace hubkv::plugin
{
namespace
{

struct AttendFields
{
    int32_t layer{0};
    int32_t pageTokens{0};
    int64_t pageBase{0};
    float scale{0};

    static std::array<Field<AttendFields>, 4> const kTABLE;
    void check() const
    {
        if (pageBase % 16 != 0)
        {
            refuse("field page_base: %lld is not a multiple of 16", static_cast<long long>(pageBase));
        }
    }
};

constexpr std::array<Field<AttendFields>, 4> AttendFields::kTABLE{{
    {"layer", &AttendFields::layer, 0, INT32_MAX, true},
    {"page_tokens", &AttendFields::pageTokens, 1, INT32_MAX, true},
    {"page_base", &AttendFields::pageBase, 0, 9.2e18},
    {"scale", &AttendFields::scale, 0, FLT_MAX}, // 0: 1 / sqrt(D)
}};

enum Input
{
    kQ,
    kK_NEW,
    kV_NEW,
    kARENA,
    kSEGMENTS,
    kBLOCK_TABLE,
    kTAIL_LENGTHS,
    kNEW_LENGTHS,
    kWORK,
    kWORK_COUNT,
    kNUM_INPUTS
};

//! Beyond it the workspace only grows with the number of tokens (hubkv_attend_workspace).
constexpr int64_t kMAX_SHARED_TQ = 32;

//! Tokens, heads and head dim of [N, H, D] or [B, Tq, H, D].
struct Heads
{
    Heads(char const* tensor, nvinfer1::PluginTensorDesc const& desc)
    {
        int32_t const rank = desc.dims.nbDims == 4 ? 4 : 3;
        tokens = dim(tensor, desc, rank, 0) * (rank == 4 ? dim(tensor, desc, rank, 1) : 1);
        heads = dim(tensor, desc, rank, rank - 2);
        D = dim(tensor, desc, rank, rank - 1);
    }

    int64_t tokens;
    int64_t heads;
    int64_t D;
};

class AttendPlugin final : public StagePluginWith<AttendPlugin, AttendFields>
{
public:
    static constexpr char const* kNAME = "HubKVAttend";
    using StagePluginWith::StagePluginWith;

protected:
    int32_t numOutputs() const noexcept override
    {
        return 1;
    }

    void checkNumInputs(int32_t numInputs) const override
    {
        if (numInputs != kNUM_INPUTS)
        {
            refuse("inputs: %d are not the 10 inputs q, k_new, v_new, arena, segments, block_table, tail_lengths, "
                   "new_lengths, work, work_count",
                static_cast<int>(numInputs));
        }
    }

    Kind kind(int32_t position, int32_t numInputs) const override
    {
        return position <= kV_NEW || position == numInputs ? Kind::kROWS
            : position == kARENA || position == kSEGMENTS  ? Kind::kINT64
                                                           : Kind::kINT32;
    }

    void outputShapes(nvinfer1::DimsExprs const* inputs, int32_t /* numInputs */,
        nvinfer1::DimsExprs const* /* shapeInputs */, int32_t /* numShapeInputs */, nvinfer1::DimsExprs* outputs,
        nvinfer1::IExprBuilder& /* builder */) const override
    {
        outputs[0] = inputs[kQ];
    }

    int64_t workspaceBytes(Tensors const& tensors) const override
    {
        hubkv_attend_params given = params(tensors);
        int64_t bytes = 0;
        check(hubkv_attend_workspace(HUBKV_CUDA, &given, &bytes));
        if (tensors.exact)
        {
            return bytes;
        }
        // Few tokens of each of many sequences may need more than many tokens: their rows are shared out, in parts.
        int64_t const sequences = given.cache.B;
        int64_t const tokens = Heads("q", tensors.in[kQ]).tokens;
        bool const knowsTq = tensors.in[kQ].dims.nbDims == 4;
        int64_t const most = std::min(knowsTq ? tensors.in[kQ].dims.d[1] : tokens, kMAX_SHARED_TQ);
        for (given.Tq = 1; given.Tq <= most; ++given.Tq)
        {
            given.cache.B = std::min(sequences, tokens / given.Tq);
            int64_t needed = 0;
            check(hubkv_attend_workspace(HUBKV_CUDA, &given, &needed));
            bytes = std::max(bytes, needed);
        }
        return bytes;
    }

    void run(Tensors const& tensors, void const* const* inputs, void* const* outputs, void* workspace,
        cudaStream_t stream) const override
    {
        hubkv_attend_params const given = params(tensors);
        check(hubkv_attend(HUBKV_CUDA, stream, &given, inputs[kQ], inputs[kK_NEW], inputs[kV_NEW],
            static_cast<int64_t const*>(inputs[kARENA]), static_cast<int64_t const*>(inputs[kSEGMENTS]),
            static_cast<int32_t const*>(inputs[kBLOCK_TABLE]), static_cast<int32_t const*>(inputs[kTAIL_LENGTHS]),
            static_cast<int32_t const*>(inputs[kNEW_LENGTHS]), static_cast<int32_t const*>(inputs[kWORK]),
            static_cast<int32_t const*>(inputs[kWORK_COUNT]), outputs[0], workspace, workspaceBytes(tensors)));
    }

private:
    hubkv_attend_params params(Tensors const& tensors) const
    {
        Heads const q("q", tensors.in[kQ]);
        Heads const k("k_new", tensors.in[kK_NEW]);
        Heads const v("v_new", tensors.in[kV_NEW]);
        if (k.tokens != q.tokens || v.tokens != q.tokens || k.D != q.D || v.D != q.D || k.heads != v.heads)
        {
            refuse("q, k_new, v_new: [%lld, %lld, %lld], [%lld, %lld, %lld], [%lld, %lld, %lld] do not belong together",
                static_cast<long long>(q.tokens), static_cast<long long>(q.heads), static_cast<long long>(q.D),
                static_cast<long long>(k.tokens), static_cast<long long>(k.heads), static_cast<long long>(k.D),
                static_cast<long long>(v.tokens), static_cast<long long>(v.heads), static_cast<long long>(v.D));
        }
        hubkv_attend_params result{};
        hubkv_cache_params& cache = result.cache;
        cache.B = dim("segments", tensors.in[kSEGMENTS], 2, 0);
        cache.L = dim("work", tensors.in[kWORK], 3, 0);
        cache.Hkv = k.heads;
        cache.D = q.D;
        cache.dtype = rowType(tensors.in[kQ].type);
        cache.P = mFields.pageTokens;
        cache.maxPages = dim("block_table", tensors.in[kBLOCK_TABLE], 2, 1);
        cache.pageBase = mFields.pageBase;
        cache.capacity = dim("work", tensors.in[kWORK], 3, 1);
        checkDim("arena", tensors.in[kARENA], 1, 0, 2);
        checkDim("segments", tensors.in[kSEGMENTS], 2, 1, 4);
        checkDim("block_table", tensors.in[kBLOCK_TABLE], 2, 0, cache.B);
        checkDim("tail_lengths", tensors.in[kTAIL_LENGTHS], 1, 0, cache.B);
        checkDim("new_lengths", tensors.in[kNEW_LENGTHS], 1, 0, cache.B);
        checkDim("work", tensors.in[kWORK], 3, 2, 4);
        checkDim("work_count", tensors.in[kWORK_COUNT], 1, 0, cache.L);
        Heads const out("out", tensors.out[0]);
        if (out.tokens != q.tokens || out.heads != q.heads || out.D != q.D)
        {
            refuse("out: its shape is not that of q");
        }
        // A profile bounds N and B each by itself: a few sequences may bring all of the tokens.
        if (cache.B < 1 || (tensors.exact && q.tokens % cache.B != 0))
        {
            refuse("q: %lld tokens are not Tq for each of B = %lld sequences", static_cast<long long>(q.tokens),
                static_cast<long long>(cache.B));
        }
        result.Tq = (q.tokens + cache.B - 1) / cache.B;
        result.Hq = q.heads;
        result.layer = mFields.layer;
        result.scale = mFields.scale;
        result.qTokenStride = q.heads * q.D;
        result.kTokenStride = k.heads * k.D;
        result.vTokenStride = result.kTokenStride;
        return result;
    }
};

} // namespace

nvinfer1::IPluginCreatorInterface& attendCreator()
{
    return creatorOf<AttendPlugin>();
}

} // namespace hubkv::plugin
