// SPDX-License-Identifier: Apache-2.0
#include "refine_plugin.h"

namespace hubkv::plugin
{

void RefineFields::check() const
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

int32_t RefinePlugin::numOutputs() const noexcept
{
    return 2;
}

void RefinePlugin::checkNumInputs(int32_t numInputs) const
{
    if (numInputs != 3)
    {
        refuse("inputs: %d are not the 3 inputs scores, alpha, window", static_cast<int>(numInputs));
    }
}

Kind RefinePlugin::kind(int32_t position, int32_t /* numInputs */) const
{
    constexpr Kind kKINDS[]{Kind::kFLOAT32, Kind::kFLOAT32, Kind::kINT32, Kind::kFLOAT32, Kind::kINT64};
    return kKINDS[position];
}

void RefinePlugin::outputShapes(nvinfer1::DimsExprs const* inputs, int32_t /* numInputs */,
    nvinfer1::DimsExprs const* /* shapeInputs */, int32_t /* numShapeInputs */, nvinfer1::DimsExprs* outputs,
    nvinfer1::IExprBuilder& builder) const
{
    outputs[0] = inputs[0];
    outputs[1].nbDims = 1;
    outputs[1].d[0] = builder.constant(1);
}

hubkv_refine_params RefinePlugin::params(Tensors const& tensors) const
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

int64_t RefinePlugin::workspaceBytes(Tensors const& tensors) const
{
    hubkv_refine_params const given = params(tensors);
    int64_t bytes = 0;
    check(hubkv_refine_workspace(HUBKV_CUDA, &given, &bytes));
    return bytes;
}

void RefinePlugin::run(
    Tensors const& tensors, void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) const
{
    hubkv_refine_params const given = params(tensors);
    check(hubkv_refine(HUBKV_CUDA, stream, &given, static_cast<float const*>(inputs[0]),
        static_cast<float const*>(inputs[1]), static_cast<int32_t const*>(inputs[2]), static_cast<float*>(outputs[0]),
        static_cast<int64_t*>(outputs[1]), workspace, workspaceBytes(tensors)));
}

} // namespace hubkv::plugin
