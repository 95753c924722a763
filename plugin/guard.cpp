// SPDX-License-Identifier: Apache-2.0
#include "guard.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>

namespace hubkv::plugin
{
namespace
{

std::atomic<nvinfer1::ILoggerFinder*> gFinder{nullptr};

} // namespace

Refused::Refused(char const* message) noexcept
{
    std::snprintf(mMessage, sizeof(mMessage), "%s", message);
}

void refuse(char const* format, ...)
{
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    throw Refused(message);
}

void check(hubkv_status status)
{
    if (status != HUBKV_OK)
    {
        throw Refused(hubkv_last_error());
    }
}

void setFinder(nvinfer1::ILoggerFinder* finder) noexcept
{
    gFinder.store(finder);
}

void logError(char const* who, char const* message) noexcept
{
    char line[640];
    std::snprintf(line, sizeof(line), "%s: %s", who, message);
    try
    {
        nvinfer1::ILoggerFinder* const finder = gFinder.load();
        nvinfer1::ILogger* const logger = finder == nullptr ? nullptr : finder->findLogger();
        if (logger != nullptr)
        {
            logger->log(nvinfer1::ILogger::Severity::kERROR, line);
            return;
        }
    }
    catch (...) // a finder without a logger: the message is not lost
    {
    }
    std::fprintf(stderr, "%s\n", line);
}

} // namespace hubkv::plugin
