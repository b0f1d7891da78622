#include "kernels/kernels.hpp"

#include <algorithm>
#include <array>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace recprune {

namespace {

// Portable ----------------------------------------------------------------------------------------

// Independent sums side by side, each in the order of j: vectorises to the same bits anywhere.
#define RECPRUNE_SUB_ITEM_SCORES_BODY                                                     \
    for (std::size_t split = 0; split < num_splits; ++split) {                            \
        const float* phi = sequence_embedding + split * width;                            \
        const float* table = transposed + split * width * num_sub_items;                  \
        float* out = sub_item_scores + split * num_sub_items;                             \
        constexpr std::size_t kLanes = 64;                                                \
        std::size_t first = 0;                                                            \
        for (; first + kLanes <= num_sub_items; first += kLanes) {                        \
            float sums[kLanes];                                                           \
            for (std::size_t b = 0; b < kLanes; ++b) sums[b] = phi[0] * table[first + b]; \
            for (std::size_t j = 1; j < width; ++j) {                                     \
                const float* row = table + j * num_sub_items + first;                     \
                for (std::size_t b = 0; b < kLanes; ++b) sums[b] += phi[j] * row[b];      \
            }                                                                             \
            for (std::size_t b = 0; b < kLanes; ++b) out[first + b] = sums[b];            \
        }                                                                                 \
        for (; first < num_sub_items; ++first) {                                          \
            float sum = phi[0] * table[first];                                            \
            for (std::size_t j = 1; j < width; ++j)                                       \
                sum += phi[j] * table[j * num_sub_items + first];                         \
            out[first] = sum;                                                             \
        }                                                                                 \
    }

void sub_item_scores_portable(const float* sequence_embedding, const float* transposed,
                              std::size_t num_splits, std::size_t width, std::size_t num_sub_items,
                              float* sub_item_scores){RECPRUNE_SUB_ITEM_SCORES_BODY}
#define RECPRUNE_QUANTISE_BODY                                                                   \
    for (std::size_t b = 0; b < count; ++b) {                                                    \
        const double units = (highest - scores[b]) * scale;                                      \
        out[b] =                                                                                 \
            static_cast<std::uint8_t>(static_cast<std::int32_t>(units < 255.0 ? units : 255.0)); \
    }

void quantise_portable(const float* scores, std::size_t count, double highest, double scale,
                       std::uint8_t* out) {
    RECPRUNE_QUANTISE_BODY
}

void look_up_portable(const std::uint8_t* table, const std::uint8_t* codes, std::uint8_t* out) {
    for (std::size_t i = 0; i < 256; ++i) out[i] = table[codes[i]];
}

inline void prefetch_rows(const CodeRow* rows, std::size_t count, std::size_t block) {
    for (std::size_t row = 0; row < count; ++row)
        __builtin_prefetch(rows[row].codes + block * kBlockItems);
}

// Adds the deficits of a block's items in `count` rows, saturated at 255; returns the lowest sum.
template <std::size_t count>
int add_known_rows(const CodeRow* rows, std::size_t block, std::uint8_t* sums) {
    std::array<CodeRow, count> copies;  // whatever is written to sums, these stay in registers
    std::copy_n(rows, count, copies.begin());
    int lowest = 255;
    for (std::size_t item = 0; item < kBlockItems; ++item) {
        int sum = sums[item];
        for (const auto& [codes, deficits] : copies)
            sum += deficits[codes[block * kBlockItems + item]];
        lowest = sum < lowest ? sum : lowest;
        sums[item] = static_cast<std::uint8_t>(sum < 255 ? sum : 255);
    }
    return lowest;
}

// The same for any number: a few at a time, whose number is known at compile time.
int add_rows_portable(const CodeRow* rows, std::size_t count, std::size_t block,
                      std::uint8_t* sums) {
    constexpr std::array kAdd = {add_known_rows<0>, add_known_rows<1>, add_known_rows<2>,
                                 add_known_rows<3>, add_known_rows<4>, add_known_rows<5>,
                                 add_known_rows<6>, add_known_rows<7>};
    for (; count > 7; rows += 7, count -= 7) add_known_rows<7>(rows, block, sums);
    return kAdd[count](rows, block, sums);
}

std::size_t find_blocks_portable(const FilterRows& filter, std::size_t begin, std::size_t end,
                                 int limit, std::uint32_t* found, std::uint8_t* sums) {
    const auto [sorted, rows, near, count] = filter;  // whatever is written to sums, these stay
    std::size_t num_found = 0;
    for (std::size_t block = begin; block < end; ++block) {
        std::uint8_t* totals = sums + num_found * kBlockItems;
        const std::uint64_t steps = sorted.steps[block];
        std::size_t rank = sorted.bases[block];
        for (std::size_t lane = 0; lane < kBlockItems; ++lane) {
            rank += steps >> lane & 1u;
            totals[lane] = sorted.deficits[rank];
        }
        if (add_rows_portable(rows, near, block, totals) > limit) continue;
        prefetch_rows(rows + near, count - near, block);
        found[num_found++] = static_cast<std::uint32_t>(block);
    }
    return num_found;
}

std::size_t filter_blocks_portable(const CodeRow* rows, std::size_t count, std::uint32_t* blocks,
                                   std::size_t num_blocks, std::uint8_t* sums, int limit,
                                   std::uint64_t* items) {
    std::size_t kept = 0;
    for (std::size_t at = 0; at < num_blocks; ++at) {
        std::uint8_t totals[kBlockItems];
        std::copy_n(sums + at * kBlockItems, kBlockItems, totals);
        if (add_rows_portable(rows, count, blocks[at], totals) > limit) continue;
        std::uint64_t passing = 0;
        for (std::size_t item = 0; item < kBlockItems; ++item)
            passing |= static_cast<std::uint64_t>(totals[item] <= limit) << item;
        blocks[kept] = blocks[at];
        std::copy_n(totals, kBlockItems, sums + kept * kBlockItems);
        items[kept++] = passing;
    }
    return kept;
}

std::uint32_t group_size(std::uint32_t left) {
    constexpr auto kFull = static_cast<std::uint32_t>(kGroupItems);
    return left < kFull ? left : kFull;
}

std::size_t filter_cells_portable(const CellPart* parts, std::size_t count,
                                  const std::uint16_t* keys, const std::uint8_t* const*,
                                  const std::uint8_t* pairs, std::uint32_t* survivors) {
    std::size_t found = 0;
    for (std::size_t part = 0; part < count; ++part) {
        const auto [start, length, next_limit, both_limit] = parts[part];
        for (std::uint32_t group = 0; group < length; group += kGroupItems) {
            const std::uint32_t size = group_size(length - group);
            const std::uint16_t* near = keys + 2 * std::size_t{start + group};
            for (std::uint32_t lane = 0; lane < size; ++lane) {
                const int next = pairs[near[lane]];
                const int both = next + pairs[65'536 + near[size + lane]];
                // Written always, counted only if it passes: no branch to mispredict.
                survivors[found] = start + group + lane;
                found += static_cast<std::size_t>((next <= next_limit) & (both <= both_limit));
            }
        }
    }
    return found;
}

#define RECPRUNE_FILL_PAIRS_BODY                                          \
    for (std::size_t b = 0; b < 256; ++b) {                               \
        for (std::size_t a = 0; a < 256; ++a) {                           \
            const auto sum = static_cast<std::uint8_t>(low[a] + high[b]); \
            sums[a | b << 8] = sum < low[a] ? std::uint8_t{255} : sum;    \
        }                                                                 \
    }

void fill_pairs_portable(const std::uint8_t* low, const std::uint8_t* high,
                         std::uint8_t* sums){RECPRUNE_FILL_PAIRS_BODY}

std::size_t select_portable(const std::uint8_t* deficits, int limit, std::uint8_t* selected) {
    std::size_t found = 0;
    for (std::size_t b = 0; b < 256; ++b) {
        selected[found] = static_cast<std::uint8_t>(b);
        found += deficits[b] <= limit;
    }
    return found;
}

void count_buckets_portable(const std::uint8_t* deficits, float* counts) {
    for (std::size_t x = 0; x < kBuckets; ++x) counts[x] = 0.0f;
    for (std::size_t b = 0; b < 256; ++b) {
        if (deficits[b] < kDepth) ++counts[deficits[b] / kBucketUnits];
    }
}

#define RECPRUNE_CONVOLVE_BODY                                                        \
    for (std::size_t x = 0; x < kDepth; ++x) sums[x] = 0.0f;                          \
    for (std::size_t q = 0; q < kDepth; ++q) {                                        \
        if (first[q] == 0.0f) continue;                                               \
        for (std::size_t x = q; x < kDepth; ++x) sums[x] += first[q] * second[x - q]; \
    }

void convolve_portable(const float* first, const float* second, float* sums) {
    RECPRUNE_CONVOLVE_BODY
}

#if defined(__x86_64__)

// AVX2 --------------------------------------------------------------------------------------------

__attribute__((target("avx2"))) void sub_item_scores_avx2(const float* sequence_embedding,
                                                          const float* transposed,
                                                          std::size_t num_splits, std::size_t width,
                                                          std::size_t num_sub_items,
                                                          float* sub_item_scores) {
    RECPRUNE_SUB_ITEM_SCORES_BODY
}

__attribute__((target("avx2"))) void quantise_avx2(const float* scores, std::size_t count,
                                                   double highest, double scale,
                                                   std::uint8_t* out) {
    RECPRUNE_QUANTISE_BODY
}

__attribute__((target("avx2"))) void fill_pairs_avx2(const std::uint8_t* low,
                                                     const std::uint8_t* high, std::uint8_t* sums) {
    for (std::size_t b = 0; b < 256; ++b) {
        const __m256i added = _mm256_set1_epi8(static_cast<char>(high[b]));
        for (std::size_t a = 0; a < 256; a += 32) {
            const __m256i row = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low + a));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + (a | b << 8)),
                                _mm256_adds_epu8(row, added));
        }
    }
}

