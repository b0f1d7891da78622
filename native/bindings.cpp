// Translation between NumPy and the core, and nothing else: shapes are checked by the Python
// wrappers, memory is allocated here, and the GIL is released while the core runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "boosts.hpp"
#include "exclusions.hpp"
#include "kernels/kernels.hpp"
#include "layouts/cells.hpp"
#include "layouts/integrity.hpp"
#include "layouts/lists.hpp"
#include "layouts/posting_lists.hpp"
#include "search_batch.hpp"
#include "segments.hpp"
#include "util/parallel.hpp"
#include "util/row_sums.hpp"
#include "util/sort_log.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using MutableMatrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T, class... Shape>
std::span<T> as_span(const nb::ndarray<T, Shape...>& array) {
    return {array.data(), array.size()};
}

// Fresh, uninitialised memory for a NumPy array, and a span over it for the core. Large arrays ask
// for huge pages: a search jumps about in them, and with small pages would mostly wait for the TLB.
template <class T>
struct Output {
    struct Free {
        void operator()(T* pointer) const noexcept { std::free(pointer); }
    };
    std::unique_ptr<T[], Free> memory;
    std::size_t size;

    explicit Output(std::size_t count) : size(count) {
        constexpr std::size_t kHugePage = std::size_t{2} << 20;  // bytes, on x86-64 and ARM
        constexpr std::size_t kLarge =
            kHugePage / 8;  // from here on, one that is mostly empty pays
        constexpr std::size_t kCacheLine = 64;
        const std::size_t bytes = std::max<std::size_t>(count * sizeof(T), 1);
        const std::size_t alignment = bytes >= kLarge ? kHugePage : kCacheLine;
        const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
        memory.reset(static_cast<T*>(std::aligned_alloc(alignment, rounded)));
        if (!memory) throw std::bad_alloc();
#if defined(__linux__)
        if (alignment == kHugePage) madvise(memory.get(), rounded, MADV_HUGEPAGE);
#endif
    }

    explicit Output(std::span<const T> original) : Output(original.size()) {
        std::copy(original.begin(), original.end(), memory.get());
    }

    std::span<T> span() { return {memory.get(), size}; }

    nb::ndarray<nb::numpy, T> release(std::initializer_list<std::size_t> shape) {
        T* data = memory.release();
        return nb::ndarray<nb::numpy, T>(data, shape, owner(data));
    }

  private:
    static nb::capsule owner(T* data) {
        return nb::capsule(data, [](void* pointer) noexcept { std::free(pointer); });
    }
};

// The bytes of an open file, mapped. Python's own maps keep a descriptor each for as long as they
// live, and a process may have no more than a thousand: a segment of a live index is 16 files.
nb::ndarray<nb::numpy, const std::uint8_t> map_file(int descriptor, std::size_t size) {
    void* mapped = mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor, 0);
    if (mapped == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }
    struct Mapping {
        void* begin;
        std::size_t size;

        ~Mapping() { munmap(begin, size); }
    };
    nb::capsule owner(new Mapping{mapped, size},
                      [](void* mapping) noexcept { delete static_cast<Mapping*>(mapping); });
    return nb::ndarray<nb::numpy, const std::uint8_t>(mapped, {size}, owner);
}

template <class Code, class Item>
nb::tuple posting_lists_as(const Matrix<Code>& codes, std::size_t num_sub_items,
                           std::size_t threads) {
    const std::size_t num_items = codes.shape(0);
    const std::size_t num_splits = codes.shape(1);
    Output<std::int64_t> offsets(num_splits * (num_sub_items + 1));
    Output<Item> items(num_splits * num_items);
    {
        nb::gil_scoped_release unlocked;
        recprune::build_posting_lists<Code, Item>(as_span(codes), num_items, num_splits,
                                                  num_sub_items, threads, offsets.span(),
                                                  items.span());
    }
    return nb::make_tuple(offsets.release({num_splits, num_sub_items + 1}),
                          items.release({num_splits, num_items}));
}

template <class Code>
nb::tuple posting_lists(const Matrix<Code>& codes, std::size_t num_sub_items, std::size_t threads) {
    // Four bytes an item while they suffice; catalogues beyond 2³¹ items get eight.
    if (codes.shape(0) <= std::size_t{INT32_MAX})
        return posting_lists_as<Code, std::int32_t>(codes, num_sub_items, threads);
    return posting_lists_as<Code, std::int64_t>(codes, num_sub_items, threads);
}

nb::tuple sort_log(const Vector<std::int32_t>& users, const Vector<std::int32_t>& items,
                   const Vector<std::int64_t>& times, std::size_t num_users) {
    const std::size_t num_rows = users.size();
    if (items.size() != num_rows || times.size() != num_rows)
        throw std::invalid_argument("users, items and times differ in length");
    Output<std::int64_t> offsets(num_users + 1);
    Output<std::int32_t> sorted_items(num_rows);
    Output<std::int64_t> sorted_times(num_rows);
    {
        nb::gil_scoped_release unlocked;
        auto sort = num_rows <= UINT32_MAX ? recprune::sort_log<std::uint32_t>
                                           : recprune::sort_log<std::uint64_t>;
        sort(as_span(users), as_span(items), as_span(times), offsets.span(), sorted_items.span(),
             sorted_times.span());
    }
    return nb::make_tuple(offsets.release({num_users + 1}), sorted_items.release({num_rows}),
                          sorted_times.release({num_rows}));
}

