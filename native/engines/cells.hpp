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
#include "layouts/layouts.hpp"
#include "query.hpp"
#include "top_k.hpp"

namespace recprune {

// How deep each pair is searched: cells with a deficit of at most limits[p]; −1 means none.
struct RingLimits {
    std::array<int, kPairs> limits{-1, -1, -1, -1};
    double cells = 0.0;  // how many cells that is

    // Every item with a total deficit of at most this is found.
    int covers() const {
        int sum = -1;
        for (int limit : limits) sum += limit + 1;
        return sum;
    }
};

class CellSearch {
  public:
    CellSearch(const CellLayout& layout, const std::uint8_t* codes, const Kernels& kernels,
               const Query& query, std::size_t num_sub_items, const Limits& request,
               Deficits& deficits, TopK& top, Stats& stats)
        : layout_(layout),
          codes_(codes),
          kernels_(kernels),
          query_(query),
          num_sub_items_(num_sub_items),
          request_(request),
          deficits_(deficits),
          top_(top),
          stats_(stats),
          scratch_(scratch()) {
        if (kernels.fill_pairs) scratch_.pairs.resize(kPairTableBytes);
    }

    // Counts cells by their current quantised deficits. Call after each quantise().
    void prepare() {
        for (std::size_t pair = 0; pair < kPairs; ++pair) count_cells(pair);
    }

    // The cheapest limits that cover at least `limit`, or that reach `budget` cells, whichever is
    // first. Always raises the pair whose next step costs the fewest cells.
    RingLimits choose(int limit, double budget) const {
        RingLimits chosen;
        std::array<float, kPairs> costs;  // of each pair's next step
        for (std::size_t pair = 0; pair < kPairs; ++pair) costs[pair] = cells_at_[pair][0];
        int covered = -1;
        while (covered < limit && chosen.cells < budget) {
            const auto cheapest = static_cast<std::size_t>(
                std::min_element(costs.begin(), costs.end()) - costs.begin());
            if (costs[cheapest] == kTooDeep) break;  // the caller will scan instead
            chosen.cells += static_cast<double>(costs[cheapest]);
            ++covered;
            const auto next = static_cast<std::size_t>(++chosen.limits[cheapest] + 1);
            costs[cheapest] = next < kDepth ? cells_at_[cheapest][next] : kTooDeep;
        }
        return chosen;
    }

    // Visits all cells within the limits and scores what the next pairs do not reject. `loosely`
    // rejects less: no bound hangs on it, but more items are seen when a first threshold is sought.
    // Returns false if a request to stop came first.
    bool visit(RingLimits ring, int limit, bool loosely) {
        limit_ = limit;
        std::array<std::size_t, kPairs> order{0, 1, 2, 3};
        for (auto next = order.begin(); next != order.end(); ++next) {
            const std::span<std::size_t> left(next, order.end());
            if (!loosely) lower(ring, left);
            // The deepest pair first: it finds the most, and what it finds lowers the others.
            std::iter_swap(next, std::max_element(next, order.end(), [&](auto one, auto other) {
                               return ring.limits[one] < ring.limits[other];
                           }));
            if (ring.limits[*next] < 0) break;
            const bool completed = visit_pair(ring, *next, loosely);
            consider_rest();
            if (!completed) return false;
        }
        return true;
    }

    static constexpr int kNoLimit = 1 << 20;

  private:
    static constexpr std::size_t kBatch = 48;
    static constexpr std::int64_t kKeyBytes = 2 * sizeof(std::uint16_t);
    using Parts = std::array<CellPart, kBatch>;

    struct ComingCell {
        std::uint32_t cell;
        int deficit;
    };
    static constexpr std::size_t kOnTheirWay = 32;  // cells whose offsets have been asked for
    static constexpr std::size_t kComing = 512;     // room for these and a row of 256
    static constexpr float kTooDeep = std::numeric_limits<float>::infinity();  // not counted

