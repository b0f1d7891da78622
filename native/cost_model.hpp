// When which engine pays. All constants were found by trial; benchmarks/search.py shows their
// effect, and no result hangs on them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "engines/cells.hpp"
#include "kernels/kernels.hpp"

namespace recprune {

// The costs of one query, in nanoseconds.
class CostModel {
  public:
    CostModel(const Costs& costs, std::size_t num_items, std::size_t num_splits, std::size_t k)
        : costs_(costs), num_items_(num_items), num_splits_(num_splits), k_(k) {}

    // Whether items are filtered fastest as they come, by their codes. A scan that cannot count
    // candidates before it scores them loses to that in ever larger catalogues, the more are
    // wanted.
    bool codes_come_first(bool scan_counts) const {
        return num_items_ < costs_.few_items + (scan_counts ? 0 : kItemsPerWanted * k_);
    }

    // Whether cells may be faster than a scan: if not, they are not even counted.
    bool cells_may_pay() const { return costs_.cells + finding() < scan(); }

    // Whether scoring the allowed items one by one is the fastest.
    bool few_are_allowed(std::size_t num_allowed) const {
        return num_allowed * costs_.selective < num_items_;
    }

    CellSettings cell_settings(double slack, bool may_scan) const {
        const double more = std::max(items() / kFirstRoundItems, 1.0);
        const double wanted = static_cast<double>(std::max(k_, kFirstRoundK)) / kFirstRoundK;
        const double first =
            kFirstRoundLines * std::pow(more, kFirstRoundPower) * std::sqrt(wanted);
        const double most = (scan() - costs_.cells - finding()) / costs_.line;
        return {slack, first, may_scan ? most : std::numeric_limits<double>::infinity()};
    }

  private:
    // Items that are usually wanted.
    static constexpr double kUsualWanted = 10.0;
    // A scan takes longer, the more splits there are: each rejects less.
    static constexpr double kScanPower = 1.5;
    // Items of a catalogue for each that is wanted: see codes_come_first.
    static constexpr std::size_t kItemsPerWanted = 3000;
    // Lines of a first round: so many for a catalogue of so many items if so many are wanted. More
    // for a larger catalogue, whose cells have more lines, and for a larger K.
    static constexpr double kFirstRoundLines = 250.0;
    static constexpr double kFirstRoundItems = 1e6;
    static constexpr std::size_t kFirstRoundK = 10;
    static constexpr double kFirstRoundPower = 0.5;

    double items() const { return static_cast<double>(num_items_); }
    double scan() const {
        const double wanted = static_cast<double>(std::max<std::size_t>(k_, 1)) / kUsualWanted;
        const double longer = static_cast<double>(num_splits_) / kUsualSplits;
        return costs_.scan + costs_.scanned_item * items() * std::pow(wanted, costs_.scan_growth) *
                                 std::pow(longer, kScanPower);
    }
    double finding() const { return costs_.found_item * static_cast<double>(k_); }

    const Costs& costs_;
    std::size_t num_items_;
    std::size_t num_splits_;
    std::size_t k_;
};

}  // namespace recprune
