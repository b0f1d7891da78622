// One index, one query: which engine answers. search_batch.hpp has many.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "boosts.hpp"
#include "bounds/deficits.hpp"
#include "bounds/prediction.hpp"
#include "cost_model.hpp"
#include "engines/cells.hpp"
#include "engines/pqtopk.hpp"
#include "engines/recjpqprune.hpp"
#include "engines/scan.hpp"
#include "exclusions.hpp"
#include "item_set.hpp"
#include "kernels/kernels.hpp"
#include "layouts/cells.hpp"
#include "layouts/lists.hpp"
#include "query.hpp"
#include "top_k.hpp"

namespace recprune {

enum class Method : std::int32_t {
    pqtopk = 0,
    recjpqprune = 1,
    scan = 2,
    cells = 3,
    automatic = 4,
    dense = 5  // answered outside the core; here for the records
};

// The names that methods have everywhere.
struct NamedMethod {
    const char* name;
    Method method;
};
inline constexpr std::array kMethods = {
    NamedMethod{"pqtopk", Method::pqtopk},  NamedMethod{"recjpqprune", Method::recjpqprune},
    NamedMethod{"scan", Method::scan},      NamedMethod{"cells", Method::cells},
    NamedMethod{"auto", Method::automatic}, NamedMethod{"default", Method::dense},
};

// Of so many items that a query hides, one is taken to be among the best K. Found by trial.
constexpr std::size_t kHiddenAmongBest = 4;

// Items that a cell has at least for `auto` to consider cells. Found by trial.
constexpr std::size_t kItemsPerCell = 2;

// The parts of an index that are there; views over memory that the caller keeps alive.
struct IndexView {
    std::size_t num_items = 0;
    std::size_t num_splits = 0;
    std::size_t num_sub_items = 0;
    std::size_t width = 0;                      // of a sub-item embedding
    std::span<const float> transposed;          // [num_splits][width][num_sub_items]
    std::span<const std::uint8_t> codes;        // item-major, or empty
    std::span<const std::uint16_t> wide_codes;  // the same for more than 256 sub-items
    // Item-major as well, for boosts where there are lists alone: put together when first needed.
    std::span<const std::uint8_t> gathered_codes;
    std::optional<ListLayout> lists;
    std::optional<CellLayout> cells;
    std::optional<InvertedIndex<std::int32_t>> inverted;
    std::span<const float> item_bias;  // empty: none
    float highest_bias = 0.0f;
    float largest_bias = 0.0f;  // in magnitude
    // What a slack is predicted from, where there are cells: the share of the items that each
    // sub-item has, [num_splits][num_sub_items], and biases, of which each stands for as many
    // items.
    std::span<const float> sub_item_shares;
    std::span<const float> bias_sample;
    std::span<const float> bias_shares;
};

struct Request {
    Method method;
    std::size_t k;
    std::size_t sub_items_per_step;
    std::int64_t max_steps;
    double over_inflation;
    std::int64_t deadline_ns;  // 0: none
    const Kernels* kernels;
};

// What one query returns beside its items. NumPy reads it by the fields that bindings.cpp names.
struct Record {
    std::int64_t method;
    std::int64_t exact;
    std::int64_t steps;
    std::int64_t items_scored;
    std::int64_t items_touched;
    std::int64_t bytes_touched;
    double threshold;
    double upper_bound;
    std::int64_t nanoseconds;                 // of the whole query
    std::int64_t sub_item_score_nanoseconds;  // of these, computing S
    // Queries of the batch that visited cells together, this one among them; their times are equal
    // shares of what all took. 1: it was answered alone.
    std::int64_t together;
};
static_assert(sizeof(Record) % sizeof(std::int64_t) == 0);

// How many allowed items are together in a word of the mask that has any, by some of its words.
inline double allowed_together(const Query& query, std::size_t num_items) {
    constexpr std::size_t kLookedAt = 256;
    const std::size_t num_words = (num_items + kWordBits - 1) / kWordBits;
    const std::size_t stride = std::max<std::size_t>(num_words / kLookedAt, 1);
    int filled = 0;
    int allowed = 0;
    for (std::size_t word = 0; word < num_words; word += stride) {
        filled += query.allow[word] != 0;
        allowed += std::popcount(query.allow[word]);
    }
    return filled ? static_cast<double>(allowed) / filled : 1.0;
}

inline CostModel costs_of(const IndexView& index, const Query& query, const Kernels& kernels) {
    return CostModel(kernels.costs, index.num_items, index.num_splits, index.lists.has_value(),
                     query.k, query.allow ? query.num_allowed : index.num_items,
                     query.allow ? allowed_together(query, index.num_items) : 1.0);
}

// Whether so few items are allowed that they are scored one by one.
inline bool few_are_allowed(const IndexView& index, const Query& query, const CostModel& costs) {
    return query.allow && !index.codes.empty() && costs.few_are_allowed();
}

// The engine that `auto` begins with.
inline Method choose_method(const IndexView& index, const Query& query, const Limits& limits,
                            const CostModel& costs) {
    // A bias hides an item from the filter as a mask does.
    double hidden_share = query.item_bias ? 1.0 : 0.0;
    if (query.allow && !query.item_bias)
        hidden_share = 1.0 - static_cast<double>(query.num_allowed) /
                                 static_cast<double>(std::max<std::size_t>(index.num_items, 1));
    // Codes are filtered to the end, whatever the deadline.
    if (!index.codes.empty() && costs.codes_come_first(hidden_share) && !limits.has_deadline())
        return Method::pqtopk;
    if (query.allow && costs.very_few_are_allowed() && !index.codes.empty()) return Method::pqtopk;
    // Where cells have few items each, a scan is faster than even a look at them.
    const std::size_t num_cells = index.num_sub_items * index.num_sub_items;
    if (index.cells && index.num_items >= kItemsPerCell * num_cells && costs.cells_may_pay())
        return Method::cells;
    if (few_are_allowed(index, query, costs)) return Method::pqtopk;
    return Method::scan;
}

// How far the K-th best of the items that may be returned is below the best conceivable score,
// about. Of those that may not, some are always among the best.
inline double predicted_slack(const IndexView& index, const Query& query, const Kernels& kernels,
                              const Deficits& deficits) {
    std::array<DeficitPart, kMostCellSplits + 1> parts;
    std::size_t count = 0;
    for (; count < index.num_splits; ++count) {
        const std::size_t first = count * index.num_sub_items;
        parts[count] = {query.sub_item_scores + first, index.sub_item_shares.data() + first,
                        index.num_sub_items, deficits.highest(count)};
    }
    if (query.item_bias)
        parts[count++] = {index.bias_sample.data(), index.bias_shares.data(),
                          index.bias_sample.size(), index.highest_bias};
    const std::size_t among = query.allow ? query.num_allowed : index.num_items;
    const double share = static_cast<double>(query.k + query.num_hidden() / kHiddenAmongBest) /
                         static_cast<double>(std::max<std::size_t>(among, 1));
    return SlackPrediction(kernels, std::span(parts).first(count)).within(share);
}

inline void score_all(const IndexView& index, const Query& query, bool few_allowed,
                      const Kernels& kernels, TopK& top, Stats& stats) {
    auto score = [&](auto codes) {
        pqtopk(codes, index.num_items, index.num_splits, index.num_sub_items, query, few_allowed,
               kernels, top, stats);
    };
    if (!index.wide_codes.empty())
        score(index.wide_codes);
    else if (!index.codes.empty() || !index.lists)
        score(index.codes);
    else
        pqtopk(*index.lists, query, top, stats);
}

// By cells, or, where these do not pay, by a scan or by codes. Returns which it was.
inline Method search_cells(const IndexView& index, const Query& query, const Request& request,
                           const Limits& limits, TopK& top, Stats& stats) {
    const Kernels& kernels = *request.kernels;
    const CostModel costs = costs_of(index, query, kernels);
    Deficits deficits(query, kernels, index.num_splits, index.num_sub_items);
    const double slack = predicted_slack(index, query, kernels, deficits);
    CellSearch search(*index.cells, index.codes.data(), kernels, query, limits, deficits, top,
                      stats);
    // Codes are scored to the end: with a deadline, cells are left for a scan alone.
    const bool may_leave =
        request.method == Method::automatic && (index.lists || !limits.has_deadline());
    if (search.run(costs.cell_settings(slack, may_leave))) return Method::cells;
    const bool few_allowed = may_leave && few_are_allowed(index, query, costs);
    if (few_allowed || !index.lists) {
        score_all(index, query, few_allowed, kernels, top, stats);
        return Method::pqtopk;
    }
    ListScan lists(*index.lists, kernels, query, limits, deficits, top, stats);
    lists.run();
    return Method::scan;
}

// Lines of cells that a query would plan to visit, for those who fit costs.
inline double planned_lines(const IndexView& index, const Query& query, const Kernels& kernels) {
    if (!index.cells) throw std::invalid_argument("there are no cells");
    Deficits deficits(query, kernels, index.num_splits, index.num_sub_items);
    const double slack = predicted_slack(index, query, kernels, deficits);
    const Limits limits;
    TopK top(query.k);
    Stats stats;
    CellSearch search(*index.cells, index.codes.data(), kernels, query, limits, deficits, top,
                      stats);
    return search.planned_lines(slack);
}

inline void search_lists(const IndexView& index, const Query& query, const Request& request,
                         const Limits& limits, TopK& top, Stats& stats) {
    Deficits deficits(query, *request.kernels, index.num_splits, index.num_sub_items);
    ListScan lists(*index.lists, *request.kernels, query, limits, deficits, top, stats);
    lists.run();
}

inline void search_posting_lists(const IndexView& index, const Query& query, const Request& request,
                                 const Limits& limits, TopK& top, Stats& stats) {
    auto prune = [&](auto codes) {
        recjpqprune(codes, *index.inverted, index.num_items, index.num_splits, index.num_sub_items,
                    request.sub_items_per_step, query, limits, top, stats);
    };
    if (index.wide_codes.empty())
        prune(index.codes);
    else
        prune(index.wide_codes);
}

// Answers one query whose sub-item scores are ready. Returns the method that ran.
inline Method answer(const IndexView& index, const Query& query, const Request& request,
                     const Limits& limits, TopK& top, Stats& stats) {
    Method method = request.method;
    const CostModel costs = costs_of(index, query, *request.kernels);
    if (method == Method::automatic) method = choose_method(index, query, limits, costs);
    if (method == Method::cells && !index.cells) method = Method::scan;  // of a small catalogue
    if (method == Method::scan && !index.lists) method = Method::pqtopk;
    switch (method) {
        case Method::cells:
            return search_cells(index, query, request, limits, top, stats);
        case Method::scan:
            search_lists(index, query, request, limits, top, stats);
            break;
        case Method::recjpqprune:
            search_posting_lists(index, query, request, limits, top, stats);
            break;
        default:
            score_all(index, query, few_are_allowed(index, query, costs), *request.kernels, top,
                      stats);
    }
    return method;
}

// Queries as they come from outside.
struct Batch {
    std::span<const float> queries;  // sequence embeddings, or sub-item scores
    std::size_t num_queries = 0;
    bool are_scores = false;
    const BatchExclusions* exclude = nullptr;  // null: nothing
    std::span<const std::uint64_t> allow;      // rows of bits, or empty: everything
    std::size_t allow_rows = 0;                // one for all queries, or one each
    std::size_t num_allowed = 0;               // by the one for all
    std::span<const float> floors;             // [num_queries], or empty: none
    const BatchBoosts* boosts = nullptr;       // null: none
};

// Scores that float32 cannot hold, or NaN among them.
struct QueryOverflow : std::invalid_argument {
    explicit QueryOverflow(std::size_t number)
        : std::invalid_argument("query " + std::to_string(number) +
                                ": scores would overflow float32"),
          query(number) {}
    std::size_t query;  // its number in the batch
};

// Whether no sum of sub-item scores, a bias and a boost can overflow, and none is NaN.
inline bool scores_are_safe(const IndexView& index, const Kernels& kernels, const float* scores,
                            float largest_bias, float largest_boost) {
    double sum = static_cast<double>(largest_bias) + largest_boost;
    for (std::size_t split = 0; split < index.num_splits; ++split) {
        const std::int32_t largest =
            kernels.largest_magnitude(scores + split * index.num_sub_items, index.num_sub_items);
        if (largest >= kInfiniteMagnitude) return false;
        sum += std::bit_cast<float>(largest);
    }
    return sum < static_cast<double>(std::numeric_limits<float>::max());
}

inline std::int64_t nanoseconds_between(std::chrono::steady_clock::time_point first,
                                        std::chrono::steady_clock::time_point last) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(last - first).count();
}