void add_rows(const Matrix<float>& table, const Matrix<std::int64_t>& places,
              const MutableMatrix<float>& sums) {
    const std::size_t width = table.shape(1);
    if (width == 0 || places.shape(1) == 0 || sums.shape(0) != places.shape(0) ||
        sums.shape(1) != width)
        throw std::invalid_argument("table, places and sums do not fit each other");
    nb::gil_scoped_release unlocked;
    recprune::add_rows(as_span(table), width, as_span(places), places.shape(1), as_span(sums));
}

// Index ------------------------------------------------------------------------------------------

// The kernels in use: the best of this machine, or those that RECPRUNE_ISA names.
const recprune::Kernels& kernels_in_use() {
    const char* forced = std::getenv("RECPRUNE_ISA");
    const recprune::Kernels* kernels = recprune::find_kernels(forced ? forced : "");
    if (kernels) return *kernels;
    std::string message = "RECPRUNE_ISA is '" + std::string(forced) + "', this machine has";
    const char* separator = " ";
    for (const auto& available : recprune::available_kernels()) {
        message += separator + std::string(available.name);
        separator = ", ";
    }
    throw std::invalid_argument(message);
}

// What the kernels in use count with, by the names of the cost model.
nb::dict costs_in_use() {
    const recprune::Costs& costs = kernels_in_use().costs;
    nb::dict named;
    named["scan"] = costs.scan;
    named["scanned_item"] = costs.scanned_item;
    named["scan_growth"] = costs.scan_growth;
    named["cells"] = costs.cells;
    named["line"] = costs.line;
    named["found_item"] = costs.found_item;
    named["few_items"] = costs.few_items;
    named["allowed_item"] = costs.allowed_item;
    named["filtered_code"] = costs.filtered_code;
    return named;
}

nb::tuple build_lists(const Matrix<std::uint8_t>& codes, std::size_t num_sub_items,
                      std::size_t threads) {
    using namespace recprune;
    const std::size_t num_items = codes.shape(0);
    const std::size_t num_splits = codes.shape(1);
    Output<std::int64_t> offsets(num_sub_items + 1);
    {
        nb::gil_scoped_release unlocked;
        count_list_blocks(as_span(codes), num_items, num_splits, offsets.span());
    }
    const auto num_blocks = static_cast<std::size_t>(offsets.span().back());
    const std::size_t num_rows = num_code_rows(num_splits);
    Output<std::uint8_t> second_codes(num_sub_items * kMaxNarrowSubItems);
    Output<std::uint8_t> bases(num_blocks);
    Output<std::uint64_t> changes(num_blocks);
    Output<std::uint8_t> rows(num_rows * num_blocks * kBlockItems);
    Output<Item> items(num_blocks * kBlockItems);
    {
        nb::gil_scoped_release unlocked;
        Output<std::uint8_t> second(num_blocks * kBlockItems);
        fill_list_blocks(as_span(codes), num_items, num_splits, offsets.span(), second.span(),
                         rows.span(), items.span());
        run_in_parallel(num_sub_items, threads, [&](std::size_t list) {
            const auto first = static_cast<std::size_t>(offsets.span()[list]);
            const auto last = static_cast<std::size_t>(offsets.span()[list + 1]);
            sort_list(first * kBlockItems, last * kBlockItems, second.span(), rows.span(),
                      items.span());
            rank_list(first, last, second.span(), items.span(), bases.span(), changes.span(),
                      second_codes.span().subspan(list * kMaxNarrowSubItems, kMaxNarrowSubItems));
        });
    }
    return nb::make_tuple(offsets.release({num_sub_items + 1}),
                          second_codes.release({num_sub_items, kMaxNarrowSubItems}),
                          bases.release({num_blocks}), changes.release({num_blocks}),
                          rows.release({num_rows, num_blocks, kBlockItems}),
                          items.release({num_blocks, kBlockItems}));
}

