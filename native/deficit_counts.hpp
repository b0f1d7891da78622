// A threshold without a score. Once as many items are counted as are wanted, none with a larger
// deficit than theirs can be among the best.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "deficits.hpp"

namespace recprune {

class DeficitCounts {
  public:
    explicit DeficitCounts(std::size_t wanted) : wanted_(wanted) {}

    // Counts an item whose deficit is at most so many units.
    void add(int units) {
        ++fresh_;
        if (units < kFullDeficit) ++counts_[static_cast<std::size_t>(units)];
    }

    // Whether enough has come since the last look to make another worth its while.
    bool worth_a_look() const { return fresh_ * kLooks >= wanted_; }

    // So many units hold the deficits of as many items as are wanted; kFullDeficit if of fewer.
    int look() {
        fresh_ = 0;
        std::size_t total = 0;
        int units = 0;
        for (; units < kFullDeficit && total < wanted_; ++units)
            total += counts_[static_cast<std::size_t>(units)];
        return total < wanted_ ? kFullDeficit : units - 1;
    }

    // Units have become smaller: what was one is now `ratio`.
    void rescale(double ratio) {
        const auto before = counts_;
        counts_.fill(0);
        for (std::size_t units = 0; units < before.size(); ++units) {
            const double now = std::ceil(static_cast<double>(units) * ratio * (1.0 + 1e-12));
            if (now < kFullDeficit) counts_[static_cast<std::size_t>(now)] += before[units];
        }
    }

  private:
    static constexpr std::size_t kLooks = 16;  // while as many items come as are wanted

    std::size_t wanted_;
    std::size_t fresh_ = 0;  // counted since the last look
    std::array<std::uint32_t, kFullDeficit> counts_{};
};

}  // namespace recprune
