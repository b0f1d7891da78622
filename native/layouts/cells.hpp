// How codes lie in memory for pruning by cells, and how that is built.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.hpp"
#include "top_k.hpp"

namespace recprune {

// The ring of pairs: what the search by cells is made for, as the paper's codes have eight splits.
constexpr std::size_t kPairs = 4;
constexpr std::size_t kCellSplits = 2 * kPairs;
// Keys behind those of a pair: kernels read whole vectors. Part of the saved format.
constexpr std::size_t kKeyPadding = 32;

// Keys of a pair: two for every item.
constexpr std::size_t num_cell_keys(std::size_t num_items) { return 2 * num_items + kKeyPadding; }

// Eight splits as a ring of four pairs, and for each pair the items sorted by cell, that is by
// their sub-item ids in those two splits. Of every item there are the keys of the next two pairs. A
// cell is cut into groups of kGroupItems items (the last may be smaller): first the next keys of a
// group, of the next pair, then its last keys, of the pair after it. One vector of next keys
// rejects nearly all items of its group. Views: the memory belongs to NumPy.
struct CellLayout {
    std::span<const std::uint32_t> cell_offsets;  // [kPairs][kCells + 1]
    std::span<const std::uint16_t> keys;          // [kPairs][num_cell_keys]
    std::span<const Item> items;                  // [kPairs][num_items]
    std::size_t num_items;

    const std::uint32_t* offsets_of(std::size_t pair) const {
        return cell_offsets.data() + pair * (kCells + 1);
    }
    const std::uint16_t* keys_of(std::size_t pair) const {
        return keys.data() + pair * num_cell_keys(num_items);
    }
    const Item* items_of(std::size_t pair) const { return items.data() + pair * num_items; }
};

// Both codes of a pair of splits, the first in the low byte.
inline std::uint16_t pair_key(const std::uint8_t* code, std::size_t pair) {
    return static_cast<std::uint16_t>(code[2 * pair] | code[2 * pair + 1] << 8);
}

// The cell of two codes. Cells of one first code lie side by side: a search walks along them.
inline std::size_t cell_at(std::size_t first_code, std::size_t second_code) {
    return first_code << 8 | second_code;
}

inline std::size_t cell_of(const std::uint8_t* code, std::size_t pair) {
    return cell_at(code[2 * pair], code[2 * pair + 1]);
}

// Where the keys of an item are that stands at a position of a cell, [start, stop).
struct CellPlace {
    std::size_t next_key;
    std::size_t last_key;

    CellPlace(std::size_t start, std::size_t stop, std::size_t position) {
        const std::size_t lane = (position - start) % kGroupItems;
        const std::size_t group = position - lane;
        next_key = 2 * group + lane;
        last_key = next_key + std::min(stop - group, kGroupItems);
    }
};

// Fills one pair of a cell layout.
inline void build_cells(std::span<const std::uint8_t> codes, std::size_t num_items,
                        std::size_t pair, std::span<std::uint32_t> offsets,
                        std::span<std::uint16_t> keys, std::span<Item> items) {
    std::vector<std::uint32_t> cursor(kCells, 0);
    for (std::size_t item = 0; item < num_items; ++item) {
        const std::uint8_t* code = &codes[item * kCellSplits];
        ++cursor[cell_of(code, pair)];
    }
    std::uint32_t start = 0;
    for (std::size_t cell = 0; cell < kCells; ++cell) {
        offsets[cell] = start;
        start += cursor[cell];
        cursor[cell] = offsets[cell];
    }
    offsets[kCells] = start;
    for (std::size_t item = 0; item < num_items; ++item) {
        const std::uint8_t* code = &codes[item * kCellSplits];
        const std::size_t cell = cell_of(code, pair);
        const std::size_t position = cursor[cell]++;
        const CellPlace place(offsets[cell], offsets[cell + 1], position);
        keys[place.next_key] = pair_key(code, (pair + 1) % kPairs);
        keys[place.last_key] = pair_key(code, (pair + 2) % kPairs);
        items[position] = static_cast<Item>(item);
    }
    std::fill(keys.begin() + static_cast<std::ptrdiff_t>(2 * num_items), keys.end(),
              std::uint16_t{0});
}

}  // namespace recprune
