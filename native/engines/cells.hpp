// Our pruning engine: sub-linear and exact.
//
// Eight splits form a ring of four pairs; every pair has the items sorted by cell (the items that
// share both sub-item ids, as in the inverted multi-index of Babenko and Lempitsky, CVPR 2012). An
// item within the limit L of quantised deficits, x_0 + x_1 + x_2 + x_3 ≤ L, must have some pair p
// with x_p ≤ t_p once Σ (t_p + 1) ≥ L + 1: the pigeonhole. By the pigeonring principle (Qin and
// Xiao, VLDB 2018) it can even be found from a p where x_p + x_{p+1} ≤ t_p + t_{p+1} + 1 and x_p +
// x_{p+1} + x_{p+2} ≤ t_p + t_{p+1} + t_{p+2} + 2 hold too. So visit the cells with x_p ≤ t_p, and
// let the next pairs reject nearly all of their items before any score is computed.
//
// A first round within a small budget finds a threshold; the limit that follows from it is then
// searched completely. If the first round's own limit already covers it, nothing is left to do.
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
#include "kernels/kernels.hpp"
#include "layouts/cells.hpp"
#include "query.hpp"
#include "top_k.hpp"

namespace recprune {

// How deep each pair is searched: its cells with a deficit of at most depths[p] (t_p in
// docs/search.md); −1 means none.
struct RingDepths {
    std::array<int, kPairs> depths{-1, -1, -1, -1};
    double cells = 0.0;  // how many cells that is

    // Every item with a total deficit of at most this is found.
    int covers() const {
        int sum = -1;
        for (int depth : depths) sum += depth + 1;
        return sum;
    }
};

// Limits of the chains of two and of three pairs that begin with one.
struct ChainLimits {
    int two;
    int three;
};

// Cells lie all over memory, so each passes through three stages, and what one stage reads is
// prefetched by the one before: the offsets of a cell when it is found, the keys of its items when
// it is opened; they are filtered when the next batch is full too. `Filter` is called with the
// parts of a batch and how many there are.
template <class Filter>
class CellPipeline {
  public:
    CellPipeline(const CellLayout& layout, std::size_t pair, ChainLimits chain, Stats& stats,
                 Filter filter)
        : offsets_(layout.offsets_of(pair)),
          keys_(layout.keys_of(pair)),
          chain_(chain),
          stats_(stats),
          filter_(std::move(filter)) {}
    CellPipeline(const CellPipeline&) = delete;  // it points into itself

    // Pre: since the last advance(), no more than a row of cells was added.
    void add(std::size_t cell, int deficit) {
        __builtin_prefetch(offsets_ + cell);
        cells_[num_found_++ % kRoom] = {static_cast<std::uint32_t>(cell), deficit};
    }

    // Opens the cells whose offsets have had time to arrive.
    void advance() {
        while (num_found_ - num_opened_ > kOffsetsInFlight) open(cells_[num_opened_++ % kRoom]);
    }

    // Sends what is left through all stages.
    void finish() {
        while (num_opened_ < num_found_) open(cells_[num_opened_++ % kRoom]);
        filter_(*arriving_, num_arriving_);
        filter_(*filling_, num_parts_);
    }

  private:
    // Cells that are found but not opened. Found by trial.
    static constexpr std::size_t kOffsetsInFlight = 32;
    // Cells that there is room for: these and a row of 256, as a power of two.
    static constexpr std::size_t kRoom = 512;
    static_assert(kRoom >= kOffsetsInFlight + kMaxNarrowSubItems);
    // Parts of a batch, unless kBatchItems is reached first. Found by trial.
    static constexpr std::size_t kBatchParts = 48;
    static constexpr std::size_t kKeysPerLine = 32;  // of a cache line of 64 bytes
    static constexpr std::int64_t kItemKeyBytes = 2 * sizeof(std::uint16_t);
    using Parts = std::array<CellPart, kBatchParts>;

    struct FoundCell {
        std::uint32_t cell;
        int deficit;
    };

