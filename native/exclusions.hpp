// Exclusions: items that single queries of a batch are not to return.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace recprune {

// The excluded items of a batch, checked. An item may be there more than once.
class BatchExclusions {
  public:
    // Ids are wider than an index needs: a catalogue in shards may have more items than one index.
    explicit BatchExclusions(std::int64_t num_items) : num_items_(num_items) {}

    // Adds the items of one more query, in any order; −1 stands for none.
    // Throws std::invalid_argument for an item that the catalogue does not have.
    template <class Id>
    void add(std::span<const Id> ids) {
        refuse_unknown(ids);
        std::size_t count = items_.size();
        items_.resize(count + ids.size());
        for (Id id : ids) {
            items_[count] = static_cast<std::int64_t>(id);
            count += items_[count] >= 0;
        }
        items_.resize(count);
        offsets_.push_back(static_cast<std::int64_t>(count));
    }

    std::span<const std::int64_t> offsets() const { return offsets_; }  // [num_queries + 1]
    std::span<const std::int64_t> items() const { return items_; }

    std::span<const std::int64_t> of_query(std::size_t number) const {
        const auto first = static_cast<std::size_t>(offsets_[number]);
        return items().subspan(first, static_cast<std::size_t>(offsets_[number + 1]) - first);
    }

  private:
    template <class Id>
    void refuse_unknown(std::span<const Id> ids) const {
        auto is_unknown = [this](Id id) {
            return static_cast<std::int64_t>(id) < -1 ||
                   static_cast<std::int64_t>(id) >= num_items_;
        };
        bool any = false;  // without a branch for each
        for (Id id : ids) any |= is_unknown(id);
        if (!any) return;
        const Id unknown = *std::find_if(ids.begin(), ids.end(), is_unknown);
        throw std::invalid_argument("exclude[" + std::to_string(offsets_.size() - 1) + "] holds " +
                                    std::to_string(unknown) + ", expected 0 to " +
                                    std::to_string(num_items_ - 1) + ", or -1");
    }

    std::int64_t num_items_;
    std::vector<std::int64_t> offsets_{0};
    std::vector<std::int64_t> items_;  // one query after the other
};

}  // namespace recprune
