"""A kernel compiled for one kind of arguments, and launched with little more than a call into C.

Triton's own launch looks at each argument to find the compiled kernel that fits: 60 to 150 us for
the kernels here, several times what they run in a short step.
"""

from typing import Any

import torch
from torch import Tensor

from sparsekv.errors import LayoutError
from sparsekv.kernels.triton.memory import launching_on
from triton.runtime import JITFunction, driver

_ALIGNMENT = 16
"""Bytes: what Triton compiles a kernel for, or not, by the address of each tensor."""


class Launch:
    """One kernel and its arguments, some of which change between launches.

    What the kernel is compiled for stays as it is: numbers that it specializes on, the dtype of
    each tensor, whether its address is a multiple of 16 bytes, and which are None. The arguments
    are kept, and their tensors with them; not for several threads at a time.
    """

    def __init__(
        self, kernel: Any, arguments: list[Any], options: dict[str, Any], device: torch.device
    ) -> None:
        """Compile; nothing is launched.

        Args:
            kernel: the jitted function.
            arguments: all that are not `tl.constexpr`, in order.
            options: `tl.constexpr` arguments by name, and launch options.
            device: where it is launched.
        """
        self._kernel, self._options = kernel, options
        self._device, self._index = device, device.index
        self._places = {name: place for place, name in enumerate(kernel.arg_names)}
        self._kept = list(arguments)
        self._compiled_for = [_compiled_for(argument) for argument in arguments]
        constants = [options.get(name) for name in kernel.arg_names[len(arguments) :]]
        self._handed = [_handed(argument) for argument in arguments] + constants
        self._compiled: Any = None
        self._launch: Any = None
        if isinstance(kernel, JITFunction):  # else it is interpreted
            with launching_on(device):  # Triton keeps compiled kernels by device
                self._compiled = kernel.warmup(*arguments, grid=(1,), **options)

    def place_of_number(self, name: str) -> int:
        """Of an argument, for `put`.

        Raises:
            LayoutError: the kernel is compiled for one value of it.
        """
        place = self._places[name]
        if self._compiled is not None and not self._kernel.params[place].do_not_specialize:
            raise LayoutError(
                f"{name} changes between launches, but the kernel is compiled for its value: name "
                "it in do_not_specialize"
            )
        return place

    def place_of_tensor(self, name: str) -> int:
        """Of an argument, for `point`."""
        return self._places[name]

    def put(self, place: int, number: int) -> None:
        """Change a number."""
        self._kept[place] = self._handed[place] = number

    def point(self, place: int, tensor: Tensor | tuple[Tensor, ...]) -> None:
        """Change a tensor, or a tuple of them.

        Raises:
            LayoutError: the kernel is compiled for another dtype, alignment or number of tensors.
        """
        if (found := _compiled_for(tensor)) != self._compiled_for[place]:
            raise LayoutError(
                f"{self._kernel.arg_names[place]}: (dtype, is_aligned) {found}, compiled for "
                f"{self._compiled_for[place]}; prepare anew"
            )
        self._kept[place] = tensor
        self._handed[place] = _handed(tensor)

    def __call__(self, width: int, height: int = 1) -> None:
        """Launch so many programs, on the current stream of the device."""
        if self._compiled is None:
            self._kernel[(width, height)](*self._kept, **self._options)
            return
        active = driver.active
        if active.get_current_device() != self._index:
            with torch.cuda.device(self._index):
                self._run(active, width, height)
        else:
            self._run(active, width, height)

    def _run(self, active: Any, width: int, height: int) -> None:
        compiled = self._compiled
        if self._launch is None:
            with launching_on(self._device):
                self._launch = compiled.run  # loads it
        self._launch(
            width,
            height,
            1,
            active.get_current_stream(self._index),
            compiled.function,
            compiled.packed_metadata,
            None,  # of the hooks that follow
            None,
            None,
            *self._handed,
        )


def is_aligned(tensor: Tensor) -> bool:
    """Whether it begins where Triton compiles for aligned memory."""
    return tensor.data_ptr() % _ALIGNMENT == 0


def kind_of(tensor: Tensor) -> tuple[Any, ...]:
    """All that checks and compilation depend on, of a tensor whose address changes."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, is_aligned(tensor)


def _compiled_for(argument: Any) -> Any:
    """What a kernel is compiled for, of a tensor or a tuple of them."""
    if isinstance(argument, tuple):
        return tuple(_compiled_for(item) for item in argument)
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNMENT == 0
    return None


def _handed(argument: Any) -> Any:
    """Addresses instead of tensors: registered host memory has the same one on the GPU."""
    if isinstance(argument, tuple):
        return tuple(_handed(item) for item in argument)
    return argument.data_ptr() if isinstance(argument, Tensor) else argument