nb::tuple build_cells(const Matrix<std::uint8_t>& codes, std::size_t num_sub_items,
                      const Vector<std::uint8_t>& padding, bool with_last_keys,
                      std::size_t threads) {
    using namespace recprune;
    const std::size_t num_items = codes.shape(0);
    const std::size_t num_splits = codes.shape(1);
    const std::size_t num_pairs = num_pairs_of(num_splits);
    if (!has_cells(num_items, num_splits, num_sub_items))
        throw std::invalid_argument("an index of this size has no cells");
    std::array<std::size_t, kMostPairs + 1> first_cell{};
    for (std::size_t pair = 0; pair < num_pairs; ++pair)
        first_cell[pair + 1] = first_cell[pair] + num_cells_of(pair, num_splits, num_sub_items) + 1;
    Output<std::int64_t> pair_lines(num_pairs + 1);
    Output<std::uint32_t> overflow(first_cell[num_pairs]);
    auto of_pair = [&](auto& all, const auto& firsts, std::size_t pair) {
        const auto first = static_cast<std::size_t>(firsts[pair]);
        return all.span().subspan(first, static_cast<std::size_t>(firsts[pair + 1]) - first);
    };
    {
        nb::gil_scoped_release unlocked;
        const std::span<std::int64_t> lines = pair_lines.span();
        run_in_parallel(num_pairs, threads, [&](std::size_t pair) {
            lines[pair + 1] = static_cast<std::int64_t>(
                count_cell_lines(as_span(codes), num_items, num_splits, num_sub_items, pair,
                                 of_pair(overflow, first_cell, pair)));
        });
        lines[0] = 0;
        std::partial_sum(lines.begin(), lines.end(), lines.begin());
    }
    const auto num_lines = static_cast<std::size_t>(pair_lines.span().back());
    const bool has_last_keys = with_last_keys && num_pairs == kPairsWithLastKeys;
    const std::size_t num_second = num_pairs >= kPairsWithSecondLines ? num_lines : 0;
    Output<std::uint8_t> lines(num_lines * kLineBytes);
    Output<std::uint32_t> starts(num_lines + num_pairs);
    Output<std::uint16_t> last_keys(has_last_keys ? num_pairs * num_items : 0);
    Output<std::uint8_t> second_lines(num_second * kLineBytes);
    Output<Item> items(num_pairs * num_items);
    {
        nb::gil_scoped_release unlocked;
        run_in_parallel(num_pairs, threads, [&](std::size_t pair) {
            const auto first = static_cast<std::size_t>(pair_lines.span()[pair]);
            const std::size_t count = static_cast<std::size_t>(pair_lines.span()[pair + 1]) - first;
            const std::size_t first_byte = first * kLineBytes;
            fill_cell_lines(
                as_span(codes), num_items, num_splits, num_sub_items, pair, as_span(padding),
                {
                    .overflow = of_pair(overflow, first_cell, pair),
                    .lines = lines.span().subspan(first_byte, count * kLineBytes),
                    .starts = starts.span().subspan(first + pair, count + 1),
                    .last_keys = has_last_keys
                                     ? last_keys.span().subspan(pair * num_items, num_items)
                                     : std::span<std::uint16_t>{},
                    .second_lines =
                        num_second ? second_lines.span().subspan(first_byte, count * kLineBytes)
                                   : std::span<std::uint8_t>{},
                    .items = items.span().subspan(pair * num_items, num_items),
                });
        });
    }
    return nb::make_tuple(pair_lines.release({num_pairs + 1}), overflow.release({overflow.size}),
                          lines.release({num_lines, kLineBytes}), starts.release({starts.size}),
                          last_keys.release({has_last_keys ? num_pairs : 0, num_items}),
                          second_lines.release({num_second, kLineBytes}),
                          items.release({num_pairs, num_items}));
}

template <class T>
using Cube = nb::ndarray<const T, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

// A method and how far it may go, as methods.py has it.
struct MethodSettings {
    recprune::Method method;
    std::size_t sub_items_per_step;
    std::int64_t max_steps;
    double over_inflation;
    std::int64_t deadline_ns;
};

