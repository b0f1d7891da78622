// Exhaustive and exact, at the speed of memory: every item passes through a filter of quantised
// deficits, and the few that it cannot reject are scored.
//
// The filter is the table look-up in registers of "fast scan" (André, Kermarrec and Le Scouarnec,
// VLDB 2015), here with all 256 entries and with sums that provably never reject a winner. Lists
// are taken in descending order of their sub-item's score: principle P1 of RecJPQPrune.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "deficits.hpp"
#include "kernels.hpp"
#include "layouts.hpp"
#include "query.hpp"
#include "top_k.hpp"

namespace recprune {

// A scan that can pause: a few of the best lists give a good first threshold to whoever goes on.
// The top K may already hold items; their threshold then helps from the first block on.
class ListScan {
  public:
    ListScan(const ListLayout& layout, const Kernels& kernels, const Query& query,
             const Limits& request, Deficits& deficits, TopK& top, Stats& stats)
        : layout_(layout),
          kernels_(kernels),
          query_(query),
          request_(request),
          deficits_(deficits),
          top_(top),
          stats_(stats) {
        for (std::size_t b = 0; b < layout.num_sub_items; ++b)
            order_[b] = static_cast<std::uint16_t>(b);
    }

    // Scans up to `num_lists` more lists. Returns true if the search has ended: nothing is left
    // that could enter the top K, or a request to stop came, which stats.exact then tells apart.
    bool run(std::size_t num_lists) {
        // Others may have used the deficits since.
        quantised_ = false;
        if (top_.full()) tighten();
        const std::size_t stop = std::min(rank_ + num_lists, layout_.num_sub_items);
        sort_up_to(stop);
        for (; rank_ < stop; ++rank_) {
            const std::size_t list = order_[rank_];
            if (quantised_ && deficits_.of_split(0)[list] > limit_) {
                rank_ = layout_.num_sub_items;  // lists only get worse from here
                break;
            }
            if (stats_.steps >= request_.max_steps || request_.expired()) {
                const float* scores = query_.sub_item_scores;
                const double lost = static_cast<double>(scores[order_[0]]) - scores[list];
                double considered = lost;  // items with a smaller deficit have been looked at
                if (top_.full() && request_.over_inflation > 0.0)
                    considered = std::min(
                        considered, deficits_.slack(top_.threshold(), request_.over_inflation));
                stats_.set_bound(deficits_.best_possible() - considered,
                                 considered > deficits_.slack(top_.threshold()), top_.full(),
                                 top_.threshold());
                return true;
            }
            ++stats_.steps;
            scan_list(list);
        }
        if (rank_ < layout_.num_sub_items) return false;
        if (quantised_) {  // what was rejected is below the threshold, or below the inflated one
            const double slack = deficits_.slack(top_.threshold(), request_.over_inflation);
            stats_.set_bound(deficits_.best_possible() - slack,
                             slack >= deficits_.slack(top_.threshold()), top_.full(),
                             top_.threshold());
        }
        return true;
    }

    // The lists that are done.
    std::span<const std::uint16_t> scanned() const { return {order_.data(), rank_}; }

  private:
    // The best lists first; the order of those that are not reached does not matter.
    void sort_up_to(std::size_t stop) {
        std::array<std::uint64_t, 256> keys;
        for (std::size_t rank = rank_; rank < layout_.num_sub_items; ++rank)
            keys[rank] = std::uint64_t{descending(query_.sub_item_scores[order_[rank]])} << 32 |
                         order_[rank];
        auto place = [&keys](std::size_t rank) {
            return keys.begin() + static_cast<std::ptrdiff_t>(rank);
        };
        std::partial_sort(place(rank_), place(stop), place(layout_.num_sub_items));
        for (std::size_t rank = rank_; rank < layout_.num_sub_items; ++rank)
            order_[rank] = static_cast<std::uint16_t>(keys[rank]);
    }

    // As integers, these compare like the scores, the highest first; integers sort faster.
    static std::uint32_t descending(float score) {
        const auto bits = std::bit_cast<std::uint32_t>(score);
        return bits >> 31 ? bits : ~bits & 0x7FFFFFFFu;
    }

    void scan_list(std::size_t list) {
        if (stats_.visited) stats_.visited[list] = 1;  // the lists are those of the first split
        auto block = static_cast<std::size_t>(layout_.block_offsets[list]);
        const auto end = static_cast<std::size_t>(layout_.block_offsets[list + 1]);
        const auto items = static_cast<std::int64_t>((end - block) * kBlockItems);
        stats_.items_touched += items;
        stats_.bytes_touched += items * static_cast<std::int64_t>(layout_.rows());
        while (block < end) {
            std::uint64_t mask = ~0ull;  // without a threshold everything is scored
            if (quantised_) {
                const int left = limit_ - deficits_.of_split(0)[list];
                if (left < 0) return;
                block = kernels_.filter_blocks(layout_.blocks.data(), layout_.rows(), block, end,
                                               deficits_.of_split(1), left, &mask);
                if (block == end) return;
            }
            if (block + 1 == end) mask &= layout_.real_items(block);
            score_block(list, block++, mask);
        }
    }

    void score_block(std::size_t list, std::size_t block, std::uint64_t mask) {
        const float before = top_.threshold();
        stats_.items_scored += std::popcount(mask);
        for (; mask; mask &= mask - 1) {
            const auto lane = static_cast<std::size_t>(std::countr_zero(mask));
            float score = layout_.score(query_.sub_item_scores, list, block, lane);
            // Who the item is, a cache miss, matters only if it is good enough.
            if (!query_.item_bias && score < top_.threshold()) continue;
            const Item item = layout_.items[block * kBlockItems + lane];
            score = query_.with_bias(score, item);
            if (score >= top_.threshold() && query_.may_return(item)) top_.offer(score, item);
        }
        if (top_.threshold() > before) tighten();
    }

    // Follows the threshold: the limit at once, the tables when it has moved far enough to pay.
    void tighten() {
        const double slack = deficits_.slack(top_.threshold(), request_.over_inflation);
        if (!quantised_ || slack < 0.75 * slack_of_tables_) {
            deficits_.quantise(slack);
            slack_of_tables_ = slack;
            quantised_ = true;
        }
        limit_ = std::min(deficits_.limit(slack), kTargetLimit);
    }

    const ListLayout& layout_;
    const Kernels& kernels_;
    const Query& query_;
    const Limits& request_;
    Deficits& deficits_;
    TopK& top_;
    Stats& stats_;
    std::array<std::uint16_t, 256> order_{};
    std::size_t rank_ = 0;
    bool quantised_ = false;
    int limit_ = 0;
    double slack_of_tables_ = 0.0;
};

}  // namespace recprune
