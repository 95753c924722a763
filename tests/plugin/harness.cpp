// SPDX-License-Identifier: Apache-2.0
//
// Drives plugins as TensorRT does, from tests in Python: loads the library, gives it a logger and expressions of its own,
// and hands every call through. Built against TensorRT's headers, linked to none of its libraries.
#include <NvInfer.h>

#include <deque>
#include <dlfcn.h>
#include <string>
#include <vector>

using namespace nvinfer1;

#define HARNESS extern "C" __attribute__((visibility("default")))

namespace
{

// ---- a logger that keeps what it hears --------------------------------------------------------------------------------

class Logger final : public ILogger
{
public:
    void log(Severity severity, AsciiChar const* message) noexcept override
    {
        mText += std::to_string(static_cast<int>(severity)) + " " + message + "\n";
    }
    std::string mText;
};

class Finder final : public ILoggerFinder
{
public:
    ILogger* findLogger() override
    {
        return &mLogger;
    }
    Logger mLogger;
};

Finder gFinder;

// ---- expressions that know their values --------------------------------------------------------------------------------

class Expression final : public IDimensionExpr, private apiv::VDimensionExpr
{
public:
    Expression(int64_t value, bool constant)
        : mValue(value)
        , mConstant(constant)
    {
        mImpl = this;
    }
    int64_t mValue;

private:
    bool isConstant() const override
    {
        return mConstant;
    }
    int64_t getConstantValue() const override
    {
        return mConstant ? mValue : INT64_MIN;
    }
    bool isSizeTensor() const override
    {
        return false;
    }
    bool mConstant;
};

int64_t valueOf(IDimensionExpr const* expression)
{
    return static_cast<Expression const*>(expression)->mValue;
}

class Builder final : public IExprBuilder, private apiv::VExprBuilder
{
public:
    Builder()
    {
        mImpl = this;
    }
    IDimensionExpr const* dimension(int64_t value)
    {
        return &mExpressions.emplace_back(value, false);
    }

private:
    IDimensionExpr const* constant(int64_t value) override
    {
        return &mExpressions.emplace_back(value, true);
    }
    IDimensionExpr const* operation(
        DimensionOperation op, IDimensionExpr const& first, IDimensionExpr const& second) override
    {
        int64_t const a = valueOf(&first);
        int64_t const b = valueOf(&second);
        switch (op)
        {
        case DimensionOperation::kSUM: return dimension(a + b);
        case DimensionOperation::kPROD: return dimension(a * b);
        default: return nullptr; // the plugins use no other
        }
    }
    IDimensionExpr const* declareSizeTensor(int32_t, IDimensionExpr const&, IDimensionExpr const&) override
    {
        return nullptr;
    }
    std::deque<Expression> mExpressions;
};

} // namespace

// ---- what Python passes --------------------------------------------------------------------------------------------------

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

namespace
{

struct Library
{
    void* handle{nullptr};
    IPluginCreatorInterface* const* creators{nullptr};
    int32_t numCreators{0};
};

Dims dims(HarnessTensor const& tensor)
{
    Dims result{};
    result.nbDims = tensor.rank;
    for (int32_t i = 0; i < 8; ++i)
    {
        result.d[i] = tensor.d[i];
    }
    return result;
}

PluginTensorDesc describe(HarnessTensor const& tensor)
{
    PluginTensorDesc desc{};
    desc.dims = dims(tensor);
    desc.type = static_cast<DataType>(tensor.type);
    desc.format = static_cast<TensorFormat>(tensor.format);
    desc.scale = 1;
    return desc;
}

std::vector<PluginTensorDesc> describe(HarnessTensor const* tensors, int32_t count)
{
    std::vector<PluginTensorDesc> result;
    for (int32_t i = 0; i < count; ++i)
    {
        result.push_back(describe(tensors[i]));
    }
    return result;
}

//! Every dimension dynamic, from 1 to the given size.
std::vector<DynamicPluginTensorDesc> describeDynamic(HarnessTensor const* tensors, int32_t count)
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

IPluginV3OneBuild* build(IPluginV3* plugin)
{
    return capability<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD);
}

