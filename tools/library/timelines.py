"""Puts the timelines of run reports into one SVG that needs no style sheet.

    tessera stream models/demo --mesh tp=2 --out run
    python3 tools/library/timelines.py out.svg --ms 600 "two ranks=run/report.html"

The bars are those that `tessera stream` drew into report.html. This script selects streams, brings several reports to one
scale in time, cuts them to the first `--ms` milliseconds of the part that the report shows, and inlines the colours of
the page. It draws no bar of its own, and leaves out events that are too short to see.
"""

import argparse
import re
import xml.etree.ElementTree as ET
from html import escape, unescape
from pathlib import Path

LEFT, WIDTH, RIGHT, LANE = 150, 760, 14, 22
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue','Liberation Sans',Arial,sans-serif"
ROW = re.compile(r'<div class="(rank|lane|lane axis)">(?:<span>([^<]*)</span>)?(<svg.*?</svg>|[^<]*)', re.S)


def colours(page):
    """The variables of the page's light theme."""
    return dict(re.findall(r"--([a-z0-9]+):(#[0-9a-f]{3,6})", page.split("@media(prefers-color-scheme:dark)")[0]))


def milliseconds(text):
    number, unit = re.fullmatch(r"([\d .]+?) ?(ns|µs|ms|s)", text.replace("\u202f", " ").replace("\xa0", " ")).groups()
    return float(number.replace(" ", "")) * {"ns": 1e-6, "µs": 1e-3, "ms": 1, "s": 1e3}[unit]


def scale(axis):
    """Milliseconds per per cent of a lane's width, from the first and the last mark of the axis."""
    marks = [(float(text.get("x")[:-1]), milliseconds(text.text)) for text in ET.fromstring(axis).iter("text")]
    (x0, t0), (x1, t1) = marks[0], marks[-1]
    return (t1 - t0) / (x1 - x0)


def per_cent(node):
    for key in ("x", "x1"):
        if node.get(key, "").endswith("%"):
            return float(node.get(key)[:-1])
    return min((per_cent(child) for child in node), default=0.0)


def visible(node):
    """Whether a mark is wider than the least width, which the report gives to an event that is too short to see."""
    bars = list(node.iter("rect"))
    return not bars or any(bar.get("width") != "0.05%" for bar in bars)


def lane(svg, limit):
    """The content of a lane up to `limit` per cent of its width."""
    children = [child for child in ET.fromstring(svg) if per_cent(child) < limit and visible(child)]
    text = "".join(ET.tostring(child, encoding="unicode") for child in children)
    return re.sub(r"<title>.*?</title>", "", text)


def round_step(span):
    return next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if span / step <= 8)


class Drawing:
    def __init__(self, span_ms):
        self.span_ms, self.y, self.parts, self.legend = span_ms, 16, [], {}

    def text(self, x, y, words, style="s", anchor="start"):
        if words:
            self.parts.append(f'<text class="{style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>')

    def colour(self, number, style):
        """One colour per kind of work, also where the reports number the colours differently."""
        words = style[number]
        if words not in self.legend:
            free = [i for i in (number, *range(9)) if i not in self.legend.values()]
            self.legend[words] = free[0]
        return self.legend[words]

    def report(self, label, page, streams):
        rows = ROW.findall(page)
        per_unit = scale(next(body for kind, _, body in rows if kind == "lane axis"))
        limit = self.span_ms / per_unit
        width = WIDTH * 100 / limit
        style = {int(number): words for number, words in re.findall(r'<li><i class="b(\d)"></i>([^<]*)</li>', page)}
        name = None
        self.text(16, self.y + 14, label, "h")
        self.y += 26
        for kind, stream, body in rows:
            if kind == "rank":
                name = unescape(body)
                continue
            if kind == "lane axis" or (stream and streams and stream not in streams):
                continue
            content = lane(body, limit)
            if not content:
                continue
            if name:
                self.text(16, self.y + 12, name, "r")
                self.y += 18
                name = None
            self.text(30, self.y + 14, stream)
            content = re.sub(r'class="p(\d)', lambda found: f'class="p{self.colour(int(found[1]), style)}', content)
            names = "" if stream else ' class="names"'
            view = f'<svg x="{LEFT}" y="{self.y}" width="{WIDTH}" height="20">'
            self.parts.append(f'{view}<svg{names} width="{width:.0f}" height="20">{content}</svg></svg>')
            self.y += LANE
        self.y += 8

    def axis(self):
        step = round_step(self.span_ms)
        for mark in range(0, int(self.span_ms) + 1, step):
            x = LEFT + WIDTH * mark / self.span_ms
            self.parts.append(f'<line class="axis" x1="{x:g}" x2="{x:g}" y1="{self.y}" y2="{self.y + 4}"/>')
            anchor = "start" if mark == 0 else "end" if x > LEFT + WIDTH - 20 else "middle"
            self.text(x, self.y + 16, f"{mark:,} ms".replace(",", " "), anchor=anchor)
        self.y += 34

    def keys(self):
        x = 16
        for words, number in self.legend.items():
            self.parts.append(f'<rect class="p{number}" x="{x}" y="{self.y - 9}" width="11" height="11" rx="2.5"/>')
            self.text(x + 17, self.y, words)
            x += 38 + 7 * len(words)
        if any('"idle"' in part for part in self.parts):
            self.text(x, self.y, "thin or pale: the rank waits")
        self.y += 16

    def svg(self, page, title):
        colour = colours(page)
        bars = "".join(f".p{i}{{fill:{colour[f'p{i}']}}}" for i in range(9))
        style = (
            f"text{{font-family:{FONT};font-size:11px;fill:{colour['onbar']}}}.s,.names text{{fill:{colour['soft']};font-size:12px}}"
            f".h{{fill:{colour['ink']};font-size:14px;font-weight:600}}.r{{fill:{colour['ink']};font-size:12px;font-weight:600}}"
            f"{bars}.ground{{fill:{colour['ground']}}}.edge{{stroke:{colour['hair']}}}.axis{{stroke:{colour['faint']}}}"
            f"rect.none{{fill:none}}rect.idle{{opacity:.28}}rect.odd,g.odd{{opacity:.8}}.ink{{fill:{colour['ink']}}}"
        )
        width = LEFT + WIDTH + RIGHT
        frame = f'<rect x=".5" y=".5" width="{width - 1}" height="{self.y - 1}" rx="12" fill="#fff" stroke="#d9d5cb"/>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{self.y}" viewBox="0 0 {width} {self.y}" role="img">'
        return f"{head}\n<title>{escape(title)}</title>\n<style>{style}</style>\n{frame}\n" + "\n".join(self.parts) + "\n</svg>\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("reports", nargs="+", metavar="LABEL=REPORT")
    parser.add_argument("--ms", type=float, required=True, help="milliseconds to show")
    parser.add_argument("--streams", default="", help="streams to show, such as compute,decode [default: all]")
    arguments = parser.parse_args()
    drawing, page, labels = Drawing(arguments.ms), "", []
    for report in arguments.reports:
        label, path = report.rsplit("=", 1)
        page = Path(path).read_text()
        drawing.report(label, page, [name for name in arguments.streams.split(",") if name])
        labels.append(label)
    drawing.axis()
    drawing.keys()
    arguments.out.write_text(drawing.svg(page, "; ".join(labels)))


if __name__ == "__main__":
    main()
