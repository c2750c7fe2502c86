// Memory that is needed soon is asked for in small pieces in the course of other work.
//
// A core has about a dozen reads under way at a time. Asked for in one burst, a run blocks it until most of the run has
// come; asked for line by line between products, it comes while they are computed. Lines of several runs are asked for
// in turn: a processor follows each run by itself once it is begun, and does so for many at a time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/native/simd.h"

namespace pw {

class Ahead {
public:
    // `count` runs of `run_bytes` each; the list must stay until it is used up.
    void restart(const char* const* runs, int count, int64_t run_bytes) {
        runs_ = runs;
        left_ = count;
        run_bytes_ = run_bytes;
        start_group();
    }

    // Ask for the next `lines` cache lines, if there are any.
    PW_INLINE void step(int lines) {
        for (int i = 0; i < lines && width_ > 0; ++i) {
            __builtin_prefetch(runs_[at_] + offset_, 0, 2);
            if (++at_ == width_) next_line();
        }
    }

    // Ask for all that is left.
    void finish() {
        while (width_ > 0) step(1);
    }

private:
    static constexpr int LINE = 64;
    static constexpr int WIDTH = 16;  // runs at a time: 1 reads 16.6 GB/s on two threads, 4: 18.8, 8: 19.5, 16: 19.7

    void start_group() {
        at_ = 0;
        offset_ = 0;
        width_ = std::min(WIDTH, left_);
    }

    PW_INLINE void next_line() {
        at_ = 0;
        offset_ += LINE;
        if (offset_ < run_bytes_) return;
        runs_ += width_;
        left_ -= width_;
        start_group();
    }

    const char* const* runs_ = nullptr;
    int left_ = 0;       // runs, from the current group on
    int width_ = 0;      // runs of the current group
    int at_ = 0;         // of them
    int64_t offset_ = 0;
    int64_t run_bytes_ = 0;
};

// Lines to ask for beside the use of `vectors` vectors of words of 4 bytes, or fewer: three for four, the rest comes
// beside the softmax.
constexpr int lines_beside(int vectors, int bytes = 4) { return (vectors * LANES * bytes * 3 / 4 + 63) / 64; }

}  // namespace pw