// A flat, contiguous array of numbers, by the buffer protocol: a few hundred ids are checked in the
// time that other ways to them take.
class Buffer {
  public:
    explicit Buffer(nb::handle object) {
        valid_ = PyObject_CheckBuffer(object.ptr()) &&
                 PyObject_GetBuffer(object.ptr(), &view_, PyBUF_FORMAT | PyBUF_ND) == 0;
        if (!valid_) PyErr_Clear();
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() {
        if (valid_) PyBuffer_Release(&view_);
    }

    // Calls with the ids if these are integers of a usual type. Returns whether they are.
    template <class Use>
    bool with_ids(const Use& use) const {
        if (holds<std::int64_t>("lq")) return use(span<std::int64_t>()), true;
        if (holds<std::int32_t>("il")) return use(span<std::int32_t>()), true;
        if (holds<std::uint32_t>("IL")) return use(span<std::uint32_t>()), true;
        return false;
    }

    // The numbers, if they are of this type: one of the format characters of the struct module.
    template <class T>
    bool holds(std::string_view formats) const {
        return valid_ && view_.ndim == 1 && view_.itemsize == sizeof(T) && view_.format &&
               view_.format[0] != '\0' && view_.format[1] == '\0' &&
               formats.find(view_.format[0]) != std::string_view::npos;
    }
    template <class T>
    std::span<const T> span() const {
        return {static_cast<const T*>(view_.buf), size()};
    }
    std::size_t size() const { return static_cast<std::size_t>(view_.len / view_.itemsize); }

  private:
    Py_buffer view_;
    bool valid_;
};

// Adds each row of a batch, or the only one without a batch. Returns none unless there are as many
// rows as queries, all as expected: Python then has to look into them. The caller owns the result.
template <class Checked, class Add>
Checked* make_rows(nb::handle rows, std::size_t num_queries, bool single, std::int64_t num_items,
                   const Add& add) {
    auto checked = std::make_unique<Checked>(num_items);
    if (single) return add(rows, *checked) ? checked.release() : nullptr;
    const bool is_sequence = PyList_Check(rows.ptr()) || PyTuple_Check(rows.ptr());
    if (!is_sequence || nb::len(rows) != num_queries) return nullptr;
    for (nb::handle row : rows)
        if (!add(row, *checked)) return nullptr;
    return checked.release();
}

// From pairs of arrays, ids and float32, one pair for each query.
recprune::BatchBoosts* make_boosts(nb::handle rows, std::size_t num_queries, bool single,
                                   std::int64_t num_items) {
    auto add = [](nb::handle row, recprune::BatchBoosts& boosts) {
        if (!PyTuple_Check(row.ptr()) || PyTuple_GET_SIZE(row.ptr()) != 2) return false;
        const Buffer items(PyTuple_GET_ITEM(row.ptr(), 0));
        const Buffer values(PyTuple_GET_ITEM(row.ptr(), 1));
        if (!values.holds<float>("f")) return false;
        bool same_size = false;
        return items.with_ids([&](auto ids) {
            same_size = ids.size() == values.size();
            if (same_size) boosts.add(ids, values.span<float>());
        }) && same_size;
    };
    return make_rows<recprune::BatchBoosts>(rows, num_queries, single, num_items, add);
}

// From arrays of ids, one for each query.
recprune::BatchExclusions* make_exclusions(nb::handle rows, std::size_t num_queries, bool single,
                                           std::int64_t num_items) {
    auto add = [](nb::handle row, recprune::BatchExclusions& exclusions) {
        const Buffer items(row);
        return items.with_ids([&](auto ids) { exclusions.add(ids); });
    };
    return make_rows<recprune::BatchExclusions>(rows, num_queries, single, num_items, add);
}

// A view of what an object keeps.
template <class T>
nb::ndarray<nb::numpy, const T, nb::ndim<1>> view_of(std::span<const T> values, nb::handle owner) {
    return {values.data(), {values.size()}, owner};
}

// What a search is asked, as the core takes it.
recprune::Batch batch_of(const Matrix<float>& queries, bool are_scores,
                         const recprune::BatchExclusions* exclude,
                         const std::optional<Matrix<std::uint64_t>>& allow,
                         const std::optional<Vector<float>>& floors,
                         const recprune::BatchBoosts* boosts) {
    recprune::Batch batch;
    batch.queries = as_span(queries);
    batch.num_queries = queries.shape(0);
    batch.are_scores = are_scores;
    batch.exclude = exclude;
    batch.boosts = boosts;
    if (allow) {
        batch.allow = as_span(*allow);
        batch.allow_rows = allow->shape(0);
    }
    if (floors) batch.floors = as_span(*floors);
    return batch;
}

recprune::Request request_of(const MethodSettings& settings, std::size_t k) {
    return {
        .method = settings.method,
        .k = k,
        .sub_items_per_step = settings.sub_items_per_step,
        .max_steps = settings.max_steps,
        .over_inflation = settings.over_inflation,
        .deadline_ns = settings.deadline_ns,
        .kernels = &kernels_in_use(),
    };
}

// Into arrays that the caller made: NumPy makes them faster than we could.
recprune::Answers answers_in(const MutableMatrix<std::int64_t>& ids,
                             const MutableMatrix<float>& scores,
                             const MutableMatrix<std::int64_t>& records) {
    return {
        .ids = as_span(ids),
        .scores = as_span(scores),
        .records = {reinterpret_cast<recprune::Record*>(records.data()), records.shape(0)},
    };
}

// Keeps the arrays of an index alive and searches them.
class SearchIndex {
  public:
    SearchIndex(std::size_t num_items, const Cube<float>& transposed)
        : transposed_(std::make_shared<Output<float>>(as_span(transposed))) {
        view_.num_items = num_items;
        view_.num_splits = transposed.shape(0);
        view_.width = transposed.shape(1);
        view_.num_sub_items = transposed.shape(2);
        view_.transposed = transposed_->span();
    }

    // With the vectors of another one, which both keep: nothing is copied.
    SearchIndex(std::size_t num_items, const SearchIndex& like) : transposed_(like.transposed_) {
        view_.num_items = num_items;
        view_.num_splits = like.view_.num_splits;
        view_.width = like.view_.width;
        view_.num_sub_items = like.view_.num_sub_items;
        view_.transposed = transposed_->span();
    }

