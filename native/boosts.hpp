// Boosts: what one query adds to the scores of some items, after everything else.
//
// No engine knows of them. Boosted items are scored one by one and offered before an engine runs,
// and to that engine they are excluded: the best K of two disjoint sets are among the best K of
// each. docs/search.md says why bounds stay true.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "engines/pqtopk.hpp"
#include "query.hpp"
#include "top_k.hpp"

namespace recprune {

// The boosts of one query.
struct Boosts {
    std::span<const std::int64_t> items = {};  // ascending, each once
    std::span<const float> values = {};

    float largest() const {  // in magnitude
        float largest = 0.0f;
        for (float value : values) largest = std::max(largest, std::abs(value));
        return largest;
    }
};

// The boosts of a batch, checked and sorted.
class BatchBoosts {
  public:
    // Ids that the catalogue does not have are refused. These are wider than an index needs: a
    // catalogue in shards may have more items than one index.
    explicit BatchBoosts(std::int64_t num_items) : num_items_(num_items) {}

    // Adds the boosts of one more query, given in any order.
    // Pre: as many items as values.
    // Throws std::invalid_argument for an item that is unknown or there twice, and for a value that
    // is not finite.
    void add(std::span<const std::int64_t> items, std::span<const float> values) {
        std::vector<Boost>& row = scratch().row;
        row.clear();
        row.reserve(items.size());
        for (std::size_t at = 0; at < items.size(); ++at) {
            if (items[at] < 0 || items[at] >= num_items_)
                refuse("holds " + std::to_string(items[at]) + ", expected 0 to " +
                       std::to_string(num_items_ - 1));
            if (!std::isfinite(values[at]))
                refuse("adds " + described(values[at]) + " to item " + std::to_string(items[at]) +
                       ", expected a finite number");
            row.push_back({items[at], values[at]});
        }
        sort_row();
        items_.reserve(items_.size() + row.size());
        values_.reserve(values_.size() + row.size());
        for (const Boost& boost : row) {
            const bool is_first = &boost == row.data();
            if (!is_first && boost.item == items_.back())
                refuse("holds item " + std::to_string(boost.item) + " twice");
            items_.push_back(boost.item);
            values_.push_back(boost.value);
        }
        offsets_.push_back(static_cast<std::int64_t>(items_.size()));
    }

    std::span<const std::int64_t> offsets() const { return offsets_; }  // [num_queries + 1]
    std::span<const std::int64_t> items() const { return items_; }
    std::span<const float> values() const { return values_; }

    Boosts of_query(std::size_t number) const {
        const auto first = static_cast<std::size_t>(offsets_[number]);
        const auto count = static_cast<std::size_t>(offsets_[number + 1]) - first;
        return {items().subspan(first, count), values().subspan(first, count)};
    }

  private:
    struct Boost {
        std::int64_t item;
        float value;
    };

    // Bits of a digit. Found by trial: a few hundred boosts are sorted in 0.4 of the time that
    // std::sort takes, which mispredicts every other comparison.
    static constexpr int kDigitBits = 7;

    // Kept between calls: fresh memory would cost more than sorting.
    struct Scratch {
        std::vector<Boost> row;  // of the query that is being added
        std::vector<Boost> sorted;
    };
    static Scratch& scratch() {
        thread_local Scratch scratch;
        return scratch;
    }

    // By item: a radix sort from the last digit on.
    void sort_row() const {
        auto& [row, sorted] = scratch();
        constexpr std::int64_t kLastDigit = (1 << kDigitBits) - 1;
        auto earlier = [](const Boost& one, const Boost& other) { return one.item < other.item; };
        if (std::is_sorted(row.begin(), row.end(), earlier)) return;
        sorted.resize(row.size());
        for (int shift = 0; num_items_ >> shift > 0; shift += kDigitBits) {
            std::array<std::size_t, kLastDigit + 2> places{};
            auto digit = [shift](const Boost& boost) {
                return static_cast<std::size_t>(boost.item >> shift & kLastDigit);
            };
            for (const Boost& boost : row) ++places[digit(boost) + 1];
            std::partial_sum(places.begin(), places.end(), places.begin());
            for (const Boost& boost : row) sorted[places[digit(boost)]++] = boost;
            row.swap(sorted);
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
};

// Codes lie all over memory: has those of the boosted items on their way, long before they are
// read.
template <class Code>
void prefetch_boosted(std::span<const Code> codes, std::size_t num_splits, const Boosts& boosts) {
    for (std::int64_t item : boosts.items)
        __builtin_prefetch(codes.data() + static_cast<std::size_t>(item) * num_splits);
}

// Scores the boosted items that the query may return and offers them. Returns how many these are.
template <class Code>
std::size_t offer_boosted(std::span<const Code> codes, std::size_t num_splits,
                          std::size_t num_sub_items, const Query& query, const Boosts& boosts,
                          TopK& top) {
    thread_local std::vector<Scored> scratch;
    std::vector<Scored>& scored = scratch;  // to look it up once
    scored.clear();
    auto run = [&](auto splits) {
        for (std::size_t at = 0; at < boosts.items.size(); ++at) {
            const auto item = static_cast<Item>(boosts.items[at]);
            if (!query.may_return(item)) continue;
            const float score = query.with_bias(
                score_item(query.sub_item_scores, &codes[item * splits], splits, num_sub_items),
                item);
            scored.push_back({score + boosts.values[at], item});
        }
    };
    if (num_splits == kUsualSplits)
        run(std::integral_constant<std::size_t, kUsualSplits>{});
    else
        run(num_splits);
    // In a loop of their own: whether one enters is hard to predict, and scores would wait for it.
    for (const Scored& entry : scored) top.offer(entry.score, entry.item);
    top.settle();
    return scored.size();
}

// The excluded items and the boosted ones, ascending; valid until the thread's next call.
inline std::span<const Item> excluded_or_boosted(std::span<const Item> excluded,
                                                 const Boosts& boosts) {
    thread_local std::vector<Item> scratch;
    std::vector<Item>& both = scratch;  // to look it up once
    both.clear();
    auto next = excluded.begin();
    for (std::int64_t boosted : boosts.items) {
        const auto item = static_cast<Item>(boosted);
        while (next != excluded.end() && *next < item) both.push_back(*next++);
        if (next == excluded.end() || *next != item) both.push_back(item);
    }
    both.insert(both.end(), next, excluded.end());
    return both;
}

}  // namespace recprune
