// SPDX-License-Identifier: Apache-2.0
#include "stage_plugin.h"

#if defined(HUBKV_WITH_CUDA) && !defined(HUBKV_SIMT)
#include <cuda_runtime_api.h>
#endif

#include <cstring>

namespace hubkv::plugin
{
namespace
{

using nvinfer1::DataType;

void writeZeros(void* address, int64_t bytes, [[maybe_unused]] cudaStream_t stream)
{
    if (hubkv_has_cuda() == 0)
    {
        refuse("this library was not built with CUDA");
    }
#if defined(HUBKV_WITH_CUDA) && !defined(HUBKV_SIMT)
    cudaError_t const error = cudaMemsetAsync(address, 0, static_cast<size_t>(bytes), stream);
    if (error != cudaSuccess)
    {
        refuse("cudaMemsetAsync: %s", cudaGetErrorString(error));
    }
#else
    std::memset(address, 0, static_cast<size_t>(bytes)); // emulated kernels work on host memory
#endif
}

std::vector<nvinfer1::PluginTensorDesc> upperBounds(nvinfer1::DynamicPluginTensorDesc const* tensors, int32_t count)
{
    std::vector<nvinfer1::PluginTensorDesc> bounds;
    for (int32_t i = 0; i < count; ++i)
    {
        bounds.push_back(tensors[i].desc);
        bounds.back().dims = tensors[i].max;
    }
    return bounds;
}

} // namespace

// ---- IPluginV3 ------------------------------------------------------------------------------------------------------

nvinfer1::IPluginCapability* StagePlugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept
{
    switch (type)
    {
    case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

nvinfer1::IPluginV3* StagePlugin::clone() noexcept
{
    return guard(
        name(), static_cast<nvinfer1::IPluginV3*>(nullptr), [&]() -> nvinfer1::IPluginV3* { return copy().release(); });
}

// ---- IPluginV3OneCore -----------------------------------------------------------------------------------------------

nvinfer1::AsciiChar const* StagePlugin::getPluginName() const noexcept
{
    return name();
}

nvinfer1::AsciiChar const* StagePlugin::getPluginVersion() const noexcept
{
    return kVERSION;
}

nvinfer1::AsciiChar const* StagePlugin::getPluginNamespace() const noexcept
{
    return kNAMESPACE;
}

// ---- IPluginV3OneBuild ----------------------------------------------------------------------------------------------

int32_t StagePlugin::getNbOutputs() const noexcept
{
    return numOutputs();
}

int32_t StagePlugin::firstRows(int32_t numInputs) const
{
    int32_t position = 0;
    while (position < numInputs && kind(position, numInputs) != Kind::kROWS)
    {
        ++position;
    }
    return position;
}

int32_t StagePlugin::getOutputDataTypes(
    DataType* outputTypes, int32_t numOutputs, DataType const* inputTypes, int32_t numInputs) const noexcept
{
    return guard(name(), -1,
        [&]
        {
            checkNumInputs(numInputs);
            for (int32_t i = 0; i < numOutputs; ++i)
            {
                Kind const wanted = kind(numInputs + i, numInputs);
                outputTypes[i] = wanted == Kind::kROWS ? inputTypes[firstRows(numInputs)] : fixedType(wanted);
            }
            return 0;
        });
}

int32_t StagePlugin::getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t numInputs,
    nvinfer1::DimsExprs const* shapeInputs, int32_t numShapeInputs, nvinfer1::DimsExprs* outputs, int32_t numOutputs,
    nvinfer1::IExprBuilder& builder) noexcept
{
    return guard(name(), -1,
        [&]
        {
            checkNumInputs(numInputs);
            if (numOutputs != this->numOutputs())
            {
                refuse("outputs: there are %d, not %d", static_cast<int>(this->numOutputs()),
                    static_cast<int>(numOutputs));
            }
            outputShapes(inputs, numInputs, shapeInputs, numShapeInputs, outputs, builder);
            return 0;
        });
}

bool StagePlugin::supportsFormatCombination(
    int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors, int32_t numInputs, int32_t numOutputs) noexcept
{
    return guard(name(), false,
        [&]
        {
            checkNumInputs(numInputs);
            if (position < 0 || position >= numInputs + numOutputs || numOutputs != this->numOutputs()
                || tensors[position].desc.format != nvinfer1::TensorFormat::kLINEAR)
            {
                return false;
            }
            DataType const type = tensors[position].desc.type;
            Kind const wanted = kind(position, numInputs);
            if (wanted != Kind::kROWS)
            {
                return type == fixedType(wanted);
            }
            int32_t const first = firstRows(numInputs);
            return position == first ? isRowType(type) : type == tensors[first].desc.type;
        });
}

int64_t StagePlugin::boundedWorkspace(nvinfer1::DynamicPluginTensorDesc const* in, int32_t numInputs,
    nvinfer1::DynamicPluginTensorDesc const* out, int32_t numOutputs) const
{
    checkNumInputs(numInputs);
    std::vector<nvinfer1::PluginTensorDesc> const inputs = upperBounds(in, numInputs);
    std::vector<nvinfer1::PluginTensorDesc> const outputs = upperBounds(out, numOutputs);
    Tensors const tensors{inputs.data(), numInputs, outputs.data(), numOutputs, false};
    checkTypes(tensors);
    return workspaceBytes(tensors);
}

int32_t StagePlugin::configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t numInputs,
    nvinfer1::DynamicPluginTensorDesc const* out, int32_t numOutputs) noexcept
{
    return guard(name(), -1,
        [&]
        {
            boundedWorkspace(in, numInputs, out, numOutputs);
            mNumInputs = numInputs;
            return 0;
        });
}

size_t StagePlugin::getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* in, int32_t numInputs,
    nvinfer1::DynamicPluginTensorDesc const* out, int32_t numOutputs) const noexcept
{
    return guard(
        name(), size_t{0}, [&] { return static_cast<size_t>(boundedWorkspace(in, numInputs, out, numOutputs)); });
}

