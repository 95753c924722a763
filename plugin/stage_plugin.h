// SPDX-License-Identifier: Apache-2.0
//
// What the plugins of all stages share: StagePlugin answers TensorRT's interfaces by a few functions of a stage that may
// throw. One format (linear), no tactics, no aliased outputs.
#pragma once

#include "fields.h"
#include "guard.h"
#include "tensors.h"

#include <NvInferRuntime.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace hubkv::plugin
{

constexpr char const* kNAMESPACE = "hubkv";
constexpr char const* kVERSION = "1";

class StagePlugin : public nvinfer1::IPluginV3,
                    public nvinfer1::IPluginV3OneCore,
                    public nvinfer1::IPluginV3OneBuild,
                    public nvinfer1::IPluginV3OneRuntime
{
public:
    // ---- IPluginV3
    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept final;
    nvinfer1::IPluginV3* clone() noexcept final;

    // ---- IPluginV3OneCore
    nvinfer1::AsciiChar const* getPluginName() const noexcept final;
    nvinfer1::AsciiChar const* getPluginVersion() const noexcept final;
    nvinfer1::AsciiChar const* getPluginNamespace() const noexcept final;

    // ---- IPluginV3OneBuild
    int32_t getNbOutputs() const noexcept final;
    int32_t getOutputDataTypes(nvinfer1::DataType* outputTypes, int32_t numOutputs,
        nvinfer1::DataType const* inputTypes, int32_t numInputs) const noexcept final;
    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t numInputs,
        nvinfer1::DimsExprs const* shapeInputs, int32_t numShapeInputs, nvinfer1::DimsExprs* outputs,
        int32_t numOutputs, nvinfer1::IExprBuilder& builder) noexcept final;
    bool supportsFormatCombination(int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors,
        int32_t numInputs, int32_t numOutputs) noexcept final;
    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t numInputs,
        nvinfer1::DynamicPluginTensorDesc const* out, int32_t numOutputs) noexcept final;
    size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* in, int32_t numInputs,
        nvinfer1::DynamicPluginTensorDesc const* out, int32_t numOutputs) const noexcept final;

    // ---- IPluginV3OneRuntime
    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t numInputs,
        nvinfer1::PluginTensorDesc const* out, int32_t numOutputs) noexcept final;
    int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDescs, nvinfer1::PluginTensorDesc const* outputDescs,
        void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept final;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept final;
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept final;

protected:
    explicit StagePlugin(nvinfer1::TensorRTPhase phase)
        : mPhase(phase)
    {
    }

    // ---- the stage
    virtual char const* name() const noexcept = 0;
    virtual std::unique_ptr<StagePlugin> copy() const = 0;
    virtual std::vector<nvinfer1::PluginField> fieldValues() const = 0;
    virtual int32_t numOutputs() const noexcept = 0;
    //! Refuses a count that the stage does not take.
    virtual void checkNumInputs(int32_t numInputs) const = 0;
    //! Inputs count first, then outputs.
    virtual Kind kind(int32_t position, int32_t numInputs) const = 0;
    virtual void outputShapes(nvinfer1::DimsExprs const* inputs, int32_t numInputs,
        nvinfer1::DimsExprs const* shapeInputs, int32_t numShapeInputs, nvinfer1::DimsExprs* outputs,
        nvinfer1::IExprBuilder& builder) const = 0;
    //! Refuses dimensions that do not belong together; answers the workspace that they need.
    virtual int64_t workspaceBytes(Tensors const& tensors) const = 0;
    virtual void run(Tensors const& tensors, void const* const* inputs, void* const* outputs, void* workspace,
        cudaStream_t stream) const = 0;

private:
    int32_t firstRows(int32_t numInputs) const;
    void checkTypes(Tensors const& tensors) const;
    int64_t boundedWorkspace(nvinfer1::DynamicPluginTensorDesc const* in, int32_t numInputs,
        nvinfer1::DynamicPluginTensorDesc const* out, int32_t numOutputs) const;

    nvinfer1::TensorRTPhase mPhase;
    int32_t mNumInputs{-1}; //!< as configurePlugin or onShapeChange saw it: enqueue is not told
    std::vector<nvinfer1::PluginField> mSerialized;
    nvinfer1::PluginFieldCollection mCollection{};
};

//! A stage with its fields: Stage has kNAME and derives from this.
template <typename Stage, typename F>
class StagePluginWith : public StagePlugin
{
public:
    using Fields = F;

    StagePluginWith(F const& fields, nvinfer1::TensorRTPhase phase)
        : StagePlugin(phase)
        , mFields(fields)
    {
    }

protected:
    char const* name() const noexcept final
    {
        return Stage::kNAME;
    }
    std::unique_ptr<StagePlugin> copy() const final
    {
        return std::make_unique<Stage>(static_cast<Stage const&>(*this));
    }
    std::vector<nvinfer1::PluginField> fieldValues() const final
    {
        return listFields(&mFields);
    }

    F mFields;
};

} // namespace hubkv::plugin
