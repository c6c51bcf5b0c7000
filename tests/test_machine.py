"""MachineProfile: costs by the lower of two limits, and machines that come out as they were found.

Shares of arXiv:2609.14507 and recorded results of the H200 host stand beside the presets.
"""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import machines, rates

from sparsekv.errors import LayoutError
from sparsekv.format import KVGeometry
from sparsekv.roofline import PRESETS, MachineProfile, flops_per_byte

ROOT = Path(__file__).parent.parent
RATES = [
    field.name
    for field in fields(MachineProfile)
    if field.name.endswith(("_gbs", "_tflops")) and field.name != "cpu_shared_kv_tflops"
]
COUNTS = ["ram_bytes", "vram_bytes", "num_threads"]
OVERHEADS = ["cpu_overhead_s", "gpu_overhead_s"]

# num_layers, num_heads, num_kv_heads, head_dim, head_dim_v, shared_kv
MODELS = {
    "deepseek-v2-lite": (27, 16, 1, 576, 512, True),
    "qwen3-30b-a3b": (48, 32, 4, 128, 128, False),
    "mixtral-8x7b": (32, 32, 8, 128, 128, False),
    "deepseek-v4-flash": (21, 64, 1, 512, 512, True),
}
"""Of DeepSeek-V4 the CSA layers: entries of 4 tokens."""


def cost_of(machine, model, batch_size):
    """The model's attention on the machine, in bfloat16."""
    num_layers, num_heads, num_kv_heads, head_dim, head_dim_v, shared_kv = MODELS[model]
    geometry = KVGeometry(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        shared_kv=shared_kv,
    )
    size = geometry.bytes_per_token_per_layer
    per_byte = flops_per_byte(
        num_heads=num_heads, head_dim=head_dim, head_dim_v=head_dim_v, bytes_per_token=size
    )
    return machine.cost_model(
        bytes_per_token=batch_size * size, flops_per_byte=per_byte, shared_kv=shared_kv
    )


def results(topic):
    """The newest file."""
    *_, path = sorted((ROOT / "benchmarks" / "results").glob(f"{topic}_h200-16core_*.json"))
    return json.loads(path.read_text(encoding="utf-8"))


def result(topic, value, **where):
    """One number of a recorded file: that of the one row with these fields."""
    rows = [row for row in results(topic)["rows"] if where.items() <= row.items()]
    assert len(rows) == 1
    return rows[0][value]


@given(machines(), st.floats(0.5, 500), st.booleans())
def test_attention_runs_at_the_lower_of_two_limits(machine, per_byte, shared_kv):
    rate = machine.attention_gbs(flops_per_byte=per_byte, shared_kv=shared_kv)
    tflops = machine.cpu_tflops
    if shared_kv and machine.cpu_shared_kv_tflops is not None:
        tflops = machine.cpu_shared_kv_tflops
    assert rate <= machine.cpu_read_gbs
    assert rate * per_byte <= 1e3 * tflops * (1 + 1e-12)
    assert rate == machine.cpu_read_gbs or rate * per_byte == pytest.approx(1e3 * tflops)


@given(machines(), st.integers(1, 2**30), st.floats(0.5, 500), st.booleans())
def test_costs_are_bytes_at_the_two_rates(machine, size, per_byte, shared_kv):
    cost = machine.cost_model(bytes_per_token=size, flops_per_byte=per_byte, shared_kv=shared_kv)
    cpu_gbs = machine.attention_gbs(flops_per_byte=per_byte, shared_kv=shared_kv)
    assert cost.cpu_s_per_token * cpu_gbs * 1e9 == pytest.approx(size)
    assert cost.h2d_s_per_token * machine.h2d_gbs * 1e9 == pytest.approx(size)
    assert cost.cpu_overhead_s == machine.cpu_overhead_s
    assert cost.gpu_overhead_s == machine.gpu_overhead_s


@given(machines(), rates, rates)
def test_more_products_a_byte_never_raise_the_share(machine, some, other):
    few, many = sorted((some, other))
    cost = [machine.cost_model(bytes_per_token=2048, flops_per_byte=x) for x in (few, many)]
    assert cost[0].marginal_share >= cost[1].marginal_share


@given(machines())
def test_a_profile_comes_back_from_its_json(machine):
    assert MachineProfile.from_json(json.loads(json.dumps(machine.to_json()))) == machine


@pytest.mark.parametrize(
    ("model", "per_byte"),
    [
        ("deepseek-v2-lite", 30.2),
        ("qwen3-30b-a3b", 8),
        ("mixtral-8x7b", 4),
        ("deepseek-v4-flash", 128),
    ],
)
def test_products_a_byte_of_the_models(model, per_byte):
    _, num_heads, num_kv_heads, head_dim, head_dim_v, shared_kv = MODELS[model]
    elements = head_dim if shared_kv else head_dim + head_dim_v
    found = flops_per_byte(
        num_heads=num_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        bytes_per_token=num_kv_heads * elements * 2,
    )
    assert found == pytest.approx(per_byte, abs=0.03)
    if not shared_kv:
        assert found == num_heads / num_kv_heads


