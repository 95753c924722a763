// SPDX-License-Identifier: Apache-2.0
//
// Where threads meet: barriers of the block and collectives of a warp, and what is wrong with a meeting.
#include "simt/block.h"
#include "simt/fiber.h"
#include "simt/symbols.h"

#include <cstdio>
#include <cstring>

namespace hubkv
{
namespace simt
{
namespace
{

bool isOfBlock(Operation operation)
{
    return operation <= Operation::kSYNC_THREADS_COUNT;
}

//! Whether two threads came to the same meeting.
bool isSame(Request const& a, Request const& b)
{
    return a.operation == b.operation && a.place.line == b.place.line
        && (a.place.file == b.place.file || std::strcmp(a.place.file, b.place.file) == 0);
}

std::string placeName(Request const& request)
{
    return std::string(fileName(request.place.file)) + ":" + std::to_string(request.place.line);
}

//! "__syncwarp with mask 0xff"
std::string name(Request const& request)
{
    constexpr char const* kNAMES[] = {"__syncthreads", "__syncthreads_or", "__syncthreads_and", "__syncthreads_count",
        "__syncwarp", "__ballot_sync", "__any_sync", "__all_sync", "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync",
        "__shfl_xor_sync"};
    std::string text = kNAMES[static_cast<uint32_t>(request.operation)];
    if (!isOfBlock(request.operation))
    {
        char mask[32];
        std::snprintf(mask, sizeof(mask), " with mask 0x%x", request.mask);
        text += mask;
    }
    return text;
}

//! "thread (3, 0, 0) waits in __syncthreads at select.cu:12"
std::string doing(uint32_t thread)
{
    Request const& request = gBlock.threads[thread].request;
    return threadName(thread)
        + (has(gBlock.warpOf(thread).returned, thread) ? " has returned"
                                                       : " waits in " + name(request) + " at " + placeName(request));
}

// ---- barriers ----

void checkBarrier(Request const& request)
{
    if (gBlock.atBarrier > 0 && !isSame(request, gBlock.threads[gBlock.firstAtBarrier].request))
    {
        fault(placeName(request),
            "divergent barrier: it reaches " + name(request) + " while " + doing(gBlock.firstAtBarrier));
    }
}

void releaseBarrier(Operation operation)
{
    uint64_t count = 0;
    for (uint32_t thread = 0; thread < gBlock.count; ++thread)
    {
        count += gBlock.threads[thread].request.value;
    }
    uint64_t const result = operation == Operation::kSYNC_THREADS_OR ? count != 0
        : operation == Operation::kSYNC_THREADS_AND                  ? count == gBlock.count
                                                                     : count;
    for (uint32_t thread = 0; thread < gBlock.count; ++thread)
    {
        gBlock.threads[thread].result = result;
    }
    for (Warp& warp : gBlock.warps)
    {
        warp.ready |= warp.atBarrier;
        warp.atBarrier = 0;
    }
    gBlock.atBarrier = 0;
    raceBarrier();
}

//! True when the thread was the last to come.
bool arriveAtBarrier(uint32_t thread, Request const& request)
{
    checkBarrier(request);
    Warp& warp = gBlock.warpOf(thread);
    warp.ready &= ~(1U << thread % kWARP);
    warp.atBarrier |= 1U << thread % kWARP;
    gBlock.firstAtBarrier = thread;
    if (++gBlock.atBarrier < gBlock.count)
    {
        return false;
    }
    releaseBarrier(request.operation);
    return true;
}

// ---- collectives ----

//! Refuses a mask that cannot be met, and lanes that came to another meeting.
void checkCollective(uint32_t thread, Request const& request)
{
    Warp const& warp = gBlock.warpOf(thread);
    uint32_t const first = thread - thread % kWARP;
    if (!has(request.mask, thread))
    {
        fault(placeName(request),
            "wrong mask: " + name(request) + " leaves out its own lane " + std::to_string(thread % kWARP));
    }
    if ((request.mask & ~warp.exists) != 0)
    {
        fault(placeName(request), "wrong mask: " + name(request) + " names lanes that the block does not have");
    }
    if (uint32_t absent = request.mask & (warp.returned | warp.atBarrier))
    {
        fault(placeName(request),
            "divergent collective: it reaches " + name(request) + ", but " + doing(first + popLane(absent)));
    }
    for (uint32_t waiting = warp.atCollective; waiting != 0;)
    {
        uint32_t const other = first + popLane(waiting);
        Request const& theirs = gBlock.threads[other].request;
        if ((theirs.mask & request.mask) == 0)
        {
            continue;
        }
        if (!isSame(theirs, request))
        {
            fault(placeName(request), "divergent collective: it reaches " + name(request) + ", but " + doing(other));
        }
        if (theirs.mask != request.mask)
        {
            fault(placeName(request), "wrong mask: it reaches " + name(request) + ", but " + doing(other));
        }
        if (request.mask == ~0U)
        {
            break; // those that wait agree among themselves
        }
    }
    if (request.operation >= Operation::kSHUFFLE
        && (request.width < 1 || request.width > 32 || (request.width & (request.width - 1)) != 0))
    {
        fault(placeName(request),
            name(request) + ": width " + std::to_string(request.width) + " is not a power of two in 1..32");
    }
}

//! The lane whose value a shuffle gives to this lane; its own where the other lies outside the segment.
uint32_t shuffleSource(Request const& request, uint32_t lane)
{
    uint32_t const width = static_cast<uint32_t>(request.width);
    uint32_t const start = lane & ~(width - 1);
    switch (request.operation)
    {
    case Operation::kSHUFFLE: return start + (request.lane & (width - 1));
    case Operation::kSHUFFLE_UP: return request.lane <= lane - start ? lane - request.lane : lane;
    case Operation::kSHUFFLE_DOWN: return request.lane < start + width - lane ? lane + request.lane : lane;
    default: return (lane ^ request.lane) < start + width ? lane ^ request.lane : lane;
    }
}

uint64_t collectiveResult(uint32_t first, uint32_t lane, uint64_t ballot)
{
    Request const& request = gBlock.threads[first + lane].request;
    switch (request.operation)
    {
    case Operation::kSYNC_WARP: return 0;
    case Operation::kBALLOT: return ballot;
    case Operation::kANY: return ballot != 0;
    case Operation::kALL: return ballot == request.mask;
    default: break;
    }
    uint32_t const source = shuffleSource(request, lane);
    if (!has(request.mask, source))
    {
        fault(placeName(request),
            "bad shuffle source: in " + name(request) + " lane " + std::to_string(lane) + " reads lane "
                + std::to_string(source));
    }
    return gBlock.threads[first + source].request.value;
}

//! True when the thread was the last to come.
bool arriveAtCollective(uint32_t thread, Request const& request)
{
    checkCollective(thread, request);
    Warp& warp = gBlock.warpOf(thread);
    warp.ready &= ~(1U << thread % kWARP);
    warp.atCollective |= 1U << thread % kWARP;
    if ((warp.atCollective & request.mask) != request.mask)
    {
        return false;
    }
    uint32_t const first = thread - thread % kWARP;
    uint64_t ballot = 0;
    for (uint32_t lanes = request.mask; lanes != 0;)
    {
        uint32_t const lane = popLane(lanes);
        ballot |= uint64_t{gBlock.threads[first + lane].request.value != 0} << lane;
    }
    for (uint32_t lanes = request.mask; lanes != 0;)
    {
        uint32_t const lane = popLane(lanes);
        gBlock.threads[first + lane].result = collectiveResult(first, lane, ballot);
    }
    if (request.operation == Operation::kSYNC_WARP)
    {
        raceWarpBarrier(thread / kWARP, request.mask);
    }
    warp.ready |= request.mask;
    warp.atCollective &= ~request.mask;
    return true;
}

} // namespace

uint64_t wait(Request const& request)
{
    uint32_t const thread = gBlock.current;
    gBlock.threads[thread].request = request;
    bool const last =
        isOfBlock(request.operation) ? arriveAtBarrier(thread, request) : arriveAtCollective(thread, request);
    if (!last || chance(4))
    {
        suspendFiber(false);
    }
    return gBlock.threads[thread].result;
}

void faultOfDeadlock()
{
    for (uint32_t thread = 0; thread < gBlock.count; ++thread)
    {
        Warp const& warp = gBlock.warpOf(thread);
        if (has(warp.returned, thread))
        {
            continue;
        }
        Request const& request = gBlock.threads[thread].request;
        bool const ofBlock = isOfBlock(request.operation);
        uint32_t const first = ofBlock ? 0 : thread - thread % kWARP;
        for (uint32_t other = first; other < (ofBlock ? gBlock.count : first + kWARP); ++other)
        {
            bool const awaited =
                ofBlock ? !has(gBlock.warpOf(other).atBarrier, other) : has(request.mask & ~warp.atCollective, other);
            if (awaited)
            {
                setFault(thread, placeName(request),
                    std::string("divergent ") + (ofBlock ? "barrier" : "collective") + ": it waits in " + name(request)
                        + " while " + doing(other));
                return;
            }
        }
    }
}

} // namespace simt
} // namespace hubkv
