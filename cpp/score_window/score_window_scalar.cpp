// SPDX-License-Identifier: Apache-2.0
#include "attend/lanes_scalar.h"
#include "attend/tile.h"
#include "score_window/score_window.h"

#include "attend/kernels.h"

#include "score_window/query_tiles.h"

#include "score_window/score_rows.h"

namespace hubkv
{

ScoreKernels scoreKernelsScalar(hubkv_dtype dtype)
{
    return scoreKernelsOf<ScalarLanes>(dtype);
}

} // namespace hubkv
