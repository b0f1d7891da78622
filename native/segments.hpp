// A catalogue in segments: several indexes that are searched as one.
//
// An item has a number for life; a segment has it at some position. Numbers ascend with positions,
// so that the tie rule of a segment, by position, is that of the catalogue, by number. Segments are
// searched one after the other, the largest first, and what all before have found is a floor for
// the next: docs/catalogue.md says why that is exact.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "boosts.hpp"
#include "item_set.hpp"
#include "kernels/kernels.hpp"
#include "query.hpp"
#include "search.hpp"
#include "top_k.hpp"
#include "util/parallel.hpp"

namespace recprune {

// Which numbers the items of a segment have: runs of successive ones, as (number, position) of the
// first item of each. A catalogue that was never changed is one run; every item that left begins
// another one.
class NumberRuns {
  public:
    // Pre: both ascend, and no run reaches the number at which the next one begins.
    NumberRuns(std::span<const Item> numbers, std::span<const Item> positions,
               std::size_t num_items)
        : numbers_(numbers), positions_(positions), num_items_(num_items) {}

    // Pre: there is such a position.
    Item number_of(Item position) const {
        const std::size_t run = last_up_to(positions_, position);
        return numbers_[run] + (position - positions_[run]);
    }

    // kNoItem if no item of the segment has this number.
    Item position_of(Item number) const {
        if (numbers_.empty() || number < numbers_.front()) return kNoItem;
        const std::size_t run = last_up_to(numbers_, number);
        const std::size_t offset = number - numbers_[run];
        return offset < length(run) ? positions_[run] + static_cast<Item>(offset) : kNoItem;
    }

    // Turns bits over numbers into bits over positions.
    //
    // Pre: there is a bit for every number of the segment; `bits` has a word for 64 positions.
    void gather_bits(const std::uint64_t* of_numbers, std::span<std::uint64_t> bits) const {
        std::fill(bits.begin(), bits.end(), 0);
        for (std::size_t run = 0; run < numbers_.size(); ++run) {
            std::size_t number = numbers_[run];
            std::size_t position = positions_[run];
            const std::size_t end = position + length(run);
            while (position < end) {  // up to the end of a word of the positions
                const std::size_t shift = position % kWordBits;
                const std::size_t count = std::min(kWordBits - shift, end - position);
                bits[position / kWordBits] |= bits_from(of_numbers, number, count) << shift;
                number += count;
                position += count;
            }
        }
    }

    template <class Use>
    void for_each_run(const Use& use) const {
        for (std::size_t run = 0; run < numbers_.size(); ++run)
            use(numbers_[run], positions_[run], length(run));
    }

  private:
    // Pre: some value is not above.
    static std::size_t last_up_to(std::span<const Item> values, Item value) {
        const auto above = std::upper_bound(values.begin(), values.end(), value);
        return static_cast<std::size_t>(above - values.begin()) - 1;
    }

    std::size_t length(std::size_t run) const {
        const std::size_t end = run + 1 < positions_.size() ? positions_[run + 1] : num_items_;
        return end - positions_[run];
    }

    // Reads `count` bits, at most a word of them, and no word that has none of them.
    static std::uint64_t bits_from(const std::uint64_t* words, std::size_t first,
                                   std::size_t count) {
        const std::size_t shift = first % kWordBits;
        std::uint64_t bits = words[first / kWordBits] >> shift;
        if (shift + count > kWordBits) bits |= words[first / kWordBits + 1] << (kWordBits - shift);
        return count < kWordBits ? bits & ((std::uint64_t{1} << count) - 1) : bits;
    }

    std::span<const Item> numbers_;
    std::span<const Item> positions_;
    std::size_t num_items_;
};

// An index of some of the items, of which some may have left since; views over memory that the
// caller keeps alive.
struct Segment {
    const IndexView* index;
    NumberRuns numbers;
    const std::uint64_t* present;  // a bit per position, or null: all are there
    std::size_t num_present;       // counted once: at a hundred million items that takes a while

