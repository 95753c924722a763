// SPDX-License-Identifier: Apache-2.0
//
// The race detector. The race build compiles kernels with -fsanitize=thread but links without its runtime: the hooks
// below take its place. Each byte that a kernel touches remembers who last wrote, read and atomically updated it, in
// groups of accesses that are not ordered among themselves. An access that is not ordered after a group it conflicts
// with is a race, under whatever schedule.
//
// Order: within a block, __syncthreads starts an epoch, and everything of earlier epochs comes first; within an epoch,
// only lanes of a warp that passed a __syncwarp together are ordered. Blocks of a launch are never ordered, launches
// always. Atomics do not race among themselves and order nothing.
#include "simt/machine.h"

#if defined(HUBKV_SIMT_RACE)

#include "simt/block.h"
#include "simt/emulator.h"
#include "simt/fiber.h"
#include "simt/shadow.h"
#include "simt/symbols.h"

#include <algorithm>
#include <cstring>

namespace hubkv
{
namespace simt
{
namespace
{

enum class Kind : uint8_t
{
    kREAD,
    kWRITE,
    kATOMIC
};

//! Time of a warp: how many __syncwarp it has passed in this epoch. seen[a][b]: accesses of lane b stamped below this
//! come before what lane a does now.
struct WarpClock
{
    uint32_t time;
    uint32_t seen[kWARP][kWARP];
};

Shadow gShadow;
WarpClock gClocks[kMAX_THREADS_PER_BLOCK / kWARP];
uint32_t gEpoch = 0;
uint32_t gLaunchEpoch = 0; // the first of this launch
uint32_t gBlockEpoch = 0;  // the first of this block
uint32_t gOldEpoch = 0;    // accesses before this one count no more: gBlockEpoch for shared memory, else gLaunchEpoch

//! Whether all of the group comes before what the running thread does now.
bool isOrdered(Group const& group)
{
    if (group.epoch < gOldEpoch)
    {
        return true;
    }
    if (group.spread == Group::Spread::kGRID || group.epoch < gBlockEpoch)
    {
        return false; // another block
    }
    if (group.epoch < gEpoch)
    {
        return true;
    }
    uint32_t const warp = gBlock.current / kWARP;
    uint32_t const lane = gBlock.current % kWARP;
    if (group.spread == Group::Spread::kBLOCK || group.warp != warp)
    {
        return false;
    }
    for (uint32_t others = group.lanes & ~(1U << lane); others != 0;)
    {
        if (gClocks[warp].seen[lane][popLane(others)] <= group.stamp)
        {
            return false;
        }
    }
    return true;
}

//! The running thread's access joins those that it is not ordered after, or takes their place.
void join(Group& group, void const* caller)
{
    uint8_t const warp = static_cast<uint8_t>(gBlock.current / kWARP);
    uint32_t const lane = 1U << gBlock.current % kWARP;
    Group next{gEpoch, lane, gClocks[warp].time, warp, Group::Spread::kWARP, caller};
    if (!isOrdered(group))
    {
        if (group.spread == Group::Spread::kGRID || group.epoch < gBlockEpoch)
        {
            next.spread = Group::Spread::kGRID;
        }
        else if (group.spread == Group::Spread::kBLOCK || group.warp != warp)
        {
            next.spread = Group::Spread::kBLOCK;
        }
        else
        {
            next.lanes |= group.lanes;
        }
    }
    group = next;
}

std::string accessName(Kind kind)
{
    return kind == Kind::kREAD ? "reads" : kind == Kind::kWRITE ? "writes" : "atomically updates";
}

[[noreturn]] void faultOfRace(void const* address, Kind kind, Kind otherKind, Group const& other, void const* caller)
{
    std::string who = "another block";
    if (other.spread != Group::Spread::kGRID && other.epoch >= gBlockEpoch)
    {
        uint32_t others = other.lanes & ~(other.warp == gBlock.current / kWARP ? 1U << gBlock.current % kWARP : 0);
        who = others == 0 ? "another thread" : threadName(other.warp * kWARP + popLane(others));
    }
    fault(sourceLine(caller),
        "race: it " + accessName(kind) + " " + describe(address) + ", which " + who + " " + accessName(otherKind)
            + " at " + sourceLine(other.caller) + " with no barrier between");
}

void touch(Cell& cell, Kind kind, void const* address, Space space, void const* caller)
{
    auto const check = [&](Group const& group, Kind otherKind)
    {
        if (!isOrdered(group))
        {
            faultOfRace(address, kind, otherKind, group, caller);
        }
    };
    check(cell.write, Kind::kWRITE);
    if (kind != Kind::kATOMIC)
    {
        check(cell.atomic, Kind::kATOMIC);
    }
    if (kind != Kind::kREAD)
    {
        check(cell.read, Kind::kREAD);
    }
    if (space == Space::kSHARED && kind != Kind::kWRITE && cell.write.epoch < gBlockEpoch
        && cell.atomic.epoch < gBlockEpoch)
    {
        fault(sourceLine(caller),
            "uninitialised: it " + accessName(kind) + " " + describe(address) + ", which no thread of the block wrote");
    }
    if (kind == Kind::kWRITE)
    {
        cell.read = cell.atomic = Group{}; // all came before this write
    }
    join(kind == Kind::kREAD ? cell.read : kind == Kind::kWRITE ? cell.write : cell.atomic, caller);
}

void access(void const* pointer, uintptr_t bytes, Kind kind, void const* caller)
{
    // Host code of the same file is compiled with hooks, too; a thread's own stack and indices are its own.
    uintptr_t const own = reinterpret_cast<uintptr_t>(&gIndices);
    uintptr_t const address = reinterpret_cast<uintptr_t>(pointer);
    if (!isOnFiber(__builtin_frame_address(0)) || isOnFiber(pointer) || address - own < sizeof(gIndices))
    {
        return;
    }
    Space const space = spaceOf(pointer);
    if (space == Space::kPAST_SHARED || (bytes > 1 && spaceOf(reinterpret_cast<void*>(address + bytes - 1)) != space))
    {
        fault(sourceLine(caller),
            "out of bounds: it " + accessName(kind) + " " + std::to_string(bytes) + " bytes at " + describe(pointer));
    }
    gOldEpoch = space == Space::kSHARED ? gBlockEpoch : gLaunchEpoch;
    gShadow.forEachCell(address, address + bytes,
        [&](Cell& cell, uintptr_t at) { touch(cell, kind, reinterpret_cast<void const*>(at), space, caller); });
}

} // namespace

void raceStartLaunch()
{
    gShadow.trim();
    gLaunchEpoch = gEpoch + 1;
}

void raceStartBlock()
{
    raceBarrier();
    gBlockEpoch = gEpoch;
}

void raceBarrier()
{
    ++gEpoch;
    std::memset(gClocks, 0, sizeof(WarpClock) * ((gBlock.count + kWARP - 1) / kWARP));
}

void raceWarpBarrier(uint32_t warp, uint32_t mask)
{
    WarpClock& clock = gClocks[warp];
    uint32_t seen[kWARP] = {};
    for (uint32_t lanes = mask; lanes != 0;)
    {
        uint32_t const lane = popLane(lanes);
        for (uint32_t other = 0; other < kWARP; ++other)
        {
            seen[other] = std::max(seen[other], has(mask, other) ? clock.time + 1 : clock.seen[lane][other]);
        }
    }
    ++clock.time;
    for (uint32_t lanes = mask; lanes != 0;)
    {
        std::memcpy(clock.seen[popLane(lanes)], seen, sizeof(seen));
    }
}

void noteAtomic(void const* address, uint32_t bytes, void const* caller)
{
    access(address, bytes, Kind::kATOMIC, caller);
}

} // namespace simt
} // namespace hubkv

