// PQTopK (Petrov, Macdonald and Tonellotto, RecSys 2024): score every item from the sub-item
// scores, keep the best K. The yardstick of all other methods, so it is as fast as codes in the
// order of items allow: where the machine has a filter for them, items are held against quantised
// deficits first, 64 at a time, and those that cannot enter the top K are not scored.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

#include "bounds/deficits.hpp"
#include "kernels/kernels.hpp"
#include "layouts/lists.hpp"
#include "query.hpp"
#include "top_k.hpp"

namespace recprune {

// Splits of the paper's codes, and of learnt ones twice as long: the cases whose loop is unrolled.
constexpr std::size_t kUsualSplits = 8;
constexpr std::size_t kManySplits = 16;

// The definition of an item's score: sub-item scores in split order, in float32. Codes are loaded
// by the word: one by one, they would take as long as the scores.
template <class Code>
inline float score_item(const float* scores, const Code* code, std::size_t num_splits,
                        std::size_t num_sub_items) {
    static_assert(std::endian::native == std::endian::little);
    constexpr std::size_t kWordCodes = sizeof(std::uint64_t) / sizeof(Code);
    float sum = -0.0f;  // adding to it changes no bit, not even the sign of a zero
    for (std::size_t words = num_splits / kWordCodes; words > 0; --words, code += kWordCodes) {
        std::uint64_t word;
        std::memcpy(&word, code, sizeof word);
        for (std::size_t at = 0; at < kWordCodes; ++at, scores += num_sub_items) {
            sum += scores[static_cast<Code>(word)];
            word >>= std::numeric_limits<Code>::digits;
        }
    }
    for (std::size_t left = num_splits % kWordCodes; left > 0; --left, scores += num_sub_items)
        sum += scores[*code++];
    return sum;
}

// The codes of all items, one after the other. `Splits` and `SubItems` are their numbers, or
// constants that are.
template <class Code, class Splits, class SubItems>
struct ItemCodes {
    std::span<const Code> codes;
    std::size_t num_items;
    Splits num_splits;
    SubItems num_sub_items;

    const Code* of_item(std::size_t item) const { return &codes[item * num_splits]; }
    float score(const float* scores, std::size_t item) const {
        return score_item(scores, of_item(item), num_splits, num_sub_items);
    }
};

// Calls with the codes of all items, their shape in constants where it is a usual one.
template <class Code, class Use>
void with_item_codes(std::span<const Code> codes, std::size_t num_items, std::size_t num_splits,
                     std::size_t num_sub_items, const Use& use) {
    auto call = [&](auto splits, auto sub_items) {
        use(ItemCodes<Code, decltype(splits), decltype(sub_items)>{codes, num_items, splits,
                                                                   sub_items});
    };
    constexpr std::integral_constant<std::size_t, kMaxNarrowSubItems> kUsualSubItems;
    if (num_sub_items != kUsualSubItems)
        call(num_splits, num_sub_items);
    else if (num_splits == kUsualSplits)
        call(std::integral_constant<std::size_t, kUsualSplits>{}, kUsualSubItems);
    else if (num_splits == kManySplits)
        call(std::integral_constant<std::size_t, kManySplits>{}, kUsualSubItems);
    else
        call(num_splits, kUsualSubItems);
}

// The best of items that come once each. Where many are wanted, those below a score that K of them
// reach are dropped now and then, which costs far less than to keep all sorted as the top K does.
class Shortlist {
  public:
    Shortlist(const Query& query, TopK& top)
        : query_(query), top_(top), threshold_(top.threshold()), room_(query.k + query.k / 2) {}

    // No item below it can enter; −∞ until K are there.
    float threshold() const { return threshold_; }
    bool has_threshold() const { return threshold_ > -std::numeric_limits<float>::infinity(); }

    // Takes an item in if it may enter.
    void offer(float score, Item item) {
        if (score >= threshold_) take_in(score, item);
    }

    // Hands everything over to the top K.
    void finish() { top_.offer_all(scores_, items_); }

  private:
    // Items up to which the top K finds the place of each at once. Found by trial.
    static constexpr std::size_t kFew = 64;

    // Not inlined: it is rare, and what surrounds it is a tight loop.
    [[gnu::noinline]] void take_in(float score, Item item) {
        if (!query_.may_return(item)) return;
        if (query_.k <= kFew) {
            top_.offer(score, item);
            threshold_ = top_.threshold();
            return;
        }
        scores_.push_back(score);
        items_.push_back(item);
        if (scores_.size() > room_) drop_worst();
    }

    void drop_worst() {
        threshold_ = std::max(threshold_, score_reached_by(query_.k, scores_));
        std::size_t kept = 0;
        for (std::size_t at = 0; at < scores_.size(); ++at) {  // without a branch to mispredict
            scores_[kept] = scores_[at];
            items_[kept] = items_[at];
            kept += scores_[at] >= threshold_;
        }
        scores_.resize(kept);
        items_.resize(kept);
        // Items that tie stay, and there may be any number of them.
        if (kept - query_.k > query_.k / 4) drop_ties();
    }

