"""Whose costs a share begins with: what is told, else what is saved, else one measurement."""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import replace

import pytest
import torch
from harness import geometry

from sparsekv.engine import costs
from sparsekv.engine import profile_key as profile_key_module
from sparsekv.engine.costs import cost_of
from sparsekv.engine.profile_key import profile_key
from sparsekv.errors import CapacityError, LayoutError
from sparsekv.roofline import PRESETS, Calibration, CalibrationPoint, CostModel, fit

GEOMETRY = geometry()
CUDA = torch.device("cuda", 0)
COST = CostModel(cpu_s_per_token=2e-6, h2d_s_per_token=3e-6)


def calibration(cost=COST, device=CUDA, **changes):
    key = profile_key(GEOMETRY, 4, batch_size=2, device=device, num_threads=2)
    return Calibration(
        key=replace(key, **changes), machine=PRESETS["h200"], cost=cost, residual=0, points=()
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "profile_folder", lambda: tmp_path / "profiles")
    monkeypatch.setattr(costs, "num_attending_threads", lambda: 2)
    monkeypatch.setattr(costs, "_unsaved", {})
    return tmp_path / "profiles"


@pytest.fixture
def measured(folder, monkeypatch):
    """Measurements that were made; what one gives, or raises, may be set by `measured.result`."""

    class Measured(list):
        result = calibration()

    calls = Measured()

    def calibrate(geometry_, **how):
        calls.append((geometry_, how))
        threading.Event().wait(0.01)  # others may ask meanwhile
        if isinstance(calls.result, BaseException):
            raise calls.result
        return calls.result

    monkeypatch.setattr(costs, "calibrate", calibrate)
    return calls


def ask(profile=None, device=CUDA, geometry_=GEOMETRY):
    return cost_of(geometry_, num_heads=4, batch_size=2, device=device, profile=profile)


def test_a_calibration_is_taken_as_it_is(measured):
    for device in (CUDA, torch.device("cpu")):
        assert ask(calibration(cpu="of another machine"), device) is COST
    assert measured == []


def test_a_calibration_for_other_rows_costs_in_proportion(measured):
    found = ask(calibration(batch_size=8))
    assert found.cpu_s_per_token == COST.cpu_s_per_token / 4
    assert found.h2d_s_per_token == COST.h2d_s_per_token / 4
    assert found.marginal_share == pytest.approx(COST.marginal_share)


@pytest.mark.parametrize("change", [{"geometry": "8 heads 2 kv 8 8"}, {"dtype": "float64"}])
def test_a_calibration_for_another_attention_is_refused(measured, change):
    with pytest.raises(LayoutError, match=r"a calibration for .*: this is 4 heads"):
        ask(calibration(**change))


@pytest.mark.parametrize("name", PRESETS)
def test_a_machine_is_asked_for_this_geometry_and_batch(measured, name):
    machine = PRESETS[name]
    latent = geometry(num_kv_heads=1, head_dim=576, head_dim_v=512, shared_kv=True)
    for geometry_, flops in ((GEOMETRY, 2 * 4 * 8 / 64), (latent, 2 * 4 * 1088 / (4 * 576))):
        found = ask(machine, torch.device("cpu"), geometry_)
        assert found == machine.cost_model(
            bytes_per_token=2 * geometry_.bytes_per_token_per_layer,
            flops_per_byte=flops,
            shared_kv=geometry_.shared_kv,
        )
    assert measured == []


def test_on_the_simulated_accelerator_nothing_is_measured(measured, folder):
    assert ask(device=torch.device("cpu")) is None
    assert measured == []
    assert not folder.exists()


def test_what_is_saved_is_used(measured, folder, caplog):
    calibration().save(folder)
    assert ask() == COST
    assert measured == []
    assert caplog.text == ""


@pytest.mark.parametrize("change", [{"batch_size": 3}, {"gpu": "another"}, {"dtype": "bfloat16"}])
def test_what_is_saved_for_another_is_not(measured, folder, change):
    calibration(replace(COST, cpu_overhead_s=1), **change).save(folder)
    assert ask() == COST
    assert measured == [(GEOMETRY, {"num_heads": 4, "batch_size": 2, "device": CUDA})]


def test_each_gpu_of_a_machine_has_its_own(measured, folder, monkeypatch):
    """Also where torch's current device is another one."""
    names = ("H200", "A100")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=CUDA: names[device.index])
    monkeypatch.setattr(profile_key_module, "driver_version", lambda: "580.1")
    of_second = calibration(replace(COST, cpu_overhead_s=1), torch.device("cuda", 1))
    assert (of_second.key.gpu, of_second.key.driver) == ("A100", "580.1")
    of_second.save(folder)
    calibration().save(folder)
    assert ask() == COST
    assert ask(device=torch.device("cuda", 1)) == of_second.cost
    assert measured == []


def test_a_measurement_is_made_and_saved_once_though_many_ask_at_once(measured, folder):
    barrier, found = threading.Barrier(6), []

    def work():
        barrier.wait()
        found.append(ask())

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == 6 * [COST]
    assert len(measured) == 1
    assert Calibration.load(folder, calibration().key) == calibration()


def _bad_fit():
    """What a clock that jumped leads to."""
    with pytest.raises(LayoutError) as caught:
        fit(
            CalibrationPoint(num_tokens=num_tokens, share=0.5, cpu_s=seconds, gpu_s=num_tokens)
            for num_tokens, seconds in ((1000, 2e-3), (4000, 1e-3))
        )
    return caught.value


ERRORS = {
    "memory": (CapacityError("8 GiB wanted"), "8 GiB wanted.*one half.*sparsekv calibrate"),
    "the GPU's memory": (torch.OutOfMemoryError("no room"), "no room.*one half.*free some"),
    "the clock": (_bad_fit(), "cpu_s: must grow.*one half.*sparsekv calibrate"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_what_cannot_be_measured_is_told_once_and_tried_once(measured, folder, caplog, kind):
    """And stops nobody: the share is one half then."""
    measured.result, told = ERRORS[kind]
    assert [ask() for _ in range(3)] == 3 * [None]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert len(measured) == 1
    assert not folder.exists()
    assert re.search(told, record.getMessage())


def test_another_model_is_measured_all_the_same(measured):
    measured.result = CapacityError("8 GiB wanted")
    assert ask() is None
    measured.result = calibration()
    assert ask(geometry_=geometry(head_dim=8)) == COST


def test_what_cannot_be_saved_is_used_and_told_once(measured, folder, caplog):
    folder.write_text("a file where the folder should be")
    assert [ask() for _ in range(3)] == 3 * [COST]
    told = [record.getMessage() for record in caplog.records if record.name.endswith("costs")]
    assert len(told) == 1
    assert str(folder) in told[0]
    assert "SPARSEKV_CACHE" in told[0]
    assert len(measured) == 1


def test_ctrl_c_in_a_measurement_leaves_the_next_one_free_to_try(measured, folder):
    measured.result = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        ask()
    assert not folder.exists()
    measured.result = calibration()
    assert ask() == COST
    assert len(measured) == 2
