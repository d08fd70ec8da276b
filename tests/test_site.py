"""The site of `make docs` in Chromium, on a phone and on a small laptop."""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Opens pages one after the other in frames as wide as the screens, and lists what is cut or scrolls sideways.
# The next frame is added before the last one goes, so that the browser waits for all.
# The padding of code may stand out by 4 pixels.
LOOK = """<!doctype html><pre></pre><script>
const visits = VISITS, problems = [];
function look({ documentElement: root }, page, width) {
  if (root.scrollWidth > width) problems.push(`${page} at ${width}: the page is ${root.scrollWidth} wide`);
  for (const element of root.querySelectorAll("article *"))
    if (element.clientWidth && element.scrollWidth > element.clientWidth + 4 && !element.closest("pre"))
      problems.push(`${page} at ${width}: ${element.tagName} cuts ${element.textContent.slice(0, 80)}`);
  for (const verdict of root.querySelectorAll("td[data-name=verdict]"))
    if (width < 400 && verdict.offsetTop >= verdict.previousElementSibling.offsetTop)
      problems.push(`${page} at ${width}: the verdict is not first`);
}
function visit() {
  const [page, width] = visits.shift() ?? [];
  if (!page) return document.querySelector("pre").append(JSON.stringify(problems));
  const frame = document.createElement("iframe");
  Object.assign(frame, { src: page, style: `width: ${width}px; height: 800px; border: 0` });
  frame.onload = () => { look(frame.contentDocument, page, width); visit(); frame.remove(); };
  document.body.append(frame);
}
visit();
</script>
"""


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="needs Chromium")
@pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="needs the extra docs")
def test_no_page_is_cut_or_scrolls_sideways(tmp_path: Path) -> None:
    site = tmp_path / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    subprocess.run(build, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    # 404.html finds its styles on a server only.
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.stem != "404")
    assert len(pages) > 40
    [title] = re.findall("<title>(.*)</title>", (site / "index.html").read_text())
    assert metadata.version("shared-embeddings") in title

    visits = json.dumps([(page, width) for page in pages for width in (390, 1280)])
    (site / "look.html").write_text(LOOK.replace("VISITS", visits))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"]
    options += ["--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [BROWSER, *options, f"file://{site}/look.html"]
    looked = subprocess.run(command, capture_output=True, text=True, check=True)
    problems = re.search("<pre>(.+?)</pre>", looked.stdout)
    assert problems, looked.stderr
    assert json.loads(html.unescape(problems[1])) == []
