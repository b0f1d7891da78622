// Kernels for AVX-512 without VBMI (Skylake-SP, Cascade Lake): the finest permutation is that of
// 16-bit words. Functions have the target attribute, not the file: see ARCHITECTURE.md.
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/avx512_lines.hpp"
#include "kernels/bodies.hpp"
#include "kernels/kernels.hpp"
#include "kernels/two_stages.hpp"

namespace recprune {

namespace {

// What a register holds.
constexpr std::size_t kBytes = 64;
constexpr std::size_t kWords = 32;
constexpr std::size_t kFloats = 16;
constexpr std::size_t kDoubles = 8;
static_assert(kBytes == kBlockItems);

RECPRUNE_AVX512BW void sub_item_scores_avx512bw(const float* sequence_embedding,
                                                const float* transposed, std::size_t num_splits,
                                                std::size_t width, std::size_t num_sub_items,
                                                float* sub_item_scores) {
    constexpr std::size_t kVectors = 16;  // 256 sums: the table is read from front to back
    // What is prefetched so far ahead: by itself, a processor stops at the end of every page.
    constexpr std::size_t kAhead = 1024;
    for (std::size_t split = 0; split < num_splits; ++split) {
        const float* phi = sequence_embedding + split * width;
        const float* table = transposed + split * width * num_sub_items;
        float* out = sub_item_scores + split * num_sub_items;
        for (std::size_t first = 0; first < num_sub_items; first += kFloats * kVectors) {
            __m512 sums[kVectors];
            __mmask16 lanes[kVectors];
            for (std::size_t v = 0; v < kVectors; ++v) {
                const std::size_t begin = first + kFloats * v;
                const std::size_t left = num_sub_items > begin ? num_sub_items - begin : 0;
                lanes[v] = static_cast<__mmask16>(left >= kFloats ? 0xFFFFu : (1u << left) - 1u);
                sums[v] = _mm512_mul_ps(_mm512_set1_ps(phi[0]),
                                        _mm512_maskz_loadu_ps(lanes[v], table + begin));
            }
            for (std::size_t j = 1; j < width; ++j) {
                const __m512 factor = _mm512_set1_ps(phi[j]);
                const float* row = table + j * num_sub_items + first;
                for (std::size_t v = 0; v < kVectors; ++v) {
                    __builtin_prefetch(row + kFloats * v + kAhead);
                    const __m512 product =
                        _mm512_mul_ps(factor, _mm512_maskz_loadu_ps(lanes[v], row + kFloats * v));
                    sums[v] = _mm512_add_ps(sums[v], product);  // never fused: two roundings
                }
            }
            for (std::size_t v = 0; v < kVectors; ++v)
                _mm512_mask_storeu_ps(out + first + kFloats * v, lanes[v], sums[v]);
        }
    }
}

RECPRUNE_AVX512BW void extremes_avx512bw(const float* values, std::size_t count, float* lowest,
                                         float* highest) {
    extremes_body(values, count, lowest, highest);
}

RECPRUNE_AVX512BW std::int32_t largest_magnitude_avx512bw(const float* values, std::size_t count) {
    return largest_magnitude_body(values, count);
}

RECPRUNE_AVX512BW void quantise_avx512bw(const float* scores, std::size_t count, double highest,
                                         double scale, std::uint8_t* out) {
    const __m512d highests = _mm512_set1_pd(highest);
    const __m512d scales = _mm512_set1_pd(scale);
    const __m512d full = _mm512_set1_pd(double{kFullDeficit});
    for (std::size_t b = 0; b < count; b += kDoubles) {
        const auto lanes =
            static_cast<__mmask8>(count - b >= kDoubles ? 0xFFu : (1u << (count - b)) - 1u);
        const __m512d values = _mm512_cvtps_pd(_mm256_maskz_loadu_ps(lanes, scores + b));
        const __m512d units = _mm512_mul_pd(_mm512_sub_pd(highests, values), scales);
        const __m256i whole = _mm512_cvttpd_epi32(_mm512_min_pd(units, full));
        _mm256_mask_cvtepi32_storeu_epi8(out + b, lanes, whole);
    }
}

// A table of words, looked up by one permutation: entry b of a table of 64 bytes, and in the upper
// byte that of another one.
struct WordTable {
    __m512i halves[2];
};

RECPRUNE_AVX512BW inline WordTable load_words(const std::uint8_t* lower,
                                              const std::uint8_t* upper) {
    auto words = [&](std::size_t first) RECPRUNE_AVX512BW {
        auto load = [&](const std::uint8_t* table) RECPRUNE_AVX512BW {
            const auto* bytes = reinterpret_cast<const __m256i*>(table + first);
            return _mm512_cvtepu8_epi16(_mm256_loadu_si256(bytes));
        };
        return _mm512_or_si512(load(lower), _mm512_slli_epi16(load(upper), 8));
    };
    return {{words(0), words(kWords)}};
}

// Of a table of 64 bytes, with every entry in both bytes of its word.
RECPRUNE_AVX512BW inline WordTable load_64(const std::uint8_t* table) {
    return load_words(table, table);
}

// Of one of 128 bytes.
RECPRUNE_AVX512BW inline WordTable load_128(const std::uint8_t* table) {
    return load_words(table, table + kBytes);
}

// Words that belong to the codes in even and in odd places.
struct FoundWords {
    __m512i even;
    __m512i odd;
};

// A permutation goes by the six lowest bits of a word: by those of the code in its lower byte.
RECPRUNE_AVX512BW inline FoundWords find_words(const WordTable& table, __m512i codes) {
    const __m512i odd_codes = _mm512_srli_epi16(codes, 8);
    return {_mm512_permutex2var_epi16(table.halves[0], codes, table.halves[1]),
            _mm512_permutex2var_epi16(table.halves[0], odd_codes, table.halves[1])};
}

constexpr __mmask64 kOdd = 0xAAAAAAAAAAAAAAAAull;

// The entries at 64 codes, by their six lowest bits.
RECPRUNE_AVX512BW inline __m512i look_up_64(const WordTable& table, __m512i codes) {
    const FoundWords words = find_words(table, codes);
    return _mm512_mask_blend_epi8(kOdd, words.even, words.odd);
}

// Which byte of each code's word it is, the code's bit 6 says.
RECPRUNE_AVX512BW inline __m512i choose_bytes(const FoundWords& words, __m512i codes) {
    const __m512i lower = _mm512_mask_blend_epi8(kOdd, words.even, _mm512_slli_epi16(words.odd, 8));
    const __m512i upper = _mm512_mask_blend_epi8(kOdd, _mm512_srli_epi16(words.even, 8), words.odd);
    const __mmask64 bit6 = _mm512_test_epi8_mask(codes, _mm512_set1_epi8(0x40));
    return _mm512_mask_blend_epi8(bit6, lower, upper);
}

// The same by seven bits.
RECPRUNE_AVX512BW inline __m512i look_up_128(const WordTable& table, __m512i codes) {
    return choose_bytes(find_words(table, codes), codes);
}

// The same by all bits.
RECPRUNE_AVX512BW inline __m512i look_up_256(const WordTable& first, const WordTable& second,
                                             __m512i codes) {
    const FoundWords below = find_words(first, codes);
    const FoundWords above = find_words(second, codes);
    const __mmask32 even = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x80));
    const __mmask32 odd = _mm512_movepi16_mask(codes);
    return choose_bytes({_mm512_mask_blend_epi16(even, below.even, above.even),
                         _mm512_mask_blend_epi16(odd, below.odd, above.odd)},
                        codes);
}

