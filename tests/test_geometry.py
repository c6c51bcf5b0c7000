"""KVGeometry: bytes of a token, and refusal of what no model has."""

import dataclasses

import pytest
import torch
from hypothesis import given
from strategies import geometries

from sparsekv.errors import LayoutError
from sparsekv.format import KVGeometry

GOOD = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 128}


def test_value_width_defaults_to_key_width():
    assert KVGeometry(**GOOD).head_dim_v == 128
    assert KVGeometry(**GOOD) == KVGeometry(**GOOD, head_dim_v=128)
    assert hash(KVGeometry(**GOOD)) == hash(KVGeometry(**GOOD, head_dim_v=128))


@given(geometries())
def test_bytes_of_a_token_are_those_of_its_tensors(geometry):
    key = torch.empty(geometry.num_kv_heads, geometry.head_dim, dtype=geometry.dtype)
    value = torch.empty(geometry.num_kv_heads, geometry.value_dim, dtype=geometry.dtype)
    expected = key.nbytes + (0 if geometry.shared_kv else value.nbytes)
    assert geometry.bytes_per_token_per_layer == expected
    assert geometry.bytes_per_token == expected * geometry.num_layers


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "head_dim_v"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "4", float("nan"), (4,)])
def test_counts_are_whole_numbers(name, value):
    with pytest.raises(LayoutError, match=name) as caught:
        KVGeometry(**{**GOOD, name: value})
    assert repr(value) in str(caught.value)
    assert "must be" in str(caught.value)
    assert ";" in str(caught.value), "no remedy"
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim"])
def test_counts_are_given(name):
    with pytest.raises(LayoutError, match=name):
        KVGeometry(**{**GOOD, name: None})


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.bool, torch.complex64, "bfloat16", None, float]
)
def test_elements_are_floating(dtype):
    with pytest.raises(LayoutError, match=r"dtype=.*floating.*use torch"):
        KVGeometry(**GOOD, dtype=dtype)


def test_shared_values_are_no_wider_than_keys():
    KVGeometry(**GOOD, head_dim_v=128, shared_kv=True)
    with pytest.raises(LayoutError, match=r"head_dim_v=129.*head_dim=128.*lower"):
        KVGeometry(**GOOD, head_dim_v=129, shared_kv=True)


def test_a_geometry_is_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        KVGeometry(**GOOD).num_layers = 3
    with pytest.raises(TypeError):
        KVGeometry(2, 4, 128)
