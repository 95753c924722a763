// SPDX-License-Identifier: Apache-2.0
#include "attend/lanes_scalar.h"
#include "attend/tile.h"
#include "held_out_loss/held_out_loss.h"

#include "attend/kernels.h"

#include "score_window/query_tiles.h"

#include "held_out_loss/loss_rows.h"

namespace hubkv
{

LossKernel lossKernelScalar(hubkv_dtype dtype)
{
    return lossKernelOf<ScalarLanes>(dtype);
}

} // namespace hubkv