def test_packed_entries_take_more_products_a_byte():
    packed = flops_per_byte(num_heads=64, head_dim=512, head_dim_v=512, bytes_per_token=584)
    assert packed == pytest.approx(128 * 1024 / 584)


@pytest.mark.parametrize(
    ("model", "on_a100", "on_v100"),
    [
        ("deepseek-v2-lite", 0.50, 0.661),
        ("qwen3-30b-a3b", 0.625, 0.765),
        ("mixtral-8x7b", 0.75, 0.854),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 16, 32])
def test_models_converge_to_the_shares_of_the_paper(model, on_a100, on_v100, batch_size):
    assert cost_of(PRESETS["a100"], model, batch_size).marginal_share == pytest.approx(on_a100)
    v100 = cost_of(PRESETS["v100"], model, batch_size).marginal_share
    assert v100 == pytest.approx(on_v100, abs=0.0005)


@pytest.mark.parametrize(
    ("model", "initial_share"), [("qwen3-30b-a3b", 493 / 2048), ("mixtral-8x7b", 0.75)]
)
def test_contexts_of_32k_on_the_a100_host_split_as_in_table_2(model, initial_share):
    """Initial shares as the table's bytes imply them, for the paper states none."""
    golden = json.loads((ROOT / "tests/golden/paper_tables.json").read_text(encoding="utf-8"))
    share = cost_of(PRESETS["a100"], model, 32).running_share(
        32768, initial_share=initial_share, initial_tokens=2048
    )
    assert share == pytest.approx(golden["models"][model]["table2"]["cpu_share"], abs=0.0005)


def test_times_of_the_paper_follow_from_its_hosts():
    # 80 % of 32K tokens, 16 sequences, one Qwen3 layer, streamed: 33.7 ms.
    cost = cost_of(PRESETS["a100"], "qwen3-30b-a3b", 16)
    assert cost.gpu_time(0.2, 32768) == pytest.approx(33.7e-3, rel=0.005)
    # 1024 tokens of 32 sequences written back: 1.5 to 5.3 ms on PCIe 4, 2.9 to 10.3 on PCIe 3.
    for preset, first, last in (("a100", 1.5, 5.3), ("v100", 2.9, 10.3)):
        rate = PRESETS[preset].d2h_gbs * 1e6
        assert 32 * 1024 * 1152 / rate == pytest.approx(first, abs=0.05)
        assert 32 * 1024 * 4096 / rate == pytest.approx(last, abs=0.05)


def test_the_gpu_is_the_only_difference_between_the_hosts_of_the_paper():
    a100, v100 = PRESETS["a100"].to_json(), PRESETS["v100"].to_json()
    assert {name for name in a100 if a100[name] != v100[name]} == {
        "name",
        "h2d_gbs",
        "d2h_gbs",
        "direct_read_gbs",
        "hbm_gbs",
    }


def test_the_h200_host_is_as_it_was_measured():
    h200 = PRESETS["h200"]
    threads = {"num_threads": h200.num_threads}
    together = {"what": "read and copy to GPU, together", **threads}
    for field, value in (("h2d_gbs", "h2d_gbs"), ("cpu_read_gbs", "read_gbs")):
        expected = result("ceilings", value, **together)
        assert getattr(h200, field) == pytest.approx(expected, rel=1e-3)
    for field, what in (("d2h_gbs", "copy, GPU to host"), ("hbm_gbs", "copy, inside the GPU")):
        assert getattr(h200, field) == pytest.approx(result("ceilings", "gbs", what=what), rel=1e-3)
    gathered = result("cpu_gather", "gbs", way="gather", piece_bytes=16384, **threads)
    assert h200.gather_gbs == pytest.approx(gathered, rel=1e-3)
    in_place = result(
        "gpu_attention", "gbs", kind="rate", shape="qwen3", place="host", pieces="rows"
    )
    assert h200.direct_read_gbs == pytest.approx(in_place, rel=1e-3)
    by_amx = result("cpu_attention", "gbs", kind="rate", shape="v4", way="amx", **threads)
    assert h200.cpu_tflops == pytest.approx(128 * by_amx / 1e3, rel=1e-3)
    assert h200.ram_bytes == results("ceilings")["machine"]["memory_bytes"]
    for engine in ("cpu", "gpu"):
        calibrated = result(
            "share_tracking", f"{engine}_overhead_us", kind="calibration", shape="qwen3"
        )
        assert getattr(h200, f"{engine}_overhead_s") == pytest.approx(calibrated / 1e6, abs=1e-6)


@pytest.mark.parametrize(
    ("shape", "model"), [("qwen3", "qwen3-30b-a3b"), ("mixtral", "mixtral-8x7b")]
)
@pytest.mark.parametrize("share", [0.65, 0.7, 0.75])
def test_steps_of_the_h200_host_take_what_was_measured(shape, model, share):
    where = {"kind": "decode", "shape": shape, "share": share, "size": "16 x 32K"}
    measured = result("decode_attention", "ms_per_layer", **where) / 1e3
    placed = result("decode_attention", "placed_share", **where)
    predicted = cost_of(PRESETS["h200"], model, 16).step_time(placed, 32768)
    assert predicted == pytest.approx(measured, rel=0.1)


