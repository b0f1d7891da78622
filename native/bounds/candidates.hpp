// Where many items are wanted, the threshold is low for long, and most items that reach it would be
// scored and sorted in vain. Here they are kept as candidates, and only their deficits are counted:
// once as many are counted as are wanted, no item with a larger deficit than theirs can be among
// the best. That is a threshold without a score; docs/search.md has the proof.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "bounds/deficits.hpp"

namespace recprune {

// An item by its place in the lists.
struct Candidate {
    std::uint32_t block;
    std::uint8_t lane;
    std::uint8_t list;
    std::uint8_t deficit;  // at least so many units
};

// A thread has one at a time.
class CandidateBuffer {
  public:
    explicit CandidateBuffer(std::size_t wanted) : wanted_(wanted), scratch_(scratch()) {
        scratch_.candidates.clear();
    }

    // Adds an item whose deficit is at most so many units. Every item comes at most once.
    void add(const Candidate& candidate, int most_units) {
        ++fresh_;
        if (most_units < kFullDeficit) ++counts_[static_cast<std::size_t>(most_units)];
        scratch_.candidates.push_back(candidate);
    }

    // Whether enough have come since the last count to make another worth its while.
    bool count_is_due() const { return fresh_ * kCounts >= wanted_; }

    // So many units hold the deficits of as many items as are wanted; kFullDeficit if of fewer.
    int count() {
        fresh_ = 0;
        std::size_t total = 0;
        int units = 0;
        for (; units < kFullDeficit && total < wanted_; ++units)
            total += counts_[static_cast<std::size_t>(units)];
        return total < wanted_ ? kFullDeficit : units - 1;
    }

    // Units have become smaller: what was one is now `ratio`. What deficits are at most is rounded
    // up, what they are at least is rounded down.
    void rescale(double ratio) {
        const auto before = counts_;
        counts_.fill(0);
        for (std::size_t units = 0; units < before.size(); ++units) {
            const double now =
                std::ceil(static_cast<double>(units) * ratio * (1.0 + kRescaleMargin));
            if (now < kFullDeficit) counts_[static_cast<std::size_t>(now)] += before[units];
        }
        for (Candidate& candidate : scratch_.candidates)
            candidate.deficit = static_cast<std::uint8_t>(
                std::min(candidate.deficit * ratio * (1.0 - kRescaleMargin), double{kFullDeficit}));
    }

    void discard_beyond(int limit) {
        std::erase_if(scratch_.candidates,
                      [=](const Candidate& candidate) { return candidate.deficit > limit; });
    }

    // There may be ties by the million: candidates must not fill the memory.
    bool is_full() const { return scratch_.candidates.size() > kRoom + kRoomFactor * wanted_; }

    // Empties the buffer. Returns what is within the limit, the best first; valid until the next
    // call.
    std::span<const Candidate> take(int limit) {
        if (scratch_.candidates.empty()) return {};
        discard_beyond(limit);
        std::array<std::uint32_t, kFullDeficit + 2> places{};
        for (const Candidate& candidate : scratch_.candidates) ++places[candidate.deficit + 1u];
        std::partial_sum(places.begin(), places.end(), places.begin());
        scratch_.sorted.resize(scratch_.candidates.size());
        for (const Candidate& candidate : scratch_.candidates)
            scratch_.sorted[places[candidate.deficit]++] = candidate;
        scratch_.candidates.clear();
        return scratch_.sorted;
    }

  private:
    // Counts while as many items come as are wanted. Found by trial.
    static constexpr std::size_t kCounts = 16;
    // Candidates that are kept: so many, and so many for each item that is wanted. Usually about
    // twice as many are left as are wanted; the rest is for ties.
    static constexpr std::size_t kRoom = 4096;
    static constexpr std::size_t kRoomFactor = 4;
    // Covers the rounding of float64.
    static constexpr double kRescaleMargin = 1e-12;

    // Kept between queries: fresh memory would cost more than the search.
    struct Scratch {
        std::vector<Candidate> candidates;
        std::vector<Candidate> sorted;
    };
    static Scratch& scratch() {
        thread_local Scratch scratch;
        return scratch;
    }

    std::size_t wanted_;
    std::size_t fresh_ = 0;  // came since the last count
    std::array<std::uint32_t, kFullDeficit> counts_{};
    Scratch& scratch_;
};

}  // namespace recprune
