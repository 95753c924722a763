// SPDX-License-Identifier: Apache-2.0
//
// What the scheduler, the memory and the race detector know of the launch and the block that run now.
#pragma once

#include "simt/collectives.h"

#include <cstddef>
#include <cstdint>
#include <string>

namespace hubkv
{
namespace simt
{

constexpr uint32_t kWARP = 32;
constexpr uint32_t kMAX_THREADS_PER_BLOCK = 1024;
constexpr std::size_t kMAX_SHARED_BYTES = 227 << 10; // dynamic, per block, on the largest devices

//! From a thread: ends the launch with this fault. Never returns; the thread is abandoned.
[[noreturn]] void fault(std::string const& where, std::string const& what);

//! "thread (3, 0, 0)" of the running block.
std::string threadName(uint32_t thread);

// ---- memory.cpp: the shared memory of the running block ----

//! Sizes the dynamic part for a launch.
void setDynamicShared(std::size_t bytes);

//! Fills all shared memory with 0xFF: what nobody wrote is NaN, -1 or a wild index.
void clearShared();

//! What lies at an address.
enum class Space : uint8_t
{
    kGLOBAL,
    kSHARED,
    kPAST_SHARED // beside the dynamic shared memory
};
Space spaceOf(void const* address);

//! "tile + 12 (shared)", "dynamic shared + 4", "global 0x7f...".
std::string describe(void const* address);

// ---- race.cpp: happens-before between accesses. Empty but for the race build ----

void raceStartLaunch();
void raceStartBlock();
//! All threads of the block passed a barrier.
void raceBarrier();
//! The lanes passed a __syncwarp together.
void raceWarpBarrier(uint32_t warp, uint32_t mask);

} // namespace simt
} // namespace hubkv
