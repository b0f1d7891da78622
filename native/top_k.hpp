// The best K items so far, under the one tie rule: score descending, item id ascending.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

namespace recprune {

using Item = std::uint32_t;
// Higher than every item's id, so it loses every tie: fills up what has a place for an item.
constexpr Item kNoItem = std::numeric_limits<Item>::max();

struct Scored {
    float score;
    Item item;
};

// A function object, not a function: sorting then has it inlined.
inline constexpr auto better = [](const Scored& a, const Scored& b) {
    return a.score != b.score ? a.score > b.score : a.item < b.item;
};

// A score that at least K of these reach: the K-th best or a little less. By bisection, as counting
// mispredicts nothing: a selection takes several times as long.
//
// Pre: there are K of them, and K is not 0.
inline float score_reached_by(std::size_t k, std::span<const float> scores) {
    constexpr int kHalvings = 8;
    float low = scores[0];
    float high = scores[0];
    for (float score : scores) {
        low = std::min(low, score);
        high = std::max(high, score);
    }
    for (int halving = 0; halving < kHalvings; ++halving) {
        const float middle = low / 2 + high / 2;
        std::uint32_t count = 0;
        for (float score : scores) count += score >= middle;
        (count >= k ? low : high) = middle;
    }
    return low;
}

// Sorts entries, the best first; `scratch` is used up. Many are sorted by the bytes of their
// scores, from the last to the first, which for a thousand takes a quarter of the time of
// comparing.
inline void sort_best_first(std::vector<Scored>& entries, std::vector<Scored>& scratch) {
    constexpr std::size_t kFew = 48;  // found by trial
    constexpr std::size_t kBytes = sizeof(float);
    constexpr std::size_t kDigits = 256;
    if (entries.size() < kFew) {
        std::sort(entries.begin(), entries.end(), better);
        return;
    }
    // As integers, these compare like the scores, the highest first. Zeros of either sign tie.
    auto digit = [](const Scored& entry, std::size_t byte) {
        const auto bits = std::bit_cast<std::uint32_t>(entry.score + 0.0f);
        const std::uint32_t key = bits >> 31 ? bits : ~bits & 0x7FFFFFFFu;
        return key >> 8 * byte & (kDigits - 1);
    };
    std::array<std::array<std::size_t, kDigits>, kBytes> places{};
    for (const Scored& entry : entries) {
        for (std::size_t byte = 0; byte < kBytes; ++byte) ++places[byte][digit(entry, byte)];
    }
    scratch.resize(entries.size());
    for (std::size_t byte = 0; byte < kBytes; ++byte) {
        auto& place = places[byte];
        std::exclusive_scan(place.begin(), place.end(), place.begin(), std::size_t{0});
        for (const Scored& entry : entries) scratch[place[digit(entry, byte)]++] = entry;
        entries.swap(scratch);
    }
    for (auto first = entries.begin(); first != entries.end();) {  // ties, by their id
        const auto end = std::find_if(first, entries.end(), [first](const Scored& entry) {
            return entry.score != first->score;
        });
        if (end - first > 1) std::sort(first, end, better);
        first = end;
    }
}

// Items may be offered in any order and more than once. Where many are wanted, offers are taken in
// by the batch: until `settle`, the threshold lags behind, which is safe.
class TopK {
  public:
    // With a floor, no item below it enters. It is held by K entries of kNoItem, which lose every
    // tie: to a search, the top K is full and the floor is its threshold from the beginning.
    explicit TopK(std::size_t k, float floor = -std::numeric_limits<float>::infinity()) : k_(k) {
        if (floor == threshold_) return;
        best_.assign(k, {floor, kNoItem});
        threshold_ = floor;
    }

    // K-th best score so far (θ): no item below it can enter. −∞ until K items are there.
    float threshold() const { return threshold_; }
    bool full() const { return best_.size() == k_; }

    void offer(float score, Item item) {
        const Scored entry{score, item};
        if (k_ == 0 || !(score >= threshold_)) return;
        if (full() && !better(entry, best_.back())) return;
        if (k_ <= kFew) return insert(entry);
        fresh_.push_back(entry);
        if (fresh_.size() >= k_ / kBatches) settle();
    }

    // The same for many at once.
    void offer_all(std::span<const float> scores, std::span<const Item> items) {
        for (std::size_t at = 0; at < scores.size(); ++at) {
            if (scores[at] >= threshold_) fresh_.push_back({scores[at], items[at]});
        }
        settle();
    }

    // Brings the threshold up to date.
    void settle() {
        if (fresh_.empty()) return;  // always so for small K
        sort_best_first(fresh_, merged_);
        merged_.clear();
        auto old = best_.cbegin();
        auto fresh = fresh_.cbegin();
        while (merged_.size() < k_ && (old != best_.cend() || fresh != fresh_.cend())) {
            const bool take_fresh =
                old == best_.cend() || (fresh != fresh_.cend() && better(*fresh, *old));
            const Scored& next = take_fresh ? *fresh++ : *old++;
            // An item that was offered twice stands next to itself: its scores are the same.
            if (merged_.empty() || merged_.back().item != next.item || next.item == kNoItem)
                merged_.push_back(next);
        }
        best_.swap(merged_);
        fresh_.clear();
        if (full()) threshold_ = best_.back().score;
    }

    // Best first. Ends the life of this object.
    const std::vector<Scored>& sorted() {
        settle();
        std::erase_if(best_, [](const Scored& entry) { return entry.item == kNoItem; });
        return best_;
    }

  private:
    // Items up to which an offer finds its place at once: moving so few costs less than sorting
    // batches. Found by trial.
    static constexpr std::size_t kFew = 128;
    // Batches of offers that fill the top K once: more keep the threshold closer, fewer merge less.
    // Found by trial.
    static constexpr std::size_t kBatches = 4;

    void insert(const Scored& entry) {
        const auto place = std::upper_bound(best_.begin(), best_.end(), entry, better);
        // An item that was offered before is there, or was evicted and cannot come back.
        if (place != best_.begin() && place[-1].item == entry.item) return;
        if (full()) {
            std::move_backward(place, best_.end() - 1, best_.end());
            *place = entry;
        } else {
            best_.insert(place, entry);
        }
        if (full()) threshold_ = best_.back().score;
    }

    std::size_t k_;
    float threshold_ = -std::numeric_limits<float>::infinity();
    std::vector<Scored> best_;   // the best first
    std::vector<Scored> fresh_;  // offers that are not among them yet
    std::vector<Scored> merged_;
};

}  // namespace recprune
