// Stable grouping of positions by a small integer key, in two passes over the keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace recprune {

// Keys that stand `stride` elements apart: one column of a row-major table.
template <class Key>
struct KeyColumn {
    const Key* first;
    std::size_t size;
    std::size_t stride;

    Key operator[](std::size_t row) const { return first[row * stride]; }
};

// Groups the positions 0 … keys.size−1 by key; inside a group they stay ascending.
//
// Pre:  offsets.size() == number of keys + 1, positions.size() == keys.size.
// Post: group k is positions[offsets[k]] … positions[offsets[k + 1] − 1].
// Throws std::invalid_argument, leaving the outputs unspecified, if a key has no group.
template <class Key, class Position>
void counting_sort(KeyColumn<Key> keys, std::span<std::int64_t> offsets,
                   std::span<Position> positions) {
    const std::size_t num_groups = offsets.size() - 1;
    std::vector<std::int64_t> cursor(num_groups, 0);
    for (std::size_t row = 0; row < keys.size; ++row) {
        const auto key = static_cast<std::size_t>(keys[row]);  // negative keys become huge
        if (key >= num_groups) {
            throw std::invalid_argument("row " + std::to_string(row) + " has value " +
                                        std::to_string(keys[row]) + ", expected 0 to " +
                                        std::to_string(num_groups - 1));
        }
        ++cursor[key];
    }
    std::int64_t start = 0;
    for (std::size_t group = 0; group < num_groups; ++group) {
        offsets[group] = start;
        start += cursor[group];
        cursor[group] = offsets[group];
    }
    offsets[num_groups] = start;
    for (std::size_t row = 0; row < keys.size; ++row) {
        const auto key = static_cast<std::size_t>(keys[row]);
        positions[static_cast<std::size_t>(cursor[key]++)] = static_cast<Position>(row);
    }
}

}  // namespace recprune
