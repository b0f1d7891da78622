// Boosts: what one query adds to the scores of some items, after everything else.
//
// No engine knows of them. Boosted items are scored one by one before an engine runs, and to that
// engine they are excluded: the best K of two disjoint sets are among the best K of each.
// docs/search.md says why bounds stay true.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "engines/pqtopk.hpp"
#include "item_set.hpp"
#include "query.hpp"
#include "top_k.hpp"

namespace recprune {

// As integers, magnitudes of floats compare like floats, and infinity and NaN are the largest.
// Integers are compared side by side.
inline std::int32_t magnitude_of(float value) {
    return std::bit_cast<std::int32_t>(value) & 0x7FFFFFFF;  // all bits but the sign
}
constexpr std::int32_t kInfiniteMagnitude = 0x7F800000;

// The boosts of one query.
struct Boosts {
    std::span<const std::int64_t> items = {};  // each once
    std::span<const float> values = {};
    const ItemSet* set = nullptr;  // of the items; null: none are boosted

    float largest() const {  // in magnitude
        std::int32_t largest = 0;
        for (float value : values) largest = std::max(largest, magnitude_of(value));
        return std::bit_cast<float>(largest);
    }
};

// The boosts of a batch, checked.
class BatchBoosts {
  public:
    // Ids that the catalogue does not have are refused. These are wider than an index needs: a
    // catalogue in shards may have more items than one index.
    explicit BatchBoosts(std::int64_t num_items) : num_items_(num_items) {}

    // Adds the boosts of one more query, given in any order.
    // Pre: as many items as values.
    // Throws std::invalid_argument for an item that is unknown or there twice, and for a value that
    // is not finite.
    template <class Id>
    void add(std::span<const Id> items, std::span<const float> values) {
        items_.insert(items_.end(), items.begin(), items.end());
        values_.insert(values_.end(), values.begin(), values.end());
        const Boosts added{.items = this->items().last(items.size()),
                           .values = this->values().last(values.size())};
        refuse_unusable(added);
        if (num_items_ < kNoItem) {
            add_to(sets_.emplace_back(), added);
        } else {  // more than an index has: they are cut for shards, and not searched
            IdSet<std::int64_t> wide;
            add_to(wide, added);
        }
        offsets_.push_back(static_cast<std::int64_t>(items_.size()));
    }

    std::span<const std::int64_t> offsets() const { return offsets_; }  // [num_queries + 1]
    std::span<const std::int64_t> items() const { return items_; }
    std::span<const float> values() const { return values_; }

    // Pre: the catalogue is no larger than an index may be.
    Boosts of_query(std::size_t number) const {
        const auto first = static_cast<std::size_t>(offsets_[number]);
        const auto count = static_cast<std::size_t>(offsets_[number + 1]) - first;
        return {items().subspan(first, count), values().subspan(first, count),
                count > 0 ? &sets_[number] : nullptr};
    }

  private:
    bool is_unknown(std::int64_t item) const { return item < 0 || item >= num_items_; }
    static bool is_infinite(float value) { return magnitude_of(value) >= kInfiniteMagnitude; }

    void refuse_unusable(const Boosts& boosts) const {
        bool any = false;  // without a branch for each
        for (std::int64_t item : boosts.items) any |= is_unknown(item);
        for (float value : boosts.values) any |= is_infinite(value);
        for (std::size_t at = 0; any && at < boosts.items.size(); ++at) {
            const std::int64_t item = boosts.items[at];
            if (is_unknown(item))
                refuse("holds " + std::to_string(item) + ", expected 0 to " +
                       std::to_string(num_items_ - 1));
            if (is_infinite(boosts.values[at]))
                refuse("adds " + described(boosts.values[at]) + " to item " + std::to_string(item) +
                       ", expected a finite number");
        }
    }

    template <class Id>
    void add_to(IdSet<Id>& set, const Boosts& boosts) const {
        set.reset(boosts.items.size());
        for (std::int64_t item : boosts.items) {
            if (!set.insert(static_cast<Id>(item)))
                refuse("holds item " + std::to_string(item) + " twice");
        }
    }

    // The query is the one that is being added.
    [[noreturn]] void refuse(const std::string& why) const {
        throw std::invalid_argument("boosts[" + std::to_string(offsets_.size() - 1) + "] " + why);
    }

    static std::string described(float value) {
        if (std::isnan(value)) return "nan";
        return value > 0.0f ? "inf" : "-inf";
    }

    std::int64_t num_items_;
    std::vector<std::int64_t> offsets_{0};
    std::vector<std::int64_t> items_;  // one query after the other
    std::vector<float> values_;
    std::vector<ItemSet> sets_;  // of every query: found out what is there twice, hides it later
};

// The boosted items that a query may return, and their scores: apart, to be compared side by side.
struct BoostedItems {
    std::span<const Item> items = {};
    std::span<const float> scores = {};

    // A score that K of them reach, and with them the top K of all; −∞ if they are fewer.
    float floor(std::size_t k) const {
        if (k == 0 || scores.size() < k) return -std::numeric_limits<float>::infinity();
        return score_reached_by(k, scores);
    }

    void offer_to(TopK& top) const {
        for (std::size_t at = 0; at < items.size(); ++at) top.offer(scores[at], items[at]);
        top.settle();
    }
};

// Scores the boosted items that the query may return; valid until the thread's next call.
//
// Pre: the query does not hide them yet.
template <class Code>
BoostedItems score_boosted(std::span<const Code> codes, std::size_t num_splits,
                           std::size_t num_sub_items, const Query& query, const Boosts& boosts) {
    thread_local std::vector<Item> item_scratch;
    thread_local std::vector<float> score_scratch;
    item_scratch.resize(boosts.items.size());
    score_scratch.resize(boosts.items.size());
    Item* items = item_scratch.data();  // to look them up once
    float* scores = score_scratch.data();
    // Codes lie all over memory: all are on their way before the first is read. Here, because
    // compilers leave out calls of functions that do nothing else.
    for (std::int64_t item : boosts.items)
        __builtin_prefetch(&codes[static_cast<std::size_t>(item) * num_splits]);
    std::size_t count = 0;
    for (std::size_t at = 0; at < boosts.items.size(); ++at) {
        const auto item = static_cast<Item>(boosts.items[at]);
        items[count] = item;
        scores[count] = boosts.values[at];
        count += query.may_return(item);
    }
    auto run = [&](auto splits) {
        for (std::size_t at = 0; at < count; ++at) {
            const Item item = items[at];
            scores[at] += query.with_bias(
                score_item(query.sub_item_scores, &codes[item * splits], splits, num_sub_items),
                item);
        }
    };
    if (num_splits == kUsualSplits)
        run(std::integral_constant<std::size_t, kUsualSplits>{});
    else
        run(num_splits);
    return {{items, count}, {scores, count}};
}

}  // namespace recprune
