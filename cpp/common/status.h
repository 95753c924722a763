// SPDX-License-Identifier: Apache-2.0
//
// Errors inside the library are exceptions; guard() turns them into a status and a message per thread, so that none
// crosses the C ABI. Checks run before any output is written.
#pragma once

#include "hubkv/hubkv.h"

#include <cstddef>
#include <cstdint>
#include <exception>

#if defined(__GNUC__)
#define HUBKV_PRINTF(formatIndex, firstArgument) __attribute__((format(printf, formatIndex, firstArgument)))
#else
#define HUBKV_PRINTF(formatIndex, firstArgument)
#endif

namespace hubkv
{

constexpr int64_t kINT32_MAX = 2147483647;
constexpr int64_t kINT64_MAX = 9223372036854775807;
constexpr int64_t kWORKSPACE_ALIGNMENT = 64;
constexpr int64_t kCUDA_WORKSPACE_ALIGNMENT = 256;

class StatusError : public std::exception
{
public:
    StatusError(hubkv_status status, char const* message) noexcept;
    char const* what() const noexcept override
    {
        return mMessage;
    }
    hubkv_status status() const noexcept
    {
        return mStatus;
    }

private:
    hubkv_status mStatus;
    char mMessage[384];
};

//! Throws StatusError with a printf-formatted message.
[[noreturn]] void fail(hubkv_status status, char const* format, ...) HUBKV_PRINTF(2, 3);

//! Message of the last failure on this thread ("" when there was none).
char const* lastError() noexcept;

//! Call inside a catch block: keeps the message of the exception in flight and gives its status.
hubkv_status statusOfCurrentException() noexcept;

//! Runs body; whatever it throws becomes a status. The one way in for every function of the C ABI.
template <typename Body>
hubkv_status guard(Body&& body) noexcept
{
    try
    {
        body();
        return HUBKV_OK;
    }
    catch (...)
    {
        return statusOfCurrentException();
    }
}

// ---- checks: each names the field and the value that was refused ----

//! Refuses with HUBKV_INVALID_ARGUMENT. The format starts with the name of the field: "D: %lld is not a multiple of 8".
#define HUBKV_CHECK(condition, ...)                                                                                    \
    do                                                                                                                 \
    {                                                                                                                  \
        if (!(condition))                                                                                              \
        {                                                                                                              \
            ::hubkv::fail(HUBKV_INVALID_ARGUMENT, __VA_ARGS__);                                                        \
        }                                                                                                              \
    } while (false)

inline void checkPointer(char const* field, void const* pointer)
{
    HUBKV_CHECK(pointer != nullptr, "%s: the pointer is null", field);
}

//! Typed arrays: not null, and aligned to their element.
inline void checkAligned(char const* field, void const* pointer, int64_t alignment)
{
    checkPointer(field, pointer);
    HUBKV_CHECK(reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(alignment) == 0,
        "%s: address %p is not aligned to %lld bytes", field, pointer, static_cast<long long>(alignment));
}

inline void checkRange(char const* field, int64_t value, int64_t low, int64_t high)
{
    if (value < low || value > high)
    {
        if (high == kINT64_MAX)
        {
            fail(HUBKV_INVALID_ARGUMENT, "%s: %lld is not >= %lld", field, static_cast<long long>(value),
                static_cast<long long>(low));
        }
        fail(HUBKV_INVALID_ARGUMENT, "%s: %lld is not in %lld..%lld", field, static_cast<long long>(value),
            static_cast<long long>(low), static_cast<long long>(high));
    }
}

//! a * b for factors >= 0; refuses a product past int64 naming `what`.
inline int64_t checkedProduct(char const* what, int64_t a, int64_t b)
{
    HUBKV_CHECK(a == 0 || b <= kINT64_MAX / a, "%s: %lld * %lld does not fit in 64 bits", what,
        static_cast<long long>(a), static_cast<long long>(b));
    return a * b;
}

inline void checkWorkspace(
    void const* workspace, int64_t given, int64_t needed, int64_t alignment = kWORKSPACE_ALIGNMENT)
{
    HUBKV_CHECK(given >= needed,
        "workspaceBytes: %lld is less than the %lld bytes that the workspace function asks for",
        static_cast<long long>(given), static_cast<long long>(needed));
    if (needed > 0)
    {
        checkAligned("workspace", workspace, alignment);
    }
}

//! D as every stage takes it.
inline void checkHeadDim(int64_t D)
{
    HUBKV_CHECK(
        D >= 8 && D <= 256 && D % 8 == 0, "D: %lld is not a multiple of 8 in 8..256", static_cast<long long>(D));
}

//! Whether this build has CUDA kernels. Where it has none their functions are declared but do not exist, so they are
//! called inside `if constexpr (kWITH_CUDA)`.
#if defined(HUBKV_WITH_CUDA)
constexpr bool kWITH_CUDA = true;
#else
constexpr bool kWITH_CUDA = false;
#endif

//! Refuses variables of the environment that hold something else than they may (environment.h).
void checkEnvironment();

//! Accepts HUBKV_CPU, and HUBKV_CUDA where the build has it. Other values are refused.
inline void checkDevice(hubkv_device device)
{
    if (device == HUBKV_CUDA && kWITH_CUDA)
    {
        return;
    }
    if (device == HUBKV_CUDA)
    {
        fail(HUBKV_NOT_SUPPORTED, "device: HUBKV_CUDA was asked for, but this library was not built with CUDA");
    }
    HUBKV_CHECK(device == HUBKV_CPU, "device: %d is not HUBKV_CPU (0) or HUBKV_CUDA (1)", static_cast<int>(device));
    checkEnvironment();
}

} // namespace hubkv
