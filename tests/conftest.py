"""Before any test module is imported."""

# Libraries import Triton too, and whether its own functions are interpreted is decided then.
import tests.ops.interpreter  # noqa: F401
