"""`torch._lazy.config`: switches of the recorder, most of which lazystep does not need."""

from __future__ import annotations

from ..names import Names

_names = Names(__name__)


@_names.does("", "always empty: ops that can't be recorded run on the host and are counted")
def get_force_fallback() -> str:
    """The ops that are forced to the host: none."""
    return ""


@_names.does(
    "`LAZYSTEP_TIER=reference`", "takes the empty text only: the reference runs every op on eager's kernel"
)
def set_force_fallback(configval: str) -> None:
    """Accepts the empty text. Any other value raises, since no op has to be kept from being recorded."""
    if configval:
        _names.refuse(
            f"set_force_fallback({configval!r})",
            'LAZYSTEP_TIER=reference, where eager\'s kernels run every op, or move tensors with .to("cpu")',
        )


@_names.does(
    "", "does nothing: a recording is always compared with the step before, and results are the same"
)
def set_reuse_ir(val: bool) -> None:
    """Does nothing: a recording is always compared with the one before, so a loop that repeats is reused."""
