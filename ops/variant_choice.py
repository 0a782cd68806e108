"""Selection of the variant of the C++ kernels that is used on this machine."""

from __future__ import annotations

import logging
from typing import NamedTuple

from ops.build import BuildError, load
from ops.processor import Processor

log = logging.getLogger(__name__)


class VariantChoice(NamedTuple):
    """A variant and, if it replaces `amx`, why `amx` cannot be used."""

    variant: str
    fault: str = ""


def choose_variant(wanted: str, processor: Processor) -> VariantChoice:
    """Returns the variant `wanted`, or the processor's fastest if it is empty.

    `amx` is returned only if the system permits it and its self-check finds the bits of `tiles`.
    Otherwise the next fastest is returned, and the reason is logged.
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
