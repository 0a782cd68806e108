"""Selects the variant of the C++ kernels that is used on this machine."""

from __future__ import annotations

import logging
from typing import NamedTuple

from ops.build import BuildError
from ops.kernel_library import load
from ops.processor import Processor

log = logging.getLogger(__name__)


class VariantChoice(NamedTuple):
    """Variant of the kernels. fault: reason why `amx` cannot be used, if the variant replaces
    `amx`; otherwise empty."""

    variant: str
    fault: str = ""


def choose_variant(wanted: str, processor: Processor) -> VariantChoice:
    """Returns the variant `wanted`, or the processor's fastest if `wanted` is empty.

    Returns `amx` only if the system permits it and its self-check passes. Otherwise returns the
    next fastest variant and logs the reason.
    """
    runnable = processor.variants()
    variant = wanted or runnable[0]
    if variant != "amx":
        return VariantChoice(variant)
    try:
        load(variant)
    except BuildError as error:
        choice = VariantChoice(runnable[runnable.index(variant) + 1], str(error))
        log.warning("kernels of %s are used, because %s", *choice)
        return choice
    return VariantChoice(variant)
