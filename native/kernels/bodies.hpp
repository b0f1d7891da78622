// Loops that several instruction sets share: the compiler vectorises them for that of the function
// into which they are inlined. They always are, and have no linkage, so that no copy compiled for
// one instruction set can end up in the path of another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/kernels.hpp"

#define RECPRUNE_BODY __attribute__((always_inline)) inline

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

// Side by side in lanes: one after the other, every comparison would wait for the one before it.
RECPRUNE_BODY void extremes_body(const float* values, std::size_t count, float* lowest,
                                 float* highest) {
    constexpr std::size_t kLanes = 64;
    float low[kLanes];
    float high[kLanes];
    for (std::size_t lane = 0; lane < kLanes; ++lane) low[lane] = high[lane] = values[0];
    std::size_t first = 0;
    for (; first + kLanes <= count; first += kLanes) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            const float value = values[first + lane];
            low[lane] = value < low[lane] ? value : low[lane];
            high[lane] = value > high[lane] ? value : high[lane];
        }
    }
    for (; first < count; ++first) {
        low[0] = values[first] < low[0] ? values[first] : low[0];
        high[0] = values[first] > high[0] ? values[first] : high[0];
    }
    for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
        for (std::size_t lane = 0; lane < half; ++lane) {
            low[lane] = low[lane + half] < low[lane] ? low[lane + half] : low[lane];
            high[lane] = high[lane + half] > high[lane] ? high[lane + half] : high[lane];
        }
    }
    *lowest = low[0];
    *highest = high[0];
}

// As integers, magnitudes of floats compare like floats, and infinity and NaN are the largest.
RECPRUNE_BODY std::int32_t largest_magnitude_body(const float* values, std::size_t count) {
    std::int32_t largest = 0;
    for (std::size_t at = 0; at < count; ++at) {
        std::int32_t bits;
        std::memcpy(&bits, values + at, sizeof bits);
        const std::int32_t magnitude = bits & 0x7FFFFFFF;  // all bits but the sign
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
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

// Numbers side by side, as many as a register of the instruction set holds: of more, compilers make
// a detour through memory.
template <std::size_t bytes>
struct Register {
    using Floats [[gnu::vector_size(bytes)]] = float;
    using Integers [[gnu::vector_size(bytes)]] = std::int32_t;
    static constexpr std::size_t kLanes = bytes / sizeof(float);
};

// e^x for x ≤ 0, to about a thousandth: 2^whole by its bits, times a polynomial.
template <std::size_t bytes>
RECPRUNE_BODY void about_exp(typename Register<bytes>::Floats& x) {
    using Floats = typename Register<bytes>::Floats;
    using Integers = typename Register<bytes>::Integers;
    constexpr float kLog2E = 1.44269504f;
    constexpr float kLowest = -120.0f;
    x *= kLog2E;
    x = x > kLowest ? x : kLowest - Floats{};
    const Integers whole = __builtin_convertvector(x, Integers);  // towards zero
    const Floats rest = x - __builtin_convertvector(whole, Floats);
    const Integers power = (whole + 127) << 23;
    x = (1.0f + rest * (0.69290f + rest * (0.23840f + rest * 0.04560f))) * (Floats)power;
}

template <std::size_t bytes>
RECPRUNE_BODY void tilt_body(const float* values, const float* weights, std::size_t count,
                             float highest, float tilt, float* sums) {
    using Floats = typename Register<bytes>::Floats;
    constexpr std::size_t kLanes = Register<bytes>::kLanes;
    Floats totals[3] = {};
    for (std::size_t first = 0; first < count; first += kLanes) {
        Floats deficits = highest - Floats{};
        Floats shares = {};  // where fewer are left, the last ones count for nothing
        const std::size_t left = count - first < kLanes ? count - first : kLanes;
        if (left == kLanes) {
            std::memcpy(&deficits, values + first, sizeof deficits);
            std::memcpy(&shares, weights + first, sizeof shares);
        } else {
            std::memcpy(&deficits, values + first, left * sizeof(float));
            std::memcpy(&shares, weights + first, left * sizeof(float));
        }
        deficits = highest - deficits;
        Floats factors = deficits * -tilt;
        about_exp<bytes>(factors);
        shares *= factors;
        totals[0] += shares;
        totals[1] += shares * deficits;
        totals[2] += shares * deficits * deficits;
    }
    for (std::size_t power = 0; power < 3; ++power) {
        sums[power] = 0.0f;
        for (std::size_t lane = 0; lane < kLanes; ++lane) sums[power] += totals[power][lane];
    }
}

template <std::size_t bytes>
RECPRUNE_BODY void convolve_body(const float* counts, const float* values, float* sums) {
    using Floats = typename Register<bytes>::Floats;
    constexpr std::size_t kLanes = Register<bytes>::kLanes;
    constexpr std::size_t kAtOnce = 4;  // sums that stay in registers
    for (std::size_t first = 0; first < kConvolved; first += kAtOnce * kLanes) {
        Floats totals[kAtOnce] = {};
        for (std::size_t j = 0; j < kConvolved; ++j) {
            if (counts[j] == 0.0f) continue;
            for (std::size_t part = 0; part < kAtOnce; ++part) {
                Floats shifted;
                std::memcpy(&shifted, values + first + part * kLanes - j, sizeof shifted);
                totals[part] += counts[j] * shifted;
            }
        }
        std::memcpy(sums + first, totals, sizeof totals);
    }
}

// Prefetches the lines that come some time after the one at `at`. At first into the second cache:
// on some processors the first can wait for few at a time, on others the second is slow to ask.
RECPRUNE_BODY void prefetch_lines_after(const std::uint8_t* lines, const LineBatch& batch,
                                        std::size_t at) {
    const std::uint32_t* numbers = batch.lines + at;
    if (at + kLinesAhead < batch.count)
        __builtin_prefetch(lines + std::size_t{numbers[kLinesAhead]} * kLineBytes, 0, 2);
    if (at + kLinesNear < batch.count)
        __builtin_prefetch(lines + std::size_t{numbers[kLinesNear]} * kLineBytes);
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

}  // namespace

}  // namespace recprune