    void open(const FoundCell& found) {
        std::uint32_t start = offsets_[found.cell];
        std::uint32_t length = offsets_[found.cell + 1] - start;
        const int both_limit = chain_.three - found.deficit;
        const int next_limit = std::min(chain_.two - found.deficit, both_limit);
        stats_.items_touched += length;
        stats_.bytes_touched += kItemKeyBytes * length;
        while (length > 0) {
            const auto piece =
                length < kPartItems ? length : static_cast<std::uint32_t>(kPartItems);
            prefetch_keys(start, piece);
            (*filling_)[num_parts_++] = {start, piece, static_cast<std::int16_t>(next_limit),
                                         static_cast<std::int16_t>(both_limit)};
            num_items_ += piece;
            if (num_parts_ == kBatchParts || num_items_ + kPartItems > kBatchItems) next_batch();
            start += piece;
            length -= piece;
        }
    }

    void prefetch_keys(std::uint32_t start, std::uint32_t length) const {
        const std::uint16_t* first = keys_ + 2 * std::size_t{start};
        for (std::size_t at = 0; at < 2 * length; at += kKeysPerLine)
            __builtin_prefetch(first + at);
        __builtin_prefetch(first + 2 * length - 1);
    }

    // The batch is full. Filters the one before: its keys have had time to arrive.
    void next_batch() {
        filter_(*arriving_, num_arriving_);
        std::swap(filling_, arriving_);
        num_arriving_ = num_parts_;
        num_parts_ = 0;
        num_items_ = 0;
    }

    const std::uint32_t* offsets_;
    const std::uint16_t* keys_;
    ChainLimits chain_;
    Stats& stats_;
    Filter filter_;
    std::array<FoundCell, kRoom> cells_;  // a ring
    std::size_t num_found_ = 0;
    std::size_t num_opened_ = 0;
    std::array<Parts, 2> parts_;
    Parts* filling_ = &parts_[0];
    Parts* arriving_ = &parts_[1];
    std::size_t num_parts_ = 0;  // of the batch that is being filled, and their items
    std::size_t num_items_ = 0;
    std::size_t num_arriving_ = 0;
};

struct CellSettings {
    double first_round_cells;  // visited for a first threshold
    double paying_cells;       // beyond this, a scan is faster
    double most_cells;         // the same, or infinity where the caller will not scan
};

// One search. The deficits are a copy: a scan keeps its tables.
class CellSearch {
  public:
    CellSearch(const CellLayout& layout, const std::uint8_t* codes, const Kernels& kernels,
               const Query& query, std::size_t num_sub_items, const Limits& limits,
               Deficits deficits, TopK& top, Stats& stats)
        : layout_(layout),
          codes_(codes),
          kernels_(kernels),
          query_(query),
          num_sub_items_(num_sub_items),
          limits_(limits),
          deficits_(std::move(deficits)),
          top_(top),
          stats_(stats),
          scratch_(scratch()) {
        if (kernels.fill_pairs) scratch_.pairs.resize(kPairTableBytes);
    }

    // `scanned` are lists whose items are done with. Returns false if the caller should scan, with
    // the threshold found so far. A search that reached a limit returns true, and stats.exact says
    // whether the stop was safe.
    bool run(const CellSettings& settings, std::span<const std::uint16_t> scanned) {
        const bool has_threshold = top_.full() && (!scanned.empty() || slack() < proven_);
        const Round first = has_threshold ? Round::completed : first_round(settings);
        if (first == Round::too_many_cells) return false;
        if (first == Round::stopped) return finish();
        const double slack = this->slack();
        if (slack < proven_) return finish();

        deficits_.quantise(slack);
        deficits_.leave_out(scanned);
        count_cells();
        const int limit = deficits_.limit(slack);
        const RingDepths ring = choose(limit, settings.most_cells);
        if (ring.covers() < limit) return false;
        if (visit(ring, limit, false))
            proven_ = std::nextafter(slack, std::numeric_limits<double>::infinity());
        return finish();
    }

  private:
    enum class Round { completed, stopped, too_many_cells };
    using SelectedIds = std::array<std::uint8_t, kSelectRoom>;

    // More than deficits can add up to.
    static constexpr int kNoLimit = 1 << 20;
    // Cells that are too deep to be counted.
    static constexpr float kTooDeep = std::numeric_limits<float>::infinity();
    // The slack that a first round is quantised for, as a share of the largest deficit conceivable.
    // There is no threshold yet, and only resolution hangs on this guess. Found by trial.
    static constexpr double kFirstGuess = 0.1;
    // How much larger the guess is made where too few cells are counted, and a guess with which all
    // are: no pair has deficits of more than range, and half of the units are counted.
    static constexpr double kGuessGrowth = 2.0;
    static constexpr double kLastGuess = 2.0;
    static_assert(kTargetLimit / kLastGuess < kDepth);
    // How much larger the budget of a first round is than that of the one before, which found too
    // few items. Found by trial.
    static constexpr double kBudgetGrowth = 4.0;
    // How many times as deep as a first round a threshold may lead for it to be of use, whatever
    // that costs. Found by trial: the K-th best score of all leads up to 1.7 times as deep.
    static constexpr int kFarBeyond = 2;

