// The inverted indexes L_1 … L_M of RecJPQPrune (Petrov, Macdonald and Tonellotto, SIGIR 2025,
// section 4.2): for every split and sub-item id, the items that carry it, ascending.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "counting_sort.hpp"

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
    std::vector<std::exception_ptr> failures(num_splits);
    auto build_split = [&](std::size_t split) {
        try {
            counting_sort(KeyColumn<Code>{codes.data() + split, num_items, num_splits},
                          offsets.subspan(split * (num_sub_items + 1), num_sub_items + 1),
                          items.subspan(split * num_items, num_items));
        } catch (const std::invalid_argument& error) {
            failures[split] = std::make_exception_ptr(std::invalid_argument(
                "codes: split " + std::to_string(split) + ", " + error.what()));
        } catch (...) {
            failures[split] = std::current_exception();
        }
    };

    const std::size_t workers = threads < num_splits ? threads : num_splits;
    if (workers <= 1) {
        for (std::size_t split = 0; split < num_splits; ++split) build_split(split);
    } else {
        std::vector<std::jthread> pool;
        for (std::size_t worker = 0; worker < workers; ++worker) {
            pool.emplace_back([&, worker] {
                for (std::size_t split = worker; split < num_splits; split += workers)
                    build_split(split);
            });
        }
    }
    for (const auto& failure : failures) {
        if (failure) std::rethrow_exception(failure);
    }
}

}  // namespace recprune
