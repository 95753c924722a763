// SPDX-License-Identifier: Apache-2.0
#include "common/cpu.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace hubkv
{
namespace
{

Isa detect() noexcept
{
#if HUBKV_X86
    __builtin_cpu_init();
    bool const avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    bool const avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 ? Isa::kAVX512 : (avx2 ? Isa::kAVX2 : Isa::kSCALAR);
#else
    return Isa::kSCALAR;
#endif
}

Isa lowered(Isa best) noexcept
{
    char const* const asked = std::getenv("HUBKV_CPU_ISA");
    if (asked != nullptr)
    {
        for (Isa isa : {Isa::kSCALAR, Isa::kAVX2})
        {
            if (std::strcmp(asked, isaName(isa)) == 0 && isa < best)
            {
                return isa;
            }
        }
    }
    return best;
}

} // namespace

Isa cpuIsa() noexcept
{
    static Isa const isa = lowered(detect());
    return isa;
}

char const* isaName(Isa isa) noexcept
{
    switch (isa)
    {
    case Isa::kAVX512: return "avx512";
    case Isa::kAVX2: return "avx2";
    case Isa::kSCALAR: break;
    }
    return "scalar";
}

} // namespace hubkv