__attribute__((target("avx2"))) std::size_t select_avx2(const std::uint8_t* deficits, int limit,
                                                        std::uint8_t* selected) {
    const __m256i limits = _mm256_set1_epi8(static_cast<char>(limit));
    std::size_t found = 0;
    for (std::size_t first = 0; first < 256; first += 32) {
        const __m256i values =
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(deficits + first));
        // x ≤ limit is max(x, limit) == limit: AVX2 compares only signed bytes.
        const __m256i within = _mm256_cmpeq_epi8(_mm256_max_epu8(values, limits), limits);
        for (auto mask = static_cast<std::uint32_t>(_mm256_movemask_epi8(within)); mask;
             mask &= mask - 1)
            selected[found++] =
                static_cast<std::uint8_t>(first + static_cast<unsigned>(__builtin_ctz(mask)));
    }
    return found;
}

__attribute__((target("avx2"))) void convolve_avx2(const float* first, const float* second,
                                                   float* sums) {
    RECPRUNE_CONVOLVE_BODY
}

__attribute__((target("avx2"))) inline __m256i look_up_pairs(const std::uint8_t* pairs,
                                                             const std::uint16_t* keys) {
    const __m256i wide =
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(keys)));
    const __m256i words = _mm256_i32gather_epi32(reinterpret_cast<const int*>(pairs), wide, 1);
    return _mm256_and_si256(words, _mm256_set1_epi32(255));
}

