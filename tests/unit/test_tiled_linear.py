"""Tiled products: right, and every element one sum whatever else is computed beside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from valuspec.engine import tile_kernels
from valuspec.engine.bits import Slabs
from valuspec.engine.linear import PackedLinear, TiledLinear, packed
from valuspec.engine.tile_kernels import IN_TWOS, OUTPUTS, ROWS, WIDENED

pytestmark = [
    pytest.mark.usefixtures("threads_of_torch"),
    pytest.mark.skipif(not tile_kernels.supported(), reason="oneDNN is faster on this processor"),
]


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("size", [2, 34, 576, 1536])
def test_elements_are_close_to_the_exact_sums(size: int, with_bias: bool) -> None:
    weight, x = numbers(1, 3 * OUTPUTS, size), numbers(2, 2 * ROWS + 3, size)
    bias = numbers(3, 3 * OUTPUTS) if with_bias else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    found = TiledLinear(weight, bias)(x)
    magnitude = x.double().abs() @ weight.double().abs().T
    # fp32 sums, and half a unit in the last of eight bits.
    assert ((found.double() - exact).abs() <= 1e-6 * magnitude + exact.abs() / 250).all()


def test_the_sum_grows_in_order() -> None:
    """Only in that order do these cancel: elsewhere the one is lost beside 2^30."""
    weight = torch.ones(OUTPUTS, 6).bfloat16()
    cancelling = torch.tensor([[2.0**30, -(2.0**30), 1, 0, 0, 0]]).bfloat16()
    lost = torch.tensor([[2.0**30, 0, 1, 0, -(2.0**30), 0]]).bfloat16()
    linear = TiledLinear(weight)
    assert linear(cancelling).eq(1).all()
    assert linear(lost).eq(0).all()


COMPILE = """
from numba import cfunc, from_dtype, types
import numpy as np
from valuspec.engine import tile_kernels as kernels
pointer = types.CPointer(from_dtype(np.dtype(kernels.Product)))
print(cfunc(types.void(pointer))(kernels._multiply)._library.get_asm_str())
"""


@pytest.mark.parametrize(
    ("cpu", "features", "adds", "never"),
    [
        ("haswell", "+avx2,+fma", "vfmadd231ps", "zmm"),
        ("znver4", "+avx2,+fma,+avx512f,+avx512bw,+avx512vl,+avx512bf16", "vdpbf16ps", "vfmadd"),
    ],
)
def test_each_kind_compiles_to_its_instruction(
    cpu: str, features: str, adds: str, never: str, tmp_path: Path
) -> None:
    """Also for the processor that this one is not."""
    names = {"CPU_NAME": cpu, "CPU_FEATURES": features, "CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=os.environ | {f"NUMBA_{name}": value for name, value in names.items()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.count(adds) > 2 * sum(range(1, 7))  # two vectors of 1 to 6 rows, or more
    assert never not in result.stdout
    loops = [block for block in re.split(r"\n(?=\.L)", result.stdout) if block.count(adds) > 1]
    for loop in (block[: block.rindex(adds)] for block in loops):
        assert not re.search(r"vmov\S+\s+%[xyz]mm\d+,.*\(%rsp\)", loop), "sums leave the registers"


@pytest.mark.skipif(not IN_TWOS, reason="the other kind is what is tested here anyway")
def test_processors_without_the_instruction_have_tiles_too() -> None:
    """These tests and those of whole layers, compiled as for a processor with AVX2."""
    files = [__file__, str(Path(__file__).with_name("test_compiled_forward.py"))]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        env={**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert "skipped" not in result.stdout.replace("1 skipped", "")


@given(
    num_rows=st.integers(1, max(5 * ROWS, 2 * WIDENED + 5)),
    pick=st.integers(0, 10**6),
    num_threads=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_a_row_has_the_same_bits_in_any_company(num_rows: int, pick: int, num_threads: int) -> None:
    linear, x = TiledLinear(numbers(4, 5 * OUTPUTS, 96)), numbers(pick, num_rows, 96)
    torch.set_num_threads(num_threads)
    together = linear(x)
    row = pick % num_rows
    assert torch.equal(linear(x[row : row + 1])[0], together[row])


def test_leading_dimensions_stay() -> None:
    linear, x = TiledLinear(numbers(5, OUTPUTS, 64)), numbers(6, 1, 7, 64)
    assert torch.equal(linear(x), linear(x[0])[None])
    assert linear(x[:, :0]).shape == (1, 0, OUTPUTS)


def test_rows_that_do_not_lie_one_behind_the_other() -> None:
    linear, x = TiledLinear(numbers(7, OUTPUTS, 64)), numbers(8, 5, 128)
    assert torch.equal(linear(x[:, ::2]), linear(x[:, ::2].clone()))


@pytest.mark.parametrize(
    ("weight", "tiled"),
    [
        (torch.zeros(OUTPUTS, 64).bfloat16(), True),
        (torch.zeros(OUTPUTS + 1, 64).bfloat16(), False),
        (torch.zeros(OUTPUTS, 63).bfloat16(), False),
        (torch.zeros(0, 64).bfloat16(), False),
        (torch.zeros(OUTPUTS, 64), False),
        (torch.zeros(OUTPUTS, 64).half(), False),
    ],
)
def test_others_take_what_does_not_fit_tiles(weight: torch.Tensor, tiled: bool) -> None:
    assert isinstance(packed(weight), TiledLinear if tiled else PackedLinear)


def test_other_processors_take_library_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_kernels, "supported", lambda: False)
    assert isinstance(packed(torch.zeros(OUTPUTS, 64).bfloat16()), PackedLinear)


def test_arrays_of_a_slab_are_apart_aligned_and_zero() -> None:
    slabs = Slabs()
    arrays = [slabs.zeros((size, 3), np.int32) for size in (1, 1000, 7, 5_000_000, 12_000_000, 1)]
    for number, array in enumerate(arrays, start=1):
        assert array.ctypes.data % 64 == 0
        assert not array.any()
        array[:] = number
    assert [set(np.unique(array)) for array in arrays] == [{n} for n in range(1, 7)]


def test_slabs_are_shared_between_threads() -> None:
    slabs = Slabs()

    def take(number: int) -> np.ndarray:
        arrays = [slabs.zeros((16,), np.int32) for _ in range(500)]
        return np.array([array.ctypes.data for array in arrays])

    with ThreadPoolExecutor(8) as pool:
        addresses = np.concatenate(list(pool.map(take, range(8))))
    assert len(np.unique(addresses)) == len(addresses)