// Where the answers to a batch go.
struct Answers {
    std::span<std::int64_t> ids;  // [num_queries][k]
    std::span<float> scores;      // [num_queries][k]
    std::span<Record> records;    // [num_queries]
    // Zeros for every query's sub-items, or empty: not wanted.
    std::span<std::uint8_t> visited = {};
};

inline Limits limits_of(const Request& request, std::chrono::steady_clock::time_point begun) {
    Limits limits;
    limits.max_steps = request.max_steps;
    limits.over_inflation = request.over_inflation;
    if (request.deadline_ns > 0)
        limits.deadline = begun + std::chrono::nanoseconds(request.deadline_ns);
    return limits;
}

// The sub-item scores of a query of a batch; valid until the thread's next call.
inline const float* sub_item_scores_of(const IndexView& index, const Batch& batch,
                                       const Request& request, std::size_t number) {
    const std::size_t table_size = index.num_splits * index.num_sub_items;
    if (batch.are_scores) return batch.queries.data() + number * table_size;
    thread_local std::vector<float> table;
    table.resize(table_size);
    request.kernels->sub_item_scores(batch.queries.data() + number * index.num_splits * index.width,
                                     index.transposed.data(), index.num_splits, index.width,
                                     index.num_sub_items, table.data());
    return table.data();
}

