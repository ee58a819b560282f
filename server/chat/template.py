"""The operator's chat template: a file, or the template itself."""

from __future__ import annotations

from pathlib import Path

from jaxpaged.errors import ConfigError, reason


def read_chat_template(value: str) -> str:
    """The template.

    Args:
      value: the path of a file, or a template in one line: text with braces that names no file.

    Raises:
      ConfigError: it is neither, or it is no valid template.
    """
    text = value
    try:
        if Path(value).is_file():
            text = Path(value).read_text("utf-8-sig")
    except (OSError, ValueError) as e:  # not to be read, or too long for a name
        if "{" not in value:
            raise ConfigError(f"chat_template={value!r:.200} cannot be read: {reason(e)}") from e
    if "{" not in text:
        raise ConfigError(f"chat_template={value!r:.200} is no file, and no template: it has no braces")
    from server.chat.template_syntax import syntax_fault  # few commands have a template, and all would wait for jinja2

    fault = syntax_fault(text)
    if fault is not None:
        raise ConfigError(f"chat_template={value!r:.200} is no valid template: {fault}")
    return text
