"""Typed, frozen configuration; standard library only, so that `--help` and `recipes` are instant."""

from nanosprint.config.groups import AdamConfig, MuonConfig, ParamGroup, RowAdagradConfig, SoapConfig
from nanosprint.config.model import (
    AttnSpec,
    InitSpec,
    LayerSpec,
    MLPSpec,
    ModelConfig,
    NgramSpec,
    RotarySpec,
    Skip,
    SoftcapSpec,
)
from nanosprint.config.recipe import DataConfig, EvalConfig, Execution, Fp8HeadSpec, Precision, Recipe, TrainConfig
from nanosprint.config.schedule import LRSchedule, MomentumSchedule, Schedule, StepPlan, Windows, WindowSchedule

__all__ = [
    "AdamConfig",
    "AttnSpec",
    "DataConfig",
    "EvalConfig",
    "Execution",
    "Fp8HeadSpec",
    "InitSpec",
    "LRSchedule",
    "LayerSpec",
    "MLPSpec",
    "ModelConfig",
    "MomentumSchedule",
    "MuonConfig",
    "NgramSpec",
    "ParamGroup",
    "Precision",
    "Recipe",
    "RotarySpec",
    "RowAdagradConfig",
    "Schedule",
    "Skip",
    "SoapConfig",
    "SoftcapSpec",
    "StepPlan",
    "TrainConfig",
    "WindowSchedule",
    "Windows",
]
