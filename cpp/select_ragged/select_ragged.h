// SPDX-License-Identifier: Apache-2.0
//
// select_ragged: the first ranked candidates of every head, by a count of its own. hubkv.h states the ranks.
#pragma once

#include "common/candidates.h"
#include "common/cpu.h"
#include "common/host_device.h"
#include "hubkv/hubkv.h"
#include "select/key.h"

#include <cstdint>
#include <cstring>

namespace hubkv
{

//! The arrays of one hubkv_select_ragged call, as hubkv.h describes them.
struct SelectRaggedArrays
{
    float const* scores;
    int32_t const* candidatePositions;
    int64_t const* candidateOffsets;
    int32_t const* counts;
    int32_t* indices;
    int64_t* headOffsets;
};

//! Where a candidate ranks: the larger key first, of equal ones the lower index.
HUBKV_HOST_DEVICE HUBKV_INLINE int32_t rankKey(float score, int32_t position, int32_t sinkTokens)
{
    int32_t bits;
    memcpy(&bits, &score, sizeof(bits));
    return position < sinkTokens ? kPROTECTED_KEY : keyOfBits(bits);
}

//! Arguments as in hubkv_select_ragged, checked; what the arrays hold is not.
void selectRaggedHost(hubkv_select_ragged_params const& params, SelectRaggedArrays const& arrays);

//! The same on a GPU: enqueued on `stream`, all data in device memory.
void selectRaggedCuda(void* stream, hubkv_select_ragged_params const& params, SelectRaggedArrays const& arrays);

} // namespace hubkv
