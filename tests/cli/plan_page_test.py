#!/usr/bin/env python3
"""Looks at `gradgate plan -o plan.html` in headless Chromium: it draws, asks for nothing, and reads well on a laptop's screen.

A copy of the page gets a probe: it records errors and requests from the first line on, and writes at the end what a person would see
(texts with their boxes, curves, cells) into the document, which --dump-dom prints. Skipped (exit 77) where there is no Chromium.
With GRADGATE_PAGE_SHOTS=FOLDER the screenshots are kept there.
"""
import html
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SCREEN = (1366, 768)
CHROMIUM = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
EARLY = """<script>window.faults = [];
addEventListener("error", e => faults.push(String(e.message || e.target.tagName)), true);
addEventListener("unhandledrejection", e => faults.push(String(e.reason)));
addEventListener("securitypolicyviolation", e => faults.push("blocked by policy: " + e.blockedURI));
for (const level of ["error", "warn"]) console[level] = (...a) => faults.push(a.join(" "));</script>"""
LATE = """<script>{
const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
const list = (root, what) => [...root.querySelectorAll(what)];
const charts = {};
for (const svg of list(document, "svg")) charts[svg.id] = {
  box: box(svg), texts: list(svg, "text").map(t => ({text: t.textContent, box: box(t), size: parseFloat(getComputedStyle(t).fontSize), fill: getComputedStyle(t).fill})),
  curves: list(svg, "path.curve").length, dashed: list(svg, "path.dash").length, dots: list(svg, "circle").length, cells: list(svg, "rect.cell").length,
  bad: svg.outerHTML.match(/NaN|undefined|Infinity/g)};
const second = list(document, "nav button")[0];
const before = document.querySelector("#time-note").textContent;
second.click();
const out = document.createElement("pre");
out.id = "probe";
out.textContent = JSON.stringify({faults, charts, requests: performance.getEntriesByType("resource").map(e => e.name),
  width: document.documentElement.scrollWidth, height: document.documentElement.scrollHeight, before, after: document.querySelector("#time-note").textContent,
  page: getComputedStyle(document.body).backgroundColor, title: document.title, buttons: list(document, "nav button").map(b => b.textContent),
  table: list(document, "#points tr").map(r => r.innerText), notes: list(document, "#notes li").map(n => n.textContent)});
document.body.appendChild(out);
}</script>"""


def chromium():
    for name in CHROMIUM:
        if shutil.which(name):
            return name
    return None


def browse(browser, folder, page, arguments):
    return subprocess.run(
        [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-default-apps", "--host-resolver-rules=MAP * ~NOTFOUND",
         f"--user-data-dir={folder}/browser", f"--window-size={SCREEN[0]},{SCREEN[1]}", "--hide-scrollbars", *arguments, page.as_uri()],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=150, check=True).stdout


def overlaps(a, b):
    slack = 1.5  # pixels of a text's box that are empty
    return a[0] < b[2] - slack and b[0] < a[2] - slack and a[1] < b[3] - slack and b[1] < a[3] - slack