__attribute__((target("avx2"))) inline unsigned lanes_within(__m256i sums, int limit) {
    const __m256i exceeding = _mm256_cmpgt_epi32(sums, _mm256_set1_epi32(limit));
    return ~static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(exceeding)));
}

__attribute__((target("avx2"))) std::size_t filter_cells_avx2(
    const CellPart* parts, std::size_t count, const std::uint16_t* keys, const std::uint8_t* const*,
    const std::uint8_t* pairs, std::uint32_t* survivors) {
    std::size_t found = 0;
    for (std::size_t part = 0; part < count; ++part) {
        const auto [start, length, next_limit, both_limit] = parts[part];
        for (std::uint32_t group = 0; group < length; group += kGroupItems) {
            const std::uint32_t size = group_size(length - group);
            const std::uint16_t* near = keys + 2 * std::size_t{start + group};
            for (std::uint32_t place = 0; place < size; place += 8) {
                const __m256i next = look_up_pairs(pairs, near + place);
                unsigned passing = lanes_within(next, next_limit);
                passing &= size - place < 8 ? (1u << (size - place)) - 1u : 255u;
                if (!passing) continue;
                const __m256i last = look_up_pairs(pairs + 65'536, near + size + place);
                passing &= lanes_within(_mm256_add_epi32(next, last), both_limit);
                for (; passing; passing &= passing - 1)
                    survivors[found++] =
                        start + group + place + static_cast<std::uint32_t>(__builtin_ctz(passing));
            }
        }
    }
    return found;
}

// AVX-512 with VBMI: a table of 256 bytes is two permutations of 128 and a choice
// ------------------

#define RECPRUNE_AVX512 \
    __attribute__((     \
        target("avx512f,avx512bw,avx512vbmi,avx512vbmi2,avx512bitalg,avx512vl,bmi,popcnt")))

struct Table {
    __m512i quarters[4];
};

RECPRUNE_AVX512 inline Table load_table(const std::uint8_t* table) {
    return {{_mm512_loadu_si512(table), _mm512_loadu_si512(table + 64),
             _mm512_loadu_si512(table + 128), _mm512_loadu_si512(table + 192)}};
}

RECPRUNE_AVX512 inline __m512i look_up(const Table& table, __m512i codes) {
    const __m512i lower = _mm512_permutex2var_epi8(table.quarters[0], codes, table.quarters[1]);
    const __m512i upper = _mm512_permutex2var_epi8(table.quarters[2], codes, table.quarters[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(codes), lower, upper);
}

RECPRUNE_AVX512 void sub_item_scores_avx512(const float* sequence_embedding,
                                            const float* transposed, std::size_t num_splits,
                                            std::size_t width, std::size_t num_sub_items,
                                            float* sub_item_scores) {
    constexpr std::size_t kVectors = 16;  // 256 sub-items: the table is read from front to back
    for (std::size_t split = 0; split < num_splits; ++split) {
        const float* phi = sequence_embedding + split * width;
        const float* table = transposed + split * width * num_sub_items;
        float* out = sub_item_scores + split * num_sub_items;
        for (std::size_t first = 0; first < num_sub_items; first += 16 * kVectors) {
            __m512 sums[kVectors];
            __mmask16 lanes[kVectors];
            for (std::size_t v = 0; v < kVectors; ++v) {
                const std::size_t begin = first + 16 * v;
                const std::size_t left = num_sub_items > begin ? num_sub_items - begin : 0;
                lanes[v] = static_cast<__mmask16>(left >= 16 ? 0xFFFFu : (1u << left) - 1u);
                sums[v] = _mm512_mul_ps(_mm512_set1_ps(phi[0]),
                                        _mm512_maskz_loadu_ps(lanes[v], table + begin));
            }
            for (std::size_t j = 1; j < width; ++j) {
                const __m512 factor = _mm512_set1_ps(phi[j]);
                const float* row = table + j * num_sub_items + first;
                for (std::size_t v = 0; v < kVectors; ++v) {
                    const __m512 product =
                        _mm512_mul_ps(factor, _mm512_maskz_loadu_ps(lanes[v], row + 16 * v));
                    sums[v] = _mm512_add_ps(sums[v], product);  // never fused: two roundings
                }
            }
            for (std::size_t v = 0; v < kVectors; ++v)
                _mm512_mask_storeu_ps(out + first + 16 * v, lanes[v], sums[v]);
        }
    }
}

RECPRUNE_AVX512 void quantise_avx512(const float* scores, std::size_t count, double highest,
                                     double scale, std::uint8_t* out) {
    const __m512d highests = _mm512_set1_pd(highest);
    const __m512d scales = _mm512_set1_pd(scale);
    const __m512d full = _mm512_set1_pd(255.0);
    for (std::size_t b = 0; b < count; b += 8) {
        const auto lanes = static_cast<__mmask8>(count - b >= 8 ? 255u : (1u << (count - b)) - 1u);
        const __m512d values = _mm512_cvtps_pd(_mm256_maskz_loadu_ps(lanes, scores + b));
        const __m512d units = _mm512_mul_pd(_mm512_sub_pd(highests, values), scales);
        const __m256i whole = _mm512_cvttpd_epi32(_mm512_min_pd(units, full));
        _mm256_mask_cvtepi32_storeu_epi8(out + b, lanes, whole);
    }
}

// All sums stay in registers.
RECPRUNE_AVX512 void convolve_avx512(const float* first, const float* second, float* sums) {
    constexpr std::size_t kVectors = kDepth / 16;
    __m512 totals[kVectors];
    for (auto& total : totals) total = _mm512_setzero_ps();
    for (std::size_t q = 0; q < kDepth; ++q) {
        const __m512 factor = _mm512_set1_ps(first[q]);
        for (std::size_t v = 0; v < kVectors; ++v) {
            const __m512 shifted = _mm512_loadu_ps(second + 16 * v - q);
            totals[v] = _mm512_add_ps(totals[v], _mm512_mul_ps(factor, shifted));
        }
    }
    for (std::size_t v = 0; v < kVectors; ++v) _mm512_storeu_ps(sums + 16 * v, totals[v]);
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
// there are more than kMostKnown, the tables of the others are loaded again for every block.
constexpr std::size_t kMostKnown = 7;

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
        if constexpr (known == kMostKnown)
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
    alignas(64) static constexpr std::array<std::uint8_t, 64> kByte = [] {
        std::array<std::uint8_t, 64> byte{};
        for (std::size_t lane = 0; lane < 64; ++lane)
            byte[lane] = static_cast<std::uint8_t>(lane / 8);
        return byte;
    }();
    const __m512i byte = _mm512_load_si512(kByte.data());
    const __m512i up_to_lane = _mm512_set1_epi64(static_cast<long long>(0xFF7F3F1F0F070301ull));
    const auto steps = static_cast<long long>(row.steps[block]);
    const __m512i own = _mm512_shuffle_epi8(_mm512_set1_epi64(steps), byte);
    const __m512i within = _mm512_popcnt_epi8(_mm512_and_si512(own, up_to_lane));
    const auto counts =
        static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_popcnt_epi8(_mm_cvtsi64_si128(steps))));
    const auto sums = static_cast<long long>(counts * 0x0101010101010100ull);
    const __m512i before = _mm512_shuffle_epi8(_mm512_set1_epi64(sums), byte);
    return _mm512_permutexvar_epi8(_mm512_add_epi8(within, before),
                                   _mm512_loadu_si512(row.deficits + row.bases[block]));
}