    void set_codes(Matrix<std::uint8_t> codes) {
        codes_ = std::move(codes);
        view_.codes = as_span(codes_);
    }
    void set_wide_codes(Matrix<std::uint16_t> codes) {
        wide_codes_ = std::move(codes);
        view_.wide_codes = as_span(wide_codes_);
    }
    void set_gathered_codes(Matrix<std::uint8_t> codes) {
        gathered_codes_ = std::move(codes);
        view_.gathered_codes = as_span(gathered_codes_);
    }
    void set_lists(Vector<std::int64_t> offsets, Matrix<std::uint8_t> second_codes,
                   Vector<std::uint8_t> bases, Vector<std::uint64_t> changes,
                   Cube<std::uint8_t> codes, Matrix<recprune::Item> items) {
        list_offsets_ = std::move(offsets);
        second_codes_ = std::move(second_codes);
        list_bases_ = std::move(bases);
        list_changes_ = std::move(changes);
        list_codes_ = std::move(codes);
        list_items_ = std::move(items);
        view_.lists = recprune::ListLayout{
            .block_offsets = as_span(list_offsets_),
            .second_codes = as_span(second_codes_),
            .bases = as_span(list_bases_),
            .changes = as_span(list_changes_),
            .codes = as_span(list_codes_),
            .items = as_span(list_items_),
            .num_items = view_.num_items,
            .num_splits = view_.num_splits,
            .num_sub_items = view_.num_sub_items,
        };
    }
    // Pre: the codes are set.
    void set_cells(Vector<std::int64_t> pair_lines, const Vector<std::uint32_t>& overflow,
                   Matrix<std::uint8_t> lines, Vector<std::uint32_t> starts,
                   Matrix<std::uint16_t> last_keys, Matrix<std::uint8_t> second_lines,
                   Matrix<recprune::Item> items) {
        recprune::check_pair_lines(as_span(pair_lines), lines.shape(0), view_.num_splits,
                                   view_.num_sub_items);
        cell_pair_lines_ = std::move(pair_lines);
        cell_overflow_.emplace(as_span(overflow));
        cell_lines_ = std::move(lines);
        cell_starts_ = std::move(starts);
        cell_last_keys_ = std::move(last_keys);
        cell_second_lines_ = std::move(second_lines);
        cell_items_ = std::move(items);
        view_.cells = recprune::cell_layout(
            {as_span(cell_pair_lines_), cell_overflow_->span(), as_span(cell_lines_),
             as_span(cell_starts_), as_span(cell_last_keys_), as_span(cell_second_lines_),
             as_span(cell_items_)},
            view_.num_items, view_.num_splits, view_.num_sub_items);
        sub_item_shares_ = recprune::sub_item_shares(view_.codes, view_.num_items, view_.num_splits,
                                                     view_.num_sub_items);
        view_.sub_item_shares = sub_item_shares_;
    }
    void set_posting_lists(Matrix<std::int64_t> offsets, Matrix<std::int32_t> items) {
        posting_offsets_ = std::move(offsets);
        posting_items_ = std::move(items);
        view_.inverted = recprune::InvertedIndex<std::int32_t>{as_span(posting_offsets_),
                                                               as_span(posting_items_)};
    }
    void set_item_bias(Vector<float> bias, float highest, float largest) {
        item_bias_ = std::move(bias);
        view_.item_bias = as_span(item_bias_);
        view_.highest_bias = highest;
        view_.largest_bias = largest;
        bias_sample_ = recprune::bias_sample(view_.item_bias);
        bias_shares_.assign(bias_sample_.size(), 1.0f / static_cast<float>(bias_sample_.size()));
        view_.bias_sample = bias_sample_;
        view_.bias_shares = bias_shares_;
    }

    // Throws unless the arrays are such as an index is built of; their shapes are. For a folder
    // that was opened: `layouts/integrity.hpp` says what is looked at.
    void check(std::size_t threads) const {
        using namespace recprune;
        nb::gil_scoped_release unlocked;
        check_finite(view_.transposed, "transposed_embeddings", threads);
        check_finite(view_.item_bias, "item_bias", threads);
        check_codes(view_.codes, view_.num_sub_items, "codes", view_.num_splits, threads);
        check_codes(view_.wide_codes, view_.num_sub_items, "codes", view_.num_splits, threads);
        if (!view_.lists && !view_.cells) return;
        const ItemSums sums(view_.num_splits);
        CodeSums expected;
        add_codes(view_.codes, view_.num_items, view_.num_splits,
                  view_.cells ? view_.cells->chain_pairs() : 0, sums, threads, expected);
        if (view_.lists)
            ListCheck(*view_.lists, view_.codes, view_.num_items, sums).run(expected.all, threads);
        if (view_.cells) CellCheck(*view_.cells, view_.codes, sums).run(expected, threads);
    }

    void search(const Matrix<float>& queries, bool are_scores, std::size_t k, std::size_t threads,
                const MethodSettings& settings, const recprune::BatchExclusions* exclude,
                const std::optional<Matrix<std::uint64_t>>& allow,
                const std::optional<Vector<float>>& floors, const recprune::BatchBoosts* boosts,
                const MutableMatrix<std::int64_t>& ids, const MutableMatrix<float>& scores,
                const MutableMatrix<std::int64_t>& records,
                std::optional<MutableMatrix<std::uint8_t>> visited) const {
        const recprune::Batch batch = batch_of(queries, are_scores, exclude, allow, floors, boosts);
        const recprune::Request request = request_of(settings, k);
        recprune::Answers answers = answers_in(ids, scores, records);
        if (visited) answers.visited = as_span(*visited);
        nb::gil_scoped_release unlocked;
        recprune::search_batch(view_, batch, request, threads, answers);
    }

    // Throws for the first query whose sub-item scores cannot be added up, with a bias of up to
    // `largest_bias` in magnitude and, if given, with a boost of up to the query's largest.
    void refuse_overflow(const Cube<float>& tables, float largest_bias,
                         const std::optional<Vector<float>>& largest_boosts) const {
        if (largest_boosts && largest_boosts->size() != tables.shape(0))
            throw std::invalid_argument("boosts do not fit the queries");
        const float largest = std::max(view_.largest_bias, largest_bias);
        const std::size_t size = view_.num_splits * view_.num_sub_items;
        for (std::size_t query = 0; query < tables.shape(0); ++query)
            if (!recprune::scores_are_safe(view_, kernels_in_use(), tables.data() + query * size,
                                           largest,
                                           largest_boosts ? largest_boosts->data()[query] : 0.0f))
                throw recprune::QueryOverflow(query);
    }

    const recprune::IndexView& view() const { return view_; }

