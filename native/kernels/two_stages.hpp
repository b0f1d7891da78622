// A scan in two stages, for registers that hold fewer than 256 deficits. The first holds all items
// against coarse tables, in which codes that are equal modulo the table's length share the smallest
// of their deficits: what they add up to is never more than the exact sum, so that nothing within
// the limit is lost. The second adds up exactly, but only for the few items that are left.
//
// The first stage is written for an instruction set. What is here is the rest: it has no
// intrinsics, and is always inlined, as all that several instruction sets share.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/bodies.hpp"
#include "kernels/kernels.hpp"

namespace recprune {

namespace {

// Rows that a coarse filter takes: of more, it takes the first, which reject the most.
constexpr std::size_t kMostCoarseRows = 32;
// Items of a block up to which they are added up one by one: beyond, all 64 at once are faster.
// Found by trial.
constexpr int kFewItems = 20;

// Rows with tables for a coarse filter. The first ones have tables of 256 deficits, which are
// exact, then come those of 128, then those of 64.
struct CoarseRows {
    const CodeRow* rows;
    std::size_t whole;
    std::size_t half;
    std::size_t quarter;
};

// Makes them. `shortest` is the length of a table that is not refined at all; a step of refinement
// doubles one, and the next step the next one, in rounds.
template <std::size_t shortest>
class CoarseTables {
  public:
    static_assert(shortest == 64 || shortest == 128);
    static constexpr std::size_t kRounds = shortest == 64 ? 2 : 1;

    RECPRUNE_BODY CoarseTables(const CodeRow* rows, std::size_t near, std::size_t refinement) {
        const std::size_t count = std::min(near, kMostCoarseRows);
        std::array<std::size_t, kRounds> refined;  // how many rows, in each round
        for (std::size_t& round : refined) {
            round = std::min(refinement, count);
            refinement -= round;
        }
        const std::size_t whole = refined[kRounds - 1];
        const std::size_t half = shortest == 64 ? refined[0] - whole : count - whole;
        coarse_ = {rows_.data(), whole, half, count - whole - half};
        for (std::size_t row = 0; row < count; ++row) {
            rows_[row] = rows[row];
            if (row >= whole)
                shorten(rows_[row], row < whole + half ? 128 : 64, &tables_[128 * row]);
        }
    }
    CoarseTables(const CoarseTables&) = delete;  // it points into itself

    const CoarseRows& rows() const { return coarse_; }

  private:
    // Loops of fixed length become vectors.
    RECPRUNE_BODY static void shorten(CodeRow& row, std::size_t length, std::uint8_t* shorter) {
        const std::uint8_t* deficits = row.deficits;
        for (std::size_t b = 0; b < 128; ++b) shorter[b] = std::min(deficits[b], deficits[b + 128]);
        if (length == 64) {
            for (std::size_t b = 0; b < 64; ++b) shorter[b] = std::min(shorter[b], shorter[b + 64]);
        }
        row.deficits = shorter;
    }

