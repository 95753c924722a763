// SPDX-License-Identifier: Apache-2.0
//
// Carves a workspace into arrays. A stage describes its workspace by one struct whose constructor calls take() for each
// array; the size query reads bytes(), the run adds the same offsets to the caller's pointer.
#pragma once

#include "common/status.h"

#include <cstdint>

namespace hubkv
{

//! Where one array of T lies in a workspace.
template <typename T>
struct WorkspaceArray
{
    int64_t offset = 0; // bytes

    T* in(void* workspace) const
    {
        return reinterpret_cast<T*>(static_cast<char*>(workspace) + offset);
    }
};

class WorkspaceCarver
{
public:
    template <typename T>
    WorkspaceArray<T> take(int64_t count)
    {
        WorkspaceArray<T> const array{mBytes};
        int64_t const bytes = checkedProduct("workspace", count, sizeof(T));
        HUBKV_CHECK(bytes <= kINT64_MAX - mBytes - kWORKSPACE_ALIGNMENT, "workspace: its size does not fit in 64 bits");
        mBytes += (bytes + kWORKSPACE_ALIGNMENT - 1) / kWORKSPACE_ALIGNMENT * kWORKSPACE_ALIGNMENT;
        return array;
    }

    int64_t bytes() const
    {
        return mBytes;
    }

private:
    int64_t mBytes = 0;
};

} // namespace hubkv