    // Lines of cells that the search of a query, given by its sub-item scores, would plan to visit.
    double planned_lines(const Matrix<float>& sub_item_scores, std::size_t k) const {
        if (sub_item_scores.shape(0) != view_.num_splits ||
            sub_item_scores.shape(1) != view_.num_sub_items)
            throw std::invalid_argument("sub_item_scores do not fit the index");
        return recprune::planned_lines(view_, {.sub_item_scores = sub_item_scores.data(), .k = k},
                                       kernels_in_use());
    }

    // The codes of all items, item-major, put together from the lists.
    nb::ndarray<nb::numpy, std::uint8_t> codes_of_lists() const {
        if (!view_.lists) throw std::invalid_argument("there are no lists");
        Output<std::uint8_t> codes(view_.num_items * view_.num_splits);
        {
            nb::gil_scoped_release unlocked;
            recprune::gather_codes(*view_.lists, codes.span());
        }
        return codes.release({view_.num_items, view_.num_splits});
    }

    nb::ndarray<nb::numpy, float> sub_item_scores(const Matrix<float>& sequence_embeddings) const {
        const recprune::Kernels& kernels = kernels_in_use();
        const std::size_t count = sequence_embeddings.shape(0);
        const std::size_t size = view_.num_splits * view_.num_sub_items;
        Output<float> scores(count * size);
        {
            nb::gil_scoped_release unlocked;
            for (std::size_t query = 0; query < count; ++query)
                kernels.sub_item_scores(
                    sequence_embeddings.data() + query * sequence_embeddings.shape(1),
                    view_.transposed.data(), view_.num_splits, view_.width, view_.num_sub_items,
                    scores.span().data() + query * size);
        }
        return scores.release({count, view_.num_splits, view_.num_sub_items});
    }

  private:
    recprune::IndexView view_;
    // Every query reads these all over, and a file's pages are small: kept as copies.
    std::shared_ptr<Output<float>> transposed_;
    std::optional<Output<std::uint32_t>> cell_overflow_;
    Matrix<std::uint8_t> codes_;
    Matrix<std::uint16_t> wide_codes_;
    Matrix<std::uint8_t> gathered_codes_;
    Vector<std::int64_t> list_offsets_;
    Matrix<std::uint8_t> second_codes_;
    Vector<std::uint8_t> list_bases_;
    Vector<std::uint64_t> list_changes_;
    Cube<std::uint8_t> list_codes_;
    Matrix<recprune::Item> list_items_;
    Vector<std::int64_t> cell_pair_lines_;
    Matrix<std::uint8_t> cell_lines_;
    Vector<std::uint32_t> cell_starts_;
    Matrix<std::uint16_t> cell_last_keys_;
    Matrix<std::uint8_t> cell_second_lines_;
    Matrix<recprune::Item> cell_items_;
    std::vector<float> sub_item_shares_;
    std::vector<float> bias_sample_;
    std::vector<float> bias_shares_;
    Matrix<std::int64_t> posting_offsets_;
    Matrix<std::int32_t> posting_items_;
    Vector<float> item_bias_;
};

// Keeps the segments of a catalogue alive and searches them as one index.
class SegmentedIndex {
  public:
    // The largest first; all of the same shape. Without `present`, all items of the index are.
    void add(nb::object index, Vector<recprune::Item> numbers, Vector<recprune::Item> positions,
             std::optional<Vector<std::uint64_t>> present, std::size_t num_present) {
        const recprune::IndexView& view = nb::cast<const SearchIndex&>(index).view();
        if (!segments_.empty()) {
            const recprune::IndexView& first = *segments_.front().index;
            if (view.num_splits != first.num_splits || view.num_sub_items != first.num_sub_items ||
                view.width != first.width)
                throw std::invalid_argument("segments differ in shape");
        }
        const std::size_t words = (view.num_items + recprune::kWordBits - 1) / recprune::kWordBits;
        if (positions.size() != numbers.size() || (present && present->size() != words))
            throw std::invalid_argument("numbers, positions and present items do not fit");
        segments_.push_back({
            .index = &view,
            .numbers = {as_span(numbers), as_span(positions), view.num_items},
            .present = present ? present->data() : nullptr,
            .num_present = num_present,
        });
        kept_.push_back(
            {std::move(index), std::move(numbers), std::move(positions), std::move(present)});
    }

    void search(const Matrix<float>& queries, bool are_scores, std::size_t k, std::size_t threads,
                const MethodSettings& settings, const recprune::BatchExclusions* exclude,
                const std::optional<Matrix<std::uint64_t>>& allow,
                const std::optional<Vector<float>>& floors, const recprune::BatchBoosts* boosts,
                const MutableMatrix<std::int64_t>& ids, const MutableMatrix<float>& scores,
                const MutableMatrix<std::int64_t>& records) const {
        if (segments_.empty()) throw std::invalid_argument("there are no segments");
        const recprune::Batch batch = batch_of(queries, are_scores, exclude, allow, floors, boosts);
        const recprune::Request request = request_of(settings, k);
        const recprune::Answers answers = answers_in(ids, scores, records);
        nb::gil_scoped_release unlocked;
        recprune::search_batch(segments_, batch, request, threads, answers);
    }

    void check(std::size_t num_numbers) const {
        nb::gil_scoped_release unlocked;
        recprune::check_segments(segments_, num_numbers);
    }

