// SPDX-License-Identifier: Apache-2.0
//
// One pool of threads for the host kernels. The caller of a loop works on it too and sleeps, not spins, while others
// finish. Any number of threads may run loops at once, loops may nest, and a child after fork() starts a pool of its
// own. A loop allocates nothing once the threads run.
#pragma once

#include <cstdint>
#include <type_traits>

namespace hubkv
{

//! Threads that a loop may use, the caller included: HUBKV_NUM_THREADS, else the CPUs this process may run on.
int32_t numThreads() noexcept;

//! 1..kMAX_THREADS; holds for loops that start later.
void setNumThreads(int32_t threads) noexcept;

constexpr int32_t kMAX_THREADS = 1024;

namespace detail
{
using LoopBody = void (*)(void* context, int64_t index, int32_t slot);
void runLoop(int64_t count, int32_t maxThreads, LoopBody body, void* context);
} // namespace detail

//! Calls fn(index, slot) for every index in 0..count-1, each once, in no promised order, on at most maxSlots threads.
//! No two calls that run at the same time share a slot in 0..maxSlots-1: a slot can own scratch memory. The first
//! exception that fn throws is rethrown here after the loop; indices not started by then are left out.
template <typename Fn>
void parallelForSlots(int64_t count, int32_t maxSlots, Fn&& fn)
{
    using Body = std::remove_reference_t<Fn>;
    detail::runLoop(
        count, maxSlots, [](void* context, int64_t index, int32_t slot)
        { (*static_cast<Body*>(context))(index, slot); }, const_cast<void*>(static_cast<void const*>(&fn)));
}

//! Calls fn(index) for every index in 0..count-1 on up to numThreads() threads.
template <typename Fn>
void parallelFor(int64_t count, Fn&& fn)
{
    parallelForSlots(count, kMAX_THREADS, [&fn](int64_t index, int32_t) { fn(index); });
}

} // namespace hubkv
