// Activations of gates, in whole vectors: an element's bits depend on nothing but its value.
#pragma once

#include <initializer_list>

#include "simd.h"

INLINE vec sigmoid(vec x) { return vset(1.0f) / (vset(1.0f) + vexp(-x)); }
INLINE vec silu(vec x) { return x / (vset(1.0f) + vexp(-x)); }

// max(x, 0) + log(1 + t), t = e^-|x|, where log(1 + t) = 2 artanh(t / (2 + t)): a series in at most 1/3.
INLINE vec softplus(vec x) {
    vec t = vexp(-vabs(x)), s = t / (vset(2.0f) + t), square = s * s;
    vec y = vset(1.0f / 15);
    for (int k = 13; k > 0; k -= 2) y = fma(y, square, vset(1.0f / k));
    return fma(s + s, y, vselect_less(x, vset(0.0f), x - x, x));
}

// x · Φ(x), where Φ(-|x|) = polynomial(t) · e^(-x²/2), t = 1 / (1 + p|x|/√2) (Abramowitz and Stegun 7.1.26).
INLINE vec gelu(vec x) {
    vec size = vabs(x), t = vset(1.0f) / fma(size, vset(0.3275911f * 0.70710678f), vset(1.0f));
    vec y = vset(1.061405429f);
    for (float a : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) y = fma(y, t, vset(a));
    vec tail = vset(0.5f) * y * t * vexp(vset(-0.5f) * x * x);
    return x * vselect_less(x, vset(0.0f), tail, vset(1.0f) - tail);
}

// x · Φ(x) by tanh (Hendrycks and Gimpel 2016): (1 + tanh u) / 2 is 1 / (1 + e^-2u).
INLINE vec gelu_tanh(vec x) {
    vec twice = vset(1.59576912f) * fma(vset(0.044715f) * x * x, x, x);
    return x / (vset(1.0f) + vexp(-twice));
}
