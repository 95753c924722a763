// SPDX-License-Identifier: Apache-2.0
//
// HubKVAttend: attention of new tokens over compact segment, tail and new tokens of one layer.
//   inputs   q [N, Hq, D] or [B, Tq, Hq, D], k_new and v_new likewise with Hkv heads, arena int64 [2],
//            segments int64 [B, 4], block_table int32 [B, maxPages], tail_lengths int32 [B], new_lengths int32 [B],
//            work int32 [L, capacity, 4], work_count int32 [L]. N = B*Tq, sequence-major.
//   outputs  out, of the shape of q
#pragma once

#include "stage_plugin.h"

namespace hubkv::plugin
{

struct AttendFields
{
    int32_t layer{0};
    int32_t pageTokens{0};
    int64_t pageBase{0};
    float scale{0};

    static std::array<Field<AttendFields>, 4> const kTABLE;
    void check() const;
};

inline constexpr std::array<Field<AttendFields>, 4> AttendFields::kTABLE{{
    {"layer", &AttendFields::layer, 0, INT32_MAX, true},
    {"page_tokens", &AttendFields::pageTokens, 1, INT32_MAX, true},
    {"page_base", &AttendFields::pageBase, 0, 9.2e18},
    {"scale", &AttendFields::scale, 0, FLT_MAX}, // 0: 1 / sqrt(D)
}};

class AttendPlugin final : public StagePluginWith<AttendPlugin, AttendFields>
{
public:
    static constexpr char const* kNAME = "HubKVAttend";
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
    hubkv_attend_params params(Tensors const& tensors) const;
};

} // namespace hubkv::plugin
