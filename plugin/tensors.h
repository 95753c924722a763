// SPDX-License-Identifier: Apache-2.0
//
// Types and dimensions of a node's tensors.
#pragma once

#include "guard.h"

#include <NvInferRuntime.h>

#include <cstdint>

namespace hubkv::plugin
{

//! What a tensor holds. All kROWS tensors of a node (keys, values, queries) have one type: float32, float16 or bfloat16.
enum class Kind
{
    kROWS,
    kFLOAT32,
    kINT32,
    kINT64
};

//! Inputs and outputs with known dimensions.
struct Tensors
{
    nvinfer1::PluginTensorDesc const* in;
    int32_t numIn;
    nvinfer1::PluginTensorDesc const* out;
    int32_t numOut;
    bool exact; //!< false: the upper bounds of an optimization profile, each by itself
};

//! Dimension `axis`, 0..2^31-1, of a tensor that must have `rank` of them.
int64_t dim(char const* tensor, nvinfer1::PluginTensorDesc const& desc, int32_t rank, int32_t axis);

//! Refuses a dimension of another size.
void checkDim(char const* tensor, nvinfer1::PluginTensorDesc const& desc, int32_t rank, int32_t axis, int64_t size);

hubkv_dtype rowType(nvinfer1::DataType type);

//! What kROWS tensors may be.
bool isRowType(nvinfer1::DataType type);

//! What all other tensors are.
nvinfer1::DataType fixedType(Kind kind);

int64_t elementBytes(nvinfer1::DataType type);

} // namespace hubkv::plugin
