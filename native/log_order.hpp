// The one order of an interaction log: by user, then time, then place in the input.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "counting_sort.hpp"

namespace recprune {

// Pre:  users and times have one entry per row; offsets.size() == number of users + 1;
//       rows.size() == users.size().
// Post: the rows of user u, oldest first, are rows[offsets[u]] … rows[offsets[u + 1] − 1].
//
// Counting by user and then sorting each short history beats one long sort: most logs come
// grouped or time-ordered already, and then no comparison sort runs at all.
inline void order_log(std::span<const std::int32_t> users, std::span<const std::int64_t> times,
                      std::span<std::int64_t> offsets, std::span<std::int64_t> rows) {
    counting_sort(KeyColumn<std::int32_t>{users.data(), users.size(), 1}, offsets, rows);

    auto earlier = [&](std::int64_t a, std::int64_t b) {
        return times[static_cast<std::size_t>(a)] < times[static_cast<std::size_t>(b)];
    };
    // Keys beside rows, so that the comparisons of a long history do not miss the cache.
    std::vector<std::pair<std::int64_t, std::int64_t>> history;
    for (std::size_t user = 0; user + 1 < offsets.size(); ++user) {
        const auto first = rows.begin() + offsets[user];
        const auto last = rows.begin() + offsets[user + 1];
        if (std::is_sorted(first, last, earlier)) continue;
        history.clear();
        for (auto row = first; row != last; ++row)
            history.emplace_back(times[static_cast<std::size_t>(*row)], *row);
        std::sort(history.begin(), history.end());  // rows are distinct, so this is stable
        std::transform(history.begin(), history.end(), first,
                       [](const auto& entry) { return entry.second; });
    }
}

}  // namespace recprune