    // When the threshold has risen, less is to be covered: lowers the limits of the pairs that are
    // left, the dearest steps first. Limits that only ever fall keep the principle true: whoever is
    // found within the last ones is found within those that were higher.
    void lower(RingLimits& ring, std::span<const std::size_t> left) const {
        auto last_step = [&](std::size_t pair) {
            const int limit = ring.limits[pair];
            return limit < 0 ? -1.0f : cells_at_[pair][static_cast<std::size_t>(limit)];
        };
        for (int excess = ring.covers() - limit_; excess > 0; --excess) {
            const std::size_t dearest = *std::max_element(
                left.begin(), left.end(),
                [&](auto one, auto other) { return last_step(one) < last_step(other); });
            if (ring.limits[dearest] < 0) return;
            --ring.limits[dearest];
        }
    }

    // cells_at_[pair][x]: how many cells of the pair have the deficit x.
    void count_cells(std::size_t pair) {
        std::array<float, kDepth> first;
        std::array<float, 2 * kDepth> second{};  // the kernel wants zeros before it
        count_deficits(2 * pair, first.data());
        count_deficits(2 * pair + 1, second.data() + kDepth);
        kernels_.convolve(first.data(), second.data() + kDepth, cells_at_[pair].data());
    }

    void count_deficits(std::size_t split, float* counts) const {
        // Into integers first: adding one to a float is slower. Into two arrays in turn, because a
        // count must be stored before it can be raised again.
        std::array<std::array<std::uint32_t, kDepth>, 2> histograms{};
        const std::uint8_t* deficits = deficits_.of_split(split);
        std::array<std::uint8_t, 256 + 64> counted;  // usually a few of all sub-items
        const std::size_t count = kernels_.select(deficits, kDepth - 1, counted.data());
        for (std::size_t at = 0; at < count; ++at) ++histograms[at % 2][deficits[counted[at]]];
        for (std::size_t q = 0; q < kDepth; ++q)
            counts[q] = static_cast<float>(histograms[0][q] + histograms[1][q]);
    }

    bool visit_pair(const RingLimits& ring, std::size_t pair, bool loosely) {
        const std::uint32_t* offsets = layout_.offsets_of(pair);
        const std::uint16_t* keys = layout_.keys_of(pair);
        const std::uint8_t* first_deficits = deficits_.of_split(2 * pair);
        const std::uint8_t* second_deficits = deficits_.of_split(2 * pair + 1);
        const int depth = ring.limits[pair];
        // Limits of the chains of two and of three pairs that begin with this one.
        int two = depth + ring.limits[(pair + 1) % kPairs] + 1;
        int three = two + ring.limits[(pair + 2) % kPairs] + 1;
        if (loosely) {
            two += two / 2;
            three += three / 2;
        }
        if (kernels_.fill_pairs) fill_pair_tables(pair);

        Parts* filling = &parts_[0];
        Parts* waiting = &parts_[1];
        std::size_t parts = 0;
        std::size_t items = 0;
        std::size_t num_waiting = 0;
        auto open = [&](const ComingCell& coming) {
            std::uint32_t start = offsets[coming.cell];
            std::uint32_t length = offsets[coming.cell + 1] - start;
            const int both_limit = three - coming.deficit;
            const int next_limit = std::min(two - coming.deficit, both_limit);
            stats_.items_touched += length;
            stats_.bytes_touched += kKeyBytes * length;
            while (length > 0) {
                const std::uint32_t piece =
                    length < kPartItems ? length : static_cast<std::uint32_t>(kPartItems);
                const std::uint16_t* first = keys + 2 * std::size_t{start};
                for (std::size_t at = 0; at < 2 * piece; at += 32) __builtin_prefetch(first + at);
                __builtin_prefetch(first + 2 * piece - 1);
                (*filling)[parts++] = {start, piece, static_cast<std::int16_t>(next_limit),
                                       static_cast<std::int16_t>(both_limit)};
                items += piece;
                if (parts == kBatch || items + kPartItems > kBatchItems) {
                    // The batch before this one: its keys have had time to arrive.
                    filter(pair, *waiting, num_waiting);
                    std::swap(filling, waiting);
                    num_waiting = parts;
                    parts = 0;
                    items = 0;
                }
                start += piece;
                length -= piece;
            }
        };

        // A cell's offsets are asked for when it is found and looked at a little later.
        std::array<ComingCell, kComing> coming;
        std::size_t found = 0;
        std::size_t opened = 0;
        bool stopped = false;
        std::array<std::uint8_t, 256 + 64> firsts;
        std::array<std::uint8_t, 256 + 64> seconds;
        const std::size_t rows = kernels_.select(first_deficits, depth, firsts.data());
        for (std::size_t row = 0; row < rows && !stopped; ++row) {
            const std::size_t a = firsts[row];
            std::size_t columns =
                kernels_.select(second_deficits, depth - first_deficits[a], seconds.data());
            const std::int64_t steps_left = request_.max_steps - stats_.steps;
            const bool last_row = static_cast<std::int64_t>(columns) > steps_left;
            if (last_row) columns = static_cast<std::size_t>(std::max<std::int64_t>(steps_left, 0));
            for (std::size_t column = 0; column < columns; ++column) {
                const std::size_t b = seconds[column];
                const std::size_t cell = a << 8 | b;
                __builtin_prefetch(offsets + cell);
                coming[found++ % kComing] = {static_cast<std::uint32_t>(cell),
                                             first_deficits[a] + second_deficits[b]};
            }
            while (found - opened > kOnTheirWay) open(coming[opened++ % kComing]);
            if (stats_.visited && columns > 0) {
                std::uint8_t* visited = stats_.visited + 2 * pair * num_sub_items_;
                visited[a] = 1;
                for (std::size_t column = 0; column < columns; ++column)
                    visited[num_sub_items_ + seconds[column]] = 1;
            }
            stats_.steps += static_cast<std::int64_t>(columns);
            stopped = last_row || request_.expired();
        }
        while (opened < found) open(coming[opened++ % kComing]);
        filter(pair, *waiting, num_waiting);
        filter(pair, *filling, parts);
        return !stopped;
    }

