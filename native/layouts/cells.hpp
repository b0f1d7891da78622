// How codes lie in memory for pruning by cells, and how that is built.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.hpp"
#include "top_k.hpp"

namespace recprune {

// Splits that cells are made for: a ring of fewer than two pairs is none, and of more than eight a
// search visits nearly all.
constexpr std::size_t kFewestCellSplits = 4;
constexpr std::size_t kMostCellSplits = 16;
constexpr std::size_t kMostPairs = kMostCellSplits / 2;
// A line has codes of two more pairs. In a ring of four, the last one may have keys of its own; in
// a longer one, every line has a second one with the codes of the next two pairs.
constexpr std::size_t kPairsWithLastKeys = 4;
constexpr std::size_t kPairsWithSecondLines = 5;
// Cells for each item, at most: where there are more, nearly all are empty, and a scan is faster.
constexpr std::size_t kMostCellsPerItem = 4;
// The longer a ring, the larger the share of the cells that is visited. From so many pairs on a
// scan is faster, unless there are so many items for each cell.
constexpr std::size_t kManyPairs = 7;
constexpr std::size_t kItemsPerCellOfMany = 64;

constexpr std::size_t num_pairs_of(std::size_t num_splits) { return (num_splits + 1) / 2; }

// The cells of a pair: combinations of its two sub-item ids. An odd number of splits leaves the
// last one alone, whose second code is then always 0.
constexpr std::size_t num_cells_of(std::size_t pair, std::size_t num_splits,
                                   std::size_t num_sub_items) {
    return 2 * pair + 1 < num_splits ? num_sub_items * num_sub_items : num_sub_items;
}

// Whether an index of this size has cells.
constexpr bool has_cells(std::size_t num_items, std::size_t num_splits, std::size_t num_sub_items) {
    if (num_splits < kFewestCellSplits || num_splits > kMostCellSplits) return false;
    if (num_sub_items > kMaxNarrowSubItems) return false;
    const std::size_t num_cells = num_sub_items * num_sub_items;
    return num_pairs_of(num_splits) < kManyPairs ? num_items * kMostCellsPerItem >= num_cells
                                                 : num_items >= num_cells * kItemsPerCellOfMany;
}

// The code of an item in a split, 0 where there is no such split.
inline std::uint8_t code_or_zero(const std::uint8_t* code, std::size_t split,
                                 std::size_t num_splits) {
    return split < num_splits ? code[split] : std::uint8_t{0};
}

// One pair of the ring: its items by cell, in lines of 16. Every cell has a line of its own, found
// by nothing but its number; what does not fit goes on in overflow lines, which come after those of
// all cells. A line has its items' codes of the next pair and of the one after it (near and far):
// 16 codes of each of these four splits. Places beyond the items of a line hold any codes.
struct CellPair {
    const std::uint8_t* lines;         // [num_lines][64]
    const std::uint32_t* starts;       // [num_lines + 1]: the first position of each line
    const std::uint32_t* overflow;     // [num_cells + 1]: the first overflow line of each cell
    const std::uint16_t* last_keys;    // [num_items], by position: the pair after far; or null
    const std::uint8_t* second_lines;  // [num_lines][64]: the two pairs after far; or null
    const Item* items;                 // [num_items], by position
    const std::uint64_t* overflowing;  // a bit for each cell: whether it has overflow lines
    std::size_t num_cells;
    std::size_t num_lines;
    std::size_t second_codes;  // that its cells have: cell = first · second_codes + second

    double lines_per_cell() const {
        return static_cast<double>(num_lines) / static_cast<double>(num_cells);
    }
};

// Splits as a ring of pairs, and all items for each pair. Views: the memory belongs to NumPy, but
// for the bits.
struct CellLayout {
    std::size_t num_items = 0;
    std::size_t num_splits = 0;
    std::size_t num_sub_items = 0;
    std::vector<CellPair> pairs;
    std::vector<std::uint64_t> bits;

