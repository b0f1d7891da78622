// Sums of rows of a table: what look-ups of an encoder are made of.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

namespace recprune {

// Adds up some columns of rows that begin at the given places of a table, in the order of these.
template <std::size_t kColumns>
void add_columns(const float* columns, std::size_t width, std::span<const std::int64_t> places,
                 float* sum) {
    float total[kColumns] = {};
    for (const std::int64_t place : places) {
        const float* row = columns + static_cast<std::size_t>(place) * width;
        for (std::size_t column = 0; column < kColumns; ++column) total[column] += row[column];
    }
    std::copy_n(total, kColumns, sum);
}

// Adds up `count` rows of a table of `width` columns for every sum, in the order of their places.
//
// Pre:  width > 0, count > 0, places.size() is a multiple of count, and
//       sums.size() == places.size() / count * width.
// Throws std::invalid_argument, leaving the sums unspecified, if a place has no row.
inline void add_rows(std::span<const float> table, std::size_t width,
                     std::span<const std::int64_t> places, std::size_t count,
                     std::span<float> sums) {
    const std::size_t num_rows = table.size() / width;
    for (const std::int64_t place : places) {
        if (static_cast<std::size_t>(place) >= num_rows) {  // negative ones are huge
            throw std::invalid_argument("place " + std::to_string(place) + ", expected 0 to " +
                                        std::to_string(num_rows - 1));
        }
    }
    // So many columns at a time stay in registers: sums are written once, and never read.
    constexpr std::size_t kColumns = 16;
    float* sum = sums.data();
    for (std::size_t first = 0; first < places.size(); first += count, sum += width) {
        const auto own = places.subspan(first, count);
        std::size_t column = 0;
        for (; column + kColumns <= width; column += kColumns)
            add_columns<kColumns>(table.data() + column, width, own, sum + column);
        for (; column < width; ++column)
            add_columns<1>(table.data() + column, width, own, sum + column);
    }
}

}  // namespace recprune
