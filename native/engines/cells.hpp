// Our pruning engine: sub-linear and exact.
//
// Splits form a ring of pairs; every pair has the items by cell (the items that share both sub-item
// ids, as in the inverted multi-index of Babenko and Lempitsky, CVPR 2012). Cells that are good in
// their own pair are visited, to the depths that ring.hpp plans; the codes of the next pairs stand
// beside the items and reject nearly all of them before any score is computed.
//
// How deep to go follows from a threshold that is not known yet, so it is predicted. A first round
// over the best few hundred lines then finds nearly the final one, and a second round visits what
// that leaves. Where the prediction was too low, all is done once more with the threshold that was
// found.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "bounds/deficits.hpp"
#include "engines/pqtopk.hpp"
#include "engines/ring.hpp"
#include "kernels/kernels.hpp"
#include "layouts/cells.hpp"
#include "query.hpp"
#include "top_k.hpp"

namespace recprune {

struct CellSettings {
    double slack;              // as predicted
    double first_round_lines;  // visited for a first threshold
    double most_lines;         // beyond this, a scan is faster; infinity where none will follow
};

class CellSearch {
  public:
    CellSearch(const CellLayout& layout, const std::uint8_t* codes, const Kernels& kernels,
               const Query& query, const Limits& limits, Deficits& deficits, TopK& top,
               Stats& stats)
        : layout_(layout),
          codes_(codes),
          kernels_(kernels),
          query_(query),
          limits_(limits),
          deficits_(deficits),
          top_(top),
          stats_(stats),
          plan_(layout),
          scratch_(scratch()) {
        scratch_.pending.clear();  // of a search that an exception has ended
    }

    // Returns false if the caller should scan, with the threshold found so far. A search that
    // reached a limit returns true, and stats.exact says whether the stop was safe.
    bool run(const CellSettings& settings) {
        double guess = first_guess(settings.slack);
        while (true) {
            // A threshold that a floor or boosted items have set may be of little use.
            const bool is_known = top_.full() && slack() <= guess;
            plan_for(guess, is_known, settings.most_lines);
            const int limit = is_known ? deficits_.limit(slack())
                                       : static_cast<int>(kPlannedShare * most_units());
            if (plan_.covers() < limit) return false;
            if (plan_.lines(deficits_.limit(is_known ? slack() : guess)) > settings.most_lines)
                return false;
            if (!visit(limit, settings.first_round_lines)) {
                consider_pending();
                return finish();
            }
            if (top_.full() && deficits_.limit(slack()) <= covered_) {
                proven_ = std::nextafter(slack(), std::numeric_limits<double>::infinity());
                return finish();
            }
            if (guess >= deficits_.range()) return false;  // too few items may be returned
            guess *= kGuessGrowth;
            if (top_.full()) guess = std::min(guess, slack());
        }
    }

    // Lines that a search would plan to visit: what the costs of cells are counted by.
    double planned_lines(double predicted_slack) {
        const double guess = first_guess(predicted_slack);
        plan_for(guess, false, std::numeric_limits<double>::infinity());
        return plan_.lines(deficits_.limit(guess));
    }

  private:
    // Units that a limit may have for each pair: as many as bytes hold the sums of three pairs in.
    static constexpr int kPairUnits = 82;
    // The share of these that a guess is mapped to, and the share that is planned for in case that
    // it was a little too low: nothing has to be done again as long as all of them are enough.
    static constexpr double kGuessShare = 0.74;
    static constexpr double kPlannedShare = 0.8;
    // How many times as many lines a plan may have as pay.
    static constexpr double kPlannedLines = 2.0;
    // How much larger a guess is made where too few items were found.
    static constexpr double kGuessGrowth = 1.5;
    // A guess needs to be more than nothing: as a share of the largest deficit conceivable.
    static constexpr double kLeastGuess = 1e-3;
    // The share of all lines that a first round takes, if that is more than it is told to. Found by
    // trial.
    static constexpr double kFirstShare = 0.06;
    // Lines that are filtered at once. Found by trial.
    static constexpr std::size_t kBatchLines = 1024;
    // Items that are pending, at most, before they are considered. Found by trial.
    static constexpr std::size_t kPending = 1024;
    static constexpr std::int64_t kKeyBytes = sizeof(std::uint16_t);
    static constexpr std::int64_t kSecondBytes = 4;  // of a second line, for one item

