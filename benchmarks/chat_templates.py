"""CPU time of rendering chat templates within their budget, and without.

    python -m benchmarks.chat_templates [--messages 8] [--rounds 40]

Both renderings run in turns in this process; printed are the medians and that of their ratios.
Without the budget is transformers' own sandbox.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.utils import chat_template_utils

from gateway.conversation import Conversation
from gateway.messages import Message
from gateway.text.chat_template import ChatTemplate
from gateway.text.template_budget import steps_for

TEMPLATES = Path(__file__).parents[1] / "tests/gateway/text/templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ROLES = ("user", "assistant")


def timed(render: Callable[[], str], repeats: int) -> float:
    """Microseconds of this thread's CPU a rendering takes."""
    begin = time.thread_time()
    for _ in range(repeats):
        render()
    return (time.thread_time() - begin) / repeats * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    messages = [
        Message(role=ROLES[i % 2], content="What is it about? " * 6) for i in range(args.messages)
    ]
    conversation = Conversation(messages)
    steps = steps_for(len(messages), conversation.num_chars)
    compile_template: Any = chat_template_utils._compile_jinja_template
    for path in sorted(TEMPLATES.glob("*.jinja")):
        ours = ChatTemplate(path.read_text(), SPECIAL)
        theirs = compile_template(path.read_text())

        def plain(theirs: Any = theirs) -> str:
            return theirs.render(
                messages=[message.for_template() for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **SPECIAL,
            )

        def counted(ours: ChatTemplate = ours) -> str:
            return ours.render(conversation, steps=steps)

        assert plain() == counted()
        pairs = [
            (timed(plain, args.repeats), timed(counted, args.repeats)) for _ in range(args.rounds)
        ]
        before, after = (statistics.median(each) for each in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"{path.stem:10} {before:8.1f} us  {after:8.1f} us  {ratio:.3f}")


if __name__ == "__main__":
    main()
