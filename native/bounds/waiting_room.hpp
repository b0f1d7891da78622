// Where many items are wanted, the threshold is low for long, and most of those who reach it would
// be scored and sorted in vain. Here they wait, and only their deficits are counted: once as many
// are counted as are wanted, none with a larger deficit than theirs can be among the best. That is
// a threshold without a score; docs/search.md has the proof.
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
struct Waiting {
    std::uint32_t block;
    std::uint8_t lane;
    std::uint8_t list;
    std::uint8_t deficit;  // at least so many units
};

// A thread has one at a time.
class WaitingRoom {
  public:
    explicit WaitingRoom(std::size_t wanted) : wanted_(wanted), scratch_(scratch()) {
        scratch_.waiting.clear();
    }

    // An item whose deficit is at most so many units. Every item comes at most once.
    void enter(const Waiting& item, int most_units) {
        ++fresh_;
        if (most_units < kFullDeficit) ++counts_[static_cast<std::size_t>(most_units)];
        scratch_.waiting.push_back(item);
    }

    // Whether enough have come since the last look to make another worth its while.
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

    // Units have become smaller: what was one is now `ratio`. What deficits are at most is rounded
    // up, what they are at least is rounded down.
    void rescale(double ratio) {
        const auto before = counts_;
        counts_.fill(0);
        for (std::size_t units = 0; units < before.size(); ++units) {
            const double now = std::ceil(static_cast<double>(units) * ratio * (1.0 + 1e-12));
            if (now < kFullDeficit) counts_[static_cast<std::size_t>(now)] += before[units];
        }
        for (Waiting& item : scratch_.waiting)
            item.deficit = static_cast<std::uint8_t>(
                std::min(item.deficit * ratio * (1.0 - 1e-12), double{kFullDeficit}));
    }

    void send_away_beyond(int limit) {
        std::erase_if(scratch_.waiting, [=](const Waiting& item) { return item.deficit > limit; });
    }

    // There may be ties by the million: those who could wait must not fill the memory.
    bool is_crowded() const { return scratch_.waiting.size() > kRoom + 4 * wanted_; }

    // Empties the room. Returns those within the limit, the best first; valid until the next call.
    std::span<const Waiting> call_in(int limit) {
        if (scratch_.waiting.empty()) return {};
        send_away_beyond(limit);
        std::array<std::uint32_t, kFullDeficit + 2> places{};
        for (const Waiting& item : scratch_.waiting) ++places[item.deficit + 1u];
        std::partial_sum(places.begin(), places.end(), places.begin());
        scratch_.sorted.resize(scratch_.waiting.size());
        for (const Waiting& item : scratch_.waiting) scratch_.sorted[places[item.deficit]++] = item;
        scratch_.waiting.clear();
        return scratch_.sorted;
    }

  private:
    static constexpr std::size_t kLooks = 16;  // while as many come as are wanted
    static constexpr std::size_t kRoom = 4096;

    // Kept between queries: fresh memory would cost more than the search.
    struct Scratch {
        std::vector<Waiting> waiting;
        std::vector<Waiting> sorted;
    };
    static Scratch& scratch() {
        thread_local Scratch scratch;
        return scratch;
    }

    std::size_t wanted_;
    std::size_t fresh_ = 0;  // came since the last look
    std::array<std::uint32_t, kFullDeficit> counts_{};
    Scratch& scratch_;
};

}  // namespace recprune