RECPRUNE_AVX512BW void look_up_avx512bw(const std::uint8_t* table, const std::uint8_t* codes,
                                        std::uint8_t* out) {
    const WordTable first = load_128(table);
    const WordTable second = load_128(table + 2 * kBytes);
    for (std::size_t i = 0; i < kMaxNarrowSubItems; i += kBytes)
        _mm512_storeu_si512(out + i, look_up_256(first, second, _mm512_loadu_si512(codes + i)));
}

// Ranks within a block, at most 63, are prefix sums of bits: those of an item's own byte are
// counted under a mask, and those of the bytes before it come from one multiplication.
RECPRUNE_AVX512BW inline __m512i ranks_of(std::uint64_t changes) {
    alignas(kBytes) static constexpr std::array<std::uint8_t, kBytes> kByte = [] {
        std::array<std::uint8_t, kBytes> byte{};
        for (std::size_t lane = 0; lane < kBytes; ++lane)
            byte[lane] = static_cast<std::uint8_t>(lane / 8);
        return byte;
    }();
    const __m512i byte = _mm512_load_si512(kByte.data());
    const __m512i up_to_lane = _mm512_set1_epi64(static_cast<long long>(0xFF7F3F1F0F070301ull));
    const __m512i counts =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
    const __m512i nibble = _mm512_set1_epi8(0x0F);
    const __m512i bits = _mm512_set1_epi64(static_cast<long long>(changes));
    const __m512i own = _mm512_and_si512(_mm512_shuffle_epi8(bits, byte), up_to_lane);
    const __m512i lower = _mm512_and_si512(own, nibble);
    const __m512i upper = _mm512_and_si512(_mm512_srli_epi16(own, 4), nibble);
    const __m512i within =
        _mm512_add_epi8(_mm512_shuffle_epi8(counts, lower), _mm512_shuffle_epi8(counts, upper));
    const __m512i before = _mm512_set1_epi64(static_cast<long long>(bits_before_bytes(changes)));
    return _mm512_add_epi8(within, _mm512_shuffle_epi8(before, byte));
}

