// SPDX-License-Identifier: Apache-2.0
//
// Expressions of dimensions that know their values, as a builder hands them to getOutputShapes.
#pragma once

#include <NvInfer.h>

#include <deque>

namespace harness
{

using namespace nvinfer1;

class Expression final : public IDimensionExpr, private apiv::VDimensionExpr
{
public:
    Expression(int64_t value, bool constant)
        : mValue(value)
        , mConstant(constant)
    {
        mImpl = this;
    }
    int64_t mValue;

private:
    bool isConstant() const override
    {
        return mConstant;
    }
    int64_t getConstantValue() const override
    {
        return mConstant ? mValue : INT64_MIN;
    }
    bool isSizeTensor() const override
    {
        return false;
    }
    bool mConstant;
};

inline int64_t valueOf(IDimensionExpr const* expression)
{
    return static_cast<Expression const*>(expression)->mValue;
}

class Builder final : public IExprBuilder, private apiv::VExprBuilder
{
public:
    Builder()
    {
        mImpl = this;
    }
    IDimensionExpr const* dimension(int64_t value)
    {
        return &mExpressions.emplace_back(value, false);
    }

private:
    IDimensionExpr const* constant(int64_t value) override
    {
        return &mExpressions.emplace_back(value, true);
    }
    IDimensionExpr const* operation(
        DimensionOperation op, IDimensionExpr const& first, IDimensionExpr const& second) override
    {
        int64_t const a = valueOf(&first);
        int64_t const b = valueOf(&second);
        switch (op)
        {
        case DimensionOperation::kSUM: return dimension(a + b);
        case DimensionOperation::kPROD: return dimension(a * b);
        default: return nullptr; // the plugins use no other
        }
    }
    IDimensionExpr const* declareSizeTensor(int32_t, IDimensionExpr const&, IDimensionExpr const&) override
    {
        return nullptr;
    }
    std::deque<Expression> mExpressions;
};

} // namespace harness
