// SPDX-License-Identifier: Apache-2.0
#include "common/thread_pool.h"

#include "common/environment.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include <pthread.h>
#include <signal.h>
#if defined(__linux__)
#include <sched.h>
#endif

namespace hubkv
{
namespace
{

int32_t initialThreads() noexcept
{
    if (int32_t const asked = environment().threads)
    {
        return asked;
    }
#if defined(__linux__)
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    if (sched_getaffinity(0, sizeof(cpus), &cpus) == 0 && CPU_COUNT(&cpus) > 0)
    {
        return std::min<int32_t>(CPU_COUNT(&cpus), kMAX_THREADS);
    }
#endif
    return std::clamp<int32_t>(static_cast<int32_t>(std::thread::hardware_concurrency()), 1, kMAX_THREADS);
}

std::atomic<int32_t>& threadSetting() noexcept
{
    static std::atomic<int32_t> setting{initialThreads()};
    return setting;
}

//! One running loop. It lives on the stack of its caller and is in the pool's list while it may take helpers.
struct Loop
{
    detail::LoopBody body;
    void* context;
    int64_t count;
    std::atomic<int64_t> next{0};

    // Guarded by Pool::mutex.
    int32_t freeSlots;    // helpers that may still join
    int32_t nextSlot = 1; // slot 0 is the caller's
    int32_t helpers = 0;  // helpers at work
    bool listed = false;
    Loop* previousLoop = nullptr;
    Loop* nextLoop = nullptr;
    std::exception_ptr error;
    std::condition_variable finished;
};

struct Pool
{
    std::mutex mutex;
    std::condition_variable wake;
    Loop* first = nullptr;
    int32_t workers = 0;

    void link(Loop& loop) noexcept
    {
        loop.nextLoop = first;
        if (first != nullptr)
        {
            first->previousLoop = &loop;
        }
        first = &loop;
        loop.listed = true;
    }

    void unlink(Loop& loop) noexcept
    {
        if (!loop.listed)
        {
            return;
        }
        (loop.previousLoop != nullptr ? loop.previousLoop->nextLoop : first) = loop.nextLoop;
        if (loop.nextLoop != nullptr)
        {
            loop.nextLoop->previousLoop = loop.previousLoop;
        }
        loop.listed = false;
    }

    //! Works on the loop until no index is left. Called without the mutex.
    void work(Loop& loop, int32_t slot) noexcept
    {
        for (int64_t index; (index = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.count;)
        {
            try
            {
                loop.body(loop.context, index, slot);
            }
            catch (...)
            {
                std::lock_guard<std::mutex> lock(mutex);
                if (!loop.error)
                {
                    loop.error = std::current_exception();
                }
                loop.next.store(loop.count, std::memory_order_relaxed);
            }
        }
    }

    void workerMain() noexcept
    {
        std::unique_lock<std::mutex> lock(mutex);
        while (true)
        {
            wake.wait(lock, [this] { return first != nullptr; });
            Loop& loop = *first;
            int32_t const slot = loop.nextSlot++;
            ++loop.helpers;
            if (--loop.freeSlots == 0)
            {
                unlink(loop);
            }
            lock.unlock();
            work(loop, slot);
            lock.lock();
            unlink(loop); // no index is left, so nobody need join any more
            if (--loop.helpers == 0)
            {
                // Under the mutex: the caller cannot destroy the loop before this returns.
                loop.finished.notify_one();
            }
        }
    }

    //! Starts threads until there are `wanted` or the system refuses. Called with the mutex.
    void grow(int32_t wanted) noexcept
    {
        if (workers >= wanted)
        {
            return;
        }
        // Signals belong to the threads of the program.
        sigset_t all;
        sigset_t before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try
        {
            while (workers < wanted)
            {
                std::thread([this] { workerMain(); }).detach();
                ++workers;
            }
        }
        catch (std::system_error const&)
        {
            // Loops run on the threads there are, if need be on the caller's alone.
        }
        catch (std::bad_alloc const&)
        {
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
};

std::atomic<Pool*> gPool{nullptr};

//! The pool is never destroyed: its threads outlive main. A child of fork() has none of them, so it forgets the pool.
Pool& pool()
{
    static bool const registered = []
    {
        pthread_atfork(nullptr, nullptr, [] { gPool.store(nullptr, std::memory_order_relaxed); });
        return true;
    }();
    (void)registered;
    Pool* current = gPool.load(std::memory_order_acquire);
    if (current == nullptr)
    {
        Pool* fresh = new Pool;
        if (gPool.compare_exchange_strong(current, fresh, std::memory_order_acq_rel))
        {
            return *fresh;
        }
        delete fresh;
    }
    return *current;
}

} // namespace

int32_t numThreads() noexcept
{
    return threadSetting().load(std::memory_order_relaxed);
}

void setNumThreads(int32_t threads) noexcept
{
    threadSetting().store(std::clamp<int32_t>(threads, 1, kMAX_THREADS), std::memory_order_relaxed);
}

void detail::runLoop(int64_t count, int32_t maxThreads, LoopBody body, void* context)
{
    int64_t const threads = std::min<int64_t>({count, maxThreads, numThreads()});
    if (threads <= 1)
    {
        for (int64_t index = 0; index < count; ++index)
        {
            body(context, index, 0);
        }
        return;
    }

    Pool& shared = pool();
    Loop loop;
    loop.body = body;
    loop.context = context;
    loop.count = count;
    loop.freeSlots = static_cast<int32_t>(threads - 1);
    {
        std::lock_guard<std::mutex> lock(shared.mutex);
        shared.grow(static_cast<int32_t>(threads - 1));
        shared.link(loop);
    }
    for (int64_t helper = 1; helper < threads; ++helper)
    {
        shared.wake.notify_one();
    }
    shared.work(loop, 0);
    {
        std::unique_lock<std::mutex> lock(shared.mutex);
        shared.unlink(loop);
        loop.finished.wait(lock, [&loop] { return loop.helpers == 0; });
    }
    if (loop.error)
    {
        std::rethrow_exception(loop.error);
    }
}

} // namespace hubkv
