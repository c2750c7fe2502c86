// Work in chunks on the threads of the library.
//
// Chunks are given out one by one by an atomic counter and the caller takes part, so a thread that the system stops
// delays its own chunk and no other. A thread that finds no work looks for some microseconds, then sleeps: nobody spins
// on a core that another process needs. Threads inherit affinity and niceness of the thread that sets their number.
#pragma once

#include <cstddef>

namespace pw {

// fn(context, chunk) for each chunk in 0 … num_chunks - 1, in any order on any thread; returns when all are done.
// Inside a chunk, and while another thread is in here, it runs on the calling thread alone.
void run_chunks(int num_chunks, void (*fn)(const void* context, int chunk), const void* context);

// body(chunk) for each chunk.
template <class Body>
inline void parallel(int num_chunks, const Body& body) {
    run_chunks(
        num_chunks, [](const void* context, int chunk) { (*static_cast<const Body*>(context))(chunk); }, &body);
}

// Threads that share the work, the caller included.
int num_threads();

// Memory of the calling thread, aligned to 64 bytes; good until its next call. One operation, one use: what calls
// another kernel must not hold it.
void* scratch(size_t bytes);

}  // namespace pw
