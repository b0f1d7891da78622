// RecJPQPrune, Algorithm 1 of Petrov, Macdonald and Tonellotto, SIGIR 2025, as published, with what
// its listing leaves open: repeated items are merged, the last batch of a split is clipped, an
// exhausted split bounds nothing (the search is then complete), and the loop goes on while
// upper_bound = threshold, so that ties fall to the lower item id.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "bounds/deficits.hpp"
#include "engines/pqtopk.hpp"
#include "query.hpp"
#include "top_k.hpp"

namespace recprune {

// Posting lists as built by build_posting_lists().
template <class PostedItem>
struct InvertedIndex {
    std::span<const std::int64_t> offsets;  // [num_splits][num_sub_items + 1]
    std::span<const PostedItem> items;      // [num_splits][num_items]
};

template <class Code, class PostedItem>
void recjpqprune(std::span<const Code> codes, const InvertedIndex<PostedItem>& inverted,
                 std::size_t num_items, std::size_t num_splits, std::size_t num_sub_items,
                 std::size_t sub_items_per_step, const Query& query, const Limits& limits,
                 TopK& top, Stats& stats) {
    const float* scores = query.sub_item_scores;
    std::vector<std::vector<std::uint32_t>> queue(num_splits);  // Q
    std::vector<std::size_t> position(num_splits, 0);           // P
    for (std::size_t split = 0; split < num_splits; ++split) {
        queue[split].resize(num_sub_items);
        std::iota(queue[split].begin(), queue[split].end(), 0u);
        const float* row = scores + split * num_sub_items;
        std::sort(queue[split].begin(), queue[split].end(),
                  [row](std::uint32_t a, std::uint32_t b) {
                      return row[a] != row[b] ? row[a] > row[b] : a < b;
                  });
    }
    auto next_score = [&](std::size_t split) {
        return scores[split * num_sub_items + queue[split][position[split]]];
    };
    // Added in split order like every score, so no rounding can put an item above its bound.
    auto upper_bound = [&] {
        float bound = next_score(0);
        for (std::size_t split = 1; split < num_splits; ++split) bound += next_score(split);
        return query.item_bias ? bound + query.highest_bias : bound;
    };
    // Over-inflation asks for more than the threshold: a share of the way up to the best score.
    const double best = upper_bound();
    float bound = static_cast<float>(best);
    // An entry of a posting list, and a code.
    const auto bytes = static_cast<std::int64_t>(sizeof(Item) + num_splits * sizeof(Code));
    while (true) {
        top.settle();
        const double threshold = top.threshold();
        const double wanted = threshold + limits.over_inflation * (best - threshold);
        if (top.full() && bound < (limits.over_inflation > 0.0 ? wanted : threshold)) break;
        if (stats.steps >= limits.max_steps || limits.expired()) break;
        ++stats.steps;
        std::size_t split = 0;
        for (std::size_t other = 1; other < num_splits; ++other) {
            if (next_score(other) > next_score(split)) split = other;
        }
        const std::size_t stop = std::min(position[split] + sub_items_per_step, num_sub_items);
        for (; position[split] < stop; ++position[split]) {
            const std::int64_t* offsets = &inverted.offsets[split * (num_sub_items + 1)];
            const std::size_t sub_item = queue[split][position[split]];
            if (stats.visited) stats.visited[split * num_sub_items + sub_item] = 1;
            for (std::int64_t at = offsets[sub_item]; at < offsets[sub_item + 1]; ++at) {
                const auto item = static_cast<Item>(
                    inverted.items[split * num_items + static_cast<std::size_t>(at)]);
                const float score = query.with_bias(
                    score_item(scores, &codes[item * num_splits], num_splits, num_sub_items), item);
                if (score >= top.threshold() && query.may_return(item)) top.offer(score, item);
            }
            stats.items_scored += offsets[sub_item + 1] - offsets[sub_item];
        }
        stats.items_touched = stats.items_scored;
        stats.bytes_touched = stats.items_scored * bytes;
        if (position[split] == num_sub_items) return;  // every item is in some list of this split
        bound = upper_bound();
    }
    stats.set_bound(bound, bound < top.threshold(), top.full(), top.threshold());
}

}  // namespace recprune