    // Chains of up to five pairs that begin with one, and how deep these may be.
    struct Chain {
        int two;
        int three;
        int four;
        int five;
    };

    // The deficits of the near and far splits by the code of an item.
    using LineTables = std::array<const std::uint8_t*, 4>;

    // What the lines of a pair are held against.
    struct Filter {
        std::size_t pair;
        LineTables tables;
        Chain chain;
    };

    // An item that a filter let through, and its deficit so far.
    struct Pending {
        std::uint32_t line;
        std::uint16_t sum;
        std::uint8_t place;
        std::uint8_t pair;
    };
    struct Found {
        std::uint32_t position;
        std::uint16_t sum;
        std::uint8_t pair;
    };

    int most_units() const { return kPairUnits * static_cast<int>(layout_.num_pairs()); }

    // Of scores that float32 can hardly tell apart from infinity, nothing is predicted.
    double first_guess(double predicted_slack) const {
        const double predicted = std::isfinite(predicted_slack) ? predicted_slack : 0.0;
        return std::max(predicted, kLeastGuess * deficits_.range());
    }

    // Quantises for a slack that is known or guessed, and plans for more than is usually visited.
    void plan_for(double guess, bool is_known, double most_lines) {
        deficits_.quantise(is_known ? slack() : guess,
                           is_known ? most_units() : static_cast<int>(kGuessShare * most_units()));
        plan_.make(deficits_, kernels_, most_units(), kPlannedLines * most_lines);
    }

    double slack() const { return deficits_.slack(top_.threshold(), limits_.over_inflation); }

    // Says how exact the answer is. Returns true: the search has ended.
    bool finish() {
        top_.settle();
        // Under an inflated threshold, items were rejected down to the slack that it has now.
        if (limits_.over_inflation > 0.0 && top_.full()) proven_ = std::min(proven_, slack());
        stats_.set_bound(deficits_.best_possible() - proven_,
                         proven_ > deficits_.slack(top_.threshold()), top_.full(),
                         top_.threshold());
        return true;
    }

    // Visits all that is within the limit, or within what is left of it when the threshold has
    // risen. Returns false if a limit of the search was reached first.
    // Post: every item with a sum of at most covered_ that may enter has been considered.
    bool visit(int limit, double first_lines) {
        first_lines = std::max(first_lines, kFirstShare * plan_.lines(limit));
        const int first_limit = std::min(plan_.covered_by(first_lines), limit);
        const RingDepths first = plan_.depths(first_limit);
        limit_ = plan_.covers();
        for (int chain_limit : {limit, plan_.covers()}) {
            chains_ = plan_.depths(chain_limit);
            for (std::size_t pair = 0; pair < layout_.num_pairs(); ++pair)
                if (!visit_pair(pair, -1, first.depths[pair])) return false;
            consider_pending();
            if (limit_ <= chain_limit) break;
            // Limits of chains may only ever fall: what was visited is visited again.
        }
        covered_ = std::max(first_limit, limit_);
        if (first_limit >= limit_) return true;
        RingDepths ring = plan_.depths(limit_);
        std::array<std::size_t, kMostPairs> order;
        for (std::size_t pair = 0; pair < layout_.num_pairs(); ++pair) order[pair] = pair;
        const auto end = order.begin() + static_cast<std::ptrdiff_t>(layout_.num_pairs());
        for (auto next = order.begin(); next != end; ++next) {
            plan_.lower(ring, std::span<const std::size_t>(next, end), limit_);
            // The deepest pair first: it finds the most, and what it finds lowers the others.
            std::iter_swap(next, std::max_element(next, end, [&](auto one, auto other) {
                               return ring.depths[one] < ring.depths[other];
                           }));
            chains_ = ring;
            if (!visit_pair(*next, first.depths[*next], ring.depths[*next])) return false;
            consider_pending();
        }
        return true;
    }

