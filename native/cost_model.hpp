// When which engine pays. All constants were found by trial; benchmarks/search.py shows their
// effect, and no result hangs on them.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "bounds/deficits.hpp"
#include "engines/cells.hpp"
#include "kernels/kernels.hpp"
#include "layouts/cells.hpp"

namespace recprune {

// The costs of one query, in nanoseconds.
class CostModel {
  public:
    CostModel(const Costs& costs, std::size_t num_items, std::size_t k)
        : costs_(costs), num_items_(num_items), k_(k) {}

    // Whether items are filtered fastest as they come, by their codes. A scan that is slow, or that
    // cannot count candidates before it scores them, loses to that in ever larger catalogues, the
    // more are wanted.
    bool codes_come_first(bool scan_counts) const {
        const bool scans_many_well = scan_counts && costs_.lists_are_cheap;
        return num_items_ < costs_.few_items + (scans_many_well ? 0 : kItemsPerWanted * k_);
    }

    // Whether cells may be faster than a scan: if not, they are not even counted.
    bool cells_may_pay() const {
        return num_items_ >= kFewItems && finding() < kMostFinding * scan();
    }

    // Whether a few lists are the cheapest source of a first threshold, and not a few cells.
    bool lists_come_first() const { return costs_.lists_are_cheap && num_items_ < kManyItems; }
    std::size_t first_lists() const {
        return std::min(kListsPerItem * k_ + kFewestLists, kMostLists);
    }

    // Whether scoring the allowed items one by one is the fastest.
    bool few_are_allowed(std::size_t num_allowed) const {
        return num_allowed * costs_.selective < num_items_;
    }

    CellSettings cell_settings(bool may_scan) const {
        const double smaller = kFirstRoundItems / std::max(items(), kFirstRoundItems);
        const double wanted = static_cast<double>(std::max(k_, kFirstRoundK)) / kFirstRoundK;
        const double first =
            kFirstRoundCells * std::pow(smaller, kFirstRoundPower) * std::sqrt(wanted);
        const double most = (scan() - finding()) / cell();
        return {first, most, may_scan ? most : std::numeric_limits<double>::infinity()};
    }

  private:
    // Items of a catalogue for each that is wanted: see codes_come_first.
    static constexpr std::size_t kItemsPerWanted = 3000;
    // Items of a catalogue: fewer are scanned in less time than it takes to choose cells.
    static constexpr std::size_t kFewItems = 50'000;
    // Items from which on a few cells are a cheaper first threshold than a few lists.
    static constexpr std::size_t kManyItems = 4'000'000;
    // Lists that are scanned for a first threshold: so many for each item that is wanted, and a
    // few.
    static constexpr std::size_t kListsPerItem = 2;
    static constexpr std::size_t kFewestLists = 3;
    static constexpr std::size_t kMostLists = 16;
    // The share of a scan's time from which on the found items alone rule cells out.
    static constexpr double kMostFinding = 0.75;
    // Cells of a first round: so many for a catalogue of so many items if so many are wanted. Fewer
    // for a larger catalogue, as each has more items; more for a larger K.
    static constexpr double kFirstRoundCells = 800.0;
    static constexpr double kFirstRoundItems = 1e6;
    static constexpr std::size_t kFirstRoundK = 10;
    static constexpr double kFirstRoundPower = 0.3;

    double items() const { return static_cast<double>(num_items_); }
    double scan() const { return costs_.scanned_item * items(); }
    double cell() const {
        return costs_.cell + costs_.cell_item * (items() / static_cast<double>(kCells));
    }
    double finding() const { return costs_.found_item * static_cast<double>(k_); }

    const Costs& costs_;
    std::size_t num_items_;
    std::size_t k_;
};

// Cells of one pair by their deficit in buckets, and a last entry for those that are not counted.
using BucketCells = std::array<float, kBuckets + 1>;

inline BucketCells count_bucket_cells(const Kernels& kernels, const std::uint8_t* first_deficits,
                                      const std::uint8_t* second_deficits) {
    std::array<float, kBuckets> first;
    std::array<float, 2 * kBuckets> second{};  // zeros first: loops of fixed length are faster
    kernels.count_buckets(first_deficits, first.data());
    kernels.count_buckets(second_deficits, second.data() + kBuckets);
    BucketCells cells;
    for (std::size_t x = 0; x < kBuckets; ++x) {
        float sum = 0.0f;
        for (std::size_t a = 0; a < kBuckets; ++a) sum += first[a] * second[kBuckets + x - a];
        cells[x] = sum;
    }
    cells[kBuckets] = std::numeric_limits<float>::infinity();
    return cells;
}

// Whether a search for everything within the slack may well visit no more than `most_cells`: the
// same units as in CellSearch::choose, but by the bucket. That counts somewhat too many cells,
// rarely twice as many, and costs little. The lists that are done count for nothing.
//
// Pre: most_cells is finite.
inline bool may_be_few_cells(const Deficits& deficits, const Kernels& kernels, double slack,
                             std::span<const std::uint16_t> done, double most_cells) {
    constexpr double kOverestimate = 2.0;
    std::array<std::uint8_t, kMaxNarrowSubItems> first_split;
    std::copy_n(deficits.of_split(0), kMaxNarrowSubItems, first_split.begin());
    const int shared = leave_out(first_split, done);
    std::array<BucketCells, kPairs> cells;
    for (std::size_t pair = 0; pair < kPairs; ++pair)
        cells[pair] = count_bucket_cells(
            kernels, pair == 0 ? first_split.data() : deficits.of_split(2 * pair),
            deficits.of_split(2 * pair + 1));
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

}  // namespace recprune
