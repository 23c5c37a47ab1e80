"""The state of a projection that trains in FP8: copies of its weight, and the scales of what it is applied to.

Each scale is looked up, so that its tensor is quantised where it is made; see `ops.fp8_projection`.

- The weight: that of its present values, renewed with the copies after every update. Exact.
- An RMS-normed input cannot exceed sqrt(D): a constant, under which typical entries are at 16 of 448.
- Any other input: that of the forward pass before, with headroom. Every call in training advances it, as it does the
  scale of an MLP's activations.
- Gradients: a constant, in units of what a token's loss is multiplied by. E5M2 spans 32 octaves, and gradients stay
  well within them: in the first 40 steps of a small `record` the largest entry of either projection's gradients was
  5e-4 to 2 units, that of 99 % of the rows above 4e-5, while 2^-10 reaches from 6e-8 (below that bits are lost) to 56.

What moves is buffers, so checkpoints keep it and warm-up puts it back.
"""

import torch
from torch import Tensor, nn

from nanosprint.model.fp8_weight import Fp8Weight
from nanosprint.ops.fp8 import scale_of
from nanosprint.ops.fp8_projection import fp8_projection
from nanosprint.ops.fp8_qkv import fp8_qkv
from nanosprint.ops.qk_norm_rotary import NormRotary

_FIRST = 2.0**-4  # the scale of a first input, whatever it is: 28 is clamped, 1e-3 loses bits


class Fp8Projection(nn.Module):
    """x (B, S, D) -> (B, S, E) by a product in FP8. Training only: a call advances the scale of its input.

    x may also be (B, S, H, K) with H K = D, heads as they come: their maxima are found where they are made.
    """

    input_scale: Tensor
    gradient_scale: Tensor

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        *,
        gradient_scale: float | None,
        input_scale: float | None = None,
        headroom: float = 1.0,
    ) -> None:
        """shape (E, D). Without `gradient_scale` only the forward product is in FP8; without `input_scale` it follows
        the largest magnitude of the call before, times `headroom`."""
        super().__init__()
        self.headroom = headroom if input_scale is None else None
        self.weight = Fp8Weight(shape, device, turned=gradient_scale is not None)
        self.register_buffer("input_scale", torch.tensor(input_scale or _FIRST, device=device))
        constant = torch.tensor(gradient_scale or 1.0, device=device)
        self.register_buffer("gradient_scale", constant, persistent=False)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """`weight` (E, D) is where the gradient goes; its values must be those of the last refresh."""
        y = fp8_projection(x.flatten(2), weight, self.weight.copies(), self.input_scale, self.gradient_scale)
        self._advance(x)
        return y

    def queries_keys_values(self, x: Tensor, weight: Tensor, how: NormRotary) -> tuple[Tensor, Tensor, Tensor]:
        """The same, and `qk_norm_rotary` behind it."""
        heads = fp8_qkv(x, weight, self.weight.copies(), self.input_scale, self.gradient_scale, how)
        self._advance(x)
        return heads

    def _advance(self, x: Tensor) -> None:
        if self.headroom is not None:
            with torch.no_grad():
                self.input_scale.copy_(scale_of(x, self.headroom))
