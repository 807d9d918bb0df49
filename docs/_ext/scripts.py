"""The blocks of the first script's page as one file, beside the page that links it."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "start" / "first-script.md"


def script(page: Path = PAGE) -> str:
    """Returns the Python blocks of a page, one after another."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))


def write(app, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        (Path(app.outdir) / "start" / "first_script.py").write_text(script())


def setup(app) -> dict[str, bool]:
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}
