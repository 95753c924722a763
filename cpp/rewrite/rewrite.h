// SPDX-License-Identifier: Apache-2.0
//
// rewrite: the kept candidates, copied together as a new compact segment. hubkv.h has the semantics.
#pragma once

#include "common/candidates.h"
#include "hubkv/hubkv.h"

#include <cstdint>

namespace hubkv
{

//! The arrays of one hubkv_rewrite call, as hubkv.h describes them.
struct RewriteArrays
{
    int32_t const* candidatePositions;
    int32_t const* indices;
    int64_t const* headOffsets;
    int64_t const* arena;
    int64_t const* segments;
    int32_t const* blockTable;
    void* kRows;
    void* vRows;
    int32_t* newPositions;
    float* rowBias; // or null
};

//! Refuses arguments that neither rewrite nor merge can take; whether there is a row to write. The number of rows of the
//! new segment is keptRows + L * Hkv * mergedRows.
bool checkRewrite(hubkv_rewrite_params const* params, RewriteArrays const& arrays);

//! Arguments as in hubkv_rewrite, checked; what the tables hold is not.
void rewriteHost(hubkv_rewrite_params const& params, RewriteArrays const& arrays);

//! The same on a GPU: enqueued on `stream`, all data in device memory.
void rewriteCuda(void* stream, hubkv_rewrite_params const& params, RewriteArrays const& arrays);

} // namespace hubkv
