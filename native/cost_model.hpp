// When which engine pays. No result hangs on it. What engines cost with an instruction set is
// fitted to measurements by benchmarks/costs.py; the constants here were found by trial, and
// `recprune reproduce --only shapes` shows where the choice errs.
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
    // `num_allowed` are all items where no mask says otherwise, `together` as many as one word of
    // the mask has, if it has any.
    CostModel(const Costs& costs, std::size_t num_items, std::size_t num_splits, bool has_lists,
              std::size_t k, std::size_t num_allowed, double together)
        : costs_(costs),
          num_items_(num_items),
          num_splits_(num_splits),
          has_lists_(has_lists),
          k_(k),
          num_allowed_(num_allowed),
          together_(together) {}

    // Whether items are filtered fastest as they come, by their codes. A scan scores many in vain
    // where it cannot count candidates first, above all if a share of the items is hidden: then it
    // loses to that in ever larger catalogues, the more are wanted.
    bool codes_come_first(double hidden_share) const {
        const double more = kItemsPerHiddenWanted * hidden_share * static_cast<double>(k_);
        return items() < static_cast<double>(costs_.few_items) + more;
    }

    // Whether cells may be faster than a look at all items: if not, they are not even counted.
    bool cells_may_pay() const { return costs_.cells + finding() < all_items(); }

    // Whether queries answer faster if they visit their cells together, where so many visit a cell
    // of so many lines. Alone, each has all its lines from memory.
    static bool sharing_pays(double visits, double lines_of_cell) {
        return kVisit / lines_of_cell + kLineFromMemory / std::max(visits, 1.0) < kLineFromMemory;
    }

    // Whether scoring the allowed items one by one is faster than a look at all.
    bool few_are_allowed() const { return allowed() < all_items(); }
    // The same for cells, before anything is planned: under a mask they visit more lines than for
    // the best item of all.
    bool very_few_are_allowed() const {
        return allowed() < costs_.cells + costs_.line * kFewestLines;
    }

    CellSettings cell_settings(double slack, bool may_leave) const {
        const double more = std::max(items() / kFirstRoundItems, 1.0);
        const double wanted = static_cast<double>(std::max(k_, kFirstRoundK)) / kFirstRoundK;
        const double first =
            kFirstRoundLines * std::pow(more, kFirstRoundPower) * std::sqrt(wanted);
        const double otherwise = std::min(all_items(), allowed());
        const double most = (otherwise - costs_.cells - finding()) / costs_.line;
        return {slack, first, may_leave ? most : std::numeric_limits<double>::infinity()};
    }

  private:
    // Items that are usually wanted.
    static constexpr double kUsualWanted = 10.0;
    // A scan takes longer, the more splits there are: each rejects less.
    static constexpr double kScanPower = 1.5;
    // Lines that cells visit for the best item, about: of 300,000 to 2 million items, 3,000 to
    // 5,000.
    static constexpr double kFewestLines = 4000.0;
    // Allowed items of a word of the mask from which on neighbours cost less than others: their
    // codes share cache lines. All 64 of a word cost an eighth each.
    static constexpr double kScattered = 8.0;
    // Items of a catalogue for each that is wanted: see codes_come_first.
    static constexpr double kItemsPerHiddenWanted = 3000.0;
    // Lines of a first round: so many for a catalogue of so many items if so many are wanted. More
    // for a larger catalogue, whose cells have more lines, and for a larger K.
    static constexpr double kFirstRoundLines = 250.0;
    static constexpr double kFirstRoundItems = 1e6;
    static constexpr std::size_t kFirstRoundK = 10;
    static constexpr double kFirstRoundPower = 0.5;
    // Nanoseconds for a query's visit to a cell, beside its lines, where queries visit cells
    // together; and for a line that comes from memory, beside filtering it.
    static constexpr double kVisit = 45.0;
    static constexpr double kLineFromMemory = 3.5;

    double items() const { return static_cast<double>(std::max<std::size_t>(num_items_, 1)); }
    // The best allowed items are among so many of the best of all, which engines come across.
    double wanted() const {
        const double share = static_cast<double>(std::max<std::size_t>(num_allowed_, 1)) / items();
        return static_cast<double>(std::max<std::size_t>(k_, 1)) / share;
    }
    // By a scan of the lists or, where there are none, of the codes as they come.
    double all_items() const {
        const double longer = static_cast<double>(num_splits_) / kUsualSplits;
        if (!has_lists_) return costs_.filtered_code * items() * longer;
        return costs_.scan + costs_.scanned_item * items() *
                                 std::pow(wanted() / kUsualWanted, costs_.scan_growth) *
                                 std::pow(longer, kScanPower);
    }
    double allowed() const {
        const double scattered = std::min(kScattered / std::max(together_, 1.0), 1.0);
        return costs_.allowed_item * static_cast<double>(num_allowed_) * scattered;
    }
    double finding() const { return costs_.found_item * wanted(); }

    const Costs& costs_;
    std::size_t num_items_;
    std::size_t num_splits_;
    bool has_lists_;
    std::size_t k_;
    std::size_t num_allowed_;
    double together_;
};

}  // namespace recprune
