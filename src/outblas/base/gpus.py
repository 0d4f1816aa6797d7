"""What torch says of a GPU of this machine."""

import torch


def arch_of(device: torch.device) -> int:
    """Returns the compute capability of a device as a number: 90 for sm_90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def sm_count(device: torch.device) -> int:
    """Returns the number of SMs of a device, as they are in a MIG instance too."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared_memory_limit(device: torch.device) -> int:
    """Returns the bytes of shared memory that a CTA may request."""
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
