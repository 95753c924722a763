// SPDX-License-Identifier: Apache-2.0
//
// HubKVRefine: scores -> refined scores.
//   inputs   scores float32 [L, Hkv, T], alpha float32 [1], window int32 [1]
//   outputs  refined float32 [L, Hkv, T], non_finite int64 [1]
#include "creators.h"

namespace hubkv::plugin
{
namespace
{

struct RefineFields
{
    int32_t nmsKernel{5};
    float penaltyFactor{0.5F};
    float headWeightTemperature{0.5F};
    float minHeadWeight{0.8F};
    float maxHeadWeight{1.2F};
    int32_t sinkTokens{4};

    static std::array<Field<RefineFields>, 6> const kTABLE;
    void check() const
    {
        if (nmsKernel % 2 == 0)
        {
            refuse("field nms_kernel: %d is not odd", static_cast<int>(nmsKernel));
        }
        if (minHeadWeight > maxHeadWeight)
        {
            refuse("field max_head_weight: %g is less than min_head_weight = %g", static_cast<double>(maxHeadWeight),
                static_cast<double>(minHeadWeight));
        }
    }
};

constexpr std::array<Field<RefineFields>, 6> RefineFields::kTABLE{{
    {"nms_kernel", &RefineFields::nmsKernel, 1, INT32_MAX},
    {"penalty_factor", &RefineFields::penaltyFactor, 0, 1},
    {"head_weight_temperature", &RefineFields::headWeightTemperature, 0, FLT_MAX},
    {"min_head_weight", &RefineFields::minHeadWeight, FLT_TRUE_MIN, FLT_MAX},
    {"max_head_weight", &RefineFields::maxHeadWeight, FLT_TRUE_MIN, FLT_MAX},
    {"sink_tokens", &RefineFields::sinkTokens, 0, INT32_MAX},
}};

class RefinePlugin final : public StagePluginWith<RefinePlugin, RefineFields>
{
public:
    static constexpr char const* kNAME = "HubKVRefine";
    using StagePluginWith::StagePluginWith;

protected:
    int32_t numOutputs() const noexcept override
    {
        return 2;
    }

    void checkNumInputs(int32_t numInputs) const override
    {
        if (numInputs != 3)
        {
            refuse("inputs: %d are not the 3 inputs scores, alpha, window", static_cast<int>(numInputs));
        }
    }

    Kind kind(int32_t position, int32_t /* numInputs */) const override
    {
        constexpr Kind kKINDS[]{Kind::kFLOAT32, Kind::kFLOAT32, Kind::kINT32, Kind::kFLOAT32, Kind::kINT64};
        return kKINDS[position];
    }

    void outputShapes(nvinfer1::DimsExprs const* inputs, int32_t /* numInputs */,
        nvinfer1::DimsExprs const* /* shapeInputs */, int32_t /* numShapeInputs */, nvinfer1::DimsExprs* outputs,
        nvinfer1::IExprBuilder& builder) const override
    {
        outputs[0] = inputs[0];
        outputs[1].nbDims = 1;
        outputs[1].d[0] = builder.constant(1);
    }

    int64_t workspaceBytes(Tensors const& tensors) const override
    {
        hubkv_refine_params const given = params(tensors);
        int64_t bytes = 0;
        check(hubkv_refine_workspace(HUBKV_CUDA, &given, &bytes));
        return bytes;
    }

    void run(Tensors const& tensors, void const* const* inputs, void* const* outputs, void* workspace,
        cudaStream_t stream) const override
    {
        hubkv_refine_params const given = params(tensors);
        check(hubkv_refine(HUBKV_CUDA, stream, &given, static_cast<float const*>(inputs[0]),
            static_cast<float const*>(inputs[1]), static_cast<int32_t const*>(inputs[2]),
            static_cast<float*>(outputs[0]), static_cast<int64_t*>(outputs[1]), workspace, workspaceBytes(tensors)));
    }

private:
    hubkv_refine_params params(Tensors const& tensors) const
    {
        hubkv_refine_params result{};
        result.L = dim("scores", tensors.in[0], 3, 0);
        result.Hkv = dim("scores", tensors.in[0], 3, 1);
        result.T = dim("scores", tensors.in[0], 3, 2);
        checkDim("alpha", tensors.in[1], 1, 0, 1);
        checkDim("window", tensors.in[2], 1, 0, 1);
        for (int32_t axis = 0; axis < 3; ++axis)
        {
            checkDim("refined", tensors.out[0], 3, axis, tensors.in[0].dims.d[axis]);
        }
        checkDim("non_finite", tensors.out[1], 1, 0, 1);
        result.nmsKernel = mFields.nmsKernel;
        result.penaltyFactor = mFields.penaltyFactor;
        result.headWeightTemperature = mFields.headWeightTemperature;
        result.minHeadWeight = mFields.minHeadWeight;
        result.maxHeadWeight = mFields.maxHeadWeight;
        result.sinkTokens = mFields.sinkTokens;
        return result;
    }
};

} // namespace

nvinfer1::IPluginCreatorInterface& refineCreator()
{
    return creatorOf<RefinePlugin>();
}

} // namespace hubkv::plugin
