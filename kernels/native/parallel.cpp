#include "kernels/native/parallel.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels/native/simd.h"

namespace pw {
namespace {

// Longest look for work or for the last chunks. It covers the gap between two operations of one step; a sleeper takes
// about 50 µs to wake.
constexpr std::chrono::microseconds LOOK{40};

PW_INLINE void breathe() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether `found()` became true within LOOK.
template <class Found>
bool look_for(const Found& found) {
    const auto until = std::chrono::steady_clock::now() + LOOK;
    do {
        for (int i = 0; i < 16; ++i) {
            if (found()) return true;
            breathe();
        }
    } while (std::chrono::steady_clock::now() < until);
    return found();
}

thread_local bool is_in_chunk = false;

class Pool {
public:
    // A pool whose threads start when there is work for them.
    explicit Pool(int size) : size_(size) {}

    void resize(int threads) {
        const std::lock_guard<std::mutex> one(caller_);
        stop();
        start(threads);
    }

    int size() const { return size_.load(std::memory_order_relaxed); }

    void run(int num_chunks, void (*fn)(const void*, int), const void* context) {
        std::unique_lock<std::mutex> one(caller_, std::defer_lock);
        if (num_chunks < 2 || is_in_chunk || size() < 2 || !one.try_lock()) {
            for (int chunk = 0; chunk < num_chunks; ++chunk) fn(context, chunk);
            return;
        }
        if (workers_.empty()) start(size());
        fn_ = fn;
        context_ = context;
        num_chunks_ = num_chunks;
        unfinished_.store(num_chunks, std::memory_order_relaxed);
        ticket_.store(((ticket_.load(std::memory_order_relaxed) >> 32) + 1) << 32 | uint32_t(num_chunks));
        if (sleepers_.load() > 0) {
            { const std::lock_guard<std::mutex> asleep(mutex_); }
            has_work_.notify_all();
        }
        take_chunks();
        wait_for_others();
    }

private:
    // The ticket holds the number of the job above and the chunks that nobody took below, so that taking one chunk also
    // checks that the job is still the same. The job's fields change only while no chunk of it is unfinished.
    bool take(int* chunk) {
        uint64_t ticket = ticket_.load();
        while (uint32_t(ticket) != 0) {
            if (ticket_.compare_exchange_weak(ticket, ticket - 1)) {
                *chunk = num_chunks_ - int(uint32_t(ticket));
                return true;
            }
        }
        return false;
    }

    void take_chunks() {
        int chunk, finished = 0;
        is_in_chunk = true;
        for (; take(&chunk); ++finished) fn_(context_, chunk);
        is_in_chunk = false;
        if (finished == 0 || unfinished_.fetch_sub(finished) != finished) return;
        if (caller_sleeps_.load()) {
            { const std::lock_guard<std::mutex> asleep(mutex_); }
            is_done_.notify_one();
        }
    }

    void wait_for_others() {
        const auto done = [this] { return unfinished_.load() == 0; };
        if (look_for(done)) return;
        std::unique_lock<std::mutex> lock(mutex_);
        caller_sleeps_.store(true);
        is_done_.wait(lock, done);
        caller_sleeps_.store(false);
    }

    void work() {
        const auto called = [this] { return uint32_t(ticket_.load()) != 0 || stopping_.load(); };
        while (!stopping_.load()) {
            if (!look_for(called)) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleepers_.fetch_add(1);
                has_work_.wait(lock, called);
                sleepers_.fetch_sub(1);
            }
            take_chunks();
        }
    }

    // As many of them as the system gives.
    void start(int threads) {
        stopping_ = false;
        try {
            for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
        } catch (const std::system_error&) {
        }
        size_.store(1 + int(workers_.size()));
    }

    void stop() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            stopping_.store(true);
        }
        has_work_.notify_all();
        for (std::thread& worker : workers_) worker.join();
        workers_.clear();
    }

    std::mutex caller_;  // one job at a time
    std::mutex mutex_;   // of sleepers
    std::condition_variable has_work_, is_done_;
    std::vector<std::thread> workers_;
    std::atomic<int> size_{1};
    std::atomic<bool> stopping_{false};
    std::atomic<bool> caller_sleeps_{false};
    std::atomic<int> sleepers_{0};
    void (*fn_)(const void*, int) = nullptr;
    const void* context_ = nullptr;
    int num_chunks_ = 0;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int> unfinished_{0};
};

// A process that was forked has none of its parent's threads, and locks that they held stay locked: it gets a new pool.
// None is destroyed: threads that sleep in it end with the process.
std::atomic<Pool*> the_pool{nullptr};

void replace_pool() { the_pool.store(new Pool(the_pool.load()->size())); }

Pool& pool() {
    static const bool is_made = [] {
        the_pool.store(new Pool(1));
        return pthread_atfork(nullptr, nullptr, replace_pool) == 0;
    }();
    (void)is_made;
    return *the_pool.load();
}

struct Scratch {
    void* data = nullptr;
    size_t size = 0;
    ~Scratch() { std::free(data); }
};

}  // namespace

void run_chunks(int num_chunks, void (*fn)(const void*, int), const void* context) {
    pool().run(num_chunks, fn, context);
}

int num_threads() { return pool().size(); }

void* scratch(size_t bytes) {
    static thread_local Scratch own;
    if (own.size < bytes) {
        std::free(own.data);
        own.size = (bytes + 4095) / 4096 * 4096;
        own.data = std::aligned_alloc(4096, own.size);
        if (own.data == nullptr) throw std::bad_alloc();
    }
    return own.data;
}

}  // namespace pw

// n >= 1 threads, the caller of a kernel included.
PW_EXPORT void pw_set_num_threads(int n) { pw::pool().resize(n); }

PW_EXPORT int pw_num_threads() { return pw::num_threads(); }

// For tests: adds 1 to counts[chunk] after some work, and says which thread did it.
PW_EXPORT void pw_count_chunks(int num_chunks, int work, int* counts, const void** threads) {
    static thread_local char me;
    pw::parallel(num_chunks, [=](int chunk) {
        volatile int sink = 0;
        for (int i = 0; i < work; ++i) sink = sink + i;
        counts[chunk] += 1;
        threads[chunk] = &me;
    });
}