    double slack() const { return deficits_.slack(top_.threshold(), limits_.over_inflation); }

    // Finds a threshold: visits ever more cells until the top K is full. One that a floor or
    // boosted items have set will do if it makes cells pay; else one round looks for a better one.
    Round first_round(const CellSettings& settings) {
        double budget = settings.first_round_cells;
        RingDepths ring = plan_first_round(budget);
        if (top_.full() && threshold_will_do(settings, ring)) return Round::completed;
        while (true) {
            if (ring.cells < budget || ring.cells > settings.most_cells)
                return Round::too_many_cells;
            if (!visit(ring, kNoLimit, true)) return Round::stopped;
            proven_ = deficits_.slack_of(ring.covers());
            top_.settle();
            if (top_.full()) return Round::completed;
            budget *= kBudgetGrowth;
            ring = plan_first_round(budget);
        }
    }

    // Returns the cheapest depths that reach `budget` cells, or all cells where these are fewer.
    // Post: the tables are those that the depths count in. A few sub-items may stand so far above
    // all others that hardly any cell is within the first guess: then the units are made coarser.
    RingDepths plan_first_round(double budget) {
        for (double guess = kFirstGuess;; guess *= kGuessGrowth) {
            deficits_.quantise(guess * deficits_.range());
            count_cells();
            const RingDepths ring = choose(kNoLimit, budget);
            if (ring.cells >= budget || guess >= kLastGuess) return ring;
        }
    }

    // Whether cells pay under the threshold that there is. `first` is what a first round would
    // visit. Post: if not, the tables are those of a first round.
    bool threshold_will_do(const CellSettings& settings, const RingDepths& first) {
        const double slack = this->slack();
        if (deficits_.limit(slack) > kFarBeyond * first.covers()) return false;
        deficits_.quantise(slack);
        count_cells();
        const int limit = deficits_.limit(slack);
        if (choose(limit, settings.paying_cells).covers() >= limit) return true;
        plan_first_round(settings.first_round_cells);
        return false;
    }

    // Says how exact the answer is. Returns true: the search has ended.
    bool finish() {
        top_.settle();
        // Under an inflated threshold, items were rejected down to the slack that it has now.
        if (limits_.over_inflation > 0.0 && top_.full())
            proven_ = std::min(proven_, deficits_.slack(top_.threshold(), limits_.over_inflation));
        stats_.set_bound(deficits_.best_possible() - proven_,
                         proven_ > deficits_.slack(top_.threshold()), top_.full(),
                         top_.threshold());
        return true;
    }

    // Counts cells by their quantised deficits, anew after each quantise().
    void count_cells() {
        for (std::size_t pair = 0; pair < kPairs; ++pair) {
            std::array<float, kDepth> first;
            std::array<float, 2 * kDepth> second{};  // the kernel needs zeros before it
            count_deficits(2 * pair, first.data());
            count_deficits(2 * pair + 1, second.data() + kDepth);
            kernels_.convolve(first.data(), second.data() + kDepth, cells_at_[pair].data());
        }
    }

    void count_deficits(std::size_t split, float* counts) const {
        // Into integers first: adding one to a float is slower. Into two arrays in turn, because a
        // count must be stored before it can be raised again.
        std::array<std::array<std::uint32_t, kDepth>, 2> histograms{};
        const std::uint8_t* deficits = deficits_.of_split(split);
        SelectedIds counted;  // usually a few of all sub-items
        const std::size_t count = kernels_.select(deficits, kDepth - 1, counted.data());
        for (std::size_t at = 0; at < count; ++at) ++histograms[at % 2][deficits[counted[at]]];
        for (std::size_t q = 0; q < kDepth; ++q)
            counts[q] = static_cast<float>(histograms[0][q] + histograms[1][q]);
    }

