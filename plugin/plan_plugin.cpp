// SPDX-License-Identifier: Apache-2.0
//
// HubKVPlan: the work list of attend.
//   inputs   arena int64 [2], segments int64 [B, 4]
//   outputs  work int32 [L, capacity, 4], work_count int32 [L]
#include "creators.h"

namespace hubkv::plugin
{
namespace
{

struct PlanFields
{
    int32_t numLayers{0};
    int32_t numKvHeads{0};
    int32_t capacity{0};
    int32_t minRowsPerItem{256};

    static std::array<Field<PlanFields>, 4> const kTABLE;
    void check() const
    {
        if (capacity < numKvHeads)
        {
            refuse("field capacity: %d is less than num_kv_heads = %d (it must be >= B * num_kv_heads)",
                static_cast<int>(capacity), static_cast<int>(numKvHeads));
        }
    }
};

constexpr std::array<Field<PlanFields>, 4> PlanFields::kTABLE{{
    {"num_layers", &PlanFields::numLayers, 1, INT32_MAX, true},
    {"num_kv_heads", &PlanFields::numKvHeads, 1, INT32_MAX, true},
    {"capacity", &PlanFields::capacity, 1, INT32_MAX, true},
    {"min_rows_per_item", &PlanFields::minRowsPerItem, 1, INT32_MAX},
}};

class PlanPlugin final : public StagePluginWith<PlanPlugin, PlanFields>
{
public:
    static constexpr char const* kNAME = "HubKVPlan";
    using StagePluginWith::StagePluginWith;

protected:
    int32_t numOutputs() const noexcept override
    {
        return 2;
    }

    void checkNumInputs(int32_t numInputs) const override
    {
        if (numInputs != 2)
        {
            refuse("inputs: %d are not the 2 inputs arena, segments", static_cast<int>(numInputs));
        }
    }

    Kind kind(int32_t position, int32_t numInputs) const override
    {
        return position < numInputs ? Kind::kINT64 : Kind::kINT32;
    }

    void outputShapes(nvinfer1::DimsExprs const* /* inputs */, int32_t /* numInputs */,
        nvinfer1::DimsExprs const* /* shapeInputs */, int32_t /* numShapeInputs */, nvinfer1::DimsExprs* outputs,
        nvinfer1::IExprBuilder& builder) const override
    {
        outputs[0].nbDims = 3;
        outputs[0].d[0] = builder.constant(mFields.numLayers);
        outputs[0].d[1] = builder.constant(mFields.capacity);
        outputs[0].d[2] = builder.constant(4);
        outputs[1].nbDims = 1;
        outputs[1].d[0] = builder.constant(mFields.numLayers);
    }

    int64_t workspaceBytes(Tensors const& tensors) const override
    {
        params(tensors);
        return 0;
    }

    void run(Tensors const& tensors, void const* const* inputs, void* const* outputs, void* /* workspace */,
        cudaStream_t stream) const override
    {
        hubkv_cache_params const given = params(tensors);
        check(hubkv_plan(HUBKV_CUDA, stream, &given, mFields.minRowsPerItem, static_cast<int64_t const*>(inputs[0]),
            static_cast<int64_t const*>(inputs[1]), static_cast<int32_t*>(outputs[0]),
            static_cast<int32_t*>(outputs[1])));
    }

private:
    hubkv_cache_params params(Tensors const& tensors) const
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
};

} // namespace

nvinfer1::IPluginCreatorInterface& planCreator()
{
    return creatorOf<PlanPlugin>();
}

} // namespace hubkv::plugin
