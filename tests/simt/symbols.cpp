// SPDX-License-Identifier: Apache-2.0
#include "simt/symbols.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace hubkv
{
namespace simt
{
namespace
{

constexpr char const* kSHARED_TAG = "B11hubkvShared";

std::string demangled(char const* symbol)
{
    int status = 0;
    char* const text = abi::__cxa_demangle(symbol, nullptr, nullptr, &status);
    std::string const result = status == 0 ? text : symbol;
    std::free(text);
    return result;
}

void erase(std::string& text, char const* part)
{
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at))
    {
        text.erase(at, std::strlen(part));
    }
}

//! "void hubkv::(anonymous namespace)::scale<float>(float*)" -> "scale<float>"
std::string shortFunction(std::string name)
{
    erase(name, "(anonymous namespace)::");
    erase(name, "hubkv::");
    if (name.compare(0, 5, "void ") == 0)
    {
        name.erase(0, 5);
    }
    int32_t depth = 0; // of template arguments
    for (std::size_t i = 0; i < name.size(); ++i)
    {
        depth += name[i] == '<' ? 1 : name[i] == '>' ? -1 : 0;
        if (depth == 0 && name[i] == '(')
        {
            name.resize(i);
        }
    }
    return name;
}

//! "hubkv::scale<float>(float*)::tile[abi:hubkvShared]" -> "tile"
std::string shortVariable(std::string name)
{
    name.resize(std::min(name.size(), name.find("[abi:")));
    std::size_t const scope = name.rfind("::");
    return scope == std::string::npos ? name : name.substr(scope + 2);
}

class Image
{
public:
    Image()
    {
        Dl_info info{};
        if (dladdr(reinterpret_cast<void const*>(&fileName), &info) == 0)
        {
            return;
        }
        path = info.dli_fname;
        base = static_cast<char*>(info.dli_fbase);
        int const file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        struct stat status;
        if (file >= 0 && fstat(file, &status) == 0)
        {
            std::size_t const bytes = static_cast<std::size_t>(status.st_size);
            void* const content = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0);
            if (content != MAP_FAILED)
            {
                readSymbols(static_cast<char const*>(content));
                munmap(content, bytes);
            }
        }
        close(file);
    }

    std::string path;
    char* base = nullptr;
    std::vector<SharedVariable> shared;
    std::vector<std::pair<char const*, std::string>> functions; // mangled

private:
    void readSymbols(char const* file)
    {
        auto const& header = *reinterpret_cast<Elf64_Ehdr const*>(file);
        auto const* const sections = reinterpret_cast<Elf64_Shdr const*>(file + header.e_shoff);
        for (int32_t i = 0; i < header.e_shnum; ++i)
        {
            if (sections[i].sh_type != SHT_SYMTAB)
            {
                continue;
            }
            char const* const names = file + sections[sections[i].sh_link].sh_offset;
            auto const* const symbols = reinterpret_cast<Elf64_Sym const*>(file + sections[i].sh_offset);
            for (std::size_t k = 0; k < sections[i].sh_size / sizeof(Elf64_Sym); ++k)
            {
                char const* const name = names + symbols[k].st_name;
                char* const address = base + symbols[k].st_value;
                if (ELF64_ST_TYPE(symbols[k].st_info) == STT_FUNC)
                {
                    functions.emplace_back(address, name);
                }
                else if (std::strstr(name, kSHARED_TAG) != nullptr && symbols[k].st_size > 0)
                {
                    shared.push_back({address, symbols[k].st_size, shortVariable(demangled(name))});
                }
            }
        }
        std::sort(shared.begin(), shared.end(),
            [](SharedVariable const& a, SharedVariable const& b) { return a.address < b.address; });
    }
};

Image const& image()
{
    static Image const instance;
    return instance;
}

} // namespace

std::vector<SharedVariable> const& sharedVariables()
{
    return image().shared;
}

std::string functionName(void const* function)
{
    for (auto const& [address, name] : image().functions)
    {
        if (address == function)
        {
            return shortFunction(demangled(name.c_str()));
        }
    }
    return "?";
}

std::string sourceLine(void const* returnAddress)
{
    char command[1024];
    std::snprintf(command, sizeof(command), "addr2line -i -e '%s' 0x%zx 2>/dev/null", image().path.c_str(),
        static_cast<std::size_t>(static_cast<char const*>(returnAddress) - 1 - image().base));
    char line[512] = "?";
    if (FILE* const pipe = popen(command, "r"))
    {
        // Inlined calls, the innermost first: the one that is of a kernel's own sources.
        bool isForeign = true;
        while (isForeign && std::fgets(line, sizeof(line), pipe) != nullptr)
        {
            line[std::strcspn(line, " \n")] = '\0'; // without "(discriminator n)"
            isForeign = std::strstr(line, "/simt/collectives.h") != nullptr
                || std::strstr(line, "/simt/intrinsics.h") != nullptr || std::strstr(line, "/cuda_") != nullptr
                || std::strstr(line, "/c++/") != nullptr;
        }
        pclose(pipe);
    }
    return fileName(line);
}

char const* fileName(char const* path)
{
    char const* const slash = std::strrchr(path, '/');
    return slash != nullptr ? slash + 1 : path;
}

} // namespace simt
} // namespace hubkv
