// Which cells of a ring of pairs a search has to visit, and in which order it finds them.
//
// An item within the limit L of quantised deficits, Σ x_p ≤ L, must have some pair p with x_p ≤ t_p
// once Σ (t_p + 1) ≥ L + 1: the pigeonhole. By the pigeonring principle (Qin and Xiao, VLDB 2018)
// it can even be found from a p where the chains that begin there, x_p + x_{p+1} and so on, are
// within t_p + t_{p+1} + 1 and so on. docs/search.md has the proofs.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>

#include "bounds/deficits.hpp"
#include "kernels/kernels.hpp"
#include "layouts/cells.hpp"

namespace recprune {

// How deep each pair is searched: its cells with a deficit of at most depths[p] (t_p in
// docs/search.md); −1 means none.
struct RingDepths {
    std::array<int, kMostPairs> depths;

    RingDepths() { depths.fill(-1); }

    // Every item with a total deficit of at most this is found.
    int covers() const {
        int sum = -1;
        for (int depth : depths) sum += depth + 1;
        return sum;
    }
};

// The sub-items of one split within reach, by ascending deficit.
struct SortedSplit {
    static constexpr std::size_t kAtOnce = 16;  // that are read together, some beyond the last

    std::array<std::uint32_t, kMaxNarrowSubItems + kAtOnce>
        places;  // their share of a cell's number
    std::array<std::uint8_t, kMaxNarrowSubItems + kAtOnce> deficits;
    std::array<std::uint16_t, kMaxNarrowSubItems> within_;  // [t]: how many have at most t

    std::size_t within(int deficit) const {
        return deficit < 0 ? 0 : within_[static_cast<std::size_t>(deficit)];
    }
};

// The splits of one query, sorted, and how the depths of its ring grow with what they have to
// cover: always by the step that costs the fewest lines.
class RingPlan {
  public:
    explicit RingPlan(const CellLayout& layout) : layout_(layout), num_pairs_(layout.num_pairs()) {}

    // Plans for these deficits, up to a limit, as long as no more than `most_lines` are visited.
    void make(const Deficits& deficits, const Kernels& kernels, int limit, double most_lines) {
        for (std::size_t pair = 0; pair < num_pairs_; ++pair) {
            sort(deficits, kernels, 2 * pair, layout_.pairs[pair].second_codes);
            sort(deficits, kernels, 2 * pair + 1, 1);
            count_lines(kernels, pair);
        }
        choose(limit, most_lines);
    }

    // The highest limit that there are depths for.
    int covers() const { return kStepUnits * static_cast<int>(num_steps_) - 1; }
    // Lines that are visited to cover a limit. Pre: there are depths for it.
    double lines(int limit) const {
        return limit < 0 ? 0.0 : lines_[static_cast<std::size_t>(limit / kStepUnits)];
    }
    // The highest limit that so many lines cover, or a step more.
    int covered_by(double lines) const {
        const std::span<const double> all(lines_.data(), num_steps_);
        const auto found = std::lower_bound(all.begin(), all.end(), lines);
        const int steps = static_cast<int>(found - all.begin()) + 1;
        return std::min(kStepUnits * steps - 1, covers());
    }

    // The depths that cover a limit, or somewhat more: those of a lower one are nowhere deeper.
    RingDepths depths(int limit) const {
        RingDepths ring;
        for (int step = 0; kStepUnits * step <= limit; ++step)
            ring.depths[path_[static_cast<std::size_t>(step)]] += kStepUnits;
        return ring;
    }

    // Lowers depths of the pairs that are left until no more than the limit is covered, the dearest
    // units first.
    void lower(RingDepths& ring, std::span<const std::size_t> left, int limit) const {
        auto last_step = [&](std::size_t pair) {
            const int depth = ring.depths[pair];
            return depth < 0 ? -1.0f
                             : lines_at_[pair][static_cast<std::size_t>(depth / kStepUnits)];
        };
        for (int excess = ring.covers() - limit; excess > 0;) {
            const std::size_t dearest = *std::max_element(
                left.begin(), left.end(),
                [&](auto one, auto other) { return last_step(one) < last_step(other); });
            int& depth = ring.depths[dearest];
            if (depth < 0) return;
            const int units = std::min(depth % kStepUnits + 1, excess);
            depth -= units;
            excess -= units;
        }
    }

    // Writes the cells of a pair with a deficit of more than `low` and at most `high`, and their
    // deficits. Returns how many. There is room for kAtOnce more than a pair has cells.
    //
    // Both splits are sorted, so the cells are a staircase. Below its middle every row is a stretch
    // of the sorted second codes, above it every column is one of the first codes: long stretches
    // both.
    std::size_t find_cells(std::size_t pair, int low, int high, std::uint32_t* cells,
                           std::uint8_t* deficits) const {
        const SortedSplit& first = sorted_[2 * pair];
        const SortedSplit& second = sorted_[2 * pair + 1];
        std::size_t found = 0;
        auto add = [&](const SortedSplit& fixed, std::size_t at, const SortedSplit& running,
                       std::size_t begin, std::size_t end) {
            const std::uint32_t place = fixed.places[at];
            const std::uint8_t deficit = fixed.deficits[at];
            for (std::size_t from = begin; from < end; from += SortedSplit::kAtOnce) {
                for (std::size_t lane = 0; lane < SortedSplit::kAtOnce; ++lane) {
                    cells[found + lane] = place + running.places[from + lane];
                    deficits[found + lane] =
                        static_cast<std::uint8_t>(deficit + running.deficits[from + lane]);
                }
                found += std::min(end - from, SortedSplit::kAtOnce);
            }
        };
        const int middle = high / 2;
        const std::size_t rows = first.within(middle);
        for (std::size_t row = 0; row < rows; ++row) {
            const int own = first.deficits[row];
            add(first, row, second, second.within(low - own), second.within(high - own));
        }
        const std::size_t columns = second.within(high - middle - 1);
        for (std::size_t column = 0; column < columns; ++column) {
            const int own = second.deficits[column];
            add(second, column, first, std::max(rows, first.within(low - own)),
                first.within(high - own));
        }
        return found;
    }

