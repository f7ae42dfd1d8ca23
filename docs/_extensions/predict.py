"""The directive `predict`: a question whose explanation is closed until the reader has answered.

    ```{predict}
    :answer: 27.3
    :tolerance: 0.2
    :unit: %
    The question.
    +++
    The explanation.
    ```

A number may differ by `tolerance`. With `:choices: a | b | c`, the answer is one of them. Without scripts,
the explanation is in a `details` element, which the reader opens.
"""

from __future__ import annotations

from html import escape
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from labels import label
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.writers.html5 import HTML5Translator


class predict(nodes.General, nodes.Element):  # noqa: N801
    """Question, choices, explanation: nodes of these three."""


class predict_question(nodes.General, nodes.Element):  # noqa: N801
    pass


class predict_choice(nodes.General, nodes.Element):  # noqa: N801
    pass


class predict_explanation(nodes.General, nodes.Element):  # noqa: N801
    pass


class Predict(SphinxDirective):
    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {
        "answer": directives.unchanged_required,
        "tolerance": float,
        "unit": directives.unchanged,
        "choices": directives.unchanged_required,
    }

    def run(self) -> list[nodes.Node]:
        lines = [line.rstrip() for line in self.content]
        if lines.count("+++") != 1 or not self.options.get("answer"):
            raise self.error("predict takes :answer:, a question, a line +++ and an explanation")
        choices = [choice.strip() for choice in self.options.get("choices", "").split("|") if choice.strip()]
        answer, middle = self.options["answer"].strip(), lines.index("+++")
        if choices and answer not in choices:
            raise self.error(f"the answer {answer!r} is none of the choices {choices}")
        if not choices:
            float(answer)
        node = predict(
            answer=str(choices.index(answer)) if choices else answer,
            shown=answer,
            tolerance=self.options.get("tolerance", abs(float(answer)) / 100 if not choices else 0),
            unit=self.options.get("unit", ""),
            number=self.env.new_serialno("predict"),
            choices=len(choices),
        )
        question, explanation = predict_question(), predict_explanation()
        self.state.nested_parse(self.content[:middle], self.content_offset, question)
        self.state.nested_parse(self.content[middle + 1 :], self.content_offset + middle + 1, explanation)
        node += question
        for at, choice in enumerate(choices):
            children, messages = self.parse_inline(choice, lineno=self.lineno)
            paragraph = nodes.paragraph(choice, "", *children)
            self.set_source_info(paragraph)
            paragraph += messages
            node += predict_choice("", paragraph, value=at, of=node["number"])
        node += explanation
        return [node]


def visit_predict(self: HTML5Translator, node: predict) -> None:
    texts = {name: label(self.config, text) for name, text in _TEXTS.items()}
    data = {"answer": node["answer"], "shown": node["shown"], "tolerance": node["tolerance"], **texts}
    data |= {"unit": node["unit"], "number": node["number"], "choices": node["choices"]}
    attributes = " ".join(f'data-{name}="{escape(str(value))}"' for name, value in data.items())
    title = label(self.config, "Predict, then look")
    self.body.append(f'<div class="predict" role="group" aria-label="{title}" {attributes}>\n')
    self.body.append(f'<p class="predict-title" aria-hidden="true">{title}</p>\n')


_TEXTS = {"right": "Right: ", "wrong": "Not quite. The answer: ", "none": "No number in this answer."}


def depart_predict(self: HTML5Translator, node: predict) -> None:
    self.body.append("</div>\n")


def depart_question(self: HTML5Translator, node: predict_question) -> None:
    """The form begins after the question: choices come next, the field and buttons before the explanation."""
    self.body.append('<form class="predict-form">\n')


def visit_choice(self: HTML5Translator, node: predict_choice) -> None:
    name = f"predict-{node['of']}"
    self.body.append(f'<label><input type="radio" name="{name}" value="{node["value"]}">')
    self.body.append(f"<span>{inner_html(self, node)}</span></label>\n")
    raise nodes.SkipNode


def inner_html(self: HTML5Translator, node: nodes.Element) -> str:
    """The children of a node's only paragraph as HTML."""
    start = len(self.body)
    for child in node[0].children:
        child.walkabout(self)
    html = "".join(self.body[start:])
    del self.body[start:]
    return html


def visit_explanation(self: HTML5Translator, node: predict_explanation) -> None:
    parent = node.parent
    if not parent["choices"]:
        self.body.append(
            f'<label class="predict-number">{label(self.config, "Your answer")} '
            '<input type="text" inputmode="decimal" autocomplete="off" size="9"> '
            f"{escape(parent['unit'])}</label>\n"
        )
    self.body.append(
        f'<button type="submit" hidden>{label(self.config, "Check")}</button>\n'
        f'<button type="reset" hidden>{label(self.config, "Answer again")}</button>\n</form>\n'
        '<p class="predict-verdict" role="status"></p>\n'
    )
    self.body.append(f"<details><summary>{label(self.config, 'Answer')}</summary>\n")


def depart_explanation(self: HTML5Translator, node: predict_explanation) -> None:
    self.body.append("</details>\n")


def ignore(self: HTML5Translator, node: nodes.Element) -> None:
    pass


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_node(predict, html=(visit_predict, depart_predict))
    app.add_node(predict_question, html=(ignore, depart_question))
    app.add_node(predict_choice, html=(visit_choice, None))
    app.add_node(predict_explanation, html=(visit_explanation, depart_explanation))
    app.add_directive("predict", Predict)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
