// SPDX-License-Identifier: Apache-2.0
//
// What makes the plugins of each stage.
#pragma once

#include "fields.h"
#include "guard.h"
#include "stage_plugin.h"

#include <NvInfer.h>

namespace hubkv::plugin
{

// Each is defined beside its plugin.
nvinfer1::IPluginCreatorInterface& refineCreator();
nvinfer1::IPluginCreatorInterface& selectCreator();
nvinfer1::IPluginCreatorInterface& compactCreator();
nvinfer1::IPluginCreatorInterface& planCreator();
nvinfer1::IPluginCreatorInterface& attendCreator();

template <typename Plugin>
class Creator final : public nvinfer1::IPluginCreatorV3One
{
public:
    Creator()
        : mFields(listFields<typename Plugin::Fields>(nullptr))
        , mCollection{static_cast<int32_t>(mFields.size()), mFields.data()}
    {
    }

    nvinfer1::IPluginV3* createPlugin(nvinfer1::AsciiChar const* /* name */,
        nvinfer1::PluginFieldCollection const* fields, nvinfer1::TensorRTPhase phase) noexcept override
    {
        return guard(Plugin::kNAME, static_cast<nvinfer1::IPluginV3*>(nullptr), [&]() -> nvinfer1::IPluginV3*
            { return std::make_unique<Plugin>(readFields<typename Plugin::Fields>(fields), phase).release(); });
    }

    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override
    {
        return &mCollection;
    }

    nvinfer1::AsciiChar const* getPluginName() const noexcept override
    {
        return Plugin::kNAME;
    }

    nvinfer1::AsciiChar const* getPluginVersion() const noexcept override
    {
        return kVERSION;
    }

    nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override
    {
        return kNAMESPACE;
    }

private:
    std::vector<nvinfer1::PluginField> mFields;
    nvinfer1::PluginFieldCollection mCollection;
};

template <typename Plugin>
nvinfer1::IPluginCreatorInterface& creatorOf()
{
    static Creator<Plugin> creator;
    return creator;
}

} // namespace hubkv::plugin