    CoarseRows coarse_;
    std::array<CodeRow, kMostCoarseRows> rows_;
    alignas(kBlockItems) std::array<std::uint8_t, 128 * kMostCoarseRows> tables_;
};

// How many of the 64 bits there are before each byte: a byte for each.
RECPRUNE_BODY std::uint64_t bits_before_bytes(std::uint64_t bits) {
    bits -= bits >> 1 & 0x5555555555555555ull;
    bits = (bits & 0x3333333333333333ull) + (bits >> 2 & 0x3333333333333333ull);
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0Full;
    return bits * 0x0101010101010100ull;
}

// The first stage: finds the blocks in [begin, end) with an item whose deficit in the sorted row
// and coarse deficits add up to at most `limit`. Writes the blocks, and a bit for each such item of
// a block; returns how many. There is room for one more than all blocks.
using FindCoarsely = std::size_t (*)(const SortedRow& sorted, const CoarseRows& rows,
                                     std::size_t begin, std::size_t end, int limit,
                                     std::uint32_t* found, std::uint64_t* items);

// Adds the deficits of all 64 items of a block in these rows to their sums, saturated at 255.
using AddRows = void (*)(const CodeRow* rows, std::size_t count, std::size_t block,
                         std::uint8_t* sums);

// Writes the deficits of all 64 items of a block in the sorted row.
using LookUpSorted = void (*)(const SortedRow& row, std::size_t block, std::uint8_t* sums);

// Which of a block's 64 items have a sum of at most `limit`.
using FindWithin = std::uint64_t (*)(const std::uint8_t* sums, int limit);

// Adds the deficits of one item in these rows to its sum.
RECPRUNE_BODY int add_one(const CodeRow* rows, std::size_t count, std::size_t place, int sum) {
    for (std::size_t row = 0; row < count; ++row) sum += rows[row].deficits[rows[row].codes[place]];
    return sum;
}

// Those of an item in the sorted row.
RECPRUNE_BODY int sorted_deficit(const SortedRow& row, std::size_t block, std::size_t lane) {
    const std::uint64_t up_to_lane = row.changes[block] << (kBlockItems - 1 - lane);
    return row.deficits[row.bases[block] + static_cast<std::size_t>(std::popcount(up_to_lane))];
}

// Both stages, as find_blocks of a table of kernels. Of items that the first stage rejects, the
// sums are written as full.
template <std::size_t shortest>
RECPRUNE_BODY FoundBlocks find_blocks_body(const FilterRows& filter, std::size_t begin,
                                           std::size_t end, int limit, std::uint32_t* found,
                                           std::uint8_t* sums, FindCoarsely find_coarsely,
                                           LookUpSorted look_up_sorted, AddRows add_rows,
                                           FindWithin find_within) {
    const auto [sorted, rows, near, count, refinement] = filter;
    const CoarseTables<shortest> coarse(rows, near, refinement);
    constexpr std::size_t kBlocks =
        64;  // at once: what is known of them stays in the nearest cache
    std::array<std::uint32_t, kBlocks + 1> blocks;
    std::array<std::uint64_t, kBlocks + 1> items;
    FoundBlocks result{0, 0};
    for (std::size_t first = begin; first < end; first += kBlocks) {
        const std::size_t num_close =
            find_coarsely(sorted, coarse.rows(), first, std::min(first + kBlocks, end), limit,
                          blocks.data(), items.data());
        result.close += num_close;
        for (std::size_t at = 0; at < num_close; ++at) {
            const std::uint32_t block = blocks[at];
            std::uint8_t* totals = sums + result.found * kBlockItems;
            bool any_within = false;
            if (std::popcount(items[at]) > kFewItems) {
                look_up_sorted(sorted, block, totals);
                add_rows(rows, near, block, totals);
                any_within = find_within(totals, limit) != 0;
            } else {
                std::memset(totals, kFullDeficit, kBlockItems);
                for (std::uint64_t left = items[at]; left; left &= left - 1) {
                    const auto lane = static_cast<std::size_t>(std::countr_zero(left));
                    const int sum = add_one(rows, near, block * kBlockItems + lane,
                                            sorted_deficit(sorted, block, lane));
                    totals[lane] = static_cast<std::uint8_t>(std::min(sum, kFullDeficit));
                    any_within |= sum <= limit;
                }
            }
            prefetch_rows(rows + near, count - near, block);
            found[result.found] = block;
            result.found += any_within;
        }
    }
    return result;
}

// As filter_blocks of a table of kernels: only items whose sums are within the limit so far are
// looked up, unless they are many.
RECPRUNE_BODY std::size_t filter_blocks_body(const CodeRow* rows, std::size_t count,
                                             std::uint32_t* blocks, std::size_t num_blocks,
                                             std::uint8_t* sums, int limit, std::uint64_t* items,
                                             FindWithin find_within, AddRows add_rows) {
    std::size_t kept = 0;
    for (std::size_t at = 0; at < num_blocks; ++at) {
        const std::uint32_t block = blocks[at];
        std::uint8_t* totals = sums + kept * kBlockItems;
        if (kept != at) std::memcpy(totals, sums + at * kBlockItems, kBlockItems);
        std::uint64_t within = find_within(totals, limit);
        if (std::popcount(within) > kFewItems) {
            add_rows(rows, count, block, totals);
            within = find_within(totals, limit);
        } else {
            for (std::uint64_t left = count > 0 ? within : 0; left; left &= left - 1) {
                const auto lane = static_cast<std::size_t>(std::countr_zero(left));
                const int sum = add_one(rows, count, block * kBlockItems + lane, totals[lane]);
                totals[lane] = static_cast<std::uint8_t>(std::min(sum, kFullDeficit));
                if (sum > limit) within &= ~(std::uint64_t{1} << lane);
            }
        }
        blocks[kept] = block;
        items[kept] = within;
        kept += within != 0;
    }
    return kept;
}

}  // namespace

}  // namespace recprune
