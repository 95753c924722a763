// SPDX-License-Identifier: Apache-2.0
//
// What this library knows of itself from its symbol table and line table: the shared arrays of its kernels, the names
// of functions, the source line of an instruction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hubkv
{
namespace simt
{

//! A static __shared__ variable, its name in C++ spelling.
struct SharedVariable
{
    char* address;
    std::size_t bytes;
    std::string name;
};

//! All of the library's, by ascending address.
std::vector<SharedVariable> const& sharedVariables();

//! "scale<float>" for the kernel scale; "?" for an unknown function.
std::string functionName(void const* function);

//! "select.cu:120" for the call that returns to this address.
std::string sourceLine(void const* returnAddress);

//! The last part of a path.
char const* fileName(char const* path);

} // namespace simt
} // namespace hubkv
