"""Optimizers for any PyTorch project: Muon and SOAP for hidden matrices, AdamW for everything else.

    from nanosprint.optim import AdamW, Muon, split_parameters

    split = split_parameters(model)
    print(split.explain())
    optimizers = [Muon(split.muon, lr=0.02), AdamW(split.adam, lr=3e-3)]

All are `torch.optim.Optimizer` subclasses: param groups, closures, state_dict, lr schedulers, torch.compile, DDP and
FSDP2. They need nothing else of this package. Each rule is also there as a function of tensors (`muon_`, `adamw_`,
`soap_`, in the modules `muon`, `adam` and `soap`).
"""

from nanosprint.optim.adam import AdamW
from nanosprint.optim.muon import Muon
from nanosprint.optim.soap import SOAP
from nanosprint.optim.split import ParameterSplit, split_parameters

__all__ = ["SOAP", "AdamW", "Muon", "ParameterSplit", "split_parameters"]
