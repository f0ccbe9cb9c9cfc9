// CPU kernels of the optimizer behind a plain C interface: no torch headers, so it builds in seconds, and a caller
// through ctypes holds no GIL. Threads share blocks of fixed place and size; which thread takes which block changes no
// result.
//
// Arguments in common: isa 0 plain, 1 AVX2 with FMA, 2 AVX-512 (at most best_isa()); threads >= 1; element formats
// 0 fp32, 1 bf16, 2 fp16, and 3 none for an output that is not wanted.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "lanes.h"

struct AdamRow {  // mirrored by ROW in systems/adam/cpu.py
    int64_t offset, numel;
    float decay, l2, w1, b2, w2, inverse_root_correction2, eps, negative_step;
};

struct AdamTensors {
    const float *master, *first, *second;
    const void* gradient;
    float *new_master, *new_first, *new_second;  // the old ones, or elsewhere: then all results are streamed there
    void* out;
};

struct Kernels {
    void (*adam[3][4])(const AdamTensors&, const AdamRow&, float factor, int64_t begin, int64_t end);
    double (*squares[3])(const void* x, int64_t begin, int64_t end);
    void (*accumulate[3])(float* accumulator, const void* gradient, int64_t begin, int64_t end);
    void (*cast[3])(const float* x, void* out, int64_t begin, int64_t end);
};

// Prefetch distances: hardware prefetchers stop at 4 KiB pages. Asking ahead gained 10 % (Adam) and 15 % (squares) on
// 16 cores of a Sapphire Rapids, more on fewer; twice or half the distance was within 6 %.
#ifndef ADAM_PREFETCH
#define ADAM_PREFETCH 256  // elements
#endif
#ifndef SQUARES_PREFETCH
#define SQUARES_PREFETCH 4096  // bytes
#endif

// Elements whose results are streamed together. On 2 cores of an EPYC 64 to 256 were alike, 512 took 13 % more and 1024 31 %,
// because reads wait while results go out; ordinary stores took 26 % more.
#ifndef ADAM_STREAMED
#define ADAM_STREAMED 128
#endif

namespace plain {
#define TARGET
#include "kernels.h"
#undef TARGET
}  // namespace plain
#if HAS_X86
namespace avx2 {
#define TARGET TARGET_AVX2
#include "kernels.h"
#undef TARGET
}  // namespace avx2
namespace avx512 {
#define TARGET TARGET_AVX512
#include "kernels.h"
#undef TARGET
}  // namespace avx512
#endif

static const Kernels& kernels_of(int isa) {
#if HAS_X86
    if (isa == 2) return avx512::kernels;
    if (isa == 1) return avx2::kernels;
#endif
    return plain::kernels;
}

// Round to nearest, subnormals kept, whatever a -ffast-math library in this process did to new threads.
class StrictFloats {
#if HAS_X86
    const unsigned saved_ = _mm_getcsr();

  public:
    StrictFloats() { _mm_setcsr(0x1f80); }
    ~StrictFloats() { _mm_setcsr(saved_); }
#else
  public:
    StrictFloats() {}
#endif
};

// The thread that leads all parallel work, first come first served. OpenMP keeps a team for each thread that asks for
// one: this way there is a single one, whoever calls. And while it works the next caller's work already lies here, so that
// between two updates the cores wait for no interpreter.
class Leader {
  public:
    // Of this process: a forked child has none of its parent's threads. Never destroyed, its thread waits to the end.
    static Leader& here() {
        static std::atomic<Leader*> current{nullptr};
        Leader* leader = current;
        if (leader == nullptr || leader->process_ != getpid()) {
            Leader* made = new Leader;
            if (current.compare_exchange_strong(leader, made)) {
                leader = made;
                std::thread([made] { made->lead(); }).detach();
            } else {
                delete made;  // another thread was faster, leader is its
            }
        }
        return *leader;
    }

    void run(const std::function<void()>& body) {
        Work work{body};
        std::unique_lock<std::mutex> lock(mutex_);
        queue_.push_back(&work);
        came_.notify_one();
        work.finished.wait(lock, [&] { return work.done; });
    }

  private:
    struct Work {
        const std::function<void()>& body;
        bool done = false;
        std::condition_variable finished;
    };
    const pid_t process_ = getpid();
    std::mutex mutex_;
    std::condition_variable came_;
    std::deque<Work*> queue_;

    void lead() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            came_.wait(lock, [this] { return !queue_.empty(); });
            Work* const work = queue_.front();
            queue_.pop_front();
            lock.unlock();
            work->body();
            lock.lock();
            work->done = true;
            work->finished.notify_one();  // with the lock held: its caller destroys it once the lock is open
        }
    }
};