    std::size_t num_words() const { return (index->num_items + kWordBits - 1) / kWordBits; }
    bool has(Item position) const {
        return !present || (present[position / kWordBits] >> (position % kWordBits)) & 1;
    }
};

// The items that one segment may return.
struct SegmentMask {
    std::vector<std::uint64_t> words;  // empty: those that are present
    std::size_t num_allowed = 0;
};

// Of the allowed numbers, those that are present in a segment.
inline void fill_mask(const Segment& segment, const Kernels& kernels, const std::uint64_t* allow,
                      SegmentMask& mask) {
    mask.words.resize(segment.num_words());
    segment.numbers.gather_bits(allow, mask.words);
    if (segment.present) {
        for (std::size_t word = 0; word < mask.words.size(); ++word)
            mask.words[word] &= segment.present[word];
    }
    mask.num_allowed = kernels.count_bits(mask.words.data(), mask.words.size());
}

// The items of a segment that a query is not to return; valid until the thread's next call.
inline const ItemSet* excluded_in(const Segment& segment, std::span<const std::int64_t> numbers) {
    thread_local ItemSet scratch;
    ItemSet& excluded = scratch;  // to look it up once
    excluded.reset(numbers.size());
    for (std::int64_t number : numbers) {
        const Item position = segment.numbers.position_of(static_cast<Item>(number));
        if (position != kNoItem) excluded.insert(position);
    }
    return excluded.size() ? &excluded : nullptr;
}

// The boosts of a segment's items; valid until the thread's next call.
inline Boosts boosts_in(const Segment& segment, const Boosts& boosts) {
    thread_local std::vector<std::int64_t> item_scratch;
    thread_local std::vector<float> value_scratch;
    thread_local ItemSet set_scratch;
    std::vector<std::int64_t>& items = item_scratch;  // to look them up once
    std::vector<float>& values = value_scratch;
    ItemSet& set = set_scratch;
    items.clear();
    values.clear();
    set.reset(boosts.items.size());
    for (std::size_t at = 0; at < boosts.items.size(); ++at) {
        const Item position = segment.numbers.position_of(static_cast<Item>(boosts.items[at]));
        if (position == kNoItem || !segment.has(position)) continue;
        items.push_back(position);
        values.push_back(boosts.values[at]);
        set.insert(position);
    }
    return {items, values, items.empty() ? nullptr : &set};
}

// Puts the best items of one more segment among those of the others, and keeps K.
inline void merge_best(const Segment& segment, std::span<const Scored> found, std::size_t k,
                       std::vector<Scored>& best) {
    thread_local std::vector<Scored> merge_scratch;
    std::vector<Scored>& merged = merge_scratch;  // to look it up once
    merged.clear();
    auto old = best.cbegin();
    auto fresh = found.begin();
    while (merged.size() < k && (old != best.cend() || fresh != found.end())) {
        if (fresh == found.end()) {
            merged.push_back(*old++);
            continue;
        }
        const Scored numbered{fresh->score, segment.numbers.number_of(fresh->item)};
        if (old != best.cend() && better(*old, numbered)) {
            merged.push_back(*old++);
        } else {
            merged.push_back(numbered);
            ++fresh;
        }
    }
    best.swap(merged);
}

// Adds up what several segments took. An item that is missing from the answer is one that its
// segment did not consider, or that lost to those that were found.
inline void add_stats(const Found& found, Stats& stats) {
    if (!found.stats.exact) {
        const double bound = std::max<double>(found.stats.upper_bound, found.top.threshold());
        stats.upper_bound = std::max(stats.upper_bound, bound);
        stats.exact = false;
    }
    stats.steps += found.stats.steps;
    stats.items_scored += found.stats.items_scored;
    stats.items_touched += found.stats.items_touched;
    stats.bytes_touched += found.stats.bytes_touched;
}

// `masks` has one for each segment where one mask goes for all queries; else it is empty.
inline void search_one(std::span<const Segment> segments, const Batch& batch,
                       std::span<const SegmentMask> masks, float largest_bias,
                       const Request& request, std::size_t number, const Answers& answers) {
    const Start start = start_query(*segments.front().index, batch, request, number, largest_bias);
    const auto excluded =
        batch.exclude ? batch.exclude->of_query(number) : std::span<const std::int64_t>{};
    thread_local std::vector<Scored> best_scratch;
    thread_local SegmentMask mask_scratch;
    std::vector<Scored>& best = best_scratch;  // to look them up once
    SegmentMask& own_mask = mask_scratch;
    best.clear();
    Stats stats;
    Method method = Method::pqtopk;
    for (const Segment& segment : segments) {
        if (segment.num_present == 0 || request.k == 0) continue;
        Query query = plain_query(*segment.index, start.sub_item_scores, request.k);
        if (!excluded.empty()) query.excluded = excluded_in(segment, excluded);
        if (batch.allow_rows > 0) {
            if (masks.empty()) {
                const std::size_t words = batch.allow.size() / batch.allow_rows;
                fill_mask(segment, *request.kernels, batch.allow.data() + number * words, own_mask);
            }
            const auto place = static_cast<std::size_t>(&segment - segments.data());
            const SegmentMask& mask = masks.empty() ? own_mask : masks[place];
            query.allow = mask.words.data();
            query.num_allowed = mask.num_allowed;
        } else if (segment.present) {
            query.allow = segment.present;
            query.num_allowed = segment.num_present;
        }
        const Boosts boosts = start.boosts.set ? boosts_in(segment, start.boosts) : Boosts{};
        const bool is_full = best.size() == request.k;
        const float floor = is_full ? std::max(start.floor, best.back().score) : start.floor;
        Limits limits = start.limits;
        // Each has one step at least: an engine looks at its limit after a step.
        limits.max_steps = std::max<std::int64_t>(limits.max_steps - stats.steps, 1);
        Found found = find_best(*segment.index, query, boosts, request, limits, floor);
        if (&segment == segments.data()) method = found.method;
        add_stats(found, stats);
        merge_best(segment, found.top.sorted(), request.k, best);
    }
    write_top(best, answers.ids.subspan(number * request.k, request.k),
              answers.scores.subspan(number * request.k, request.k));
    const bool is_full = request.k > 0 && best.size() == request.k;
    const float threshold = is_full ? best.back().score : start.floor;
    answers.records[number] = record_of(start, stats, method, threshold);
}

// Pre: there is a segment, and all have the same splits, sub-items and vectors. The largest come
// first.
inline void search_batch(std::span<const Segment> segments, const Batch& batch,
                         const Request& request, std::size_t threads, const Answers& answers) {
    std::vector<SegmentMask> masks(batch.allow_rows == 1 ? segments.size() : 0);
    for (std::size_t place = 0; place < masks.size(); ++place)
        fill_mask(segments[place], *request.kernels, batch.allow.data(), masks[place]);
    float largest_bias = 0.0f;
    for (const Segment& segment : segments)
        largest_bias = std::max(largest_bias, segment.index->largest_bias);
    run_in_parallel(batch.num_queries, threads, [&](std::size_t number) {
        search_one(segments, batch, masks, largest_bias, request, number, answers);
    });
}

// Throws std::invalid_argument unless every number is below `num_numbers`, and present once at
// most. For a folder that was opened.
//
// Pre: runs are as `NumberRuns` wants them.
inline void check_segments(std::span<const Segment> segments, std::size_t num_numbers) {
    std::vector<std::uint64_t> taken((num_numbers + kWordBits - 1) / kWordBits);
    for (const Segment& segment : segments) {
        segment.numbers.for_each_run([&](std::size_t first, Item position, std::size_t count) {
            if (first + count > num_numbers)
                throw std::invalid_argument("an item has number " +
                                            std::to_string(first + count - 1) +
                                            ", expected less than " + std::to_string(num_numbers));
            for (std::size_t offset = 0; offset < count; ++offset) {
                if (!segment.has(position + static_cast<Item>(offset))) continue;
                const std::size_t number = first + offset;
                const std::uint64_t bit = std::uint64_t{1} << number % kWordBits;
                if (taken[number / kWordBits] & bit)
                    throw std::invalid_argument("two items have number " + std::to_string(number));
                taken[number / kWordBits] |= bit;
            }
        });
    }
}

}  // namespace recprune
