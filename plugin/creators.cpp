// SPDX-License-Identifier: Apache-2.0
//
// The two functions that IPluginRegistry::loadLibrary calls.
#include "creators.h"

#define HUBKV_PLUGIN_API extern "C" __attribute__((visibility("default")))

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
            static std::array<nvinfer1::IPluginCreatorInterface*, 5> const creators{
                &refineCreator(), &selectCreator(), &compactCreator(), &planCreator(), &attendCreator()};
            numCreators = static_cast<int32_t>(creators.size());
            return creators.data();
        });
}
