// SPDX-License-Identifier: Apache-2.0
#include "tensors.h"

namespace hubkv::plugin
{

using nvinfer1::DataType;

int64_t dim(char const* tensor, nvinfer1::PluginTensorDesc const& desc, int32_t rank, int32_t axis)
{
    if (desc.dims.nbDims != rank)
    {
        refuse("%s: it has %d dimensions, %d are needed", tensor, static_cast<int>(desc.dims.nbDims),
            static_cast<int>(rank));
    }
    int64_t const size = desc.dims.d[axis];
    if (size < 0 || size > INT32_MAX) // a tensor of TensorRT has fewer elements; products of two fit in 64 bits
    {
        refuse(
            "%s: dimension %d is %lld, not in 0..2^31-1", tensor, static_cast<int>(axis), static_cast<long long>(size));
    }
    return size;
}

void checkDim(char const* tensor, nvinfer1::PluginTensorDesc const& desc, int32_t rank, int32_t axis, int64_t size)
{
    int64_t const given = dim(tensor, desc, rank, axis);
    if (given != size)
    {
        refuse("%s: dimension %d is %lld, %lld is needed", tensor, static_cast<int>(axis),
            static_cast<long long>(given), static_cast<long long>(size));
    }
}

hubkv_dtype rowType(DataType type)
{
    return type == DataType::kFLOAT ? HUBKV_FLOAT32 : type == DataType::kHALF ? HUBKV_FLOAT16 : HUBKV_BFLOAT16;
}

bool isRowType(DataType type)
{
    return type == DataType::kFLOAT || type == DataType::kHALF || type == DataType::kBF16;
}

DataType fixedType(Kind kind)
{
    return kind == Kind::kFLOAT32 ? DataType::kFLOAT : kind == Kind::kINT32 ? DataType::kINT32 : DataType::kINT64;
}

int64_t elementBytes(DataType type)
{
    return type == DataType::kINT64 ? 8 : type == DataType::kHALF || type == DataType::kBF16 ? 2 : 4;
}

} // namespace hubkv::plugin
