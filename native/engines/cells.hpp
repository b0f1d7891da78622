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
    friend class SharedCells;  // which makes the second round of many searches together

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
    static constexpr std::size_t kSurvivors = kBatchLines * kLineItems + kSurvivorRoom;
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

    // An item that a filter let through, and its deficit so far, or less.
    struct Pending {
        std::uint32_t line;
        std::uint8_t place;
        std::uint8_t sum;
        std::uint8_t pair;
    };
    struct Found {
        std::uint32_t position;
        std::uint8_t sum;
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
        std::size_t num_cells =
            plan_.find_cells(pair, low, high, scratch_.lines.data(), scratch_.deficits.data());
        const std::int64_t steps_left = limits_.max_steps - stats_.steps;
        const bool is_cut = static_cast<std::int64_t>(num_cells) > steps_left;
        if (is_cut) num_cells = static_cast<std::size_t>(std::max<std::int64_t>(steps_left, 0));
        stats_.steps += static_cast<std::int64_t>(num_cells);
        if (stats_.visited) mark_visited(pair, std::span(scratch_.lines).first(num_cells));
        // A cell's own line has its number.
        prefetch_lines(cells, 0, std::min(num_cells, kLinesAhead));
        const std::size_t count = add_overflow(cells, num_cells);
        prefetch_lines(cells, num_cells, std::min(count, kLinesAhead));
        const LineTables tables = tables_of(pair);
        for (std::size_t begin = 0; begin < count; begin += kBatchLines) {
            const std::size_t end = std::min(begin + kBatchLines, count);
            filter_lines(pair, tables,
                         {scratch_.lines.data(), scratch_.deficits.data(), begin, end, count});
            if (limits_.expired()) return false;
        }
        return !is_cut;
    }

    static void prefetch_line(const CellPair& cells, std::size_t line) {
        __builtin_prefetch(cells.lines + line * kLineBytes, 0, 2);
    }

    void prefetch_lines(const CellPair& cells, std::size_t begin, std::size_t end) const {
        for (std::size_t at = begin; at < end; ++at) prefetch_line(cells, scratch_.lines[at]);
    }

    // Adds the overflow lines of so many cells to their own. Returns how many lines these are.
    std::size_t add_overflow(const CellPair& cells, std::size_t num_cells) {
        std::uint32_t* overflowing = scratch_.overflowing.data();
        std::size_t count = 0;
        for (std::size_t at = 0; at < num_cells; ++at) {  // most have none, which a bit says
            const std::uint32_t cell = scratch_.lines[at];
            overflowing[count] = static_cast<std::uint32_t>(at);  // counted if it is one: no branch
            count += cells.overflowing[cell / 64] >> cell % 64 & 1;
        }
        for (std::uint32_t at : std::span(overflowing, count))
            __builtin_prefetch(cells.overflow + scratch_.lines[at]);
        std::size_t num_lines = num_cells;
        for (std::uint32_t at : std::span(overflowing, count)) {
            const std::uint32_t* overflow = cells.overflow + scratch_.lines[at];
            num_lines += overflow[1] - overflow[0];
        }
        scratch_.make_room(num_lines);  // which moves all of these
        std::uint32_t* lines = scratch_.lines.data() + num_cells;
        const std::uint8_t* own = scratch_.deficits.data();
        std::uint8_t* deficits = scratch_.deficits.data() + num_cells;
        for (std::uint32_t at : std::span(scratch_.overflowing).first(count)) {
            const std::uint32_t* overflow = cells.overflow + scratch_.lines[at];
            for (std::uint32_t line = overflow[0]; line < overflow[1]; ++line) {
                *lines++ = line;
                *deficits++ = own[at];
            }
        }
        return num_lines;
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

    // Filters lines of a pair. What is left is pending, until there is enough of it.
    void filter_lines(std::size_t pair, const LineTables& tables, const LineBatch& batch) {
        const CellPair& cells = layout_.pairs[pair];
        const Chain chain = chain_of(pair);
        const std::size_t count =
            kernels_.filter_lines(cells.lines, batch, tables.data(), chain.two, chain.three,
                                  scratch_.survivors.data(), scratch_.sums.data());
        const std::size_t num_lines = batch.end - batch.begin;
        // How many each of these has is not looked at.
        stats_.items_touched +=
            static_cast<std::int64_t>(num_lines * layout_.num_items / cells.num_lines);
        stats_.bytes_touched += static_cast<std::int64_t>(num_lines * kLineBytes);
        const std::size_t before = scratch_.pending.size();
        scratch_.pending.resize(before + count);
        for (std::size_t at = 0; at < count; ++at) {
            const std::uint32_t survivor = scratch_.survivors[at];
            const std::uint32_t line = batch.lines[survivor / kLineItems];
            if (cells.second_lines)
                __builtin_prefetch(cells.second_lines + line * kLineBytes);
            else
                __builtin_prefetch(cells.starts + line);
            scratch_.pending[before + at] = {
                .line = line,
                .place = static_cast<std::uint8_t>(survivor % kLineItems),
                .sum = scratch_.sums[at],
                .pair = static_cast<std::uint8_t>(pair)};
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
        scratch_.found.resize(scratch_.pending.size());
        std::size_t count = 0;
        for (const Pending& one : scratch_.pending) {
            const CellPair& cells = layout_.pairs[one.pair];
            const std::uint32_t position = cells.starts[one.line] + one.place;
            scratch_.found[count] = {position, one.sum, one.pair};  // counted if it is there
            count += position < cells.starts[one.line + 1];
            if (cells.last_keys)
                __builtin_prefetch(cells.last_keys + position);
            else
                __builtin_prefetch(cells.items + position);
        }
        scratch_.found.resize(count);
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
        std::vector<std::uint32_t> lines;
        std::vector<std::uint8_t> deficits;      // of their cells
        std::vector<std::uint32_t> overflowing;  // cells, by their place among the lines
        std::vector<std::uint32_t> survivors = std::vector<std::uint32_t>(kSurvivors);
        std::vector<std::uint8_t> sums = std::vector<std::uint8_t>(kSurvivors);
        std::vector<Pending> pending;
        std::vector<Found> found;

        void make_room(std::size_t num_lines) {
            const std::size_t room = num_lines + SortedSplit::kAtOnce;
            if (lines.size() >= room) return;
            lines.resize(room);
            deficits.resize(room);
            overflowing.resize(room);
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