    void drop_ties() {
        std::vector<Scored> kept(scores_.size());
        for (std::size_t at = 0; at < kept.size(); ++at) kept[at] = {scores_[at], items_[at]};
        std::nth_element(kept.begin(), kept.begin() + static_cast<std::ptrdiff_t>(query_.k - 1),
                         kept.end(), better);
        scores_.resize(query_.k);
        items_.resize(query_.k);
        for (std::size_t at = 0; at < query_.k; ++at) {
            scores_[at] = kept[at].score;
            items_[at] = kept[at].item;
        }
        threshold_ = scores_.back();
    }

    const Query& query_;
    TopK& top_;
    float threshold_;
    std::size_t room_;  // for so many: more are too many
    // At least the best K so far, in any order. Side by side: scores are counted by the vector.
    std::vector<float> scores_;
    std::vector<Item> items_;
};

// Scores items and keeps the best. Many are scored before any is compared: the loop is then tight.
template <class Codes>
class Scorer {
  public:
    Scorer(const Codes& items, const Query& query, TopK& top)
        : items_(items), query_(query), shortlist_(query, top) {}

    const Shortlist& shortlist() const { return shortlist_; }

    // Scores the items in [first, end).
    void score_range(std::size_t first, std::size_t end) {
        std::array<float, kInFlight> scores;
        for (; first < end; first += kInFlight) {
            const std::size_t count = std::min(kInFlight, end - first);
            for (std::size_t at = 0; at < count; ++at)
                scores[at] = items_.score(query_.sub_item_scores, first + at);
            if (query_.item_bias) {
                for (std::size_t at = 0; at < count; ++at)
                    scores[at] += query_.item_bias[first + at];
            }
            num_scored_ += count;
            const float threshold = shortlist_.threshold();
            bool any = false;  // side by side: soon, hardly any items reach it
            for (std::size_t at = 0; at < count; ++at) any |= scores[at] >= threshold;
            for (std::size_t at = 0; any && at < count; ++at)
                shortlist_.offer(scores[at], static_cast<Item>(first + at));
        }
    }

    // The items of a word of bits, the first of which stands for `first`. They are scored later,
    // when their codes have arrived from memory.
    void add(std::size_t first, std::uint64_t bits) {
        for (; bits; bits &= bits - 1) {
            const std::size_t item = first + static_cast<std::size_t>(std::countr_zero(bits));
            __builtin_prefetch(items_.of_item(item));
            added_[num_added_++] = static_cast<Item>(item);
        }
        if (num_added_ >= kInFlight) score_added();
    }

    void score_added() {
        std::array<float, kInFlight + kWordBits> scores;
        for (std::size_t at = 0; at < num_added_; ++at)
            scores[at] = items_.score(query_.sub_item_scores, added_[at]);
        for (std::size_t at = 0; at < num_added_; ++at)
            shortlist_.offer(query_.with_bias(scores[at], added_[at]), added_[at]);
        num_scored_ += num_added_;
        num_added_ = 0;
    }

    // Hands the best over to the top K. Returns how many items were scored.
    std::size_t finish() {
        score_added();
        shortlist_.finish();
        return num_scored_;
    }

  private:
    // Items whose codes are on their way from memory at once. Found by trial.
    static constexpr std::size_t kInFlight = 128;

    const Codes items_;
    const Query& query_;
    Shortlist shortlist_;
    std::array<Item, kInFlight + kWordBits> added_;
    std::size_t num_added_ = 0;
    std::size_t num_scored_ = 0;
};

// Holds items against a threshold that rises.
class CodeFilter {
  public:
    // No result hangs on these numbers; `recprune reproduce --only shapes` shows their effect.
    // Items between two looks at the threshold: few while it rises fast. Multiples of a word.
    static constexpr std::size_t kShortStretch = 256;
    static constexpr std::size_t kLongStretch = 4096;

    CodeFilter(const Query& query, const Kernels& kernels, std::size_t num_splits,
               std::size_t num_sub_items)
        : kernels_(kernels),
          num_splits_(num_splits),
          deficits_(query, kernels, num_splits, num_sub_items) {}

    // Whether the filter saves more than it costs: if most items are wanted, it rejects few.
    static bool pays(const Kernels& kernels, std::size_t num_items, std::size_t num_splits,
                     std::size_t k) {
        return kernels.filter_codes && num_splits <= kMostFilteredSplits &&
               num_items >= kFewItems + kItemsPerWanted * k;
    }

    // Follows the threshold: the limit at once, the tables when it has moved far enough to pay.
    // Returns whether anything can still reach it.
    bool tighten(double threshold) {
        const double slack = std::min(deficits_.slack(threshold), deficits_.range());
        if (slack < kWornShare * slack_of_tables_) {
            deficits_.quantise(slack);
            slack_of_tables_ = slack;
        }
        limit_ = std::min(deficits_.limit(slack), kTargetLimit);
        return limit_ >= 0;
    }

    // Writes a bit for each of so many items, whose codes these are: whether it may reach the
    // threshold.
    void apply(const std::uint8_t* codes, std::size_t count, std::uint64_t* passing) const {
        kernels_.filter_codes(codes, count, num_splits_, deficits_.of_split(0), limit_, passing);
    }

