// SPDX-License-Identifier: Apache-2.0
#include "simt/fiber.h"

#include "common/status.h"

#include <cstdint>
#include <sys/mman.h>

#if defined(HUBKV_SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__)
#error "the emulator switches fibers by x86-64 instructions"
#endif

namespace hubkv
{
namespace simt
{
namespace
{

constexpr std::size_t kSTACK_BYTES = 256 << 10; // reserved; only touched pages exist
constexpr std::size_t kGUARD_BYTES = 64 << 10;

using Context = void*; // the stack pointer, callee-saved registers above it

extern "C" void hubkvSimtSwitch(Context* save, Context load) __attribute__((visibility("hidden")));
// .pushsection: a bare .text would leave the compiler's own section for the rest of the file.
asm(R"(
    .pushsection .text
    .hidden hubkvSimtSwitch
    .globl hubkvSimtSwitch
    .type hubkvSimtSwitch, @function
hubkvSimtSwitch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size hubkvSimtSwitch, .-hubkvSimtSwitch
    .popsection
)");

//! A context that starts with entry() on the stack that ends at `top`.
void makeContext(Context& context, char* top, void (*entry)())
{
    void** frame = reinterpret_cast<void**>(top); // 16-byte aligned; entry starts as if it had been called
    *--frame = nullptr;
    *--frame = reinterpret_cast<void*>(entry);
    context = frame - 6;
}

struct Stack
{
    char* bottom;
    char* top;
};

char* gStacks = nullptr;
Context gFibers[kMAX_FIBERS];
Context gScheduler;
std::size_t gRunning = 0;
void (*gEntry)() = nullptr;
#if defined(HUBKV_SIMT_ASAN)
void* gFakeStacks[kMAX_FIBERS];
void const* gSchedulerBottom = nullptr;
std::size_t gSchedulerBytes = 0;
#endif

//! Tops are staggered: frames of all fibers at one offset would fight for the same lines of the cache.
Stack stackOf(std::size_t fiber)
{
    char* const bottom = gStacks + fiber * kSTACK_BYTES + kGUARD_BYTES;
    return {bottom, bottom + (kSTACK_BYTES - kGUARD_BYTES) - fiber % 32 * 192};
}

void mapStacks()
{
    void* const memory = mmap(nullptr, kMAX_FIBERS * kSTACK_BYTES, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
    {
        fail(HUBKV_INTERNAL_ERROR, "simt: no memory for the stacks of %zu threads", kMAX_FIBERS);
    }
    gStacks = static_cast<char*>(memory);
    for (std::size_t fiber = 0; fiber < kMAX_FIBERS; ++fiber)
    {
        mprotect(gStacks + fiber * kSTACK_BYTES, kGUARD_BYTES, PROT_NONE);
    }
}

void firstFrame()
{
#if defined(HUBKV_SIMT_ASAN)
    __sanitizer_finish_switch_fiber(nullptr, &gSchedulerBottom, &gSchedulerBytes);
#endif
    gEntry();
    __builtin_unreachable();
}

} // namespace

void prepareFiber(std::size_t fiber, void (*entry)())
{
    if (gStacks == nullptr)
    {
        mapStacks();
    }
    gEntry = entry;
    makeContext(gFibers[fiber], stackOf(fiber).top, firstFrame);
#if defined(HUBKV_SIMT_ASAN)
    gFakeStacks[fiber] = nullptr;
#endif
}

void resumeFiber(std::size_t fiber)
{
    gRunning = fiber;
#if defined(HUBKV_SIMT_ASAN)
    Stack const stack = stackOf(fiber);
    void* fakeStack = nullptr;
    __sanitizer_start_switch_fiber(&fakeStack, stack.bottom, static_cast<std::size_t>(stack.top - stack.bottom));
#endif
    hubkvSimtSwitch(&gScheduler, gFibers[fiber]);
#if defined(HUBKV_SIMT_ASAN)
    __sanitizer_finish_switch_fiber(fakeStack, nullptr, nullptr);
#endif
}

void suspendFiber([[maybe_unused]] bool done)
{
    std::size_t const fiber = gRunning;
#if defined(HUBKV_SIMT_ASAN)
    __sanitizer_start_switch_fiber(done ? nullptr : &gFakeStacks[fiber], gSchedulerBottom, gSchedulerBytes);
#endif
    hubkvSimtSwitch(&gFibers[fiber], gScheduler);
#if defined(HUBKV_SIMT_ASAN)
    __sanitizer_finish_switch_fiber(gFakeStacks[fiber], &gSchedulerBottom, &gSchedulerBytes);
#endif
}

void abandonFibers()
{
#if defined(HUBKV_SIMT_ASAN)
    // Frames that never returned left their redzones poisoned.
    for (std::size_t fiber = 0; fiber < kMAX_FIBERS; ++fiber)
    {
        Stack const stack = stackOf(fiber);
        __asan_unpoison_memory_region(stack.bottom, static_cast<std::size_t>(stack.top - stack.bottom));
    }
#endif
}

bool isOnFiber(void const* address)
{
    return gStacks != nullptr
        && reinterpret_cast<std::uintptr_t>(address) - reinterpret_cast<std::uintptr_t>(gStacks)
        < kMAX_FIBERS * kSTACK_BYTES;
}

} // namespace simt
} // namespace hubkv
