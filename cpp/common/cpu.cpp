// SPDX-License-Identifier: Apache-2.0
#include "common/cpu.h"

#include "common/environment.h"

#include <algorithm>

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

} // namespace

Isa cpuIsa() noexcept
{
    static Isa const isa = std::min(detect(), environment().bestIsa);
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
