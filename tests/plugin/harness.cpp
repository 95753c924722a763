// SPDX-License-Identifier: Apache-2.0
//
// Drives plugins as TensorRT does, from tests in Python: every call is handed through, with expressions and a logger of
// the harness. Built against TensorRT's headers, linked to none of its libraries.
#include "descriptions.h"
#include "expressions.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

using namespace harness;

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

//! One enqueue of one context.
struct HarnessCall
{
    IPluginV3* plugin;
    HarnessTensor const* in;
    int32_t numInputs;
    HarnessTensor const* out;
    int32_t numOutputs;
    void const* const* inputs;
    void* const* outputs;
    void* workspace;
    int32_t status;
};

//! All calls at the same time, each on a thread of its own and so many times; the first failure stays in status. Answers
//! how many were inside enqueue at once.
HARNESS int32_t harness_enqueue_together(HarnessCall* calls, int32_t count, int32_t times)
{
    std::atomic<int32_t> ready{0};
    std::atomic<int32_t> inside{0};
    std::vector<int32_t> seen(count);
    std::vector<std::thread> threads;
    for (int32_t i = 0; i < count; ++i)
    {
        threads.emplace_back(
            [&, i]
            {
                HarnessCall& call = calls[i];
                for (++ready; ready < count;)
                {
                    std::this_thread::yield();
                }
                for (int32_t time = 0; time < times && call.status == 0; ++time)
                {
                    int32_t const now = ++inside;
                    seen[i] = std::max(seen[i], now);
                    call.status = harness_enqueue(call.plugin, call.in, call.numInputs, call.out, call.numOutputs,
                        call.inputs, call.outputs, call.workspace);
                    --inside;
                }
            });
    }
    for (std::thread& thread : threads)
    {
        thread.join();
    }
    return *std::max_element(seen.begin(), seen.end());
}
