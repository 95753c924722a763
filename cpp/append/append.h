// SPDX-License-Identifier: Apache-2.0
//
// append: the new rows of all layers go to the tail pages.
#pragma once

#include "hubkv/hubkv.h"

#include <cstdint>

namespace hubkv
{

//! Arguments as in hubkv_append, checked; what the tables hold is not. newLengths may be null.
void appendHost(hubkv_cache_params const& params, int64_t Tq, void const* kNew, void const* vNew, int64_t const* arena,
    int32_t const* blockTable, int32_t const* tailLengths, int32_t const* newLengths);

//! The same on a GPU: enqueued on `stream`, all data in device memory.
void appendCuda(void* stream, hubkv_cache_params const& params, int64_t Tq, void const* kNew, void const* vNew,
    int64_t const* arena, int32_t const* blockTable, int32_t const* tailLengths, int32_t const* newLengths);

} // namespace hubkv
