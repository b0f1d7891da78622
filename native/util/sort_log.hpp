// The one order of an interaction log: by user, then time, then place in the input.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "util/counting_sort.hpp"

namespace recprune {

// Row must be able to count the rows.
//
// Pre:  users, items, times, sorted_items and sorted_times have one entry per row;
//       offsets.size() == number of users + 1.
// Post: the history of user u, oldest first and equal times in input order, is
//       sorted_items[offsets[u]] … sorted_items[offsets[u + 1] − 1], and so are its times.
//
// Counting by user and then sorting each short history beats one long sort: most logs come
// grouped or time-ordered already, and then no comparison sort runs at all.
template <class Row>
void sort_log(std::span<const std::int32_t> users, std::span<const std::int32_t> items,
              std::span<const std::int64_t> times, std::span<std::int64_t> offsets,
              std::span<std::int32_t> sorted_items, std::span<std::int64_t> sorted_times) {
    std::vector<Row> rows(users.size());
    counting_sort(KeyColumn<std::int32_t>{users.data(), users.size(), 1}, offsets,
                  std::span<Row>(rows));

    std::vector<std::pair<std::int64_t, Row>> history;
    for (std::size_t user = 0; user + 1 < offsets.size(); ++user) {
        const auto first = static_cast<std::size_t>(offsets[user]);
        const auto last = static_cast<std::size_t>(offsets[user + 1]);
        history.clear();
        for (std::size_t place = first; place < last; ++place)
            history.emplace_back(times[rows[place]], rows[place]);
        // Rows are distinct and ascend for equal times, so sorting the pairs is stable.
        if (!std::is_sorted(history.begin(), history.end()))
            std::sort(history.begin(), history.end());
        for (std::size_t place = first; place < last; ++place) {
            const auto& [time, row] = history[place - first];
            sorted_times[place] = time;
            sorted_items[place] = items[row];
        }
    }
}

}  // namespace recprune
