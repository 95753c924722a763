// SPDX-License-Identifier: Apache-2.0
#include "plan_plugin.h"

namespace hubkv::plugin
{

void PlanFields::check() const
{
    if (capacity < numKvHeads)
    {
        refuse("field capacity: %d is less than num_kv_heads = %d (it must be >= B * num_kv_heads)",
            static_cast<int>(capacity), static_cast<int>(numKvHeads));
    }
}

int32_t PlanPlugin::numOutputs() const noexcept
{
    return 2;
}

void PlanPlugin::checkNumInputs(int32_t numInputs) const
{
    if (numInputs != 2)
    {
        refuse("inputs: %d are not the 2 inputs arena, segments", static_cast<int>(numInputs));
    }
}

Kind PlanPlugin::kind(int32_t position, int32_t numInputs) const
{
    return position < numInputs ? Kind::kINT64 : Kind::kINT32;
}

void PlanPlugin::outputShapes(nvinfer1::DimsExprs const* /* inputs */, int32_t /* numInputs */,
    nvinfer1::DimsExprs const* /* shapeInputs */, int32_t /* numShapeInputs */, nvinfer1::DimsExprs* outputs,
    nvinfer1::IExprBuilder& builder) const
{
    outputs[0].nbDims = 3;
    outputs[0].d[0] = builder.constant(mFields.numLayers);
    outputs[0].d[1] = builder.constant(mFields.capacity);
    outputs[0].d[2] = builder.constant(4);
    outputs[1].nbDims = 1;
    outputs[1].d[0] = builder.constant(mFields.numLayers);
}

hubkv_cache_params PlanPlugin::params(Tensors const& tensors) const
{
    checkDim("arena", tensors.in[0], 1, 0, 2);
    checkDim("segments", tensors.in[1], 2, 1, 4);
    hubkv_cache_params result{};
    result.B = dim("segments", tensors.in[1], 2, 0);
    result.L = mFields.numLayers;
    result.Hkv = mFields.numKvHeads;
    result.capacity = mFields.capacity;
    checkDim("work", tensors.out[0], 3, 0, result.L);
    checkDim("work", tensors.out[0], 3, 1, result.capacity);
    checkDim("work", tensors.out[0], 3, 2, 4);
    checkDim("work_count", tensors.out[1], 1, 0, result.L);
    if (result.B * result.Hkv > result.capacity)
    {
        refuse("field capacity: %d is less than B * num_kv_heads = %lld", static_cast<int>(mFields.capacity),
            static_cast<long long>(result.B * result.Hkv));
    }
    // A plan counts rows: it reads neither rows nor pages.
    result.D = 8;
    result.dtype = HUBKV_FLOAT16;
    result.P = 1;
    return result;
}

int64_t PlanPlugin::workspaceBytes(Tensors const& tensors) const
{
    params(tensors);
    return 0;
}

void PlanPlugin::run(Tensors const& tensors, void const* const* inputs, void* const* outputs, void* /* workspace */,
    cudaStream_t stream) const
{
    hubkv_cache_params const given = params(tensors);
    check(hubkv_plan(HUBKV_CUDA, stream, &given, mFields.minRowsPerItem, static_cast<int64_t const*>(inputs[0]),
        static_cast<int64_t const*>(inputs[1]), static_cast<int32_t*>(outputs[0]), static_cast<int32_t*>(outputs[1])));
}

} // namespace hubkv::plugin
