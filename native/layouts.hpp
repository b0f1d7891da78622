// How codes lie in memory for our two engines, and how that is built.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels.hpp"
#include "top_k.hpp"

namespace recprune {

constexpr Item kNoItem = 0xFFFFFFFFu;  // fills up the last block of a list

// Items grouped by their sub-item id in the first split, in blocks of 64 items; the codes of the
// other splits, a row for each: whoever does not need a row does not read it. Views: the memory
// belongs to NumPy.
struct ListLayout {
    std::span<const std::int64_t> block_offsets;  // [num_sub_items + 1]: the blocks of each list
    std::span<const std::uint8_t> codes;          // [num_splits − 1][num_blocks][64]
    std::span<const Item> items;                  // [num_blocks][64]
    std::size_t num_splits;
    std::size_t num_sub_items;

    std::size_t rows() const { return num_splits - 1; }
    const std::uint8_t* row(std::size_t number) const {
        return codes.data() + number * items.size();
    }

    void prefetch_item(std::size_t block, std::size_t lane) const {
        __builtin_prefetch(&items[block * kBlockItems + lane]);
    }

    // Which items of a block, the last of its list, are more than padding.
    std::uint64_t real_items(std::size_t block) const {
        std::uint64_t real = 0;
        for (std::size_t lane = 0; lane < kBlockItems; ++lane)
            real |= std::uint64_t{items[block * kBlockItems + lane] != kNoItem} << lane;
        return real;
    }

    // The exact score: the oracle's additions in the oracle's order, without bias.
    float score(const float* scores, std::size_t list, std::size_t block, std::size_t lane) const {
        float sum = scores[list];
        const std::size_t place = block * kBlockItems + lane;
        for (std::size_t split = 1; split < num_splits; ++split)
            sum += scores[split * num_sub_items + row(split - 1)[place]];
        return sum;
    }
};

// Fills block_offsets of a list layout: every list begins with a fresh block.
inline void count_list_blocks(std::span<const std::uint8_t> codes, std::size_t num_items,
                              std::size_t num_splits, std::span<std::int64_t> block_offsets) {
    constexpr auto kItems = static_cast<std::int64_t>(kBlockItems);
    std::vector<std::int64_t> sizes(block_offsets.size() - 1, 0);
    for (std::size_t item = 0; item < num_items; ++item) ++sizes[codes[item * num_splits]];
    block_offsets[0] = 0;
    for (std::size_t list = 0; list < sizes.size(); ++list)
        block_offsets[list + 1] = block_offsets[list] + (sizes[list] + kItems - 1) / kItems;
}

inline void fill_list_blocks(std::span<const std::uint8_t> codes, std::size_t num_items,
                             std::size_t num_splits, std::span<const std::int64_t> block_offsets,
                             std::span<std::uint8_t> rows, std::span<Item> items) {
    std::fill(items.begin(), items.end(), kNoItem);
    std::fill(rows.begin(), rows.end(), std::uint8_t{0});
    std::vector<std::size_t> cursor(block_offsets.size() - 1);
    for (std::size_t list = 0; list < cursor.size(); ++list)
        cursor[list] = static_cast<std::size_t>(block_offsets[list]) * kBlockItems;
    for (std::size_t item = 0; item < num_items; ++item) {
        const std::uint8_t* code = codes.data() + item * num_splits;
        const std::size_t place = cursor[code[0]]++;
        items[place] = static_cast<Item>(item);
        for (std::size_t split = 1; split < num_splits; ++split)
            rows[(split - 1) * items.size() + place] = code[split];
    }
}

// Eight splits as a ring of four pairs, and for each pair the items sorted by cell, that is by
// their sub-item ids in those two splits. Of every item there are the keys of the next two pairs. A
// cell is cut into groups of 32 items (the last may be smaller): first the near keys of a group, of
// the next pair, then its far keys, of the pair after it. One vector of near keys rejects nearly
// all items of its group.
constexpr std::size_t kPairs = 4;
constexpr std::size_t kCells = 65'536;
constexpr std::size_t kKeyPadding = 32;  // kernels read whole vectors

struct CellLayout {
    std::span<const std::uint32_t> cell_offsets;  // [kPairs][kCells + 1]
    std::span<const std::uint16_t> keys;          // [kPairs][2 · num_items + kKeyPadding]
    std::span<const Item> items;                  // [kPairs][num_items]
    std::size_t num_items;

    const std::uint32_t* offsets_of(std::size_t pair) const {
        return cell_offsets.data() + pair * (kCells + 1);
    }
    const std::uint16_t* keys_of(std::size_t pair) const {
        return keys.data() + pair * (2 * num_items + kKeyPadding);
    }
    const Item* items_of(std::size_t pair) const { return items.data() + pair * num_items; }
};

// Both codes of a pair of splits, the first in the low byte.
inline std::uint16_t pair_key(const std::uint8_t* code, std::size_t pair) {
    return static_cast<std::uint16_t>(code[2 * pair] | code[2 * pair + 1] << 8);
}

// Cells of one first code lie side by side: a search walks along them.
inline std::size_t cell_of(const std::uint8_t* code, std::size_t pair) {
    return static_cast<std::size_t>(code[2 * pair] << 8 | code[2 * pair + 1]);
}

inline void build_cells(std::span<const std::uint8_t> codes, std::size_t num_items,
                        std::size_t pair, std::span<std::uint32_t> offsets,
                        std::span<std::uint16_t> keys, std::span<Item> items) {
    std::vector<std::uint32_t> cursor(kCells, 0);
    for (std::size_t item = 0; item < num_items; ++item) ++cursor[cell_of(&codes[item * 8], pair)];
    std::uint32_t start = 0;
    for (std::size_t cell = 0; cell < kCells; ++cell) {
        offsets[cell] = start;
        start += cursor[cell];
        cursor[cell] = offsets[cell];
    }
    offsets[kCells] = start;
    for (std::size_t item = 0; item < num_items; ++item) {
        const std::uint8_t* code = &codes[item * 8];
        const std::size_t cell = cell_of(code, pair);
        const std::size_t position = cursor[cell]++;
        const std::size_t lane = (position - offsets[cell]) % kGroupItems;
        const std::size_t group = position - lane;
        const std::size_t size = std::min<std::size_t>(offsets[cell + 1] - group, kGroupItems);
        keys[2 * group + lane] = pair_key(code, (pair + 1) % kPairs);
        keys[2 * group + size + lane] = pair_key(code, (pair + 2) % kPairs);
        items[position] = static_cast<Item>(item);
    }
    std::fill(keys.begin() + static_cast<std::ptrdiff_t>(2 * num_items), keys.end(),
              std::uint16_t{0});
}

}  // namespace recprune
