// The few inner loops that are worth writing for an instruction set: a table of them for each,
// which is chosen once, at run time. Scores have the same bits in every version. A filter may let
// more through in one than in another, but never rejects what is within the limits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace recprune {

// Sub-items that a code of one byte can tell apart, and so the length of a table of deficits.
constexpr std::size_t kMaxNarrowSubItems = 256;
// The largest deficit that a byte holds: "this much or more". Sums of bytes saturate here.
constexpr int kFullDeficit = 255;
// Items of a block of the list layout: their codes fill one register of AVX-512, and their bits one
// word. Part of the saved format.
constexpr std::size_t kBlockItems = 64;
// Sub-item ids that `select` may write: all, and one register more, as it writes whole ones.
constexpr std::size_t kSelectRoom = kMaxNarrowSubItems + kBlockItems;

// The codes of all blocks in one split, 64 a block, and the 256 deficits that belong to them.
struct CodeRow {
    const std::uint8_t* codes;
    const std::uint8_t* deficits;
};

// The same for the split by which the items of a list are sorted. Where the code changes from one
// item to the next, there is a bit; an item's rank, among the codes that its list has, is that of
// its block's first item and as many more as there are bits up to its own.
struct SortedRow {
    const std::uint8_t* bases;     // the rank of each block's first item
    const std::uint64_t* changes;  // the bits of each block; never the lowest
    const std::uint8_t* deficits;  // of the list's codes, by rank: 256, and 64 more
};

// All rows that a filter adds up. Every block is held against the sorted one and the near ones.
struct FilterRows {
    SortedRow sorted;
    const CodeRow* rows;
    std::size_t near;
    std::size_t count;
};

// Splits that filter_codes has room for.
constexpr std::size_t kMostFilteredSplits = 64;

// Cells of a pair of splits: the combinations of two codes of one byte.
constexpr std::size_t kCells = kMaxNarrowSubItems * kMaxNarrowSubItems;
// Items of a cell whose keys lie side by side: keys of two bytes that fill one register of AVX-512.
// Part of the saved format.
constexpr std::size_t kGroupItems = 32;
// Items of the longest part of a cell that is filtered at once: few enough that a batch has room
// for several. Found by trial.
constexpr std::size_t kPartItems = 256;
// Items that are filtered at once: as many keys as can be on their way from memory. Found by trial;
// benchmarks/search.py shows its effect.
constexpr std::size_t kBatchItems = 1024;
// Units of deficit up to which the cells of a pair are counted: half of what a limit may be. What
// would go deeper is scanned.
constexpr std::size_t kDepth = 128;
// Buckets of deficits, for a quick estimate of the same: few enough that it costs next to nothing.
constexpr std::size_t kBuckets = 16;
constexpr std::size_t kBucketUnits = kDepth / kBuckets;
// Bytes of two tables with an entry for every cell, and of what a gather reads beyond the last.
constexpr std::size_t kPairTableBytes = 2 * kCells + sizeof(std::uint32_t);

// A stretch of one cell. Items in it pass if the deficits of the next pair, and of the next two
// pairs together, are within these limits.
struct CellPart {
    std::uint32_t start;
    std::uint32_t length;  // at most kPartItems
    std::int16_t next_limit;
    std::int16_t both_limit;
};

// What searching costs with a table of kernels. Found by trial; benchmarks/search.py shows the
// effect, and no result hangs on it.
struct Costs {
    double scanned_item;    // nanoseconds for an item of a scan
    double cell;            // nanoseconds for a cell, however many items it has
    double cell_item;       // nanoseconds for an item of a cell
    double found_item;      // nanoseconds that a wanted item costs more if it is found by cells
    std::size_t few_items;  // a catalogue of fewer is filtered as it comes, not by lists or cells
    std::size_t selective;  // if only one item in so many is allowed, these are scored one by one
    bool lists_are_cheap;   // to be scanned for a first threshold, where a few cells would also do
};

struct Kernels {
    const char* name;
    Costs costs;

