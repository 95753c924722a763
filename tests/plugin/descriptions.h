// SPDX-License-Identifier: Apache-2.0
//
// What Python passes, and what TensorRT's interfaces take in its place.
#pragma once

#include <NvInfer.h>

#include <vector>

#define HARNESS extern "C" __attribute__((visibility("default")))

struct HarnessTensor
{
    int32_t type;
    int32_t format;
    int32_t rank;
    int64_t d[8];
};

struct HarnessField
{
    char const* name;
    void const* data;
    int32_t type;
    int32_t length;
};

namespace harness
{

using namespace nvinfer1;

inline Dims dims(HarnessTensor const& tensor)
{
    Dims result{};
    result.nbDims = tensor.rank;
    for (int32_t i = 0; i < 8; ++i)
    {
        result.d[i] = tensor.d[i];
    }
    return result;
}

inline PluginTensorDesc describe(HarnessTensor const& tensor)
{
    PluginTensorDesc desc{};
    desc.dims = dims(tensor);
    desc.type = static_cast<DataType>(tensor.type);
    desc.format = static_cast<TensorFormat>(tensor.format);
    desc.scale = 1;
    return desc;
}

inline std::vector<PluginTensorDesc> describe(HarnessTensor const* tensors, int32_t count)
{
    std::vector<PluginTensorDesc> result;
    for (int32_t i = 0; i < count; ++i)
    {
        result.push_back(describe(tensors[i]));
    }
    return result;
}

//! Every dimension dynamic, from 1 to the given size.
inline std::vector<DynamicPluginTensorDesc> describeDynamic(HarnessTensor const* tensors, int32_t count)
{
    std::vector<DynamicPluginTensorDesc> result;
    for (int32_t i = 0; i < count; ++i)
    {
        DynamicPluginTensorDesc desc{};
        desc.desc = describe(tensors[i]);
        desc.min = desc.opt = desc.max = desc.desc.dims;
        for (int32_t axis = 0; axis < desc.desc.dims.nbDims && axis < Dims::MAX_DIMS; ++axis)
        {
            desc.desc.dims.d[axis] = -1;
            desc.min.d[axis] = 1;
        }
        result.push_back(desc);
    }
    return result;
}

template <typename Capability>
Capability* capability(IPluginV3* plugin, PluginCapabilityType type)
{
    return static_cast<Capability*>(plugin->getCapabilityInterface(type));
}

inline IPluginV3OneBuild* build(IPluginV3* plugin)
{
    return capability<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD);
}

inline IPluginV3OneRuntime* runtime(IPluginV3* plugin)
{
    return capability<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME);
}

} // namespace harness
