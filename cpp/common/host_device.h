// SPDX-License-Identifier: Apache-2.0
//
// For functions that the host and kernels share.
#pragma once

#if defined(__CUDACC__)
#define HUBKV_HOST_DEVICE __host__ __device__
#else
#define HUBKV_HOST_DEVICE
#endif