    // Visits the cells of a pair with a deficit of more than `low` and at most `high`: what their
    // chains leave over is pending then.
    bool visit_pair(std::size_t pair, int low, int high) {
        if (high <= low) return true;
        const CellPair& cells = layout_.pairs[pair];
        scratch_.make_room(cells.num_cells);
        std::uint32_t* numbers = scratch_.cells.data();
        std::uint8_t* deficits = scratch_.deficits.data();
        std::size_t count = plan_.find_cells(pair, low, high, numbers, deficits);
        const std::int64_t steps_left = limits_.max_steps - stats_.steps;
        const bool is_cut = static_cast<std::int64_t>(count) > steps_left;
        if (is_cut) count = static_cast<std::size_t>(std::max<std::int64_t>(steps_left, 0));
        stats_.steps += static_cast<std::int64_t>(count);
        if (stats_.visited) mark_visited(pair, std::span(numbers, count));

        for (std::size_t at = 0; at < std::min(count, kLinesAhead); ++at)
            prefetch_line(cells, numbers[at]);
        find_overflowing(cells, std::span(numbers, count));
        const Filter filter{pair, tables_of(pair), chain_of(pair)};
        for (std::size_t begin = 0; begin < count; begin += kBatchLines) {
            const std::size_t end = std::min(begin + kBatchLines, count);
            filter_lines(filter, {numbers, deficits, begin, end, count});
            if (limits_.expired()) return false;
        }
        return visit_overflow(filter) && !is_cut;
    }

    static void prefetch_line(const CellPair& cells, std::size_t line) {
        __builtin_prefetch(cells.lines + line * kLineBytes, 0, 2);
    }

    // Most cells have no more than their own line, and a bit says which do.
    void find_overflowing(const CellPair& cells, std::span<const std::uint32_t> numbers) {
        scratch_.overflowing.resize(numbers.size() + 1);
        std::uint32_t* those = scratch_.overflowing.data();
        std::size_t count = 0;
        for (std::size_t at = 0; at < numbers.size(); ++at) {
            const std::uint32_t cell = numbers[at];
            those[count] = static_cast<std::uint32_t>(at);  // counted if it is one: no branch
            count += cells.overflowing[cell / 64] >> cell % 64 & 1;
        }
        scratch_.overflowing.resize(count);
        for (std::uint32_t at : scratch_.overflowing)
            __builtin_prefetch(cells.overflow + numbers[at]);
    }

    bool visit_overflow(const Filter& filter) {
        const CellPair& cells = layout_.pairs[filter.pair];
        std::uint32_t* lines = scratch_.overflow_lines.data();
        std::uint8_t* deficits = scratch_.overflow_deficits.data();
        std::size_t filled = 0;
        for (std::uint32_t at : scratch_.overflowing) {
            const std::uint32_t cell = scratch_.cells[at];
            const std::uint32_t end = cells.overflow[cell + 1];
            for (std::uint32_t line = cells.overflow[cell]; line < end; ++line) {
                prefetch_line(cells, line);
                lines[filled] = line;
                deficits[filled++] = scratch_.deficits[at];
                if (filled < kBatchLines) continue;
                filter_lines(filter, {lines, deficits, 0, filled, 0});
                filled = 0;
                if (limits_.expired()) return false;
            }
        }
        filter_lines(filter, {lines, deficits, 0, filled, 0});
        return true;
    }

    LineTables tables_of(std::size_t pair, std::size_t ahead = 1) const {
        const LineSplits from(pair, layout_.num_splits, ahead);
        LineTables tables;
        for (std::size_t at = 0; at < tables.size(); ++at) tables[at] = table_of(from.splits[at]);
        return tables;
    }

    // A split that is not there has no deficits.
    const std::uint8_t* table_of(std::size_t split) const {
        static constexpr std::array<std::uint8_t, kMaxNarrowSubItems> kNone{};
        return split < layout_.num_splits ? deficits_.of_split(split) : kNone.data();
    }

