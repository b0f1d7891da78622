// A set of ids, made anew for every query: a hash table with open addressing.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "top_k.hpp"

namespace recprune {

// What ids are multiplied with, odd. Another one in every process, so that no list of ids is slow
// by design; which ids are in a set does not hang on it.
inline const std::uint64_t kHashMultiplier = [] {
    std::random_device device;
    return std::uint64_t{device()} << 32 | device() | 1;
}();

// Pre: no id is the largest of its type, which stands for a free place.
template <class Id>
class IdSet {
  public:
    // Empties the set and makes room for so many ids.
    void reset(std::size_t most) {
        const std::size_t places = std::bit_ceil(kPlacesPerId * most + 1);
        places_.assign(places, kFree);
        shift_ = std::numeric_limits<std::uint64_t>::digits - std::countr_zero(places);
        size_ = 0;
    }

    // Returns whether the id is new.
    bool insert(Id id) {
        const std::size_t place = find(id);
        if (places_[place] == id) return false;
        places_[place] = id;
        ++size_;
        return true;
    }

    bool contains(Id id) const { return places_[find(id)] == id; }
    std::size_t size() const { return size_; }

  private:
    static constexpr Id kFree = std::numeric_limits<Id>::max();
    // So many places for an id: most ids that are not there meet a free one at once.
    static constexpr std::size_t kPlacesPerId = 4;

    // Where the id is, or belongs. Ever longer steps visit every place of a power of two.
    std::size_t find(Id id) const {
        const std::size_t last = places_.size() - 1;
        auto place = static_cast<std::size_t>(static_cast<std::uint64_t>(id) * kHashMultiplier >>
                                              1 >> (shift_ - 1));
        for (std::size_t step = 1; places_[place] != id && places_[place] != kFree; ++step)
            place = (place + step) & last;
        return place;
    }

    std::vector<Id> places_;
    int shift_ = 0;  // of a product: its first bits are a place
    std::size_t size_ = 0;
};

using ItemSet = IdSet<Item>;

}  // namespace recprune
