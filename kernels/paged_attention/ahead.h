// Memory that is needed soon is asked for in small pieces in the course of other work.
//
// A core has about a dozen reads under way at a time. Asked for in one burst, a run blocks it until most of the run has
// come; asked for line by line between products, it comes while they are computed.
#pragma once

#include <cstdint>

#include "kernels/native/simd.h"

namespace pw {

class Ahead {
public:
    // `count` runs of `run_bytes` each; the list must stay until it is used up.
    void restart(const char* const* runs, int count, int64_t run_bytes) {
        runs_ = runs;
        end_ = runs + count;
        run_bytes_ = run_bytes;
        at_ = stop_ = nullptr;
    }

    // Ask for the next `lines` cache lines, if there are any.
    PW_INLINE void step(int lines) {
        for (int i = 0; i < lines; ++i) {
            if (at_ >= stop_ && !next_run()) return;
            __builtin_prefetch(at_, 0, 2);
            at_ += LINE;
        }
    }

    // Ask for all that is left.
    void finish() {
        while (at_ < stop_ || next_run()) step(1);
    }

private:
    static constexpr int LINE = 64;

    PW_INLINE bool next_run() {
        if (runs_ == end_) return false;
        at_ = *runs_++;
        stop_ = at_ + run_bytes_;
        return true;
    }

    const char* at_ = nullptr;
    const char* stop_ = nullptr;
    const char* const* runs_ = nullptr;
    const char* const* end_ = nullptr;
    int64_t run_bytes_ = 0;
};

// Lines to ask for beside the use of `vectors` vectors of words of 4 bytes, or fewer: three for four, the rest comes
// beside the softmax.
constexpr int lines_beside(int vectors, int bytes = 4) { return (vectors * LANES * bytes * 3 / 4 + 63) / 64; }

}  // namespace pw
