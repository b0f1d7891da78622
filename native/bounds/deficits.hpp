// How far a sub-item's score lies below the best of its split, in small integers that never
// exaggerate: what the bounds of a scan and of cells are made of. docs/search.md has the proofs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/kernels.hpp"
#include "query.hpp"

namespace recprune {

// Units that the slack is mapped to: nearly all that a byte holds, and room for "more".
constexpr int kTargetLimit = 250;

// An item's deficit is Σ_m (max_m − S[m, code_m]) ≥ 0. It can enter the top K only if that is at
// most the slack: Σ_m max_m (+ highest bias) − θ, plus a margin for the rounding of float32 sums.
class Deficits {
  public:
    Deficits(const Query& query, const Kernels& kernels, std::size_t num_splits,
             std::size_t num_sub_items)
        : kernels_(kernels),
          scores_(query.sub_item_scores),
          num_splits_(num_splits),
          num_sub_items_(num_sub_items),
          maxima_(num_splits),
          quantised_(num_splits * kMaxNarrowSubItems, kFullDeficit) {
        double magnitude = std::abs(static_cast<double>(query.highest_bias));
        best_possible_ = query.item_bias ? query.highest_bias : 0.0;
        for (std::size_t split = 0; split < num_splits; ++split) {
            const float* row = scores_ + split * num_sub_items;
            float lowest;
            float highest;
            kernels.extremes(row, num_sub_items, &lowest, &highest);
            maxima_[split] = highest;
            best_possible_ += highest;
            range_ += static_cast<double>(highest) - lowest;
            magnitude += std::max(std::abs(static_cast<double>(highest)),
                                  std::abs(static_cast<double>(lowest)));
        }
        // num_splits additions (bias included), each off by at most half a unit in the last place
        // of a partial sum that Σ max|S| bounds.
        const double additions = static_cast<double>(num_splits);
        rounding_ = additions * kHalfUnit * kHigherOrders * magnitude + kSmallestFloat;
    }

    // The best sub-item score of a split.
    float highest(std::size_t split) const { return maxima_[split]; }
    // No score can be higher, whatever the rounding.
    double best_possible() const { return best_possible_ + rounding_; }
    // Sum over splits of the distance between best and worst: the largest deficit conceivable.
    double range() const { return range_; }

    // Every item whose float32 score is ≥ threshold has a real deficit of at most this.
    double slack(double threshold, double over_inflation = 0.0) const {
        const double whole = best_possible_ - threshold + rounding_;
        return whole * (1.0 - over_inflation) + std::abs(best_possible_) * kDoubleMargin;
    }

    // The same if only so much is known: as many items as are wanted have deficits of at most so
    // many units. Their scores are rounded too, so the margin counts twice.
    double slack_of_counted(int units) const {
        return units / units_ * (1.0 + kCountedMargin) + 2.0 * rounding_;
    }

    // Maps the given slack to `target` (and anything larger than 255 units to 255).
    void quantise(double slack, int target = kTargetLimit) {
        units_ = slack > kLeastSlack ? target / slack : kMostUnits;
        const double scale = units_ * (1.0 - kScaleMargin);
        for (std::size_t split = 0; split < num_splits_; ++split) {
            kernels_.quantise(scores_ + split * num_sub_items_, num_sub_items_, maxima_[split],
                              scale, &quantised_[split * kMaxNarrowSubItems]);
        }
    }

    // The largest sum of quantised deficits that an item within this slack can have.
    int limit(double slack) const {
        if (slack < 0.0) return -1;
        const double units = slack * units_;
        return units < kBeyondAllSums ? static_cast<int>(units) : kBeyondAllSums;
    }

    // An item with this sum of quantised deficits, none of them full, has a real one of at most so
    // many units.
    int most_units(int sum) const { return sum + static_cast<int>(num_splits_); }

    // Units of deficit in one unit of score.
    double units() const { return units_; }

    // 256 deficits for each split, one split after the other.
    const std::uint8_t* of_split(std::size_t split) const {
        return quantised_.data() + split * kMaxNarrowSubItems;
    }

  private:
    // What rounding may add up to; docs/search.md has the proofs.
    static constexpr double kHalfUnit = 0x1p-24;        // of float32: a unit in the last place / 2
    static constexpr double kHigherOrders = 1.01;       // of the errors of a sum of float32
    static constexpr double kSmallestFloat = 0x1p-149;  // what underflow could hide
    static constexpr double kDoubleMargin = 0x1p-48;    // for float64 itself: sixteen half units
    static constexpr double kScaleMargin = 1e-12;       // rounding may only lower a deficit
    static constexpr double kCountedMargin = 1e-11;     // covers kScaleMargin
    // A slack of nothing still needs finite arithmetic: then any deficit at all is "full".
    static constexpr double kLeastSlack = 1e-290;
    static constexpr double kMostUnits = 1e292;
    // Units, many more than the deficits of an item add up to: 255 for each of its splits.
    static constexpr int kBeyondAllSums = 1'000'000;

    const Kernels& kernels_;
    const float* scores_;
    std::size_t num_splits_;
    std::size_t num_sub_items_;
    std::vector<float> maxima_;
    std::vector<std::uint8_t> quantised_;
    double best_possible_ = 0.0;
    double range_ = 0.0;
    double rounding_ = 0.0;
    double units_ = 1.0;
};

}  // namespace recprune
