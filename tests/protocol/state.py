"""The machine of the launch that runs."""

from .machine import Machine

machine: Machine