    // The cheapest depths that cover at least `limit`, or that reach `budget` cells, whichever is
    // first. Always deepens the pair whose next unit costs the fewest cells.
    RingDepths choose(int limit, double budget) const {
        RingDepths chosen;
        std::array<float, kPairs> costs;  // of each pair's next unit
        for (std::size_t pair = 0; pair < kPairs; ++pair) costs[pair] = cells_at_[pair][0];
        int covered = -1;
        while (covered < limit && chosen.cells < budget) {
            const auto cheapest = static_cast<std::size_t>(
                std::min_element(costs.begin(), costs.end()) - costs.begin());
            if (costs[cheapest] == kTooDeep) break;  // the caller will scan instead
            chosen.cells += static_cast<double>(costs[cheapest]);
            ++covered;
            const auto next = static_cast<std::size_t>(++chosen.depths[cheapest] + 1);
            costs[cheapest] = next < kDepth ? cells_at_[cheapest][next] : kTooDeep;
        }
        return chosen;
    }

    // When the threshold has risen, less is to be covered: lowers the depths of the pairs that are
    // left, the dearest units first. Depths that only ever fall keep the principle true: an item
    // that is found within the last ones is found within those that were higher.
    void lower(RingDepths& ring, std::span<const std::size_t> left) const {
        auto last_unit = [&](std::size_t pair) {
            const int depth = ring.depths[pair];
            return depth < 0 ? -1.0f : cells_at_[pair][static_cast<std::size_t>(depth)];
        };
        for (int excess = ring.covers() - limit_; excess > 0; --excess) {
            const std::size_t dearest = *std::max_element(
                left.begin(), left.end(),
                [&](auto one, auto other) { return last_unit(one) < last_unit(other); });
            if (ring.depths[dearest] < 0) return;
            --ring.depths[dearest];
        }
    }

    // Visits all cells within the depths and scores what the next pairs do not reject. `loosely`
    // rejects less: no bound hangs on it, but more items are seen when a first threshold is sought.
    // Returns false if a limit was reached first.
    bool visit(RingDepths ring, int limit, bool loosely) {
        limit_ = limit;
        std::array<std::size_t, kPairs> order{0, 1, 2, 3};
        for (auto next = order.begin(); next != order.end(); ++next) {
            const std::span<std::size_t> left(next, order.end());
            if (!loosely) lower(ring, left);
            // The deepest pair first: it finds the most, and what it finds lowers the others.
            std::iter_swap(next, std::max_element(next, order.end(), [&](auto one, auto other) {
                               return ring.depths[one] < ring.depths[other];
                           }));
            if (ring.depths[*next] < 0) break;
            const bool completed = visit_pair(ring, *next, loosely);
            consider_rest();
            if (!completed) return false;
        }
        return true;
    }

    // The cells of a pair are a staircase: rows of first codes, each with the second codes that the
    // depth leaves to it.
    bool visit_pair(const RingDepths& ring, std::size_t pair, bool loosely) {
        if (kernels_.fill_pairs) fill_pair_tables(pair);
        CellPipeline pipeline(
            layout_, pair, chain_limits(ring, pair, loosely), stats_,
            [&](const auto& parts, std::size_t count) { filter(pair, parts.data(), count); });
        const std::uint8_t* first_deficits = deficits_.of_split(2 * pair);
        const std::uint8_t* second_deficits = deficits_.of_split(2 * pair + 1);
        const int depth = ring.depths[pair];
        bool stopped = false;
        SelectedIds firsts;
        SelectedIds seconds;
        const std::size_t rows = kernels_.select(first_deficits, depth, firsts.data());
        for (std::size_t row = 0; row < rows && !stopped; ++row) {
            const std::size_t a = firsts[row];
            std::size_t columns =
                kernels_.select(second_deficits, depth - first_deficits[a], seconds.data());
            const std::int64_t steps_left = limits_.max_steps - stats_.steps;
            const bool last_row = static_cast<std::int64_t>(columns) > steps_left;
            if (last_row) columns = static_cast<std::size_t>(std::max<std::int64_t>(steps_left, 0));
            for (std::size_t column = 0; column < columns; ++column) {
                const std::size_t b = seconds[column];
                pipeline.add(cell_at(a, b), first_deficits[a] + second_deficits[b]);
            }
            pipeline.advance();
            if (stats_.visited) mark_visited(pair, a, std::span(seconds).first(columns));
            stats_.steps += static_cast<std::int64_t>(columns);
            stopped = last_row || limits_.expired();
        }
        pipeline.finish();
        return !stopped;
    }

