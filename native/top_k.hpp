// The best K items so far, under the one tie rule: score descending, item id ascending.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace recprune {

using Item = std::uint32_t;

struct Scored {
    float score;
    Item item;
};

inline bool better(const Scored& a, const Scored& b) {
    return a.score != b.score ? a.score > b.score : a.item < b.item;
}

// Items may be offered in any order and more than once.
class TopK {
  public:
    // With a floor, no item below it enters. It is held by K entries of nobody, who lose every tie:
    // to a search, the top K is full and the floor is its threshold from the beginning.
    explicit TopK(std::size_t k, float floor = -std::numeric_limits<float>::infinity()) : k_(k) {
        seen_.resize(64, kEmpty);
        if (floor == threshold_) return;
        heap_.assign(k, {floor, kEmpty});
        threshold_ = floor;
    }

    // K-th best score so far (θ): no item below it can enter. −∞ until K items are there.
    float threshold() const { return threshold_; }
    bool full() const { return heap_.size() == k_; }

    void offer(float score, Item item) {
        if (k_ == 0 || !(score >= threshold_)) return;
        if (full() && !better({score, item}, heap_.front())) return;
        // Whoever was evicted cannot come back, so remembering every entry ever is enough.
        if (!remember(item)) return;
        if (full()) {
            std::pop_heap(heap_.begin(), heap_.end(), better);
            heap_.pop_back();
        }
        heap_.push_back({score, item});
        std::push_heap(heap_.begin(), heap_.end(), better);  // the worst stands in front
        if (full()) threshold_ = heap_.front().score;
    }

    // Best first. Ends the life of this object as a heap.
    const std::vector<Scored>& sorted() {
        std::erase_if(heap_, [](const Scored& entry) { return entry.item == kEmpty; });
        std::sort(heap_.begin(), heap_.end(), better);
        return heap_;
    }

  private:
    static constexpr Item kEmpty = std::numeric_limits<Item>::max();

    // Adds to a set of items with open addressing; false if it was there already.
    bool remember(Item item) {
        if (2 * (num_seen_ + 1) > seen_.size()) {
            std::vector<Item> old(2 * seen_.size(), kEmpty);
            old.swap(seen_);
            num_seen_ = 0;
            for (Item entry : old) {
                if (entry != kEmpty) remember(entry);
            }
        }
        const std::size_t mask = seen_.size() - 1;
        std::size_t slot = (item * 0x9E3779B1u) & mask;
        while (seen_[slot] != kEmpty) {
            if (seen_[slot] == item) return false;
            slot = (slot + 1) & mask;
        }
        seen_[slot] = item;
        ++num_seen_;
        return true;
    }

    std::size_t k_;
    float threshold_ = -std::numeric_limits<float>::infinity();
    std::vector<Scored> heap_;
    std::vector<Item> seen_;
    std::size_t num_seen_ = 0;
};

}  // namespace recprune
