"""What is compiled for a GPU, or interpreted: functions of triton, and how they are launched."""


def power_of_two(size: int) -> int:
    """The least power of two from 16 on that holds `size`."""
    return max(16, 1 << (size - 1).bit_length())
