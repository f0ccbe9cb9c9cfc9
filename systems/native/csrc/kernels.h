// Not an ordinary header: the loops, written once and included once per instruction set. TARGET is the function
// attribute; vec, WIDTH, load, store, add, sub, mul, div, fma, root, stream_line, drain and add_squares are those of the
// namespace around it (lanes.h).
//
// Every element goes through the same operations in the same order on every instruction set, so where a vector starts
// does not matter: a short head brings the index to a multiple of LINE (aligned if the tensors are), and head and tail
// pass through a small buffer instead of masks.

struct Constants {
    vec factor, decay, l2, w1, b2, w2, inverse_root_correction2, eps, negative_step;
    bool coupled;
};

// What one step reads and writes, from some element on. New and old may be the same memory, and so may gradient and out.
// Handed on by value: a pointer behind a reference would be loaded again after every store (17 % in cache).
template <class G, class O>
struct AdamPointers {
    const float *master, *first, *second;
    const G* gradient;
    float *new_master, *new_first, *new_second;
    O* out;
};

// One line of elements. Adam (Kingma and Ba 2015, algorithm 1) in the form of torch.optim: lerp for the first moment,
// division by sqrt(v) / sqrt(1 - beta2^t) + eps.
template <class G, class O>
LANE_FN(TARGET) void adam_line(AdamPointers<G, O> a, int64_t i, const Constants& c) {
    for (const int64_t end = i + LINE; i < end; i += WIDTH) {
        vec p = load(a.master + i), m = load(a.first + i), v = load(a.second + i);
        vec g = mul(load(a.gradient + i), c.factor);
        if (c.coupled) g = fma(p, c.l2, g);
        m = fma(sub(g, m), c.w1, m);
        v = fma(mul(g, c.w2), g, mul(v, c.b2));
        p = fma(div(m, fma(root(v), c.inverse_root_correction2, c.eps)), c.negative_step, mul(p, c.decay));
        store(a.new_first + i, m);
        store(a.new_second + i, v);
        store(a.new_master + i, p);
        store(a.out + i, p);
    }
}

template <class G, class O>
TARGET static void adam_part_of_line(AdamPointers<G, O> a, int64_t i, const Constants& c, int64_t n) {
    float p[LINE] = {}, m[LINE] = {}, v[LINE] = {};
    G g[LINE] = {};
    O o[LINE] = {};
    std::memcpy(p, a.master + i, n * sizeof(float));
    std::memcpy(m, a.first + i, n * sizeof(float));
    std::memcpy(v, a.second + i, n * sizeof(float));
    std::memcpy(g, a.gradient + i, n * sizeof(G));
    adam_line(AdamPointers<G, O>{p, m, v, g, p, m, v, o}, 0, c);
    std::memcpy(a.new_master + i, p, n * sizeof(float));
    std::memcpy(a.new_first + i, m, n * sizeof(float));
    std::memcpy(a.new_second + i, v, n * sizeof(float));
    if (!std::is_same<O, absent>::value) std::memcpy(a.out + i, o, n * sizeof(O));
}

template <class G, class O>
LANE_FN(TARGET) void adam_run(AdamPointers<G, O> a, const Constants& c, int64_t begin, int64_t end) {
    int64_t i = begin;
    if (const int64_t head = std::min<int64_t>((LINE - i % LINE) % LINE, end - i)) {
        adam_part_of_line(a, i, c, head);
        i += head;
    }
    for (; i + LINE <= end; i += LINE) {
        const int64_t ahead = i + ADAM_PREFETCH;
        __builtin_prefetch(a.master + ahead);
        __builtin_prefetch(a.first + ahead);
        __builtin_prefetch(a.second + ahead);
        __builtin_prefetch(a.gradient + ahead);
        if (!std::is_same<O, absent>::value) __builtin_prefetch(a.out + ahead);
        adam_line(a, i, c);
    }
    if (i < end) adam_part_of_line(a, i, c, end - i);
}

// memcpy past the caches, but for what shares a line of `to` with others.
TARGET static void stream(void* to, const void* from, int64_t nbytes) {
    char* t = static_cast<char*>(to);
    const char* f = static_cast<const char*>(from);
    int64_t i = std::min<int64_t>(-reinterpret_cast<uintptr_t>(t) % LINE_BYTES, nbytes);
    std::memcpy(t, f, i);
    for (; i + LINE_BYTES <= nbytes; i += LINE_BYTES) stream_line(t + i, f + i);
    std::memcpy(t + i, f + i, nbytes - i);
}

