// SPDX-License-Identifier: Apache-2.0
#include "common/environment.h"

#include "common/status.h"
#include "common/thread_pool.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace hubkv
{
namespace
{

//! Null where it is not set or empty.
char const* variable(char const* name) noexcept
{
    char const* const value = std::getenv(name);
    return value == nullptr || *value == '\0' ? nullptr : value;
}

} // namespace

Environment::Environment() noexcept
{
    if (char const* const value = variable("HUBKV_NUM_THREADS"))
    {
        char* end = nullptr;
        long const asked = std::strtol(value, &end, 10);
        if (*end == '\0' && asked >= 1 && asked <= kMAX_THREADS)
        {
            threads = static_cast<int32_t>(asked);
        }
        else
        {
            std::snprintf(problem, sizeof(problem), "HUBKV_NUM_THREADS: '%.64s' is not a whole number in 1..%d", value,
                static_cast<int>(kMAX_THREADS));
        }
    }
    if (char const* const value = variable("HUBKV_CPU_ISA"))
    {
        for (Isa isa : {Isa::kSCALAR, Isa::kAVX2, Isa::kAVX512})
        {
            if (std::strcmp(value, isaName(isa)) == 0)
            {
                bestIsa = isa;
                return;
            }
        }
        std::snprintf(problem, sizeof(problem), "HUBKV_CPU_ISA: '%.64s' is not scalar, avx2 or avx512", value);
    }
}

Environment const& environment() noexcept
{
    static Environment const read;
    return read;
}

void checkEnvironment()
{
    HUBKV_CHECK(environment().problem[0] == '\0', "%s", environment().problem);
}

} // namespace hubkv
