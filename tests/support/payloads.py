"""Text that would do something where a page took it for markup: run a script, load a picture from
elsewhere, or offer a link that runs one.

`FIRED` in a window, or a request to `CANARY`, means that some of it was taken for markup. Placed
where candidates, tasks, models, errors and configurations bring text of strangers.
"""

FIRED = "__xss"
CANARY = "canary.invalid"
ACT = f"(window.top||window).{FIRED}=1;window.{FIRED}=1"
PAYLOADS = (
    f"<script>{ACT}</script>",
    f'<img src="x" onerror="{ACT}">',
    f'"><svg onload="{ACT}"><img src="http://{CANARY}/tag.png">',
    f"[link](javascript:{ACT}) ![picture](http://{CANARY}/picture.png)",
    (
        f'<a href="javascript:{ACT}">anchor</a> <iframe'
        f' srcdoc="<script>parent.{FIRED}=1</script>"></iframe>'
    ),
    f"`` ` ``` </code></pre><script>{ACT}</script> ```",
    f"| a | b | </td></tr></table><details open ontoggle='{ACT}'>",
    f"--> ]]> </title></style></textarea><img src=http://{CANARY}/unquoted.png>",
    f"&lt;img src=x onerror={ACT}&gt; <b style='background:url(http://{CANARY}/style.png)'>",
)
HOSTILE = " ".join(PAYLOADS)
LINES = "\n\n".join(
    (
        "# title",
        *PAYLOADS,
        f"```html\n<script>{ACT}</script>\n```",
        f"[ref]: http://{CANARY}/ref 'x'",
        "<!-- ",
        "***",
    )
)
