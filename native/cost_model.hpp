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

    // Whether cells may be faster than a scan: if not, they are not even counted.
    bool cells_may_pay() const { return costs_.cells + finding() < scan(); }

    // Whether scoring the allowed items one by one is the fastest.
    bool few_are_allowed(std::size_t num_allowed) const {
        return num_allowed * kSelective < num_items_;
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
    // If only one item in so many is allowed, these are scored one by one.
    static constexpr std::size_t kSelective = 32;
    // Lines of a first round: so many for a catalogue of so many items if so many are wanted. More
    // for a larger catalogue, whose cells have more lines, and for a larger K.
    static constexpr double kFirstRoundLines = 250.0;
    static constexpr double kFirstRoundItems = 1e6;
    static constexpr std::size_t kFirstRoundK = 10;
    static constexpr double kFirstRoundPower = 0.5;

    double items() const { return static_cast<double>(num_items_); }
    double scan() const {
        return costs_.scanned_item * items() * static_cast<double>(num_splits_) / kUsualSplits;
    }
    double finding() const { return costs_.found_item * static_cast<double>(k_); }

    const Costs& costs_;
    std::size_t num_items_;
    std::size_t num_splits_;
    std::size_t k_;
};

}  // namespace recprune