RECPRUNE_AVX512BW inline __m512i look_up_sorted(const SortedRow& row, std::size_t block) {
    const std::uint64_t changes = row.changes[block];
    const std::uint8_t* deficits = row.deficits + row.bases[block];
    const __m512i ranks = ranks_of(changes);
    auto sixteen = [&](std::size_t first) RECPRUNE_AVX512BW {
        return _mm512_broadcast_i32x4(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(deficits + first)));
    };
    const __m512i first = _mm512_shuffle_epi8(sixteen(0), ranks);
    if (std::popcount(changes) < 16) return first;  // as nearly always in a large catalogue
    const __mmask64 bit4 = _mm512_test_epi8_mask(ranks, _mm512_set1_epi8(0x10));
    const __mmask64 bit5 = _mm512_test_epi8_mask(ranks, _mm512_set1_epi8(0x20));
    const __m512i below = _mm512_mask_shuffle_epi8(first, bit4, sixteen(16), ranks);
    const __m512i third = _mm512_shuffle_epi8(sixteen(32), ranks);
    const __m512i above = _mm512_mask_shuffle_epi8(third, bit4, sixteen(48), ranks);
    return _mm512_mask_blend_epi8(bit5, below, above);
}

RECPRUNE_AVX512BW inline __m512i codes_of(const CodeRow& row, std::size_t block) {
    return _mm512_loadu_si512(row.codes + block * kBlockItems);
}

// Coarse rows, ready for look-ups.
class CoarseSums {
  public:
    RECPRUNE_AVX512BW explicit CoarseSums(const CoarseRows& coarse) : coarse_(coarse) {
        const auto [rows, whole, half, quarter] = coarse;
        WordTable* table = tables_.data();
        for (std::size_t row = 0; row < whole + half + quarter; ++row) {
            const std::uint8_t* deficits = rows[row].deficits;
            *table++ = row < whole + half ? load_128(deficits) : load_64(deficits);
            if (row < whole) *table++ = load_128(deficits + 2 * kBytes);
        }
    }

    // Adds the deficits of a block's items in the rows that are whole or half.
    RECPRUNE_AVX512BW __m512i add_finer(__m512i sums, std::size_t block) const {
        const auto [rows, whole, half, _] = coarse_;
        const WordTable* table = tables_.data();
        for (std::size_t row = 0; row < whole; ++row, table += 2)
            sums =
                _mm512_adds_epu8(sums, look_up_256(table[0], table[1], codes_of(rows[row], block)));
        for (std::size_t row = whole; row < whole + half; ++row, ++table)
            sums = _mm512_adds_epu8(sums, look_up_128(*table, codes_of(rows[row], block)));
        return sums;
    }

