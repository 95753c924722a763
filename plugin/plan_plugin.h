// SPDX-License-Identifier: Apache-2.0
//
// HubKVPlan: the work list of attend.
//   inputs   arena int64 [2], segments int64 [B, 4]
//   outputs  work int32 [L, capacity, 4], work_count int32 [L]
#pragma once

#include "stage_plugin.h"

namespace hubkv::plugin
{

struct PlanFields
{
    int32_t numLayers{0};
    int32_t numKvHeads{0};
    int32_t capacity{0};
    int32_t minRowsPerItem{256};

    static std::array<Field<PlanFields>, 4> const kTABLE;
    void check() const;
};

inline constexpr std::array<Field<PlanFields>, 4> PlanFields::kTABLE{{
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
    int32_t numOutputs() const noexcept override;
    void checkNumInputs(int32_t numInputs) const override;
    Kind kind(int32_t position, int32_t numInputs) const override;
    void outputShapes(nvinfer1::DimsExprs const* inputs, int32_t numInputs, nvinfer1::DimsExprs const* shapeInputs,
        int32_t numShapeInputs, nvinfer1::DimsExprs* outputs, nvinfer1::IExprBuilder& builder) const override;
    int64_t workspaceBytes(Tensors const& tensors) const override;
    void run(Tensors const& tensors, void const* const* inputs, void* const* outputs, void* workspace,
        cudaStream_t stream) const override;

private:
    hubkv_cache_params params(Tensors const& tensors) const;
};

} // namespace hubkv::plugin
