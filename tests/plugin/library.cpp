// SPDX-License-Identifier: Apache-2.0
//
// A loaded plugin library: its logger, its creators, and plugins made by them.
#include "descriptions.h"

#include <deque>
#include <dlfcn.h>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using namespace harness;

namespace
{

//! Keeps what it hears, from any number of threads.
class Logger final : public ILogger
{
public:
    void log(Severity severity, AsciiChar const* message) noexcept override
    {
        std::lock_guard<std::mutex> const lock(mMutex);
        mText += std::to_string(static_cast<int>(severity)) + " " + message + "\n";
    }
    std::string take()
    {
        std::lock_guard<std::mutex> const lock(mMutex);
        return std::exchange(mText, {});
    }

private:
    std::mutex mMutex;
    std::string mText;
};

Logger gLogger;

class Finder final : public ILoggerFinder
{
public:
    ILogger* findLogger() override
    {
        return &gLogger;
    }
} gFinder;

class FinderOfNone final : public ILoggerFinder
{
public:
    ILogger* findLogger() override
    {
        return nullptr;
    }
} gFinderOfNone;

class FinderThatThrows final : public ILoggerFinder
{
public:
    ILogger* findLogger() override
    {
        throw std::runtime_error("no logger");
    }
} gFinderThatThrows;

struct Library
{
    void* handle{nullptr};
    void (*setLoggerFinder)(ILoggerFinder*){nullptr};
    IPluginCreatorInterface* const* creators{nullptr};
    int32_t numCreators{0};
};

} // namespace

HARNESS Library* harness_open(char const* file)
{
    auto library = new Library;
    library->handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (library->handle == nullptr)
    {
        gLogger.log(ILogger::Severity::kERROR, dlerror());
        return library;
    }
    library->setLoggerFinder = reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(library->handle, "setLoggerFinder"));
    auto const getCreators =
        reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library->handle, "getCreators"));
    library->setLoggerFinder(&gFinder);
    library->creators = getCreators(library->numCreators);
    return library;
}

//! 0: the logger that is read by harness_log; 1: no finder; 2: a finder of none; 3: a finder that throws.
HARNESS void harness_set_finder(Library const* library, int32_t kind)
{
    ILoggerFinder* const finders[]{&gFinder, nullptr, &gFinderOfNone, &gFinderThatThrows};
    library->setLoggerFinder(finders[kind]);
}

HARNESS void harness_close(Library* library)
{
    dlclose(library->handle);
    delete library;
}

HARNESS char const* harness_log()
{
    static std::string text;
    text = gLogger.take();
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