// The items that a query is not to return, or null: none; valid until the thread's next call.
inline const ItemSet* excluded_of(const Batch& batch, std::size_t number) {
    if (!batch.exclude) return nullptr;
    const auto items = batch.exclude->of_query(number);
    thread_local ItemSet scratch;  // fresh memory would cost more than the rest
    ItemSet& excluded = scratch;   // to look it up once
    excluded.reset(items.size());
    for (std::int64_t item : items) excluded.insert(static_cast<Item>(item));
    return &excluded;
}

inline std::size_t count_allowed(const Kernels& kernels, const std::uint64_t* allow,
                                 std::size_t num_items) {
    return kernels.count_bits(allow, (num_items + kWordBits - 1) / kWordBits);
}

// A query that may return every item.
inline Query plain_query(const IndexView& index, const float* sub_item_scores, std::size_t k) {
    Query query{.sub_item_scores = sub_item_scores, .k = std::min(k, index.num_items)};
    if (!index.item_bias.empty()) {
        query.item_bias = index.item_bias.data();
        query.highest_bias = index.highest_bias;
    }
    return query;
}

inline Query query_of(const IndexView& index, const Batch& batch, const Kernels& kernels,
                      std::size_t number, const float* sub_item_scores, std::size_t k) {
    Query query = plain_query(index, sub_item_scores, k);
    query.excluded = excluded_of(batch, number);
    if (batch.allow_rows > 0) {
        const std::size_t words = batch.allow.size() / batch.allow_rows;
        query.allow = batch.allow.data() + (batch.allow_rows > 1 ? number : 0) * words;
        query.num_allowed = batch.allow_rows > 1
                                ? count_allowed(kernels, query.allow, index.num_items)
                                : batch.num_allowed;
        // Engines are faster without a mask than with one that hides nothing.
        if (query.num_allowed == index.num_items) query.allow = nullptr;
    }
    return query;
}

