// SPDX-License-Identifier: Apache-2.0
//
// The first thing that kernels see in the race build: -fsanitize=thread leaves memcpy and memset to its runtime, so here
// they are functions of race.cpp. The name in the object file is that of a function's first declaration.
#pragma once

#include <cstddef>

extern "C" void* memcpy(void* to, void const* from, std::size_t bytes) noexcept __asm__("hubkvSimtMemcpy");
extern "C" void* memset(void* to, int value, std::size_t bytes) noexcept __asm__("hubkvSimtMemset");
