// SPDX-License-Identifier: Apache-2.0
#include "refine/refine_lanes.h"

namespace hubkv
{

RefineKernels const& refineKernelsScalar()
{
    return kREFINE_KERNELS<4>;
}

} // namespace hubkv
