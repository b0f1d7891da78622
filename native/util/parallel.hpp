// Independent pieces of work on a few threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace recprune {

// Threads that are waited for, whatever happens. The standard library of macOS has no std::jthread.
struct JoinedThreads {
    std::vector<std::thread> threads;

    ~JoinedThreads() {
        for (std::thread& thread : threads) thread.join();
    }
};

// Calls work(0) … work(count − 1), each once, on up to `threads` threads (the caller's is one of
// them). If calls throw, the exception of the lowest number is rethrown after all have ended.
template <class Work>
void run_in_parallel(std::size_t count, std::size_t threads, const Work& work) {
    if (threads <= 1 || count <= 1) {
        for (std::size_t number = 0; number < count; ++number) work(number);
        return;
    }
    std::atomic<std::size_t> next{0};
    std::mutex guard;
    std::size_t failed = count;
    std::exception_ptr failure;
    auto run = [&] {
        for (std::size_t number; (number = next.fetch_add(1)) < count;) {
            try {
                work(number);
            } catch (...) {
                const std::lock_guard lock(guard);
                if (number < failed) {
                    failed = number;
                    failure = std::current_exception();
                }
            }
        }
    };
    {
        JoinedThreads helpers;
        for (std::size_t helper = 1; helper < threads && helper < count; ++helper)
            helpers.threads.emplace_back(run);
        run();
    }
    if (failure) std::rethrow_exception(failure);
}

}  // namespace recprune