    Chain chain_of(std::size_t pair) const {
        const std::size_t num_pairs = layout_.num_pairs();
        auto depth = [&](std::size_t ahead) { return chains_.depths[(pair + ahead) % num_pairs]; };
        Chain chain;
        chain.two = depth(0) + depth(1) + 1;
        chain.three = num_pairs == 2 ? chain.two : chain.two + depth(2) + 1;
        chain.four = num_pairs <= 3 ? chain.three : chain.three + depth(3) + 1;
        chain.five = num_pairs <= 4 ? chain.four : chain.four + depth(4) + 1;
        return chain;
    }

    void mark_visited(std::size_t pair, std::span<const std::uint32_t> cells) {
        const std::size_t seconds = layout_.pairs[pair].second_codes;
        std::uint8_t* visited = stats_.visited + 2 * pair * layout_.num_sub_items;
        for (std::uint32_t cell : cells) {
            visited[cell / seconds] = 1;
            if (seconds > 1) visited[layout_.num_sub_items + cell % seconds] = 1;
        }
    }

    // Filters lines. What is left is pending, until there is enough of it.
    void filter_lines(const Filter& filter, const LineBatch& batch) {
        const CellPair& cells = layout_.pairs[filter.pair];
        const LineTables& tables = filter.tables;
        const std::size_t count =
            kernels_.filter_lines(cells.lines, batch, tables.data(), filter.chain.two,
                                  filter.chain.three, scratch_.survivors.data());
        const std::size_t num_lines = batch.end - batch.begin;
        // How many each of these has is not looked at.
        stats_.items_touched +=
            static_cast<std::int64_t>(num_lines * layout_.num_items / cells.num_lines);
        stats_.bytes_touched += static_cast<std::int64_t>(num_lines * kLineBytes);
        for (std::size_t survivor = 0; survivor < count; ++survivor) {
            const std::uint32_t at = scratch_.survivors[survivor] / kLineItems;
            const std::uint32_t place = scratch_.survivors[survivor] % kLineItems;
            const std::uint32_t line = batch.lines[at];
            if (cells.second_lines)
                __builtin_prefetch(cells.second_lines + line * kLineBytes);
            else
                __builtin_prefetch(cells.starts + line);
            const std::uint8_t* codes = cells.lines + line * kLineBytes + place;
            int sum = batch.deficits[at];
            for (std::size_t split = 0; split < tables.size(); ++split)
                sum += tables[split][codes[split * kLineItems]];
            scratch_.pending.push_back({line, static_cast<std::uint16_t>(sum),
                                        static_cast<std::uint8_t>(place),
                                        static_cast<std::uint8_t>(filter.pair)});
        }
        if (scratch_.pending.size() >= kPending) consider_pending();
    }

    // Considers all that is pending. What one loop reads was prefetched by the one before it: every
    // step from line to position, key, item and code is a cache miss.
    void consider_pending() {
        if (layout_.has_second_lines()) hold_against_second_lines();
        find_positions();
        if (layout_.has_last_keys()) hold_against_last_keys();
        for (Found& one : scratch_.found) {
            one.position = layout_.pairs[one.pair].items[one.position];
            __builtin_prefetch(codes_ + layout_.num_splits * one.position);
        }
        for (const Found& one : scratch_.found) consider(one.position);
        follow_threshold();
    }

    // Leaves those whose chains of four and of five are within their limits.
    void hold_against_second_lines() {
        std::array<Chain, kMostPairs> chains;
        std::array<LineTables, kMostPairs> tables;
        for (std::size_t pair = 0; pair < layout_.num_pairs(); ++pair) {
            chains[pair] = chain_of(pair);
            tables[pair] = tables_of(pair, kSecondLineAhead);
        }
        stats_.bytes_touched += kSecondBytes * static_cast<std::int64_t>(scratch_.pending.size());
        std::size_t left = 0;
        for (const Pending& one : scratch_.pending) {
            const CellPair& cells = layout_.pairs[one.pair];
            const std::uint8_t* codes = cells.second_lines + one.line * kLineBytes + one.place;
            const LineTables& of = tables[one.pair];
            const int four = one.sum + of[0][codes[0]] + of[1][codes[kLineItems]];
            const int five = four + of[2][codes[2 * kLineItems]] + of[3][codes[3 * kLineItems]];
            const Chain& chain = chains[one.pair];
            scratch_.pending[left] = one;  // counted if it is left: no branch
            left += (four <= chain.four) & (five <= chain.five) & (five <= limit_);
        }
        scratch_.pending.resize(left);
        for (const Pending& one : scratch_.pending)
            __builtin_prefetch(layout_.pairs[one.pair].starts + one.line);
    }

