// SPDX-License-Identifier: Apache-2.0
//
// Plugin fields as a struct. A stage has a struct F with a default for every member, F::kTABLE that names each member with
// its bounds, and F::check() for what two members must agree on. Reading, listing and serializing follow from the table.
#pragma once

#include "guard.h"

#include <NvInferRuntime.h>

#include <array>
#include <cfloat>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace hubkv::plugin
{

template <typename F>
struct Field
{
    char const* name;
    std::variant<int32_t F::*, int64_t F::*, float F::*> member;
    double low; //!< the bounds are allowed values
    double high;
    bool required{false}; //!< there is no default
};

template <typename T>
constexpr nvinfer1::PluginFieldType fieldType()
{
    if constexpr (std::is_same_v<T, float>)
    {
        return nvinfer1::PluginFieldType::kFLOAT32;
    }
    else if constexpr (std::is_same_v<T, int64_t>)
    {
        return nvinfer1::PluginFieldType::kINT64;
    }
    else
    {
        static_assert(std::is_same_v<T, int32_t>);
        return nvinfer1::PluginFieldType::kINT32;
    }
}

constexpr char const* fieldTypeName(nvinfer1::PluginFieldType type)
{
    return type == nvinfer1::PluginFieldType::kFLOAT32 ? "FLOAT32"
        : type == nvinfer1::PluginFieldType::kINT64    ? "INT64"
                                                       : "INT32";
}

//! One given field into its member; refuses another type, length, a missing value, or one outside the bounds.
template <typename F>
void readField(Field<F> const& field, nvinfer1::PluginField const& given, F& values)
{
    std::visit(
        [&](auto member)
        {
            using T = std::remove_reference_t<decltype(values.*member)>;
            if (given.type != fieldType<T>())
            {
                refuse("field %s: type %d is not %s (%d)", field.name, static_cast<int>(given.type),
                    fieldTypeName(fieldType<T>()), static_cast<int>(fieldType<T>()));
            }
            if (given.length != 1 || given.data == nullptr)
            {
                refuse("field %s: it has %d values%s, one is needed", field.name, static_cast<int>(given.length),
                    given.data == nullptr ? " and no data" : "");
            }
            T value;
            std::memcpy(&value, given.data, sizeof(T));
            double const number = static_cast<double>(value);
            if (!(number >= field.low && number <= field.high)) // also refuses NaN
            {
                refuse("field %s: %g is not in %g..%g", field.name, number, field.low, field.high);
            }
            values.*member = value;
        },
        field.member);
}

//! The struct that a field collection describes. Refuses unknown, repeated and missing fields.
template <typename F>
F readFields(nvinfer1::PluginFieldCollection const* collection)
{
    F values{};
    std::array<bool, F::kTABLE.size()> seen{};
    int32_t const count = collection == nullptr ? 0 : collection->nbFields;
    if (count < 0 || (count > 0 && collection->fields == nullptr))
    {
        refuse("fields: %d fields without data", static_cast<int>(count));
    }
    for (int32_t i = 0; i < count; ++i)
    {
        nvinfer1::PluginField const& given = collection->fields[i];
        if (given.name == nullptr)
        {
            refuse("fields: field %d has no name", static_cast<int>(i));
        }
        size_t at = 0;
        while (at < F::kTABLE.size() && std::strcmp(F::kTABLE[at].name, given.name) != 0)
        {
            ++at;
        }
        if (at == F::kTABLE.size())
        {
            refuse("field %s: there is no field of this name", given.name);
        }
        if (seen[at])
        {
            refuse("field %s: it is given twice", given.name);
        }
        seen[at] = true;
        readField(F::kTABLE[at], given, values);
    }
    for (size_t at = 0; at < F::kTABLE.size(); ++at)
    {
        if (F::kTABLE[at].required && !seen[at])
        {
            refuse("field %s: it is not given and has no default", F::kTABLE[at].name);
        }
    }
    values.check();
    return values;
}

//! The table as TensorRT lists it; with values, as TensorRT serializes it (their memory is not copied).
template <typename F>
std::vector<nvinfer1::PluginField> listFields(F const* values)
{
    std::vector<nvinfer1::PluginField> list;
    for (Field<F> const& field : F::kTABLE)
    {
        std::visit(
            [&](auto member)
            {
                using T = std::remove_reference_t<decltype(std::declval<F&>().*member)>;
                void const* const data = values == nullptr ? nullptr : &(values->*member);
                list.emplace_back(field.name, data, fieldType<T>(), 1);
            },
            field.member);
    }
    return list;
}

} // namespace hubkv::plugin