def luminance(colour):
    channels = [int(v) / 255 for v in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def check(name, probe, expect):
    faults = []

    def must(true, text):
        if not true:
            faults.append(f"{name}: {text}")

    must(probe["faults"] == [], f"errors: {probe['faults']}")
    must(probe["requests"] == [], f"requests: {probe['requests']}")
    must(probe["width"] <= SCREEN[0], f"wider than the screen: {probe['width']}")
    must(probe["height"] <= 1.5 * SCREEN[1], f"much taller than the screen: {probe['height']}")
    must(probe["buttons"] == [str(n) for n in expect["ranks"]], f"ranks: {probe['buttons']}")
    must(f"{expect['ranks'][-1]} ranks" in probe["before"] and f"{expect['ranks'][0]} ranks" in probe["after"], "the buttons do not select ranks")
    must(any("GB/s" in n or "Gbit/s" in n for n in probe["notes"]), f"assumptions are missing: {probe['notes']}")
    must(expect.get("note", "") in "".join(probe["notes"]), f"a text is not shown as it is: {probe['notes']}")
    must(len(probe["table"]) >= 2, f"the table of crossovers is empty: {probe['table']}")
    for chart, what in probe["charts"].items():
        texts = what["texts"]
        must(not what["bad"], f"{chart}: {what['bad']}")
        must(any(t["text"] == "message: gradient bytes M" for t in texts), f"{chart}: no title on the x axis")
        must(all(t["size"] >= 11 for t in texts), f"{chart}: small print")
        frame = what["box"]
        for i, t in enumerate(texts):
            b = t["box"]
            must(b[0] >= frame[0] - 2 and b[2] <= frame[2] + 2 and b[1] >= frame[1] - 3 and b[3] <= frame[3] + 3, f"{chart}: '{t['text']}' lies outside")
            for u in texts[i + 1:]:
                must(not overlaps(b, u["box"]), f"{chart}: '{t['text']}' and '{u['text']}' overlap")
            if chart != "map" or t["text"][-1:] != "x":  # the cells have a colour of their own
                must(contrast(t["fill"], expect["card"]) >= 3.5, f"{chart}: '{t['text']}' is faint, {t['fill']} on {expect['card']}")
    charts = probe["charts"]
    must(set(charts) == {"time", "map", "budget"}, f"charts: {sorted(charts)}")
    must(charts["time"]["curves"] == 1 + expect["curves"], f"time: {charts['time']['curves']} curves")
    must(any("ms" in t["text"] or "s" in t["text"] for t in charts["time"]["texts"]), "time: no unit on the y axis")
    for label in ["dense", *expect["labels"]]:
        must(any(t["text"] == label for t in charts["time"]["texts"]), f"time: no label {label}")
    must(charts["time"]["dots"] >= expect["dots"], f"time: {charts['time']['dots']} crossovers")
    must(charts["budget"]["dashed"] >= 1, "budget: codec times are missing")
    must(charts["map"]["cells"] == 13 * len(expect["ranks"]), f"map: {charts['map']['cells']} cells")
    must(any(re.fullmatch(r"[0-9.]+x", t["text"]) for t in charts["map"]["texts"]), "map: no speed-ups")
    return faults


CASES = {
    "default": (["--link", "tcp-10", "--ranks", "8..1024", "--bytes", "1MB..1GB", "--encode-rate", "3GB/s", "--decode-rate", "6GB/s", "--codec-fixed", "2ms"],
                {"ranks": [8, 16, 32, 64, 128, 256, 512, 1024], "curves": 2, "labels": ["bf16", "int8"], "dots": 1}),
    "nodes": (["--link", "tcp-10:effective", "--ranks-per-node", "8", "--ranks", "16,32,64", "--bytes", "64kB..256MB", "-c", "int8,chunk-topk:8/1024", "--encode-rate", "5GB/s"],
              {"ranks": [16, 32, 64], "curves": 6, "labels": ["int8 hierarchical", "chunk-topk:8/1024"], "dots": 1}),
    # One size and one number of ranks; texts from a file that look like markup.
    "profile": (["--link", "profile.json", "--ranks", "4", "--bytes", "4MB", "--encode-rate", "3GB/s"],
                {"ranks": [4], "curves": 2, "labels": ["bf16", "int8"], "dots": 0, "note": "</script><b>&amp;\u2028"}),
}


def write_profile(path, device):
    collective = {"alpha_s": 2e-5, "beta_bytes_per_s": 5e8, "confidence": 0.99, "pieces": [], "errors": []}
    path.write_text(json.dumps({
        "format": "gradgate-profile", "version": 1, "codecs": [],
        "key": {"device": device, "backend": "thread", "world_size": 4, "ranks_per_node": 4, "version": "0", "topology": "one node"},
        "collectives": dict.fromkeys(["all_reduce", "all_gather", "all_to_all"], collective)}))


def main(program):
    browser = chromium()
    if browser is None:
        print("skipped: no Chromium (Debian: chromium)")
        return 77
    program = str(pathlib.Path(program).resolve())
    faults = []
    keep = os.environ.get("GRADGATE_PAGE_SHOTS")
    with tempfile.TemporaryDirectory(prefix="gradgate_page_") as scratch:
        folder = pathlib.Path(scratch)
        for case, (arguments, expect) in CASES.items():
            page = folder / f"{case}.html"
            write_profile(folder / "profile.json", expect.get("note", "a machine"))
            subprocess.run([program, "plan", *arguments, "-o", str(page)], check=True, stdout=subprocess.DEVNULL, timeout=60, cwd=folder)
            text = page.read_text(encoding="utf-8")
            addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+[^\s\"'`]*", text)) - {"http://www.w3.org/2000/svg"}
            if addresses or re.search(r"\b(?:src|href)\s*=", text) or "default-src 'none'" not in text:
                faults.append(f"{case}: the page is not self-contained: {addresses}")
            probed = folder / f"{case}_probed.html"
            # The probe wants inline scripts, as the page's own policy allows them.
            probed.write_text(text.replace("<style>", EARLY + "<style>", 1).replace("</body>", LATE + "</body>", 1), encoding="utf-8")
            for scheme, setting in (("light", "1"), ("dark", "0")):
                dom = browse(browser, folder, probed, ["--dump-dom", f"--blink-settings=preferredColorScheme={setting}"])
                found = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.S)
                if not found:
                    faults.append(f"{case}, {scheme}: the page's script did not finish")
                    continue
                probe = json.loads(html.unescape(found.group(1)))
                if (luminance(probe["page"]) < 0.2) != (scheme == "dark"):
                    faults.append(f"{case}: background {probe['page']} in {scheme} mode")
                faults += check(f"{case}, {scheme}", probe, dict(expect, card="rgb(255, 255, 255)" if scheme == "light" else "rgb(27, 29, 34)"))
                if keep:
                    browse(browser, folder, page, [f"--blink-settings=preferredColorScheme={setting}", f"--screenshot={keep}/{case}-{scheme}.png"])
    print("\n".join(faults) if faults else f"{len(CASES)} pages, light and dark: drawn, no requests, nothing overlaps on {SCREEN[0]}x{SCREEN[1]}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
