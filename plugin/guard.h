// SPDX-License-Identifier: Apache-2.0
//
// Errors inside the plugins are exceptions. guard() ends every noexcept function of TensorRT's interfaces: it turns what
// was thrown into a message for TensorRT's logger and the value that says "failed".
#pragma once

#include "hubkv/hubkv.h"

#include <NvInferRuntime.h>

#include <exception>

namespace hubkv::plugin
{

//! What a plugin refuses. The message names the field or tensor and the value.
class Refused : public std::exception
{
public:
    explicit Refused(char const* message) noexcept;
    char const* what() const noexcept override
    {
        return mMessage;
    }

private:
    char mMessage[512];
};

//! Throws Refused with a printf-formatted message.
[[noreturn]] void refuse(char const* format, ...) __attribute__((format(printf, 1, 2)));

//! Throws Refused with the message of the core where a call of its C ABI failed.
void check(hubkv_status status);

//! The finder of the logger of whoever calls a plugin; null: messages go to stderr.
void setFinder(nvinfer1::ILoggerFinder* finder) noexcept;

//! Sends "who: message" to the logger as an error.
void logError(char const* who, char const* message) noexcept;

template <typename Result, typename Body>
Result guard(char const* who, Result failed, Body&& body) noexcept
{
    try
    {
        return body();
    }
    catch (std::exception const& error)
    {
        logError(who, error.what());
    }
    catch (...)
    {
        logError(who, "an exception of unknown type");
    }
    return failed;
}

} // namespace hubkv::plugin
