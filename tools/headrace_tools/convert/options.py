"""What a conversion is asked to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass

EXPERT_CODECS = ("int8", "bf16", "f32")
TRUNK_CODECS = ("int8", "bf16", "f32")


@dataclass(frozen=True)
class Options:
    """The options that decide the container's bytes; a resumed conversion must repeat them."""

    experts: str = "int8"
    trunk: str = "int8"
    tokenizer: bool = True
    allow_nonfinite: bool = False
    allow_rounding: bool = False

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def differing(old: dict[str, object], new: dict[str, object]) -> list[str]:
    """Human lines, one for each option that differs."""
    flags = {"experts": "--experts", "trunk": "--trunk", "allow_nonfinite": "--allow-nonfinite",
             "allow_rounding": "--allow-rounding"}
    out = []
    for key in sorted(set(old) | set(new)):
        if old.get(key) != new.get(key):
            if key == "tokenizer":
                was, now = not old.get(key), not new.get(key)
                out.append(f"--no-tokenizer was {_shown(was)}, now {_shown(now)}")
            else:
                out.append(
                    f"{flags.get(key, key)} was {_shown(old.get(key))}, now {_shown(new.get(key))}"
                )
    return out


def _shown(value: object) -> str:
    return {True: "given", False: "not given", None: "absent"}.get(value, str(value))  # type: ignore[call-overload]