    // Where the pending items are in their pair; padding is nowhere.
    void find_positions() {
        scratch_.found.clear();
        for (const Pending& one : scratch_.pending) {
            const CellPair& cells = layout_.pairs[one.pair];
            const std::uint32_t position = cells.starts[one.line] + one.place;
            if (position >= cells.starts[one.line + 1]) continue;
            scratch_.found.push_back({position, one.sum, one.pair});
            if (cells.last_keys)
                __builtin_prefetch(cells.last_keys + position);
            else
                __builtin_prefetch(cells.items + position);
        }
        scratch_.pending.clear();
    }

    // Leaves those whose whole sum is within the limit: four pairs are all of the ring.
    void hold_against_last_keys() {
        const std::size_t num_pairs = layout_.num_pairs();
        const int limit = std::min(limit_, chains_.covers());
        stats_.bytes_touched += kKeyBytes * static_cast<std::int64_t>(scratch_.found.size());
        std::size_t left = 0;
        for (const Found& one : scratch_.found) {
            const CellPair& cells = layout_.pairs[one.pair];
            const std::size_t last = 2 * ((one.pair + 3) % num_pairs);
            const std::uint16_t key = cells.last_keys[one.position];
            const int sum = one.sum + table_of(last)[key & 0xFF] + table_of(last + 1)[key >> 8];
            __builtin_prefetch(cells.items + one.position);
            scratch_.found[left] = one;  // counted if it is left: no branch
            left += sum <= limit;
        }
        scratch_.found.resize(left);
    }

    // An item that its chain could not reject: the total deficit, then the score.
    void consider(Item item) {
        const std::uint8_t* code = codes_ + layout_.num_splits * item;
        int total = 0;
        for (std::size_t split = 0; split < layout_.num_splits; ++split)
            total += deficits_.of_split(split)[code[split]];
        if (total > limit_) return;
        ++stats_.items_scored;
        const float score = query_.with_bias(
            score_item(query_.sub_item_scores, code, layout_.num_splits, layout_.num_sub_items),
            item);
        if (score >= top_.threshold() && query_.may_return(item)) top_.offer(score, item);
    }

    void follow_threshold() {
        top_.settle();
        if (top_.full()) limit_ = std::min(limit_, deficits_.limit(slack()));
    }

    // Kept between queries: fresh memory would cost more than the search.
    struct Scratch {
        std::vector<std::uint32_t> cells;
        std::vector<std::uint8_t> deficits;
        std::vector<std::uint32_t> overflowing;
        std::vector<std::uint32_t> overflow_lines = std::vector<std::uint32_t>(kBatchLines);
        std::vector<std::uint8_t> overflow_deficits = std::vector<std::uint8_t>(kBatchLines);
        std::vector<std::uint32_t> survivors =
            std::vector<std::uint32_t>(kBatchLines * kLineItems + kSurvivorRoom);
        std::vector<Pending> pending;
        std::vector<Found> found;

        void make_room(std::size_t num_cells) {
            const std::size_t room = num_cells + SortedSplit::kAtOnce;
            if (cells.size() < room) cells.resize(room);
            if (deficits.size() < room) deficits.resize(room);
        }
    };
    static Scratch& scratch() {
        thread_local Scratch scratch;
        return scratch;
    }

    const CellLayout& layout_;
    const std::uint8_t* codes_;
    const Kernels& kernels_;
    const Query& query_;
    const Limits& limits_;
    Deficits& deficits_;
    TopK& top_;
    Stats& stats_;
    RingPlan plan_;
    double proven_ = 0.0;  // every item with a smaller deficit than this has been considered
    int limit_ = 0;        // sums of deficits that may still enter
    int covered_ = -1;
    RingDepths chains_;  // whose chains lines and pending items are held against
    Scratch& scratch_;
};

}  // namespace recprune
