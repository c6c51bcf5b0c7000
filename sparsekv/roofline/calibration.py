"""What was measured of a machine for a model, and the files that keep it until either changes.

How it is measured is left to others. A file that cannot be used is told of and measured again; it
is never a reason to stop.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsekv.checks import check_positive_int, is_finite
from sparsekv.errors import LayoutError
from sparsekv.roofline.cost_model import CostModel
from sparsekv.roofline.least_squares import CalibrationPoint
from sparsekv.roofline.machine import MachineProfile

logger = logging.getLogger(__name__)

VERSION = 2
"""Of the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What a calibration holds for: it is measured again when any of these changes.

    Raises:
        LayoutError: a name that is no text, or a count that is no whole number of at least 1.
    """

    cpu: str
    """The CPU's model, as the system calls it."""
    gpu: str
    """The GPU's name, or that there is none."""
    driver: str
    """Version of the GPU's driver."""
    geometry: str
    """Heads and dimensions of the model's attention."""
    dtype: str
    """Element type of keys and values."""
    batch_size: int
    """Sequences of a step."""
    num_threads: int
    """Threads that attend."""

    def __post_init__(self) -> None:
        for name in ("cpu", "gpu", "driver", "geometry", "dtype"):
            if not isinstance(getattr(self, name), str):
                raise LayoutError(f"{name}={getattr(self, name)!r}: must be text; give its name")
        check_positive_int("batch_size", self.batch_size, "give the sequences of a step")
        check_positive_int("num_threads", self.num_threads, "give the threads that attend")

    @property
    def file_name(self) -> str:
        """Words for people, and a hash of all fields: one file for each key."""
        words = re.sub(r"[^a-z0-9]+", "-", f"{self.gpu} {self.geometry}".lower()).strip("-")[:48]
        counts = f"b{self.batch_size}-t{self.num_threads}"
        return f"{words}-{counts}-{_hash(asdict(self))[:16]}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was found for a key, and what it was found from.

    Raises:
        LayoutError: a residual that is negative or not finite, or `reads_in_place` that is no bool.
    """

    key: ProfileKey
    """What it holds for."""
    machine: MachineProfile
    """The ceilings, measured beside."""
    cost: CostModel
    """A, B, C_cpu and C_gpu: `fit` of the points."""
    residual: float
    """Of that fit: root mean square of the relative errors of all times."""
    points: tuple[CalibrationPoint, ...]
    """The measured times."""
    reads_in_place: bool = True
    """Whether the accelerator was as fast at reading the pinned region where it lies as at
    attending to copies of it: how it is to be read, and was in these times.
    """

    def __post_init__(self) -> None:
        if not is_finite(self.residual) or self.residual < 0:
            raise LayoutError(
                f"residual={self.residual!r}: must be a finite number, 0 or more; take it from fit"
            )
        if not isinstance(self.reads_in_place, bool):
            raise LayoutError(f"reads_in_place={self.reads_in_place!r}: must be True or False")

    def save(self, folder: Path) -> Path:
        """Write the key's file, which is there whole or as it was before, whatever interrupts.

        Args:
            folder: made if missing; see `profile_folder`.
        Returns:
            The file.
        Raises:
            OSError: the folder or the file cannot be written.
        """
        content = asdict(self)
        whole = {"version": VERSION, "sha256": _hash(content), "calibration": content}
        path = folder / self.key.file_name
        # Named before it is made, so that an interrupt in its making finds it.
        temporary = folder / f"{path.name}.{secrets.token_hex(8)}.tmp"
        text = json.dumps(whole, indent=1)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="ascii")
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return path

    @classmethod
    def load(cls, folder: Path, key: ProfileKey) -> Calibration | None:
        """The calibration saved for this key, or None where there is none that can be used.

        A file that is broken, of another version or of another key is warned of; the next `save`
        replaces it.

        Args:
            folder: see `profile_folder`.
            key: the machine, model and step at hand.
        """
        path = folder / key.file_name
        if not path.exists():
            return None
        try:
            found = cls.read(path)
        except LayoutError as error:
            logger.warning("%s", error)
            return None
        if found.key == key:
            return found
        reason = f"it is for {found.key!r}"[:400]
        logger.warning("%s cannot be used (%s) and is left aside", path, reason)
        return None

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """What `save` wrote, on whatever machine.

        Raises:
            LayoutError: no such file, or one that is broken or of another version.
        """
        try:
            return _parse(path.read_bytes())
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"[:200]
            raise LayoutError(
                f"{path} cannot be used ({reason}) and is left aside: must be a file that "
                "`sparsekv calibrate` has saved; measure again"
            ) from error


def profile_folder() -> Path:
    """Where calibrations are kept: beside the native library, in $SPARSEKV_CACHE or the user's
    cache folder.
    """
    given = os.environ.get("SPARSEKV_CACHE")
    if given:
        return Path(given) / "profiles"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "sparsekv" / "profiles"


def _hash(content: object) -> str:
    """Of a JSON value, however it is spaced."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _parse(text: bytes) -> Calibration:
    """Raise ValueError, KeyError or TypeError, or RecursionError, if it is no whole calibration."""
    whole: Any = json.loads(text)
    if whole["version"] != VERSION:
        raise ValueError(f"version {whole['version']!r}, not {VERSION}")
    content = whole["calibration"]
    if whole["sha256"] != _hash(content):
        raise ValueError("its content is not what was written")
    return Calibration(
        key=ProfileKey(**content["key"]),
        machine=MachineProfile.from_json(content["machine"]),
        cost=CostModel(**content["cost"]),
        residual=content["residual"],
        points=tuple(CalibrationPoint(**point) for point in content["points"]),
        reads_in_place=content["reads_in_place"],
    )