IPluginV3OneRuntime* runtime(IPluginV3* plugin)
{
    return capability<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME);
}

} // namespace

HARNESS Library* harness_open(char const* file)
{
    auto library = new Library;
    library->handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (library->handle == nullptr)
    {
        gFinder.mLogger.mText += dlerror();
        return library;
    }
    auto const setFinder = reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(library->handle, "setLoggerFinder"));
    auto const getCreators =
        reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library->handle, "getCreators"));
    setFinder(&gFinder);
    library->creators = getCreators(library->numCreators);
    return library;
}

HARNESS void harness_close(Library* library)
{
    dlclose(library->handle);
    delete library;
}

HARNESS char const* harness_log()
{
    static std::string text;
    text.swap(gFinder.mLogger.mText);
    gFinder.mLogger.mText.clear();
    return text.c_str();
}

HARNESS int32_t harness_creators(Library const* library)
{
    return library->numCreators;
}

HARNESS IPluginV3* harness_create(
    Library const* library, char const* name, HarnessField const* fields, int32_t count, int32_t phase)
{
    std::vector<PluginField> list;
    for (int32_t i = 0; i < count && fields != nullptr; ++i)
    {
        list.emplace_back(
            fields[i].name, fields[i].data, static_cast<PluginFieldType>(fields[i].type), fields[i].length);
    }
    PluginFieldCollection const collection{count, fields == nullptr ? nullptr : list.data()};
    for (int32_t i = 0; i < library->numCreators; ++i)
    {
        auto const creator = static_cast<IPluginCreatorV3One*>(library->creators[i]);
        if (std::string(creator->getPluginName()) == name)
        {
            return creator->createPlugin("node", &collection, static_cast<TensorRTPhase>(phase));
        }
    }
    return nullptr;
}

//! As an engine does: the fields of the plugin, copied, make a plugin of the runtime phase.
HARNESS IPluginV3* harness_reload(Library const* library, IPluginV3* plugin)
{
    auto const core = capability<IPluginV3OneCore>(plugin, PluginCapabilityType::kCORE);
    PluginFieldCollection const* const fields = runtime(plugin)->getFieldsToSerialize();
    std::deque<std::string> memory;
    std::vector<HarnessField> list;
    for (int32_t i = 0; i < fields->nbFields; ++i)
    {
        PluginField const& field = fields->fields[i];
        size_t const bytes = field.type == PluginFieldType::kINT64 ? 8 : 4;
        std::string const& name = memory.emplace_back(field.name);
        std::string const& data = memory.emplace_back(static_cast<char const*>(field.data), bytes * field.length);
        list.push_back({name.c_str(), data.data(), static_cast<int32_t>(field.type), field.length});
    }
    return harness_create(
        library, core->getPluginName(), list.data(), fields->nbFields, static_cast<int32_t>(TensorRTPhase::kRUNTIME));
}

HARNESS int32_t harness_fields(IPluginV3* plugin, HarnessField* out)
{
    PluginFieldCollection const* const fields = runtime(plugin)->getFieldsToSerialize();
    for (int32_t i = 0; i < fields->nbFields; ++i)
    {
        PluginField const& field = fields->fields[i];
        out[i] = {field.name, field.data, static_cast<int32_t>(field.type), field.length};
    }
    return fields->nbFields;
}

HARNESS IPluginV3* harness_clone(IPluginV3* plugin)
{
    return plugin->clone();
}

HARNESS IPluginV3* harness_attach(IPluginV3* plugin)
{
    return runtime(plugin)->attachToContext(nullptr);
}

HARNESS void harness_destroy(IPluginV3* plugin)
{
    delete plugin;
}

HARNESS int32_t harness_num_outputs(IPluginV3* plugin)
{
    return build(plugin)->getNbOutputs();
}

HARNESS int32_t harness_num_tactics(IPluginV3* plugin)
{
    return build(plugin)->getNbTactics();
}

