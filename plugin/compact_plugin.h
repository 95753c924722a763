// SPDX-License-Identifier: Apache-2.0
//
// HubKVCompact: the kept rows of n layers, without holes.
//   inputs   k of n layers, v of n layers [T, Hkv, D] (token_major = 1) or [Hkv, T, D] (token_major = 0),
//            positions int32 [K], head_offsets int64 [n*Hkv + 1]
//   outputs  k_rows [K, D], v_rows [K, D]
#pragma once

#include "stage_plugin.h"

namespace hubkv::plugin
{

struct CompactFields
{
    int32_t tokenMajor{1};

    static std::array<Field<CompactFields>, 1> const kTABLE;
    void check() const { }
};

inline constexpr std::array<Field<CompactFields>, 1> CompactFields::kTABLE{{
    {"token_major", &CompactFields::tokenMajor, 0, 1},
}};

class CompactPlugin final : public StagePluginWith<CompactPlugin, CompactFields>
{
public:
    static constexpr char const* kNAME = "HubKVCompact";
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
    hubkv_compact_params params(Tensors const& tensors) const;
};

} // namespace hubkv::plugin
