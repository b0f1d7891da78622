// Kernels for AVX-512 with VBMI, VBMI2 and BITALG. Functions have the target attribute, not the
// file: see ARCHITECTURE.md.
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/avx512_lines.hpp"
#include "kernels/avx512_tables.hpp"
#include "kernels/bodies.hpp"
#include "kernels/code_filters.hpp"
#include "kernels/kernels.hpp"

namespace recprune {

namespace {

constexpr std::size_t kFloats = 16;  // that a register holds
static_assert(kBytes == kLineBytes);

alignas(kBytes) constexpr std::array<std::uint8_t, kBytes> kCounting = [] {
    std::array<std::uint8_t, kBytes> counting{};
    for (std::size_t b = 0; b < kBytes; ++b) counting[b] = static_cast<std::uint8_t>(b);
    return counting;
}();

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
RECPRUNE_AVX512 FoundBlocks find_blocks_in(const FilterRows& filter, std::size_t begin,
                                           std::size_t end, int limit, std::uint32_t* found,
                                           std::uint8_t* sums) {
    const auto [sorted, rows, near, count, _] = filter;
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
    return {num_found, num_found};
}

// Rows that are added to the sums of all blocks at once: as many as registers hold tables of.
constexpr std::size_t kGroupRows = 6;

// Adds rows to the sums of blocks, and prefetches other rows of blocks that are so many further on.
template <std::size_t known>
RECPRUNE_AVX512 void add_group_in(const CodeRow* rows, std::size_t begin, std::size_t end,
                                  std::uint8_t* sums, std::span<const CodeRow> next,
                                  std::size_t ahead) {
    const RowSums<known> group(rows, known);
    for (std::size_t block = begin; block < end; ++block, sums += kBlockItems) {
        for (const CodeRow& row : next)
            __builtin_prefetch(row.codes + (block + ahead) * kBlockItems, 0, 2);
        _mm512_storeu_si512(sums, group.add_to(_mm512_loadu_si512(sums), block));
    }
}

// With many near rows, tables would be loaded anew for every block, and memory be read from more
// places at a time than processors keep track of. So a group of rows after the other is added to
// the sums of all blocks; while one is read, the next is on its way.
RECPRUNE_AVX512 FoundBlocks find_blocks_by_groups(const FilterRows& filter, std::size_t begin,
                                                  std::size_t end, int limit, std::uint32_t* found,
                                                  std::uint8_t* sums) {
    constexpr std::array kAdd = {add_group_in<0>,         add_group_in<1>, add_group_in<2>,
                                 add_group_in<3>,         add_group_in<4>, add_group_in<5>,
                                 add_group_in<kGroupRows>};
    const auto [sorted, rows, near, count, _] = filter;
    for (std::size_t block = begin; block < end; ++block)
        _mm512_storeu_si512(sums + (block - begin) * kBlockItems, look_up_sorted(sorted, block));
    for (std::size_t row = 0; row < near; row += kGroupRows) {
        const std::size_t size = std::min(kGroupRows, near - row);
        const bool is_last = row + size == near;
        // After the last group comes the first one of the blocks after these.
        const std::size_t first_next = is_last ? 0 : row + size;
        const std::size_t ahead = is_last ? end - begin : 0;
        kAdd[size](rows + row, begin, end, sums,
                   {rows + first_next, std::min(kGroupRows, near - first_next)}, ahead);
    }
    const __m512i limits = _mm512_set1_epi8(static_cast<char>(limit));
    std::size_t num_found = 0;
    for (std::size_t block = begin; block < end; ++block) {
        const __m512i totals = _mm512_loadu_si512(sums + (block - begin) * kBlockItems);
        _mm512_storeu_si512(sums + num_found * kBlockItems, totals);
        found[num_found] = static_cast<std::uint32_t>(block);
        num_found += _mm512_cmple_epu8_mask(totals, limits) != 0;
    }
    for (std::size_t at = 0; at < num_found; ++at)
        prefetch_rows(rows + near, count - near, found[at]);
    return {num_found, num_found};
}

RECPRUNE_AVX512 FoundBlocks find_blocks_avx512(const FilterRows& rows, std::size_t begin,
                                               std::size_t end, int limit, std::uint32_t* found,
                                               std::uint8_t* sums) {
    constexpr std::array kFind = {
        find_blocks_in<0>, find_blocks_in<1>, find_blocks_in<2>,          find_blocks_in<3>,
        find_blocks_in<4>, find_blocks_in<5>, find_blocks_in<kGroupRows>, find_blocks_by_groups};
    return kFind[std::min(rows.near, kGroupRows + 1)](rows, begin, end, limit, found, sums);
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

// Four lines at a time, without a branch that could be mispredicted but for one: whether more than
// 16 items of four lines pass, which is rare.
RECPRUNE_AVX512 std::size_t filter_lines_avx512(const std::uint8_t* lines, const LineBatch& batch,
                                                const std::uint8_t* const* tables, int two,
                                                int three, std::uint32_t* survivors,
                                                std::uint8_t* sums) {
    const __m512i lanes = _mm512_load_si512(kCounting.data());
    const ChainLimits limits(two, three);
    const Table near_low = load_table(tables[0]);
    const Table near_high = load_table(tables[1]);
    const Table far_low = load_table(tables[2]);
    const Table far_high = load_table(tables[3]);
    std::size_t found = 0;
    for (std::size_t at = batch.begin; at < batch.end; at += kLinesAtOnce) {
        const FourLines four = load_four_lines(lines, batch, at);
        const __m512i near =
            _mm512_adds_epu8(look_up(near_low, four.codes[0]), look_up(near_high, four.codes[1]));
        const __m512i far =
            _mm512_adds_epu8(look_up(far_low, four.codes[2]), look_up(far_high, four.codes[3]));
        const auto [passing, totals] = limits.find_within(four, near, far);
        const __m512i first = _mm512_set1_epi32(static_cast<int>(at * kLineItems));
        const __m512i packed = _mm512_maskz_compress_epi8(passing, lanes);
        const auto count = static_cast<std::size_t>(__builtin_popcountll(passing));
        _mm512_storeu_si512(sums + found, _mm512_maskz_compress_epi8(passing, totals));
        _mm512_storeu_si512(
            survivors + found,
            _mm512_add_epi32(first, _mm512_cvtepu8_epi32(_mm512_castsi512_si128(packed))));
        if (count > kFloats) {
            alignas(kBytes) std::uint8_t places[kBytes];
            _mm512_store_si512(places, packed);
            for (std::size_t place = kFloats; place < count; ++place)
                survivors[found + place] =
                    static_cast<std::uint32_t>(at * kLineItems + places[place]);
        }
        found += count;
    }
    return found;
}

}  // namespace

Kernels avx512_kernels() {
    const Kernels without_vbmi = avx512bw_kernels();
    return {
        .name = "avx512",
        .costs = {.scan = 26.1e3,
                  .scanned_item = 0.16,
                  .scan_growth = 0.18,
                  .cells = 13.6e3,
                  .line = 7.86,
                  .found_item = 419.0,
                  .few_items = 50'700,
                  .allowed_item = 13.8,
                  .filtered_code = 0.371},
        .refinements = 0,
        .sub_item_scores = without_vbmi.sub_item_scores,
        .extremes = without_vbmi.extremes,
        .largest_magnitude = without_vbmi.largest_magnitude,
        .quantise = without_vbmi.quantise,
        .look_up = look_up_avx512,
        .find_blocks = find_blocks_avx512,
        .filter_blocks = filter_blocks_avx512,
        .filter_codes = filter_codes_avx512,
        .count_bits = count_bits_avx512,
        .filter_lines = filter_lines_avx512,
        .select = select_avx512,
        .convolve = without_vbmi.convolve,
        .tilt = without_vbmi.tilt,
    };
}

}  // namespace recprune

#endif