  private:
    struct Kept {
        nb::object index;
        Vector<recprune::Item> numbers;
        Vector<recprune::Item> positions;
        std::optional<Vector<std::uint64_t>> present;
    };
    std::vector<recprune::Segment> segments_;
    std::vector<Kept> kept_;
};

// The fields of a Record in their order, and their types as NumPy names them.
nb::list record_fields() {
    static_assert(std::is_standard_layout_v<recprune::Record>);
    nb::list fields;
    auto add = [&fields](const char* name, auto recprune::Record::* member) {
        using Field = std::remove_cvref_t<decltype(std::declval<recprune::Record>().*member)>;
        fields.append(nb::make_tuple(name, std::is_floating_point_v<Field> ? "f8" : "i8"));
    };
    using recprune::Record;
    add("method", &Record::method);
    add("exact", &Record::exact);
    add("steps", &Record::steps);
    add("items_scored", &Record::items_scored);
    add("items_touched", &Record::items_touched);
    add("bytes_touched", &Record::bytes_touched);
    add("threshold", &Record::threshold);
    add("upper_bound", &Record::upper_bound);
    add("nanoseconds", &Record::nanoseconds);
    add("sub_item_score_nanoseconds", &Record::sub_item_score_nanoseconds);
    add("together", &Record::together);
    if (fields.size() * sizeof(std::int64_t) != sizeof(Record))
        throw std::logic_error("a field of Record has no name");
    return fields;
}

// QueryOverflow becomes a ValueError that has the query's number as an attribute.
void add_overflow_error(nb::module_& module) {
    static nb::object type;
    type = nb::steal(
        PyErr_NewException("recprune._native.QueryOverflowError", PyExc_ValueError, nullptr));
    module.attr("QueryOverflowError") = type;
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const recprune::QueryOverflow& overflow) {
            nb::object error = type(overflow.what());
            error.attr("query") = overflow.query;
            PyErr_SetObject(type.ptr(), error.ptr());
        }
    });
}

void add_sorting(nb::module_& module) {
    module.def("posting_lists", &posting_lists<std::uint8_t>, "codes"_a.noconvert(),
               "num_sub_items"_a, "threads"_a,
               nb::sig("def posting_lists(codes: numpy.typing.NDArray[numpy.uint8], "
                       "num_sub_items: int, threads: int) -> tuple["
                       "numpy.typing.NDArray[numpy.int64], "
                       "numpy.typing.NDArray[numpy.int32 | numpy.int64]]"),
               "(offsets [splits, sub_items + 1], items [splits, items]) of a code table.");
    module.def("posting_lists", &posting_lists<std::uint16_t>, "codes"_a.noconvert(),
               "num_sub_items"_a, "threads"_a,
               nb::sig("def posting_lists(codes: numpy.typing.NDArray[numpy.uint16], "
                       "num_sub_items: int, threads: int) -> tuple["
                       "numpy.typing.NDArray[numpy.int64], "
                       "numpy.typing.NDArray[numpy.int32 | numpy.int64]]"));
    module.def("sort_log", &sort_log, "users"_a.noconvert(), "items"_a.noconvert(),
               "times"_a.noconvert(), "num_users"_a,
               nb::sig("def sort_log(users: numpy.typing.NDArray[numpy.int32], "
                       "items: numpy.typing.NDArray[numpy.int32], "
                       "times: numpy.typing.NDArray[numpy.int64], num_users: int) -> tuple["
                       "numpy.typing.NDArray[numpy.int64], numpy.typing.NDArray[numpy.int32], "
                       "numpy.typing.NDArray[numpy.int64]]"),
               "(offsets [users + 1], items, times): by user, then time, then input order.");
}

void add_building(nb::module_& module) {
    module.def("build_lists", &build_lists, "codes"_a.noconvert(), "num_sub_items"_a, "threads"_a);
    module.def("build_cells", &build_cells, "codes"_a.noconvert(), "num_sub_items"_a,
               "padding"_a.noconvert(), "with_last_keys"_a, "threads"_a);
    module.def("has_cells", &recprune::has_cells, "num_items"_a, "num_splits"_a, "num_sub_items"_a);
    module.def("instruction_sets", [] {
        nb::list names;
        for (const auto& kernels : recprune::available_kernels()) names.append(kernels.name);
        return names;
    });
    module.def("instruction_set", [] { return kernels_in_use().name; });
    module.def("costs", &costs_in_use);
    module.def("record_fields", &record_fields);
    module.def("map_file", &map_file, "descriptor"_a, "size"_a,
               nb::sig("def map_file(descriptor: int, size: int) -> "
                       "numpy.typing.NDArray[numpy.uint8]"));
    module.def("add_rows", &add_rows, "table"_a.noconvert(), "places"_a.noconvert(),
               "sums"_a.noconvert());
}

