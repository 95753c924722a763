// SPDX-License-Identifier: Apache-2.0
//
// HubKVRefine: scores -> refined scores.
//   inputs   scores float32 [L, Hkv, T], alpha float32 [1], window int32 [1]
//   outputs  refined float32 [L, Hkv, T], non_finite int64 [1]
#pragma once

#include "stage_plugin.h"

namespace hubkv::plugin
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
    void check() const;
};

inline constexpr std::array<Field<RefineFields>, 6> RefineFields::kTABLE{{
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
    int32_t numOutputs() const noexcept override;
    void checkNumInputs(int32_t numInputs) const override;
    Kind kind(int32_t position, int32_t numInputs) const override;
    void outputShapes(nvinfer1::DimsExprs const* inputs, int32_t numInputs, nvinfer1::DimsExprs const* shapeInputs,
        int32_t numShapeInputs, nvinfer1::DimsExprs* outputs, nvinfer1::IExprBuilder& builder) const override;
    int64_t workspaceBytes(Tensors const& tensors) const override;
    void run(Tensors const& tensors, void const* const* inputs, void* const* outputs, void* workspace,
        cudaStream_t stream) const override;

private:
    hubkv_refine_params params(Tensors const& tensors) const;
};

} // namespace hubkv::plugin
