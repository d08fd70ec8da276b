"""The look of the page: readable on a phone, in print, in light and in dark."""

CSS = """
:root{color-scheme:light dark;--ground:#fdfdfc;--raised:#f3f4f2;--ink:#1f2329;--soft:#5b636e;--line:#dcdfe3;
--accent:#0a5f94}
@media (prefers-color-scheme:dark){:root{--ground:#16181c;--raised:#1f2227;--ink:#e4e7eb;--soft:#a3abb6;
--line:#343941;--accent:#7cc0ee}}
*{box-sizing:border-box}
html{scroll-behavior:smooth;-webkit-text-size-adjust:100%}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
body{margin:0;background:var(--ground);color:var(--ink);
font:16px/1.6 system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;overflow-wrap:anywhere}
main,header,nav{max-width:62rem;margin:0 auto;padding:0 1.1rem}
header{padding-top:2.4rem}
main{padding-bottom:4rem}
h1{font-size:1.9rem;line-height:1.2;letter-spacing:-.01em;margin:0 0 1rem}
h2{font-size:1.4rem;line-height:1.25;margin:3.2rem 0 .8rem;padding-top:1.2rem;
border-top:1px solid var(--line)}
h3{font-size:1.08rem;margin:2rem 0 .4rem}
h2,h3{scroll-margin-top:.5rem}
p{margin:.6rem 0;max-width:44rem}
a{color:var(--accent);text-underline-offset:.15em}
nav>details{background:var(--raised);border-radius:.6rem;padding:.4rem 1rem;margin:1.4rem 0 0}
nav ol{list-style:none;margin:.3rem 0 .6rem;padding:0}
nav ol ol{margin:0;padding-left:1.1rem;font-size:.92rem}
nav li a{display:block;padding:.22rem 0;text-decoration:none}
nav li a:hover{text-decoration:underline}
.scroll{overflow-x:auto;margin:1rem 0;border:1px solid var(--line);border-radius:.5rem}
.scroll:focus-visible,summary:focus-visible,a:focus-visible{
outline:2px solid var(--accent);outline-offset:2px}
table{border-collapse:collapse;width:100%;font-size:.86rem;line-height:1.4;font-variant-numeric:tabular-nums;
overflow-wrap:normal}
th,td{padding:.45rem .7rem;text-align:left;vertical-align:top;min-width:4.5rem}
thead th{background:var(--raised);font-weight:600;vertical-align:bottom}
tbody th{font-weight:500}
tbody tr{border-top:1px solid var(--line)}
td.number,th.number{text-align:right;white-space:nowrap}
th.number{white-space:normal}
td.none{color:var(--soft);white-space:nowrap}
td.long{min-width:15rem}
figure{margin:1.4rem 0;display:inline-block;vertical-align:top;width:100%;max-width:30rem;padding-right:1rem}
figure img{display:block;width:100%;height:auto}
figcaption{color:var(--soft);font-size:.86rem;margin-top:.4rem}
main details{margin:.8rem 0;border:1px solid var(--line);border-radius:.5rem;padding:0 1rem}
main details[open]{padding-bottom:.4rem}
summary{cursor:pointer;padding:.55rem 0;font-weight:500}
pre{margin:.6rem 0 1rem;padding:.8rem 1rem;background:var(--raised);border-radius:.5rem;overflow-x:auto;
max-height:28rem;font:.82rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:normal}
li{margin:.2rem 0}
@media (min-width:48rem){nav>details>ol{columns:2;column-gap:2rem}
nav>details>ol>li{break-inside:avoid-column}}
@media (max-width:40rem){h1{font-size:1.55rem}h2{font-size:1.25rem}figure{padding-right:0}}
@media print{nav{display:none}.scroll,pre{overflow:visible;max-height:none}}
"""
