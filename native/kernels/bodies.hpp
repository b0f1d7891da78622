// Loops that several instruction sets share: the compiler vectorises them for that of the function
// into which they are inlined. They always are, and have no linkage, so that no copy compiled for
// one instruction set can end up in the path of another.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.hpp"

#define RECPRUNE_BODY [[gnu::always_inline]] inline

namespace recprune {

namespace {

// Rows of a block that are added up at once, their number being known at compile time: what eight
// splits have beyond the sorted ones, and one more.
constexpr std::size_t kMostKnownRows = 7;

// Independent sums side by side, each in the order of j: vectorises to the same bits anywhere.
RECPRUNE_BODY void sub_item_scores_body(const float* sequence_embedding, const float* transposed,
                                        std::size_t num_splits, std::size_t width,
                                        std::size_t num_sub_items, float* sub_item_scores) {
    constexpr std::size_t kLanes = 64;  // sums at once: they stay in eight registers of AVX2
    for (std::size_t split = 0; split < num_splits; ++split) {
        const float* phi = sequence_embedding + split * width;
        const float* table = transposed + split * width * num_sub_items;
        float* out = sub_item_scores + split * num_sub_items;
        std::size_t first = 0;
        for (; first + kLanes <= num_sub_items; first += kLanes) {
            float sums[kLanes];
            for (std::size_t b = 0; b < kLanes; ++b) sums[b] = phi[0] * table[first + b];
            for (std::size_t j = 1; j < width; ++j) {
                const float* row = table + j * num_sub_items + first;
                for (std::size_t b = 0; b < kLanes; ++b) sums[b] += phi[j] * row[b];
            }
            for (std::size_t b = 0; b < kLanes; ++b) out[first + b] = sums[b];
        }
        for (; first < num_sub_items; ++first) {
            float sum = phi[0] * table[first];
            for (std::size_t j = 1; j < width; ++j)
                sum += phi[j] * table[j * num_sub_items + first];
            out[first] = sum;
        }
    }
}

RECPRUNE_BODY void quantise_body(const float* scores, std::size_t count, double highest,
                                 double scale, std::uint8_t* out) {
    constexpr double kFull = kFullDeficit;
    for (std::size_t b = 0; b < count; ++b) {
        const double units = (highest - scores[b]) * scale;
        out[b] =
            static_cast<std::uint8_t>(static_cast<std::int32_t>(units < kFull ? units : kFull));
    }
}

RECPRUNE_BODY void convolve_body(const float* first, const float* second, float* sums) {
    for (std::size_t x = 0; x < kDepth; ++x) sums[x] = 0.0f;
    for (std::size_t q = 0; q < kDepth; ++q) {
        if (first[q] == 0.0f) continue;
        for (std::size_t x = q; x < kDepth; ++x) sums[x] += first[q] * second[x - q];
    }
}

RECPRUNE_BODY std::size_t count_bits_body(const std::uint64_t* words, std::size_t count) {
    std::size_t total = 0;
    for (std::size_t word = 0; word < count; ++word)
        total += static_cast<std::size_t>(__builtin_popcountll(words[word]));
    return total;
}

RECPRUNE_BODY void prefetch_rows(const CodeRow* rows, std::size_t count, std::size_t block) {
    for (std::size_t row = 0; row < count; ++row)
        __builtin_prefetch(rows[row].codes + block * kBlockItems);
}

// Items of a cell's next group, if so many are left.
RECPRUNE_BODY std::uint32_t group_size(std::uint32_t left) {
    constexpr auto kFull = static_cast<std::uint32_t>(kGroupItems);
    return left < kFull ? left : kFull;
}

}  // namespace

}  // namespace recprune
