"""Style sheet of the HTML report, inline so that the file opens offline."""

CSS = """
:root{color-scheme:light dark;--line:#8884;--bar:#4a7fb5;--hot:#d1495b}
body{font:14px/1.45 system-ui,sans-serif;margin:1.2rem auto;max-width:1120px;padding:0 1rem}
header{border-left:.6rem solid var(--hot);padding:.2rem 1rem;margin-bottom:.8rem}
header.pass,header.improvement{border-color:#2f9e63}
header.warn,header.inconclusive{border-color:#d99a1c}
h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.1rem;margin:1.4rem 0 .4rem}
header p{margin:.2rem 0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem}dt{opacity:.7}dd{margin:0}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.25rem .5rem;border-bottom:1px solid var(--line)}
td{vertical-align:top;font-variant-numeric:tabular-nums;overflow-wrap:break-word}th{font-weight:600;opacity:.75}
.badge{border-radius:.6rem;padding:0 .5rem;color:#fff;background:#777;white-space:nowrap}
.badge.pass,.badge.improvement{background:#2f9e63}
.badge.warn,.badge.warning,.badge.inconclusive{background:#b07a10}
.badge.regression,.badge.critical,.badge.failed{background:var(--hot)}
figure{margin:.6rem 0}figcaption{opacity:.75}
svg{width:100%;max-width:880px;fill:var(--bar)}svg.interval{width:160px}
svg text{font-size:10px;fill:currentColor;opacity:.7}
svg .hot,svg .bad{fill:var(--hot)}svg .bad{opacity:.45}
svg .grid{stroke:var(--line);fill:none}
svg .range{opacity:.4}svg .limit{stroke:var(--hot);stroke-width:2}
footer{margin-top:2rem;opacity:.8}code{overflow-wrap:anywhere}
"""