    std::size_t num_pairs() const { return pairs.size(); }
    bool has_last_keys() const { return !pairs.empty() && pairs[0].last_keys; }
    bool has_second_lines() const { return !pairs.empty() && pairs[0].second_lines; }
    // Pairs whose codes stand beside an item in the cells of one, its own among them.
    std::size_t chain_pairs() const {
        const std::size_t written = has_second_lines() ? 5 : has_last_keys() ? 4 : 3;
        return std::min(written, num_pairs());
    }
};

// The arrays of a cell layout, all pairs one after the other.
struct CellArrays {
    std::span<const std::int64_t> pair_lines;    // [num_pairs + 1]
    std::span<const std::uint32_t> overflow;     // of each pair num_cells + 1
    std::span<const std::uint8_t> lines;         // [num_lines][64]
    std::span<const std::uint32_t> starts;       // of each pair num_lines + 1
    std::span<const std::uint16_t> last_keys;    // [num_pairs][num_items], or empty
    std::span<const std::uint8_t> second_lines;  // [num_lines][64], or empty
    std::span<const Item> items;                 // [num_pairs][num_items]
};

// Pre: the arrays have these sizes, and every pair has a line for each of its cells.
inline CellLayout cell_layout(const CellArrays& arrays, std::size_t num_items,
                              std::size_t num_splits, std::size_t num_sub_items) {
    CellLayout layout{num_items, num_splits, num_sub_items, {}, {}};
    const std::size_t num_pairs = num_pairs_of(num_splits);
    const std::size_t words = num_sub_items * num_sub_items / 64 + 1;
    layout.bits.assign(num_pairs * words, 0);
    std::size_t cells_before = 0;
    for (std::size_t pair = 0; pair < num_pairs; ++pair) {
        const auto first_line = static_cast<std::size_t>(arrays.pair_lines[pair]);
        const std::size_t num_cells = num_cells_of(pair, num_splits, num_sub_items);
        const std::uint32_t* overflow = arrays.overflow.data() + cells_before + pair;
        std::uint64_t* bits = layout.bits.data() + pair * words;
        for (std::size_t cell = 0; cell < num_cells; ++cell)
            bits[cell / 64] |= std::uint64_t{overflow[cell] != overflow[cell + 1]} << cell % 64;
        layout.pairs.push_back({
            .lines = arrays.lines.data() + first_line * kLineBytes,
            .starts = arrays.starts.data() + first_line + pair,
            .overflow = overflow,
            .last_keys =
                arrays.last_keys.empty() ? nullptr : arrays.last_keys.data() + pair * num_items,
            .second_lines = arrays.second_lines.empty()
                                ? nullptr
                                : arrays.second_lines.data() + first_line * kLineBytes,
            .items = arrays.items.data() + pair * num_items,
            .overflowing = bits,
            .num_cells = num_cells,
            .num_lines = static_cast<std::size_t>(arrays.pair_lines[pair + 1]) - first_line,
            .second_codes = num_cells / num_sub_items,
        });
        cells_before += num_cells;
    }
    return layout;
}

// Both codes of a pair of splits, the first in the low byte.
inline std::uint16_t pair_key(const std::uint8_t* code, std::size_t pair, std::size_t num_splits) {
    return static_cast<std::uint16_t>(code[2 * pair] | code_or_zero(code, 2 * pair + 1, num_splits)
                                                           << 8);
}

inline std::size_t cell_of(const std::uint8_t* code, std::size_t pair, std::size_t num_splits,
                           std::size_t num_sub_items) {
    if (2 * pair + 1 == num_splits) return code[2 * pair];
    return code[2 * pair] * num_sub_items + code[2 * pair + 1];
}

// The splits of which a line has codes, at an item's place in four stretches of 16: those of the
// pair that is so many ahead, and of the one after it.
struct LineSplits {
    std::array<std::size_t, 4> splits;  // num_splits and more: none, the code is 0

    LineSplits(std::size_t pair, std::size_t num_splits, std::size_t ahead = 1) {
        const std::size_t num_pairs = num_pairs_of(num_splits);
        const std::size_t near = (pair + ahead) % num_pairs;
        const std::size_t far = (pair + ahead + 1) % num_pairs;
        splits = {2 * near, 2 * near + 1, 2 * far, 2 * far + 1};
        if (far == pair) splits[2] = splits[3] = num_splits;  // the ring is closed
    }

