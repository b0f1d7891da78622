// How far below the best conceivable score the K-th best item will be, guessed from the sub-item
// scores alone: a search that knows it beforehand need not look for a first threshold. No bound
// hangs on the guess.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <span>
#include <vector>

#include "kernels/kernels.hpp"

namespace recprune {

// Something that adds to an item's deficit: values, of which each has a share of the items.
struct DeficitPart {
    const float* values;   // as high as `highest`, or lower: the deficit is the difference
    const float* weights;  // which add up to 1
    std::size_t count;
    float highest;
};

// Deficits of different splits are taken to be independent. Then the probability that their sum is
// at most x follows from the moments of e^(−s · deficit), by a saddle-point approximation
// (Lugannani and Rice 1980; Daniels 1954): P ≈ e^(K(s) + s·x) / (s √(2π v)), where K(s) is the sum
// of the logarithms of the means, and s is such that x is the mean under that tilt and v the
// variance.
class SlackPrediction {
  public:
    SlackPrediction(const Kernels& kernels, std::span<const DeficitPart> parts)
        : kernels_(kernels), parts_(parts) {}

    // The deficit that this share of all items is within.
    double within(double share) const {
        const Tilted plain = tilted(0.0);
        if (share >= kLargeShare || plain.variance <= 0.0) return plain.mean;
        const double wanted = std::log(share);
        // As if sums were normally distributed; then a few steps of Newton's method.
        double tilt = std::sqrt(-2.0 * wanted / plain.variance);
        Tilted at = plain;
        for (int step = 0; step < kSteps; ++step) {
            at = tilted(tilt);
            if (at.variance <= kNoVariance * plain.variance) return at.mean;
            const double missing =
                at.log_mean + tilt * at.mean - wanted -
                0.5 * std::log(2.0 * std::numbers::pi * at.variance * tilt * tilt);
            const double change = missing / (tilt * at.variance + 1.0 / tilt);
            const double next = std::clamp(tilt + change, tilt / 2.0, 2.0 * tilt);
            at.mean -= at.variance * (next - tilt);
            tilt = next;
            if (std::abs(change) < kCloseEnough * tilt) break;
        }
        return std::max(at.mean, 0.0);
    }

  private:
    // A share of the items that is no tail of the distribution.
    static constexpr double kLargeShare = 0.2;
    static constexpr int kSteps = 4;
    static constexpr double kCloseEnough = 0.05;
    static constexpr double kNoVariance = 1e-9;

    struct Tilted {
        double log_mean = 0.0;
        double mean = 0.0;
        double variance = 0.0;
    };

    Tilted tilted(double tilt) const {
        Tilted total;
        for (const DeficitPart& part : parts_) {
            float sums[3];
            kernels_.tilt(part.values, part.weights, part.count, part.highest,
                          static_cast<float>(tilt), sums);
            if (!(sums[0] > 0.0f)) continue;  // nothing is left of it under such a tilt
            const double mean = static_cast<double>(sums[1]) / sums[0];
            total.log_mean += std::log(static_cast<double>(sums[0]));
            total.mean += mean;
            total.variance += std::max(static_cast<double>(sums[2]) / sums[0] - mean * mean, 0.0);
        }
        return total;
    }

    const Kernels& kernels_;
    std::span<const DeficitPart> parts_;
};

// The share of all items that has each sub-item, [num_splits][num_sub_items], from some of them.
inline std::vector<float> sub_item_shares(std::span<const std::uint8_t> codes,
                                          std::size_t num_items, std::size_t num_splits,
                                          std::size_t num_sub_items) {
    constexpr std::size_t kSample = 65'536;
    const std::size_t stride = std::max<std::size_t>(num_items / kSample, 1);
    std::vector<float> shares(num_splits * num_sub_items, 0.0f);
    std::size_t count = 0;
    for (std::size_t item = 0; item < num_items; item += stride, ++count)
        for (std::size_t split = 0; split < num_splits; ++split) {
            // Codes of an opened folder are checked later.
            const std::size_t code = codes[item * num_splits + split];
            if (code < num_sub_items) shares[split * num_sub_items + code] += 1.0f;
        }
    for (float& share : shares) share /= static_cast<float>(std::max<std::size_t>(count, 1));
    return shares;
}

// Biases that stand for all: of some, sorted, every so many.
inline std::vector<float> bias_sample(std::span<const float> biases) {
    constexpr std::size_t kSample = 65'536;
    constexpr std::size_t kKept = 256;
    std::vector<float> sample;
    for (std::size_t at = 0; at < biases.size();
         at += std::max<std::size_t>(biases.size() / kSample, 1))
        if (std::isfinite(biases[at])) sample.push_back(biases[at]);
    std::sort(sample.begin(), sample.end());
    std::vector<float> kept;
    const std::size_t stride = std::max<std::size_t>(sample.size() / kKept, 1);
    for (std::size_t at = stride / 2; at < sample.size(); at += stride) kept.push_back(sample[at]);
    return kept;
}

}  // namespace recprune
