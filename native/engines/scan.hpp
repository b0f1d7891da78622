// Exhaustive and exact, at the speed of memory: every item passes through a filter of quantised
// deficits, and the few that it cannot reject are scored.
//
// The filter is the table look-up in registers of "fast scan" (André, Kermarrec and Le Scouarnec,
// VLDB 2015), here with all 256 entries and with sums that provably never reject a winner. The best
// lists, those of the sub-items with the highest scores, come first: principle P1 of RecJPQPrune.
//
// What bounds a scan is the memory that it reads. The first two splits, by which items are sorted,
// take little more than a bit an item. Of the others, those that reject the most are looked at for
// all blocks, the rest only for the few blocks that are left.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "bounds/deficits.hpp"
#include "bounds/waiting_room.hpp"
#include "kernels/kernels.hpp"
#include "layouts/layouts.hpp"
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
          stats_(stats),
          sorted_row_{layout.bases.data(), layout.steps.data(), second_deficits_.data()},
          rows_(layout.num_splits > 2 ? layout.num_splits - 2 : 0),
          near_(std::min(kUsualNear, rows_.size())),
          may_wait_(wants_many(query) && !query.allow && !query.item_bias &&
                    request.over_inflation == 0.0 && !request.has_deadline()),
          // Any of the first may be excluded.
          waiting_(query.k + query.exclude.size()) {
        for (std::size_t b = 0; b < layout.num_sub_items; ++b)
            order_[b] = static_cast<std::uint16_t>(b);
    }

    // Scans up to `num_lists` more lists. Returns true if the search has ended: nothing is left
    // that could enter the top K, or a request to stop came, which stats.exact then tells apart.
    bool run(std::size_t num_lists) {
        top_.settle();
        if (top_.full() || may_wait_) tighten();  // others may have found more
        const std::size_t stop = std::min(rank_ + num_lists, layout_.num_sub_items);
        const bool to_the_end = stop == layout_.num_sub_items && !may_stop();
        sort_up_to(to_the_end ? std::min(stop, std::max(rank_, kBestLists)) : stop);
        for (; rank_ < stop; ++rank_) {
            const std::size_t list = order_[rank_];
            if (quantised_ && deficits_.of_split(0)[list] > limit_) {
                if (rank_ >= num_sorted_) continue;
                rank_ = layout_.num_sub_items;  // lists only get worse from here
                break;
            }
            if (stats_.steps >= request_.max_steps || request_.expired()) {
                settle();
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
        settle();
        if (quantised_ &&
            top_.full()) {  // what was rejected is below the threshold, or below the inflated one
            const double slack = deficits_.slack(top_.threshold(), request_.over_inflation);
            stats_.set_bound(deficits_.best_possible() - slack,
                             slack >= deficits_.slack(top_.threshold()), top_.full(),
                             top_.threshold());
        }
        return true;
    }

    // After a pause: brings the top K up to date with all that has been scanned.
    void settle() {
        const std::span<const Waiting> items = waiting_.call_in(limit_);
        for (const Waiting& item : items) layout_.prefetch_item(item.block, item.lane);
        for (const Waiting& item : items) consider(item.list, item.block, item.lane);
        top_.settle();
    }

    // After a pause: whoever has a larger deficit than this is not wanted.
    double slack() const { return slack_; }

    // The lists that are done.
    std::span<const std::uint16_t> scanned() const { return {order_.data(), rank_}; }

  private:
    static constexpr std::size_t kBestLists = 8;      // then the threshold is good enough
    static constexpr std::size_t kLongStretch = 128;  // blocks
    static constexpr std::size_t kNoList = 256;
    static constexpr std::size_t kFewestNear = 2;
    static constexpr std::size_t kUsualNear = 4;

    // Few are found as fast as they come, for very many there should be no room, and where more are
    // excluded than are wanted, counting tells little.
    static bool wants_many(const Query& query) {
        return query.k >= 48 && query.k <= 65'536 && query.exclude.size() <= query.k;
    }

    // Whether a request to stop could come before the lists are done: then they are all sorted.
    bool may_stop() const {
        const auto left = static_cast<std::int64_t>(layout_.num_sub_items - rank_);
        return request_.has_deadline() || request_.max_steps - stats_.steps < left;
    }

    // The best of the lists that are left come first, sorted, the others as they lie in memory:
    // by then the threshold hardly rises, and memory likes to be read in order.
    void sort_up_to(std::size_t stop) {
        if (stop <= num_sorted_) return;
        std::array<std::uint64_t, 256> keys;
        for (std::size_t rank = rank_; rank < layout_.num_sub_items; ++rank)
            keys[rank] = std::uint64_t{descending(query_.sub_item_scores[order_[rank]])} << 32 |
                         order_[rank];
        auto place = [&keys](std::size_t rank) {
            return keys.begin() + static_cast<std::ptrdiff_t>(rank);
        };
        std::partial_sort(place(rank_), place(stop), place(layout_.num_sub_items));
        num_sorted_ = stop;
        std::array<bool, 256> sorted{};
        for (std::size_t rank = 0; rank < stop; ++rank) {
            if (rank >= rank_) order_[rank] = static_cast<std::uint16_t>(keys[rank]);
            sorted[order_[rank]] = true;
        }
        for (std::size_t list = 0; list < layout_.num_sub_items; ++list) {
            if (!sorted[list]) order_[stop++] = static_cast<std::uint16_t>(list);
        }
    }

    // As integers, these compare like the scores, the highest first; integers sort faster.
    static std::uint32_t descending(float score) {
        const auto bits = std::bit_cast<std::uint32_t>(score);
        return bits >> 31 ? bits : ~bits & 0x7FFFFFFFu;
    }

    void scan_list(std::size_t list) {
        if (stats_.visited) stats_.visited[list] = 1;  // the lists are those of the first split
        const auto begin = static_cast<std::size_t>(layout_.block_offsets[list]);
        const auto end = static_cast<std::size_t>(layout_.block_offsets[list + 1]);
        if (begin == end) return;
        // A first threshold is a good one if it comes from items that are good in two splits.
        const std::size_t first =
            has_threshold() || layout_.num_splits == 1 ? begin : best_block(list, end - 1);
        scan_blocks(list, first, end);
        scan_blocks(list, begin, first);
    }

    // Whether anything better is known than the largest deficit conceivable.
    bool has_threshold() const { return slack_ < deficits_.range(); }

    // Where the items of a list begin that are its best in the second split.
    std::size_t best_block(std::size_t list, std::size_t last_block) const {
        const float* scores = query_.sub_item_scores + layout_.num_sub_items;
        const std::uint8_t* codes = layout_.second_codes_of(list);
        std::uint8_t best = 0;
        for (std::uint8_t rank = layout_.rank(last_block, kBlockItems - 1); rank > 0; --rank) {
            if (scores[codes[rank]] > scores[codes[best]]) best = rank;
        }
        return layout_.block_with(list, best);
    }

    void scan_blocks(std::size_t list, std::size_t block, std::size_t end) {
        stats_.items_touched += static_cast<std::int64_t>((end - block) * kBlockItems);
        for (; block < end && !quantised_; ++block) {  // without a threshold everything is scored
            count_bytes(1, rows_.size());
            score_block(list, block, block + 1 == end ? layout_.real_items(block) : ~0ull);
        }
        std::array<std::uint32_t, kLongStretch + 1> found;
        std::array<std::uint8_t, (kLongStretch + 1) * kBlockItems> sums;
        std::array<std::uint64_t, kLongStretch + 1> items;
        while (block < end) {
            const int left = limit_ - deficits_.of_split(0)[list];
            if (left < 0) return;
            look_up_second(list);
            const std::size_t stop = std::min(block + stretch_, end);
            const std::size_t far = rows_.size() - near_;
            const std::size_t num_found =
                kernels_.find_blocks({sorted_row_, rows_.data(), near_, rows_.size()}, block, stop,
                                     left, found.data(), sums.data());
            const std::size_t num_kept =
                kernels_.filter_blocks(rows_.data() + near_, far, found.data(), num_found,
                                       sums.data(), left, items.data());
            count_bytes(stop - block, (stop - block) * near_ + num_found * far);
            adapt(stop - block, num_found);
            // Who they are, a cache miss, will soon be asked of some of them.
            for (std::size_t at = 0; at < num_kept && !may_wait_; ++at)
                layout_.prefetch_item(found[at],
                                      static_cast<std::size_t>(std::countr_zero(items[at])));
            for (std::size_t at = 0; at < num_kept; ++at) {
                if (found[at] + std::size_t{1} == end) items[at] &= layout_.real_items(found[at]);
                if (may_wait_)
                    wait(list, found[at], items[at], sums.data() + at * kBlockItems);
                else
                    score_block(list, found[at], items[at]);
            }
            if (may_wait_ && waiting_.worth_a_look()) tighten();
            if (waiting_.is_crowded()) make_room();
            block = stop;
        }
    }

    void wait(std::size_t list, std::size_t block, std::uint64_t mask, const std::uint8_t* sums) {
        const int first_deficit = deficits_.of_split(0)[list];
        for (; mask; mask &= mask - 1) {
            const auto lane = static_cast<std::size_t>(std::countr_zero(mask));
            const int deficit = first_deficit + sums[lane];
            waiting_.enter({static_cast<std::uint32_t>(block), static_cast<std::uint8_t>(lane),
                            static_cast<std::uint8_t>(list), static_cast<std::uint8_t>(deficit)},
                           deficits_.most_units(deficit));
        }
    }

    // Where many come at once, as ties do, they are scored after all.
    void make_room() {
        waiting_.send_away_beyond(limit_);
        if (!waiting_.is_crowded()) return;
        settle();
        tighten();
    }

    // The deficits of the codes that a list has in the second split.
    void look_up_second(std::size_t list) {
        if (list == looked_up_ || layout_.num_splits == 1) return;
        kernels_.look_up(deficits_.of_split(1), layout_.second_codes_of(list),
                         second_deficits_.data());
        looked_up_ = list;
    }

    // Of every block the ranks are read, a base and a bit an item, and some rows of bytes.
    void count_bytes(std::size_t blocks, std::size_t block_rows) {
        constexpr std::size_t kRanks = 1 + kBlockItems / 8;
        stats_.bytes_touched +=
            static_cast<std::int64_t>(blocks * kRanks + block_rows * kBlockItems);
    }

    // A near row costs something for every block, the far ones cost much for the blocks that the
    // near ones do not reject. One row more or less changes their number by a factor of about ten.
    void adapt(std::size_t blocks, std::size_t found) {
        stretch_ = std::min(2 * stretch_, kLongStretch);
        num_seen_ += blocks;
        num_found_ += found;
        if (num_seen_ < 2 * kLongStretch) return;
        if (num_found_ * 4 > num_seen_ && near_ < rows_.size())
            ++near_;
        else if (num_found_ * 40 < num_seen_ && near_ > kFewestNear)
            --near_;
        num_seen_ = num_found_ = 0;
    }

    void score_block(std::size_t list, std::size_t block, std::uint64_t mask) {
        const float before = top_.threshold();
        for (; mask; mask &= mask - 1)
            consider(list, block, static_cast<std::size_t>(std::countr_zero(mask)));
        if (top_.threshold() > before) tighten();
    }

    void consider(std::size_t list, std::size_t block, std::size_t lane) {
        ++stats_.items_scored;
        float score = layout_.score(query_.sub_item_scores, list, block, lane);
        // Who the item is, often a cache miss, matters only if it is good enough.
        if (!query_.item_bias && score < top_.threshold()) return;
        const Item item = layout_.items[block * kBlockItems + lane];
        score = query_.with_bias(score, item);
        if (score >= top_.threshold() && query_.may_return(item)) top_.offer(score, item);
    }

    // Follows the threshold: the limit at once, the tables when it has moved far enough to pay.
    void tighten() {
        double slack = std::numeric_limits<double>::infinity();
        if (top_.full()) slack = deficits_.slack(top_.threshold(), request_.over_inflation);
        if (may_wait_) {
            const int counted = waiting_.look();
            if (counted < kFullDeficit)
                slack = std::min(slack, deficits_.slack_of_counted(counted));
        }
        slack = slack_ = std::min(slack, deficits_.range());
        if (!quantised_ || slack < 0.75 * slack_of_tables_) {
            const double units = deficits_.units();
            deficits_.quantise(slack);
            if (quantised_ && may_wait_) waiting_.rescale(deficits_.units() / units);
            slack_of_tables_ = slack;
            quantised_ = true;
            looked_up_ = kNoList;
            sort_rows();
        }
        limit_ = std::min(deficits_.limit(slack), kTargetLimit);
    }

    // The splits with the largest deficits on average first: they reject the most.
    void sort_rows() {
        std::vector<std::pair<int, std::size_t>> order;
        for (std::size_t split = 2; split < layout_.num_splits; ++split) {
            const std::uint8_t* deficits = deficits_.of_split(split);
            order.emplace_back(-std::accumulate(deficits, deficits + 256, 0), split);
        }
        std::sort(order.begin(), order.end());
        for (std::size_t rank = 0; rank < rows_.size(); ++rank) {
            const std::size_t split = order[rank].second;
            rows_[rank] = {layout_.row(split), deficits_.of_split(split)};
        }
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
    std::size_t num_sorted_ = 0;
    std::array<std::uint8_t, 256 + kBlockItems> second_deficits_{};
    std::size_t looked_up_ = kNoList;  // the list whose deficits they are
    SortedRow sorted_row_;
    std::vector<CodeRow> rows_;  // of the splits after the second; the best come first
    std::size_t near_;           // how many of them every block is held against
    std::size_t stretch_ = 8;    // blocks between two looks at the limit, few while it falls fast
    std::size_t num_seen_ = 0;   // blocks since the last change of near_, and those found in them
    std::size_t num_found_ = 0;
    bool may_wait_;
    WaitingRoom waiting_;
    bool quantised_ = false;
    int limit_ = 0;
    double slack_ = std::numeric_limits<double>::infinity();
    double slack_of_tables_ = 0.0;
};

}  // namespace recprune
