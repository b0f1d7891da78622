// PQTopK (Petrov, Macdonald and Tonellotto, RecSys 2024): score every item from the sub-item
// scores, keep the best K. The yardstick, and the oracle of all other methods.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "layouts/lists.hpp"
#include "query.hpp"
#include "top_k.hpp"

namespace recprune {

// Splits of the paper's codes, and of learnt ones twice as long: the cases whose loop is unrolled.
constexpr std::size_t kUsualSplits = 8;
constexpr std::size_t kManySplits = 16;

// The definition of an item's score: sub-item scores in split order, in float32.
template <class Code>
inline float score_item(const float* scores, const Code* code, std::size_t num_splits,
                        std::size_t num_sub_items) {
    float sum = scores[code[0]];
    for (std::size_t split = 1; split < num_splits; ++split)
        sum += scores[split * num_sub_items + code[split]];
    return sum;
}

template <class Code>
void pqtopk(std::span<const Code> codes, std::size_t num_items, std::size_t num_splits,
            std::size_t num_sub_items, const Query& query, TopK& top, Stats& stats) {
    const float* scores = query.sub_item_scores;
    auto run = [&](auto splits) {
        for (std::size_t item = 0; item < num_items; ++item) {
            const float score =
                query.with_bias(score_item(scores, &codes[item * splits], splits, num_sub_items),
                                static_cast<Item>(item));
            if (score >= top.threshold() && query.may_return(static_cast<Item>(item)))
                top.offer(score, static_cast<Item>(item));
        }
    };
    if (num_splits == kUsualSplits)
        run(std::integral_constant<std::size_t, kUsualSplits>{});
    else if (num_splits == kManySplits)
        run(std::integral_constant<std::size_t, kManySplits>{});
    else
        run(num_splits);
    stats.items_scored = stats.items_touched = static_cast<std::int64_t>(num_items);
    stats.bytes_touched = static_cast<std::int64_t>(codes.size_bytes());
    stats.steps = 1;
}

// The same for a few allowed items: their bits are walked instead of all items.
template <class Code>
void pqtopk_allowed(std::span<const Code> codes, std::size_t num_items, std::size_t num_splits,
                    std::size_t num_sub_items, const Query& query, TopK& top, Stats& stats) {
    for (std::size_t word = 0; word * kWordBits < num_items; ++word) {
        for (std::uint64_t bits = query.allow[word]; bits; bits &= bits - 1) {
            const std::size_t item =
                word * kWordBits + static_cast<std::size_t>(std::countr_zero(bits));
            const float score =
                query.with_bias(score_item(query.sub_item_scores, &codes[item * num_splits],
                                           num_splits, num_sub_items),
                                static_cast<Item>(item));
            ++stats.items_scored;
            if (score >= top.threshold() && query.may_return(static_cast<Item>(item)))
                top.offer(score, static_cast<Item>(item));
        }
    }
    stats.items_touched = stats.items_scored;
    stats.bytes_touched = stats.items_scored * static_cast<std::int64_t>(num_splits * sizeof(Code));
    stats.steps = 1;
}

// The same over a list layout, for indexes that keep nothing else.
inline void pqtopk(const ListLayout& lists, const Query& query, TopK& top, Stats& stats) {
    for (std::size_t list = 0; list < lists.num_sub_items; ++list) {
        const auto end = static_cast<std::size_t>(lists.block_offsets[list + 1]);
        for (auto block = static_cast<std::size_t>(lists.block_offsets[list]); block < end;
             ++block) {
            for (std::size_t lane = 0; lane < kBlockItems; ++lane) {
                const Item item = lists.items[block * kBlockItems + lane];
                if (item == kNoItem) continue;
                const float score =
                    query.with_bias(lists.score(query.sub_item_scores, list, block, lane), item);
                if (score >= top.threshold() && query.may_return(item)) top.offer(score, item);
                ++stats.items_scored;
            }
        }
    }
    stats.items_touched = stats.items_scored;
    stats.bytes_touched =
        static_cast<std::int64_t>(lists.bases.size_bytes() + lists.changes.size_bytes() +
                                  lists.codes.size_bytes() + lists.items.size_bytes());
    stats.steps = 1;
}

}  // namespace recprune
