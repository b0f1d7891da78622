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

#include "bounds/candidates.hpp"
#include "bounds/deficits.hpp"
#include "kernels/kernels.hpp"
#include "layouts/lists.hpp"
#include "query.hpp"
#include "top_k.hpp"

namespace recprune {

// One scan. The top K may already hold items; their threshold then helps from the first block on.
class ListScan {
  public:
    ListScan(const ListLayout& layout, const Kernels& kernels, const Query& query,
             const Limits& limits, Deficits& deficits, TopK& top, Stats& stats)
        : layout_(layout),
          kernels_(kernels),
          query_(query),
          limits_(limits),
          deficits_(deficits),
          top_(top),
          stats_(stats),
          sorted_row_{layout.bases.data(), layout.changes.data(), second_deficits_.data()},
          rows_(num_code_rows(layout.num_splits)),
          near_(kernels.refinements > 0 ? rows_.size() : std::min(kUsualNear, rows_.size())),
          counts_first_(wants_many(query) && !query.item_bias && limits.over_inflation == 0.0 &&
                        !limits.has_deadline() && may_guess(query, limits, layout, stats)),
          // Any of the first may be excluded, and as many hidden as a mask hides elsewhere.
          candidates_(static_cast<std::size_t>(static_cast<double>(query.k + query.num_hidden()) *
                                               items_per_allowed(query, layout))) {
        for (std::size_t b = 0; b < layout.num_sub_items; ++b)
            order_[b] = static_cast<std::uint16_t>(b);
    }

    // Scans until nothing is left that could enter the top K, or a limit is reached, which
    // stats.exact then tells apart.
    void run() {
        scan_lists();
        if (!counts_first_ || !query_.allow || is_confirmed()) return;
        // Of the items that were counted, the mask hid more than was to be expected.
        counts_first_ = quantised_ = false;
        num_done_ = 0;
        scan_lists();
    }

  private:
    void scan_lists() {
        top_.settle();
        if (top_.full() || counts_first_) tighten();  // others may have found more
        sort_up_to(may_stop() ? layout_.num_sub_items
                              : std::min(layout_.num_sub_items, kBestLists));
        for (; num_done_ < layout_.num_sub_items; ++num_done_) {
            const std::size_t list = order_[num_done_];
            if (quantised_ && deficits_.of_split(0)[list] > limit_) {
                if (num_done_ >= num_sorted_) continue;
                break;  // lists only get worse from here
            }
            if (stats_.steps >= limits_.max_steps || limits_.expired()) return stop_before(list);
            ++stats_.steps;
            scan_list(list);
        }
        finish();
    }

    // Whether what was rejected is too far from the best for the threshold that was found, however
    // it came to be rejected.
    bool is_confirmed() const {
        return top_.full() &&
               std::min(deficits_.slack(top_.threshold()), deficits_.range()) <= least_slack_;
    }

    // All found by trial; benchmarks/search.py shows their effect, and no result hangs on them.
    // Lists that are sorted by score: after these, the threshold is good enough.
    static constexpr std::size_t kBestLists = 8;
    // Blocks between two looks at the limit: few while it falls fast, then twice as many each time.
    static constexpr std::size_t kShortStretch = 8;
    static constexpr std::size_t kLongStretch = 128;
    // Near rows: how many there are at least, and at first.
    static constexpr std::size_t kFewestNear = 2;
    static constexpr std::size_t kUsualNear = 4;
    // If more than one block in kManyFound is found, a near row more pays; if fewer than one in
    // kFewFound, a row less.
    static constexpr std::size_t kManyFound = 4;
    static constexpr std::size_t kFewFound = 40;
    // The same for a step of refinement, where kernels have that.
    static constexpr std::size_t kManyUnrefined = 2;
    static constexpr std::size_t kFewRefined = 8;
    // If all but one in so many are found, more has to change, and sooner: so many steps at once.
    static constexpr std::size_t kNearlyAll = 8;
    static constexpr std::size_t kLeap = 3;
    // Items that may be wanted for candidates to be counted before any is scored: fewer are found
    // as fast as they come, and for more there should be no room.
    static constexpr std::size_t kFewestCounted = 48;
    static constexpr std::size_t kMostCounted = 65'536;
    // Items for each allowed one up to which candidates are counted under a mask.
    static constexpr double kMostPerAllowed = 1.15;
    // Tables are made anew when the slack is less than this share of what they were made for.
    static constexpr double kWornShare = 0.75;

