"""mdBook preprocessor: points links that leave docs/ at the repository.

mdBook calls it twice: with `supports RENDERER`, and with [context, book] as JSON on stdin.
"""

import json
import posixpath
import re
import sys

LINK = re.compile(r"(?<=\]\()([^)\s#]+)")


def rewrite(content, page, repository):
    """Returns the page's text; links to files outside of docs/ become links to the repository."""

    def target(match):
        link = match.group(1)
        if "://" in link or link.startswith("/"):
            return link
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
        if not path.startswith("docs/"):
            return f"{repository}/blob/main/{path}"
        # mdBook writes each README.md as index.html, and does not change the links to it.
        return re.sub(r"\bREADME\.md$", "index.md", link)

    return LINK.sub(target, content)


def visit(items, repository):
    for item in items:
        chapter = item.get("Chapter") if isinstance(item, dict) else None
        if chapter:
            if chapter["path"]:
                chapter["content"] = rewrite(chapter["content"], chapter["path"], repository)
            visit(chapter["sub_items"], repository)


def main():
    if sys.argv[1:2] == ["supports"]:
        sys.exit(0)
    context, book = json.load(sys.stdin)
    repository = context["config"]["output"]["html"]["git-repository-url"]
    # mdBook 0.5 renamed the list of chapters.
    visit(book.get("items", book.get("sections")), repository)
    json.dump(book, sys.stdout)


main()