  private:
    // Items of a catalogue: fewer are scored in less time than it takes to make tables. So many
    // more for each that is wanted.
    static constexpr std::size_t kFewItems = 1024;
    static constexpr std::size_t kItemsPerWanted = 8;
    // Tables are made anew when the slack is less than this share of what they were made for.
    static constexpr double kWornShare = 0.75;

    const Kernels& kernels_;
    std::size_t num_splits_;
    Deficits deficits_;
    int limit_ = 0;
    double slack_of_tables_ = std::numeric_limits<double>::infinity();
};

// Scores the items in [first, end), or those of them that are allowed.
//
// Pre: first is the first item of a word.
template <class Codes>
void score_allowed(const Query& query, Scorer<Codes>& scorer, std::size_t first, std::size_t end) {
    constexpr std::size_t kWords = 4;  // that are skipped at once if nothing in them is allowed
    if (!query.allow) return scorer.score_range(first, end);
    const std::uint64_t* allow = query.allow;
    const std::size_t last = (end + kWordBits - 1) / kWordBits;
    for (std::size_t word = first / kWordBits; word < last; ++word) {
        while (word + kWords < last &&
               !(allow[word] | allow[word + 1] | allow[word + 2] | allow[word + 3]))
            word += kWords;
        scorer.add(word * kWordBits, allow[word]);
    }
    scorer.score_added();
}

// Scores what the filter lets through.
template <class Codes>
void score_filtered(const Codes& items, const Query& query, CodeFilter& filter,
                    Scorer<Codes>& scorer) {
    std::array<std::uint64_t, CodeFilter::kLongStretch / kWordBits> passing;
    std::size_t stretch = CodeFilter::kShortStretch;
    for (std::size_t first = 0, end = 0; first < items.num_items; first = end) {
        end = std::min(first + stretch, items.num_items);
        // A first threshold; what there is before, as a floor, may be of no use.
        if (first == 0 || !scorer.shortlist().has_threshold()) {
            score_allowed(query, scorer, first, end);
            continue;
        }
        if (!filter.tighten(scorer.shortlist().threshold())) break;
        filter.apply(items.of_item(first), end - first, passing.data());
        for (std::size_t start = first; start < end; start += kWordBits) {
            const std::uint64_t bits = passing[(start - first) / kWordBits];
            if (bits == 0) continue;
            scorer.add(start, query.allow ? bits & query.allow[start / kWordBits] : bits);
        }
        scorer.score_added();
        if (first >= CodeFilter::kLongStretch) stretch = CodeFilter::kLongStretch;
    }
}

// With `few_allowed`, no filter goes over all items: those that are allowed are scored.
template <class Code>
void pqtopk(std::span<const Code> codes, std::size_t num_items, std::size_t num_splits,
            std::size_t num_sub_items, const Query& query, bool few_allowed, const Kernels& kernels,
            TopK& top, Stats& stats) {
    std::optional<CodeFilter> filter;
    if (sizeof(Code) == 1 && !few_allowed &&
        CodeFilter::pays(kernels, num_items, num_splits, query.k))
        filter.emplace(query, kernels, num_splits, num_sub_items);
    std::size_t num_scored = 0;
    with_item_codes(codes, num_items, num_splits, num_sub_items, [&](const auto& items) {
        Scorer scorer(items, query, top);
        if constexpr (sizeof(Code) == 1) {
            if (filter) score_filtered(items, query, *filter, scorer);
        }
        if (!filter) score_allowed(query, scorer, 0, num_items);
        num_scored = scorer.finish();
    });
    const std::size_t num_touched = filter ? num_items : num_scored;
    // To what cells may have counted before they were left.
    stats.items_scored += static_cast<std::int64_t>(num_scored);
    stats.items_touched += static_cast<std::int64_t>(num_touched);
    stats.bytes_touched += static_cast<std::int64_t>(num_touched * num_splits * sizeof(Code));
    ++stats.steps;
}

// The same over a list layout, for indexes that keep nothing else.
inline void pqtopk(const ListLayout& lists, const Query& query, TopK& top, Stats& stats) {
    for (std::size_t list = 0; list < lists.num_sub_items; ++list) {
        const auto end = static_cast<std::size_t>(lists.block_offsets[list + 1]);
        for (auto block = static_cast<std::size_t>(lists.block_offsets[list]); block < end;
             ++block) {
            for (std::size_t lane = 0; lane < kBlockItems; ++lane) {
                const Item item = lists.items[block * kBlockItems + lane];
                if (item == kNoItem) continue;
                const float score =
                    query.with_bias(lists.score(query.sub_item_scores, list, block, lane), item);
                if (score >= top.threshold() && query.may_return(item)) top.offer(score, item);
                ++stats.items_scored;
            }
        }
    }
    stats.items_touched = stats.items_scored;
    stats.bytes_touched =
        static_cast<std::int64_t>(lists.bases.size_bytes() + lists.changes.size_bytes() +
                                  lists.codes.size_bytes() + lists.items.size_bytes());
    stats.steps = 1;
}

}  // namespace recprune