HARNESS int32_t harness_types(
    IPluginV3* plugin, int32_t* outputTypes, int32_t numOutputs, int32_t const* inputTypes, int32_t numInputs)
{
    return build(plugin)->getOutputDataTypes(
        reinterpret_cast<DataType*>(outputTypes), numOutputs, reinterpret_cast<DataType const*>(inputTypes), numInputs);
}

HARNESS int32_t harness_supports(
    IPluginV3* plugin, int32_t position, HarnessTensor const* tensors, int32_t numInputs, int32_t numOutputs)
{
    auto const descs = describeDynamic(tensors, numInputs + numOutputs);
    return build(plugin)->supportsFormatCombination(position, descs.data(), numInputs, numOutputs) ? 1 : 0;
}

//! Output dimensions for these input dimensions; numValues < 0: without the shape tensor.
HARNESS int32_t harness_shapes(IPluginV3* plugin, HarnessTensor const* in, int32_t numInputs, int64_t const* values,
    int32_t numValues, HarnessTensor* out, int32_t numOutputs)
{
    Builder builder;
    std::vector<DimsExprs> inputs(numInputs);
    for (int32_t i = 0; i < numInputs; ++i)
    {
        inputs[i].nbDims = in[i].rank;
        for (int32_t axis = 0; axis < in[i].rank; ++axis)
        {
            inputs[i].d[axis] = builder.dimension(in[i].d[axis]);
        }
    }
    DimsExprs shape{};
    shape.nbDims = numValues;
    for (int32_t i = 0; i < numValues; ++i)
    {
        shape.d[i] = builder.dimension(values[i]);
    }
    std::vector<DimsExprs> outputs(numOutputs);
    int32_t const status = build(plugin)->getOutputShapes(
        inputs.data(), numInputs, &shape, numValues < 0 ? 0 : 1, outputs.data(), numOutputs, builder);
    for (int32_t i = 0; i < numOutputs && status == 0; ++i)
    {
        out[i].rank = outputs[i].nbDims;
        for (int32_t axis = 0; axis < outputs[i].nbDims; ++axis)
        {
            out[i].d[axis] = valueOf(outputs[i].d[axis]);
        }
    }
    return status;
}

HARNESS int32_t harness_configure(
    IPluginV3* plugin, HarnessTensor const* in, int32_t numInputs, HarnessTensor const* out, int32_t numOutputs)
{
    auto const inputs = describeDynamic(in, numInputs);
    auto const outputs = describeDynamic(out, numOutputs);
    return build(plugin)->configurePlugin(inputs.data(), numInputs, outputs.data(), numOutputs);
}

HARNESS int64_t harness_workspace(
    IPluginV3* plugin, HarnessTensor const* in, int32_t numInputs, HarnessTensor const* out, int32_t numOutputs)
{
    auto const inputs = describeDynamic(in, numInputs);
    auto const outputs = describeDynamic(out, numOutputs);
    return static_cast<int64_t>(build(plugin)->getWorkspaceSize(inputs.data(), numInputs, outputs.data(), numOutputs));
}

HARNESS int32_t harness_shape_change(
    IPluginV3* plugin, HarnessTensor const* in, int32_t numInputs, HarnessTensor const* out, int32_t numOutputs)
{
    auto const inputs = describe(in, numInputs);
    auto const outputs = describe(out, numOutputs);
    return runtime(plugin)->onShapeChange(inputs.data(), numInputs, outputs.data(), numOutputs);
}

HARNESS int32_t harness_enqueue(IPluginV3* plugin, HarnessTensor const* in, int32_t numInputs, HarnessTensor const* out,
    int32_t numOutputs, void const* const* inputs, void* const* outputs, void* workspace)
{
    auto const inputDescs = describe(in, numInputs);
    auto const outputDescs = describe(out, numOutputs);
    return runtime(plugin)->enqueue(inputDescs.data(), outputDescs.data(), inputs, outputs, workspace, nullptr);
}
