"""Numbers as people read them, the same in pictures, tables and pages."""


def short(value: float) -> str:
    """1500 -> 1,500; 33000000 -> 33 M."""
    for unit, letter in ((1e9, "B"), (1e6, "M")):
        if abs(value) >= unit:
            return f"{value / unit:.3g} {letter}"
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.2g}"


def duration(seconds: float) -> str:
    """Seconds up to two minutes, minutes up to two hours, then hours."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def energy(joules: float) -> str:
    """950 J, 82.8 kJ, 1.20 MJ."""
    for unit, letter in ((1e6, "MJ"), (1e3, "kJ")):
        if joules >= unit:
            return f"{joules / unit:.3g} {letter}"
    return f"{joules:.0f} J"


def p_value(p: float | None) -> str:
    """Three decimals, or that it is smaller than these can say."""
    return "–" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"
