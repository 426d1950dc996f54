"""The style sheet of a report: one column on a phone, two or three on a desktop, in light or dark mode."""

STYLE = """
:root{--page:#f6f7f9;--card:#fff;--text:#1c2230;--soft:#5b6577;--line:#e3e6ec;--grid:#eceef3;
--c1:#2563c9;--c2:#c2410c;--c3:#0f766e;--c4:#7c3aed;--bad:#b91c1c;--badbg:#fdecec;--warn:#92600a;--warnbg:#fdf4df;
--good:#15713b;--goodbg:#e5f5eb}
@media (prefers-color-scheme:dark){:root{--page:#12151c;--card:#1b202a;--text:#e6e9f0;--soft:#9aa4b8;--line:#2c3341;
--grid:#262c38;--c1:#74a9ff;--c2:#ff9a5c;--c3:#4fd1bd;--c4:#b79bff;--bad:#ff8585;--badbg:#3a1d22;--warn:#f0c265;
--warnbg:#352b16;--good:#6fdc9b;--goodbg:#16301f}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0;background:var(--page);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
header,main,footer{max-width:1240px;margin:0 auto;padding:0 20px}
header{padding-top:28px}
.title{display:flex;flex-wrap:wrap;gap:8px 14px;align-items:center}
h1{font-size:26px;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:19px;margin:36px 0 12px}
h3{font-size:15px;margin:0;font-weight:600}
.status{padding:2px 12px;border-radius:99px;font-weight:600;font-size:14px;background:var(--goodbg);color:var(--good)}
.status.failed,.status.silent{background:var(--badbg);color:var(--bad)}
.status.preempted{background:var(--warnbg);color:var(--warn)}
.facts{color:var(--soft);margin:6px 0;overflow-wrap:anywhere}
.progress{height:8px;border-radius:99px;background:var(--line);overflow:hidden;margin-top:14px}
.progress i{display:block;height:100%;background:var(--c1)}
nav{display:flex;flex-wrap:wrap;gap:4px 18px;margin-top:10px}
a{color:var(--c1);text-decoration:none}
a:hover,a:focus{text-decoration:underline}
.health{border-radius:10px;padding:10px 16px;margin:18px 0;background:var(--card);border:1px solid var(--line);
border-left:4px solid var(--bad)}
.health.ok{border-left-color:var(--good)}
.health p,.health ul{margin:0}
.health ul{padding-left:20px}
.health li{overflow-wrap:anywhere}
.health li.bad{color:var(--bad)}
.health li.file{color:var(--warn)}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(170px,1fr));gap:12px;margin:18px 0}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:10px}
.tile{padding:12px 14px}
dt{color:var(--soft);font-size:13px}
dd{margin:0;font-size:22px;font-weight:600;line-height:1.3;font-variant-numeric:tabular-nums}
dd.note{font-size:12px;font-weight:400;color:var(--soft)}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,380px),1fr));gap:14px}
.card{margin:0;padding:14px 16px;min-width:0}
.card+.plots,.plots+.card{margin-top:14px}
.full{grid-column:1/-1}
figcaption{display:flex;flex-wrap:wrap;gap:4px 16px;align-items:baseline;justify-content:space-between}
svg{display:block;width:100%;height:auto;margin-top:6px}
svg.wide{display:block}svg.narrow{display:none}
.about{color:var(--soft);font-size:13px;margin:4px 0 0}
.missing{color:var(--soft);border:1px dashed var(--line);border-radius:8px;padding:26px 14px;text-align:center;
margin:10px 0 0;overflow-wrap:anywhere}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:0;padding:0;font-size:13px;color:var(--soft)}
.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}.c5{color:var(--bad)}
.key,.split i{background:currentColor}.dot,.heat{fill:currentColor}
.key{display:inline-block;width:14px;height:4px;border-radius:2px;margin-right:6px;vertical-align:middle}
.scale{display:inline-flex;gap:6px;align-items:center;font-size:12px;color:var(--soft)}
.ramp{width:70px;height:10px;border-radius:3px;border:1px solid var(--line);display:inline-block;
background:linear-gradient(90deg,transparent,currentColor)}
.tick{font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}
.unit{font-size:12px;fill:var(--soft)}
.cell{font-size:12px;fill:var(--text);font-variant-numeric:tabular-nums}.cell.deep{fill:var(--card)}
.plate{fill:none;stroke:var(--line)}.grid{stroke:var(--grid)}.axis{stroke:var(--soft);stroke-opacity:.6}
.line{fill:none;stroke:currentColor;stroke-width:1.6;stroke-linejoin:round}
.faint.line{stroke-width:1;stroke-opacity:.35}.key.faint{opacity:.4}
.dash.line{stroke-dasharray:6 4}.key.dash{opacity:.5}
path.bad{fill:none;stroke:var(--bad);stroke-width:1.6}
.mark{fill:var(--bad)}
.band{fill:transparent;stroke:none}.band:hover{fill:var(--text);fill-opacity:.07}
.split{display:inline-flex;width:min(300px,40vw);height:12px;border-radius:3px;overflow:hidden;margin-right:10px;
vertical-align:middle;background:var(--line)}
.split i{display:block;height:100%}
.strip{display:inline-flex;gap:1px;vertical-align:middle;border:1px solid var(--line);border-radius:3px;overflow:hidden}
.strip i{display:block;width:16px;height:12px;background:var(--c2)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px;margin-top:6px}
th,td{text-align:left;padding:5px 14px 5px 0;border-top:1px solid var(--line);vertical-align:top}
tr:first-child>*{border-top:0}
th{color:var(--soft);font-weight:500;white-space:nowrap}
.num{font-variant-numeric:tabular-nums;white-space:nowrap}
.unhealthy td,.story .bad td{color:var(--bad)}
.story td:last-child,.facts-table td{overflow-wrap:anywhere}
.story td:last-child{min-width:220px}
pre{overflow-x:auto;font-size:13px;line-height:1.45}
.sample pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:8px 0 0}
summary{cursor:pointer;font-weight:600}
footer{color:var(--soft);font-size:13px;padding-top:26px;padding-bottom:40px;overflow-wrap:anywhere}
@media (max-width:760px){header,main,footer{padding-left:12px;padding-right:12px}
svg.wide{display:none}svg.narrow{display:block}
.tiles{grid-template-columns:1fr 1fr;gap:8px}.card{padding:12px 10px}dd{font-size:19px}
table{font-size:13px}th,td{padding-right:8px}.split{display:flex;width:110px}
#gates-now :is(td,th):nth-child(4){display:none}#gates-now td .num{font-size:12px}
.story tr:first-child{display:none}.story tr{display:block;padding:6px 0;border-top:1px solid var(--line)}
.story td{display:inline;border:0;padding:0 8px 0 0}.story td:last-child{display:block}
.story td:nth-child(2)::before{content:"step "}.story td:nth-child(3)::before{content:"rank "}}
@media print{body{background:none}.card,.tile{break-inside:avoid}nav{display:none}}
"""
