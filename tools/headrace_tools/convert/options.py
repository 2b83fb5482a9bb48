"""What a conversion is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, fields

EXPERT_CODECS = ("auto", "int8", "bf16", "f32", "mxfp4", "int4", "nl4")
RVQ_CODECS = {"rvq3": "rvq4x64", "rvq3x256": "rvq3x256", "rvq2": "rvq2x256"}
"""--experts -> codec, for those that need codebooks."""
EXPERT_CHOICES = (*EXPERT_CODECS, *RVQ_CODECS)
EFFORTS = ("default", "high", "greedy")
TRUNK_CODECS = ("int8", "bf16", "f32", "nl4")


MIXED = "mixed"
"""`Options.experts` when every bank has its own codec."""


@dataclass(frozen=True)
class Allocation:
    """What --budget chose, and from what.

    budget: bytes. calibration: SHA-256 of the text. reference: SHA-256 of its manifest. codecs: of
    the MoE layers, ascending. table: for every layer what was measured.
    """

    budget: int
    calibration: str
    reference: str
    codecs: tuple[str, ...] = ()
    table: tuple[dict[str, object], ...] = ()

    def as_dict(self) -> dict[str, object]:
        """As JSON reads it back."""
        return {
            "budget": self.budget,
            "calibration": self.calibration,
            "reference": self.reference,
            "codecs": list(self.codecs),
            "table": list(self.table),
        }


@dataclass(frozen=True)
class Options:
    """The options that decide the container's bytes; a resumed conversion must repeat them."""

    experts: str = "auto"
    trunk: str = "int8"
    tokenizer: bool = True
    allow_nonfinite: bool = False
    allow_rounding: bool = False
    allocation: Allocation | None = None
    effort: str = "default"
    activations: int | None = None
    """Bits for products with mxfp4 experts; None: 22 for what a source holds itself, else 8."""
    feedback: str | None = None
    """SHA-256 of the text and of the reference's manifest."""

    def as_dict(self) -> dict[str, object]:
        out = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "allocation"}
        for name in ("feedback", "activations"):
            if out[name] is None:
                del out[name]
        if self.experts not in RVQ_CODECS and self.allocation is None:
            del out["effort"]  # nothing depends on it
        if self.allocation is not None:
            out |= {"experts": MIXED, "allocation": self.allocation.as_dict()}
        return out


def differing(old: dict[str, object], new: dict[str, object]) -> list[str]:
    """Human lines, one for each option that differs."""
    flags = {"experts": "--experts", "trunk": "--trunk", "allow_nonfinite": "--allow-nonfinite",
             "allow_rounding": "--allow-rounding", "effort": "--effort", "feedback": "--feedback",
             "activations": "--activations"}
    out = []
    for key in sorted(set(old) | set(new)):
        if old.get(key) != new.get(key):
            if key == "allocation":
                out += _other_allocation(old.get(key), new.get(key))
            elif key == "tokenizer":
                was, now = not old.get(key), not new.get(key)
                out.append(f"--no-tokenizer was {_shown(was)}, now {_shown(now)}")
            else:
                out.append(
                    f"{flags.get(key, key)} was {_shown(old.get(key))}, now {_shown(new.get(key))}"
                )
    return out


def _other_allocation(old: object, new: object) -> list[str]:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [f"--budget was {_shown(old is not None)}, now {_shown(new is not None)}"]
    out = []
    if old.get("budget") != new.get("budget"):
        out.append(f"--budget was {old.get('budget')} bytes, now {new.get('budget')}")
    for key, text in (("calibration", "text"), ("reference", "container")):
        if old.get(key) != new.get(key):
            out.append(f"--{key} is another {text}")
    return out or ["--budget chose otherwise"]


def _shown(value: object) -> str:
    return {True: "given", False: "not given", None: "absent"}.get(value, str(value))  # type: ignore[call-overload]
