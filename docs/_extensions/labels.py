"""The few texts of the site that are not in its pages, in both languages."""

from __future__ import annotations

from sphinx.config import Config

CHINESE = {
    "Answer": "答案",
    "Answer again": "重新作答",
    "Back to the picture": "回到静态图",
    "Check": "提交",
    "Light or dark": "浅色或深色",
    "No number in this answer.": "答案中没有数字。",
    "Not quite. The answer: ": "不对。答案是：",
    "Open as a page": "在单独页面打开",
    "Predict, then look": "先猜，再看",
    "Right: ": "正确：",
    "Starting Python in this browser, some seconds the first time": "正在浏览器中启动 Python，首次需要几秒",
    "This figure runs in a browser once a web server serves the site": "网站由 Web 服务器提供时，此图可交互",
    "Try it": "动手试试",
    "Your answer": "你的答案",
}


def label(config: Config, text: str) -> str:
    """The text in the language of the site."""
    return CHINESE[text] if (config.language or "").startswith("zh") else text
