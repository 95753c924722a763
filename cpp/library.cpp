// SPDX-License-Identifier: Apache-2.0
//
// What the library says about itself, and its threads.
#include "common/cpu.h"
#include "common/status.h"
#include "common/thread_pool.h"
#include "hubkv/hubkv.h"

extern "C"
{

int32_t hubkv_abi_version(void)
{
    return HUBKV_ABI_VERSION;
}

char const* hubkv_version(void)
{
    return HUBKV_VERSION_STRING;
}

char const* hubkv_last_error(void)
{
    return hubkv::lastError();
}

hubkv_status hubkv_check_environment(void)
{
    return hubkv::guard(hubkv::checkEnvironment);
}

int32_t hubkv_has_cuda(void)
{
    return hubkv::kWITH_CUDA ? 1 : 0;
}

char const* hubkv_cpu_isa(void)
{
    return hubkv::isaName(hubkv::cpuIsa());
}

int32_t hubkv_num_threads(void)
{
    return hubkv::numThreads();
}

hubkv_status hubkv_set_num_threads(int32_t threads)
{
    return hubkv::guard(
        [&]
        {
            hubkv::checkRange("threads", threads, 1, hubkv::kMAX_THREADS);
            hubkv::setNumThreads(threads);
        });
}

} // extern "C"
