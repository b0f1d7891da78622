// Kernels for AVX2. Functions have the target attribute, not the file: see ARCHITECTURE.md.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/bodies.hpp"
#include "kernels/code_filters.hpp"
#include "kernels/kernels.hpp"

#define RECPRUNE_AVX2 __attribute__((target("avx2")))

namespace recprune {

namespace {

constexpr std::size_t kBytes = 32;   // of a register
constexpr std::uint32_t kWords = 8;  // of four bytes, in a register

RECPRUNE_AVX2 void sub_item_scores_avx2(const float* sequence_embedding, const float* transposed,
                                        std::size_t num_splits, std::size_t width,
                                        std::size_t num_sub_items, float* sub_item_scores) {
    sub_item_scores_body(sequence_embedding, transposed, num_splits, width, num_sub_items,
                         sub_item_scores);
}

RECPRUNE_AVX2 void quantise_avx2(const float* scores, std::size_t count, double highest,
                                 double scale, std::uint8_t* out) {
    quantise_body(scores, count, highest, scale, out);
}

RECPRUNE_AVX2 inline __m256i load(const std::uint8_t* bytes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
}

RECPRUNE_AVX2 void fill_pairs_avx2(const std::uint8_t* low, const std::uint8_t* high,
                                   std::uint8_t* sums) {
    for (std::size_t b = 0; b < kMaxNarrowSubItems; ++b) {
        const __m256i added = _mm256_set1_epi8(static_cast<char>(high[b]));
        for (std::size_t a = 0; a < kMaxNarrowSubItems; a += kBytes) {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + (a | b << 8)),
                                _mm256_adds_epu8(load(low + a), added));
        }
    }
}

RECPRUNE_AVX2 std::size_t select_avx2(const std::uint8_t* deficits, int limit,
                                      std::uint8_t* selected) {
    const __m256i limits = _mm256_set1_epi8(static_cast<char>(limit));
    std::size_t found = 0;
    for (std::size_t first = 0; first < kMaxNarrowSubItems; first += kBytes) {
        const __m256i values = load(deficits + first);
        // x ≤ limit is max(x, limit) == limit: AVX2 compares only signed bytes.
        const __m256i within = _mm256_cmpeq_epi8(_mm256_max_epu8(values, limits), limits);
        for (auto mask = static_cast<std::uint32_t>(_mm256_movemask_epi8(within)); mask;
             mask &= mask - 1)
            selected[found++] =
                static_cast<std::uint8_t>(first + static_cast<unsigned>(__builtin_ctz(mask)));
    }
    return found;
}

RECPRUNE_AVX2 void convolve_avx2(const float* first, const float* second, float* sums) {
    convolve_body(first, second, sums);
}

// Every machine with AVX2 counts bits in one instruction.
__attribute__((target("popcnt"))) std::size_t count_bits_popcnt(const std::uint64_t* words,
                                                                std::size_t count) {
    return count_bits_body(words, count);
}

// The deficits of eight keys, from a table of pairs.
RECPRUNE_AVX2 inline __m256i look_up_pairs(const std::uint8_t* pairs, const std::uint16_t* keys) {
    const __m256i wide =
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(keys)));
    const __m256i words = _mm256_i32gather_epi32(reinterpret_cast<const int*>(pairs), wide, 1);
    return _mm256_and_si256(words, _mm256_set1_epi32(0xFF));
}

RECPRUNE_AVX2 inline unsigned lanes_within(__m256i sums, int limit) {
    const __m256i exceeding = _mm256_cmpgt_epi32(sums, _mm256_set1_epi32(limit));
    return ~static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(exceeding)));
}

RECPRUNE_AVX2 std::size_t filter_cells_avx2(const CellPart* parts, std::size_t count,
                                            const std::uint16_t* keys, const std::uint8_t* const*,
                                            const std::uint8_t* pairs, std::uint32_t* survivors) {
    std::size_t found = 0;
    for (std::size_t part = 0; part < count; ++part) {
        const auto [start, length, next_limit, both_limit] = parts[part];
        for (std::uint32_t group = 0; group < length; group += kGroupItems) {
            const std::uint32_t size = group_size(length - group);
            const std::uint16_t* next_keys = keys + 2 * std::size_t{start + group};
            for (std::uint32_t lane = 0; lane < size; lane += kWords) {
                const __m256i next = look_up_pairs(pairs, next_keys + lane);
                unsigned passing = lanes_within(next, next_limit);
                passing &= size - lane < kWords ? (1u << (size - lane)) - 1u : 0xFFu;
                if (!passing) continue;
                const __m256i last = look_up_pairs(pairs + kCells, next_keys + size + lane);
                passing &= lanes_within(_mm256_add_epi32(next, last), both_limit);
                for (; passing; passing &= passing - 1)
                    survivors[found++] =
                        start + group + lane + static_cast<std::uint32_t>(__builtin_ctz(passing));
            }
        }
    }
    return found;
}

}  // namespace

Kernels avx2_kernels() {
    const Kernels portable = portable_kernels();
    return {
        .name = "avx2",
        // Tables of 256 bytes are no faster to look up, so that a scan takes as long as in plain
        // C++; those of pairs are filled and gathered from much faster, so that cells do not.
        .costs = {.scanned_item = 2.6,
                  .cell = 20.0,
                  .cell_item = 3.2,
                  .found_item = 1000.0,
                  .few_items = 300'000,
                  .selective = 8,
                  .lists_are_cheap = false},
        .sub_item_scores = sub_item_scores_avx2,
        .quantise = quantise_avx2,
        .look_up = portable.look_up,
        .find_blocks = portable.find_blocks,
        .filter_blocks = portable.filter_blocks,
        .filter_codes = filter_codes_avx2,
        .count_bits = count_bits_popcnt,
        .filter_cells = filter_cells_avx2,
        .fill_pairs = fill_pairs_avx2,
        .select = select_avx2,
        .count_buckets = portable.count_buckets,
        .convolve = convolve_avx2,
    };
}

}  // namespace recprune

#endif