    static constexpr std::size_t kNoList = kMaxNarrowSubItems;

    // Blocks of a stretch that filters have left over. There is room for one more: kernels write
    // before they know whether it counts.
    struct LeftBlocks {
        std::array<std::uint32_t, kLongStretch + 1> blocks;
        std::array<std::uint8_t, (kLongStretch + 1) * kBlockItems> sums;
        std::array<std::uint64_t, kLongStretch + 1> items;  // a bit for each that is left over
    };

    // Where more items are excluded than are wanted, counting tells little.
    static bool wants_many(const Query& query) {
        return query.k >= kFewestCounted && query.k <= kMostCounted &&
               query.num_hidden() <= query.k;
    }

    // Items for each that the mask allows.
    static double items_per_allowed(const Query& query, const ListLayout& layout) {
        if (!query.allow) return 1.0;
        return static_cast<double>(layout.num_items) /
               static_cast<double>(std::max<std::size_t>(query.num_allowed, 1));
    }

    // Under a mask, candidates are counted as if it hid as many of them as of all items, which has
    // to be confirmed in the end. That guess is worth it where few are hidden, there are more than
    // are wanted, and nothing would stop a second scan.
    static bool may_guess(const Query& query, const Limits& limits, const ListLayout& layout,
                          const Stats& stats) {
        const auto steps = static_cast<std::int64_t>(2 * layout.num_sub_items);
        return !query.allow || (items_per_allowed(query, layout) <= kMostPerAllowed &&
                                query.num_allowed >= 2 * (query.k + query.num_hidden()) &&
                                limits.max_steps - stats.steps >= steps);
    }

    // Whether a limit could be reached before the lists are done: then they are all sorted.
    bool may_stop() const {
        const auto left = static_cast<std::int64_t>(layout_.num_sub_items - num_done_);
        return limits_.has_deadline() || limits_.max_steps - stats_.steps < left;
    }

    // Brings the top K up to date with all that has been scanned.
    void settle() {
        const std::span<const Candidate> candidates = candidates_.take(limit_);
        for (const Candidate& item : candidates) layout_.prefetch_item(item.block, item.lane);
        for (const Candidate& item : candidates) consider(item.list, item.block, item.lane);
        top_.settle();
    }

    // A limit was reached before this list.
    void stop_before(std::size_t list) {
        settle();
        const float* scores = query_.sub_item_scores;
        // Items with a smaller deficit have been looked at.
        double considered = static_cast<double>(scores[order_[0]]) - scores[list];
        if (top_.full() && limits_.over_inflation > 0.0)
            considered =
                std::min(considered, deficits_.slack(top_.threshold(), limits_.over_inflation));
        stats_.set_bound(deficits_.best_possible() - considered,
                         considered > deficits_.slack(top_.threshold()), top_.full(),
                         top_.threshold());
    }

    // All lists are done.
    void finish() {
        settle();
        if (!quantised_ || !top_.full()) return;
        // What was rejected is below the threshold, or below the inflated one.
        const double slack = deficits_.slack(top_.threshold(), limits_.over_inflation);
        stats_.set_bound(deficits_.best_possible() - slack,
                         slack >= deficits_.slack(top_.threshold()), top_.full(), top_.threshold());
    }

