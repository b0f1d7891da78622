// Filters of items whose codes lie one after the other, as catalogues give them: 64 items at a time
// are turned into rows of one split each. A file for each instruction set, so that any table of
// kernels can name the fastest that its machine runs. There is none in plain C++: adding up small
// integers takes as long there as adding up scores.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/bodies.hpp"
#include "kernels/kernels.hpp"

namespace recprune {

#if defined(__x86_64__)
// All are Kernels::filter_codes.
void filter_codes_avx2(const std::uint8_t* codes, std::size_t num_items, std::size_t num_splits,
                       const std::uint8_t* deficits, int limit, std::uint64_t* passing);
void filter_codes_avx512(const std::uint8_t* codes, std::size_t num_items, std::size_t num_splits,
                         const std::uint8_t* deficits, int limit, std::uint64_t* passing);
#endif

namespace {

// Codes that are turned into rows at once: those that one lane of a register holds.
constexpr std::size_t kLaneCodes = 16;

// The codes of a block that may not be read where it is, with room to read on: up to a lane more.
class LastBlock {
  public:
    LastBlock(const std::uint8_t* codes, std::size_t num_items, std::size_t num_splits) {
        std::copy_n(codes, num_items * num_splits, codes_.begin());
    }
    const std::uint8_t* codes() const { return codes_.data(); }

  private:
    std::array<std::uint8_t, kBlockItems * kMostFilteredSplits + kLaneCodes> codes_{};
};

// A bit for each of the first items of a block, of which there are 1 to 64.
RECPRUNE_BODY std::uint64_t first_items(std::size_t count) {
    return ~std::uint64_t{0} >> (kBlockItems - count);
}

// Blocks that may be read where they are: whole ones, and behind them whatever else a lane holds
// that begins with an item's last codes. Where codes fill lanes, or halves of them, that is
// nothing.
RECPRUNE_BODY std::size_t readable_blocks(std::size_t num_items, std::size_t num_splits) {
    const bool fills_lanes = num_splits % kLaneCodes == 0 || num_splits == kLaneCodes / 2;
    const std::size_t reads_on = fills_lanes ? 0 : kLaneCodes - num_splits % kLaneCodes;
    const std::size_t bytes = num_items * num_splits;
    return bytes < reads_on ? 0 : (bytes - reads_on) / (kBlockItems * num_splits);
}

}  // namespace

}  // namespace recprune
