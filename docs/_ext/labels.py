"""Labels for the buttons that open a group in the list of pages, which the theme leaves without a text."""

from pathlib import Path

_BUTTON = '<summary><span class="toctree-toggle"'
_LABELLED = '<summary aria-label="Pages of this group"><span class="toctree-toggle"'


def label(app, exception: Exception | None) -> None:
    for page in () if exception else Path(app.outdir).rglob("*.html"):
        text = page.read_text()
        if _BUTTON in text:
            page.write_text(text.replace(_BUTTON, _LABELLED))


def setup(app) -> dict[str, bool]:
    app.connect("build-finished", label)
    return {"parallel_read_safe": True}
