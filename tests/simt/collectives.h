// SPDX-License-Identifier: Apache-2.0
//
// Everything by which threads meet: barriers, warp collectives, atomics. Each meeting carries the place in the source it
// was called from, and goes through wait(), which knows the rules.
#pragma once

#include <cstdint>
#include <cstring>

namespace hubkv
{
namespace simt
{

struct Place
{
    char const* file;
    int32_t line;

    //! As a default argument: the place of the call.
    static constexpr Place here(char const* file = __builtin_FILE(), int32_t line = __builtin_LINE())
    {
        return {file, line};
    }
};

enum class Operation : uint8_t
{
    kSYNC_THREADS,
    kSYNC_THREADS_OR,
    kSYNC_THREADS_AND,
    kSYNC_THREADS_COUNT, // the last that the whole block takes part in
    kSYNC_WARP,
    kBALLOT,
    kANY,
    kALL,
    kSHUFFLE,
    kSHUFFLE_UP,
    kSHUFFLE_DOWN,
    kSHUFFLE_XOR
};

//! What one thread brings to a meeting.
struct Request
{
    Operation operation;
    Place place;
    uint32_t mask;  // lanes that meet; whole block: unused
    uint64_t value; // predicate or the shuffled bits
    uint32_t lane;  // shuffles: source lane, delta or xor mask
    int32_t width;  // shuffles: lanes in a segment
};

//! Returns to the calling thread when all have come, with its result.
uint64_t wait(Request const& request);

//! Tells the race detector of an atomic access.
void noteAtomic(void const* address, uint32_t bytes, void const* caller);

template <typename T>
T shuffle(Operation operation, uint32_t mask, T value, uint32_t lane, int32_t width, Place place)
{
    static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves up to 8 bytes");
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = wait({operation, place, mask, bits, lane, width});
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

//! The memory access of an atomic: never a race by itself, so the race build does not instrument it.
template <typename T, typename Update>
__attribute__((no_sanitize("thread"), noinline)) T atomicUpdate(T* address, Update update)
{
    noteAtomic(address, sizeof(T), __builtin_return_address(0));
    T const old = *address;
    *address = update(old);
    return old;
}

} // namespace simt
} // namespace hubkv

// ---- barriers of the block ----

inline void __syncthreads(hubkv::simt::Place place = hubkv::simt::Place::here())
{
    hubkv::simt::wait({hubkv::simt::Operation::kSYNC_THREADS, place, 0, 0, 0, 0});
}

#define HUBKV_SIMT_BARRIER(name, operation)                                                                            \
    inline int name(int predicate, hubkv::simt::Place place = hubkv::simt::Place::here())                              \
    {                                                                                                                  \
        return static_cast<int>(                                                                                       \
            hubkv::simt::wait({hubkv::simt::Operation::operation, place, 0, predicate != 0, 0, 0}));                   \
    }

HUBKV_SIMT_BARRIER(__syncthreads_or, kSYNC_THREADS_OR)
HUBKV_SIMT_BARRIER(__syncthreads_and, kSYNC_THREADS_AND)
HUBKV_SIMT_BARRIER(__syncthreads_count, kSYNC_THREADS_COUNT)

// ---- collectives of a warp: the mask is always explicit ----

inline void __syncwarp(unsigned mask, hubkv::simt::Place place = hubkv::simt::Place::here())
{
    hubkv::simt::wait({hubkv::simt::Operation::kSYNC_WARP, place, mask, 0, 0, 0});
}

#define HUBKV_SIMT_VOTE(name, result, operation)                                                                       \
    inline result name(unsigned mask, int predicate, hubkv::simt::Place place = hubkv::simt::Place::here())            \
    {                                                                                                                  \
        return static_cast<result>(                                                                                    \
            hubkv::simt::wait({hubkv::simt::Operation::operation, place, mask, predicate != 0, 0, 0}));                \
    }

HUBKV_SIMT_VOTE(__ballot_sync, unsigned, kBALLOT)
HUBKV_SIMT_VOTE(__any_sync, int, kANY)
HUBKV_SIMT_VOTE(__all_sync, int, kALL)

#define HUBKV_SIMT_SHUFFLE(name, operation)                                                                            \
    template <typename T>                                                                                              \
    T name(                                                                                                            \
        unsigned mask, T value, unsigned lane, int width = 32, hubkv::simt::Place place = hubkv::simt::Place::here())  \
    {                                                                                                                  \
        return hubkv::simt::shuffle(hubkv::simt::Operation::operation, mask, value, lane, width, place);               \
    }

HUBKV_SIMT_SHUFFLE(__shfl_sync, kSHUFFLE)
HUBKV_SIMT_SHUFFLE(__shfl_up_sync, kSHUFFLE_UP)
HUBKV_SIMT_SHUFFLE(__shfl_down_sync, kSHUFFLE_DOWN)
HUBKV_SIMT_SHUFFLE(__shfl_xor_sync, kSHUFFLE_XOR)

// ---- atomics: each returns the old value ----

#define HUBKV_SIMT_ATOMIC(name, T, update)                                                                             \
    inline T name(T* address, T value)                                                                                 \
    {                                                                                                                  \
        return hubkv::simt::atomicUpdate(address, [value](T old) { return static_cast<T>(update); });                  \
    }
#define HUBKV_SIMT_ATOMICS(T)                                                                                          \
    HUBKV_SIMT_ATOMIC(atomicAdd, T, static_cast<unsigned long long>(old) + static_cast<unsigned long long>(value))     \
    HUBKV_SIMT_ATOMIC(atomicMax, T, old > value ? old : value)                                                         \
    HUBKV_SIMT_ATOMIC(atomicMin, T, old < value ? old : value)                                                         \
    HUBKV_SIMT_ATOMIC(atomicAnd, T, old& value)                                                                        \
    HUBKV_SIMT_ATOMIC(atomicOr, T, old | value)                                                                        \
    inline T atomicCAS(T* address, T compare, T value)                                                                 \
    {                                                                                                                  \
        return hubkv::simt::atomicUpdate(address, [compare, value](T old) { return old == compare ? value : old; });   \
    }

HUBKV_SIMT_ATOMICS(int)
HUBKV_SIMT_ATOMICS(unsigned)
HUBKV_SIMT_ATOMICS(unsigned long long)

//! Orders memory on a device; here stores become visible in program order.
inline void __threadfence() { }
inline void __threadfence_block() { }
