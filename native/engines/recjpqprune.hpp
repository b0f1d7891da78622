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

#include "engines/pqtopk.hpp"
#include "query.hpp"
#include "top_k.hpp"

namespace recprune {

// Posting lists as built by build_posting_lists().
template <class PostedItem>
struct InvertedIndex {
    std::span<const std::int64_t> offsets;  // [num_splits][num_sub_items + 1]
    std::span<const PostedItem> items;      // [num_splits][num_items]

    std::span<const PostedItem> posting_list(std::size_t split, std::size_t sub_item,
                                             std::size_t num_items,
                                             std::size_t num_sub_items) const {
        const std::int64_t* bounds = &offsets[split * (num_sub_items + 1) + sub_item];
        const auto first = static_cast<std::size_t>(bounds[0]);
        return items.subspan(split * num_items + first,
                             static_cast<std::size_t>(bounds[1]) - first);
    }
};

// The sub-items of every split, the best first (Q), and how far each split has come (P).
class SubItemQueues {
  public:
    SubItemQueues(const float* scores, std::size_t num_splits, std::size_t num_sub_items)
        : scores_(scores),
          num_sub_items_(num_sub_items),
          queues_(num_splits),
          positions_(num_splits, 0) {
        for (std::size_t split = 0; split < num_splits; ++split) {
            queues_[split].resize(num_sub_items);
            std::iota(queues_[split].begin(), queues_[split].end(), 0u);
            const float* row = scores + split * num_sub_items;
            std::sort(queues_[split].begin(), queues_[split].end(),
                      [row](std::uint32_t a, std::uint32_t b) {
                          return row[a] != row[b] ? row[a] > row[b] : a < b;
                      });
        }
    }

    // The split whose next sub-item is the best.
    std::size_t best_split() const {
        std::size_t best = 0;
        for (std::size_t split = 1; split < queues_.size(); ++split) {
            if (next_score(split) > next_score(best)) best = split;
        }
        return best;
    }

    // No item that is in none of the posting lists so far can score higher. Added in split order
    // like every score, so no rounding can put an item above its bound. Pre: no split is exhausted.
    float upper_bound(const Query& query) const {
        float bound = next_score(0);
        for (std::size_t split = 1; split < queues_.size(); ++split) bound += next_score(split);
        return query.item_bias ? bound + query.highest_bias : bound;
    }

    bool exhausted(std::size_t split) const { return positions_[split] == num_sub_items_; }

    // Takes the next sub-items of a split, up to `count`.
    std::span<const std::uint32_t> take(std::size_t split, std::size_t count) {
        const std::size_t first = positions_[split];
        positions_[split] = std::min(first + count, num_sub_items_);
        return std::span(queues_[split]).subspan(first, positions_[split] - first);
    }

  private:
    float next_score(std::size_t split) const {
        return scores_[split * num_sub_items_ + queues_[split][positions_[split]]];
    }

    const float* scores_;
    std::size_t num_sub_items_;
    std::vector<std::vector<std::uint32_t>> queues_;
    std::vector<std::size_t> positions_;
};

// Scores the items of one posting list. Never inlined: among the caller's variables its own did not
// stay in registers, and a search took up to 1.4 times as long (g++ 13; benchmarks/cores.py).
template <class Code, class PostedItem>
[[gnu::noinline]] void score_posting_list(std::span<const PostedItem> posting_list,
                                          std::span<const Code> codes, std::size_t num_splits,
                                          std::size_t num_sub_items, const Query& query,
                                          TopK& top) {
    const float* scores = query.sub_item_scores;
    for (const PostedItem posted : posting_list) {
        const auto item = static_cast<Item>(posted);
        const float score = query.with_bias(
            score_item(scores, &codes[item * num_splits], num_splits, num_sub_items), item);
        if (score >= top.threshold() && query.may_return(item)) top.offer(score, item);
    }
}

template <class Code, class PostedItem>
void recjpqprune(std::span<const Code> codes, const InvertedIndex<PostedItem>& inverted,
                 std::size_t num_items, std::size_t num_splits, std::size_t num_sub_items,
                 std::size_t sub_items_per_step, const Query& query, const Limits& limits,
                 TopK& top, Stats& stats) {
    SubItemQueues queues(query.sub_item_scores, num_splits, num_sub_items);
    // Over-inflation asks for more than the threshold: a share of the way up to the best score.
    const double best = queues.upper_bound(query);
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
        const std::size_t split = queues.best_split();
        for (std::uint32_t sub_item : queues.take(split, sub_items_per_step)) {
            if (stats.visited) stats.visited[split * num_sub_items + sub_item] = 1;
            const auto posting_list =
                inverted.posting_list(split, sub_item, num_items, num_sub_items);
            score_posting_list(posting_list, codes, num_splits, num_sub_items, query, top);
            stats.items_scored += static_cast<std::int64_t>(posting_list.size());
        }
        stats.items_touched = stats.items_scored;
        stats.bytes_touched = stats.items_scored * bytes;
        if (queues.exhausted(split)) return;  // every item is in some list of this split
        bound = queues.upper_bound(query);
    }
    stats.set_bound(bound, bound < top.threshold(), top.full(), top.threshold());
}

}  // namespace recprune
