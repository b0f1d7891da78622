// Which tables of kernels this machine can run.
#include <string>
#include <vector>

#include "kernels/kernels.hpp"

namespace recprune {

#if defined(__x86_64__)
namespace {

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("popcnt");
}

bool has_avx512bw() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool has_avx512() {
    return has_avx512bw() && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512bitalg");
}

}  // namespace
#endif

const std::vector<Kernels>& available_kernels() {
    static const std::vector<Kernels> kernels = [] {
        std::vector<Kernels> found;
#if defined(__x86_64__)
        __builtin_cpu_init();
        if (has_avx512()) found.push_back(avx512_kernels());
        if (has_avx512bw()) found.push_back(avx512bw_kernels());
        if (has_avx2()) found.push_back(avx2_kernels());
#elif defined(__aarch64__)
        found.push_back(neon_kernels());
#endif
        found.push_back(portable_kernels());
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
