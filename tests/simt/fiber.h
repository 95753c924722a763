// SPDX-License-Identifier: Apache-2.0
//
// Fibers: the stacks that the threads of a block run on, and the switch between them and the scheduler. Switches are
// announced to AddressSanitizer in its build.
#pragma once

#include <cstddef>

namespace hubkv
{
namespace simt
{

constexpr std::size_t kMAX_FIBERS = 1024;

//! The fiber starts with entry() at its next resumeFiber(). entry ends with suspendFiber(true).
void prepareFiber(std::size_t fiber, void (*entry)());

//! From the scheduler: runs the fiber until it suspends.
void resumeFiber(std::size_t fiber);

//! From the running fiber: back to the scheduler. A fiber that is done is never resumed.
void suspendFiber(bool done);

//! Forgets fibers that were left in the middle of their work.
void abandonFibers();

//! Whether an address lies on a fiber's stack.
bool isOnFiber(void const* address);

} // namespace simt
} // namespace hubkv
