// SPDX-License-Identifier: Apache-2.0
#include "common/status.h"
#include "simt/emulator.h"
#include "simt/machine.h"
#include "simt/symbols.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <sys/mman.h>

#if defined(HUBKV_SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#endif

namespace hubkv
{
namespace simt
{
namespace
{

//! On both sides of the dynamic shared memory: an overrun lands here and nowhere else.
constexpr std::size_t kSLACK_BYTES = 64 << 10;
constexpr std::size_t kREGION_BYTES = kSLACK_BYTES + kMAX_SHARED_BYTES + kSLACK_BYTES;

char* gRegion = nullptr;
std::size_t gDynamicBytes = 0;

SharedVariable const* variableAt(char const* address)
{
    auto const& variables = sharedVariables();
    auto const next = std::upper_bound(variables.begin(), variables.end(), address,
        [](char const* value, SharedVariable const& variable) { return value < variable.address; });
    if (next == variables.begin())
    {
        return nullptr;
    }
    SharedVariable const& variable = *(next - 1);
    return address < variable.address + variable.bytes ? &variable : nullptr;
}

} // namespace

void* dynamicShared()
{
    return gRegion + kSLACK_BYTES;
}

void setDynamicShared(std::size_t bytes)
{
    if (gRegion == nullptr)
    {
        void* const memory =
            mmap(nullptr, kREGION_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED)
        {
            fail(HUBKV_INTERNAL_ERROR, "simt: no memory for the dynamic shared memory");
        }
        gRegion = static_cast<char*>(memory);
    }
    gDynamicBytes = bytes;
#if defined(HUBKV_SIMT_ASAN)
    __asan_poison_memory_region(gRegion, kREGION_BYTES);
    __asan_unpoison_memory_region(dynamicShared(), bytes);
#endif
}

void clearShared()
{
    std::memset(dynamicShared(), 0xFF, gDynamicBytes);
    for (SharedVariable const& variable : sharedVariables())
    {
        std::memset(variable.address, 0xFF, variable.bytes);
    }
}

Space spaceOf(void const* address)
{
    std::size_t const offset = static_cast<std::size_t>(static_cast<char const*>(address) - gRegion);
    if (offset < kREGION_BYTES)
    {
        return offset - kSLACK_BYTES < gDynamicBytes ? Space::kSHARED : Space::kPAST_SHARED;
    }
    return variableAt(static_cast<char const*>(address)) != nullptr ? Space::kSHARED : Space::kGLOBAL;
}

std::string describe(void const* address)
{
    char const* const byte = static_cast<char const*>(address);
    char text[64];
    if (SharedVariable const* const variable = variableAt(byte))
    {
        std::snprintf(text, sizeof(text), " + %zd (shared)", byte - variable->address);
        return variable->name + text;
    }
    if (spaceOf(address) != Space::kGLOBAL)
    {
        std::snprintf(text, sizeof(text), "byte %zd of %zu dynamic shared bytes",
            byte - static_cast<char const*>(dynamicShared()), gDynamicBytes);
        return text;
    }
    std::snprintf(text, sizeof(text), "global %p", address);
    return text;
}

} // namespace simt
} // namespace hubkv