    // The same for the others, which are `quarter`.
    RECPRUNE_AVX512BW __m512i add_quarters(__m512i sums, std::size_t block,
                                           std::size_t quarter) const {
        const CodeRow* rows = coarse_.rows + coarse_.whole + coarse_.half;
        const WordTable* tables = tables_.data() + 2 * coarse_.whole + coarse_.half;
        for (std::size_t row = 0; row < quarter; ++row)
            sums = _mm512_adds_epu8(sums, look_up_64(tables[row], codes_of(rows[row], block)));
        return sums;
    }

  private:
    CoarseRows coarse_;
    std::array<WordTable, 2 * kMostCoarseRows> tables_;
};

// With their number known at compile time, no loop over rows has an end to be mispredicted; for
// more of them, or finer ones, `known` is kMostKnownRows.
template <std::size_t known>
RECPRUNE_AVX512BW std::size_t find_coarsely_in(const SortedRow& sorted, const CoarseRows& coarse,
                                               std::size_t begin, std::size_t end, int limit,
                                               std::uint32_t* found, std::uint64_t* items) {
    const CoarseSums rows(coarse);
    const __m512i limits = _mm512_set1_epi8(static_cast<char>(limit));
    std::size_t num_found = 0;
    for (std::size_t block = begin; block < end; ++block) {
        __m512i sums = look_up_sorted(sorted, block);
        if constexpr (known == kMostKnownRows) sums = rows.add_finer(sums, block);
        sums = rows.add_quarters(sums, block, known < kMostKnownRows ? known : coarse.quarter);
        const std::uint64_t within = _mm512_cmple_epu8_mask(sums, limits);
        // Written always, counted only if there are any: no branch to mispredict.
        found[num_found] = static_cast<std::uint32_t>(block);
        items[num_found] = within;
        num_found += within != 0;
    }
    return num_found;
}

RECPRUNE_AVX512BW std::size_t find_coarsely_avx512bw(const SortedRow& sorted,
                                                     const CoarseRows& coarse, std::size_t begin,
                                                     std::size_t end, int limit,
                                                     std::uint32_t* found, std::uint64_t* items) {
    constexpr std::array kFind = {find_coarsely_in<0>, find_coarsely_in<1>,
                                  find_coarsely_in<2>, find_coarsely_in<3>,
                                  find_coarsely_in<4>, find_coarsely_in<5>,
                                  find_coarsely_in<6>, find_coarsely_in<kMostKnownRows>};
    const bool has_finer = coarse.whole + coarse.half > 0;
    const std::size_t known = has_finer ? kMostKnownRows : std::min(coarse.quarter, kMostKnownRows);
    return kFind[known](sorted, coarse, begin, end, limit, found, items);
}

RECPRUNE_AVX512BW void look_up_sorted_avx512bw(const SortedRow& row, std::size_t block,
                                               std::uint8_t* sums) {
    _mm512_storeu_si512(sums, look_up_sorted(row, block));
}

RECPRUNE_AVX512BW void add_rows_avx512bw(const CodeRow* rows, std::size_t count, std::size_t block,
                                         std::uint8_t* sums) {
    __m512i totals = _mm512_loadu_si512(sums);
    for (std::size_t row = 0; row < count; ++row) {
        const std::uint8_t* deficits = rows[row].deficits;
        totals = _mm512_adds_epu8(totals,
                                  look_up_256(load_128(deficits), load_128(deficits + 2 * kBytes),
                                              codes_of(rows[row], block)));
    }
    _mm512_storeu_si512(sums, totals);
}

RECPRUNE_AVX512BW std::uint64_t find_within_avx512bw(const std::uint8_t* sums, int limit) {
    return _mm512_cmple_epu8_mask(_mm512_loadu_si512(sums),
                                  _mm512_set1_epi8(static_cast<char>(limit)));
}