// Out of place: the results of some lines wait in the first-level cache, then go out one tensor after the other, and no line
// of the new memory is read before it is overwritten.
template <class G, class O>
TARGET static void adam_streamed(AdamPointers<G, O> a, const Constants& c, int64_t begin, int64_t end) {
    static_assert(ADAM_STREAMED % LINE == 0, "a line of the tensors is a line here");
    alignas(LINE_BYTES) float p[ADAM_STREAMED], m[ADAM_STREAMED], v[ADAM_STREAMED];
    alignas(LINE_BYTES) O o[ADAM_STREAMED];
    while (begin < end) {
        const int64_t at = begin / ADAM_STREAMED * ADAM_STREAMED, from = begin - at;
        const int64_t n = std::min<int64_t>(ADAM_STREAMED - from, end - begin);
        adam_run<G, O>({a.master + at, a.first + at, a.second + at, a.gradient + at, p, m, v, o}, c, from, from + n);
        stream(a.new_master + begin, p + from, n * sizeof(float));
        stream(a.new_first + begin, m + from, n * sizeof(float));
        stream(a.new_second + begin, v + from, n * sizeof(float));
        if (!std::is_same<O, absent>::value) stream(a.out + begin, o + from, n * sizeof(O));
        begin += n;
    }
    drain();
}

template <class G, class O>
TARGET static void adam_span(const AdamTensors& t, const AdamRow& row, float factor, int64_t begin, int64_t end) {
    const AdamPointers<G, O> a = {t.master,     t.first,     t.second,     static_cast<const G*>(t.gradient),
                                  t.new_master, t.new_first, t.new_second, static_cast<O*>(t.out)};
    const Constants c = {all(factor), all(row.decay), all(row.l2), all(row.w1), all(row.b2), all(row.w2),
                         all(row.inverse_root_correction2), all(row.eps), all(row.negative_step), row.l2 != 0.0f};
    if (a.new_master == a.master)
        adam_run(a, c, begin, end);
    else
        adam_streamed(a, c, begin, end);
}

template <class G>
TARGET static double squares_span(const void* x, int64_t begin, int64_t end) {
    constexpr int64_t STRIDE = 32;  // rows between two rounds of prefetching
    double lanes[SQUARE_LANES] = {};
    const G* values = static_cast<const G*>(x) + begin;
    const int64_t rows = (end - begin) / SQUARE_LANES, left = (end - begin) % SQUARE_LANES;
    for (int64_t row = 0; row < rows; row += STRIDE) {
        const G* at = values + row * SQUARE_LANES;
        const int64_t now = std::min(STRIDE, rows - row), nbytes = now * SQUARE_LANES * static_cast<int64_t>(sizeof(G));
        const char* ahead = reinterpret_cast<const char*>(at) + SQUARES_PREFETCH;
        for (int64_t byte = 0; byte < nbytes; byte += 64) __builtin_prefetch(ahead + byte);
        add_squares(at, now, lanes);
    }
    for (int64_t k = 0; k < left; k++) {
        const double value = widen(values[rows * SQUARE_LANES + k]);
        lanes[k] += value * value;
    }
    for (int width = SQUARE_LANES / 2; width > 0; width /= 2)
        for (int k = 0; k < width; k++) lanes[k] += lanes[k + width];
    return lanes[0];
}

template <class G>
TARGET static void accumulate_span(float* accumulator, const void* gradient, int64_t begin, int64_t end) {
    const G* g = static_cast<const G*>(gradient);
    int64_t i = begin;
    for (; i + WIDTH <= end; i += WIDTH) store(accumulator + i, add(load(accumulator + i), load(g + i)));
    for (; i < end; i++) accumulator[i] = quieted(accumulator[i] + widen(g[i]));
}

template <class O>
TARGET static void cast_span(const float* x, void* out, int64_t begin, int64_t end) {
    O* o = static_cast<O*>(out);
    int64_t i = begin;
    for (; i + WIDTH <= end; i += WIDTH) store(o + i, load(x + i));
    for (; i < end; i++) o[i] = narrowed<O>(x[i]);
}

static const Kernels kernels = {
    {{adam_span<float, float>, adam_span<float, bf16>, adam_span<float, fp16>, adam_span<float, absent>},
     {adam_span<bf16, float>, adam_span<bf16, bf16>, adam_span<bf16, fp16>, adam_span<bf16, absent>},
     {adam_span<fp16, float>, adam_span<fp16, bf16>, adam_span<fp16, fp16>, adam_span<fp16, absent>}},
    {squares_span<float>, squares_span<bf16>, squares_span<fp16>},
    {accumulate_span<float>, accumulate_span<bf16>, accumulate_span<fp16>},
    {cast_span<float>, cast_span<bf16>, cast_span<fp16>},
};
