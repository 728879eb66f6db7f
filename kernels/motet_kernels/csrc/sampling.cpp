// A token per row: the most likely one, or a draw by Gumbel-max over counter-based noise, in one pass over the logits.
//
// The noise of a token grows with its random bits. So logarithms are taken only of those few tokens whose bits may make
// them the best so far, and no bits at all of a block that cannot hold the best even with the most noise there is.
#include <cmath>
#include <limits>

#include "parallel.h"
#include "parts.h"

namespace {

constexpr int BLOCK = 512;  // tokens
constexpr uint64_t GOLDEN = 0x9e3779b97f4a7c15u;  // between the counters of two tokens
constexpr float MOST_NOISE = 16.7f;

// SplitMix64's finalizer (Steele, Lea, Flood 2014).
INLINE uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Standard Gumbel noise of 23 random bits and a half, of which no logarithm is infinite.
float noise(uint32_t bits) { return -std::log(-std::log((float(bits) + 0.5f) * 0x1p-23f)); }

// No fewer bits give this much noise; a few too few may not.
uint32_t bits_for(float wanted) {
    double bits = std::exp(-std::exp(1e-4 - double(wanted))) * 0x1p23 - 1.5;
    return bits > 0 ? uint32_t(bits) : 0;
}

struct Best {
    float score = -std::numeric_limits<float>::infinity();
    int64_t token = 0;
};

// The largest of n numbers, NaN left out.
float largest(const float* x, int64_t n) {
    vec most = vset(-std::numeric_limits<float>::infinity());
    int64_t i = 0;
    for (; i + W <= n; i += W) most = vmax(vload(x + i), most);
    float lanes[W], result = -std::numeric_limits<float>::infinity();
    vstore(lanes, most);
    for (float lane : lanes) result = std::max(result, lane);
    for (; i < n; i++) result = x[i] > result ? x[i] : result;
    return result;
}

bool any_nan(const float* x, int64_t n) {
    uint32_t found = 0;
    for (int64_t i = 0; i < n; i++) found |= x[i] != x[i];
    return found;
}

// Draws from a block of n tokens, of which the first is `first`. `stream`: where the row's counter begins.
void draw(const float* x, int64_t n, int64_t first, float top, float temperature, uint64_t stream, Best& best) {
    const float wanted = best.score - top / temperature;
    if (wanted > MOST_NOISE) return;
    uint32_t bits[BLOCK];
    uint64_t counter = stream + uint64_t(first) * GOLDEN;
    for (int64_t i = 0; i < n; i++) bits[i] = uint32_t(mix(counter + uint64_t(i + 1) * GOLDEN) >> 41);
    uint32_t least = bits_for(wanted);
    for (int64_t i = 0; i < n; i++) {
        if (bits[i] < least) continue;
        float score = x[i] / temperature + noise(bits[i]);
        if (score > best.score) {
            best = {score, first + i};
            least = bits_for(best.score - top / temperature);
        }
    }
}

// A block of n logits with -infinity where a token's bit is not set: itself if all are, else a copy in `room`; null if
// none is.
const float* permitted(const float* x, int64_t n, const uint32_t* bits, float* room) {
    uint32_t any = 0, all = ~0u;
    for (int64_t i = 0; i < n; i += 32) {
        const uint32_t here = n - i < 32 ? (1u << (n - i)) - 1 : ~0u;
        any |= bits[i / 32] & here;
        all &= bits[i / 32] | ~here;
    }
    if (all == ~0u) return x;
    if (any == 0) return nullptr;
    for (int64_t i = 0; i < n; i += 32) {
        const uint32_t word = bits[i / 32];
        const int64_t count = std::min<int64_t>(32, n - i);
        for (int64_t j = 0; j < count; j++) {
            room[i + j] = word >> j & 1 ? x[i + j] : -std::numeric_limits<float>::infinity();
        }
    }
    return room;
}

// `bits`: of the tokens that may be drawn; null: all.
int64_t row(const float* x, int64_t vocab, uint64_t stream, float temperature, const uint32_t* bits) {
    Best best;
    float room[BLOCK];
    for (int64_t first = 0; first < vocab; first += BLOCK) {
        int64_t n = std::min<int64_t>(BLOCK, vocab - first);
        const float* part = bits == nullptr ? x + first : permitted(x + first, n, bits + first / 32, room);
        if (part == nullptr) continue;
        float top = largest(part, n);
        if (any_nan(part, n) || top == std::numeric_limits<float>::infinity()) return -1;
        if (temperature > 0) {
            draw(part, n, first, top, temperature, stream, best);
        } else if (top > best.score) {
            best = {top, first + (std::find(part, part + n, top) - part)};
        }
    }
    return best.score == -std::numeric_limits<float>::infinity() ? -1 : best.token;
}

}  // namespace

// token [M] of logits [M, vocab] with rows `stride` apart: drawn at a temperature, with the noise of a stream, or at 0 the
// most likely one, of equals the first. -1 where a logit is NaN or +infinity, or none is above -infinity. Where `bits` [M,
// words] is not null, a token whose bit is not set is none of them.
EXPORT int64_t motet_draw(const float* logits, int64_t stride, const int64_t* stream, const float* temperature,
                          const uint32_t* bits, int64_t words, int64_t* token, int64_t rows, int64_t vocab) {
    const int threads = threads_for(rows * vocab, rows);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t m = 0; m < rows; m++) {
        const uint32_t* allowed = bits == nullptr ? nullptr : bits + m * words;
        token[m] = row(logits + m * stride, vocab, uint64_t(stream[m]), temperature[m], allowed);
    }
    return 0;
}