// Calls with the codes of the index by which a single item's is found.
template <class Use>
auto with_codes(const IndexView& index, const Use& use) {
    if (!index.wide_codes.empty()) return use(index.wide_codes);
    return use(index.codes.empty() ? index.gathered_codes : index.codes);
}

// Writes the best items, and fills up with what stands for none.
inline void write_top(std::span<const Scored> best, std::span<std::int64_t> ids,
                      std::span<float> scores) {
    for (std::size_t at = 0; at < best.size(); ++at) {
        ids[at] = best[at].item;
        scores[at] = best[at].score;
    }
    std::fill(ids.begin() + static_cast<std::ptrdiff_t>(best.size()), ids.end(), -1);
    std::fill(scores.begin() + static_cast<std::ptrdiff_t>(best.size()), scores.end(),
              -std::numeric_limits<float>::infinity());
}

// Counts items that were scored one by one.
inline void count_scored(const IndexView& index, std::size_t count, Stats& stats) {
    const std::size_t code = index.num_splits * (index.wide_codes.empty() ? 1 : 2);
    stats.items_scored += static_cast<std::int64_t>(count);
    stats.items_touched += static_cast<std::int64_t>(count);
    stats.bytes_touched += static_cast<std::int64_t>(count * code);
}

// What a query begins with, whatever it is that is searched.
struct Start {
    std::chrono::steady_clock::time_point begun;
    std::chrono::steady_clock::time_point scored;  // when the sub-item scores were there
    Limits limits;
    const float* sub_item_scores;  // valid until the thread's next query
    Boosts boosts;
    float floor;
};

