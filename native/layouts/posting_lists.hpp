// The inverted indexes L_1 … L_M of RecJPQPrune (Petrov, Macdonald and Tonellotto, SIGIR 2025,
// section 4.2): for every split and sub-item id, the items that carry it, ascending.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#include "util/counting_sort.hpp"
#include "util/parallel.hpp"

namespace recprune {

// Pre:  codes is num_items × num_splits, row-major;
//       offsets is num_splits × (num_sub_items + 1); items is num_splits × num_items.
// Post: the posting list of (split, sub_item_id) is
//       items[split][offsets[split][sub_item_id] … offsets[split][sub_item_id + 1] − 1].
// The result does not depend on `threads`: each split is sorted whole by one thread.
template <class Code, class Item>
void build_posting_lists(std::span<const Code> codes, std::size_t num_items, std::size_t num_splits,
                         std::size_t num_sub_items, std::size_t threads,
                         std::span<std::int64_t> offsets, std::span<Item> items) {
    run_in_parallel(num_splits, threads, [&](std::size_t split) {
        try {
            counting_sort(KeyColumn<Code>{codes.data() + split, num_items, num_splits},
                          offsets.subspan(split * (num_sub_items + 1), num_sub_items + 1),
                          items.subspan(split * num_items, num_items));
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument("codes: split " + std::to_string(split) + ", " +
                                        error.what());
        }
    });
}

}  // namespace recprune
