// SPDX-License-Identifier: Apache-2.0
//
// What common/simt.h gives to kernels that are compiled for the CPU: CUDA's own vector and half types, the qualifiers,
// the indices, launch(). README.md beside this file has the rules that kernels obey.
#pragma once

// CUDA's headers first: without __CUDACC__ they are plain C++, and they must not see the qualifiers defined below.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>
#include <vector_types.h>

#include "common/status.h"
#include "simt/collectives.h"
#include "simt/intrinsics.h"

#include <cstddef>
#include <tuple>

#undef __shared__
#undef __global__
#undef __launch_bounds__
#if defined(HUBKV_SIMT_RACE)
//! With all that it calls inlined: -fsanitize=thread overlooks objects that a call takes from or returns to memory, and
//! half types are objects.
#define __global__ __attribute__((flatten))
#else
#define __global__
#endif
#define __launch_bounds__(...)

//! Shared arrays are function-local statics: blocks run one after another. The tag becomes part of the symbol's name,
//! in templates too, and by it the emulator finds all of them (symbols.h). __constinit: half types have constructors,
//! but an array of them gets no guard variable.
#define __shared__ static __constinit __attribute__((abi_tag("hubkvShared")))

#define HUBKV_DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(::hubkv::simt::dynamicShared())

#define threadIdx (::hubkv::simt::gIndices.thread)
#define blockIdx (::hubkv::simt::gIndices.block)
#define blockDim (::hubkv::simt::gIndices.blockSize)
#define gridDim (::hubkv::simt::gIndices.gridSize)

namespace hubkv
{
namespace simt
{

//! Of the thread that runs now.
struct Indices
{
    uint3 thread;
    uint3 block;
    dim3 blockSize;
    dim3 gridSize;
};
extern Indices gIndices;

void* dynamicShared();

//! One launch. body(context) is the kernel called with its arguments, once per thread.
struct Launch
{
    void const* kernel;
    dim3 grid;
    dim3 block;
    std::size_t sharedBytes;
    void (*body)(void const* context);
    void const* context;
};

//! Runs all blocks. Throws StatusError HUBKV_CUDA_ERROR at the first fault: "kernel, file:line, block, thread: what".
void run(Launch const& launch);

} // namespace simt

using Stream = void*;

//! See common/simt.h. Returns when the kernel has run.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t sharedBytes, Stream /*stream*/,
    Arguments&&... arguments)
{
    static_assert(
        sizeof...(Parameters) == sizeof...(Arguments), "launch: the kernel takes another number of arguments");
    struct Call
    {
        void (*kernel)(Parameters...);
        std::tuple<Parameters...> arguments;
    };
    Call const call{kernel, std::tuple<Parameters...>(static_cast<Arguments&&>(arguments)...)};
    auto const body = [](void const* context)
    {
        Call const& call = *static_cast<Call const*>(context);
        std::apply(call.kernel, call.arguments);
    };
    simt::run({reinterpret_cast<void const*>(kernel), grid, block, sharedBytes, body, &call});
}

} // namespace hubkv