// Throws QueryOverflow for scores that cannot be added up with a bias of up to `largest_bias` in
// magnitude.
inline Start start_query(const IndexView& index, const Batch& batch, const Request& request,
                         std::size_t number, float largest_bias) {
    Start start;
    start.begun = std::chrono::steady_clock::now();
    start.limits = limits_of(request, start.begun);
    start.boosts = batch.boosts ? batch.boosts->of_query(number) : Boosts{};
    start.floor =
        batch.floors.empty() ? -std::numeric_limits<float>::infinity() : batch.floors[number];
    start.sub_item_scores = sub_item_scores_of(index, batch, request, number);
    start.scored = std::chrono::steady_clock::now();
    // NaN and infinity in an embedding end up here too; the caller finds out which it was.
    if (!scores_are_safe(index, *request.kernels, start.sub_item_scores, largest_bias,
                         start.boosts.largest()))
        throw QueryOverflow(number);
    return start;
}

// The best items of one index, and how they were found.
struct Found {
    TopK top;
    Stats stats;
    Method method = Method::pqtopk;
};

// A query before an engine runs: what it boosts has been scored. Valid until the thread's next one.
struct Prepared {
    Query query;
    BoostedItems boosted;
    float floor;  // the caller's, or what boosted items reach
};

// Boosts are by the index's own items.
inline Prepared prepare(const IndexView& index, const Query& query, const Boosts& boosts,
                        float floor) {
    Prepared prepared{query, {}, floor};
    if (!boosts.set) return prepared;
    prepared.boosted = with_codes(index, [&](auto codes) {
        return score_boosted(codes, index.num_splits, index.num_sub_items, query, boosts);
    });
    prepared.query.boosted = boosts.set;
    prepared.floor = std::max(floor, prepared.boosted.floor(query.k));
    return prepared;
}

// Finds the best items of an index that reach the floor.
inline Found find_best(const IndexView& index, const Query& plain, const Boosts& boosts,
                       const Request& request, const Limits& limits, float floor,
                       std::uint8_t* visited = nullptr) {
    const auto [query, boosted, reached] = prepare(index, plain, boosts, floor);
    Found found{.top = TopK(query.k, reached), .stats = {.visited = visited}};
    if (query.k == 0) return found;  // nothing is wanted, or nothing is there
    // Where they are fewer than are wanted, each that is there leaves less to look for.
    if (boosted.items.size() < query.k) boosted.offer_to(found.top);
    found.method = answer(index, query, request, limits, found.top, found.stats);
    boosted.offer_to(found.top);
    count_scored(index, boosted.items.size(), found.stats);
    return found;
}

inline Record record_of(const Start& start, const Stats& stats, Method method, float threshold) {
    return {
        .method = static_cast<std::int64_t>(method),
        .exact = stats.exact,
        .steps = stats.steps,
        .items_scored = stats.items_scored,
        .items_touched = stats.items_touched,
        .bytes_touched = stats.bytes_touched,
        .threshold = threshold,
        // Boosted items may have raised the threshold since, and lost to it.
        .upper_bound = stats.exact ? threshold : std::max<double>(stats.upper_bound, threshold),
        .nanoseconds = nanoseconds_between(start.begun, std::chrono::steady_clock::now()),
        .sub_item_score_nanoseconds = nanoseconds_between(start.begun, start.scored),
        .together = 1,
    };
}

// Writes what was found where so many are wanted of an index that has enough of them, or fewer.
inline void write_answer(const Start& start, Found& found, std::size_t enough, std::size_t wanted,
                         std::size_t number, const Answers& answers) {
    write_top(found.top.sorted(), answers.ids.subspan(number * wanted, wanted),
              answers.scores.subspan(number * wanted, wanted));
    // Where more are wanted than there are items, none of them is the K-th.
    const float threshold = wanted > enough ? start.floor : found.top.threshold();
    answers.records[number] = record_of(start, found.stats, found.method, threshold);
}

inline void search_one(const IndexView& index, const Batch& batch, const Request& request,
                       std::size_t number, const Answers& answers) {
    const Start start = start_query(index, batch, request, number, index.largest_bias);
    const Query query =
        query_of(index, batch, *request.kernels, number, start.sub_item_scores, request.k);
    std::uint8_t* visited = nullptr;
    if (!answers.visited.empty())
        visited = answers.visited.data() + number * index.num_splits * index.num_sub_items;
    Found found =
        find_best(index, query, start.boosts, request, start.limits, start.floor, visited);
    write_answer(start, found, query.k, request.k, number, answers);
}

}  // namespace recprune