def test_the_best_measured_share_of_the_h200_host_is_beside_the_predicted():
    for shape, model in (("qwen3", "qwen3-30b-a3b"), ("mixtral", "mixtral-8x7b")):
        rows = results("decode_attention")["rows"]
        sweep = [row for row in rows if row["part"] == "sweep" and row["shape"] == shape]
        best = min((row for row in sweep if "share" in row), key=lambda row: row["ms_per_layer"])
        predicted = cost_of(PRESETS["h200"], model, 16).optimal_share(32768)
        assert abs(predicted - best["placed_share"]) <= 0.06


def test_presets_cannot_be_changed_and_are_values():
    with pytest.raises(TypeError):
        PRESETS["mine"] = PRESETS["h200"]
    with pytest.raises(FrozenInstanceError):
        PRESETS["h200"].h2d_gbs = 1.0
    assert len({*PRESETS.values(), *map(replace, PRESETS.values())}) == 3
    assert all(MachineProfile.from_json(preset.to_json()) == preset for preset in PRESETS.values())


@pytest.mark.parametrize("value", [0, 0.0, -1.0, float("nan"), float("inf"), True, "1", 10**400])
@pytest.mark.parametrize("field", [*RATES, "cpu_shared_kv_tflops"])
def test_rates_that_nothing_has_are_refused(field, value):
    with pytest.raises(LayoutError, match=rf"^{field}=.*: must be a finite rate above 0.*; "):
        replace(PRESETS["h200"], **{field: value})


@pytest.mark.parametrize("field", RATES)
def test_only_the_rate_for_shared_values_may_be_left_open(field):
    with pytest.raises(LayoutError, match=f"^{field}=None"):
        replace(PRESETS["h200"], **{field: None})
    assert replace(PRESETS["a100"], cpu_shared_kv_tflops=None) != PRESETS["a100"]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
@pytest.mark.parametrize("field", COUNTS)
def test_sizes_that_are_none_are_refused(field, value):
    with pytest.raises(LayoutError, match=rf"^{field}=.*: must be a whole number of at least 1; "):
        replace(PRESETS["h200"], **{field: value})


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf"), None])
@pytest.mark.parametrize("field", OVERHEADS)
def test_overheads_that_are_no_seconds_are_refused(field, value):
    with pytest.raises(LayoutError, match=rf"^{field}=.*: must be a finite number of seconds"):
        replace(PRESETS["h200"], **{field: value})


@pytest.mark.parametrize("value", ["", None])
def test_a_machine_without_a_name_is_refused(value):
    with pytest.raises(LayoutError, match=r"^name=.*: must be some text; "):
        replace(PRESETS["h200"], name=value)


def test_what_is_neither_true_nor_false_is_refused():
    with pytest.raises(
        LayoutError, match=r"^reads_pinned_at_full_speed=1: must be True or False; "
    ):
        replace(PRESETS["h200"], reads_pinned_at_full_speed=1)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), None])
def test_products_a_byte_that_are_none_are_refused(value):
    with pytest.raises(LayoutError, match=r"^flops_per_byte="):
        PRESETS["h200"].cost_model(bytes_per_token=1, flops_per_byte=value)


@pytest.mark.parametrize("field", ["num_heads", "head_dim", "head_dim_v", "bytes_per_token"])
def test_counts_that_are_none_are_refused(field):
    counts = {"num_heads": 1, "head_dim": 1, "head_dim_v": 1, "bytes_per_token": 1}
    with pytest.raises(LayoutError, match=f"^{field}=0"):
        flops_per_byte(**{**counts, field: 0})


def test_bytes_that_are_no_bytes_are_refused():
    with pytest.raises(LayoutError, match=r"^bytes_per_token=0"):
        PRESETS["h200"].cost_model(bytes_per_token=0, flops_per_byte=1)


@pytest.mark.parametrize("data", [None, [], "h200", 3, {}, {1: 2}])
def test_what_is_no_profile_is_refused(data):
    with pytest.raises(LayoutError, match=r"^machine profile .*; write it with to_json"):
        MachineProfile.from_json(data)


@pytest.mark.parametrize("field", [field.name for field in fields(MachineProfile)])
def test_json_may_leave_out_only_what_has_a_default(field):
    data = PRESETS["h200"].to_json()
    del data[field]
    if field in ("cpu_shared_kv_tflops", "reads_pinned_at_full_speed", *OVERHEADS):
        assert isinstance(MachineProfile.from_json(data), MachineProfile)
    else:
        with pytest.raises(LayoutError, match=f"lacks .'{field}'. and has .. besides"):
            MachineProfile.from_json(data)


def test_json_with_an_unknown_field_is_refused():
    with pytest.raises(LayoutError, match=r"lacks \[\] and has \['speed'\]"):
        MachineProfile.from_json({**PRESETS["h200"].to_json(), "speed": 1})