  private:
    // Units by which a pair goes deeper at a time, and steps of that size that it may take.
    static constexpr int kStepUnits = 4;
    static constexpr std::size_t kSteps = kMaxNarrowSubItems / kStepUnits;
    static_assert(kSteps == kConvolved);
    static constexpr std::size_t kDepth = kSteps * kStepUnits;
    static_assert((kSteps - 1) * kStepUnits - 1 < kFullDeficit);
    static constexpr float kTooDeep = std::numeric_limits<float>::infinity();
    using LineCounts = std::array<float, kSteps>;

    // A split that is not there has one sub-item, of no deficit.
    void sort(const Deficits& deficits, const Kernels& kernels, std::size_t split,
              std::size_t stride) {
        SortedSplit& sorted = sorted_[split];
        if (split >= layout_.num_splits) {
            sorted.places[0] = 0;
            sorted.deficits[0] = 0;
            sorted.within_.fill(1);
            return;
        }
        const std::uint8_t* values = deficits.of_split(split);
        std::array<std::uint8_t, kSelectRoom> ids;
        // A full deficit stands for anything.
        const std::size_t count = kernels.select(values, kFullDeficit - 1, ids.data());
        std::array<std::uint16_t, kMaxNarrowSubItems + 1> next{};
        for (std::size_t at = 0; at < count; ++at) ++next[values[ids[at]] + 1u];
        std::partial_sum(next.begin(), next.end(), next.begin());
        std::copy_n(next.begin() + 1, kDepth, sorted.within_.begin());
        for (std::size_t at = 0; at < count; ++at) {
            const std::uint8_t deficit = values[ids[at]];
            const std::size_t place = next[deficit]++;
            sorted.places[place] = static_cast<std::uint32_t>(ids[at] * stride);
            sorted.deficits[place] = deficit;
        }
    }

    // How many lines the cells of a pair have that it gains with each step, about.
    void count_lines(const Kernels& kernels, std::size_t pair) {
        const SortedSplit& first = sorted_[2 * pair];
        const SortedSplit& second = sorted_[2 * pair + 1];
        std::array<float, 2 * kSteps> within{};  // zeros first: nothing is within less than 0
        for (std::size_t step = 0; step < kSteps; ++step)
            within[kSteps + step] = second.within_[kStepUnits * step + kStepUnits / 2];
        std::array<float, kSteps> counts;
        std::size_t before = 0;
        for (std::size_t step = 0; step < kSteps; ++step) {
            const std::size_t up_to = first.within_[kStepUnits * step + kStepUnits - 1];
            counts[step] = static_cast<float>(up_to - before);
            before = up_to;
        }
        LineCounts lines;
        kernels.convolve(counts.data(), within.data() + kSteps, lines.data());
        const auto per_cell = static_cast<float>(layout_.pairs[pair].lines_per_cell());
        for (std::size_t step = kSteps - 1; step > 0; --step)
            lines[step] = per_cell * (lines[step] - lines[step - 1]);
        lines[0] *= per_cell;
        lines_at_[pair] = lines;
    }

    void choose(int limit, double most_lines) {
        num_steps_ = 0;
        std::array<float, kMostPairs> costs;  // of each pair's next step
        std::array<std::size_t, kMostPairs> next{};
        for (std::size_t pair = 0; pair < num_pairs_; ++pair) costs[pair] = lines_at_[pair][0];
        double total = 0.0;
        while (covers() < limit) {
            const auto end = costs.begin() + static_cast<std::ptrdiff_t>(num_pairs_);
            const auto cheapest =
                static_cast<std::size_t>(std::min_element(costs.begin(), end) - costs.begin());
            total += static_cast<double>(costs[cheapest]);
            if (!(total <= most_lines)) return;
            path_[num_steps_] = static_cast<std::uint8_t>(cheapest);
            lines_[num_steps_++] = total;
            const std::size_t step = ++next[cheapest];
            // Never as deep as a full deficit: it stands for anything, and such sub-items are not
            // among the sorted ones.
            costs[cheapest] = step + 1 < kSteps ? lines_at_[cheapest][step] : kTooDeep;
        }
    }

    const CellLayout& layout_;
    std::size_t num_pairs_;
    // None of this is filled beforehand: that would take as long as a step of the plan.
    std::array<SortedSplit, 2 * kMostPairs> sorted_;
    std::array<LineCounts, kMostPairs> lines_at_;  // [pair][step]
    std::size_t num_steps_ = 0;
    std::array<std::uint8_t, kMostPairs * kSteps> path_;  // [step]: the pair that goes deeper
    std::array<double, kMostPairs * kSteps> lines_;       // [step]: lines that are then visited
};

}  // namespace recprune
