// SPDX-License-Identifier: Apache-2.0
//
// What the environment asks of the host kernels. Read once, at the first call.
#pragma once

#include "common/cpu.h"

#include <cstdint>

namespace hubkv
{

struct Environment
{
    int32_t threads{0};        // HUBKV_NUM_THREADS; 0: it is not set
    Isa bestIsa{Isa::kAVX512}; // HUBKV_CPU_ISA: nothing higher than this
    char problem[192]{};       // "variable: what is wrong with its value"; empty where nothing is

    Environment() noexcept;
};

Environment const& environment() noexcept;

} // namespace hubkv
