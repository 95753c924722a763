// SPDX-License-Identifier: Apache-2.0
#include "attend/lanes_scalar.h"
#include "attend/tile.h"

#include "attend/kernels.h"

#include "attend/few_queries.h"

#include "attend/many_queries.h"

namespace hubkv
{

AttendKernels attendKernelsScalar(hubkv_dtype dtype)
{
    return kernelsOf<ScalarLanes>(dtype);
}

} // namespace hubkv