    void fill_pair_tables(std::size_t pair) {
        for (std::size_t step = 1; step <= 2; ++step) {
            const std::size_t split = 2 * ((pair + step) % kPairs);
            kernels_.fill_pairs(deficits_.of_split(split), deficits_.of_split(split + 1),
                                scratch_.pairs.data() + (step - 1) * kCells);
        }
    }

    void filter(std::size_t pair, const Parts& parts, std::size_t count) {
        const std::size_t next = 2 * ((pair + 1) % kPairs);
        const std::size_t after = 2 * ((pair + 2) % kPairs);
        const std::uint8_t* tables[] = {deficits_.of_split(next), deficits_.of_split(next + 1),
                                        deficits_.of_split(after), deficits_.of_split(after + 1)};
        std::uint32_t* survivors = scratch_.survivors.data();
        const std::size_t found = kernels_.filter_cells(parts.data(), count, layout_.keys_of(pair),
                                                        tables, scratch_.pairs.data(), survivors);
        // From position to item to code are two cache misses. Each is asked for now and waited for
        // when the next batch comes.
        const Item* items = layout_.items_of(pair);
        consider_pending();
        for (const Item* position : scratch_.positions) {
            scratch_.pending.push_back(*position);
            __builtin_prefetch(codes_ + std::size_t{8} * *position);
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
        const std::uint8_t* code = codes_ + std::size_t{8} * item;
        int total = 0;
        for (std::size_t split = 0; split < 2 * kPairs; ++split)
            total += deficits_.of_split(split)[code[split]];
        if (total > limit_) return;
        ++stats_.items_scored;
        const float score = query_.with_bias(
            score_item(query_.sub_item_scores, code, 2 * kPairs, num_sub_items_), item);
        if (score >= top_.threshold() && query_.may_return(item)) {
            const float before = top_.threshold();
            top_.offer(score, item);
            if (top_.threshold() > before)
                limit_ = std::min(limit_, deficits_.limit(deficits_.slack(
                                              top_.threshold(), request_.over_inflation)));
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
    const Limits& request_;
    Deficits& deficits_;
    TopK& top_;
    Stats& stats_;
    int limit_ = kNoLimit;
    std::array<std::array<float, kDepth>, kPairs> cells_at_;
    std::array<Parts, 2> parts_;
    Scratch& scratch_;
};

// Whether a search for everything within the slack may well visit no more than `most_cells`: the
// same steps as in CellSearch::choose, but by the bucket. That counts somewhat too many cells,
// rarely twice as many, and costs little. The lists that are done count for nothing.
//
// Pre: most_cells is finite.
inline bool may_be_few_cells(const Deficits& deficits, const Kernels& kernels, double slack,
                             std::span<const std::uint16_t> done, double most_cells) {
    constexpr double kOverestimate = 2.0;
    std::array<std::uint8_t, 256> first_split;
    std::copy_n(deficits.of_split(0), 256, first_split.begin());
    const int shared = leave_out(first_split, done);
    std::array<std::array<float, kBuckets + 1>, kPairs> cells;
    for (std::size_t pair = 0; pair < kPairs; ++pair) {
        std::array<float, kBuckets> first;
        std::array<float, 2 * kBuckets> second{};  // zeros first: loops of fixed length are faster
        kernels.count_buckets(pair == 0 ? first_split.data() : deficits.of_split(2 * pair),
                              first.data());
        kernels.count_buckets(deficits.of_split(2 * pair + 1), second.data() + kBuckets);
        for (std::size_t x = 0; x < kBuckets; ++x) {
            float sum = 0.0f;
            for (std::size_t a = 0; a < kBuckets; ++a) sum += first[a] * second[kBuckets + x - a];
            cells[pair][x] = sum;
        }
        cells[pair][kBuckets] = std::numeric_limits<float>::infinity();  // not counted
    }
    double estimate = 0.0;
    std::array<std::size_t, kPairs> next{};
    for (double left = (deficits.limit(slack) - shared + 1.0) / kBucketUnits; left > 0.0;
         left -= 1.0) {
        std::size_t cheapest = 0;
        for (std::size_t pair = 1; pair < kPairs; ++pair) {
            if (cells[pair][next[pair]] < cells[cheapest][next[cheapest]]) cheapest = pair;
        }
        estimate += static_cast<double>(cells[cheapest][next[cheapest]++]) * std::min(left, 1.0);
        if (estimate > kOverestimate * most_cells) return false;
    }
    return true;
}

struct CellSettings {
    double first_round_cells;  // visited for a first threshold
    double most_cells;         // beyond this, searching by cells does not pay
};

// Returns false if the caller should scan, with the threshold found so far. A search that was asked
// to stop early returns true, and stats.exact says whether the stop was safe. The deficits are a
// copy: whoever scans keeps his tables.
inline bool search_cells(const CellLayout& layout, const std::uint8_t* codes,
                         const Kernels& kernels, const Query& query, std::size_t num_sub_items,
                         const CellSettings& settings, std::span<const std::uint16_t> scanned,
                         const Limits& request, Deficits deficits, TopK& top, Stats& stats) {
    CellSearch search(layout, codes, kernels, query, num_sub_items, request, deficits, top, stats);
    double proven = 0.0;  // every item with a smaller deficit than this has been considered
    auto finish = [&] {
        top.settle();
        // Under an inflated threshold, items were rejected down to the slack that it has now.
        if (request.over_inflation > 0.0 && top.full())
            proven = std::min(proven, deficits.slack(top.threshold(), request.over_inflation));
        stats.set_bound(deficits.best_possible() - proven, proven > deficits.slack(top.threshold()),
                        top.full(), top.threshold());
        return true;
    };

    // Without a threshold there is no slack to map yet: only resolution hangs on this guess.
    if (!top.full()) {
        deficits.quantise(0.1 * deficits.range());
        search.prepare();
    }
    for (double budget = settings.first_round_cells; !top.full(); budget *= 4.0) {
        const RingLimits ring = search.choose(CellSearch::kNoLimit, budget);
        if (ring.cells < budget || ring.cells > settings.most_cells) return false;
        if (!search.visit(ring, CellSearch::kNoLimit, true)) return finish();
        proven = deficits.slack_of(ring.covers());
        top.settle();
    }
    const double slack = deficits.slack(top.threshold(), request.over_inflation);
    if (slack < proven) return finish();

    deficits.quantise(slack);
    deficits.leave_out(scanned);
    search.prepare();
    const int limit = deficits.limit(slack);
    const RingLimits ring = search.choose(limit, settings.most_cells);
    if (ring.covers() < limit) return false;
    if (!search.visit(ring, limit, false)) return finish();
    proven = std::nextafter(slack, std::numeric_limits<double>::infinity());
    return finish();
}

}  // namespace recprune
