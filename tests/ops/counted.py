"""How often kernels are launched, in the interpreter too."""


class Counted:
    """A kernel that counts its launches, together with all others of this class."""

    launches = 0

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        Counted.launches += 1
        return self.kernel[grid]
