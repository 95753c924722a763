// SPDX-License-Identifier: Apache-2.0
//
// What the emulator's own test kernels share. Each is started by a C function that answers a status; the message of a
// fault is fixture_error().
#pragma once

#include "common/simt.h"

#include <cstdint>

#define FIXTURE extern "C" __attribute__((visibility("default"))) int32_t

constexpr unsigned kFULL = 0xffffffffU;