void add_settings(nb::module_& module) {
    nb::enum_<recprune::Method> methods(module, "Method");
    for (const auto& [name, method] : recprune::kMethods) methods.value(name, method);
    nb::class_<MethodSettings>(module, "MethodSettings")
        .def(nb::init<recprune::Method, std::size_t, std::int64_t, double, std::int64_t>(),
             "method"_a, "sub_items_per_step"_a, "max_steps"_a, "over_inflation"_a,
             "deadline_ns"_a);
    using recprune::BatchBoosts;
    using recprune::BatchExclusions;
    auto own = []<class Checked, class T>(std::span<const T> (Checked::*view)() const) {
        return [view](nb::handle self) {
            return view_of((nb::cast<const Checked&>(self).*view)(), self);
        };
    };
    nb::class_<BatchExclusions>(module, "BatchExclusions")
        .def_static("make", &make_exclusions, nb::rv_policy::take_ownership, "rows"_a,
                    "num_queries"_a, "single"_a, "num_items"_a,
                    nb::sig("def make(rows: object, num_queries: int, single: bool, "
                            "num_items: int) -> BatchExclusions | None"))
        .def_prop_ro("offsets", own(&BatchExclusions::offsets))
        .def_prop_ro("items", own(&BatchExclusions::items));
    nb::class_<BatchBoosts>(module, "BatchBoosts")
        .def_static("make", &make_boosts, nb::rv_policy::take_ownership, "rows"_a, "num_queries"_a,
                    "single"_a, "num_items"_a,
                    nb::sig("def make(rows: object, num_queries: int, single: bool, "
                            "num_items: int) -> BatchBoosts | None"))
        .def_prop_ro("offsets", own(&BatchBoosts::offsets))
        .def_prop_ro("items", own(&BatchBoosts::items))
        .def_prop_ro("values", own(&BatchBoosts::values));
}

void add_index(nb::module_& module) {
    nb::class_<SearchIndex>(module, "SearchIndex")
        .def(nb::init<std::size_t, const Cube<float>&>(), "num_items"_a, "transposed"_a.noconvert())
        .def(nb::init<std::size_t, const SearchIndex&>(), "num_items"_a, "like"_a)
        .def("set_codes", &SearchIndex::set_codes, "codes"_a.noconvert())
        .def("set_wide_codes", &SearchIndex::set_wide_codes, "codes"_a.noconvert())
        .def("set_gathered_codes", &SearchIndex::set_gathered_codes, "codes"_a.noconvert())
        .def("set_lists", &SearchIndex::set_lists, "offsets"_a.noconvert(),
             "second_codes"_a.noconvert(), "bases"_a.noconvert(), "steps"_a.noconvert(),
             "codes"_a.noconvert(), "items"_a.noconvert())
        .def("set_cells", &SearchIndex::set_cells, "pair_lines"_a.noconvert(),
             "overflow"_a.noconvert(), "lines"_a.noconvert(), "starts"_a.noconvert(),
             "last_keys"_a.noconvert(), "second_lines"_a.noconvert(), "items"_a.noconvert())
        .def("set_posting_lists", &SearchIndex::set_posting_lists, "offsets"_a.noconvert(),
             "items"_a.noconvert())
        .def("set_item_bias", &SearchIndex::set_item_bias, "bias"_a.noconvert(), "highest"_a,
             "largest"_a)
        .def("check", &SearchIndex::check, "threads"_a)
        .def("sub_item_scores", &SearchIndex::sub_item_scores, "sequence_embeddings"_a.noconvert())
        .def("codes_of_lists", &SearchIndex::codes_of_lists)
        .def("planned_lines", &SearchIndex::planned_lines, "sub_item_scores"_a.noconvert(), "k"_a)
        .def("refuse_overflow", &SearchIndex::refuse_overflow, "tables"_a.noconvert(),
             "largest_bias"_a, "largest_boosts"_a.noconvert().none())
        .def("search", &SearchIndex::search, "queries"_a.noconvert(), "are_scores"_a, "k"_a,
             "threads"_a, "settings"_a, "exclude"_a.none(), "allow"_a.noconvert().none(),
             "floors"_a.noconvert().none(), "boosts"_a.none(), "ids"_a.noconvert(),
             "scores"_a.noconvert(), "records"_a.noconvert(), "visited"_a.noconvert().none());
    nb::class_<SegmentedIndex>(module, "SegmentedIndex")
        .def(nb::init<>())
        .def("add", &SegmentedIndex::add, "index"_a, "numbers"_a.noconvert(),
             "positions"_a.noconvert(), "present"_a.noconvert().none(), "num_present"_a,
             nb::sig(
                 "def add(self, index: SearchIndex, numbers: numpy.typing.NDArray[numpy.uint32], "
                 "positions: numpy.typing.NDArray[numpy.uint32], "
                 "present: numpy.typing.NDArray[numpy.uint64] | None, "
                 "num_present: int) -> None"))
        .def("search", &SegmentedIndex::search, "queries"_a.noconvert(), "are_scores"_a, "k"_a,
             "threads"_a, "settings"_a, "exclude"_a.none(), "allow"_a.noconvert().none(),
             "floors"_a.noconvert().none(), "boosts"_a.none(), "ids"_a.noconvert(),
             "scores"_a.noconvert(), "records"_a.noconvert())
        .def("check", &SegmentedIndex::check, "num_numbers"_a);
}

}  // namespace

NB_MODULE(_native, module) {
    // What a cache or another thread still holds when Python ends is no leak to report to users.
    nb::set_leak_warnings(false);
    module.doc() = "The C++ core of recprune. Use the Python modules around it.";
    add_sorting(module);
    add_building(module);
    add_overflow_error(module);
    add_settings(module);
    add_index(module);
}
