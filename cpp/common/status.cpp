// SPDX-License-Identifier: Apache-2.0
#include "common/status.h"

#include <cstdarg>
#include <cstdio>
#include <new>

namespace hubkv
{
namespace
{

thread_local char tLastError[384] = "";

void setLastError(char const* message) noexcept
{
    std::snprintf(tLastError, sizeof(tLastError), "%s", message);
}

} // namespace

StatusError::StatusError(hubkv_status status, char const* message) noexcept
    : mStatus(status)
{
    std::snprintf(mMessage, sizeof(mMessage), "%s", message);
}

void fail(hubkv_status status, char const* format, ...)
{
    char message[384];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    throw StatusError(status, message);
}

char const* lastError() noexcept
{
    return tLastError;
}

hubkv_status statusOfCurrentException() noexcept
{
    try
    {
        throw;
    }
    catch (StatusError const& error)
    {
        setLastError(error.what());
        return error.status();
    }
    catch (std::bad_alloc const&)
    {
        setLastError("out of memory");
        return HUBKV_INTERNAL_ERROR;
    }
    catch (std::exception const& error)
    {
        setLastError(error.what());
        return HUBKV_INTERNAL_ERROR;
    }
    catch (...)
    {
        setLastError("unknown exception");
        return HUBKV_INTERNAL_ERROR;
    }
}

} // namespace hubkv
