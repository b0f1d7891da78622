// Kernels in plain C++: what runs anywhere.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/bodies.hpp"
#include "kernels/kernels.hpp"

namespace recprune {

namespace {

void sub_item_scores_portable(const float* sequence_embedding, const float* transposed,
                              std::size_t num_splits, std::size_t width, std::size_t num_sub_items,
                              float* sub_item_scores) {
    sub_item_scores_body(sequence_embedding, transposed, num_splits, width, num_sub_items,
                         sub_item_scores);
}

void extremes_portable(const float* values, std::size_t count, float* lowest, float* highest) {
    extremes_body(values, count, lowest, highest);
}

std::int32_t largest_magnitude_portable(const float* values, std::size_t count) {
    return largest_magnitude_body(values, count);
}

void quantise_portable(const float* scores, std::size_t count, double highest, double scale,
                       std::uint8_t* out) {
    quantise_body(scores, count, highest, scale, out);
}

void look_up_portable(const std::uint8_t* table, const std::uint8_t* codes, std::uint8_t* out) {
    for (std::size_t i = 0; i < kMaxNarrowSubItems; ++i) out[i] = table[codes[i]];
}

// Adds the deficits of a block's items in `count` rows, saturated at 255; returns the lowest sum.
template <std::size_t count>
int add_known_rows(const CodeRow* rows, std::size_t block, std::uint8_t* sums) {
    std::array<CodeRow, count> copies;  // whatever is written to sums, these stay in registers
    std::copy_n(rows, count, copies.begin());
    int lowest = kFullDeficit;
    for (std::size_t item = 0; item < kBlockItems; ++item) {
        int sum = sums[item];
        for (const auto& [codes, deficits] : copies)
            sum += deficits[codes[block * kBlockItems + item]];
        lowest = std::min(lowest, sum);
        sums[item] = static_cast<std::uint8_t>(std::min(sum, kFullDeficit));
    }
    return lowest;
}

// The same for any number: a few at a time, whose number is known at compile time.
int add_rows(const CodeRow* rows, std::size_t count, std::size_t block, std::uint8_t* sums) {
    constexpr std::size_t kMost = kMostKnownRows;
    constexpr std::array kAdd = {add_known_rows<0>, add_known_rows<1>,    add_known_rows<2>,
                                 add_known_rows<3>, add_known_rows<4>,    add_known_rows<5>,
                                 add_known_rows<6>, add_known_rows<kMost>};
    for (; count > kMost; rows += kMost, count -= kMost) add_known_rows<kMost>(rows, block, sums);
    return kAdd[count](rows, block, sums);
}

FoundBlocks find_blocks_portable(const FilterRows& filter, std::size_t begin, std::size_t end,
                                 int limit, std::uint32_t* found, std::uint8_t* sums) {
    const auto [sorted, rows, near, count, _] = filter;  // whatever is written to sums, these stay
    std::size_t num_found = 0;
    for (std::size_t block = begin; block < end; ++block) {
        std::uint8_t* totals = sums + num_found * kBlockItems;
        const std::uint64_t changes = sorted.changes[block];
        std::size_t rank = sorted.bases[block];
        for (std::size_t lane = 0; lane < kBlockItems; ++lane) {
            rank += changes >> lane & 1u;
            totals[lane] = sorted.deficits[rank];
        }
        if (add_rows(rows, near, block, totals) > limit) continue;
        prefetch_rows(rows + near, count - near, block);
        found[num_found++] = static_cast<std::uint32_t>(block);
    }
    return {num_found, num_found};
}

std::size_t filter_blocks_portable(const CodeRow* rows, std::size_t count, std::uint32_t* blocks,
                                   std::size_t num_blocks, std::uint8_t* sums, int limit,
                                   std::uint64_t* items) {
    std::size_t kept = 0;
    for (std::size_t at = 0; at < num_blocks; ++at) {
        std::uint8_t totals[kBlockItems];
        std::copy_n(sums + at * kBlockItems, kBlockItems, totals);
        if (add_rows(rows, count, blocks[at], totals) > limit) continue;
        std::uint64_t passing = 0;
        for (std::size_t item = 0; item < kBlockItems; ++item)
            passing |= static_cast<std::uint64_t>(totals[item] <= limit) << item;
        blocks[kept] = blocks[at];
        std::copy_n(totals, kBlockItems, sums + kept * kBlockItems);
        items[kept++] = passing;
    }
    return kept;
}

std::size_t count_bits_portable(const std::uint64_t* words, std::size_t count) {
    return count_bits_body(words, count);
}

std::size_t filter_lines_portable(const std::uint8_t* lines, const LineBatch& batch,
                                  const std::uint8_t* const* tables, int two, int three,
                                  std::uint32_t* survivors, std::uint8_t* sums) {
    const std::uint8_t* const near[] = {tables[0], tables[1]};
    const std::uint8_t* const far[] = {tables[2], tables[3]};
    std::size_t found = 0;
    for (std::size_t at = batch.begin; at < batch.end; ++at) {
        prefetch_lines_after(lines, batch, at);
        const std::uint8_t* line = lines + std::size_t{batch.lines[at]} * kLineBytes;
        const int own = batch.deficits[at];
        for (std::size_t place = 0; place < kLineItems; ++place) {
            const int sum = own + near[0][line[place]] + near[1][line[kLineItems + place]];
            const int both =
                sum + far[0][line[2 * kLineItems + place]] + far[1][line[3 * kLineItems + place]];
            // Written always, counted only if it passes: no branch to mispredict.
            survivors[found] = static_cast<std::uint32_t>(at * kLineItems + place);
            sums[found] = static_cast<std::uint8_t>(std::min(both, kFullDeficit));
            found += static_cast<std::size_t>((sum <= two) & (both <= three));
        }
    }
    return found;
}

std::size_t select_portable(const std::uint8_t* deficits, int limit, std::uint8_t* selected) {
    std::size_t found = 0;
    for (std::size_t b = 0; b < kMaxNarrowSubItems; ++b) {
        selected[found] = static_cast<std::uint8_t>(b);
        found += deficits[b] <= limit;
    }
    return found;
}

void tilt_portable(const float* values, const float* weights, std::size_t count, float highest,
                   float tilt, float* sums) {
    tilt_body<16>(values, weights, count, highest, tilt, sums);
}

void convolve_portable(const float* counts, const float* values, float* sums) {
    convolve_body<16>(counts, values, sums);
}

}  // namespace

Kernels portable_kernels() {
    return {
        .name = "portable",
        // Look-ups, one after the other, are what both a scan and a line mostly wait for.
        .costs = {.scan = 73.1e3,
                  .scanned_item = 2.3,
                  .scan_growth = 0.0698,
                  .cells = 19.7e3,
                  .line = 32.1,
                  .found_item = 556.0,
                  .few_items = 121'000,
                  .allowed_item = 9.27,
                  .filtered_code = 2.37},
        .refinements = 0,
        .sub_item_scores = sub_item_scores_portable,
        .extremes = extremes_portable,
        .largest_magnitude = largest_magnitude_portable,
        .quantise = quantise_portable,
        .look_up = look_up_portable,
        .find_blocks = find_blocks_portable,
        .filter_blocks = filter_blocks_portable,
        .filter_codes = nullptr,
        .count_bits = count_bits_portable,
        .filter_lines = filter_lines_portable,
        .select = select_portable,
        .convolve = convolve_portable,
        .tilt = tilt_portable,
    };
}

}  // namespace recprune
