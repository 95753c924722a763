// SPDX-License-Identifier: Apache-2.0
//
// The one header through which kernels see their machine. Under nvcc that is the CUDA runtime; with HUBKV_SIMT it is
// the emulator of tests/simt/, which runs the very same .cu files on the CPU (tests/simt/README.md has the rules that
// keep kernels runnable there).
//
//   HUBKV_DYNAMIC_SHARED(type, name)
//       inside a kernel: `type* const name` is the block's dynamic shared memory, aligned to 16 bytes
//   launch(kernel, grid, block, sharedBytes, stream, arguments...)
//       enqueues the kernel, or throws StatusError HUBKV_CUDA_ERROR; templates are named in full: copyRows<float>
//   Stream
//       what a launch is ordered on; static_cast<Stream>(void*)
#pragma once

#include "common/status.h"

#if defined(HUBKV_SIMT)

#include "simt/emulator.h"

#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <tuple>

//! Every kernel declares the same array, so that templates of several element types can share one file.
#define HUBKV_DYNAMIC_SHARED(type, name)                                                                               \
    extern __shared__ __align__(16) unsigned char hubkvDynamicShared[];                                                \
    type* const name = reinterpret_cast<type*>(hubkvDynamicShared)

namespace hubkv
{

using Stream = cudaStream_t;

//! Dynamic shared memory that a kernel gets without asking.
constexpr std::size_t kDEFAULT_SHARED_BYTES = 48 << 10;

//! Throws StatusError HUBKV_CUDA_ERROR with the call and CUDA's own words. Takes the error out of the runtime's memory,
//! so that no later and innocent call reports it.
inline void checkCuda(cudaError_t error, char const* call)
{
    if (error != cudaSuccess)
    {
        cudaGetLastError();
        fail(HUBKV_CUDA_ERROR, "%s: %s (%d): %s", call, cudaGetErrorName(error), static_cast<int>(error),
            cudaGetErrorString(error));
    }
}

//! Enqueues one kernel. Arguments convert to the kernel's parameters as in a call. Nothing is waited for; the launch
//! may be captured into a graph.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t sharedBytes, Stream stream,
    Arguments&&... arguments)
{
    static_assert(
        sizeof...(Parameters) == sizeof...(Arguments), "launch: the kernel takes another number of arguments");
    void const* const function = reinterpret_cast<void const*>(kernel);
    if (sharedBytes > kDEFAULT_SHARED_BYTES)
    {
        checkCuda(
            cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sharedBytes)),
            "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)");
    }
    std::tuple<Parameters...> values(static_cast<Arguments&&>(arguments)...);
    std::apply(
        [&](Parameters&... value)
        {
            void* pointers[] = {const_cast<void*>(static_cast<void const*>(&value))..., nullptr};
            checkCuda(cudaLaunchKernel(function, grid, block, pointers, sharedBytes, stream), "cudaLaunchKernel");
        },
        values);
}

} // namespace hubkv

#endif
