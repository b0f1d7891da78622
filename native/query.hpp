// One question to the index, what may answer it, and how far the search may go.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "item_set.hpp"
#include "top_k.hpp"

namespace recprune {

constexpr std::size_t kWordBits = 64;  // items of a word of an allow mask

struct Query {
    const float* sub_item_scores;  // S, [num_splits][num_sub_items]
    std::size_t k;
    const ItemSet* excluded = nullptr;     // not to be returned, or null: nothing
    const ItemSet* boosted = nullptr;      // the same for an engine: these are scored without it
    const std::uint64_t* allow = nullptr;  // a bit per item, or null: all
    std::size_t num_allowed = 0;           // how many these are
    const float* item_bias = nullptr;      // added to each item's score, or null
    float highest_bias = 0.0f;

    bool may_return(Item item) const {
        if (allow && !((allow[item / kWordBits] >> (item % kWordBits)) & 1)) return false;
        return !(excluded && excluded->contains(item)) && !(boosted && boosted->contains(item));
    }

    std::size_t num_hidden() const {
        return (excluded ? excluded->size() : 0) + (boosted ? boosted->size() : 0);
    }

    // The last addition of every score, in every method.
    float with_bias(float score, Item item) const {
        return item_bias ? score + item_bias[item] : score;
    }
};

// Reasons to stop early. Unsafe, so only on request.
struct Limits {
    std::int64_t max_steps = std::numeric_limits<std::int64_t>::max();
    // θ is raised by this share of the way to the best conceivable score; 0 is safe.
    double over_inflation = 0.0;
    std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();

    bool has_deadline() const { return deadline != std::chrono::steady_clock::time_point::max(); }
    bool expired() const { return has_deadline() && std::chrono::steady_clock::now() >= deadline; }
};

// What a search did. Unless it is exact, `upper_bound` limits the score of every item that was not
// considered.
struct Stats {
    bool exact = true;
    std::int64_t steps = 0;
    std::int64_t items_scored = 0;
    std::int64_t items_touched = 0;  // passed through a filter, scored or not
    std::int64_t bytes_touched = 0;  // of codes, keys and posting lists
    double upper_bound = -std::numeric_limits<double>::infinity();
    // Marks for the sub-item ids that were visited, [num_splits][num_sub_items]; null: none.
    std::uint8_t* visited = nullptr;

    // An item that was not scored is either above no bound that it was held against, or it was
    // rejected for lying below the threshold. So the threshold itself is the least honest bound.
    void set_bound(double bound, bool safe, bool full, double threshold) {
        exact = safe && full;
        upper_bound = full ? std::max(bound, threshold) : bound;
    }
};

}  // namespace recprune
