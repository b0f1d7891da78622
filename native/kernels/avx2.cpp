// Kernels for AVX2. Functions have the target attribute, not the file: see ARCHITECTURE.md.
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/bodies.hpp"
#include "kernels/kernels.hpp"

#define RECPRUNE_AVX2 __attribute__((target("avx2")))

namespace recprune {

namespace {

constexpr std::size_t kBytes = 32;  // of a register

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

RECPRUNE_AVX2 void tilt_avx2(const float* values, const float* weights, std::size_t count,
                             float highest, float tilt, float* sums) {
    tilt_body(values, weights, count, highest, tilt, sums);
}

// Two tables of 256 bytes, in pieces of 16 that lie in both halves of a register: the lower half
// looks its codes up in the first table, the upper one in the second.
struct TwoTables {
    __m256i pieces[16];
};

RECPRUNE_AVX2 inline TwoTables load_two_tables(const std::uint8_t* first,
                                               const std::uint8_t* second) {
    TwoTables tables;
    for (std::size_t piece = 0; piece < 16; ++piece)
        tables.pieces[piece] =
            _mm256_set_m128i(_mm_loadu_si128(reinterpret_cast<const __m128i*>(second + 16 * piece)),
                             _mm_loadu_si128(reinterpret_cast<const __m128i*>(first + 16 * piece)));
    return tables;
}

// A code's lower four bits are looked up in all pieces, and the upper four choose one: bit by bit,
// each moved to where a choice looks for it.
RECPRUNE_AVX2 inline __m256i look_up_two(const TwoTables& tables, __m256i codes) {
    const __m256i low = _mm256_and_si256(codes, _mm256_set1_epi8(15));
    __m256i left[8];
    const __m256i bit4 = _mm256_slli_epi16(codes, 3);
    for (std::size_t piece = 0; piece < 8; ++piece)
        left[piece] =
            _mm256_blendv_epi8(_mm256_shuffle_epi8(tables.pieces[2 * piece], low),
                               _mm256_shuffle_epi8(tables.pieces[2 * piece + 1], low), bit4);
    const __m256i bit5 = _mm256_slli_epi16(codes, 2);
    for (std::size_t piece = 0; piece < 4; ++piece)
        left[piece] = _mm256_blendv_epi8(left[2 * piece], left[2 * piece + 1], bit5);
    const __m256i bit6 = _mm256_slli_epi16(codes, 1);
    for (std::size_t piece = 0; piece < 2; ++piece)
        left[piece] = _mm256_blendv_epi8(left[2 * piece], left[2 * piece + 1], bit6);
    return _mm256_blendv_epi8(left[0], left[1], codes);
}

RECPRUNE_AVX2 std::size_t filter_lines_avx2(const std::uint8_t* lines, const LineBatch& batch,
                                            const std::uint8_t* const* tables, int two, int three,
                                            std::uint32_t* survivors) {
    const TwoTables near = load_two_tables(tables[0], tables[1]);
    const std::uint8_t* const far[] = {tables[2], tables[3]};
    std::size_t found = 0;
    for (std::size_t at = batch.begin; at < batch.end; ++at) {
        prefetch_line(lines, batch, at + kLinesAhead);
        const std::uint8_t* line = lines + std::size_t{batch.lines[at]} * kLineBytes;
        const __m256i deficits = look_up_two(near, load(line));
        const __m128i sums =
            _mm_adds_epu8(_mm256_castsi256_si128(deficits), _mm256_extracti128_si256(deficits, 1));
        const __m128i limits =
            _mm_set1_epi8(static_cast<char>(std::min(two - batch.deficits[at], kFullDeficit)));
        // x ≤ limit is max(x, limit) == limit: AVX2 compares only signed bytes.
        const __m128i within = _mm_cmpeq_epi8(_mm_max_epu8(sums, limits), limits);
        auto passing = static_cast<unsigned>(_mm_movemask_epi8(within));
        if (!passing) continue;
        alignas(kLineItems) std::uint8_t near_sums[kLineItems];
        _mm_store_si128(reinterpret_cast<__m128i*>(near_sums), sums);
        const int far_limit = three - batch.deficits[at];
        for (; passing; passing &= passing - 1) {
            const auto place = static_cast<std::size_t>(__builtin_ctz(passing));
            const int both = near_sums[place] + far[0][line[2 * kLineItems + place]] +
                             far[1][line[3 * kLineItems + place]];
            survivors[found] = static_cast<std::uint32_t>(at * kLineItems + place);
            found += both <= far_limit;
        }
    }
    return found;
}

}  // namespace

Kernels avx2_kernels() {
    const Kernels portable = portable_kernels();
    return {
        .name = "avx2",
        .costs = {.scanned_item = 2.6, .line = 25.0, .cells = 20000.0, .found_item = 200.0},
        .sub_item_scores = sub_item_scores_avx2,
        .quantise = quantise_avx2,
        .look_up = portable.look_up,
        .find_blocks = portable.find_blocks,
        .filter_blocks = portable.filter_blocks,
        .filter_lines = filter_lines_avx2,
        .select = select_avx2,
        .tilt = tilt_avx2,
    };
}

}  // namespace recprune

#endif
