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
// Some kernels do so coarsely at first: refinement is then how many steps it is made finer by, one
// near row at a time.
struct FilterRows {
    SortedRow sorted;
    const CodeRow* rows;
    std::size_t near;
    std::size_t count;
    std::size_t refinement;
};

// What find_blocks has done: blocks that it has found, and those at which it had to look closely.
struct FoundBlocks {
    std::size_t found;
    std::size_t close;
};

// Splits that filter_codes has room for.
constexpr std::size_t kMostFilteredSplits = 64;

// Numbers that `convolve` takes and returns.
constexpr std::size_t kConvolved = 64;

// Items of a line of the cell layout, of which it has four codes each: one cache line, and one
// register of AVX-512. Part of the saved format.
constexpr std::size_t kLineItems = 16;
constexpr std::size_t kLineBytes = 4 * kLineItems;
// Places behind the survivors of a filter, which writes whole registers.
constexpr std::size_t kSurvivorRoom = 64;
// Lines that are prefetched ahead of the one that is filtered: as many as can be on their way from
// memory to the second cache, and from there to the first. Found by trial.
constexpr std::size_t kLinesAhead = 112;
constexpr std::size_t kLinesNear = 24;

// Lines to be filtered: those at [begin, end). The next ones, up to `count`, are prefetched.
struct LineBatch {
    const std::uint32_t* lines;
    const std::uint8_t* deficits;  // of their cells
    std::size_t begin;
    std::size_t end;
    std::size_t count;
};

// What searching costs with a table of kernels: the geometric mean of what benchmarks/costs.py has
// fitted on several machines (docs/measured); NEON's are guesses. No result hangs on it.
struct Costs {
    double scan;            // nanoseconds for a scan, however few items there are
    double scanned_item;    // nanoseconds for an item of it, if eight splits and the best ten
    double scan_growth;     // the power of K with which these grow
    double cells;           // nanoseconds for planning which cells are visited
    double line;            // nanoseconds for a line that is planned to be visited
    double found_item;      // nanoseconds that a wanted item costs more if it is found by cells
    std::size_t few_items;  // a catalogue of fewer is filtered as it comes, not by lists or cells
    double allowed_item;    // nanoseconds for an item that is scored for being one of few allowed
    double filtered_code;   // nanoseconds for an item whose code is filtered as it comes, or scored
};

struct Kernels {
    const char* name;
    Costs costs;
    std::size_t refinements;  // steps that find_blocks can refine each near row by

    // S[m][b] = Σ_j φ[m][j] · E[m][j][b], products rounded and added in the order of j.
    // `transposed` is E as [num_splits][width][num_sub_items].
    void (*sub_item_scores)(const float* sequence_embedding, const float* transposed,
                            std::size_t num_splits, std::size_t width, std::size_t num_sub_items,
                            float* sub_item_scores);

    // The lowest and the highest of some values; count is not 0.
    void (*extremes)(const float* values, std::size_t count, float* lowest, float* highest);

    // The largest magnitude of some values, as its bits: NaN is larger than infinity.
    std::int32_t (*largest_magnitude)(const float* values, std::size_t count);

    // out[b] = ⌊(highest − scores[b]) · scale⌋, at most 255.
    void (*quantise)(const float* scores, std::size_t count, double highest, double scale,
                     std::uint8_t* out);

    // out[i] = table[codes[i]] for 256 of them.
    void (*look_up)(const std::uint8_t* table, const std::uint8_t* codes, std::uint8_t* out);

    // Finds the blocks in [begin, end) with an item whose deficits in the sorted and the near rows
    // add up to at most `limit` (≤ 254), and prefetches the other rows of these blocks. Writes the
    // blocks and, 64 for each, their items' sums, saturated at 255, or for an item beyond the limit
    // any sum beyond it. There is room for one more than all blocks.
    FoundBlocks (*find_blocks)(const FilterRows& rows, std::size_t begin, std::size_t end,
                               int limit, std::uint32_t* found, std::uint8_t* sums);

    // Keeps those of `num_blocks` blocks with an item whose sum and deficits in these rows add up
    // to at most `limit` (≤ 254): writes the blocks and the sums of everything, with the same
    // freedom, over those given, and a bit for each such item of a block to `items`, which has room
    // for one more; returns how many.
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

    // Finds the items of lines whose deficits in the near splits add up to at most `two` less the
    // deficit of the line's cell, and those in the near and far splits to at most `three` less
    // that. A line has 16 codes for each of four splits, near ones first; `tables` has 256 deficits
    // for each of these. A sum of 255 may be more, and passes where as much is left. Writes 16 ·
    // (where its line is in the batch) + (its place in the line) for each, ascending, and to `sums`
    // all these deficits, its cell's among them, at most 255; returns how many. There is room for
    // kSurvivorRoom more than all lines have items.
    std::size_t (*filter_lines)(const std::uint8_t* lines, const LineBatch& batch,
                                const std::uint8_t* const* tables, int two, int three,
                                std::uint32_t* survivors, std::uint8_t* sums);

    // Writes the sub-item ids b with deficits[b] ≤ limit, ascending; returns how many. `deficits`
    // has 256 entries; `selected` has room for kSelectRoom.
    std::size_t (*select)(const std::uint8_t* deficits, int limit, std::uint8_t* selected);

    // sums[i] = Σ_j counts[j] · values[i − j], kConvolved of each; as many zeros are before the
    // first value.
    void (*convolve)(const float* counts, const float* values, float* sums);

    // sums[i] = Σ_b weights[b] · d_b^i · e^(−tilt · d_b) for i = 0, 1, 2 and d_b = highest −
    // values[b], about: no result hangs on it.
    void (*tilt)(const float* values, const float* weights, std::size_t count, float highest,
                 float tilt, float* sums);
};

// The kernels that run anywhere. Other tables borrow what they do not have faster, from this or
// from one another.
Kernels portable_kernels();
#if defined(__x86_64__)
Kernels avx2_kernels();
Kernels avx512bw_kernels();
Kernels avx512_kernels();
#elif defined(__aarch64__)
Kernels neon_kernels();
#endif

// The kernels that this machine can run, the fastest first; the last one runs anywhere.
const std::vector<Kernels>& available_kernels();

// The kernels by name; an empty name means the fastest. Null if there is no such name.
const Kernels* find_kernels(const std::string& name);

}  // namespace recprune
