"""What attention to one layer of a cache costs on this machine: told, remembered, or measured."""

from __future__ import annotations

import functools
import logging
import threading
from dataclasses import replace

import torch

from sparsekv.engine.calibrate import calibrate
from sparsekv.engine.profile_key import check_geometry, profile_key
from sparsekv.errors import CapacityError, LayoutError
from sparsekv.format import KVGeometry
from sparsekv.kernels.dispatch import num_attending_threads
from sparsekv.roofline import Calibration, CostModel, MachineProfile, ProfileKey, profile_folder
from sparsekv.roofline.machine import flops_per_byte

logger = logging.getLogger(__name__)

_measuring = threading.Lock()
"""One measurement at a time: the others wait for it and find it saved."""
_unsaved: dict[ProfileKey, Calibration | None] = {}
"""What this process cannot find saved, so that it measures and warns once: what could not be kept,
and None for what could not be measured.
"""


def cost_of(
    geometry: KVGeometry,
    *,
    num_heads: int,
    batch_size: int,
    device: torch.device,
    profile: MachineProfile | Calibration | None = None,
) -> CostModel | None:
    """The costs of one layer, whole batch.

    Args:
        geometry: of the cache.
        num_heads: query heads.
        batch_size: sequences of a step.
        device: where the cache is; on the simulated accelerator nothing is measured.
        profile: what to take them from; None: a saved calibration, else a measurement, which is
            saved.
    Returns:
        None: they are not known, and not worth measuring or not to be measured now, which is
        warned of.
    """
    if isinstance(profile, Calibration):
        return _of_calibration(profile, geometry, num_heads, batch_size)
    if profile is not None:
        per_token = geometry.bytes_per_token_per_layer
        return profile.cost_model(
            bytes_per_token=batch_size * per_token,
            flops_per_byte=flops_per_byte(
                num_heads=num_heads,
                head_dim=geometry.head_dim,
                head_dim_v=geometry.value_dim,
                bytes_per_token=per_token,
            ),
            shared_kv=geometry.shared_kv,
        )
    found = _measured(geometry, num_heads, batch_size, device)
    return None if found is None else found.cost


def _of_calibration(
    given: Calibration, geometry: KVGeometry, num_heads: int, batch_size: int
) -> CostModel:
    """Its costs, in proportion to the sequences of a step."""
    check_geometry(given.key, geometry, num_heads)
    cost, factor = given.cost, batch_size / given.key.batch_size
    if factor == 1:
        return cost
    cpu, h2d = factor * cost.cpu_s_per_token, factor * cost.h2d_s_per_token
    return replace(cost, cpu_s_per_token=cpu, h2d_s_per_token=h2d)


def may_borrow(
    geometry: KVGeometry,
    *,
    num_heads: int,
    batch_size: int,
    device: torch.device,
    profile: MachineProfile | Calibration | None = None,
) -> bool:
    """Whether the CPU reads registered memory as fast as any other, so that it may borrow pinned
    segments in a step. Where it does not, one warning says so; True where nothing is known.

    Args:
        geometry: as for `cost_of`, as all others are.
    """
    known = profile or _measured(geometry, num_heads, batch_size, device)
    machine = known.machine if isinstance(known, Calibration) else known
    if machine is None or machine.reads_pinned_at_full_speed:
        return True
    _warn_of_slow_reading(machine.name)
    return False


def reads_in_place(
    geometry: KVGeometry,
    *,
    num_heads: int,
    batch_size: int,
    device: torch.device,
    profile: MachineProfile | Calibration | None = None,
) -> bool:
    """Whether the accelerator is to read the pinned region where it lies, rather than copies of it;
    True where nothing is known.

    Args:
        geometry: as for `cost_of`, as all others are.
    """
    known = profile or _measured(geometry, num_heads, batch_size, device)
    return known.reads_in_place if isinstance(known, Calibration) else True


@functools.cache
def _warn_of_slow_reading(name: str) -> None:
    logger.warning(
        "elastic: the CPU of %s reads registered memory slower than other memory, so it borrows "
        "none of it: each step keeps the share that is placed; leave elastic out",
        name,
    )


def _measured(
    geometry: KVGeometry, num_heads: int, batch_size: int, device: torch.device
) -> Calibration | None:
    """The saved one, or a new one, saved; None where there is nothing to measure, or it failed."""
    if device.type != "cuda":
        return None
    folder = profile_folder()
    num_threads = num_attending_threads()
    key = profile_key(
        geometry, num_heads, batch_size=batch_size, device=device, num_threads=num_threads
    )
    with _measuring:
        if key in _unsaved:
            return _unsaved[key]
        found = Calibration.load(folder, key)
        if found is not None:
            return found
        logger.info("measuring this machine for %s, once, to choose the CPU's share", key.geometry)
        try:
            found = calibrate(geometry, num_heads=num_heads, batch_size=batch_size, device=device)
            found.save(folder)
        except (CapacityError, torch.OutOfMemoryError) as error:
            _unsaved[key] = None
            logger.warning(
                "no memory to measure this machine (%s): the CPU's share stays at one half; free "
                "some and start again, or run `sparsekv calibrate` before the model is loaded",
                str(error),  # not the error, whose frames would be kept with the record
            )
        except LayoutError as error:
            _unsaved[key] = None
            logger.warning(
                "this machine could not be measured (%s): the CPU's share stays at one half; run "
                "`sparsekv calibrate` while nothing else runs, and start again",
                str(error),
            )
        except OSError as error:
            _unsaved[key] = found
            logger.warning(
                "the measurement of this machine cannot be kept in %s (%s): each process will "
                "measure anew; make the folder writable, or set SPARSEKV_CACHE to another",
                folder,
                str(error),
            )
    return found
