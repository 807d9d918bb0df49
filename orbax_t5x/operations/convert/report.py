"""The report of a conversion, as data and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from orbax_t5x.text.report import Page, Report, Section
from orbax_t5x.text.wording import array_text, leaves_text, plain, size_text


@dataclasses.dataclass(frozen=True)
class ConvertReport(Report):
    """Report of `orbax_t5x.convert`; `print(report)` shows it as text.

    Attributes:
      destination: the directory.
      format: in which it was written.
      leaves: how many arrays are there.
      bytes: of their data, decoded.
      seconds: wall time.
      skipped: (shape, dtype name) of the leaves that were left out because the format cannot store them, by name.
      kept_bytes: how many of the bytes an earlier conversion had written before it was killed; they were verified and
        not written again.
      rules: the transforms that were applied, as text; none that the source's record has already.
    """

    destination: str
    format: str
    leaves: int
    bytes: int
    seconds: float
    skipped: Mapping[str, tuple[tuple[int, ...], str]] = dataclasses.field(default_factory=dict)
    kept_bytes: int = 0
    rules: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        skipped = {name: array_text(dtype, shape) for name, (shape, dtype) in self.skipped.items()}
        return {**super().to_json(), "skipped": skipped}

    def page(self) -> Page:
        """Returns the contents for people."""
        title = f"{leaves_text(self.leaves)} ({size_text(self.bytes)}) in {self.destination}, in {self.seconds:.1f} s"
        kept = f"{size_text(self.kept_bytes)} of it was written already by a conversion that was killed"
        what = "safetensors files" if self.format == "safetensors" else "Orbax"
        names = [plain(f"{name}  {array_text(dtype, shape)}") for name, (shape, dtype) in self.skipped.items()]
        sections = [Section(f"left out, because {what} cannot store it", names=names)] if names else []
        return Page("conversion", title=title, head=[kept] if self.kept_bytes else [], sections=sections)