    // The best of the lists that are left come first, sorted, the others as they lie in memory:
    // by then the threshold hardly rises, and memory is read fastest in order.
    void sort_up_to(std::size_t stop) {
        if (stop <= num_sorted_) return;
        std::array<std::uint64_t, kMaxNarrowSubItems> keys;
        for (std::size_t at = num_done_; at < layout_.num_sub_items; ++at)
            keys[at] =
                std::uint64_t{descending(query_.sub_item_scores[order_[at]])} << 32 | order_[at];
        auto key = [&keys](std::size_t at) {
            return keys.begin() + static_cast<std::ptrdiff_t>(at);
        };
        std::partial_sort(key(num_done_), key(stop), key(layout_.num_sub_items));
        num_sorted_ = stop;
        std::array<bool, kMaxNarrowSubItems> sorted{};
        for (std::size_t at = 0; at < stop; ++at) {
            if (at >= num_done_) order_[at] = static_cast<std::uint16_t>(keys[at]);
            sorted[order_[at]] = true;
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
        // A first threshold is a good one if it comes from items that are good in two splits. One
        // that there is before the first list may be of little use.
        const bool has_good_one = has_threshold() && num_done_ > 0;
        const std::size_t first =
            has_good_one || layout_.num_splits == 1 ? begin : best_block(list, end - 1);
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
        while (block < end) {
            const int left = limit_ - deficits_.of_split(0)[list];
            if (left < 0) return;
            const std::size_t stop = std::min(block + stretch_, end);
            scan_stretch(list, left, block, stop, end);
            if (counts_first_ && candidates_.count_is_due()) tighten();
            if (candidates_.is_full()) make_room();
            block = stop;
        }
    }

    // Filters the blocks in [block, stop) and hands over what is left of them. `left` is what the
    // limit leaves to the splits after the first; the list's blocks end at `end`.
    void scan_stretch(std::size_t list, int left, std::size_t block, std::size_t stop,
                      std::size_t end) {
        look_up_second(list);
        LeftBlocks found;
        const std::size_t far = rows_.size() - near_;
        const auto [num_found, num_close] =
            kernels_.find_blocks({sorted_row_, rows_.data(), near_, rows_.size(), refinement_},
                                 block, stop, left, found.blocks.data(), found.sums.data());
        const std::size_t num_kept =
            kernels_.filter_blocks(rows_.data() + near_, far, found.blocks.data(), num_found,
                                   found.sums.data(), left, found.items.data());
        count_bytes(stop - block, (stop - block) * near_ + num_found * far);
        adapt(stop - block, num_close);
        const std::size_t num_left = take_out_padding(found, num_kept, end);
        if (counts_first_)
            buffer_blocks(list, found, num_left);
        else
            score_blocks(list, found, num_left);
    }

    // Padding may have passed the filters if a list's last block did. Returns how many blocks have
    // more than that.
    std::size_t take_out_padding(LeftBlocks& found, std::size_t count, std::size_t end) const {
        if (count == 0 || found.blocks[count - 1] + std::size_t{1} != end) return count;
        std::uint64_t& items = found.items[count - 1];
        items &= layout_.real_items(end - 1);
        return items ? count : count - 1;
    }

    void buffer_blocks(std::size_t list, const LeftBlocks& found, std::size_t count) {
        const int first_deficit = deficits_.of_split(0)[list];
        for (std::size_t at = 0; at < count; ++at) {
            const std::uint8_t* sums = found.sums.data() + at * kBlockItems;
            for (std::uint64_t mask = found.items[at]; mask; mask &= mask - 1) {
                const auto lane = static_cast<std::size_t>(std::countr_zero(mask));
                const int deficit = first_deficit + sums[lane];
                candidates_.add(
                    {found.blocks[at], static_cast<std::uint8_t>(lane),
                     static_cast<std::uint8_t>(list), static_cast<std::uint8_t>(deficit)},
                    deficits_.most_units(deficit));
            }
        }
    }

    void score_blocks(std::size_t list, const LeftBlocks& found, std::size_t count) {
        // The ids of some of these items will be needed soon, each a cache miss.
        for (std::size_t at = 0; at < count; ++at)
            layout_.prefetch_item(found.blocks[at],
                                  static_cast<std::size_t>(std::countr_zero(found.items[at])));
        for (std::size_t at = 0; at < count; ++at)
            score_block(list, found.blocks[at], found.items[at]);
    }

    // Where many candidates come at once, as ties do, they are scored after all.
    void make_room() {
        candidates_.discard_beyond(limit_);
        if (!candidates_.is_full()) return;
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
        constexpr std::size_t kRankBytes = 1 + kBlockItems / 8;
        stats_.bytes_touched +=
            static_cast<std::int64_t>(blocks * kRankBytes + block_rows * kBlockItems);
    }

    // A near row costs something for every block, the far ones cost much for the blocks that the
    // near ones do not reject. One row more or less changes their number by a factor of about ten,
    // one step of refinement by less.
    void adapt(std::size_t blocks, std::size_t found) {
        stretch_ = std::min(2 * stretch_, kLongStretch);
        num_seen_ += blocks;
        num_found_ += found;
        const bool nearly_all = (num_seen_ - num_found_) * kNearlyAll < num_seen_;
        if (num_seen_ < (nearly_all ? kLongStretch / 2 : 2 * kLongStretch)) return;
        const bool all_near = near_ == rows_.size();
        if (!all_near && num_found_ * kManyFound > num_seen_)
            ++near_;
        else if (all_near && num_found_ * kManyUnrefined > num_seen_)
            refinement_ = std::min(refinement_ + (nearly_all ? kLeap : 1), most_refinement());
        else if (refinement_ > 0 && num_found_ * kFewRefined < num_seen_)
            --refinement_;
        else if (near_ > kFewestNear && num_found_ * kFewFound < num_seen_)
            --near_;
        num_seen_ = num_found_ = 0;
    }

    // Coarse rows are worth so little that all should be near before one is refined.
    std::size_t most_refinement() const { return kernels_.refinements * rows_.size(); }

    void score_block(std::size_t list, std::size_t block, std::uint64_t mask) {
        const float before = top_.threshold();
        for (; mask; mask &= mask - 1)
            consider(list, block, static_cast<std::size_t>(std::countr_zero(mask)));
        if (top_.threshold() > before) tighten();
    }

    void consider(std::size_t list, std::size_t block, std::size_t lane) {
        ++stats_.items_scored;
        float score = layout_.score(query_.sub_item_scores, list, block, lane);
        // The id of the item, often a cache miss, matters only if it is good enough.
        if (!query_.item_bias && score < top_.threshold()) return;
        const Item item = layout_.items[block * kBlockItems + lane];
        score = query_.with_bias(score, item);
        if (score >= top_.threshold() && query_.may_return(item)) top_.offer(score, item);
    }

    // Follows the threshold: the limit at once, the tables when it has moved far enough to pay.
    void tighten() {
        double slack = std::numeric_limits<double>::infinity();
        if (top_.full()) slack = deficits_.slack(top_.threshold(), limits_.over_inflation);
        if (counts_first_) {
            const int counted = candidates_.count();
            if (counted < kFullDeficit)
                slack = std::min(slack, deficits_.slack_of_counted(counted));
        }
        slack = slack_ = std::min(slack, deficits_.range());
        least_slack_ = std::min(least_slack_, slack);
        if (!quantised_ || slack < kWornShare * slack_of_tables_) {
            const double units = deficits_.units();
            deficits_.quantise(slack);
            if (quantised_ && counts_first_) candidates_.rescale(deficits_.units() / units);
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
        for (std::size_t split = kSortedSplits; split < layout_.num_splits; ++split) {
            const std::uint8_t* deficits = deficits_.of_split(split);
            order.emplace_back(-std::accumulate(deficits, deficits + kMaxNarrowSubItems, 0), split);
        }
        std::sort(order.begin(), order.end());
        for (std::size_t row = 0; row < rows_.size(); ++row) {
            const std::size_t split = order[row].second;
            rows_[row] = {layout_.row(split), deficits_.of_split(split)};
        }
    }

    const ListLayout& layout_;
    const Kernels& kernels_;
    const Query& query_;
    const Limits& limits_;
    Deficits& deficits_;
    TopK& top_;
    Stats& stats_;
    std::array<std::uint16_t, kMaxNarrowSubItems> order_{};  // of the lists
    std::size_t num_done_ = 0;                               // lists, in this order
    std::size_t num_sorted_ = 0;                             // lists that are in it by their score
    std::array<std::uint8_t, kMaxNarrowSubItems + kBlockItems> second_deficits_{};
    std::size_t looked_up_ = kNoList;  // the list whose deficits they are
    SortedRow sorted_row_;
    std::vector<CodeRow> rows_;   // of the splits after the second; the best come first
    std::size_t near_;            // how many of them every block is held against
    std::size_t refinement_ = 0;  // steps by which these are made finer, once all rows are near
    std::size_t stretch_ = kShortStretch;
    std::size_t num_seen_ = 0;  // blocks since the last change of near_, and those found in them
    std::size_t num_found_ = 0;
    bool counts_first_;
    CandidateBuffer candidates_;
    bool quantised_ = false;
    int limit_ = 0;
    double slack_ = std::numeric_limits<double>::infinity();
    double least_slack_ = std::numeric_limits<double>::infinity();  // so far
    double slack_of_tables_ = 0.0;
};

}  // namespace recprune
