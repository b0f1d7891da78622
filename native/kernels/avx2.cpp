// Kernels for AVX2. Functions have the target attribute, not the file: see ARCHITECTURE.md.
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/bodies.hpp"
#include "kernels/code_filters.hpp"
#include "kernels/kernels.hpp"
#include "kernels/two_stages.hpp"

#define RECPRUNE_AVX2 __attribute__((target("avx2,bmi,popcnt")))

namespace recprune {

namespace {

constexpr std::size_t kBytes = 32;  // of a register

RECPRUNE_AVX2 void sub_item_scores_avx2(const float* sequence_embedding, const float* transposed,
                                        std::size_t num_splits, std::size_t width,
                                        std::size_t num_sub_items, float* sub_item_scores) {
    sub_item_scores_body(sequence_embedding, transposed, num_splits, width, num_sub_items,
                         sub_item_scores);
}

RECPRUNE_AVX2 void extremes_avx2(const float* values, std::size_t count, float* lowest,
                                 float* highest) {
    extremes_body(values, count, lowest, highest);
}

RECPRUNE_AVX2 std::int32_t largest_magnitude_avx2(const float* values, std::size_t count) {
    return largest_magnitude_body(values, count);
}

RECPRUNE_AVX2 void quantise_avx2(const float* scores, std::size_t count, double highest,
                                 double scale, std::uint8_t* out) {
    quantise_body(scores, count, highest, scale, out);
}

RECPRUNE_AVX2 inline __m256i load(const std::uint8_t* bytes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
}

RECPRUNE_AVX2 inline void store(std::uint8_t* bytes, __m256i values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes), values);
}

// The scan. A byte shuffle looks 16 entries up by the four lowest bits of a code. Of several tables
// of 16, the other bits choose the right one.

// The entries at 32 codes, by as many of their lowest bits as the table needs. `nibbles` are the
// four lowest alone: where the highest is set, a shuffle would find zero.
template <std::size_t entries>
RECPRUNE_AVX2 RECPRUNE_BODY __m256i look_up(const std::uint8_t* table, __m256i nibbles,
                                            __m256i codes) {
    if constexpr (entries == 16) {
        const __m128i once = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(once), nibbles);
    } else {
        constexpr std::size_t kHalf = entries / 2;
        const __m256i lower = look_up<kHalf>(table, nibbles, codes);
        const __m256i upper = look_up<kHalf>(table + kHalf, nibbles, codes);
        // A choice goes by the highest bit of a byte. Bytes are shifted in pairs: what one loses to
        // the other are bits below that.
        return _mm256_blendv_epi8(lower, upper,
                                  _mm256_slli_epi16(codes, 8 - std::countr_zero(entries)));
    }
}

template <std::size_t entries>
RECPRUNE_AVX2 RECPRUNE_BODY __m256i look_up(const std::uint8_t* table, __m256i codes) {
    return look_up<entries>(table, _mm256_and_si256(codes, _mm256_set1_epi8(0x0F)), codes);
}

RECPRUNE_AVX2 void look_up_avx2(const std::uint8_t* table, const std::uint8_t* codes,
                                std::uint8_t* out) {
    for (std::size_t i = 0; i < kMaxNarrowSubItems; i += kBytes)
        store(out + i, look_up<kMaxNarrowSubItems>(table, load(codes + i)));
}

// A byte for each of a block's 64 items.
struct BlockBytes {
    __m256i first, second;
};

RECPRUNE_AVX2 inline __m256i count_bits(__m256i bytes) {
    const __m256i counts =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
    const __m256i nibble = _mm256_set1_epi8(0x0F);
    const __m256i lower = _mm256_and_si256(bytes, nibble);
    const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
    return _mm256_add_epi8(_mm256_shuffle_epi8(counts, lower), _mm256_shuffle_epi8(counts, upper));
}

// Ranks within a block, at most 63, are prefix sums of bits: those of an item's own byte are
// counted under a mask, and those of the bytes before it come from one multiplication.
RECPRUNE_AVX2 inline BlockBytes ranks_of(std::uint64_t changes) {
    const __m256i first_bytes =
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i second_bytes = _mm256_add_epi8(first_bytes, _mm256_set1_epi8(4));
    const __m256i up_to_lane = _mm256_set1_epi64x(static_cast<long long>(0xFF7F3F1F0F070301ull));
    const __m256i bits = _mm256_set1_epi64x(static_cast<long long>(changes));
    const __m256i before = _mm256_set1_epi64x(static_cast<long long>(bits_before_bytes(changes)));
    auto ranks = [&](__m256i own) RECPRUNE_AVX2 {
        const __m256i within =
            count_bits(_mm256_and_si256(_mm256_shuffle_epi8(bits, own), up_to_lane));
        return _mm256_add_epi8(within, _mm256_shuffle_epi8(before, own));
    };
    return {ranks(first_bytes), ranks(second_bytes)};
}

