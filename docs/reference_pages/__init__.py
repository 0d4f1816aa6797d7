"""The generated parts of `docs/reference/`: commands, configs and operators.

A part of a page stands between `<!-- written by make pages: NAME -->` and `<!-- end -->`. `python
-m docs.reference_pages` writes it from the commands, the config classes and the operators as they
are now; the text around it is written by hand.
"""

from .parts import pages

__all__ = ["pages"]
