// SPDX-License-Identifier: Apache-2.0
//
// Runs a launch: block after block, the threads of a block as fibers in an order drawn from SIMT_SEED.
#include "common/status.h"
#include "simt/block.h"
#include "simt/emulator.h"
#include "simt/fiber.h"
#include "simt/symbols.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <numeric>

namespace hubkv
{
namespace simt
{

Indices gIndices;
Block gBlock;

namespace
{

std::mutex gMutex; // one launch at a time
Launch const* gLaunch = nullptr;
std::string gFault;
uint64_t gSeed = 0; // 0: ascending order
uint64_t gRandom = 0;

std::string triple(uint32_t x, uint32_t y, uint32_t z)
{
    return "(" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ")";
}

uint3 indexOf(uint64_t number, dim3 size)
{
    return {static_cast<uint32_t>(number % size.x), static_cast<uint32_t>(number / size.x % size.y),
        static_cast<uint32_t>(number / size.x / size.y)};
}

// ---- order ----

uint64_t nextRandom()
{
    gRandom ^= gRandom << 13;
    gRandom ^= gRandom >> 7;
    gRandom ^= gRandom << 17;
    return gRandom * 0x2545f4914f6cdd1dULL >> 32;
}

//! One of the set bits.
uint32_t pickBit(uint32_t bits)
{
    uint32_t const start = gSeed == 0 ? 0 : static_cast<uint32_t>(nextRandom() % 32);
    uint32_t const above = bits & (~0U << start);
    return static_cast<uint32_t>(__builtin_ctz(above != 0 ? above : bits));
}

// ---- blocks ----

void runThread()
{
    gLaunch->body(gLaunch->context);
    uint32_t const lane = 1U << gBlock.current % kWARP;
    gBlock.warpOf(gBlock.current).ready &= ~lane;
    gBlock.warpOf(gBlock.current).returned |= lane;
    ++gBlock.returned;
    suspendFiber(true);
}

void startBlock(uint32_t warps)
{
    raceStartBlock();
    clearShared();
    gBlock.atBarrier = 0;
    gBlock.returned = 0;
    for (uint32_t i = 0; i < warps; ++i)
    {
        uint32_t const lanes = std::min(gBlock.count - i * kWARP, kWARP);
        gBlock.warps[i] = {};
        gBlock.warps[i].exists = gBlock.warps[i].ready = static_cast<uint32_t>((uint64_t{1} << lanes) - 1);
    }
    for (uint32_t thread = 0; thread < gBlock.count; ++thread)
    {
        prepareFiber(thread, runThread);
    }
}

void runBlock()
{
    uint32_t const warps = (gBlock.count + kWARP - 1) / kWARP;
    startBlock(warps);
    while (gBlock.returned < gBlock.count && !gBlock.faulted)
    {
        uint32_t ready = 0;
        for (uint32_t i = 0; i < warps; ++i)
        {
            ready |= uint32_t{gBlock.warps[i].ready != 0} << i;
        }
        if (ready == 0)
        {
            faultOfDeadlock();
            break;
        }
        Warp& warp = gBlock.warps[pickBit(ready)];
        do // a warp goes on for a while
        {
            gBlock.current = static_cast<uint32_t>(&warp - gBlock.warps) * kWARP + pickBit(warp.ready);
            gIndices.thread = gBlock.threads[gBlock.current].index;
            resumeFiber(gBlock.current);
        } while (!gBlock.faulted && warp.ready != 0 && !chance(64));
    }
}

void checkLaunch(Launch const& launch)
{
    dim3 const grid = launch.grid;
    dim3 const block = launch.block;
    bool const sizes = grid.x >= 1 && grid.x <= 2147483647U && grid.y >= 1 && grid.y <= 65535 && grid.z >= 1
        && grid.z <= 65535 && block.x >= 1 && block.y >= 1 && block.z >= 1 && block.z <= 64
        && uint64_t{block.x} * block.y <= kMAX_THREADS_PER_BLOCK
        && uint64_t{block.x} * block.y * block.z <= kMAX_THREADS_PER_BLOCK;
    if (!sizes || launch.sharedBytes > kMAX_SHARED_BYTES)
    {
        fail(HUBKV_CUDA_ERROR, "%s: no device launches grid %s, block %s, %zu bytes of dynamic shared memory",
            functionName(launch.kernel).c_str(), triple(grid.x, grid.y, grid.z).c_str(),
            triple(block.x, block.y, block.z).c_str(), launch.sharedBytes);
    }
}

void runBlocks(dim3 grid)
{
    uint64_t const blocks = uint64_t{grid.x} * grid.y * grid.z;
    uint64_t block = gSeed == 0 ? 0 : nextRandom() % blocks;
    uint64_t step = gSeed == 0 ? 1 : nextRandom() % blocks + 1;
    while (std::gcd(step, blocks) != 1) // so that each block comes once
    {
        ++step;
    }
    for (uint64_t i = 0; i < blocks && !gBlock.faulted; ++i)
    {
        gIndices.block = indexOf(block, grid);
        runBlock();
        block = (block + step) % blocks;
    }
}

} // namespace

bool chance(uint32_t oneIn)
{
    return gSeed != 0 && nextRandom() % oneIn == 0;
}

std::string threadName(uint32_t thread)
{
    uint3 const index = gBlock.threads[thread].index;
    return "thread " + triple(index.x, index.y, index.z);
}

void setFault(uint32_t thread, std::string const& where, std::string const& what)
{
    gBlock.faulted = true;
    uint3 const block = gIndices.block;
    gFault = functionName(gLaunch->kernel) + ", " + where + ", block " + triple(block.x, block.y, block.z) + ", "
        + threadName(thread) + ": " + what;
}

void fault(std::string const& where, std::string const& what)
{
    setFault(gBlock.current, where, what);
    suspendFiber(false);
    __builtin_unreachable();
}

void run(Launch const& launch)
{
    std::lock_guard<std::mutex> const lock(gMutex);
    checkLaunch(launch);
    char const* const seed = std::getenv("SIMT_SEED");
    gSeed = seed != nullptr ? std::strtoull(seed, nullptr, 10) : 1;
    gRandom = (gSeed + 1) * 0x9e3779b97f4a7c15ULL | 1;
    gLaunch = &launch;
    gBlock.count = launch.block.x * launch.block.y * launch.block.z;
    gBlock.faulted = false;
    gIndices.blockSize = launch.block;
    gIndices.gridSize = launch.grid;
    for (uint32_t thread = 0; thread < gBlock.count; ++thread)
    {
        gBlock.threads[thread].index = indexOf(thread, launch.block);
    }
    setDynamicShared(launch.sharedBytes);
    raceStartLaunch();
    runBlocks(launch.grid);
    gLaunch = nullptr;
    if (gBlock.faulted)
    {
        abandonFibers();
        fail(HUBKV_CUDA_ERROR, "%s", gFault.c_str());
    }
}

} // namespace simt
} // namespace hubkv
