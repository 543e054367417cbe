"""Phases at any position, the two ways to stretch frequencies, and what products depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import assert_near

from vhajax.mechanisms import RopeScaling
from vhajax.rope import UNSCALED, frequencies, phases, rotate

RNG = np.random.default_rng(0)
LLAMA = RopeScaling(kind="llama3", factor=8.0, original_length=8192)
"""Llama 3.1: theta 500,000, head dim 128."""
YARN = RopeScaling(kind="yarn", factor=4.0, original_length=32_768)
"""Qwen3 at 131,072 tokens: theta 1,000,000, head dim 128."""
SCALED = [
    (10, 100.0, UNSCALED),
    (128, 5e5, LLAMA),
    (128, 1e6, YARN),
    (64, 1e4, RopeScaling(kind="llama3", factor=32.0, low_freq_factor=2.0, original_length=4096)),
    # DeepSeek-V3: theta 10,000, 64 rotated dims.
    (64, 1e4, RopeScaling(kind="yarn", factor=40.0, original_length=4096, attention_factor=1.3)),
    # The ramp has no width: both of its ends are pair 0.
    (8, 1e4, RopeScaling(kind="yarn", factor=2.0, original_length=1, beta_fast=2.0)),
]


def noise(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


# ------------------------------------------------------------------ phases


@pytest.mark.parametrize(("width", "theta"), [(128, 1e4), (64, 5e5), (16, 1e6), (40, 100.0)])
def test_phases_are_right_at_long_contexts(width, theta):
    """A float32 product of position and frequency would be off by 0.1 at the last of these."""
    positions = np.concatenate(
        [
            [0, 1, 2, 1023, 1024, 65_535, 65_536, 131_071, 2_000_000],
            RNG.integers(0, 131_072, 300),
            RNG.integers(0, 2_000_001, 300),
        ]
    )
    cos, sin = jax.jit(phases, static_argnums=(1, 2, 3))(
        jnp.asarray(positions, jnp.int32), width, theta, UNSCALED
    )
    turned = np.asarray(cos, np.float64) + 1j * np.asarray(sin, np.float64)
    exact = np.exp(1j * np.outer(positions, theta ** (-np.arange(width // 2) / (width // 2))))
    assert turned.shape == exact.shape
    error = np.abs(turned - exact).max(axis=1)
    # Half a unit of 2⁻³² turns, at most 1023 and 1953 times; the rest is float32 cos and sin.
    assert error.max() <= 5e-6
    assert error[positions <= 131_071].max() <= 2e-6


@pytest.mark.parametrize(("width", "theta", "scaling"), SCALED)
def test_rotation(width, theta, scaling):
    x, positions = noise(2, 7, 3, width), RNG.integers(0, 200_000, (2, 7)).astype(np.int32)
    expected = oracle.rotate(x.astype(np.float64), positions, theta, scaling)
    assert_near(rotate(x, positions, theta, scaling), expected, 5e-6)


def test_rotation_of_bfloat16_rounds_once():
    x = jnp.asarray(noise(1, 4, 2, 32), jnp.bfloat16)
    positions = np.array([[0, 1, 70_000, 131_071]], np.int32)
    actual = rotate(x, positions, 1e4)
    assert actual.dtype == jnp.bfloat16
    exact = oracle.rotate(np.asarray(x, np.float64), positions, 1e4)
    np.testing.assert_allclose(np.asarray(actual, np.float64), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("far", [100, 131_000, 1_900_000])
@pytest.mark.parametrize("scaling", [UNSCALED, YARN], ids=["plain", "yarn"])
def test_products_depend_on_the_distance_only(far, scaling):
    q, k = noise(1, 1, 1, 32), noise(1, 1, 1, 32)

    def product(query: int, key: int) -> float:
        at = lambda p: jnp.full((1, 1), p, jnp.int32)  # noqa: E731
        turned = (rotate(x, at(p), 1e4, scaling) for x, p in ((q, query), (k, key)))
        return float(jnp.sum(jnp.multiply(*turned)))

    scale = float(np.linalg.norm(q) * np.linalg.norm(k)) * scaling.multiplier**2
    assert product(9, 4) == pytest.approx(product(9 + far, 4 + far), abs=1e-5 * scale)
    zero = float(np.sum(q * k)) * scaling.multiplier**2
    assert product(far, far) == pytest.approx(zero, abs=5e-6 * scale)
    assert product(9, 4) != pytest.approx(product(4, 9), abs=1e-2 * scale)


# ------------------------------------------------------------------ stretched frequencies


@pytest.mark.parametrize(("width", "theta", "scaling"), SCALED)
def test_frequencies_equal_hugging_faces(width, theta, scaling):
    expected = oracle.frequencies(width, theta, scaling)
    np.testing.assert_allclose(frequencies(width, theta, scaling), expected, rtol=1e-12)


def test_llama_stretches_long_wavelengths_only():
    """Wavelengths under 8192 / 4 tokens stay, over 8192 are 8 times as long."""
    plain, scaled = (frequencies(128, 5e5, s) for s in (UNSCALED, LLAMA))
    wavelength = 2 * np.pi / plain
    np.testing.assert_array_equal(scaled[wavelength < 2048], plain[wavelength < 2048])
    long = wavelength > 8192
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=1e-15)
    assert [int((wavelength < 2048).sum()), int(long.sum())] == [29, 29]
    between = ~long & (wavelength >= 2048)
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()
    # Pair 30 by hand: 5e5^(−30/64) = 2.13112e-3 turns 2.77855 times in 8192 tokens, so
    # (2.77855 − 1) / 3 = 0.59285 of it stays and the rest is an eighth.
    assert scaled[30] == pytest.approx(2.13112e-3 * (0.59285 + 0.40715 / 8), rel=1e-5)


def test_yarn_stretches_pairs_that_turn_seldom():
    """Bounds by hand: 64·ln(32768 / (32·2π)) / ln 1e6 = 23.59 and, for one turn, 39.65."""
    plain, scaled = (frequencies(128, 1e6, s) for s in (UNSCALED, YARN))
    np.testing.assert_array_equal(scaled[:24], plain[:24])
    np.testing.assert_allclose(scaled[40:], plain[40:] / 4, rtol=1e-15)
    kept = (40 - np.arange(24, 40)) / 17
    np.testing.assert_allclose(scaled[24:40], plain[24:40] * (kept + (1 - kept) / 4), rtol=1e-12)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (UNSCALED, 1.0),
        (LLAMA, 1.0),
        (YARN, 1.138629),  # 0.1·ln 4 + 1
        (RopeScaling(kind="yarn", factor=40.0), 1.368888),
        (RopeScaling(kind="yarn", factor=4.0, attention_factor=0.7), 0.7),
    ],
)
def test_what_yarn_multiplies_by(scaling, expected):
    assert scaling.multiplier == pytest.approx(expected, rel=1e-6)
    cos, sin = phases(jnp.arange(9), 32, 1e4, scaling)
    np.testing.assert_allclose(np.hypot(cos, sin), expected, rtol=1e-6)
