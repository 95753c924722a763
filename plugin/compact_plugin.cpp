// SPDX-License-Identifier: Apache-2.0
//
// HubKVCompact: the kept rows of n layers, without holes.
//   inputs   k of n layers, v of n layers [T, Hkv, D] (token_major = 1) or [Hkv, T, D] (token_major = 0),
//            positions int32 [K], head_offsets int64 [n*Hkv + 1]
//   outputs  k_rows [K, D], v_rows [K, D]
#include "creators.h"

namespace hubkv::plugin
{
namespace
{

struct CompactFields
{
    int32_t tokenMajor{1};

    static std::array<Field<CompactFields>, 1> const kTABLE;
    void check() const { }
};

constexpr std::array<Field<CompactFields>, 1> CompactFields::kTABLE{{
    {"token_major", &CompactFields::tokenMajor, 0, 1},
}};

class CompactPlugin final : public StagePluginWith<CompactPlugin, CompactFields>
{
public:
    static constexpr char const* kNAME = "HubKVCompact";
    using StagePluginWith::StagePluginWith;

protected:
    int32_t numOutputs() const noexcept override
    {
        return 2;
    }

    void checkNumInputs(int32_t numInputs) const override
    {
        if (numInputs < 4 || numInputs % 2 != 0)
        {
            refuse("inputs: %d are not k and v of n >= 1 layers, positions, head_offsets", static_cast<int>(numInputs));
        }
    }

    Kind kind(int32_t position, int32_t numInputs) const override
    {
        return position == numInputs - 2 ? Kind::kINT32 : position == numInputs - 1 ? Kind::kINT64 : Kind::kROWS;
    }

    void outputShapes(nvinfer1::DimsExprs const* inputs, int32_t numInputs,
        nvinfer1::DimsExprs const* /* shapeInputs */, int32_t /* numShapeInputs */, nvinfer1::DimsExprs* outputs,
        nvinfer1::IExprBuilder& /* builder */) const override
    {
        if (inputs[0].nbDims != 3 || inputs[numInputs - 2].nbDims != 1)
        {
            refuse("k, positions: they have %d and %d dimensions, 3 and 1 are needed",
                static_cast<int>(inputs[0].nbDims), static_cast<int>(inputs[numInputs - 2].nbDims));
        }
        for (int32_t i = 0; i < 2; ++i)
        {
            outputs[i].nbDims = 2;
            outputs[i].d[0] = inputs[numInputs - 2].d[0];
            outputs[i].d[1] = inputs[0].d[2];
        }
    }

    int64_t workspaceBytes(Tensors const& tensors) const override
    {
        params(tensors);
        return 0;
    }

    void run(Tensors const& tensors, void const* const* inputs, void* const* outputs, void* /* workspace */,
        cudaStream_t stream) const override
    {
        hubkv_compact_params const given = params(tensors);
        check(hubkv_compact(HUBKV_CUDA, stream, &given, inputs, inputs + given.L,
            static_cast<int32_t const*>(inputs[tensors.numIn - 2]),
            static_cast<int64_t const*>(inputs[tensors.numIn - 1]), outputs[0], outputs[1]));
    }

private:
    hubkv_compact_params params(Tensors const& tensors) const
    {
        bool const tokenMajor = mFields.tokenMajor != 0;
        nvinfer1::PluginTensorDesc const& positions = tensors.in[tensors.numIn - 2];
        nvinfer1::PluginTensorDesc const& headOffsets = tensors.in[tensors.numIn - 1];
        hubkv_compact_params result{};
        result.L = (tensors.numIn - 2) / 2;
        result.T = dim("k", tensors.in[0], 3, tokenMajor ? 0 : 1);
        result.Hkv = dim("k", tensors.in[0], 3, tokenMajor ? 1 : 0);
        result.D = dim("k", tensors.in[0], 3, 2);
        for (int32_t i = 1; i < tensors.numIn - 2; ++i)
        {
            for (int32_t axis = 0; axis < 3; ++axis)
            {
                checkDim("k, v", tensors.in[i], 3, axis, tensors.in[0].dims.d[axis]);
            }
        }
        result.K = dim("positions", positions, 1, 0);
        checkDim("head_offsets", headOffsets, 1, 0, result.L * result.Hkv + 1);
        for (int32_t i = 0; i < tensors.numOut; ++i)
        {
            checkDim("k_rows, v_rows", tensors.out[i], 2, 0, result.K);
            checkDim("k_rows, v_rows", tensors.out[i], 2, 1, result.D);
        }
        result.dtype = rowType(tensors.in[0].type);
        result.kHeadStride = tokenMajor ? result.D : result.T * result.D;
        result.kTokenStride = tokenMajor ? result.Hkv * result.D : result.D;
        result.vHeadStride = result.kHeadStride;
        result.vTokenStride = result.kTokenStride;
        return result;
    }
};

} // namespace

nvinfer1::IPluginCreatorInterface& compactCreator()
{
    return creatorOf<CompactPlugin>();
}

} // namespace hubkv::plugin
