"""Sizes that kernels round up to."""


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n: what a dimension of a Triton tile is padded to."""
    return 1 << max(n - 1, 0).bit_length()
