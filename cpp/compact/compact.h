// SPDX-License-Identifier: Apache-2.0
//
// compact: the kept rows of k and v, copied together without holes.
#pragma once

#include "hubkv/hubkv.h"

#include <cstdint>

namespace hubkv
{

//! Arguments as in hubkv_compact, checked; what positions and headOffsets hold is not.
void compactHost(hubkv_compact_params const& params, void const* const* k, void const* const* v,
    int32_t const* positions, int64_t const* headOffsets, void* kRows, void* vRows);

//! The same on a GPU: enqueued on `stream`; k and v themselves are host arrays, all data is in device memory.
void compactCuda(void* stream, hubkv_compact_params const& params, void const* const* k, void const* const* v,
    int32_t const* positions, int64_t const* headOffsets, void* kRows, void* vRows);

} // namespace hubkv