RECPRUNE_AVX2 RECPRUNE_BODY BlockBytes look_up_sorted(const SortedRow& row, std::size_t block) {
    const std::uint64_t changes = row.changes[block];
    const std::uint8_t* deficits = row.deficits + row.bases[block];
    const BlockBytes ranks = ranks_of(changes);
    if (std::popcount(changes) < 16)  // as nearly always in a large catalogue
        return {look_up<16>(deficits, ranks.first, ranks.first),
                look_up<16>(deficits, ranks.second, ranks.second)};
    return {look_up<kBlockItems>(deficits, ranks.first),
            look_up<kBlockItems>(deficits, ranks.second)};
}

RECPRUNE_AVX2 RECPRUNE_BODY std::uint64_t find_within(const BlockBytes& sums, __m256i limits) {
    // x ≤ limit is min(x, limit) == x: AVX2 compares only signed bytes.
    auto within = [&](__m256i values) RECPRUNE_AVX2 {
        const __m256i lower = _mm256_min_epu8(values, limits);
        return static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(lower, values)));
    };
    return within(sums.first) | std::uint64_t{within(sums.second)} << kBytes;
}

template <std::size_t entries>
RECPRUNE_AVX2 RECPRUNE_BODY void add_rows(const CodeRow* rows, std::size_t count, std::size_t block,
                                          BlockBytes& sums) {
    for (std::size_t row = 0; row < count; ++row) {
        const std::uint8_t* codes = rows[row].codes + block * kBlockItems;
        const std::uint8_t* deficits = rows[row].deficits;
        sums.first = _mm256_adds_epu8(sums.first, look_up<entries>(deficits, load(codes)));
        sums.second =
            _mm256_adds_epu8(sums.second, look_up<entries>(deficits, load(codes + kBytes)));
    }
}

// With their number known at compile time, no loop over rows has an end to be mispredicted; for
// more of them, or finer ones, `known` is kMostKnownRows.
template <std::size_t known>
RECPRUNE_AVX2 std::size_t find_coarsely_in(const SortedRow& sorted, const CoarseRows& coarse,
                                           std::size_t begin, std::size_t end, int limit,
                                           std::uint32_t* found, std::uint64_t* items) {
    const auto [rows, whole, half, quarter] = coarse;
    const __m256i limits = _mm256_set1_epi8(static_cast<char>(limit));
    std::size_t num_found = 0;
    for (std::size_t block = begin; block < end; ++block) {
        BlockBytes sums = look_up_sorted(sorted, block);
        if constexpr (known == kMostKnownRows) {
            add_rows<256>(rows, whole, block, sums);
            add_rows<128>(rows + whole, half, block, sums);
            add_rows<64>(rows + whole + half, quarter, block, sums);
        } else {
            add_rows<64>(rows, known, block, sums);
        }
        const std::uint64_t within = find_within(sums, limits);
        // Written always, counted only if there are any: no branch to mispredict.
        found[num_found] = static_cast<std::uint32_t>(block);
        items[num_found] = within;
        num_found += within != 0;
    }
    return num_found;
}

RECPRUNE_AVX2 std::size_t find_coarsely_avx2(const SortedRow& sorted, const CoarseRows& coarse,
                                             std::size_t begin, std::size_t end, int limit,
                                             std::uint32_t* found, std::uint64_t* items) {
    constexpr std::array kFind = {find_coarsely_in<0>, find_coarsely_in<1>,
                                  find_coarsely_in<2>, find_coarsely_in<3>,
                                  find_coarsely_in<4>, find_coarsely_in<5>,
                                  find_coarsely_in<6>, find_coarsely_in<kMostKnownRows>};
    const bool has_finer = coarse.whole + coarse.half > 0;
    const std::size_t known = has_finer ? kMostKnownRows : std::min(coarse.quarter, kMostKnownRows);
    return kFind[known](sorted, coarse, begin, end, limit, found, items);
}

RECPRUNE_AVX2 void look_up_sorted_avx2(const SortedRow& row, std::size_t block,
                                       std::uint8_t* sums) {
    const BlockBytes deficits = look_up_sorted(row, block);
    store(sums, deficits.first);
    store(sums + kBytes, deficits.second);
}

RECPRUNE_AVX2 void add_rows_avx2(const CodeRow* rows, std::size_t count, std::size_t block,
                                 std::uint8_t* sums) {
    BlockBytes totals{load(sums), load(sums + kBytes)};
    add_rows<kMaxNarrowSubItems>(rows, count, block, totals);
    store(sums, totals.first);
    store(sums + kBytes, totals.second);
}

