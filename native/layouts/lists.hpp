// How codes lie in memory for a scan, and how that is built.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "kernels/kernels.hpp"
#include "top_k.hpp"

namespace recprune {

// Splits by which items are sorted: the first makes lists, the second sorts their items. The codes
// of the others are kept in rows.
constexpr std::size_t kSortedSplits = 2;

inline std::size_t num_code_rows(std::size_t num_splits) {
    return num_splits > kSortedSplits ? num_splits - kSortedSplits : 0;
}

// Items grouped by their sub-item id in the first split and, within such a list, sorted by that in
// the second: what is sorted takes a bit an item. In blocks of 64 items, the last of a list filled
// up with kNoItem; the codes of the other splits, a row for each: a row that is not needed is not
// read. Views: the memory belongs to NumPy.
struct ListLayout {
    std::span<const std::int64_t> block_offsets;  // [num_sub_items + 1]: the blocks of each list
    std::span<const std::uint8_t> second_codes;   // [num_sub_items][256]: of a list, by rank
    std::span<const std::uint8_t> bases;          // [num_blocks], and
    std::span<const std::uint64_t> changes;       // [num_blocks]: the ranks, see SortedRow
    std::span<const std::uint8_t> codes;          // [num_splits − 2][num_blocks][64]
    std::span<const Item> items;                  // [num_blocks][64]
    std::size_t num_items;                        // without padding
    std::size_t num_splits;
    std::size_t num_sub_items;

    const std::uint8_t* second_codes_of(std::size_t list) const {
        return second_codes.data() + list * kMaxNarrowSubItems;
    }
    // The codes of a split after the second.
    const std::uint8_t* row(std::size_t split) const {
        return codes.data() + (split - kSortedSplits) * items.size();
    }

    // An item's rank in the second split; see SortedRow.
    std::uint8_t rank(std::size_t block, std::size_t lane) const {
        const std::uint64_t up_to_lane = changes[block] << (kBlockItems - 1 - lane);
        return static_cast<std::uint8_t>(bases[block] + std::popcount(up_to_lane));
    }

    // The block of a list, not an empty one, in which the first item with that rank is.
    std::size_t block_with(std::size_t list, std::uint8_t rank) const {
        const auto first = bases.begin() + block_offsets[list];
        const auto last = bases.begin() + block_offsets[list + 1];
        const auto block = std::lower_bound(first, last, rank);
        const bool begins_with_it = block != last && *block == rank;
        return static_cast<std::size_t>(block - bases.begin()) - (begins_with_it ? 0 : 1);
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
        if (num_splits == 1) return sum;
        sum += scores[num_sub_items + second_codes_of(list)[rank(block, lane)]];
        const std::size_t place = block * kBlockItems + lane;
        for (std::size_t split = kSortedSplits; split < num_splits; ++split)
            sum += scores[split * num_sub_items + row(split)[place]];
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

// Fills the items and rows of a list layout; `second` is the row of the second split.
inline void fill_list_blocks(std::span<const std::uint8_t> codes, std::size_t num_items,
                             std::size_t num_splits, std::span<const std::int64_t> block_offsets,
                             std::span<std::uint8_t> second, std::span<std::uint8_t> rows,
                             std::span<Item> items) {
    std::fill(items.begin(), items.end(), kNoItem);
    std::fill(second.begin(), second.end(), std::uint8_t{0});
    std::fill(rows.begin(), rows.end(), std::uint8_t{0});
    std::vector<std::size_t> cursor(block_offsets.size() - 1);
    for (std::size_t list = 0; list < cursor.size(); ++list)
        cursor[list] = static_cast<std::size_t>(block_offsets[list]) * kBlockItems;
    for (std::size_t item = 0; item < num_items; ++item) {
        const std::uint8_t* code = codes.data() + item * num_splits;
        const std::size_t place = cursor[code[0]]++;
        items[place] = static_cast<Item>(item);
        if (num_splits > 1) second[place] = code[1];
        for (std::size_t split = kSortedSplits; split < num_splits; ++split)
            rows[(split - kSortedSplits) * items.size() + place] = code[split];
    }
}

// Sorts the items of one list, which lie in [begin, end), by their codes in the second split;
// equals, and the padding at the end, stay in their order.
inline void sort_list(std::size_t begin, std::size_t end, std::span<std::uint8_t> second,
                      std::span<std::uint8_t> rows, std::span<Item> items) {
    while (end > begin && items[end - 1] == kNoItem) --end;
    std::array<std::size_t, kMaxNarrowSubItems + 1> cursor{};
    for (std::size_t place = begin; place < end; ++place) ++cursor[second[place] + std::size_t{1}];
    std::partial_sum(cursor.begin(), cursor.end(), cursor.begin());
    std::vector<std::uint32_t> target(end - begin);
    for (std::size_t place = begin; place < end; ++place)
        target[place - begin] = static_cast<std::uint32_t>(cursor[second[place]]++);
    auto sort = [&](auto values) {
        const std::vector old(values.begin(), values.end());
        for (std::size_t place = 0; place < old.size(); ++place) values[target[place]] = old[place];
    };
    sort(second.subspan(begin, end - begin));
    sort(items.subspan(begin, end - begin));
    for (std::size_t row = 0; row < rows.size(); row += items.size())
        sort(rows.subspan(row + begin, end - begin));
}

// Pre: the list is sorted. Fills the ranks of its blocks, and its codes by rank.
inline void rank_list(std::size_t first_block, std::size_t last_block,
                      std::span<const std::uint8_t> second, std::span<const Item> items,
                      std::span<std::uint8_t> bases, std::span<std::uint64_t> changes,
                      std::span<std::uint8_t> codes_by_rank) {
    std::fill(codes_by_rank.begin(), codes_by_rank.end(), std::uint8_t{0});
    std::size_t rank = 0;
    for (std::size_t block = first_block; block < last_block; ++block) {
        changes[block] = 0;
        for (std::size_t lane = 0; lane < kBlockItems; ++lane) {
            const std::size_t place = block * kBlockItems + lane;
            if (items[place] == kNoItem) break;
            const bool is_first = place == first_block * kBlockItems;
            const bool is_new = !is_first && second[place] != second[place - 1];
            rank += is_new;
            codes_by_rank[rank] = second[place];
            if (lane == 0)
                bases[block] = static_cast<std::uint8_t>(rank);
            else
                changes[block] |= std::uint64_t{is_new} << lane;
        }
    }
}

// The inverse: writes every item's code to `codes`, item-major.
inline void gather_codes(const ListLayout& lists, std::span<std::uint8_t> codes) {
    std::fill(codes.begin(), codes.end(), std::uint8_t{0});
    for (std::size_t list = 0; list < lists.num_sub_items; ++list) {
        const auto end = static_cast<std::size_t>(lists.block_offsets[list + 1]) * kBlockItems;
        for (auto place = static_cast<std::size_t>(lists.block_offsets[list]) * kBlockItems;
             place < end; ++place) {
            const Item item = lists.items[place];
            if (item == kNoItem) continue;
            std::uint8_t* code = &codes[item * lists.num_splits];
            code[0] = static_cast<std::uint8_t>(list);
            if (lists.num_splits > 1)
                code[1] = lists.second_codes_of(
                    list)[lists.rank(place / kBlockItems, place % kBlockItems)];
            for (std::size_t split = kSortedSplits; split < lists.num_splits; ++split)
                code[split] = lists.row(split)[place];
        }
    }
}

}  // namespace recprune