// ---- what -fsanitize=thread calls ----

#define HUBKV_SIMT_HOOK(name, bytes, kind)                                                                             \
    void name(void* address)                                                                                           \
    {                                                                                                                  \
        hubkv::simt::access(address, bytes, hubkv::simt::Kind::kind, __builtin_return_address(0));                     \
    }
#define HUBKV_SIMT_HOOKS(bytes)                                                                                        \
    HUBKV_SIMT_HOOK(__tsan_read##bytes, bytes, kREAD)                                                                  \
    HUBKV_SIMT_HOOK(__tsan_write##bytes, bytes, kWRITE)                                                                \
    HUBKV_SIMT_HOOK(__tsan_unaligned_read##bytes, bytes, kREAD)                                                        \
    HUBKV_SIMT_HOOK(__tsan_unaligned_write##bytes, bytes, kWRITE)

extern "C"
{

HUBKV_SIMT_HOOKS(1)
HUBKV_SIMT_HOOKS(2)
HUBKV_SIMT_HOOKS(4)
HUBKV_SIMT_HOOKS(8)
HUBKV_SIMT_HOOKS(16)

void __tsan_read_range(void* address, std::size_t bytes)
{
    hubkv::simt::access(address, bytes, hubkv::simt::Kind::kREAD, __builtin_return_address(0));
}

void __tsan_write_range(void* address, std::size_t bytes)
{
    hubkv::simt::access(address, bytes, hubkv::simt::Kind::kWRITE, __builtin_return_address(0));
}

void __tsan_init() { }

// memory_functions.h
void* hubkvSimtMemcpy(void* to, void const* from, std::size_t bytes)
{
    hubkv::simt::access(from, bytes, hubkv::simt::Kind::kREAD, __builtin_return_address(0));
    hubkv::simt::access(to, bytes, hubkv::simt::Kind::kWRITE, __builtin_return_address(0));
    return std::memcpy(to, from, bytes);
}

void* hubkvSimtMemset(void* to, int value, std::size_t bytes)
{
    hubkv::simt::access(to, bytes, hubkv::simt::Kind::kWRITE, __builtin_return_address(0));
    return std::memset(to, value, bytes);
}

} // extern "C"

#else

namespace hubkv
{
namespace simt
{

void raceStartLaunch() { }
void raceStartBlock() { }
void raceBarrier() { }
void raceWarpBarrier(uint32_t /*warp*/, uint32_t /*mask*/) { }
void noteAtomic(void const* /*address*/, uint32_t /*bytes*/, void const* /*caller*/) { }

} // namespace simt
} // namespace hubkv

#endif
