"""The machine of the launch that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .launch import Launch

machine: Launch