    // S[m][b] = Σ_j φ[m][j] · E[m][j][b], products rounded and added in the order of j.
    // `transposed` is E as [num_splits][width][num_sub_items].
    void (*sub_item_scores)(const float* sequence_embedding, const float* transposed,
                            std::size_t num_splits, std::size_t width, std::size_t num_sub_items,
                            float* sub_item_scores);

    // out[b] = ⌊(highest − scores[b]) · scale⌋, at most 255.
    void (*quantise)(const float* scores, std::size_t count, double highest, double scale,
                     std::uint8_t* out);

    // out[i] = table[codes[i]] for 256 of them.
    void (*look_up)(const std::uint8_t* table, const std::uint8_t* codes, std::uint8_t* out);

    // Finds the blocks in [begin, end) with an item whose deficits in the sorted and the near rows
    // add up to at most `limit` (≤ 254), and prefetches the other rows of these blocks. Writes the
    // blocks and, 64 for each, their items' sums, saturated at 255; returns how many. There is room
    // for one more than all blocks.
    std::size_t (*find_blocks)(const FilterRows& rows, std::size_t begin, std::size_t end,
                               int limit, std::uint32_t* found, std::uint8_t* sums);

    // Keeps those of `num_blocks` blocks with an item whose sum and deficits in these rows add up
    // to at most `limit` (≤ 254): writes the blocks and the sums of everything, saturated, over
    // those given, and a bit for each such item of a block to `items`, which has room for one more;
    // returns how many.
    std::size_t (*filter_blocks)(const CodeRow* rows, std::size_t count, std::uint32_t* blocks,
                                 std::size_t num_blocks, std::uint8_t* sums, int limit,
                                 std::uint64_t* items);

    // Of items whose codes lie one after the other, writes a bit for each, 64 to a word: whether
    // its deficits may add up to at most `limit` (≤ 254). `deficits` has 256 entries for each of up
    // to kMostFilteredSplits splits. Reads nothing beside the codes. Null if scoring all items is
    // as fast.
    void (*filter_codes)(const std::uint8_t* codes, std::size_t num_items, std::size_t num_splits,
                         const std::uint8_t* deficits, int limit, std::uint64_t* passing);

    // How many bits are set in so many words.
    std::size_t (*count_bits)(const std::uint64_t* words, std::size_t count);

    // Writes the positions of the items that pass to `survivors` and returns how many; there is
    // room for one more than the parts, together at most kBatchItems, have items. Parts begin with
    // a group. A key is two codes; `tables` has 256 deficits for each of the four splits: those of
    // the next keys, then those of the last keys. `pairs` are the tables of fill_pairs, if it is
    // there, for next and for last keys: kPairTableBytes. Reads up to 31 keys past a part's end.
    std::size_t (*filter_cells)(const CellPart* parts, std::size_t count, const std::uint16_t* keys,
                                const std::uint8_t* const* tables, const std::uint8_t* pairs,
                                std::uint32_t* survivors);

    // sums[a | b << 8] = low[a] + high[b], saturated at 255. Null if filter_cells looks the codes
    // of a key up one by one.
    void (*fill_pairs)(const std::uint8_t* low, const std::uint8_t* high, std::uint8_t* sums);

    // Writes the sub-item ids b with deficits[b] ≤ limit, ascending; returns how many. `deficits`
    // has 256 entries; `selected` has room for kSelectRoom.
    std::size_t (*select)(const std::uint8_t* deficits, int limit, std::uint8_t* selected);

    // counts[x] = how many of 256 deficits are in bucket x.
    void (*count_buckets)(const std::uint8_t* deficits, float* counts);

    // sums[x] = Σ_q first[q] · second[x − q] for x < kDepth: whole numbers below 2²⁴, so exact in
    // any order. How many cells of a pair have the deficit x. Before `second` stand kDepth zeros.
    void (*convolve)(const float* first, const float* second, float* sums);
};

// The kernels that run anywhere. Other tables borrow what they do not have faster.
Kernels portable_kernels();

// The kernels that this machine can run, the fastest first; the last one runs anywhere.
const std::vector<Kernels>& available_kernels();

// The kernels by name; an empty name means the fastest. Null if there is no such name.
const Kernels* find_kernels(const std::string& name);

}  // namespace recprune
