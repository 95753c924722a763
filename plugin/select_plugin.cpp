// SPDX-License-Identifier: Apache-2.0
//
// HubKVSelect: refined scores -> the K best of each of S groups of heads. S = num_groups divides L*Hkv.
//   inputs   refined float32 [L, Hkv, T]; shape tensor rows_per_group: one value K
//   outputs  positions int32 [S*K], head_offsets int64 [L*Hkv + 1]
#include "creators.h"

namespace hubkv::plugin
{
namespace
{

struct SelectFields
{
    int32_t numGroups{1};

    static std::array<Field<SelectFields>, 1> const kTABLE;
    void check() const { }
};

constexpr std::array<Field<SelectFields>, 1> SelectFields::kTABLE{{
    {"num_groups", &SelectFields::numGroups, 1, INT32_MAX},
}};

class SelectPlugin final : public StagePluginWith<SelectPlugin, SelectFields>
{
public:
    static constexpr char const* kNAME = "HubKVSelect";
    using StagePluginWith::StagePluginWith;

protected:
    int32_t numOutputs() const noexcept override
    {
        return 2;
    }

    void checkNumInputs(int32_t numInputs) const override
    {
        if (numInputs != 1)
        {
            refuse("inputs: %d are not the 1 input refined (rows_per_group is a shape tensor)",
                static_cast<int>(numInputs));
        }
    }

    Kind kind(int32_t position, int32_t /* numInputs */) const override
    {
        constexpr Kind kKINDS[]{Kind::kFLOAT32, Kind::kINT32, Kind::kINT64};
        return kKINDS[position];
    }

    void outputShapes(nvinfer1::DimsExprs const* inputs, int32_t /* numInputs */,
        nvinfer1::DimsExprs const* shapeInputs, int32_t numShapeInputs, nvinfer1::DimsExprs* outputs,
        nvinfer1::IExprBuilder& builder) const override
    {
        using nvinfer1::DimensionOperation;
        if (inputs[0].nbDims != 3)
        {
            refuse("refined: it has %d dimensions, 3 are needed", static_cast<int>(inputs[0].nbDims));
        }
        // The "dimensions" of a shape tensor are its values.
        if (numShapeInputs != 1 || shapeInputs[0].nbDims > 1 || shapeInputs[0].d[0] == nullptr)
        {
            refuse("rows_per_group: one shape tensor of one value is needed, there are %d",
                static_cast<int>(numShapeInputs));
        }
        nvinfer1::IDimensionExpr const* const heads =
            builder.operation(DimensionOperation::kPROD, *inputs[0].d[0], *inputs[0].d[1]);
        outputs[0].nbDims = 1;
        outputs[0].d[0] =
            builder.operation(DimensionOperation::kPROD, *builder.constant(mFields.numGroups), *shapeInputs[0].d[0]);
        outputs[1].nbDims = 1;
        outputs[1].d[0] = builder.operation(DimensionOperation::kSUM, *heads, *builder.constant(1));
    }

    int64_t workspaceBytes(Tensors const& tensors) const override
    {
        hubkv_select_params const given = params(tensors);
        int64_t bytes = 0;
        check(hubkv_select_workspace(HUBKV_CUDA, &given, &bytes));
        return bytes;
    }

    void run(Tensors const& tensors, void const* const* inputs, void* const* outputs, void* workspace,
        cudaStream_t stream) const override
    {
        hubkv_select_params const given = params(tensors);
        check(hubkv_select(HUBKV_CUDA, stream, &given, static_cast<float const*>(inputs[0]),
            static_cast<int32_t*>(outputs[0]), static_cast<int64_t*>(outputs[1]), workspace, workspaceBytes(tensors)));
    }

private:
    hubkv_select_params params(Tensors const& tensors) const
    {
        int64_t const heads = dim("refined", tensors.in[0], 3, 0) * dim("refined", tensors.in[0], 3, 1);
        int64_t const rows = dim("positions", tensors.out[0], 1, 0);
        checkDim("head_offsets", tensors.out[1], 1, 0, heads + 1);
        hubkv_select_params result{};
        result.S = mFields.numGroups;
        if (heads % result.S != 0 || rows % result.S != 0)
        {
            refuse("field num_groups: %lld does not divide the %lld heads and %lld rows",
                static_cast<long long>(result.S), static_cast<long long>(heads), static_cast<long long>(rows));
        }
        result.H = heads / result.S;
        result.T = dim("refined", tensors.in[0], 3, 2);
        result.K = rows / result.S;
        return result;
    }
};

} // namespace

nvinfer1::IPluginCreatorInterface& selectCreator()
{
    return creatorOf<SelectPlugin>();
}

} // namespace hubkv::plugin
