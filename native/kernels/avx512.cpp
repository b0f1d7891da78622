// Kernels for AVX-512 with VBMI, VBMI2 and BITALG. Functions have the target attribute, not the
// file: see ARCHITECTURE.md.
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/avx512_tables.hpp"
#include "kernels/bodies.hpp"
#include "kernels/code_filters.hpp"
#include "kernels/kernels.hpp"

namespace recprune {

namespace {

// What a register holds, beside 64 bytes.
constexpr std::size_t kKeys = 32;
constexpr std::size_t kFloats = 16;
constexpr std::size_t kDoubles = 8;
static_assert(kKeys == kGroupItems);

RECPRUNE_AVX512 void sub_item_scores_avx512(const float* sequence_embedding,
                                            const float* transposed, std::size_t num_splits,
                                            std::size_t width, std::size_t num_sub_items,
                                            float* sub_item_scores) {
    constexpr std::size_t kVectors = 16;  // 256 sums: the table is read from front to back
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

RECPRUNE_AVX512 void quantise_avx512(const float* scores, std::size_t count, double highest,
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

// All sums stay in registers.
RECPRUNE_AVX512 void convolve_avx512(const float* first, const float* second, float* sums) {
    constexpr std::size_t kVectors = kDepth / kFloats;
    __m512 totals[kVectors];
    for (auto& total : totals) total = _mm512_setzero_ps();
    for (std::size_t q = 0; q < kDepth; ++q) {
        const __m512 factor = _mm512_set1_ps(first[q]);
        for (std::size_t v = 0; v < kVectors; ++v) {
            const __m512 shifted = _mm512_loadu_ps(second + kFloats * v - q);
            totals[v] = _mm512_add_ps(totals[v], _mm512_mul_ps(factor, shifted));
        }
    }
    for (std::size_t v = 0; v < kVectors; ++v) _mm512_storeu_ps(sums + kFloats * v, totals[v]);
}

RECPRUNE_AVX512 inline __m512i add_rows_avx512(const CodeRow* rows, std::size_t count,
                                               std::size_t block, __m512i totals) {
    for (std::size_t row = 0; row < count; ++row) {
        const __m512i codes = _mm512_loadu_si512(rows[row].codes + block * kBlockItems);
        totals = _mm512_adds_epu8(totals, look_up(load_table(rows[row].deficits), codes));
    }
    return totals;
}

// Adds up rows. With their number known at compile time, their tables stay in registers; where
// there are more than kMostKnownRows, the tables of the others are loaded again for every block.
template <std::size_t known>
class RowSums {
  public:
    RECPRUNE_AVX512 RowSums(const CodeRow* rows, std::size_t count) : rows_(rows), count_(count) {
        for (std::size_t row = 0; row < known; ++row) tables_[row] = load_table(rows[row].deficits);
    }

    RECPRUNE_AVX512 __m512i add_to(__m512i totals, std::size_t block) const {
        for (std::size_t row = 0; row < known; ++row) {
            const __m512i codes = _mm512_loadu_si512(rows_[row].codes + block * kBlockItems);
            totals = _mm512_adds_epu8(totals, look_up(tables_[row], codes));
        }
        if constexpr (known == kMostKnownRows)
            totals = add_rows_avx512(rows_ + known, count_ - known, block, totals);
        return totals;
    }

  private:
    const CodeRow* rows_;
    std::size_t count_;
    std::array<Table, known> tables_;
};

// Ranks within a block, at most 63, are prefix sums of bits: those of an item's own byte are
// counted under a mask, and those of the bytes before it come from one multiplication.
RECPRUNE_AVX512 inline __m512i look_up_sorted(const SortedRow& row, std::size_t block) {
    alignas(kBytes) static constexpr std::array<std::uint8_t, kBytes> kByte = [] {
        std::array<std::uint8_t, kBytes> byte{};
        for (std::size_t lane = 0; lane < kBytes; ++lane)
            byte[lane] = static_cast<std::uint8_t>(lane / 8);
        return byte;
    }();
    const __m512i byte = _mm512_load_si512(kByte.data());
    const __m512i up_to_lane = _mm512_set1_epi64(static_cast<long long>(0xFF7F3F1F0F070301ull));
    const auto changes = static_cast<long long>(row.changes[block]);
    const __m512i own = _mm512_shuffle_epi8(_mm512_set1_epi64(changes), byte);
    const __m512i within = _mm512_popcnt_epi8(_mm512_and_si512(own, up_to_lane));
    const auto counts =
        static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_popcnt_epi8(_mm_cvtsi64_si128(changes))));
    const auto sums = static_cast<long long>(counts * 0x0101010101010100ull);
    const __m512i before = _mm512_shuffle_epi8(_mm512_set1_epi64(sums), byte);
    return _mm512_permutexvar_epi8(_mm512_add_epi8(within, before),
                                   _mm512_loadu_si512(row.deficits + row.bases[block]));
}

RECPRUNE_AVX512 void look_up_avx512(const std::uint8_t* table, const std::uint8_t* codes,
                                    std::uint8_t* out) {
    const Table whole = load_table(table);
    for (std::size_t i = 0; i < kMaxNarrowSubItems; i += kBytes)
        _mm512_storeu_si512(out + i, look_up(whole, _mm512_loadu_si512(codes + i)));
}

// Nothing here depends on a branch: every block's sums are written, and stay if the block is found.
template <std::size_t known>
RECPRUNE_AVX512 std::size_t find_blocks_in(const FilterRows& filter, std::size_t begin,
                                           std::size_t end, int limit, std::uint32_t* found,
                                           std::uint8_t* sums) {
    const auto [sorted, rows, near, count] = filter;
    const RowSums<known> near_rows(rows, near);
    const __m512i limits = _mm512_set1_epi8(static_cast<char>(limit));
    std::size_t num_found = 0;
    std::size_t last_found = begin;
    for (std::size_t block = begin; block < end; ++block) {
        const __m512i totals = near_rows.add_to(look_up_sorted(sorted, block), block);
        const bool passing = _mm512_cmple_epu8_mask(totals, limits) != 0;
        _mm512_storeu_si512(sums + num_found * kBlockItems, totals);
        found[num_found] = static_cast<std::uint32_t>(block);
        num_found += passing;
        last_found = passing ? block : last_found;
        prefetch_rows(rows + near, count - near, last_found);
    }
    return num_found;
}

RECPRUNE_AVX512 std::size_t find_blocks_avx512(const FilterRows& rows, std::size_t begin,
                                               std::size_t end, int limit, std::uint32_t* found,
                                               std::uint8_t* sums) {
    constexpr std::array kFind = {
        find_blocks_in<0>, find_blocks_in<1>, find_blocks_in<2>, find_blocks_in<3>,
        find_blocks_in<4>, find_blocks_in<5>, find_blocks_in<6>, find_blocks_in<kMostKnownRows>};
    return kFind[std::min(rows.near, kMostKnownRows)](rows, begin, end, limit, found, sums);
}

template <std::size_t known>
RECPRUNE_AVX512 std::size_t filter_blocks_in(const CodeRow* rows, std::size_t count,
                                             std::uint32_t* blocks, std::size_t num_blocks,
                                             std::uint8_t* sums, int limit, std::uint64_t* items) {
    const RowSums<known> far_rows(rows, count);
    const __m512i limits = _mm512_set1_epi8(static_cast<char>(limit));
    std::size_t kept = 0;
    for (std::size_t at = 0; at < num_blocks; ++at) {
        const __m512i so_far = _mm512_loadu_si512(sums + at * kBlockItems);
        const __m512i totals = far_rows.add_to(so_far, blocks[at]);
        const std::uint64_t passing = _mm512_cmple_epu8_mask(totals, limits);
        blocks[kept] = blocks[at];
        _mm512_storeu_si512(sums + kept * kBlockItems, totals);
        items[kept] = passing;
        kept += passing != 0;
    }
    return kept;
}

RECPRUNE_AVX512 std::size_t filter_blocks_avx512(const CodeRow* rows, std::size_t count,
                                                 std::uint32_t* blocks, std::size_t num_blocks,
                                                 std::uint8_t* sums, int limit,
                                                 std::uint64_t* items) {
    constexpr std::array kFilter = {filter_blocks_in<0>, filter_blocks_in<1>,
                                    filter_blocks_in<2>, filter_blocks_in<3>,
                                    filter_blocks_in<4>, filter_blocks_in<5>,
                                    filter_blocks_in<6>, filter_blocks_in<kMostKnownRows>};
    const auto filter = kFilter[std::min(count, kMostKnownRows)];
    return filter(rows, count, blocks, num_blocks, sums, limit, items);
}

RECPRUNE_AVX512 std::size_t count_bits_avx512(const std::uint64_t* words, std::size_t count) {
    return count_bits_body(words, count);
}

RECPRUNE_AVX512 std::size_t select_avx512(const std::uint8_t* deficits, int limit,
                                          std::uint8_t* selected) {
    alignas(kBytes) static constexpr std::array<std::uint8_t, kBytes> kCounting = [] {
        std::array<std::uint8_t, kBytes> counting{};
        for (std::size_t b = 0; b < kBytes; ++b) counting[b] = static_cast<std::uint8_t>(b);
        return counting;
    }();
    const __m512i limits = _mm512_set1_epi8(static_cast<char>(limit));
    __m512i ids = _mm512_load_si512(kCounting.data());
    std::size_t found = 0;
    for (std::size_t first = 0; first < kMaxNarrowSubItems; first += kBytes) {
        const __mmask64 within =
            _mm512_cmple_epu8_mask(_mm512_loadu_si512(deficits + first), limits);
        _mm512_storeu_si512(selected + found, _mm512_maskz_compress_epi8(within, ids));
        found += static_cast<std::size_t>(__builtin_popcountll(within));
        ids = _mm512_add_epi8(ids, _mm512_set1_epi8(char{kBytes}));
    }
    return found;
}

RECPRUNE_AVX512 void count_buckets_avx512(const std::uint8_t* deficits, float* counts) {
    const Table table = load_table(deficits);
    int before = 0;
    for (std::size_t x = 0; x < kBuckets; ++x) {
        const __m512i end = _mm512_set1_epi8(static_cast<char>((x + 1) * kBucketUnits));
        int below = 0;
        for (const __m512i quarter : table.quarters)
            below += __builtin_popcountll(_mm512_cmplt_epu8_mask(quarter, end));
        counts[x] = static_cast<float>(below - before);
        before = below;
    }
}

// The deficits of 32 keys: 16-bit sums of the two bytes' look-ups.
RECPRUNE_AVX512 inline __m512i look_up_keys(const Table& low, const Table& high, __m512i keys) {
    constexpr __mmask64 kOdd = 0xAAAAAAAAAAAAAAAAull;
    const __m512i deficits = _mm512_mask_blend_epi8(kOdd, look_up(low, keys), look_up(high, keys));
    return _mm512_maddubs_epi16(deficits, _mm512_set1_epi8(1));
}

// A place says where an item is in its group, in its lower bits, and in the others, what both_limit
// leaves to the last key.
constexpr int kLaneBits = 5;
static_assert(1 << kLaneBits == kGroupItems);

// Items that their next keys let through. There is room for a whole register behind the last.
struct PackedItems {
    static constexpr std::size_t kRoom = kBatchItems + kGroupItems;
    std::uint32_t groups[kRoom];  // where the group of an item begins
    std::uint16_t last_keys[kRoom];
    std::uint16_t places[kRoom];
};

// Holds the items of all parts against their next keys and packs those that pass, without a branch
// that could be mispredicted; returns how many.
RECPRUNE_AVX512 RECPRUNE_BODY std::size_t pack_items(const CellPart* parts, std::size_t count,
                                                     const std::uint16_t* keys,
                                                     const std::uint8_t* const* tables,
                                                     PackedItems& items) {
    alignas(kBytes) static constexpr std::array<std::uint16_t, kKeys> kLanes = [] {
        std::array<std::uint16_t, kKeys> lanes{};
        for (std::uint16_t lane = 0; lane < kKeys; ++lane) lanes[lane] = lane;
        return lanes;
    }();
    const __m512i lanes = _mm512_load_si512(kLanes.data());
    const Table low = load_table(tables[0]);
    const Table high = load_table(tables[1]);
    std::size_t packed = 0;
    for (std::size_t part = 0; part < count; ++part) {
        const auto [start, length, next_limit, both_limit] = parts[part];
        const __m512i limits = _mm512_set1_epi16(next_limit);
        const __m512i whole = _mm512_or_si512(
            _mm512_set1_epi16(static_cast<std::int16_t>(both_limit << kLaneBits)), lanes);
        for (std::uint32_t group = 0; group < length; group += kGroupItems) {
            const std::uint32_t size = group_size(length - group);
            const std::uint16_t* next_keys = keys + 2 * std::size_t{start + group};
            const __m512i next = look_up_keys(low, high, _mm512_loadu_si512(next_keys));
            const auto inside = static_cast<__mmask32>((std::uint64_t{1} << size) - 1);
            const __mmask32 passing = _mm512_mask_cmple_epi16_mask(inside, next, limits);
            const __m512i left = _mm512_sub_epi16(whole, _mm512_slli_epi16(next, kLaneBits));
            const __m512i last_keys = _mm512_loadu_si512(next_keys + size);
            _mm512_storeu_si512(items.last_keys + packed,
                                _mm512_maskz_compress_epi16(passing, last_keys));
            _mm512_storeu_si512(items.places + packed, _mm512_maskz_compress_epi16(passing, left));
            const __m512i first = _mm512_set1_epi32(static_cast<int>(start + group));
            _mm512_storeu_si512(items.groups + packed, first);
            _mm512_storeu_si512(items.groups + packed + kFloats, first);
            packed += static_cast<std::size_t>(__builtin_popcount(passing));
        }
    }
    return packed;
}

// Holds packed items against their last keys, in full vectors; returns how many pass.
RECPRUNE_AVX512 RECPRUNE_BODY std::size_t filter_packed(const PackedItems& items,
                                                        std::size_t packed,
                                                        const std::uint8_t* const* tables,
                                                        std::uint32_t* survivors) {
    constexpr std::uint16_t kLane = (1u << kLaneBits) - 1u;
    const Table low = load_table(tables[2]);
    const Table high = load_table(tables[3]);
    std::size_t found = 0;
    for (std::size_t place = 0; place < packed; place += kKeys) {
        const __m512i last = look_up_keys(low, high, _mm512_loadu_si512(items.last_keys + place));
        const __m512i left = _mm512_srli_epi16(_mm512_loadu_si512(items.places + place), kLaneBits);
        std::uint32_t passing = _mm512_cmple_epi16_mask(last, left);
        if (packed - place < kKeys) passing &= (1u << (packed - place)) - 1u;
        for (; passing; passing &= passing - 1) {
            const std::size_t at = place + static_cast<std::size_t>(__builtin_ctz(passing));
            survivors[found++] = items.groups[at] + (items.places[at] & kLane);
        }
    }
    return found;
}

RECPRUNE_AVX512 std::size_t filter_cells_avx512(const CellPart* parts, std::size_t count,
                                                const std::uint16_t* keys,
                                                const std::uint8_t* const* tables,
                                                const std::uint8_t*, std::uint32_t* survivors) {
    PackedItems items;
    const std::size_t packed = pack_items(parts, count, keys, tables, items);
    return filter_packed(items, packed, tables, survivors);
}

}  // namespace

Kernels avx512_kernels() {
    return {
        .name = "avx512",
        // A scan streams two to six bytes an item; a cell is two or three cache misses.
        .costs = {.scanned_item = 0.24,
                  .cell = 35.0,
                  .cell_item = 0.3,
                  .found_item = 200.0,
                  .few_items = 60'000,
                  .selective = 24,
                  .lists_are_cheap = true},
        .sub_item_scores = sub_item_scores_avx512,
        .quantise = quantise_avx512,
        .look_up = look_up_avx512,
        .find_blocks = find_blocks_avx512,
        .filter_blocks = filter_blocks_avx512,
        .filter_codes = filter_codes_avx512,
        .count_bits = count_bits_avx512,
        .filter_cells = filter_cells_avx512,
        .fill_pairs = nullptr,
        .select = select_avx512,
        .count_buckets = count_buckets_avx512,
        .convolve = convolve_avx512,
    };
}

}  // namespace recprune

#endif
