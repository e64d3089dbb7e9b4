"""The sampling noise: keyed by everything it should be, and distributed as it should be."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from deepinfer.numerics.noise import gumbel, stream, uniform

MICRO = Path(__file__).parents[2] / "deepinfer/targets/cpu/micro"
COUNT = 1 << 18


def draws(seed: int = 1, position: int = 2, purpose: int = 0, count: int = COUNT) -> np.ndarray:
    return uniform(stream(seed, position, purpose), np.arange(count))


def test_known_values() -> None:
    """A change of these numbers changes what every seed samples."""
    got = uniform(stream(42, 7, 1), np.arange(4))
    assert [int(v) for v in got.view(np.uint32)] == KNOWN


KNOWN = [1028115682, 1060111605, 1063458146, 1064477984]


def test_every_part_of_the_key_matters() -> None:
    base = draws(count=1000)
    for other in (draws(seed=3), draws(position=3), draws(purpose=1), draws(seed=2, position=1),
                  draws(seed=1 + 2**32), draws(position=-2)):
        assert (base != other[:1000]).mean() > 0.999
    assert (base == draws(count=1000)).all()


def test_uniform_is_open_and_fine_near_zero() -> None:
    u = draws(count=1 << 20)
    assert u.min() > 0 and u.max() < 1
    assert u.min() < 2.0**-17
    assert len(np.unique(u[u < 2.0**-10])) == (u < 2.0**-10).sum()  # no ties where argmax decides


def test_uniform_passes_chi_square_and_moments() -> None:
    u = draws().astype(np.float64)
    counts = np.bincount((u * 1024).astype(int), minlength=1024)
    expected = COUNT / 1024
    chi = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi - 1023) < 4.5 * np.sqrt(2 * 1023)
    assert abs(u.mean() - 0.5) < 4.5 / np.sqrt(12 * COUNT)


@pytest.mark.parametrize("axis", ["token", "position", "seed", "purpose"])
def test_neighbouring_counters_are_uncorrelated(axis: str) -> None:
    n = 1 << 15
    if axis == "token":
        u = draws(count=n + 1)
    elif axis == "purpose":
        u = np.array([uniform(stream(5, 5, p), 5)[0] for p in range(2048)])
    else:
        steps = np.arange(n + 1)
        key = stream(steps, 5, 0) if axis == "seed" else stream(5, steps, 0)
        u = uniform(key, 5)
    a, b = u[:-1].astype(np.float64) - 0.5, u[1:].astype(np.float64) - 0.5
    assert abs((a * b).mean() * 12) < 4.5 / np.sqrt(len(a))


def test_one_key_bit_flips_half_of_the_output_bits() -> None:
    seeds = np.uint64(1) << np.arange(64, dtype=np.uint64)
    for keys in (stream(seeds, 9, 0), stream(9, (1 << np.arange(31)), 0)):
        base = stream(0, 9, 0) if len(keys) == 64 else stream(9, 0, 0)
        flipped = np.unpackbits((keys ^ base).view(np.uint8)).mean()
        assert 0.45 < flipped < 0.55


def test_gumbel_moments_and_quantiles() -> None:
    g = gumbel(stream(11, 0, 0), np.arange(COUNT)).astype(np.float64)
    assert abs(g.mean() - np.euler_gamma) < 4.5 * np.pi / np.sqrt(6 * COUNT)
    assert abs(g.var() / (np.pi**2 / 6) - 1) < 0.03
    for x in (-1.5, 0.0, 2.0, 6.0):
        p = np.exp(-np.exp(-x))
        assert abs((g < x).mean() - p) < 4.5 * np.sqrt(p * (1 - p) / COUNT)


def test_gumbel_max_draws_from_the_softmax() -> None:
    logits = np.array([0.0, 1.0, -1.0, 2.0, 0.5])
    n = 40000
    keys = stream(123, np.arange(n), 0)[:, None]
    picked = np.argmax(gumbel(keys, np.arange(5)[None]) + logits.astype(np.float32), axis=1)
    p = np.exp(logits) / np.exp(logits).sum()
    chi = ((np.bincount(picked, minlength=5) - n * p) ** 2 / (n * p)).sum()
    assert chi < 22  # 4 degrees of freedom: p = 0.0002


SOURCE = """
extern "C" void fill(uint64_t seed, int32_t position, uint32_t purpose, int32_t n, float* u,
                     float* g) {
  uint64_t key = di_noise_stream(seed, position, purpose);
  for (int32_t t = 0; t < n; ++t) {
    u[t] = di_noise_uniform(key, t);
    g[t] = di_noise_gumbel(key, t);
  }
}
"""


def test_c_twin_has_the_same_bits(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    (tmp_path / "t.cc").write_text(SOURCE)
    subprocess.run([compiler, "-std=c++17", "-O3", "-ffp-contract=off", "-shared", "-fPIC",
                    f"-I{MICRO}", "-include", "noise.h", "-o", str(tmp_path / "t.so"),
                    str(tmp_path / "t.cc")], check=True)
    fill = ctypes.CDLL(str(tmp_path / "t.so")).fill
    n = 1 << 16
    for seed, position, purpose in ((0, 0, 0), (2**64 - 1, 2**31 - 1, 7), (12345, -1, 2**32 - 1)):
        u, g = np.empty(n, np.float32), np.empty(n, np.float32)
        fill(ctypes.c_uint64(seed), ctypes.c_int32(position), ctypes.c_uint32(purpose),
             ctypes.c_int32(n), u.ctypes.data_as(ctypes.c_void_p),
             g.ctypes.data_as(ctypes.c_void_p))
        key = stream(seed, position, purpose)
        assert (u.view(np.uint32) == uniform(key, np.arange(n)).view(np.uint32)).all()
        assert (g.view(np.uint32) == gumbel(key, np.arange(n)).view(np.uint32)).all()