RECPRUNE_AVX2 std::uint64_t find_within_avx2(const std::uint8_t* sums, int limit) {
    return find_within({load(sums), load(sums + kBytes)},
                       _mm256_set1_epi8(static_cast<char>(limit)));
}

RECPRUNE_AVX2 FoundBlocks find_blocks_avx2(const FilterRows& filter, std::size_t begin,
                                           std::size_t end, int limit, std::uint32_t* found,
                                           std::uint8_t* sums) {
    return find_blocks_body<64>(filter, begin, end, limit, found, sums, find_coarsely_avx2,
                                look_up_sorted_avx2, add_rows_avx2, find_within_avx2);
}

RECPRUNE_AVX2 std::size_t filter_blocks_avx2(const CodeRow* rows, std::size_t count,
                                             std::uint32_t* blocks, std::size_t num_blocks,
                                             std::uint8_t* sums, int limit, std::uint64_t* items) {
    return filter_blocks_body(rows, count, blocks, num_blocks, sums, limit, items, find_within_avx2,
                              add_rows_avx2);
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
    tilt_body<32>(values, weights, count, highest, tilt, sums);
}

RECPRUNE_AVX2 void convolve_avx2(const float* counts, const float* values, float* sums) {
    convolve_body<32>(counts, values, sums);
}

// Every machine with AVX2 counts bits in one instruction.
__attribute__((target("popcnt"))) std::size_t count_bits_popcnt(const std::uint64_t* words,
                                                                std::size_t count) {
    return count_bits_body(words, count);
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
                                            std::uint32_t* survivors, std::uint8_t* sums) {
    const TwoTables near = load_two_tables(tables[0], tables[1]);
    const std::uint8_t* const far[] = {tables[2], tables[3]};
    std::size_t found = 0;
    for (std::size_t at = batch.begin; at < batch.end; ++at) {
        prefetch_lines_after(lines, batch, at);
        const std::uint8_t* line = lines + std::size_t{batch.lines[at]} * kLineBytes;
        const __m256i deficits = look_up_two(near, load(line));
        const __m128i near_pair =
            _mm_adds_epu8(_mm256_castsi256_si128(deficits), _mm256_extracti128_si256(deficits, 1));
        const int own = batch.deficits[at];
        const __m128i limits = _mm_set1_epi8(static_cast<char>(std::min(two - own, kFullDeficit)));
        // x ≤ limit is max(x, limit) == limit: AVX2 compares only signed bytes.
        const __m128i within = _mm_cmpeq_epi8(_mm_max_epu8(near_pair, limits), limits);
        auto passing = static_cast<unsigned>(_mm_movemask_epi8(within));
        if (!passing) continue;
        alignas(kLineItems) std::uint8_t near_sums[kLineItems];
        _mm_store_si128(reinterpret_cast<__m128i*>(near_sums), near_pair);
        for (; passing; passing &= passing - 1) {
            const auto place = static_cast<std::size_t>(__builtin_ctz(passing));
            const int both = own + near_sums[place] + far[0][line[2 * kLineItems + place]] +
                             far[1][line[3 * kLineItems + place]];
            survivors[found] = static_cast<std::uint32_t>(at * kLineItems + place);
            sums[found] = static_cast<std::uint8_t>(std::min(both, kFullDeficit));
            found += both <= three;
        }
    }
    return found;
}

}  // namespace

Kernels avx2_kernels() {
    return {
        .name = "avx2",
        // A scan is bound by look-ups, not by memory.
        .costs = {.scan = 80.7e3,
                  .scanned_item = 0.478,
                  .scan_growth = 0.225,
                  .cells = 15.5e3,
                  .line = 16.9,
                  .found_item = 768.0,
                  .few_items = 105'000,
                  .allowed_item = 10.4,
                  .filtered_code = 0.994},
        .refinements = CoarseTables<64>::kRounds,
        .sub_item_scores = sub_item_scores_avx2,
        .extremes = extremes_avx2,
        .largest_magnitude = largest_magnitude_avx2,
        .quantise = quantise_avx2,
        .look_up = look_up_avx2,
        .find_blocks = find_blocks_avx2,
        .filter_blocks = filter_blocks_avx2,
        .filter_codes = filter_codes_avx2,
        .count_bits = count_bits_popcnt,
        .filter_lines = filter_lines_avx2,
        .select = select_avx2,
        .convolve = convolve_avx2,
        .tilt = tilt_avx2,
    };
}

}  // namespace recprune

#endif
