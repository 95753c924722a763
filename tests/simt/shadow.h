// SPDX-License-Identifier: Apache-2.0
//
// Shadow memory of the race detector: what it remembers of each byte that a kernel touched.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>

namespace hubkv
{
namespace simt
{

//! Accesses of one kind by threads that are not ordered among themselves.
struct Group
{
    enum class Spread : uint8_t
    {
        kWARP,
        kBLOCK,
        kGRID
    };
    uint32_t epoch;     // of the last one; 0: there is none
    uint32_t lanes;     // of the warp, for Spread::kWARP
    uint32_t stamp;     // the warp's time at the last one
    uint8_t warp;       // of the last one
    Spread spread;      // over how much of the grid the threads are spread
    void const* caller; // of the last one
};

struct Cell
{
    Group read;
    Group write;
    Group atomic;
};

class Shadow
{
public:
    //! Calls visit(cell, address) for the cells of bytes [address, end): a cell stands for the word at the address, or
    //! for one byte of a word of which parts were touched.
    template <typename Visit>
    void forEachCell(uintptr_t address, uintptr_t end, Visit&& visit)
    {
        while (address < end)
        {
            Page& page = pageOf(address);
            std::size_t const word = address % kPAGE_BYTES / kWORD_BYTES;
            bool const isWhole = address % kWORD_BYTES == 0 && end - address >= kWORD_BYTES;
            if (isWhole && !page.isSplit[word])
            {
                visit(page.words[word], address);
                address += kWORD_BYTES;
                continue;
            }
            split(page, word);
            do
            {
                visit((*page.bytes)[address % kPAGE_BYTES], address);
                ++address;
            } while (address < end && address % kWORD_BYTES != 0);
        }
    }

    //! Forgets everything when it has become too much. Only between launches.
    void trim()
    {
        if (mPages.size() > kMAX_PAGES)
        {
            mPages.clear();
            mRecent.fill({});
        }
    }

private:
    static constexpr uintptr_t kPAGE_BYTES = 4096;
    static constexpr uintptr_t kWORD_BYTES = 4;
    static constexpr std::size_t kMAX_PAGES = 4096; // 16 MiB of the kernels' memory, up to 1.5 GB of cells

    struct Page
    {
        std::array<Cell, kPAGE_BYTES / kWORD_BYTES> words{};
        std::array<bool, kPAGE_BYTES / kWORD_BYTES> isSplit{};
        std::unique_ptr<std::array<Cell, kPAGE_BYTES>> bytes; // from the first split on
    };
    struct Entry
    {
        uintptr_t number = 0;
        Page* page = nullptr;
    };

    Page& pageOf(uintptr_t address)
    {
        uintptr_t const number = address / kPAGE_BYTES;
        Entry& recent = mRecent[number % mRecent.size()];
        if (recent.page == nullptr || recent.number != number)
        {
            std::unique_ptr<Page>& page = mPages[number];
            if (page == nullptr)
            {
                page = std::make_unique<Page>();
            }
            recent = {number, page.get()};
        }
        return *recent.page;
    }

    static void split(Page& page, std::size_t word)
    {
        if (page.bytes == nullptr)
        {
            page.bytes = std::make_unique<std::array<Cell, kPAGE_BYTES>>();
        }
        if (!page.isSplit[word])
        {
            page.isSplit[word] = true;
            std::fill_n(page.bytes->begin() + word * kWORD_BYTES, kWORD_BYTES, page.words[word]);
        }
    }

    std::unordered_map<uintptr_t, std::unique_ptr<Page>> mPages; // by number
    std::array<Entry, 256> mRecent{};
};

} // namespace simt
} // namespace hubkv