RECPRUNE_AVX512 void look_up_avx512(const std::uint8_t* table, const std::uint8_t* codes,
                                    std::uint8_t* out) {
    const Table whole = load_table(table);
    for (std::size_t i = 0; i < 256; i += 64)
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
    constexpr std::array kFind = {find_blocks_in<0>, find_blocks_in<1>,         find_blocks_in<2>,
                                  find_blocks_in<3>, find_blocks_in<4>,         find_blocks_in<5>,
                                  find_blocks_in<6>, find_blocks_in<kMostKnown>};
    return kFind[std::min(rows.near, kMostKnown)](rows, begin, end, limit, found, sums);
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
                                    filter_blocks_in<6>, filter_blocks_in<kMostKnown>};
    const auto filter = kFilter[std::min(count, kMostKnown)];
    return filter(rows, count, blocks, num_blocks, sums, limit, items);
}

RECPRUNE_AVX512 std::size_t select_avx512(const std::uint8_t* deficits, int limit,
                                          std::uint8_t* selected) {
    alignas(64) static constexpr std::array<std::uint8_t, 64> kCounting = [] {
        std::array<std::uint8_t, 64> counting{};
        for (std::size_t b = 0; b < 64; ++b) counting[b] = static_cast<std::uint8_t>(b);
        return counting;
    }();
    const __m512i limits = _mm512_set1_epi8(static_cast<char>(limit));
    __m512i ids = _mm512_load_si512(kCounting.data());
    std::size_t found = 0;
    for (std::size_t first = 0; first < 256; first += 64) {
        const __mmask64 within =
            _mm512_cmple_epu8_mask(_mm512_loadu_si512(deficits + first), limits);
        _mm512_storeu_si512(selected + found, _mm512_maskz_compress_epi8(within, ids));
        found += static_cast<std::size_t>(__builtin_popcountll(within));
        ids = _mm512_add_epi8(ids, _mm512_set1_epi8(64));
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

// Near keys of all groups first; what they let through is packed, without a branch that could be
// mispredicted, and then held against its far keys in full vectors.
RECPRUNE_AVX512 std::size_t filter_cells_avx512(const CellPart* parts, std::size_t count,
                                                const std::uint16_t* keys,
                                                const std::uint8_t* const* tables,
                                                const std::uint8_t*, std::uint32_t* survivors) {
    constexpr std::size_t kRoom = kBatchItems + kGroupItems;
    std::uint32_t groups[kRoom];  // where the group of a packed item begins
    std::uint16_t far_keys[kRoom];
    std::uint16_t places[kRoom];  // lower five bits: the lane in its group; upper eleven: what
                                  // both_limit leaves to the far key
    alignas(64) static constexpr std::array<std::uint16_t, 32> kLanes = [] {
        std::array<std::uint16_t, 32> lanes{};
        for (std::uint16_t lane = 0; lane < 32; ++lane) lanes[lane] = lane;
        return lanes;
    }();
    const __m512i lanes = _mm512_load_si512(kLanes.data());
    std::size_t packed = 0;
    const Table near_low = load_table(tables[0]);
    const Table near_high = load_table(tables[1]);
    for (std::size_t part = 0; part < count; ++part) {
        const auto [start, length, next_limit, both_limit] = parts[part];
        const __m512i limits = _mm512_set1_epi16(next_limit);
        const __m512i whole =
            _mm512_or_si512(_mm512_set1_epi16(static_cast<std::int16_t>(both_limit << 5)), lanes);
        for (std::uint32_t group = 0; group < length; group += kGroupItems) {
            const std::uint32_t size = group_size(length - group);
            const std::uint16_t* near = keys + 2 * std::size_t{start + group};
            const __m512i next = look_up_keys(near_low, near_high, _mm512_loadu_si512(near));
            const auto inside = static_cast<__mmask32>((std::uint64_t{1} << size) - 1);
            const __mmask32 passing = _mm512_mask_cmple_epi16_mask(inside, next, limits);
            const __m512i left = _mm512_sub_epi16(whole, _mm512_slli_epi16(next, 5));
            const __m512i far = _mm512_loadu_si512(near + size);
            _mm512_storeu_si512(far_keys + packed, _mm512_maskz_compress_epi16(passing, far));
            _mm512_storeu_si512(places + packed, _mm512_maskz_compress_epi16(passing, left));
            const __m512i first = _mm512_set1_epi32(static_cast<int>(start + group));
            _mm512_storeu_si512(groups + packed, first);
            _mm512_storeu_si512(groups + packed + 16, first);
            packed += static_cast<std::size_t>(__builtin_popcount(passing));
        }
    }
    const Table far_low = load_table(tables[2]);
    const Table far_high = load_table(tables[3]);
    std::size_t found = 0;
    for (std::size_t place = 0; place < packed; place += 32) {
        const __m512i last = look_up_keys(far_low, far_high, _mm512_loadu_si512(far_keys + place));
        const __m512i left = _mm512_srli_epi16(_mm512_loadu_si512(places + place), 5);
        std::uint32_t passing = _mm512_cmple_epi16_mask(last, left);
        if (packed - place < 32) passing &= (1u << (packed - place)) - 1u;
        for (; passing; passing &= passing - 1) {
            const std::size_t at = place + static_cast<std::size_t>(__builtin_ctz(passing));
            survivors[found++] = groups[at] + (places[at] & 31u);
        }
    }
    return found;
}

#endif

}  // namespace

const std::vector<Kernels>& available_kernels() {
    static const std::vector<Kernels> kernels = [] {
        std::vector<Kernels> found;
#if defined(__x86_64__)
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
            __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512bitalg"))
            found.push_back({"avx512", sub_item_scores_avx512, quantise_avx512, look_up_avx512,
                             find_blocks_avx512, filter_blocks_avx512, filter_cells_avx512, false,
                             fill_pairs_avx2, select_avx512, count_buckets_avx512,
                             convolve_avx512});
        if (__builtin_cpu_supports("avx2"))
            found.push_back({"avx2", sub_item_scores_avx2, quantise_avx2, look_up_portable,
                             find_blocks_portable, filter_blocks_portable, filter_cells_avx2, true,
                             fill_pairs_avx2, select_avx2, count_buckets_portable, convolve_avx2});
#endif
        found.push_back({"portable", sub_item_scores_portable, quantise_portable, look_up_portable,
                         find_blocks_portable, filter_blocks_portable, filter_cells_portable, true,
                         fill_pairs_portable, select_portable, count_buckets_portable,
                         convolve_portable});
        return found;
    }();
    return kernels;
}

const Kernels* find_kernels(const std::string& name) {
    for (const Kernels& kernels : available_kernels()) {
        if (name.empty() || name == kernels.name) return &kernels;
    }
    return nullptr;
}

}  // namespace recprune
