// SPDX-License-Identifier: Apache-2.0
//
// HubKVSelect: refined scores -> the K best of each of S groups of heads. S = num_groups divides L*Hkv.
//   inputs   refined float32 [L, Hkv, T]; shape tensor rows_per_group: one value K
//   outputs  positions int32 [S*K], head_offsets int64 [L*Hkv + 1]
#pragma once

#include "stage_plugin.h"

namespace hubkv::plugin
{

struct SelectFields
{
    int32_t numGroups{1};

    static std::array<Field<SelectFields>, 1> const kTABLE;
    void check() const { }
};

inline constexpr std::array<Field<SelectFields>, 1> SelectFields::kTABLE{{
    {"num_groups", &SelectFields::numGroups, 1, INT32_MAX},
}};

class SelectPlugin final : public StagePluginWith<SelectPlugin, SelectFields>
{
public:
    static constexpr char const* kNAME = "HubKVSelect";
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
    hubkv_select_params params(Tensors const& tensors) const;
};

} // namespace hubkv::plugin