RECPRUNE_AVX512BW FoundBlocks find_blocks_avx512bw(const FilterRows& filter, std::size_t begin,
                                                   std::size_t end, int limit, std::uint32_t* found,
                                                   std::uint8_t* sums) {
    return find_blocks_body<kBytes>(filter, begin, end, limit, found, sums, find_coarsely_avx512bw,
                                    look_up_sorted_avx512bw, add_rows_avx512bw,
                                    find_within_avx512bw);
}

RECPRUNE_AVX512BW std::size_t filter_blocks_avx512bw(const CodeRow* rows, std::size_t count,
                                                     std::uint32_t* blocks, std::size_t num_blocks,
                                                     std::uint8_t* sums, int limit,
                                                     std::uint64_t* items) {
    return filter_blocks_body(rows, count, blocks, num_blocks, sums, limit, items,
                              find_within_avx512bw, add_rows_avx512bw);
}

RECPRUNE_AVX512BW void tilt_avx512bw(const float* values, const float* weights, std::size_t count,
                                     float highest, float tilt, float* sums) {
    tilt_body<64>(values, weights, count, highest, tilt, sums);
}

RECPRUNE_AVX512BW void convolve_avx512bw(const float* counts, const float* values, float* sums) {
    convolve_body<64>(counts, values, sums);
}

// Four lines at a time. What passes, about one item of these, is written without a branch as long
// as it is one.
RECPRUNE_AVX512BW std::size_t filter_lines_avx512bw(const std::uint8_t* lines,
                                                    const LineBatch& batch,
                                                    const std::uint8_t* const* tables, int two,
                                                    int three, std::uint32_t* survivors,
                                                    std::uint8_t* sums) {
    const ChainLimits limits(two, three);
    WordTable lower[4];
    WordTable upper[4];
    for (std::size_t table = 0; table < 4; ++table) {
        lower[table] = load_128(tables[table]);
        upper[table] = load_128(tables[table] + 2 * kBytes);
    }
    std::size_t found = 0;
    for (std::size_t at = batch.begin; at < batch.end; at += kLinesAtOnce) {
        const FourLines four = load_four_lines(lines, batch, at);
        __m512i deficits[4];
        for (std::size_t table = 0; table < 4; ++table)
            deficits[table] = look_up_256(lower[table], upper[table], four.codes[table]);
        const WithinLimits within =
            limits.find_within(four, _mm512_adds_epu8(deficits[0], deficits[1]),
                               _mm512_adds_epu8(deficits[2], deficits[3]));
        alignas(kBytes) std::uint8_t totals[kBytes];
        _mm512_store_si512(totals, within.sums);
        const std::size_t first = at * kLineItems;
        auto write = [&](std::uint64_t mask) {
            const auto item = static_cast<std::size_t>(std::countr_zero(mask));
            survivors[found] = static_cast<std::uint32_t>(first + item);
            sums[found] = totals[item % kBytes];  // of no item: any
            found += mask != 0;
        };
        const std::uint64_t passing = within.items;
        write(passing);
        for (std::uint64_t rest = passing & (passing - 1); rest; rest &= rest - 1) write(rest);
    }
    return found;
}

}  // namespace

Kernels avx512bw_kernels() {
    Kernels kernels = avx2_kernels();
    kernels.name = "avx512bw";
    kernels.costs = {.scan = 59.4e3,
                     .scanned_item = 0.266,
                     .scan_growth = 0.209,
                     .cells = 14.7e3,
                     .line = 9.49,
                     .found_item = 522.0,
                     .few_items = 44'800,
                     .allowed_item = 11.8,
                     .filtered_code = 0.988};
    kernels.refinements = CoarseTables<kBytes>::kRounds;
    kernels.sub_item_scores = sub_item_scores_avx512bw;
    kernels.extremes = extremes_avx512bw;
    kernels.largest_magnitude = largest_magnitude_avx512bw;
    kernels.quantise = quantise_avx512bw;
    kernels.look_up = look_up_avx512bw;
    kernels.find_blocks = find_blocks_avx512bw;
    kernels.filter_blocks = filter_blocks_avx512bw;
    kernels.filter_lines = filter_lines_avx512bw;
    kernels.convolve = convolve_avx512bw;
    kernels.tilt = tilt_avx512bw;
    return kernels;
}

}  // namespace recprune

#endif