// ---- IPluginV3OneRuntime --------------------------------------------------------------------------------------------

void StagePlugin::checkTypes(Tensors const& tensors) const
{
    if (tensors.numOut != numOutputs())
    {
        refuse("outputs: there are %d, not %d", static_cast<int>(numOutputs()), static_cast<int>(tensors.numOut));
    }
    int32_t const first = firstRows(tensors.numIn);
    for (int32_t position = 0; position < tensors.numIn + tensors.numOut; ++position)
    {
        bool const isInput = position < tensors.numIn;
        nvinfer1::PluginTensorDesc const& desc = isInput ? tensors.in[position] : tensors.out[position - tensors.numIn];
        Kind const wanted = kind(position, tensors.numIn);
        bool const right = wanted == Kind::kROWS ? isRowType(desc.type) && desc.type == tensors.in[first].type
                                                 : desc.type == fixedType(wanted);
        if (!right)
        {
            refuse("%s %d: its type %d is wrong", isInput ? "input" : "output",
                static_cast<int>(isInput ? position : position - tensors.numIn), static_cast<int>(desc.type));
        }
    }
}

int32_t StagePlugin::onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t numInputs,
    nvinfer1::PluginTensorDesc const* out, int32_t numOutputs) noexcept
{
    return guard(name(), -1,
        [&]
        {
            checkNumInputs(numInputs);
            Tensors const tensors{in, numInputs, out, numOutputs, mPhase == nvinfer1::TensorRTPhase::kRUNTIME};
            checkTypes(tensors);
            workspaceBytes(tensors);
            mNumInputs = numInputs;
            return 0;
        });
}

int32_t StagePlugin::enqueue(nvinfer1::PluginTensorDesc const* inputDescs,
    nvinfer1::PluginTensorDesc const* outputDescs, void const* const* inputs, void* const* outputs, void* workspace,
    cudaStream_t stream) noexcept
{
    return guard(name(), -1,
        [&]
        {
            if (mNumInputs < 0)
            {
                refuse("enqueue before configurePlugin or onShapeChange");
            }
            if (mPhase == nvinfer1::TensorRTPhase::kBUILD)
            {
                // The builder times plugins on inputs that hold anything.
                for (int32_t i = 0; i < numOutputs(); ++i)
                {
                    int64_t bytes = elementBytes(outputDescs[i].type);
                    for (int32_t axis = 0; axis < outputDescs[i].dims.nbDims; ++axis)
                    {
                        bytes *= outputDescs[i].dims.d[axis];
                    }
                    writeZeros(outputs[i], bytes, stream);
                }
                return 0;
            }
            Tensors const tensors{inputDescs, mNumInputs, outputDescs, numOutputs(), true};
            checkTypes(tensors);
            run(tensors, inputs, outputs, workspace, stream);
            return 0;
        });
}

nvinfer1::IPluginV3* StagePlugin::attachToContext(nvinfer1::IPluginResourceContext* /* context */) noexcept
{
    return clone();
}

nvinfer1::PluginFieldCollection const* StagePlugin::getFieldsToSerialize() noexcept
{
    return guard(name(), static_cast<nvinfer1::PluginFieldCollection const*>(nullptr),
        [&]() -> nvinfer1::PluginFieldCollection const*
        {
            mSerialized = fieldValues();
            mCollection = {static_cast<int32_t>(mSerialized.size()), mSerialized.data()};
            return &mCollection;
        });
}

} // namespace hubkv::plugin
