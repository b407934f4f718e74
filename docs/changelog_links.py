"""Let the links of CHANGELOG.md, which are those of the repository, lead to the pages of the site: a hook of mkdocs."""

from pathlib import Path
from typing import Any

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page; of that of changes the file itself, with links from where the pages are."""
    if page.file.src_uri != "changelog.md":
        return markdown
    text = CHANGELOG.read_text(encoding="utf-8").replace("](docs/pages/", "](")
    return text.replace("](lightning_shardckpt/FORMAT.md", "](format.md")
