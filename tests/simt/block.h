// SPDX-License-Identifier: Apache-2.0
//
// The block that runs: which of its threads can go on, and what the others wait for. Written by scheduler.cpp, which runs
// threads, and meetings.cpp, where they wait.
#pragma once

#include "simt/collectives.h"
#include "simt/machine.h"

#include <cstdint>
#include <string>
#include <vector_types.h>

namespace hubkv
{
namespace simt
{

struct Thread
{
    Request request; // of a thread that waits
    uint64_t result;
    uint3 index;
};

//! Sets of lanes. One that exists and is in no other set runs now.
struct Warp
{
    uint32_t exists;
    uint32_t ready;
    uint32_t atBarrier;
    uint32_t atCollective;
    uint32_t returned;
};

struct Block
{
    uint32_t count;     // threads
    uint32_t current;   // the thread that runs
    uint32_t atBarrier; // how many wait there
    uint32_t firstAtBarrier;
    uint32_t returned; // how many have
    bool faulted;
    Thread threads[kMAX_THREADS_PER_BLOCK];
    Warp warps[kMAX_THREADS_PER_BLOCK / kWARP];

    Warp& warpOf(uint32_t thread)
    {
        return warps[thread / kWARP];
    }
};
extern Block gBlock;

constexpr bool has(uint32_t lanes, uint32_t thread)
{
    return (lanes >> thread % kWARP & 1) != 0;
}

//! Takes one lane out of the set.
inline uint32_t popLane(uint32_t& lanes)
{
    uint32_t const lane = static_cast<uint32_t>(__builtin_ctz(lanes));
    lanes &= lanes - 1;
    return lane;
}

//! Ends the launch with a fault of this thread.
void setFault(uint32_t thread, std::string const& where, std::string const& what);

//! All threads that have not returned wait: faults with one that waits and one that it waits for.
void faultOfDeadlock();

//! True once in so many times, by the seed.
bool chance(uint32_t oneIn);

} // namespace simt
} // namespace hubkv