    static ChainLimits chain_limits(const RingDepths& ring, std::size_t pair, bool loosely) {
        ChainLimits chain;
        chain.two = ring.depths[pair] + ring.depths[(pair + 1) % kPairs] + 1;
        chain.three = chain.two + ring.depths[(pair + 2) % kPairs] + 1;
        if (loosely) {
            chain.two += chain.two / 2;
            chain.three += chain.three / 2;
        }
        return chain;
    }

    void mark_visited(std::size_t pair, std::size_t first, std::span<const std::uint8_t> seconds) {
        if (seconds.empty()) return;
        std::uint8_t* visited = stats_.visited + 2 * pair * num_sub_items_;
        visited[first] = 1;
        for (std::uint8_t second : seconds) visited[num_sub_items_ + second] = 1;
    }

    void fill_pair_tables(std::size_t pair) {
        for (std::size_t ahead = 1; ahead <= 2; ++ahead) {
            const std::size_t split = 2 * ((pair + ahead) % kPairs);
            kernels_.fill_pairs(deficits_.of_split(split), deficits_.of_split(split + 1),
                                scratch_.pairs.data() + (ahead - 1) * kCells);
        }
    }

    void filter(std::size_t pair, const CellPart* parts, std::size_t count) {
        const std::size_t next = 2 * ((pair + 1) % kPairs);
        const std::size_t last = 2 * ((pair + 2) % kPairs);
        const std::uint8_t* tables[] = {deficits_.of_split(next), deficits_.of_split(next + 1),
                                        deficits_.of_split(last), deficits_.of_split(last + 1)};
        std::uint32_t* survivors = scratch_.survivors.data();
        const std::size_t found = kernels_.filter_cells(parts, count, layout_.keys_of(pair), tables,
                                                        scratch_.pairs.data(), survivors);
        // From position to item to code are two cache misses. Each is prefetched now and read when
        // the next batch comes.
        const Item* items = layout_.items_of(pair);
        consider_pending();
        for (const Item* position : scratch_.positions) {
            scratch_.pending.push_back(*position);
            __builtin_prefetch(codes_ + kCellSplits * *position);
        }
        scratch_.positions.clear();
        for (std::size_t s = 0; s < found; ++s) {
            scratch_.positions.push_back(items + survivors[s]);
            __builtin_prefetch(items + survivors[s]);
        }
    }

    void consider_pending() {
        for (Item item : scratch_.pending) consider(item);
        scratch_.pending.clear();
    }

    void consider_rest() {
        consider_pending();
        for (const Item* item : scratch_.positions) consider(*item);
        scratch_.positions.clear();
    }

    // An item that its chain could not reject: the total deficit, then the score.
    void consider(Item item) {
        const std::uint8_t* code = codes_ + kCellSplits * item;
        int total = 0;
        for (std::size_t split = 0; split < kCellSplits; ++split)
            total += deficits_.of_split(split)[code[split]];
        if (total > limit_) return;
        ++stats_.items_scored;
        const float score = query_.with_bias(
            score_item(query_.sub_item_scores, code, kCellSplits, num_sub_items_), item);
        if (score >= top_.threshold() && query_.may_return(item)) {
            const float before = top_.threshold();
            top_.offer(score, item);
            if (top_.threshold() > before)
                limit_ = std::min(limit_, deficits_.limit(deficits_.slack(top_.threshold(),
                                                                          limits_.over_inflation)));
        }
    }

    // Kept between queries: fresh memory would cost more than the search.
    struct Scratch {
        std::vector<std::uint32_t> survivors = std::vector<std::uint32_t>(kBatchItems + 1);
        std::vector<const Item*> positions;
        std::vector<Item> pending;
        std::vector<std::uint8_t> pairs;
    };
    static Scratch& scratch() {
        thread_local Scratch scratch;
        return scratch;
    }

    const CellLayout& layout_;
    const std::uint8_t* codes_;
    const Kernels& kernels_;
    const Query& query_;
    std::size_t num_sub_items_;
    const Limits& limits_;
    Deficits deficits_;
    TopK& top_;
    Stats& stats_;
    double proven_ = 0.0;  // every item with a smaller deficit than this has been considered
    int limit_ = kNoLimit;
    std::array<std::array<float, kDepth>, kPairs> cells_at_;  // [pair][x]: cells with the deficit x
    Scratch& scratch_;
};

}  // namespace recprune
