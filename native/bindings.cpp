// Translation between NumPy and the core, and nothing else: shapes are checked by the Python
// wrappers, memory is allocated here, and the GIL is released while the core runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>

#include "posting_lists.hpp"
#include "sort_log.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T, class... Shape>
std::span<T> as_span(const nb::ndarray<T, Shape...>& array) {
    return {array.data(), array.size()};
}

// A NumPy array that owns fresh, uninitialised memory, and a span over it for the core.
template <class T>
struct Output {
    std::unique_ptr<T[]> memory;
    std::size_t size;

    explicit Output(std::size_t count)
        : memory(std::make_unique_for_overwrite<T[]>(count)), size(count) {}

    std::span<T> span() { return {memory.get(), size}; }

    nb::ndarray<nb::numpy, T> release(std::initializer_list<std::size_t> shape) {
        T* data = memory.release();
        nb::capsule owner(data, [](void* pointer) noexcept { delete[] static_cast<T*>(pointer); });
        return nb::ndarray<nb::numpy, T>(data, shape, owner);
    }
};

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

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "The C++ core of recprune. Use the Python modules around it.";
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