// body(block) for every block. The team has the same size at every call, because OpenMP ends and restarts threads when
// it changes. A few blocks are some tens of microseconds of work and stay on the calling thread: waking a team costs as much,
// and on a busy machine milliseconds.
constexpr int64_t FEW_BLOCKS = 4;

template <class Body>
static void share(int threads, int64_t blocks, const Body& body) {
    if (threads <= 1 || blocks <= FEW_BLOCKS) {
        StrictFloats strict;
        for (int64_t block = 0; block < blocks; block++) body(block);
        return;
    }
    Leader::here().run([&] {
#pragma omp parallel num_threads(threads)
        {
            StrictFloats strict;
#pragma omp for schedule(dynamic, 1)  // 15 % faster than static on 16 cores, which never run in step
            for (int64_t block = 0; block < blocks; block++) body(block);
        }
    });
}

constexpr int64_t BLOCK = 16384;  // elements; 64 KiB of each fp32 tensor

static int64_t blocks_of(int64_t n) { return (n + BLOCK - 1) / BLOCK; }

extern "C" {

int best_isa() {
#if HAS_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;  // every such processor has F16C
#endif
    return 0;
}

// Adam over disjoint ranges, given in elements of all tensors alike. In place if the new tensors are null: then out may be
// gradient. Otherwise what is read stays as it is. Blocks lie at multiples of BLOCK in the tensors, not in the ranges, so that
// interior loads are aligned.
void adam_update(int isa, int threads, float* master, float* first, float* second, const void* gradient,
                 int gradient_format, float* new_master, float* new_first, float* new_second, void* out, int out_format,
                 const AdamRow* rows, int64_t num_rows, float factor) {
    if (new_master == nullptr) new_master = master, new_first = first, new_second = second;
    const AdamTensors tensors = {master, first, second, gradient, new_master, new_first, new_second, out};
    const auto span = kernels_of(isa).adam[gradient_format][out_format];
    std::vector<int64_t> first_block(num_rows + 1, 0);  // of each row, in the sequence of all rows' blocks
    int64_t elements = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        elements += rows[row].numel;
        const int64_t begin = rows[row].offset / BLOCK, end = blocks_of(rows[row].offset + rows[row].numel);
        first_block[row + 1] = first_block[row] + (rows[row].numel ? end - begin : 0);
    }
    share(elements <= FEW_BLOCKS * BLOCK ? 1 : threads, first_block[num_rows], [&](int64_t block) {
        const int64_t row = std::upper_bound(first_block.begin(), first_block.end(), block) - first_block.begin() - 1;
        const int64_t begin = rows[row].offset, end = begin + rows[row].numel;
        const int64_t at = (begin / BLOCK + block - first_block[row]) * BLOCK;
        span(tensors, rows[row], factor, std::max(at, begin), std::min(at + BLOCK, end));
    });
}

// Sum of squares in fp64: 32 lanes a block, lanes added as a binary tree, blocks added in order.
double sum_squares(int isa, int threads, const void* x, int format, int64_t n) {
    const auto span = kernels_of(isa).squares[format];
    std::vector<double> partial(blocks_of(n));
    share(threads, blocks_of(n), [&](int64_t block) {
        partial[block] = span(x, block * BLOCK, std::min((block + 1) * BLOCK, n));
    });
    double sum = 0;
    for (double each : partial) sum += each;
    return sum;
}

void accumulate(int isa, int threads, float* accumulator, const void* gradient, int format, int64_t n) {
    const auto span = kernels_of(isa).accumulate[format];
    share(threads, blocks_of(n), [&](int64_t block) {
        span(accumulator, gradient, block * BLOCK, std::min((block + 1) * BLOCK, n));
    });
}

void cast(int isa, int threads, const float* x, void* out, int format, int64_t n) {
    const auto span = kernels_of(isa).cast[format];
    share(threads, blocks_of(n), [&](int64_t block) {
        span(x, out, block * BLOCK, std::min((block + 1) * BLOCK, n));
    });
}

// memcpy by pieces of 1 MiB.
void copy(int threads, void* destination, const void* source, int64_t nbytes) {
    constexpr int64_t PIECE = 1 << 20;
    share(threads, (nbytes + PIECE - 1) / PIECE, [&](int64_t piece) {
        const int64_t begin = piece * PIECE, end = std::min(begin + PIECE, nbytes);
        std::memcpy(static_cast<char*>(destination) + begin, static_cast<const char*>(source) + begin, end - begin);
    });
}

}  // extern "C"