    // Writes the codes of an item into its line.
    void write(const std::uint8_t* code, std::size_t num_splits, std::uint8_t* line,
               std::size_t place) const {
        for (std::size_t at = 0; at < splits.size(); ++at)
            line[at * kLineItems + place] = code_or_zero(code, splits[at], num_splits);
    }
};
constexpr std::size_t kSecondLineAhead = 3;  // pairs of which the second line begins

// Counts the overflow lines of a pair's cells: fills overflow, [num_cells + 1], and returns how
// many lines the pair has.
inline std::size_t count_cell_lines(std::span<const std::uint8_t> codes, std::size_t num_items,
                                    std::size_t num_splits, std::size_t num_sub_items,
                                    std::size_t pair, std::span<std::uint32_t> overflow) {
    const std::size_t num_cells = overflow.size() - 1;
    std::fill(overflow.begin(), overflow.end(), 0u);
    for (std::size_t item = 0; item < num_items; ++item)
        ++overflow[cell_of(&codes[item * num_splits], pair, num_splits, num_sub_items)];
    auto line = static_cast<std::uint32_t>(num_cells);
    for (std::size_t cell = 0; cell < num_cells; ++cell) {
        const std::uint32_t size = overflow[cell];
        overflow[cell] = line;
        constexpr auto kItems = static_cast<std::uint32_t>(kLineItems);
        if (size > kItems) line += (size - 1) / kItems;
    }
    overflow[num_cells] = line;
    return line;
}

// What there is to be filled of one pair.
struct CellPairArrays {
    std::span<const std::uint32_t> overflow;
    std::span<std::uint8_t> lines;
    std::span<std::uint32_t> starts;
    std::span<std::uint16_t> last_keys;    // or empty
    std::span<std::uint8_t> second_lines;  // or empty
    std::span<Item> items;
};

// Fills one pair. `padding` is a code whose items are rarely wanted: it fills the lines up.
inline void fill_cell_lines(std::span<const std::uint8_t> codes, std::size_t num_items,
                            std::size_t num_splits, std::size_t num_sub_items, std::size_t pair,
                            std::span<const std::uint8_t> padding, const CellPairArrays& arrays) {
    const auto& [overflow, lines, starts, last_keys, second_lines, items] = arrays;
    const std::size_t num_cells = overflow.size() - 1;
    const std::size_t num_lines = starts.size() - 1;
    const LineSplits first_codes(pair, num_splits);
    const LineSplits second_codes(pair, num_splits, kSecondLineAhead);
    auto write = [&](const std::uint8_t* code, std::size_t line, std::size_t place) {
        first_codes.write(code, num_splits, &lines[line * kLineBytes], place);
        if (!second_lines.empty())
            second_codes.write(code, num_splits, &second_lines[line * kLineBytes], place);
    };
    for (std::size_t line = 0; line < num_lines; ++line)
        for (std::size_t place = 0; place < kLineItems; ++place) write(padding.data(), line, place);
    // Items of each cell so far, which say where the next one goes.
    std::vector<std::uint32_t> sizes(num_cells, 0);
    auto line_of = [&](std::size_t cell, std::uint32_t place) {
        return place < kLineItems ? cell : overflow[cell] + place / kLineItems - 1;
    };
    std::fill(starts.begin(), starts.end(), 0u);
    for (std::size_t item = 0; item < num_items; ++item) {
        const std::size_t cell =
            cell_of(&codes[item * num_splits], pair, num_splits, num_sub_items);
        ++starts[line_of(cell, sizes[cell]++) + 1];
    }
    for (std::size_t line = 0; line < num_lines; ++line) starts[line + 1] += starts[line];
    std::fill(sizes.begin(), sizes.end(), 0u);
    const std::size_t last = (pair + 3) % num_pairs_of(num_splits);
    for (std::size_t item = 0; item < num_items; ++item) {
        const std::uint8_t* code = &codes[item * num_splits];
        const std::size_t cell = cell_of(code, pair, num_splits, num_sub_items);
        const std::uint32_t place = sizes[cell]++;
        const std::size_t line = line_of(cell, place);
        write(code, line, place % kLineItems);
        const std::size_t position = starts[line] + place % kLineItems;
        if (!last_keys.empty()) last_keys[position] = pair_key(code, last, num_splits);
        items[position] = static_cast<Item>(item);
    }
}

}  // namespace recprune
