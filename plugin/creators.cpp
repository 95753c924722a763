// SPDX-License-Identifier: Apache-2.0
//
// The two functions that IPluginRegistry::loadLibrary calls, and a creator for each stage.
#include "attend_plugin.h"
#include "compact_plugin.h"
#include "plan_plugin.h"
#include "refine_plugin.h"
#include "select_plugin.h"

#include <NvInfer.h>

#define HUBKV_PLUGIN_API extern "C" __attribute__((visibility("default")))

namespace hubkv::plugin
{
namespace
{

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

struct Creators
{
    Creator<RefinePlugin> refine;
    Creator<SelectPlugin> select;
    Creator<CompactPlugin> compact;
    Creator<PlanPlugin> plan;
    Creator<AttendPlugin> attend;
    std::array<nvinfer1::IPluginCreatorInterface*, 5> list{&refine, &select, &compact, &plan, &attend};
};

} // namespace
} // namespace hubkv::plugin

HUBKV_PLUGIN_API void setLoggerFinder(nvinfer1::ILoggerFinder* finder)
{
    hubkv::plugin::setFinder(finder);
}

HUBKV_PLUGIN_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& numCreators)
{
    using namespace hubkv::plugin;
    numCreators = 0;
    return guard("hubkv", static_cast<nvinfer1::IPluginCreatorInterface* const*>(nullptr),
        [&]() -> nvinfer1::IPluginCreatorInterface* const*
        {
            static Creators creators;
            numCreators = static_cast<int32_t>(creators.list.size());
            return creators.list.data();
        });
}
